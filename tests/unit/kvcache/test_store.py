"""KV units on real tiers against plain tensors: prefill, many decode columns, write-back, rows that
leave.

Segments are short here, so that a few columns are several of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import WRITE_BACK_STEPS
from flexgen_h2o.engine.loop import zigzag
from flexgen_h2o.kvcache import layout as layout_module
from flexgen_h2o.kvcache.budgets import plan_moves
from flexgen_h2o.kvcache.eviction.policy import RowRecord
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import KVPart, first_rows
from flexgen_h2o.kvcache.store import CacheKey, CacheStore
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice, host_buffer
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.stream import NOTHING, Ring, Shares, Stream, is_streamed
from flexgen_h2o.tiers.transfers import Lanes, Mover
from tests.parity.cases import thinned

pytestmark = pytest.mark.timeout(60)

BLOCKS = 2
KV_HEADS = 2
WIDTH = 32
DTYPE = torch.bfloat16
COLUMN = 2 * KV_HEADS * WIDTH * DTYPE.itemsize  # bytes of the key and the value of one token
LARGEST_ROWS = 7
MAX_SLOTS = 80
BATCHES = 2
DEPTH = 3
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
    """Keys, values and record that slots of a sequence must hold, (kv_heads, filled, ...)."""

    columns: dict[str, torch.Tensor]
    length: int  # columns that it has had

    @property
    def filled(self) -> int:
        return self.columns["keys"].shape[1]


def random_columns(count: int, start: int) -> dict[str, torch.Tensor]:
    found = {name: torch.randn(KV_HEADS, count, WIDTH).to(DTYPE) for name in ("keys", "values")}
    found |= {name: torch.randn(KV_HEADS, count) for name in ("scores", "norms")}
    return found | {
        "positions": torch.arange(start, start + count, dtype=torch.int32)
        .expand(KV_HEADS, count)
        .clone()
    }


Changes = dict[tuple[int, int], list[Any]]  # by (sweep, micro-batch)
Layout = Callable[[Shares], UnitLayout]
# (block, parts, whether all is stored, sequences before, prompts that enter) -> columns, slots
Step = Callable[
    [int, list[KVPart], bool, list[Any], Sequence[Any]], tuple[int, list[torch.Tensor] | None]
]


class Bench:
    """A store with arenas for the largest block, of BATCHES micro-batches in BLOCKS blocks."""

    def __init__(self, folder: Path, place: str, dtype: torch.dtype, largest: Layout) -> None:
        kind, self.shares, on_host = PLACES[place]
        layout = largest(self.shares)
        self.lanes = Lanes({"disk_read": 2, "disk_write": 1, "h2d": 1, "d2h": 1}, Timeline())
        self.scratch = Scratch(folder)
        units = BLOCKS * BATCHES
        homes = {p.tier: units * layout.part_bytes(p) for p in layout.parts}
        memory = {tier: host_buffer(n) for tier, n in homes.items() if tier != "disk"}
        metadata: Counter[str] = Counter()
        overlay = 0
        for part in layout.parts:
            ring = "host" if on_host else "device"
            where = ring if is_streamed(part.tier, on_host) else part.tier
            metadata[where] += units * (layout.metadata_bytes(part) + 64)
            overlay += units * layout.overlay_bytes(part) * (part.tier == "disk")
        arenas = {tier: host_buffer(n) for tier, n in metadata.items()}
        waiting = host_buffer(overlay)
        for buffer in (*memory.values(), *arenas.values(), waiting):
            buffer.fill_(255)  # empty slots hold no numbers
        self.file = self.scratch.create("cache.bin", homes["disk"]) if "disk" in homes else None
        mover = Mover(kind(), self.lanes)
        self.store = CacheStore(mover, dtype, memory, self.file, waiting, arenas, on_host)
        self.ring = Ring(host_buffer(DEPTH * sum(layout.part_bytes(p) for p in layout.parts)))

    def close(self) -> None:
        self.lanes.close()
        if self.file is not None:
            self.file.close()
        self.scratch.close()

    def run(
        self,
        layouts: Sequence[Sequence[UnitLayout]],
        prompts: Sequence[Sequence[Any]],
        sweeps: int,
        leaving: Changes,
        entering: Changes,
        step: Step,
    ) -> None:
        """prompts: what each sequence begins with, by micro-batch; entering: those that come.

        They take the places that are free behind the others, as far as there are.
        leaving: who leaves after (sweep, micro-batch).
        """
        self.store.begin_block(layouts, [len(n) for n in prompts], is_open=True)
        history: dict[tuple[int, int], list[Any]] = {
            (b, k): [] for b in range(BLOCKS) for k in range(len(prompts))
        }
        live = [list(begun) for begun in prompts]
        steps = list(zigzag(sweeps, BLOCKS, len(prompts)))
        keys: Iterator[CacheKey] = ((s.sweep, s.layer, s.micro_batch) for s in steps)
        stream = Stream(self.ring, keys, self.store, DEPTH)
        for s in steps:
            k = s.micro_batch
            if s.layer == 0:
                self.store.begin_sweep(k)
            if not live[k]:
                continue
            stream.prefetch()
            key = (s.sweep, s.layer, k)
            region = stream.take(key)
            views, whole = self.store.open(key, region)
            rows = history[s.layer, k]
            columns, slots = step(s.layer, views, whole, rows, live[k][len(rows) :])
            given = self.store.close(key, region, columns, slots, lambda: NOTHING)
            stream.give_back(region, given)
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


class Slots(Bench):
    """budgets: slots that a row of each transformer block fills."""

    def __init__(
        self, folder: Path, place: str, budgets: Sequence[int], record: tuple[str, ...]
    ) -> None:
        self.budgets = budgets
        self.record = record
        super().__init__(folder, place, DTYPE, lambda _: self.layout(LARGEST_ROWS, MAX_SLOTS))

    def layout(self, sequences: int, slots: int) -> UnitLayout:
        record = RowRecord(self.record)
        itemsize = DTYPE.itemsize
        return UnitLayout(sequences, KV_HEADS, slots, WIDTH, itemsize, self.shares, record)

    def run_block(
        self,
        prompts: list[list[int]],
        sweeps: int,
        leaving: Changes,
        entering: Changes | None = None,
    ) -> None:
        """prompts: columns that stay of each, by micro-batch."""
        entering = entering or {}
        most = max(n for p in (*prompts, *entering.values()) for n in p)
        layouts = [
            [self.layout(len(n), min(budget, most + sweeps)) for n in prompts]
            for budget in self.budgets
        ]
        self.run(layouts, prompts, sweeps, leaving, entering, self.step)

    def step(
        self,
        block: int,
        views: list[KVPart],
        whole: bool,
        rows: list[PlainRow],
        prompts: Sequence[int],
    ) -> tuple[int, list[torch.Tensor] | None]:
        budget = self.budgets[block]
        count = len(rows) + len(prompts)
        assert sum(view.rows for view in views) == count * KV_HEADS
        assert all(bool(view.record) is bool(self.record) for view in views)
        taken: list[torch.Tensor] | None = None
        before = first_rows(views, len(rows) * KV_HEADS)
        if rows:
            check(before, rows)
            slots = torch.stack([self._grow(row, budget) for row in rows])
            taken = self._put_new(before, rows, slots)
        for prompt in prompts:
            assert whole
            row = PlainRow(random_columns(min(prompt, budget), 0), prompt)
            self._put_prompt(views, len(rows), row)
            rows.append(row)
        return max(row.filled for row in rows), None if whole else taken

    def _grow(self, row: PlainRow, budget: int) -> torch.Tensor:
        """The slot of each kv-head that the row's next column takes: the next free one, else
        any."""
        new = random_columns(1, row.length)
        row.length += 1
        if row.filled < budget:
            for name, tensor in row.columns.items():
                row.columns[name] = torch.cat([tensor, new[name]], dim=1)
            return torch.full((KV_HEADS,), row.filled - 1)
        # Often the slot of a step before, so that one waits in RAM twice.
        slots = torch.randint(0, min(3, budget) if row.length % 3 else budget, (KV_HEADS,))
        for name, tensor in row.columns.items():
            tensor[torch.arange(KV_HEADS), slots] = new[name][:, 0]
        return slots

    def _put_prompt(self, views: list[KVPart], place: int, row: PlainRow) -> None:
        for head in range(KV_HEADS):
            view, at = find(views, place * KV_HEADS + head)
            own = slice(head, head + 1)
            held = row.columns
            view.write_first(slice(at, at + 1), held["keys"][own], held["values"][own])
            for name in self.record:
                view.record[name][at, : row.filled] = held[name][head]

    def _put_new(
        self, views: list[KVPart], rows: list[PlainRow], slots: torch.Tensor
    ) -> list[torch.Tensor]:
        """Write the newest column of each row to its slots (sequences, kv_heads); returns them view
        by view."""
        heads = torch.arange(KV_HEADS)
        new = {
            name: torch.cat(
                [row.columns[name][heads, s] for row, s in zip(rows, slots, strict=True)]
            )
            for name in ("keys", "values", *self.record)
        }
        taken = []
        for view in views:
            here = slice(view.start, view.end)
            taken.append(slots.flatten()[here])
            no_numbers = torch.zeros(7, view.rows, dtype=torch.int32)
            view.write(taken[-1], new["keys"][here], new["values"][here], no_numbers)
            for name in self.record:
                view.record[name][torch.arange(view.rows), taken[-1]] = new[name][here]
        return taken


def find(views: list[KVPart], row: int) -> tuple[KVPart, int]:
    view = next(v for v in views if v.start <= row < v.end)
    return view, row - view.start


def check(views: list[KVPart], rows: list[PlainRow]) -> None:
    for i, row in enumerate(rows):
        for head in range(KV_HEADS):
            view, at = find(views, i * KV_HEADS + head)
            found = {name: t[at] for name, t in view.record.items()}
            found |= {"keys": view.keys[:, at].flatten(0, 1)}
            found |= {"values": view.values[:, at].flatten(0, 1)}
            for name in row.columns.keys() & found.keys():
                assert torch.equal(found[name][: row.filled], row.columns[name][head])


# ---- the tests


SEGMENT = 8
PROMPTS = [[3, 9, 4, 1, 6, 2, 5], [8, 8, 1]]
# Slots a row in each of the two blocks: of the full cache, and of one that drops columns.
FULL = (ENOUGH, ENOUGH)
EVICTING = (7, 12)
OpenBench = Callable[..., Slots]


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "SEGMENT_SLOTS", SEGMENT)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[OpenBench]:
    with ExitStack() as opened:

        def open_bench(place: str, budgets: tuple[int, int] = FULL) -> Slots:
            one = Slots(tmp_path, place, budgets, RECORD if budgets != FULL else ())
            opened.callback(one.close)
            return one

        yield open_bench


# ---- what comes back

# Every place with the full cache and with one that drops columns.
WHERE = [(place, (FULL, EVICTING)[(i + j) % 2]) for i, place in enumerate(PLACES) for j in range(2)]
places = pytest.mark.parametrize(("place", "budgets"), thinned(WHERE, 2))


@places
def test_columns_come_back_while_rows_leave_and_enter(
    bench: OpenBench, place: str, budgets: tuple[int, int]
) -> None:
    """Rows leave before any column waits, while some wait, at the write-back itself, and a whole
    micro-batch at once.

    Others enter where some have left and where there was room: a whole micro-batch, longer ones
    than any before, one a sweep. Columns are overwritten where rows are full, the same slot many
    times while it waits in RAM.
    """
    one = bench(place, budgets)
    leaving = {
        (0, 0): [1],
        (3, 0): [0, 5],
        (3, 1): [2],
        (WRITE_BACK_STEPS, 1): [0],
        (20, 1): [0],
        (25, 0): [3],
    }
    one.run_block(PROMPTS, 2 * WRITE_BACK_STEPS + 4, leaving)
    leaving = {
        (0, 0): [1],
        (3, 0): [0, 5],
        (3, 1): [0, 1, 2],
        (9, 0): [0, 1, 2, 3, 4, 5, 6],
        (20, 1): [1],
    }
    entering = {
        (0, 0): [4],
        (4, 0): [30, 2],
        (3, 1): [2, 33],
        (9, 0): [1, 38, 7],
        (10, 0): [5],
        (11, 0): [6],
    }
    one.run_block(PROMPTS, WRITE_BACK_STEPS + 12, leaving, entering)
    one.run_block([[2, 2], [1]], 20, {})  # finds bytes of the longer ones in every home


# ---- what moves


def moved(layout: UnitLayout, sequences: int, columns: int) -> int:
    """Bytes of the segments that hold the first columns."""
    return sum(
        size for part in layout.parts for _, size in layout.live_ranges(part, sequences, columns)
    )


def in_pages(layout: UnitLayout, sequences: int, columns: int) -> int:
    ranges = [r for part in layout.parts for r in layout.live_ranges(part, sequences, columns)]
    return sum(-(-size // 4096) * 4096 for _, size in ranges)


@pytest.mark.parametrize("budgets", [FULL, EVICTING], ids=["full", "evicting"])
@pytest.mark.parametrize("place", ["disk", "disk, brought"])
def test_a_disk_unit_is_written_after_prefill_and_then_every_so_many_steps(
    bench: OpenBench, place: str, budgets: tuple[int, int]
) -> None:
    """Only the segments that are filled by then: 3 columns of the prompt, then one more a sweep."""
    one = bench(place, budgets)
    sweeps = 1 + 2 * WRITE_BACK_STEPS + 3
    one.run_block([[3] * 4], sweeps, {})
    one.lanes.close()  # all writes are done
    writes = reads = values_read = 0
    for budget in budgets:
        layout = one.layout(4, min(budget, 3 + sweeps))
        for after in (0, WRITE_BACK_STEPS, 2 * WRITE_BACK_STEPS):
            writes += in_pages(layout, 4, min(budget, 3 + after))
        for sweep in range(1, sweeps):
            reads += in_pages(layout, 4, min(budget, 3 + sweep - 1))
            values_read += moved(layout, 4, min(budget, 3 + sweep - 1))
    found = one.lanes.bytes_moved
    crossing = place == "disk, brought"
    assert (found["disk_write"], found["disk_read"]) == (writes, reads)
    assert (found["d2h"], found["h2d"]) == (writes * crossing, values_read * crossing)


@pytest.mark.parametrize("budgets", [FULL, EVICTING], ids=["full", "evicting"])
def test_only_new_columns_go_back_to_the_host(bench: OpenBench, budgets: tuple[int, int]) -> None:
    """And what comes of a full cache is the segments that are filled, one more when columns grow
    over a border."""
    one = bench("host, brought", budgets)
    one.run_block([[5] * 4], 21, {})
    one.lanes.close()
    sent = brought = 0
    for budget in budgets:
        layout = one.layout(4, min(budget, 26))
        sent += moved(layout, 4, 5) + 20 * 4 * COLUMN
        brought += sum(moved(layout, 4, min(budget, 5 + sweep)) for sweep in range(20))
    assert (one.lanes.bytes_moved["d2h"], one.lanes.bytes_moved["h2d"]) == (sent, brought)
    full = one.layout(4, 26)
    if budgets == FULL:
        assert moved(full, 4, 5) < moved(full, 4, SEGMENT + 1) < moved(full, 4, 25)
