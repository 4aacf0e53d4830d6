"""How seconds are measured: calls take turns, slow calls fewer times; buffers hold the numbers that
they should."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from flexgen_h2o.planner.measure.bench import MIN_ROUNDS, ROUNDS, Bench
from flexgen_h2o.tiers.device import HostDevice
from tests.unit.profiling.tiny import TINY


@pytest.fixture
def bench() -> Bench:
    return Bench(HostDevice(), TINY)


def test_calls_take_turns_after_warming_up(bench: Bench) -> None:
    made: list[str] = []

    def call(name: str) -> None:
        if not made or made[-1] != name:
            made.append(name)
        time.sleep(0.0001)

    timings = bench.rounds(lambda: call("a"), lambda: call("b"))
    assert all(s > 0 for seconds in timings for s in seconds)
    turns = min(map(len, timings))
    assert turns >= MIN_ROUNDS and made[: 2 * (1 + turns)] == ["a", "b"] * (1 + turns)


def test_slow_call_is_made_a_few_times_only(bench: Bench) -> None:
    made: list[int] = []

    def call() -> None:
        made.append(0)
        time.sleep(2 * TINY.figure_s)

    assert len(bench.rounds(call)[0]) == MIN_ROUNDS
    assert len(made) == 2 + MIN_ROUNDS


def test_very_slow_call_is_timed_once(bench: Bench) -> None:
    made: list[int] = []

    def call() -> None:
        made.append(0)
        time.sleep(2 * TINY.longest_s)

    assert bench.seconds_of(call)[0] >= 2 * TINY.longest_s
    assert len(made) == 2


def test_a_figure_is_of_undisturbed_rounds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour took the cores in half of the rounds."""
    monkeypatch.setattr(
        Bench,
        "rounds",
        lambda self, *calls: [[3.0, 1.0], [5.0, 9.0, 2.0], [9.0, 1.0, 8.0, 2.0, 7.0]],
    )
    assert bench.seconds_of(int, int, int) == [1.0, 2.0, 2.0]


def test_quick_call_is_made_often() -> None:
    bench = Bench(HostDevice(), replace(TINY, figure_s=0.02))
    made = 0

    def call() -> None:
        nonlocal made
        made += 1

    assert 1 <= len(bench.rounds(call)[0]) <= ROUNDS
    assert made > 2 * ROUNDS  # not once a round, as slow calls are


def test_buffers_are_filled_with_normal_numbers(bench: Bench) -> None:
    made = bench.normal(torch.bfloat16, 3, 2**19)
    assert made.shape == (3, 2**19) and made.dtype == torch.bfloat16
    assert abs(float(made.float().mean())) < 0.01 and abs(float(made.float().std()) - 1) < 0.01
    assert torch.equal(made, bench.normal(torch.bfloat16, 3, 2**19))
