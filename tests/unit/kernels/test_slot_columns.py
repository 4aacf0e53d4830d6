"""Columns into slots and out of them: compiled loops give what torch operations give, and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.kernels import slots as slot_columns
from flexgen_h2o.kernels.slots import Pair, get_last_slots, get_last_slots_reference, put_slots, put_slots_reference


def areas(rows: int, segments: int, per_segment: int, width: int, dtype: torch.dtype) -> Pair:
    """Keys and values in one memory, a segment behind the other, with room between them."""
    memory = torch.randn(segments, 2, rows * per_segment * width + 5).to(dtype)
    keys, values = memory[..., :-5].unflatten(2, (rows, per_segment, width)).unbind(1)
    return keys, values


def distinct(rows: int, count: int, slots: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(slots, generator=generator)[:count] for _ in range(rows)])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 3, 8, 64]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int32]), st.integers(0, 99), st.data(),
)  # fmt: skip
def test_the_loops_are_the_reference(
    rows: int, segments: int, per_segment: int, width: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, segments * per_segment))
    slots = distinct(rows, count, segments * per_segment, seed)
    wide = torch.randn(2, rows, count + 2, width).to(dtype)
    found, want = (areas(rows, segments, per_segment, width, dtype) for _ in range(2))
    for a, b in zip(found, want, strict=True):
        a.copy_(b)
    columns = wide[0, :, :count], wide[1, :, :count]
    put_slots(found, slots, columns)
    put_slots_reference(want, slots, columns)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    again = data.draw(st.integers(0, count - 1))
    slots[:, again] = slots[:, -1]
    outs = torch.zeros(2, 2, rows, count + 1, width).to(dtype)
    get_last_slots(found, slots, (outs[0, 0, :, :count], outs[0, 1, :, :count]))
    get_last_slots_reference(found, slots, (outs[1, 0, :, :count], outs[1, 1, :, :count]))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0, 0, :, again], outs[0, 0, :, count - 1])
    assert not outs[0, :, :, count].any()


def test_of_columns_for_one_slot_the_last_stays() -> None:
    keys, values = areas(2, 2, 3, 8, torch.float32)
    column = torch.randn(2, 2, 8)
    put_slots((keys, values), torch.tensor([[4, 4], [1, 1]]), (column, -column))
    assert torch.equal(keys[1, 0, 1], column[0, 1]) and torch.equal(values[0, 1, 1], -column[1, 1])


def test_many_rows_on_two_threads() -> None:
    keys, values = areas(3000, 1, 4, 64, torch.bfloat16)
    slots, column = torch.arange(3000).unsqueeze(1) % 4, torch.randn(3000, 1, 64).bfloat16()
    torch.set_num_threads(2)
    put_slots((keys, values), slots, (column, -column))
    rows = torch.arange(3000)
    assert torch.equal(keys[0, rows, slots[:, 0]], column[:, 0]) and torch.equal(
        values[0, rows, slots[:, 0]], -column[:, 0]
    )


@pytest.mark.parametrize("wrong", ["columns' dtype", "slots' dtype", "columns apart"])
def test_what_the_loops_do_not_take_goes_through_torch(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes by address is checked."""
    called = []
    monkeypatch.setattr(slot_columns, "put_slots_reference", lambda *_: called.append(wrong))
    keys, values = areas(2, 1, 3, 8, torch.float32)
    column, slots = torch.randn(2, 1, 8), torch.tensor([[1], [2]])
    columns = {"columns' dtype": column.bfloat16(), "columns apart": torch.randn(2, 1, 16)[..., ::2]}.get(wrong, column)
    put_slots((keys, values), slots.int() if wrong == "slots' dtype" else slots, (columns, columns))
    assert called == [wrong]
