"""Views of a part's bytes, and its newest columns in RAM: slot j is found wherever the segments are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.units import SEGMENT_SLOTS, WRITE_BACK_STEPS
from flexgen_h2o.kvcache.layout import UnitLayout, unit_layout
from flexgen_h2o.kvcache.slots import PartView, carve_record, part_view, put_columns, put_first_columns
from flexgen_h2o.kvcache.store import Overlay

WIDTH, DTYPE = 4, torch.float32
HOST = (0.0, 1.0, 0.0)
slot_counts = st.sampled_from([1, 3, SEGMENT_SLOTS, SEGMENT_SLOTS + 1, 2 * SEGMENT_SLOTS + 3])


def one_part(
    rows: int, slots: int, record: tuple[str, ...] = (), fill: float = float("nan")
) -> tuple[UnitLayout, PartView]:
    layout = unit_layout(rows, 1, slots, WIDTH, DTYPE.itemsize, HOST, record)
    (part,) = layout.parts
    data = torch.full((layout.part_bytes(part) // 4,), fill).view(torch.uint8)
    return layout, part_view(layout, part, data, DTYPE, None)


def unfolded(view: PartView) -> list[torch.Tensor]:
    """Keys and values as (rows, slots, width), slots in order."""
    return [t.transpose(0, 1).flatten(1, 2) for t in (view.keys, view.values)]


@given(st.integers(1, 5), slot_counts, st.data())
def test_columns_lie_at_their_slots(rows: int, slots: int, data: st.DataObject) -> None:
    _, view = one_part(rows, slots)
    where = torch.tensor(data.draw(st.lists(st.integers(0, slots - 1), min_size=rows, max_size=rows)))
    keys, values = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    put_columns(view, where, keys, values)
    for whole, column in zip(unfolded(view), (keys, values), strict=True):
        assert whole.shape[1] >= slots and torch.equal(whole[torch.arange(rows), where], column)
        assert int(whole.isnan().all(-1).sum()) == rows * (whole.shape[1] - 1)  # no other slot is touched


@given(st.integers(1, 5), slot_counts, st.data())
def test_first_columns_fill_segment_after_segment(rows: int, slots: int, data: st.DataObject) -> None:
    _, view = one_part(rows, slots)
    start = data.draw(st.integers(0, rows - 1))
    end, count = data.draw(st.integers(start, rows)), data.draw(st.integers(0, slots))
    pair = [torch.randn(end - start, count, WIDTH) for _ in range(2)]
    put_first_columns(view, start, end, *pair)
    for whole, columns in zip(unfolded(view), pair, strict=True):
        assert torch.equal(whole[start:end, :count], columns)
        assert int((~whole.isnan()).sum()) == columns.numel()


def test_parts_begin_in_the_bytes_they_are_given() -> None:
    """A view is the bytes themselves, keys and values of a segment each on a page."""
    layout, _ = one_part(3, 2 * SEGMENT_SLOTS)
    (part,) = layout.parts
    data = torch.zeros(layout.part_bytes(part), dtype=torch.uint8)
    view = part_view(layout, part, data, DTYPE, None)
    for i, area in enumerate((view.keys[0], view.values[0], view.keys[1], view.values[1])):
        assert area.data_ptr() == data.data_ptr() + i * layout.area_bytes(part)
        assert area.is_contiguous() and area.shape == (3, SEGMENT_SLOTS, WIDTH)


def test_views_of_fewer_rows() -> None:
    layout, whole = one_part(4, 5, ("positions", "scores"), fill=0.0)
    memory = torch.zeros(layout.record_bytes(layout.parts[0]), dtype=torch.uint8)
    view = PartView(8, whole.keys, whole.values, carve_record(layout, layout.parts[0], memory))
    less = view.first_rows(3)
    assert (view.rows, view.end, less.start, less.rows, less.end) == (4, 12, 8, 3, 11)
    assert all(len(t) == 4 for t in view.row_tensors()) and all(len(t) == 3 for t in less.row_tensors())
    assert less.record is not None and view.record is not None
    less.record.victims[2] = 7
    assert view.record.victims.tolist() == [0, 0, 7, 0]


@pytest.mark.parametrize("record", [("positions",), ("positions", "scores"), ("positions", "scores", "norms")])
def test_a_record_has_what_the_policy_asks_for(record: tuple[str, ...]) -> None:
    layout = unit_layout(3, 2, 5, WIDTH, 4, HOST, record)
    (part,) = layout.parts
    memory = torch.zeros(layout.record_bytes(part), dtype=torch.uint8)
    found = carve_record(layout, part, memory)
    assert found is not None and len(found.tensors()) == len(record) + 1
    for i, tensor in enumerate(found.tensors()):
        tensor.fill_(i + 1)  # none lies over another
    assert [set(t.flatten().tolist()) for t in found.tensors()] == [{i + 1} for i in range(len(record) + 1)]
    assert found.positions.shape == (6, 5) and found.positions.dtype == found.victims.dtype == torch.int32
    for name in ("scores", "norms"):
        field = getattr(found, name)
        assert (field is None) is (name not in record)
        assert field is None or (field.shape, field.dtype) == ((6, 5), torch.float32)
    rows = found.rows(1, 3)
    assert [t.shape[0] for t in rows.tensors()] == [2] * (len(record) + 1)
    assert (rows.scores is None) is (found.scores is None)


def test_the_full_cache_keeps_no_record() -> None:
    layout, _ = one_part(3, 5)
    assert carve_record(layout, layout.parts[0], torch.zeros(0, dtype=torch.uint8)) is None


# ---- the overlay


def make_overlay(layout: UnitLayout) -> Overlay:
    (part,) = layout.parts
    memory = torch.full((layout.overlay_bytes(part),), 255, dtype=torch.uint8)  # what it held before is no column
    return Overlay(layout, part, memory, DTYPE)


@given(st.integers(1, 4), slot_counts, st.integers(0, WRITE_BACK_STEPS), st.data())
def test_what_waits_is_laid_over_what_was_written(rows: int, slots: int, steps: int, data: st.DataObject) -> None:
    """Any slots in any order, the same slot again too: the newest column is what lies there afterwards."""
    layout, view = one_part(rows, slots, fill=0.5)
    overlay = make_overlay(layout)
    for _ in range(steps):
        assert not overlay.is_full
        where = torch.tensor(data.draw(st.lists(st.integers(0, slots - 1), min_size=rows, max_size=rows)))
        put_columns(view, where, torch.randn(rows, WIDTH), torch.randn(rows, WIDTH))
        overlay.add(view, where)
    assert overlay.is_full is (steps == WRITE_BACK_STEPS)
    _, written = one_part(rows, slots, fill=0.5)
    overlay.apply(written)
    assert torch.equal(written.keys, view.keys) and torch.equal(written.values, view.values)


def test_entries_of_one_slot_hold_the_same_column() -> None:
    """In which order they are laid down is then free: on a card it is not known."""
    layout, view = one_part(2, 6)
    overlay, new = make_overlay(layout), torch.randn(3, 2, WIDTH)
    for slots, column in zip(([4, 1], [4, 2], [4, 1]), new, strict=True):
        put_columns(view, torch.tensor(slots), column, -column)
        overlay.add(view, torch.tensor(slots))
    for kept, sign in ((overlay._keys, 1), (overlay._values, -1)):
        expected = torch.stack([new[[2, 2, 2], 0], new[[2, 1, 2], 1]])
        assert torch.equal(kept[:, :3], sign * expected)


def test_fewer_rows_go_on_from_the_same_overlay() -> None:
    layout, view = one_part(4, 6, fill=0.5)
    overlay, written = make_overlay(layout), one_part(4, 6, fill=0.5)[1]
    for slots in ([0, 1, 2, 3], [5, 5, 5, 5], [0, 2]):
        here = view.first_rows(len(slots))
        put_columns(here, torch.tensor(slots), torch.randn(len(slots), WIDTH), torch.randn(len(slots), WIDTH))
        overlay.add(here, torch.tensor(slots))
    overlay.apply(written.first_rows(2))
    assert torch.equal(written.keys[:, :2], view.keys[:, :2]) and torch.equal(written.values[:, :2], view.values[:, :2])
    assert bool((written.keys[:, 2:] == 0.5).all())


def test_a_cleared_overlay_holds_nothing() -> None:
    layout, view = one_part(2, 6, fill=0.5)
    overlay = make_overlay(layout)
    put_columns(view, torch.tensor([3, 4]), torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    overlay.add(view, torch.tensor([3, 4]))
    overlay.clear()
    _, written = one_part(2, 6, fill=0.5)
    overlay.apply(written)
    assert not overlay.is_full and bool((written.keys == 0.5).all())
