"""A cache layer that drops columns: the engine's own slots, hook and decode kernels, on transformers' tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from flexgen_h2o.integrations.layer import EvictingLayer
from flexgen_h2o.kernels.slots import attend
from flexgen_h2o.kvcache.attend import attend_slots
from flexgen_h2o.kvcache.hook import KeptColumns, record_prompt
from flexgen_h2o.kvcache.slots import joining

GROWTH = 64  # slots that are added at a time, where a budget is larger than what is held so far


class DroppingLayer(EvictingLayer):
    """Slots for sinks + heavy + recent + 1 columns a row; a new column overwrites the row's victim."""

    def _make_room(self, k: torch.Tensor) -> None:
        assert self.rows is not None
        batch, kv_heads, _, width = k.shape
        slots = min(int(self.rows.slots.max()), int(self.rows.kept.max()) + GROWTH)
        self.keys, self.values = (
            torch.zeros(batch, kv_heads, slots, width, dtype=self.dtype, device=self.device) for _ in range(2)
        )
        self.record = self._empty_record(batch * kv_heads, slots)

    def _grow(self, filled: int) -> None:
        """Room for `filled` slots: a large budget does not take its memory before it is needed."""
        assert self.rows is not None and self.keys is not None and self.values is not None
        held = self.keys.shape[2]
        if filled <= held:
            return
        more = min(int(self.rows.slots.max()), held + max(GROWTH, held // 4)) - held
        self.keys, self.values = (F.pad(t, (0, 0, 0, more)) for t in (self.keys, self.values))
        if self.record is not None:
            wide = {name: getattr(self.record, name) for name in ("positions", "scores", "norms")}
            self.record = replace(
                self.record, **{name: F.pad(t, (0, more)) for name, t in wide.items() if t is not None}
            )

    def _store_prompts(self, some: slice, first: int, k: torch.Tensor, v: torch.Tensor, kept: KeptColumns) -> None:
        assert self.keys is not None and self.values is not None
        kv_heads, count, width = k.shape[1], kept.positions.shape[-1], k.shape[3]
        index = kept.positions.unsqueeze(-1).expand(*kept.positions.shape, width)
        for home, columns in ((self.keys, k), (self.values, v)):
            home[some, :, :count] = columns.gather(2, index)
        if self.record is not None:
            for i in range(some.stop - some.start):
                row = (some.start + i) * kv_heads
                record_prompt(self._view(), slice(row, row + kv_heads), kept, i, slice(None))

    def _attend_token(self, qkv: tuple[torch.Tensor, ...], scale: float, joins: torch.Tensor) -> torch.Tensor:
        assert self.rows is not None and bool(joins.all())
        new = joining(self.rows, self.past)
        self._grow(int(new.filled.max()))
        view, hook = self._view(), self._hook(qkv[1].shape[1])
        out = torch.empty_like(qkv[0]).flatten(1)
        return attend_slots(qkv, new, hook.next_slots([view], new), [view], hook, scale, attend, out)
