"""A cache layer that only masks: the papers' simulation. It keeps every column and saves nothing."""

from __future__ import annotations

import math

import torch

from flexgen_h2o.integrations.layer import EvictingLayer
from flexgen_h2o.kvcache.eviction.policy import NORMS, SCORES
from flexgen_h2o.kvcache.hook import KeptColumns, rank_victims
from flexgen_h2o.kvcache.slots import Joining
from flexgen_h2o.kvcache.view import Record


class MaskingLayer(EvictingLayer):
    """Slot j holds column j of the batch, padding and all; columns that were evicted have position -1."""

    def _make_room(self, k: torch.Tensor) -> None:
        batch, kv_heads, n, _ = k.shape
        self.keys, self.values = torch.zeros_like(k), torch.zeros_like(k)
        self.record = self._empty_record(batch * kv_heads, n)

    def _empty_record(self, rows: int, slots: int) -> Record:
        """Also where the policy has no use for one: positions are the mask."""
        positions = torch.full((rows, slots), -1, dtype=torch.int32, device=self.device)
        victims = torch.zeros(rows, dtype=torch.int32, device=self.device)
        return super()._empty_record(rows, slots) or Record(positions, victims)

    def _store_prompts(self, some: slice, first: int, k: torch.Tensor, v: torch.Tensor, kept: KeptColumns) -> None:
        assert self.keys is not None and self.values is not None and self.record is not None
        here = slice(first, first + k.shape[2])
        self.keys[some, :, here], self.values[some, :, here] = k, v
        positions = torch.full(k.shape[:3], -1, dtype=torch.int32, device=self.device)
        positions.scatter_(2, kept.positions, kept.positions.int())
        of_rows = slice(some.start * k.shape[1], some.stop * k.shape[1])
        for target, values in (
            (self.record.positions, positions), (self.record.scores, kept.scores), (self.record.norms, kept.norms),
        ):  # fmt: skip
            if target is not None and values is not None:
                target[of_rows, here] = values.flatten(0, 1)

    def _attend_token(self, qkv: tuple[torch.Tensor, ...], scale: float, joins: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv
        batch, kv_heads, width = k.shape
        record = self._append(k, v, joins)
        assert self.keys is not None and self.values is not None and self.rows is not None
        held = (record.positions >= 0).view(batch, kv_heads, 1, -1)
        products = q.view(batch, kv_heads, -1, width).float() @ self.keys.float().transpose(-1, -2) * scale
        p = products.masked_fill(~held, -math.inf).softmax(-1).nan_to_num(0.0)  # padding sees nothing
        filled = held.sum(-1)[:, 0, 0].cpu()  # as many in each kv-head
        if record.scores is not None:
            self._add(record.scores, p.sum(2).flatten(0, 1), filled, joins)
        if self._policy.needs.record:
            self._evict(record, filled, kv_heads)
        return (p @ self.values.float()).to(q.dtype)

    def _append(self, k: torch.Tensor, v: torch.Tensor, joins: torch.Tensor) -> Record:
        """The new columns in a slot of their own, with score 0; the record with them."""
        batch, kv_heads, _ = k.shape
        if self.keys is None or self.values is None or self.record is None:
            self._make_room(k[:, :, None][:, :, :0])
        assert self.keys is not None and self.values is not None and self.record is not None
        self.keys, self.values = (
            torch.cat([old, new[:, :, None]], dim=2) for old, new in ((self.keys, k), (self.values, v))
        )
        new = self._empty_record(batch * kv_heads, 1)
        new.positions[:, 0] = torch.where(joins, self.past, -1).repeat_interleave(kv_heads).int()
        if new.norms is not None:
            new.norms[:, 0] = v.float().norm(dim=-1).flatten()
        fields = {
            name: torch.cat([getattr(self.record, name), getattr(new, name)], dim=1)
            for name in ("positions", SCORES, NORMS)
            if getattr(new, name) is not None
        }
        self.record = Record(victims=new.victims, **fields)
        return self.record

    def _add(self, scores: torch.Tensor, received: torch.Tensor, filled: torch.Tensor, joins: torch.Tensor) -> None:
        """scores, received: (rows, slots), received being 0 where masked; a padding token leaves scores as they are."""
        needs = self._policy.needs
        gains = needs.gain * (filled / (self.past + 1) if needs.even else torch.ones(len(self.past)))
        kv_heads = len(scores) // len(gains)
        gain, real = (t.repeat_interleave(kv_heads)[:, None].to(scores.device) for t in (gains.float(), joins))
        scores.copy_(torch.where(real, needs.fade * scores + gain * received, scores))

    def _evict(self, record: Record, filled: torch.Tensor, kv_heads: int) -> None:
        """Mask one column of each row that holds one more than its budget."""
        assert self.rows is not None
        full = (filled >= self.rows.slots).repeat_interleave(kv_heads).to(record.positions.device)
        if not bool(full.any()):
            return
        every = torch.full_like(
            self.past, record.positions.shape[1]
        )  # what is not held has a position that no policy drops
        rank_victims(self._hook(kv_heads), [self._view()], Joining(self.past, every, every))
        victims = record.victims.long()[:, None]
        gone = torch.where(full[:, None], -1, record.positions.gather(1, victims))
        record.positions.scatter_(1, victims, gone)
