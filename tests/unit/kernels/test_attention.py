"""Attention against plain loops over rows, heads and columns in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kernels.attention import causal_attention, slot_attention, sparse_slot_attention

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
# Shares whose product with a count of slots is the same in every precision.
SHARES = st.sampled_from([1 / 16, 1 / 4, 1 / 2, 3 / 4, 15 / 16])


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One query (d) over columns (n, d)."""
    return torch.softmax(scale * (k.double() @ q.double()), dim=0) @ v.double()


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 12), st.sampled_from([1, 8, 20]),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_causal(batch: int, kv_heads: int, group: int, n: int, d: int, dtype: torch.dtype) -> None:
    q = torch.randn(batch, kv_heads * group, n, d).to(dtype)
    k, v = (torch.randn(batch, kv_heads, n, d).to(dtype) for _ in range(2))
    actual = causal_attention(q, k, v, 0.3)
    for b in range(batch):
        for head in range(kv_heads * group):
            for i in range(n):
                keys, values = (t[b, head // group, : i + 1] for t in (k, v))
                expected = attend(q[b, head, i], keys, values, 0.3)
                assert (actual[b, head, i].double() - expected).abs().max() < TOLERANCE[dtype]


def slots_of(rows: int, group: int, slots: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    q = torch.randn(rows, group, 8).to(dtype)
    return q, torch.randn(rows, slots, 8).to(dtype), torch.randn(rows, slots, 8).to(dtype)


ragged = st.lists(st.integers(1, 11), min_size=1, max_size=5)


@given(ragged, st.integers(1, 4), st.sampled_from(DTYPES))
def test_slots(filled: list[int], group: int, dtype: torch.dtype) -> None:
    q, k, v = slots_of(len(filled), group, 12, dtype)
    for r, n in enumerate(filled):
        k[r, n:], v[r, n:] = 1e4, 1e4  # what a row has not filled must not be seen
    actual = slot_attention(q, k, v, torch.tensor(filled), max(filled), 0.4)
    assert actual.dtype == dtype and actual.shape == q.shape
    for r, n in enumerate(filled):
        for g in range(group):
            expected = attend(q[r, g], k[r, :n], v[r, :n], 0.4)
            assert (actual[r, g].double() - expected).abs().max() < TOLERANCE[dtype]


def test_slots_far_behind_the_longest_row_are_not_even_read() -> None:
    """Slots are read in steps of 32, which keeps the number of matmul shapes small."""
    q, k, v = slots_of(2, 2, 40, torch.float32)
    k[:, 32:], v[:, 32:] = math.nan, math.nan
    assert bool(slot_attention(q, k, v, torch.tensor([5, 5]), 5, 1.0).isfinite().all())
    assert bool(sparse_slot_attention(q, k, v, torch.tensor([5, 3]), 5, 1.0, 0.5).isfinite().all())


def sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, share: float) -> torch.Tensor:
    """FlexGen: probabilities over all columns, of which the largest int(share x past) and the newest are used."""
    p = torch.softmax(scale * (k.double() @ q.double()), dim=0)
    past = len(p) - 1
    largest = sorted(range(past), key=lambda i: -float(p[i]))[: int(share * past)]
    return sum((p[i] * v[i].double() for i in (*largest, past)), torch.zeros(v.shape[1], dtype=torch.float64))


@given(ragged, st.integers(1, 3), SHARES)
def test_sparse_slots(filled: list[int], group: int, share: float) -> None:
    q, k, v = slots_of(len(filled), group, 12, torch.float32)
    actual = sparse_slot_attention(q, k, v, torch.tensor(filled), max(filled), 0.4, share)
    for r, n in enumerate(filled):
        for g in range(group):
            expected = sparse(q[r, g], k[r, :n], v[r, :n], 0.4, share)
            assert (actual[r, g].double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_attention_to_everything_is_attention(dtype: torch.dtype) -> None:
    q, k, v = slots_of(3, 2, 12, dtype)
    filled = torch.tensor([12, 1, 7])
    dense, sparse_one = (
        slot_attention(q, k, v, filled, 12, 0.4),
        sparse_slot_attention(q, k, v, filled, 12, 0.4, share=1.0),
    )
    assert sparse_one.dtype == dtype
    assert (dense - sparse_one).abs().max() < TOLERANCE[dtype]


def test_the_number_of_kept_slots_is_pythons_int_of_the_product() -> None:
    q = torch.zeros(1, 1, 8)
    k, v = torch.zeros(1, 101, 8), torch.ones(1, 101, 8)
    actual = sparse_slot_attention(q, k, v, torch.tensor([101]), 101, 1.0, share=0.29)
    assert torch.allclose(actual, torch.tensor((int(0.29 * 100) + 1) / 101))


def test_sparse_slots_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = slots_of(7, 2, 12, torch.float32)
    filled = torch.tensor([5, 12, 1, 9, 3, 12, 7])
    whole = sparse_slot_attention(q, k, v, filled, 12, 0.4, 0.5)
    monkeypatch.setattr("flexgen_h2o.kernels.attention.SPARSE_CHUNK", 400)
    assert torch.equal(sparse_slot_attention(q, k, v, filled, 12, 0.4, 0.5), whole)
