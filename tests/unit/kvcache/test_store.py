"""KV units on real tiers against plain tensors: prefill, many decode columns, write-back, rows that leave.

Segments are short here, so that a few columns are several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flexgen_h2o.core.units import WRITE_BACK_STEPS
from flexgen_h2o.kvcache import layout as layout_module
from flexgen_h2o.kvcache.layout import UnitLayout
from tests.unit.kvcache.bench import BLOCKS, COLUMN, ENOUGH, PLACES, RECORD, Bench

pytestmark = pytest.mark.timeout(60)

SEGMENT = 8
PROMPTS = [[3, 9, 4, 1, 6, 2, 5], [8, 8, 1]]
# Slots a row in each of the two blocks: of the full cache, and of one that drops columns.
FULL, EVICTING = (ENOUGH, ENOUGH), (7, 12)
OpenBench = Callable[..., Bench]


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "SEGMENT_SLOTS", SEGMENT)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[OpenBench]:
    opened: list[Bench] = []

    def open_bench(place: str, budgets: tuple[int, int] = FULL) -> Bench:
        opened.append(Bench(tmp_path, place, budgets, RECORD if budgets != FULL else ()))
        return opened[-1]

    yield open_bench
    for one in opened:
        one.close()


# ---- what comes back

# Every place with the full cache and with one that drops columns.
places = pytest.mark.parametrize(("place", "budgets"), [(p, b) for p in PLACES for b in (FULL, EVICTING)])


@places
def test_columns_come_back_while_rows_leave_and_enter(bench: OpenBench, place: str, budgets: tuple[int, int]) -> None:
    """Rows leave before any column waits, while some wait, at the write-back itself, and a whole micro-batch at once.

    Others enter where some have left and where there was room: a whole micro-batch, longer ones than any before, one
    a sweep. Columns are overwritten where rows are full, the same slot many times while it waits in RAM.
    """
    one = bench(place, budgets)
    leaving = {(0, 0): [1], (3, 0): [0, 5], (3, 1): [2], (WRITE_BACK_STEPS, 1): [0], (20, 1): [0], (25, 0): [3]}
    one.run_block(PROMPTS, 2 * WRITE_BACK_STEPS + 4, leaving)
    leaving = {(0, 0): [1], (3, 0): [0, 5], (3, 1): [0, 1, 2], (9, 0): [0, 1, 2, 3, 4, 5, 6], (20, 1): [1]}
    entering = {(0, 0): [4], (4, 0): [30, 2], (3, 1): [2, 33], (9, 0): [1, 38, 7], (10, 0): [5], (11, 0): [6]}
    one.run_block(PROMPTS, WRITE_BACK_STEPS + 12, leaving, entering)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("place", ["disk", "host, brought", "three", "three, attended on the host"])
def test_rows_come_and_go_at_random(bench: OpenBench, place: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sweeps, live, most, leaving, entering = 40, [7, 3], (7, 3), {}, {}
    for sweep in range(sweeps):
        for k in range(2):
            gone = [
                i for i in range(live[k]) if float(torch.rand(1, generator=generator)) < 0.1 + 0.5 * (sweep % 9 == 8)
            ]
            room = most[k] - live[k] + len(gone)
            come = torch.randint(0, room + 1, (1,), generator=generator).item()
            if live[k]:  # a micro-batch without rows has come to its end
                come = max(1, int(come)) if len(gone) == live[k] else int(come)
                leaving[sweep, k] = gone
                entering[sweep, k] = torch.randint(1, 34, (come,), generator=generator).tolist()
                live[k] += come - len(gone)
    bench(place, FULL if seed % 2 else EVICTING).run_block(PROMPTS, sweeps, leaving, entering)


@places
def test_blocks_follow_one_another(bench: OpenBench, place: str, budgets: tuple[int, int]) -> None:
    """The first block is the longest; later ones find its bytes in every home, and rows leave early."""
    one = bench(place, budgets)
    one.run_block([[38, 30, 31, 38, 30, 33, 38], [22, 25, 20]], 20, {(18, 0): [3]})
    one.run_block([[3, 9, 4, 1, 6, 2], [8, 1, 4]], 8, {(2, 0): [1], (2, 1): [1]})
    one.run_block([[2, 2], [1]], 20, {})


def test_one_slot_a_row_takes_every_column(bench: OpenBench) -> None:
    for place in ("disk", "three"):
        bench(place, (1, 1)).run_block([[4, 2, 5]], 2 * WRITE_BACK_STEPS + 2, {(5, 0): [1]})


# ---- what moves


def moved(layout: UnitLayout, sequences: int, columns: int) -> int:
    """Bytes of the segments that hold the first columns."""
    return sum(size for part in layout.parts for _, size in layout.live_ranges(part, sequences, columns))


def in_pages(layout: UnitLayout, sequences: int, columns: int) -> int:
    ranges = [r for part in layout.parts for r in layout.live_ranges(part, sequences, columns)]
    return sum(-(-size // 4096) * 4096 for _, size in ranges)


@pytest.mark.parametrize("budgets", [FULL, EVICTING], ids=["full", "evicting"])
@pytest.mark.parametrize("place", ["disk", "disk, brought"])
def test_a_disk_unit_is_written_after_prefill_and_then_every_so_many_steps(
    bench: OpenBench, place: str, budgets: tuple[int, int]
) -> None:
    """Only the segments that are filled by then: 3 columns of the prompt, then one more a sweep."""
    one, sweeps = bench(place, budgets), 1 + 2 * WRITE_BACK_STEPS + 3
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
    found, crossing = one.lanes.bytes_moved, place == "disk, brought"
    assert (found["disk_write"], found["disk_read"]) == (writes, reads)
    assert (found["d2h"], found["h2d"]) == (writes * crossing, values_read * crossing)


@pytest.mark.parametrize("budgets", [FULL, EVICTING], ids=["full", "evicting"])
def test_only_new_columns_go_back_to_the_host(bench: OpenBench, budgets: tuple[int, int]) -> None:
    """And what comes of a full cache is the segments that are filled, one more when columns grow over a border."""
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


def test_rows_that_left_are_not_brought(bench: OpenBench) -> None:
    one = bench("host, brought")
    one.run_block([[5] * 6], 4, {(0, 0): [0, 1, 2], (1, 0): [2]})
    one.lanes.close()
    layout = one.layout(6, 9)
    # Already on its way when the first three leave: a load of all six; from then on those that were left at its start.
    least = sum(moved(layout, rows, n) for rows, n in ((3, 5), (3, 6), (2, 7)))
    most = sum(moved(layout, rows, n) for rows, n in ((6, 5), (3, 6), (3, 7)))
    assert BLOCKS * least <= one.lanes.bytes_moved["h2d"] <= BLOCKS * most < BLOCKS * 3 * moved(layout, 6, 7)


@pytest.mark.parametrize(("place", "budgets"), [("host", EVICTING), ("device", FULL)])
def test_units_that_live_where_attention_runs_move_no_byte(
    bench: OpenBench, place: str, budgets: tuple[int, int]
) -> None:
    one = bench(place, budgets)
    one.run_block(PROMPTS, 12, {(2, 0): [1]})
    assert not any(one.lanes.bytes_moved.values())
