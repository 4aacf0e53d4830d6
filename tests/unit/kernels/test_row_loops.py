"""RMS norms and gates: the reference is transformers to the bit, the compiled loop is the reference to rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama import modeling_llama

from flexgen_h2o.kernels.elementwise import rms_norm, rms_norm_reference, silu_gated, silu_gated_reference

DTYPES = [torch.float32, torch.bfloat16]


def assert_rounded_alike(found: torch.Tensor, want: torch.Tensor) -> None:
    """In bf16 nearly all values are equal, and the others neighbours."""
    assert found.dtype == want.dtype
    if found.dtype == torch.float32:
        assert torch.allclose(found, want, rtol=2e-6, atol=1e-7)
    else:
        assert torch.allclose(found.float(), want.float(), rtol=2**-6, atol=1e-30)
        assert ((found - want).abs() > 1e-30).float().mean() < 0.01  # exp2 ends at 2**127


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_equals_transformers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.kernels.elementwise.NORM_CHUNK", 4)
    theirs = modeling_llama.LlamaRMSNorm(24, eps=1e-5).to(dtype)
    x = (3 * torch.randn(11, 24)).to(dtype)
    with torch.no_grad():
        theirs.weight.normal_(1, 0.3)
        assert torch.equal(rms_norm_reference(x, theirs.weight, 1e-5, torch.empty_like(x)), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(3, 37), (700, 512)])
def test_the_compiled_norm_is_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    """Rows of x may be apart, and the result of one does not depend on the others."""
    apart = (3 * torch.randn(rows, width + 5)).to(dtype)
    x, weight = apart[:, :width], torch.randn(width).to(dtype)
    found = rms_norm(x, weight, 1e-5, torch.empty(rows, width, dtype=dtype))
    assert_rounded_alike(found, rms_norm_reference(x, weight, 1e-5, torch.empty(rows, width, dtype=dtype)))
    assert torch.equal(found[-1:], rms_norm(x[-1:], weight, 1e-5, torch.empty(1, width, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", [lambda x: x, lambda x: 40 * x, torch.zeros_like], ids=["small", "large", "zero"])
def test_the_compiled_gate_is_the_reference(values: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    gate, up = values(torch.randn(300, 1003)).to(dtype), torch.randn(300, 1003).to(dtype)
    want = silu_gated_reference(gate.clone(), up)
    found = silu_gated(gate, up)
    assert found.data_ptr() == gate.data_ptr()
    assert_rounded_alike(found, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    x = torch.ones(2, 8, dtype=dtype)
    x[0, 3] = float("nan")
    normed = rms_norm(x, x[1], 1e-5, torch.empty_like(x))
    assert normed[0].isnan().all() and not normed[1].isnan().any()
    gate = silu_gated(x.clone(), x)
    assert gate[0, 3].isnan() and gate.isnan().sum() == 1


def test_what_does_not_go_together_is_refused() -> None:
    x = torch.zeros(3, 8)
    for weight, out in ((x[0], x[:2]), (x[0].bfloat16(), x), (x[0, :4], x), (x[0], x.t().contiguous().t())):
        with pytest.raises(ValueError, match="rms_norm: "):
            rms_norm(x, weight, 1e-5, out)
    for up in (x[:2], x.bfloat16(), x.t().contiguous().t()):
        with pytest.raises(ValueError, match="silu_gated: "):
            silu_gated(x, up)
