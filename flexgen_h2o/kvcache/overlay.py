"""The newest columns of a KV part on disk, in RAM until the part is written back."""

from __future__ import annotations

import torch

from flexgen_h2o.kernels.slot_columns import get_last_slots, put_slots
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.view import PartView, stored_dtype
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
        """Remember the columns of the view's rows at `slots` ((rows,) int64).

        A slot may have been taken before: both entries then hold the newer column, so that their order is free.
        """
        rows, where = view.rows, view.keys.device
        self._slots[:rows, self._used] = slots.to(self._slots.device)
        self._used += 1
        waiting = self._keys[:rows, : self._used], self._values[:rows, : self._used]
        brought = waiting[0].to(where), waiting[1].to(where)
        get_last_slots((view.keys, view.values), self._slots[:rows, : self._used].to(where), brought)
        if where != self._keys.device:
            for ours, theirs in zip(waiting, brought, strict=True):
                ours.copy_(theirs)

    def apply(self, view: PartView) -> None:
        """Lay the columns over the view, which holds the part as it was last written."""
        rows, where = view.rows, view.keys.device
        if self._used:
            slots, keys, values = (t[:rows, : self._used].to(where) for t in (self._slots, self._keys, self._values))
            put_slots((view.keys, view.values), slots, (keys, values))
