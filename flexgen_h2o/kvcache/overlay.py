"""The newest columns of a KV part on disk, in RAM until the part is written back."""

from __future__ import annotations

import torch

from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.view import PartView, get_columns, stored_dtype
from flexgen_h2o.limits import WRITE_BACK_STEPS
from flexgen_h2o.tiers.placement import Part


class Overlay:
    """Up to WRITE_BACK_STEPS columns a row. `memory`: uint8, UnitLayout.overlay_bytes of the part."""

    def __init__(self, layout: UnitLayout, part: Part, memory: torch.Tensor, dtype: torch.dtype) -> None:
        dtype = stored_dtype(layout, dtype)
        shape = (part.rows, WRITE_BACK_STEPS, layout.slot_bytes // dtype.itemsize)
        slot_bytes = 8 * part.rows * WRITE_BACK_STEPS
        half = (memory.numel() - slot_bytes) // 2
        self._slots = memory[:slot_bytes].view(torch.int64).view(part.rows, WRITE_BACK_STEPS)
        self._keys = memory[slot_bytes : slot_bytes + half].view(dtype).view(shape)
        self._values = memory[slot_bytes + half :].view(dtype).view(shape)
        self._used = 0

    @property
    def is_full(self) -> bool:
        return self._used == WRITE_BACK_STEPS

    def clear(self) -> None:
        self._used = 0

    def add(self, view: PartView, slots: torch.Tensor) -> None:
        """Remember the columns of the view's rows at `slots` ((rows,) int64)."""
        rows, n = view.rows, self._used
        keys, values = (t.to(self._keys.device) for t in get_columns(view, slots.to(view.keys.device)))
        slots = slots.to(self._slots.device)
        self._slots[:rows, n], self._keys[:rows, n], self._values[:rows, n] = slots, keys, values
        # A slot may have been taken before: both entries then hold the newer column, so that their order is free.
        row, entry = (self._slots[:rows, :n] == slots.unsqueeze(1)).nonzero(as_tuple=True)
        self._keys[row, entry], self._values[row, entry] = keys[row], values[row]
        self._used += 1

    def apply(self, view: PartView) -> None:
        """Lay the columns over the view, which holds the part as it was last written."""
        rows, n, where, per_segment = view.rows, self._used, view.keys.device, view.keys.shape[2]
        if n:
            slots = self._slots[:rows, :n].to(where)
            index = (slots // per_segment, torch.arange(rows, device=where).unsqueeze(1), slots % per_segment)
            view.keys[index] = self._keys[:rows, :n].to(where)
            view.values[index] = self._values[:rows, :n].to(where)
