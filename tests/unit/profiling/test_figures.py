"""Each measuring function on tiny sizes: positive and finite; nothing about how fast this machine
is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.core.packing import SlotPacking, int8_row_bytes
from flexgen_h2o.kernels.int8 import Int8Rows, RequantisedRows
from flexgen_h2o.planner.measure import bench as compute
from flexgen_h2o.planner.measure import engine as steps
from flexgen_h2o.planner.measure import run as measure
from flexgen_h2o.planner.measure.bench import MIN_ROUNDS, Bench
from flexgen_h2o.tiers.device import HostDevice
from tests.unit.profiling.tiny import TINY
from tests.unit.test_profile import RATES


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second of warming up."""
    monkeypatch.setattr(compute, "WARM_S", 0.0)


@pytest.fixture
def bench() -> Bench:
    return Bench(HostDevice(), TINY)


def test_calls_take_turns_and_disturbed_rounds_do_not_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def call(name: str) -> None:
        if not made or made[-1] != name:
            made.append(name)
        time.sleep(0.0001)

    timings = bench.rounds(lambda: call("a"), lambda: call("b"))
    assert all(s > 0 for seconds in timings for s in seconds)
    turns = min(map(len, timings))
    assert turns >= MIN_ROUNDS and made[: 2 * (1 + turns)] == ["a", "b"] * (1 + turns)
    rounds = [[3.0, 1.0], [5.0, 9.0, 2.0], [9.0, 1.0, 8.0, 2.0, 7.0]]
    monkeypatch.setattr(Bench, "rounds", lambda self, *calls: rounds)
    assert bench.seconds_of(int, int, int) == [1.0, 2.0, 2.0]


def test_less_work_is_not_slower_than_more() -> None:
    """A neighbour took the cores from the shortest prompts alone."""
    assert compute.no_longer_than_next([8e-3, 1e-3, 2e-3, 5e-3]) == [1e-3, 1e-3, 2e-3, 5e-3]


@pytest.mark.parametrize(
    ("held", "kind", "row_bytes"),
    [
        ("int8", Int8Rows, int8_row_bytes(128)),
        ("int4", RequantisedRows, SlotPacking(128, 4).slot_bytes),
    ],
)
def test_products_in_int8_are_of_other_rows_each_time(
    held: Any, kind: type, row_bytes: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the bytes of weights that are measured have."""
    multiply = compute.Products(bench, torch.float32).call(8, 128, 64, held)
    seen = []
    monkeypatch.setattr(compute, "linear", lambda x, weight, bias, out: seen.append(weight[0]))
    count = TINY.weight_bytes // 2 // (64 * row_bytes)
    for _ in range(2 * count):
        multiply()
    assert all(isinstance(rows, kind) and len(rows) == 64 for rows in seen)
    assert len({id(rows) for rows in seen}) == count


def test_fixed_costs_are_what_the_planner_leaves() -> None:
    found = steps.fixed_costs([(50e-6, 30e-6), (90e-6, 50e-6), (55e-6, 30e-6)], 5, 15)
    row_s = 60e-6 / 2 / 10
    assert (found["row_s"], found["step_s"]) == pytest.approx((row_s, 30e-6 - 5 * row_s))
    assert (found["attention_step_s"], found["eviction_step_s"]) == pytest.approx((20e-6, 5e-6))
    assert min(steps.fixed_costs([(50e-6, 30e-6)] * 3, 0, 0).values()) > 0


def test_nothing_is_left_behind_when_measuring_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "compute_rates", lambda *_: RATES)
    monkeypatch.setattr(
        measure, "contention", fail
    )  # the last one: file, lanes and engine have all been there
    with pytest.raises(KeyboardInterrupt):
        measure.measure("cpu", tmp_path, lambda line: None, TINY)
    assert list(tmp_path.iterdir()) == []
