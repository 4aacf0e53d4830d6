"""Column sums against the definition in double precision, and their memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from flexgen_h2o.kernels import prefill_attention as module
from flexgen_h2o.kernels.prefill_attention import TILE_BYTES, causal_attention_lse, column_sums, column_sums_reference

# In bf16 the products are rounded; they are below 8 here, a rounding of them below 2**-6 / 2, a column has many.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
DTYPES = [torch.float32, torch.bfloat16]
BOTH = [column_sums, column_sums_reference]


def prompts(batch: int, heads: int, group: int, n: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, lse, scale; heads side by side in a token."""
    q, k = (torch.randn(batch, n, h, d).to(dtype).transpose(1, 2) for h in (heads * group, heads))
    scale = d**-0.5
    return q, k, causal_attention_lse(q, k, k, scale)[1], scale


def by_definition(q: torch.Tensor, k: torch.Tensor, scale: float, first_row: int) -> torch.Tensor:
    batch, heads, n, _ = q.shape
    products = scale * q.double() @ k.double().repeat_interleave(heads // k.shape[1], dim=1).transpose(2, 3)
    products.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
    return torch.softmax(products, dim=3)[:, :, first_row:].sum(dim=2).view(batch, k.shape[1], -1, n).sum(dim=2)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 300), st.sampled_from([1, 15, 20, 64, 80]),
    st.sampled_from(DTYPES), st.floats(0, 1), st.sampled_from(BOTH),
)  # fmt: skip
def test_against_the_definition(batch, heads, group, n, d, dtype, skipped, function) -> None:
    q, k, lse, scale = prompts(batch, heads, group, n, d, dtype)
    first_row = int(skipped * (n - 1))
    actual, expected = function(q, k, lse, scale, first_row), by_definition(q, k, scale, first_row)
    assert actual.shape == (batch, heads, n) and actual.dtype == torch.float32
    assert ((actual - expected).abs() / expected.clamp_min(1e-3)).max() < TOLERANCE[dtype]


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(
    ("n", "first_row", "dtype"), [(1, 0, torch.float32), (500, 0, torch.bfloat16), (500, 468, torch.float32)]
)
def test_every_query_gives_one(n: int, first_row: int, dtype: torch.dtype, function) -> None:
    q, k, lse, scale = prompts(2, 3, 2, n, 64, dtype)
    total = function(q, k, lse, scale, first_row).sum(dim=2)
    assert torch.allclose(total, torch.tensor(2.0 * (n - first_row)), rtol=1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(("first", "dtype"), [(1, torch.float32), (90, torch.bfloat16), (149, torch.float32)])
def test_the_first_and_the_last_rows_give_what_all_give(first: int, dtype: torch.dtype, function) -> None:
    q, k, lse, scale = prompts(3, 2, 2, 150, 20, dtype)
    whole = function(q, k, lse, scale)
    sums = function(q[:, :, first:], k, lse[:, :, first:], scale)
    sums[..., :first] += function(q[:, :, :first], k[:, :, :first], lse[:, :, :first], scale)
    assert torch.allclose(sums, whole, rtol=TOLERANCE[dtype], atol=1e-6)
    few = function(q[:, :, first:], k, lse[:, :, first:], scale, 148)
    assert torch.allclose(few[..., :148], function(q, k, lse, scale, max(148, first))[..., :148], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_are_prompts(dtype: torch.dtype) -> None:
    q, k, lse, scale = prompts(6, 2, 3, 150, 20, dtype)
    together = column_sums(q, k, lse, scale)
    for b in range(6):
        one = slice(b, b + 1)
        assert torch.allclose(column_sums(q[one], k[one], lse[one], scale), together[one], rtol=1e-5)


@pytest.mark.parametrize("limit", [1, 40_000, 130_000])
def test_pieces_of_any_size(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kv-head at a time, a few, a few sequences: the same sums."""
    q, k, lse, scale = prompts(5, 3, 2, 100, 16, torch.float32)
    expected = column_sums(q, k, lse, scale)
    monkeypatch.setattr(module, "TILE_BYTES", limit)
    assert torch.allclose(column_sums(q, k, lse, scale), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_does_not_grow_with_the_square(dtype: torch.dtype) -> None:
    """No allocation is larger than a tile or the tensors themselves; an n x n matrix of one head would be."""
    q, k, lse, scale = prompts(8, 2, 2, 1900, 16, dtype)
    column_sums(q[:, :, :8], k[:, :, :8], lse[:, :, :8].contiguous(), scale)  # compile first
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        column_sums(q, k, lse, scale)
    taken = [event.cpu_memory_usage for event in profiled.events()]
    assert max(taken) <= TILE_BYTES < 1900 * 1900 * dtype.itemsize
    assert sum(size for size in taken if size > 2**20) < 3 * TILE_BYTES
