"""The compiled loops of `slot_columns`: keys and values of columns into slots, and out of them."""

from __future__ import annotations

from typing import NamedTuple

from flexgen_h2o.kernels.jit import bytes_at, jit, longs_at, words_at


class Slots(NamedTuple):
    """Sizes and addresses, in bytes. Slot j of row r is slot j % per_segment of its row in segment j // per_segment.

    slots: of the int64 numbers; slots_step: from a row's first to the next row's. columns: of keys and values; a row's
    columns follow one another, columns_step: from a row's first to the next row's.
    """

    keys: int
    values: int
    per_segment: int
    segment_step: int
    row_step: int
    slot_bytes: int
    slots: int
    slots_step: int
    column_keys: int
    column_values: int
    columns_step: int


@jit
def put(job, count, first, end):  # type: ignore[no-untyped-def]
    """`count` columns of each of the rows first..end-1 into their slots, in order."""
    for row in range(first, end):
        slots = longs_at(job.slots + row * job.slots_step)
        column = row * job.columns_step
        for i in range(count):
            at = _place(job, row, slots[i])
            _copy(job.keys + at, job.column_keys + column, job.slot_bytes)
            _copy(job.values + at, job.column_values + column, job.slot_bytes)
            column += job.slot_bytes


@jit
def get(job, count, first, end):  # type: ignore[no-untyped-def]
    """What is in slot number `count` of each row, as column `count`, and as those before it of the same slot."""
    for row in range(first, end):
        slots = longs_at(job.slots + row * job.slots_step)
        at = _place(job, row, slots[count])
        for i in range(count + 1):
            if slots[i] == slots[count]:
                column = row * job.columns_step + i * job.slot_bytes
                _copy(job.column_keys + column, job.keys + at, job.slot_bytes)
                _copy(job.column_values + column, job.values + at, job.slot_bytes)


@jit
def _place(job, row, slot):  # type: ignore[no-untyped-def]
    """How far a row's slot is from the beginning."""
    segment = slot // job.per_segment
    inside = slot - segment * job.per_segment
    return segment * job.segment_step + row * job.row_step + inside * job.slot_bytes


@jit
def _copy(to, source, size):  # type: ignore[no-untyped-def]
    if size % 4 == 0:
        for i in range(size // 4):
            words_at(to)[i] = words_at(source)[i]
    else:
        for i in range(size):
            bytes_at(to)[i] = bytes_at(source)[i]
