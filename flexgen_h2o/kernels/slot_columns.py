"""Columns into the slots of KV rows, and out of them: one row a (sequence, kv-head), each with slots of its own.

keys, values: (segments, R, S, d); slot j of row r is at [j // S, r, j % S]. On the CPU compiled loops go through all
rows (`slot_column_loops`): small torch operations with an index for each number would take most of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexgen_h2o.kernels.threads import share_rows

if TYPE_CHECKING:
    from flexgen_h2o.kernels.slot_column_loops import Slots

Pair = tuple[torch.Tensor, torch.Tensor]


def put_slots(areas: Pair, slots: torch.Tensor, columns: Pair) -> None:
    """areas[slots[r, i]] = columns[r, i] for all rows r, in the order of i. areas: keys and values; slots: (R, n)
    int64; columns: (R, n, d) of the areas' dtype. All on one device."""
    if not _is_compiled(areas, slots, columns):
        put_slots_reference(areas, slots, columns)
        return
    from flexgen_h2o.kernels import slot_column_loops

    (rows, count), job = slots.shape, _job(areas, slots, columns)
    row_bytes = 4 * count * job.slot_bytes
    share_rows(lambda first, end: slot_column_loops.put(job, count, first, end), rows, row_bytes)


def put_slots_reference(areas: Pair, slots: torch.Tensor, columns: Pair) -> None:
    """`put_slots` in torch operations; of columns for the same slot any may be left."""
    index = _index(areas[0], slots)
    for area, column in zip(areas, columns, strict=True):
        area[index] = column


def get_last_slots(areas: Pair, slots: torch.Tensor, columns: Pair) -> None:
    """columns[r, i] = areas[slots[r, -1]] for the last i, and for those before it of the same slot. See `put_slots`."""
    if not _is_compiled(areas, slots, columns):
        get_last_slots_reference(areas, slots, columns)
        return
    from flexgen_h2o.kernels import slot_column_loops

    (rows, count), job = slots.shape, _job(areas, slots, columns)
    share_rows(lambda first, end: slot_column_loops.get(job, count - 1, first, end), rows, 4 * job.slot_bytes)


def get_last_slots_reference(areas: Pair, slots: torch.Tensor, columns: Pair) -> None:
    """`get_last_slots` in torch operations."""
    row, entry = (slots == slots[:, -1:]).nonzero(as_tuple=True)
    for area, column in zip(areas, columns, strict=True):
        column[row, entry] = area[_index(area, slots[:, -1:])].squeeze(1)[row]


def _index(area: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    per_segment = area.shape[2]
    rows = torch.arange(len(slots), device=slots.device).unsqueeze(1)
    return slots // per_segment, rows, slots % per_segment


def _is_compiled(areas: Pair, slots: torch.Tensor, columns: Pair) -> bool:
    """The loops go by address: what is laid out otherwise than they take it goes through torch operations."""
    (keys, values), (column_keys, column_values) = areas, columns
    (rows, count), size = slots.shape, keys.shape[3]
    right = all(t.device.type == "cpu" and t.dtype == keys.dtype for t in (keys, values, column_keys, column_values))
    right = right and keys.shape == values.shape and keys.stride() == values.stride() and keys.shape[1] == rows
    right = right and keys.stride()[1:] == (keys.shape[2] * size, size, 1)
    right = right and column_keys.shape == column_values.shape == (rows, count, size)
    right = right and column_keys.stride() == column_values.stride() and column_keys[0].is_contiguous()
    return right and slots.dtype == torch.int64 and slots.device.type == "cpu" and slots[0].is_contiguous()


def _job(areas: Pair, slots: torch.Tensor, columns: Pair) -> Slots:
    from flexgen_h2o.kernels.slot_column_loops import Slots

    (keys, values), (column_keys, column_values) = areas, columns
    size, item = keys.shape[3], keys.itemsize
    return Slots(
        keys.data_ptr(), values.data_ptr(), keys.shape[2], keys.stride(0) * item, keys.stride(1) * item, size * item,
        slots.data_ptr(), slots.stride(0) * slots.itemsize, column_keys.data_ptr(), column_values.data_ptr(),
        column_keys.stride(0) * item,
    )  # fmt: skip
