"""Operators of rows: every version against torch in fp64, and against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from flexgen_h2o.kernels.elementwise import (
    Rotation,
    add_weighted,
    clamped_gate,
    rms_norm,
    silu_gated,
)
from flexgen_h2o.kernels.hadamard import block_width, hadamard
from tests.eviction.reference import hadamard_matrix
from tests.extras import needs
from tests.unit.kernels.test_triton import interpret

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROTATION = Rotation(1.0 / 100 ** (torch.arange(4) / 4), 1.5)
# Operators and their arguments, made of x (rows, width); and roundings to the dtype.
CASES: dict[str, tuple[Any, Callable[[torch.Tensor], tuple[Any, ...]], int]] = {
    "silu": (silu_gated, lambda x: (x.clone(), x.flip(1)), 2),
    "clamped": (
        clamped_gate,
        lambda x: (4 * x.repeat(1, 2), 1.702, 5.0, torch.zeros_like(x)),
        5,
    ),
    "norm": (rms_norm, lambda x: (x, x[0] + 1, 1e-5, torch.zeros_like(x)), 2),
    "norm, rounded once": (rms_norm, lambda x: (x, x[0] + 1, 1e-5, torch.zeros_like(x), True), 1),
    "norm of rows apart": (
        rms_norm,
        lambda x: (torch.cat([x, x], 1)[:, : x.shape[1]], x[0], 1e-5, torch.zeros_like(x)),
        2,
    ),
    "norm of heads": (
        rms_norm,
        lambda x: (x[:, None], x[0], 1e-5, torch.zeros_like(x)[:, None]),
        2,
    ),
    "weighted": (
        add_weighted,
        lambda x: (x, torch.arange(len(x)).int() % 3, torch.rand(len(x)), x[:1].repeat(4, 1)),
        40,
    ),
    "rotation": (
        Rotation.rotate,
        lambda x: (ROTATION, (x[:, None].clone(), x[:, None] + 1), 7 * torch.arange(len(x))),
        4,
    ),
    "hadamard": (hadamard, lambda x: (x[:, None].clone(),), 1),
}


def tensors_of(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return tensors of floats among arguments, and in tuples of them."""
    found = []
    for one in arguments:
        if isinstance(one, tuple):
            found += tensors_of(one)
        elif isinstance(one, torch.Tensor) and one.is_floating_point():
            found.append(one)
    return found


def in_fp64(one: Any) -> Any:
    if isinstance(one, tuple):
        return tuple(in_fp64(part) for part in one)
    return one.double() if tensors_of((one,)) else one


@pytest.mark.parametrize("version", ["torch", "loop", pytest.param("kernel", marks=needs("gpu"))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (300, 100)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_version_computes_what_torch_does_in_fp64(
    name: str, shape: tuple[int, int], dtype: torch.dtype, version: str, monkeypatch: Any
) -> None:
    """Torch operations may work on some rows at a time. fp16 has no loop. What is no number stays
    none."""
    torch.manual_seed(0)
    operator, make, roundings = CASES[name]
    if version == "kernel":
        interpret(monkeypatch)
        shape = min(5, shape[0]), shape[1]  # the interpreter is slow
    x = torch.randn(shape).to(dtype)
    x[-1, 3] = torch.nan
    arguments = make(x)
    want = in_fp64(arguments)
    operator.torch(*want)
    for chunk in ("elementwise.NORM_CHUNK", "elementwise.ROTARY_CHUNK", "hadamard.ROTARY_CHUNK"):
        monkeypatch.setattr(f"flexgen_h2o.kernels.{chunk}", 4)
    (operator.torch if version == "torch" else operator)(*arguments)
    error = roundings * max(torch.finfo(dtype).eps, 1e-6)
    for one, other in zip(tensors_of(arguments), tensors_of(want), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=error, atol=error, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_row_does_not_depend_on_others(dtype: torch.dtype) -> None:
    x = torch.randn(300, 64).to(dtype)
    norm = rms_norm(x, x[1], 1e-5, torch.empty_like(x))
    assert torch.equal(norm[7:8], rms_norm(x[7:8], x[1], 1e-5, torch.empty_like(x[:1])))
    many = x.unsqueeze(1).clone()
    one = many[7:8].clone()
    hadamard(many)
    hadamard(one)
    assert torch.equal(one, many[7:8])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_norms_and_gates_are_those_of_transformers(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(30, 206)).to(dtype)
    llama = modeling_llama.LlamaRMSNorm(206, eps=1e-5).to(dtype)
    oss = modeling_gpt_oss.GptOssRMSNorm(206, eps=1e-5).to(dtype)
    config = GptOssConfig(
        hidden_size=4, intermediate_size=103, num_local_experts=1, swiglu_limit=5.0
    )
    with torch.no_grad():
        for once, theirs in ((False, llama), (True, oss)):
            theirs.weight.normal_(1, 0.3)
            found = rms_norm.torch(x, theirs.weight, 1e-5, torch.empty_like(x), once)
            assert torch.equal(found, theirs(x))
        want = modeling_gpt_oss.GptOssExperts(config)._apply_gate(x)
    found = clamped_gate.torch(x, 1.702, 5.0, torch.empty(30, 103, dtype=dtype))
    rounding = 2e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found, want, rtol=rounding, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("rows", "slots", "width", "pairs"), [(2, 5, 6, 2), (600, 9, 128, 16)])
def test_a_key_rotated_by_its_rank_is_the_key_at_that_position(
    rows: int, slots: int, width: int, pairs: int, dtype: torch.dtype
) -> None:
    """The loop rounds only once. Slots without a rank have no result."""
    rotation = Rotation(torch.rand(pairs), 1.1)
    keys = torch.randn(rows, slots, width).to(dtype)
    ranks = torch.stack([torch.randperm(slots) for _ in range(rows)]).int()
    want = keys.flatten(0, 1).unsqueeze(1).float().clone()
    rotation.rotate((want,), ranks.flatten())
    ranks[0, -1] = 2**30
    used = ranks < slots
    for found, roundings in (
        (rotation.rotated(keys, ranks), 1),
        (Rotation.rotated.torch(rotation, keys, ranks), 6),
    ):
        error = roundings * max(1e-6, torch.finfo(dtype).eps)
        torch.testing.assert_close(
            found.float()[used], want.view(keys.shape)[used], rtol=error, atol=error
        )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 3), (300, 130)])
