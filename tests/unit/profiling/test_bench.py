"""How seconds are measured: calls take turns, and disturbed rounds do not count."""

from __future__ import annotations

import time

import pytest

from flexgen_h2o.planner.measure.bench import MIN_ROUNDS, Bench
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


def test_a_figure_is_of_undisturbed_rounds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour took the cores in half of the rounds."""
    monkeypatch.setattr(
        Bench,
        "rounds",
        lambda self, *calls: [[3.0, 1.0], [5.0, 9.0, 2.0], [9.0, 1.0, 8.0, 2.0, 7.0]],
    )
    assert bench.seconds_of(int, int, int) == [1.0, 2.0, 2.0]
