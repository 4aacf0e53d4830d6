"""Attention over prompts and column sums: compiled, fused and tiled, against each other and the
definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from flexgen_h2o.kernels import prefill_attention as causal
from flexgen_h2o.kernels.prefill_attention import (
    TILE_BYTES,
    causal_attention,
    causal_attention_lse,
    column_sums,
)

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
# In bf16 the products are rounded; they are below 8 here, a rounding of them below 2**-6 / 2, a
# column has many.
SUMS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def prompts(
    batch: int, heads: int, group: int, n: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """q, k, v as the engine has them: heads side by side in a token."""
    return tuple(
        torch.randn(batch, n, h, d).to(dtype).transpose(1, 2) for h in (heads * group, heads, heads)
    )


# Sequences, kv-heads, query heads of each, tokens, width, and keys that a query sees: beyond a
# block of keys, beyond a unit of queries, widths with and without whole vectors.
SHAPES = [
    (1, 1, 1, 1, 8, None),
    (2, 2, 8, 65, 64, None),
    (2, 1, 3, 200, 80, None),
    (1, 2, 1, 700, 128, None),
    (2, 1, 20, 130, 7, None),
    (1, 3, 4, 40, 15, 1),
    (2, 2, 8, 65, 64, 64),
    (2, 2, 1, 700, 128, 65),
    (1, 1, 20, 130, 7, 30),
    (1, 2, 2, 23, 20, 40),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("version", ["loop", "torch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_definition(
    shape: tuple[Any, ...], version: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of prompts, and the last ones, some at a time if torch computes; with and without
    the log-sum-exp."""
    batch, heads, group, n, width, window = shape
    q, k, v = prompts(batch, heads, group, n, width, dtype)
    products = 0.3 * q.double() @ k.double().repeat_interleave(group, dim=1).transpose(2, 3)
    seen = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - (window or n))
    products.masked_fill_(~seen, float("-inf"))
    want = torch.softmax(products, dim=3) @ v.double().repeat_interleave(group, dim=1)
    if version != "loop":
        monkeypatch.setattr(causal, "_is_compiled", lambda q, k, v: False)
        monkeypatch.setattr(causal, "MASK_ROWS", 7)
        monkeypatch.setattr(causal, "QUERY_ROWS", 6)
    for rows in {1, max(1, n * 6 // 7), n}:
        last = slice(n - rows, None)
        out, lse = causal_attention_lse(q[:, :, last], k, v, 0.3, window)
        plain = causal_attention(q[:, :, last], k, v, 0.3, window)
        assert lse.dtype == torch.float32 and lse.shape == (batch, heads * group, rows)
        assert (lse - products.logsumexp(dim=3)[:, :, last]).abs().max() < TOLERANCE[dtype]
        for found in (out, plain):
            assert found.dtype == dtype and found.shape == q[:, :, last].shape
            assert (found - want[:, :, last]).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize("tile_bytes", [1, 3 * 2 * 23 * 64 * 2, TILE_BYTES])
def test_whole_prompts_in_bf16_with_amx_and_without(
    has_amx, tile_bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kv-head at a time, two heads of a sequence, whole sequences; and the loop where there is no
    AMX."""
    q, k, v = prompts(3, 3, 2, 23, 64, torch.bfloat16)
    monkeypatch.setattr(causal, "TILE_BYTES", tile_bytes)
    monkeypatch.setattr(causal, "cpu_has", lambda feature: has_amx or feature != "amx-bf16")
    out, lse = causal_attention_lse(q, k, v, 0.3)
    expected, sums = causal_attention_lse.torch(q.float(), k.float(), v.float(), 0.3)
    assert (
        out.dtype == torch.bfloat16
        and lse.dtype == torch.float32
        and out.transpose(1, 2).is_contiguous()
    )
    assert torch.allclose(out.float(), expected, atol=TOLERANCE[q.dtype], rtol=0)
    assert torch.allclose(lse, sums, atol=TOLERANCE[q.dtype], rtol=0)
    for row in range(3):
        one = slice(row, row + 1)
        assert torch.equal(causal_attention(q[one], k[one], v[one], 0.3), out[one]), (
            "a prompt by itself"
        )


def test_what_is_no_number_stays_none_and_with_its_row() -> None:
    """Nor does a later token reach an earlier one."""
    q, k, v = prompts(2, 1, 2, 80, 16, torch.float32)
    k[1, 0, 70, 3] = float("nan")
    v[1, 0, 75] = float("inf")
    out, lse = causal._attend_compiled(q, k, v, 0.2)
    assert (
        not out[0].isnan().any()
        and out[1, :, :70].isfinite().all()
        and lse[1, :, :70].isfinite().all()
    )
    assert out[1, :, 70:].isnan().all() and lse[1, :, 70:].isnan().all()


def test_what_does_not_go_together_is_refused() -> None:
    q, k, v = prompts(2, 2, 3, 9, 16, torch.float32)
    fewer = (k[:, :, :8], v[:, :, :8])
    narrow = (k[..., :8], v[..., :8])
    for keys, values in (fewer, (fewer[0], v), (k, v[:1]), (k.bfloat16(), v), narrow):
        with pytest.raises(ValueError, match="causal_attention: "):
            causal._attend_compiled(q, keys, values, 0.2)


@pytest.mark.parametrize(
    ("fused", "is_right"),
    [
        (lambda out, lse: (out, lse), True),
        (lambda renamed: renamed, False),
        (lambda out, lse: (out, lse / 0.693), False),  # in base 2
        (lambda out, lse: (out, lse.transpose(1, 2)), False),
    ],
)
def test_a_private_operation_is_used_if_it_is_right(fused: Any, is_right: bool) -> None:
    def operation(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> causal.Result:
        found: causal.Result = fused(*causal_attention_lse.torch(q, k, v, scale))
        return found

    for shared in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            assert causal._is_right(operation, dtype, shared) == is_right
            assert causal._fused(dtype, shared) is not None  # this torch has it


def scored_prompts(
    batch: int, heads: int, group: int, n: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """q, k, lse, scale."""
    q, k, _ = prompts(batch, heads, group, n, d, dtype)
    return q, k, causal_attention_lse(q, k, k, d**-0.5)[1], d**-0.5


def sums_by_definition(
    q: torch.Tensor, k: torch.Tensor, scale: float, first_row: int
) -> torch.Tensor:
    batch, heads, n, _ = q.shape
    products = (
        scale
        * q.double()
        @ k.double().repeat_interleave(heads // k.shape[1], dim=1).transpose(2, 3)
    )
    products.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
    return (
        torch.softmax(products, dim=3)[:, :, first_row:]
        .sum(dim=2)
        .view(batch, k.shape[1], -1, n)
        .sum(dim=2)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 300),
    st.sampled_from([1, 15, 20, 64, 80]),
    st.sampled_from(DTYPES),
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 40_000, TILE_BYTES]),
)
def test_column_sums_against_the_definition(
    batch, heads, group, n, d, dtype, skipped, is_compiled, has_all_queries, tile_bytes
) -> None:
    """In the compiled loop and in torch operations; each query gives one.

    The last queries count, or are the only ones. Pieces are one kv-head, a few, or all sequences.
    """
    q, k, lse, scale = scored_prompts(batch, heads, group, n, d, dtype)
    first_row = int(skipped * (n - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "TILE_BYTES", tile_bytes)
        if not is_compiled:
            patch.setattr(causal, "is_compiled", lambda _: False)
        few = slice(0 if has_all_queries else first_row, None)
        last = n - first_row if has_all_queries else None
        actual = column_sums(q[:, :, few], k, lse[:, :, few], scale, last)
    expected = sums_by_definition(q, k, scale, first_row)
    assert actual.shape == (batch, heads, n) and actual.dtype == torch.float32
    assert ((actual - expected).abs() / expected.clamp_min(1e-3)).max() < SUMS_TOLERANCE[dtype]
    total = torch.tensor(float(group * (n - first_row)))
    # A prompt of one token has one probability, whose product is rounded (see `column_sums`).
    close = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(actual.sum(dim=2), total, rtol=close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_does_not_grow_with_the_square(dtype: torch.dtype) -> None:
    """No allocation is larger than a tile or the tensors themselves; an n x n matrix of one head
    would be."""
    q, k, lse, scale = scored_prompts(8, 2, 2, 1900, 16, dtype)
    column_sums(q[:, :, :8], k[:, :, :8], lse[:, :, :8].contiguous(), scale)  # compile first
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        column_sums(q, k, lse, scale)
    taken = [event.cpu_memory_usage for event in profiled.events()]
    assert max(taken) <= TILE_BYTES < 1900 * 1900 * dtype.itemsize
    assert sum(size for size in taken if size > 2**20) < 3 * TILE_BYTES
