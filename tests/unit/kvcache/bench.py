"""A cache store on real tiers beside the plain tensors that it must agree with; the tests of the store run on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.loop import zigzag
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.slots import PartView, plan_moves, put_columns, put_first_columns, split_views
from flexgen_h2o.kvcache.store import CacheKey, CacheStore
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice, host_buffer
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.stream import NOTHING, Ring, Shares, Stream, is_streamed
from flexgen_h2o.tiers.transfers import Lanes, Mover

BLOCKS, KV_HEADS, WIDTH, DTYPE = 2, 2, 32, torch.bfloat16
COLUMN = 2 * KV_HEADS * WIDTH * DTYPE.itemsize  # bytes of the key and the value of one token
LARGEST_ROWS, MOST_SLOTS, BATCHES, DEPTH = 7, 80, 2, 3
RECORD = ("positions", "scores", "norms")
ENOUGH = 10**6  # slots: no row ever fills them

# name: device, shares on device, host and disk, whether attention runs on the host
PLACES: dict[str, tuple[type[Device], Shares, bool]] = {
    "host": (HostDevice, (0.0, 1.0, 0.0), True),
    "disk": (HostDevice, (0.0, 0.0, 1.0), True),
    "host and disk": (HostDevice, (0.0, 0.45, 0.55), True),
    "device": (StandInDevice, (1.0, 0.0, 0.0), False),
    "three": (StandInDevice, (0.3, 0.35, 0.35), False),
    "host, brought": (StandInDevice, (0.0, 1.0, 0.0), False),
    "disk, brought": (StandInDevice, (0.0, 0.0, 1.0), False),
    "three, attended on the host": (StandInDevice, (0.3, 0.35, 0.35), True),
}


@dataclass
class PlainRow:
    """What the slots of a sequence must hold. Tensors are (kv_heads, filled, ...)."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor
    norms: torch.Tensor
    length: int  # columns that it has had

    @property
    def filled(self) -> int:
        return self.keys.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("keys", "values", *RECORD)}


def random_columns(count: int, start: int) -> dict[str, torch.Tensor]:
    found = {name: torch.randn(KV_HEADS, count, WIDTH).to(DTYPE) for name in ("keys", "values")}
    found |= {name: torch.randn(KV_HEADS, count) for name in ("scores", "norms")}
    return found | {"positions": torch.arange(start, start + count, dtype=torch.int32).expand(KV_HEADS, count).clone()}


Changes = dict[tuple[int, int], list[int]]  # by (sweep, micro-batch)
History = dict[tuple[int, int], list[PlainRow]]  # (block, micro-batch): its sequences, by their place now


