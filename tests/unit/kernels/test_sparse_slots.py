"""Sparse decode attention against a plain loop over rows and heads in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kernels.slots import attend, attend_sparse

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
# Shares whose product with a count of slots is the same in every precision.
SHARES = st.sampled_from([1 / 16, 1 / 4, 1 / 2, 3 / 4, 15 / 16])

ragged = st.lists(st.integers(1, 11), min_size=1, max_size=5)


def slots_of(rows: int, group: int, slots: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q (rows, group, 8), keys and values in segments of 4 slots."""
    q = torch.randn(rows, group, 8).to(dtype)
    keys, values = (torch.randn(-(-slots // 4), rows, 4, 8).to(dtype) for _ in range(2))
    return q, keys, values


def row_of(segments: torch.Tensor, row: int, filled: int) -> torch.Tensor:
    return segments[:, row].flatten(0, 1)[:filled]


def filled_tensor(filled: list[int]) -> torch.Tensor:
    return torch.tensor(filled, dtype=torch.int32)


def sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, share: float) -> torch.Tensor:
    """FlexGen: probabilities over all columns, of which the largest int(share x past) and the newest are used."""
    p = torch.softmax(scale * (k.double() @ q.double()), dim=0)
    past = len(p) - 1
    largest = sorted(range(past), key=lambda i: -float(p[i]))[: int(share * past)]
    return sum((p[i] * v[i].double() for i in (*largest, past)), torch.zeros(v.shape[1], dtype=torch.float64))


@given(ragged, st.integers(1, 3), SHARES)
def test_against_a_plain_loop(filled: list[int], group: int, share: float) -> None:
    q, keys, values = slots_of(len(filled), group, 12, torch.float32)
    for r, n in enumerate(filled):
        for slot in range(n, 12):  # what a row has not filled may hold anything
            keys[slot // 4, r, slot % 4], values[slot // 4, r, slot % 4] = math.nan, math.nan
    actual = attend_sparse(q, keys, values, filled_tensor(filled), 0.4, share)
    for r, n in enumerate(filled):
        for g in range(group):
            expected = sparse(q[r, g], row_of(keys, r, n), row_of(values, r, n), 0.4, share)
            assert (actual[r, g].double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_everything_is_attention(dtype: torch.dtype) -> None:
    q, keys, values = slots_of(3, 2, 12, dtype)
    filled = filled_tensor([12, 1, 7])
    dense, sparse_one = (
        attend(q, keys, values, filled, 0.4),
        attend_sparse(q, keys, values, filled, 0.4, share=1.0),
    )
    assert sparse_one.dtype == dtype
    assert (dense - sparse_one).abs().max() < TOLERANCE[dtype]


def test_the_number_of_kept_slots_is_pythons_int_of_the_product() -> None:
    q = torch.zeros(1, 1, 8)
    keys, values = torch.zeros(1, 1, 101, 8), torch.ones(1, 1, 101, 8)
    actual = attend_sparse(q, keys, values, filled_tensor([101]), 1.0, share=0.29)
    assert torch.allclose(actual, torch.tensor((int(0.29 * 100) + 1) / 101))


def test_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values = slots_of(7, 2, 12, torch.float32)
    filled = filled_tensor([5, 12, 1, 9, 3, 12, 7])
    whole = attend_sparse(q, keys, values, filled, 0.4, 0.5)
    monkeypatch.setattr("flexgen_h2o.kernels.slots.SPARSE_CHUNK", 400)
    assert torch.equal(attend_sparse(q, keys, values, filled, 0.4, 0.5), whole)
