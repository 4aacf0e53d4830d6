"""Norms, gates and rotary embeddings: references are transformers to the bit, loops the references
to rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import GPTNeoXConfig, GptOssConfig, LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from flexgen_h2o.kernels.elementwise import (
    Rotation,
    add_weighted,
    clamped_gate,
    rms_norm,
    silu_gated,
)

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
    x = (3 * torch.randn(11, 24)).to(dtype)
    for once, norm in (
        (False, modeling_llama.LlamaRMSNorm),
        (True, modeling_gpt_oss.GptOssRMSNorm),
    ):
        theirs = norm(24, eps=1e-5).to(dtype)
        with torch.no_grad():
            theirs.weight.normal_(1, 0.3)
            assert torch.equal(
                rms_norm.torch(x, theirs.weight, 1e-5, torch.empty_like(x), once), theirs(x)
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(3, 37), (700, 512)])
def test_the_compiled_norm_is_the_reference(
    rows: int, width: int, once: bool, dtype: torch.dtype
) -> None:
    """Rows of x may be apart, and the result of one does not depend on the others."""
    apart = (3 * torch.randn(rows, width + 5)).to(dtype)
    x = apart[:, :width]
    weight = torch.randn(width).to(dtype)
    found = rms_norm(x, weight, 1e-5, torch.empty(rows, width, dtype=dtype), once)
    assert_rounded_alike(
        found, rms_norm.torch(x, weight, 1e-5, torch.empty(rows, width, dtype=dtype), once)
    )
    assert torch.equal(
        found[-1:], rms_norm(x[-1:], weight, 1e-5, torch.empty(1, width, dtype=dtype), once)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_normed_in_place_as_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.kernels.elementwise.NORM_CHUNK", 3)
    x = torch.randn(7, 3, 16).to(dtype)
    weight = torch.randn(16).to(dtype)
    want = rms_norm(x.view(21, 16), weight, 1e-6, torch.empty(21, 16, dtype=dtype)).view(7, 3, 16)
    for norm in (rms_norm, rms_norm.torch):
        found = x.clone()
        assert norm(found, weight, 1e-6, found).data_ptr() == found.data_ptr()
        assert_rounded_alike(found, want)
    with pytest.raises(ValueError, match="rms_norm: "):
        rms_norm(x.transpose(0, 1), weight, 1e-6, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "values", [lambda x: x, lambda x: 40 * x, torch.zeros_like], ids=["small", "large", "zero"]
)
def test_the_compiled_gate_is_the_reference(
    values: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    gate = values(torch.randn(300, 1003)).to(dtype)
    up = torch.randn(300, 1003).to(dtype)
    want = silu_gated.torch(gate.clone(), up)
    found = silu_gated(gate, up)
    assert found.data_ptr() == gate.data_ptr()
    assert_rounded_alike(found, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40], ids=["small", "large"])
def test_a_clamped_gate_equals_transformers(
    size: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.kernels.elementwise.NORM_CHUNK", 7)
    config = GptOssConfig(
        hidden_size=4, intermediate_size=1003, num_local_experts=1, swiglu_limit=5.0
    )
    theirs = modeling_gpt_oss.GptOssExperts(config)
    x = (size * torch.randn(300, 2006)).to(dtype)
    want = theirs._apply_gate(x)
    out = torch.empty(300, 1003, dtype=dtype)
    assert_rounded_alike(clamped_gate.torch(x, 1.702, 5.0, out), want)
    assert_rounded_alike(clamped_gate(x, 1.702, 5.0, torch.empty_like(out)), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 3), (9, 64), (300, 130)])
def test_the_compiled_weighted_sum_is_the_reference(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    """Several rows of one token are added in their order."""
    x = torch.randn(rows, width).to(dtype)
    out = torch.randn(5, width).to(dtype)
    tokens = torch.randint(0, 5, (rows,), dtype=torch.int32)
    weights = torch.rand(rows)
    want = out.clone()
    for i, token in enumerate(tokens.tolist()):
        want[token] += (x[i] * weights[i]).to(dtype)
    reference = out.clone()
    add_weighted.torch(x, tokens, weights, reference)
    add_weighted(x, tokens, weights, out)
    assert torch.equal(reference, want) and torch.allclose(
        out.float(), want.float(), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ValueError, match="add_weighted: "):
        add_weighted(x, tokens.long(), weights, out)


def test_a_card_adds_weighted_rows_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `index_add_` would add them in any."""
    monkeypatch.setattr(torch.Tensor, "index_add_", pytest.fail)
    x = torch.empty(4, 8, device="meta")
    tokens = torch.empty(4, dtype=torch.int32, device="meta")
    add_weighted(x, tokens, x[:, 0], torch.empty(3, 8, device="meta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    x = torch.ones(2, 8, dtype=dtype)
    x[0, 3] = float("nan")
    normed = rms_norm(x, x[1], 1e-5, torch.empty_like(x))
    assert normed[0].isnan().all() and not normed[1].isnan().any()
    gate = silu_gated(x.clone(), x)
    assert gate[0, 3].isnan() and gate.isnan().sum() == 1
    gate = clamped_gate(x, 1.7, 7.0, torch.empty(2, 4, dtype=dtype))
    assert gate[0, 1].isnan() and gate.isnan().sum() == 1


def test_what_does_not_go_together_is_refused() -> None:
    x = torch.zeros(3, 8)
    for weight, out in (
        (x[0], x[:2]),
        (x[0].bfloat16(), x),
        (x[0, :4], x),
        (x[0], x.t().contiguous().t()),
    ):
        with pytest.raises(ValueError, match="rms_norm: "):
            rms_norm(x, weight, 1e-5, out)
    for up in (x[:2], x.bfloat16(), x.t().contiguous().t()):
        with pytest.raises(ValueError, match="silu_gated: "):
            silu_gated(x, up)
    for out in (x, x[:2, :4], x[:, :4].bfloat16(), x[:, :4]):
        with pytest.raises(ValueError, match="clamped_gate: "):
            clamped_gate(x, 1.7, 7.0, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_rotation_equals_transformers(
    share: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.kernels.elementwise.ROTARY_CHUNK", 4)
    if share == 1:
        module = modeling_llama
        config = LlamaConfig(hidden_size=64, num_attention_heads=4)
        embedding = module.LlamaRotaryEmbedding(config)
    else:
        module = modeling_gpt_neox
        config = GPTNeoXConfig(hidden_size=64, num_attention_heads=4, rotary_pct=share)
        embedding = module.GPTNeoXRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 2, 3, 4, 77, 5000, 0, 3])  # two rows' prompts
    q = torch.randn(9, 4, 16).to(dtype)
    k = torch.randn(9, 3, 16).to(dtype)[:, ::2]
    cos, sin = embedding(q, positions[None])
    want = module.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    Rotation(embedding.inv_freq, embedding.attention_scaling).rotate((q, k), positions)
    for ours, theirs in zip((q, k), want, strict=True):
        assert torch.equal(ours, theirs[0].transpose(0, 1))


def test_the_next_layers_rotate_by_the_same_angles_and_the_next_step_by_others() -> None:
    frequencies = torch.tensor([0.7, 0.1])
    positions = torch.tensor([3, 9])
    rotation = Rotation(frequencies, 1.2)
    for where, dtype in (
        (positions, DTYPES[0]),
        (positions, DTYPES[0]),
        (positions + 1, DTYPES[0]),
        (positions, DTYPES[1]),
    ):
        x = torch.randn(2, 3, 4).to(dtype)
        want = x.clone()
        rotation.rotate((x,), where)
        Rotation(frequencies, 1.2).rotate((want,), where)
        assert torch.equal(x, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_rotated_by_its_rank_is_the_key_at_that_position(dtype: torch.dtype) -> None:
    rotation = Rotation(torch.tensor([0.7, 0.1]), 1.2)
    keys = torch.randn(2, 5, 6).to(dtype)
    ranks = torch.tensor([[3, 0, 1, 4, 2], [0, 1, 2, 2, 2]], dtype=torch.int32)
    want = keys.clone()
    for row, order in zip(want, ranks, strict=True):
        rotation.rotate((row.unsqueeze(1),), order)
    before = keys.clone()
    assert torch.equal(Rotation.rotated.torch(rotation, keys, ranks), want) and torch.equal(
        keys, before
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "slots", "width", "pairs"), [(2, 5, 6, 2), (600, 9, 128, 16)])
def test_the_compiled_rotation_is_the_reference(
    rows: int, slots: int, width: int, pairs: int, dtype: torch.dtype
) -> None:
    """To rounding: it rounds once. Slots without a rank are left alone."""
    rotation = Rotation(torch.rand(pairs), 1.1)
    keys = torch.randn(rows, slots, width).to(dtype)
    ranks = torch.stack([torch.randperm(slots) for _ in range(rows)]).int()
    ranks[0, -1] = 2**30
    found = rotation.rotated(keys, ranks)
    want = Rotation.rotated.torch(rotation, keys.float(), ranks)
    used = ranks < slots
    assert found.dtype == dtype
    assert torch.allclose(
        found.float()[used], want[used], atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 2**-8
    )


def test_keys_and_ranks_that_do_not_go_together() -> None:
    rotation = Rotation(torch.ones(2), 1.0)
    keys = torch.zeros(2, 5, 6)
    ranks = torch.zeros(2, 5).int()
    for bad in (
        (keys, ranks.long()),
        (keys, ranks[:, :4]),
        (keys.transpose(0, 1), ranks),
        (keys[..., :3], ranks),
    ):
        with pytest.raises(ValueError, match="rotated: "):
            rotation.rotated(*bad)