class Bench:
    """A store with arenas for the largest block. `budgets`: slots that a row of each transformer block fills."""

    def __init__(
        self, folder: Path, place: str, budgets: Sequence[int] = (ENOUGH, ENOUGH), record: tuple[str, ...] = ()
    ) -> None:
        kind, self.shares, on_host = PLACES[place]
        device = kind()
        self.budgets, self.record = budgets, record
        self.lanes = Lanes({"disk_read": 2, "disk_write": 1, "h2d": 1, "d2h": 1}, Timeline())
        self.scratch = Scratch(folder)
        largest = self.layout(LARGEST_ROWS, MOST_SLOTS)
        units = BLOCKS * BATCHES
        homes = {p.tier: units * largest.part_bytes(p) for p in largest.parts}
        memory = {tier: host_buffer(n) for tier, n in homes.items() if tier != "disk"}
        metadata: Counter[str] = Counter()
        for part in largest.parts:
            where = ("host" if on_host else "device") if is_streamed(part.tier, on_host) else part.tier
            metadata[where] += units * (largest.metadata_bytes(part) + 64)
        arenas = {tier: host_buffer(n) for tier, n in metadata.items()}
        overlay = host_buffer(sum(units * largest.overlay_bytes(p) for p in largest.parts if p.tier == "disk"))
        self.file = self.scratch.create("cache.bin", homes["disk"]) if "disk" in homes else None
        self.store = CacheStore(Mover(device, self.lanes), DTYPE, memory, self.file, overlay, arenas, on_host)
        self.ring = Ring(host_buffer(DEPTH * sum(largest.part_bytes(p) for p in largest.parts)))
        for buffer in (*memory.values(), *arenas.values(), overlay):
            buffer.fill_(255)  # empty slots hold no numbers

    def layout(self, sequences: int, slots: int) -> UnitLayout:
        return UnitLayout(sequences, KV_HEADS, slots, WIDTH, DTYPE.itemsize, self.shares, self.record)

    def close(self) -> None:
        self.lanes.close()
        if self.file is not None:
            self.file.close()
        self.scratch.close()

    def run_block(
        self, prompts: list[list[int]], sweeps: int, leaving: Changes, entering: Changes | None = None
    ) -> None:
        """`prompts`: columns that stay of each, by micro-batch; `leaving`: who leaves after (sweep, micro-batch).

        entering: the prompts that come then. They take the places that are free behind the others, as far as there are.
        """
        entering = entering or {}
        most = max([n for p in prompts for n in p] + [n for p in entering.values() for n in p])
        layouts = [[self.layout(len(n), min(budget, most + sweeps)) for n in prompts] for budget in self.budgets]
        self.store.begin_block(layouts, [len(n) for n in prompts])
        history: History = {(b, k): [] for b in range(BLOCKS) for k in range(len(prompts))}
        live = [list(lengths) for lengths in prompts]
        steps = list(zigzag(sweeps, BLOCKS, len(prompts)))
        keys: Iterator[CacheKey] = ((s.sweep, s.layer, s.micro_batch) for s in steps)
        stream = Stream(self.ring, keys, self.store, DEPTH)
        for s in steps:
            k = s.micro_batch
            if not live[k]:
                continue
            stream.prefetch()
            self.step((s.sweep, s.layer, k), stream, history[s.layer, k], live[k])
            if s.layer == BLOCKS - 1:
                moves, order = plan_moves(leaving.get((s.sweep, k), []), len(live[k]))
                come = entering.get((s.sweep, k), [])[: len(prompts[k]) - len(order)]
                if len(order) < len(live[k]) or come:
                    self.store.change_rows(k, moves, len(order), len(come))
                live[k] = [live[k][i] for i in order] + come
                for block in range(BLOCKS):
                    history[block, k] = [history[block, k][i] for i in order]
        stream.drain()
        self.store.settle()

    def step(self, key: CacheKey, stream: Stream[CacheKey], rows: list[PlainRow], prompts: list[int]) -> None:
        region = stream.take(key)
        views, whole = self.store.open(key, region)
        assert sum(view.rows for view in views) == len(prompts) * KV_HEADS
        assert all((view.metadata is not None) is bool(self.record) for view in views)
        taken: list[torch.Tensor] | None = None
        before, behind = split_views(views, len(rows) * KV_HEADS)
        if rows:
            check(before, rows)
            slots = torch.stack([self._grow(row, self.budgets[key[1]]) for row in rows])
            taken = self._put_new(before, rows, slots)
        for place, count in enumerate(prompts[len(rows) :]):
            assert whole
            kept = min(count, self.budgets[key[1]])
            rows.append(PlainRow(**random_columns(kept, 0), length=count))
            self._put_prompt(behind, place, rows[-1])
        taken = None if whole else taken
        columns = max(row.filled for row in rows)
        stream.give_back(region, self.store.close(key, region, columns, taken, NOTHING))

    def _grow(self, row: PlainRow, budget: int) -> torch.Tensor:
        """The slot of each kv-head that the row's next column takes: the next free one, else any."""
        new = random_columns(1, row.length)
        row.length += 1
        if row.filled < budget:
            for name, tensor in row.tensors().items():
                setattr(row, name, torch.cat([tensor, new[name]], dim=1))
            return torch.full((KV_HEADS,), row.filled - 1)
        # Often the slot of a step before, so that one waits in RAM twice.
        slots = torch.randint(0, min(3, budget) if row.length % 3 else budget, (KV_HEADS,))
        for name, tensor in row.tensors().items():
            tensor[torch.arange(KV_HEADS), slots] = new[name][:, 0]
        return slots

    def _put_prompt(self, views: list[PartView], place: int, row: PlainRow) -> None:
        for head in range(KV_HEADS):
            view, at = find(views, place * KV_HEADS + head)
            put_first_columns(view, at, at + 1, row.keys[head : head + 1], row.values[head : head + 1])
            for name in self.record:
                getattr(view.metadata, name)[at, : row.filled] = getattr(row, name)[head]

    def _put_new(self, views: list[PartView], rows: list[PlainRow], slots: torch.Tensor) -> list[torch.Tensor]:
        """Write the newest column of each row to its slots (sequences, kv_heads); returns them view by view."""
        heads = torch.arange(KV_HEADS)
        new = {
            name: torch.cat([getattr(row, name)[heads, s] for row, s in zip(rows, slots, strict=True)])
            for name in ("keys", "values", *self.record)
        }
        taken = []
        for view in views:
            here = slice(view.start, view.end)
            taken.append(slots.flatten()[here])
            put_columns(view, taken[-1], new["keys"][here], new["values"][here])
            for name in self.record:
                getattr(view.metadata, name)[torch.arange(view.rows), taken[-1]] = new[name][here]
        return taken


def find(views: list[PartView], row: int) -> tuple[PartView, int]:
    view = next(v for v in views if v.start <= row < v.end)
    return view, row - view.start


def check(views: list[PartView], rows: list[PlainRow]) -> None:
    for i, row in enumerate(rows):
        for head in range(KV_HEADS):
            view, at = find(views, i * KV_HEADS + head)
            assert torch.equal(view.keys[:, at].flatten(0, 1)[: row.filled], row.keys[head])
            assert torch.equal(view.values[:, at].flatten(0, 1)[: row.filled], row.values[head])
            if view.metadata is not None:
                for name in RECORD:
                    assert torch.equal(getattr(view.metadata, name)[at, : row.filled], getattr(row, name)[head])
