"""Hidden states: where they are, and blocks that end when their stores have."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import PAGE
from flexgen_h2o.engine.loop import joined
from flexgen_h2o.engine.stores import HiddenStore
from flexgen_h2o.tiers.device import StandInDevice, host_buffer
from flexgen_h2o.tiers.stream import Done, Ring
from flexgen_h2o.tiers.transfers import Lanes, Mover

WIDTH = 24
LAYERS = 5


@pytest.fixture
def mover() -> Iterator[Mover]:
    lanes = Lanes({"h2d": 1, "d2h": 1}, Timeline())
    yield Mover(StandInDevice(), lanes)
    lanes.close()


def test_a_block_is_settled_when_its_stores_are_done(mover: Mover) -> None:
    """The next one uses their homes anew."""
    home = {"host": host_buffer(4 * PAGE)}
    gate = Done()
    ring = Ring(host_buffer(PAGE))
    store = HiddenStore(mover, (2 * WIDTH,), torch.bfloat16, (0.0, 1.0, 0.0), LAYERS, home, None)
    store.begin_block([5])
    store.begin_sweep(0, 5)
    region = ring.take(5 * WIDTH * 2)
    store.open((0, 0, 0), region).x.fill_(3)
    store.close((0, 0, 0), region, lambda: gate)
    settling = threading.Thread(target=store.settle, daemon=True)
    settling.start()
    settling.join(0.05)
    waited = settling.is_alive()
    gate.finish_one()
    settling.join(10)
    assert waited and not settling.is_alive()
    assert home["host"].view(torch.bfloat16)[: 5 * WIDTH].tolist() == [3] * 5 * WIDTH


def test_micro_batches_are_joined_up_to_a_bound() -> None:
    assert joined([8, 0, 2, 1, 15, 1, 0], 10) == {0: (0, 2), 3: (3,), 4: (4,), 5: (5,)}
    assert joined([0, 3, 0, 4], 10) == {1: (1, 3)} and joined([0, 0], 10) == {}
    assert joined([0, 3, 0, 4], 0) == {1: (1,), 3: (3,)}