def test_rows_of_a_token_are_added_in_their_order(
    rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(rows, width).to(dtype)
    out = torch.randn(5, width).to(dtype)
    tokens = torch.randint(0, 5, (rows,), dtype=torch.int32)
    weights = torch.rand(rows)
    want = out.clone()
    for i, token in enumerate(tokens.tolist()):
        want[token] += (x[i] * weights[i]).to(dtype)
    by_torch = out.clone()
    add_weighted.torch(x, tokens, weights, by_torch)
    add_weighted(x, tokens, weights, out)
    assert torch.equal(by_torch, want)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(torch.Tensor, "index_add_", pytest.fail)  # a card's has no order
    on_card = [t.to("meta") for t in (x, tokens, weights, out)]
    add_weighted(*on_card)


@pytest.mark.parametrize("width", [80, 12, 15, 256])
def test_transformed_heads(width: int) -> None:
    """The loop gives the bits of torch operations, and other heads stay."""
    assert block_width(width) == {80: 16, 12: 4, 15: 1}.get(width, width)
    given = torch.randn(300, 5, width)
    found = given.clone()
    want = given.clone()
    hadamard(found[:, 1:4])
    hadamard.torch(want[:, 1:4])
    assert torch.equal(found, want)
    want[:, 1:4] = (given[:, 1:4].double() @ hadamard_matrix(width)).float()
    torch.testing.assert_close(found, want, rtol=1e-6, atol=2e-6)


X = torch.zeros(3, 8)
TURNED = X.t().contiguous().t()
KEYS = torch.zeros(2, 5, 6)
RANKS = torch.zeros(2, 5, dtype=torch.int32)
TWO_PAIRS = Rotation(torch.ones(2), 1.0)
BAD = [
    *((rms_norm, (X, weight, 1e-5, out)) for weight, out in ((X[0], X[:2]), (X[0], TURNED))),
    (rms_norm, (X, X[0].bfloat16(), 1e-5, X)),
    (rms_norm, (KEYS.transpose(0, 1), KEYS[0, 0], 1e-5, KEYS.transpose(0, 1))),
    *((silu_gated, (X, up)) for up in (X[:2], TURNED)),
    *((clamped_gate, (X, 1.7, 7.0, out)) for out in (X, X[:, :4].bfloat16(), X[:, :4])),
    (add_weighted, (X, torch.zeros(3, dtype=torch.int64), X[:, 0], X)),
    (hadamard, (torch.zeros(3, 2, 128)[:, :, ::2],)),
    *(
        (Rotation.rotated, (TWO_PAIRS, keys, ranks))
        for keys, ranks in (
            (KEYS, RANKS.long()),
            (KEYS.transpose(0, 1), RANKS),
            (KEYS[..., :3], RANKS),
        )
    ),
]


@pytest.mark.parametrize(("operator", "arguments"), BAD)
def test_what_does_not_go_together_is_refused(operator: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=f"^{operator.__name__}: .* do not go together"):
        operator(*arguments)
