"""KV units on real tiers against plain tensors: prefill, many decode columns, write-back, rows that leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flexgen_h2o.kvcache.layout import UnitLayout, unit_layout
from flexgen_h2o.kvcache.moves import plan_moves
from flexgen_h2o.kvcache.store import CacheKey, CacheStore, PartView
from flexgen_h2o.limits import WRITE_BACK_STEPS
from flexgen_h2o.schedule import zigzag
from flexgen_h2o.tiers.buffers import host_buffer
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.mover import Mover
from flexgen_h2o.tiers.placement import Shares
from flexgen_h2o.tiers.ring import Ring
from flexgen_h2o.tiers.stream import Stream
from flexgen_h2o.tiers.transfer import NOTHING, Lanes
from flexgen_h2o.timeline import Timeline

pytestmark = pytest.mark.timeout(60)

BLOCKS, KV_HEADS, WIDTH, DTYPE = 2, 2, 8, torch.bfloat16
LARGEST_ROWS, MOST_SLOTS, BATCHES, DEPTH = 7, 60, 2, 3

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
History = dict[tuple[int, int], list[list[torch.Tensor]]]  # (block, micro-batch): keys and values of each sequence


class Bench:
    """A store with arenas for the largest block, and the plain tensors that it must agree with."""

    def __init__(self, folder: Path, device: Device, shares: Shares, on_host: bool) -> None:
        self.lanes = Lanes({"disk_read": 2, "disk_write": 1, "h2d": 1, "d2h": 1}, Timeline())
        self.scratch = Scratch(folder)
        self.shares = shares
        largest = self.layout(LARGEST_ROWS, MOST_SLOTS)
        units = BLOCKS * BATCHES
        homes = {p.tier: units * largest.part_bytes(p) for p in largest.parts}
        overlay = sum(units * largest.overlay_bytes(p) for p in largest.parts if p.tier == "disk")
        memory = {tier: host_buffer(n) for tier, n in homes.items() if tier != "disk"}
        self.file = self.scratch.create("cache.bin", homes["disk"]) if "disk" in homes else None
        self.store = CacheStore(Mover(device, self.lanes), DTYPE, memory, self.file, host_buffer(overlay), on_host)
        whole = sum(largest.part_bytes(p) for p in largest.parts)
        self.ring = Ring(host_buffer(DEPTH * whole))

    def layout(self, sequences: int, slots: int) -> UnitLayout:
        return unit_layout(sequences, KV_HEADS, slots, WIDTH, DTYPE.itemsize, self.shares)

    def close(self) -> None:
        self.lanes.close()
        if self.file is not None:
            self.file.close()
        self.scratch.close()

    def run_block(self, prompts: list[list[int]], sweeps: int, leaving: dict[tuple[int, int], list[int]]) -> None:
        """`prompts`: lengths by micro-batch; `leaving`: who leaves after (sweep, micro-batch), by place."""
        slots = [max(lengths) + sweeps for lengths in prompts]
        self.store.begin_block(
            BLOCKS, [self.layout(len(lengths), n) for lengths, n in zip(prompts, slots, strict=True)]
        )
        history: History = {(b, k): [] for b in range(BLOCKS) for k in range(len(prompts))}
        live = [list(lengths) for lengths in prompts]  # columns of each row, by its place now
        keys: Iterator[CacheKey] = ((s.sweep, s.layer, s.micro_batch) for s in zigzag(sweeps, BLOCKS, len(prompts)))
        stream = Stream(self.ring, keys, self.store, DEPTH)
        for s in zigzag(sweeps, BLOCKS, len(prompts)):
            k = s.micro_batch
            if not live[k]:
                continue
            stream.prefetch()
            self.step((s.sweep, s.layer, k), stream, history[s.layer, k], live[k])
            if s.layer == BLOCKS - 1:
                if s.sweep:
                    live[k] = [n + 1 for n in live[k]]
                self.leave(k, leaving.get((s.sweep, k), []), history, live)
        stream.drain()
        self.store.settle()

    def step(
        self, key: CacheKey, stream: Stream[CacheKey], history: list[list[torch.Tensor]], columns: list[int]
    ) -> None:
        region = stream.take(key)
        views, whole = self.store.open(key, region)
        assert sum(len(v.keys) for v in views) == len(columns) * KV_HEADS
        if key[0] == 0:
            assert whole
            history += [[torch.randn(KV_HEADS, n, WIDTH).to(DTYPE) for _ in range(2)] for n in columns]
            for i, row in enumerate(history):
                put(views, i, torch.arange(columns[i]), row)
        else:
            check(views, history, columns)
            for i, row in enumerate(history):
                new = [torch.randn(KV_HEADS, 1, WIDTH).to(DTYPE) for _ in range(2)]
                put(views, i, torch.tensor([columns[i]]), new)
                row[:] = [torch.cat(pair, dim=1) for pair in zip(row, new, strict=True)]
        slots = torch.tensor(columns).repeat_interleave(KV_HEADS)
        stores = self.store.close(key, region, slots, whole, NOTHING)
        stream.give_back(region, stores)

    def leave(self, k: int, places: list[int], history: History, live: list[list[int]]) -> None:
        if not places:
            return
        moves, order = plan_moves(places, len(live[k]))
        live[k] = [live[k][i] for i in order]
        for block in range(BLOCKS):
            history[block, k] = [history[block, k][i] for i in order]
        self.store.compact(k, moves, len(order))


def put(views: list[PartView], sequence: int, slots: torch.Tensor, pair: list[torch.Tensor]) -> None:
    """Write columns (kv_heads, n, width) of a sequence into its rows, wherever the parts are cut."""
    for head in range(KV_HEADS):
        row = sequence * KV_HEADS + head
        view = next(v for v in views if v.start <= row < v.end)
        view.keys[row - view.start, slots], view.values[row - view.start, slots] = pair[0][head], pair[1][head]


def check(views: list[PartView], history: list[list[torch.Tensor]], columns: list[int]) -> None:
    for i, (row, n) in enumerate(zip(history, columns, strict=True)):
        for head in range(KV_HEADS):
            at = i * KV_HEADS + head
            view = next(v for v in views if v.start <= at < v.end)
            assert torch.equal(view.keys[at - view.start, :n], row[0][head])
            assert torch.equal(view.values[at - view.start, :n], row[1][head])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    opened: list[Bench] = []

    def open_bench(place: str) -> Bench:
        device, shares, on_host = PLACES[place]
        opened.append(Bench(tmp_path, device(), shares, on_host))
        return opened[-1]

    yield open_bench
    for one in opened:
        one.close()


PROMPTS = [[3, 9, 4, 1, 6, 2, 5], [8, 8, 1]]


@pytest.mark.parametrize("place", PLACES)
def test_every_column_comes_back_sweep_after_sweep(bench: Callable[[str], Bench], place: str) -> None:
    bench(place).run_block(PROMPTS, 2 * WRITE_BACK_STEPS + 4, {})


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_leave_take_nobody_with_them(bench: Callable[[str], Bench], place: str) -> None:
    """Before any column waits, while some wait, at the write-back itself, and a whole micro-batch in the middle."""
    leaving = {(0, 0): [1], (3, 0): [0, 5], (3, 1): [2], (WRITE_BACK_STEPS, 1): [0], (20, 1): [0], (25, 0): [3]}
    bench(place).run_block(PROMPTS, 2 * WRITE_BACK_STEPS + 4, leaving)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("place", ["disk", "three", "three, attended on the host"])
def test_rows_leave_at_random(bench: Callable[[str], Bench], place: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sweeps, left, leaving = 24, [7, 3], {}
    for sweep in range(sweeps):
        for k in range(2):
            gone = [i for i in range(left[k]) if float(torch.rand(1, generator=generator)) < 0.06]
            left[k] -= len(gone)
            leaving[sweep, k] = gone
    bench(place).run_block(PROMPTS, sweeps, leaving)


@pytest.mark.parametrize("place", PLACES)
def test_blocks_follow_one_another(bench: Callable[[str], Bench], place: str) -> None:
    """The first block is the longest; later ones find its bytes in every home, and rows leave early."""
    one = bench(place)
    one.run_block([[38, 30, 31, 38, 30, 33, 38], [22, 25, 20]], 20, {(18, 0): [3]})
    one.run_block([[3, 9, 4, 1, 6, 2], [8, 1, 4]], 8, {(2, 0): [1], (2, 1): [1]})
    one.run_block([[2, 2], [1]], 20, {})


@pytest.mark.parametrize("place", ["disk", "disk, brought"])
def test_a_disk_unit_is_written_after_prefill_and_then_every_so_many_steps(
    bench: Callable[[str], Bench], place: str
) -> None:
    one = bench(place)
    one.run_block([[3] * 4], 1 + 2 * WRITE_BACK_STEPS + 3, {})
    layout = one.layout(4, 3 + 1 + 2 * WRITE_BACK_STEPS + 3)
    one.lanes.close()  # all writes are done
    moved, written = one.lanes.bytes_moved, BLOCKS * 3 * layout.part_bytes(layout.parts[0])
    assert moved["disk_write"] == written
    crossing = place == "disk, brought"
    assert moved["d2h"] == written * crossing
    values = BLOCKS * (3 + 2 * WRITE_BACK_STEPS) * 2 * 8 * layout.row_bytes  # of each load, without its padding
    assert moved["h2d"] == values * crossing


def test_only_new_columns_go_back_to_the_host(bench: Callable[[str], Bench]) -> None:
    one = bench("host, brought")
    one.run_block([[5] * 4], 11, {})
    layout = one.layout(4, 16)
    prefill, column = layout.part_bytes(layout.parts[0]), 2 * 4 * KV_HEADS * WIDTH * DTYPE.itemsize
    one.lanes.close()
    assert one.lanes.bytes_moved["d2h"] == BLOCKS * (prefill + 10 * column)


@pytest.mark.parametrize("place", ["host", "device"])
def test_units_that_live_where_attention_runs_move_no_byte(bench: Callable[[str], Bench], place: str) -> None:
    one = bench(place)
    one.run_block(PROMPTS, 5, {(2, 0): [1]})
    assert not any(one.lanes.bytes_moved.values())
