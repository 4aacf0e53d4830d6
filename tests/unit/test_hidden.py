"""Hidden states on their tiers: what a layer leaves is what the next one finds, however many tokens there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import PAGE, round_up
from flexgen_h2o.engine.loop import UnitKey, zigzag
from flexgen_h2o.engine.memory_plan import hidden_home_bytes, hidden_is_streamed
from flexgen_h2o.engine.stores import HiddenStore
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice, host_buffer
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.stream import NOTHING, Done, Ring, Shares, Stream, split_rows
from flexgen_h2o.tiers.transfers import Lanes, Mover

pytestmark = pytest.mark.timeout(60)

WIDTH, LAYERS, DEPTH, DTYPE = 24, 5, 3, torch.bfloat16
ROW = WIDTH * DTYPE.itemsize
MOST_TOKENS, BATCHES = 230, 3

PLACES: dict[str, tuple[type[Device], Shares]] = {
    "host": (HostDevice, (0.0, 1.0, 0.0)),
    "disk": (HostDevice, (0.0, 0.0, 1.0)),
    "host and disk": (HostDevice, (0.0, 0.37, 0.63)),
    "device": (StandInDevice, (1.0, 0.0, 0.0)),
    "host, brought": (StandInDevice, (0.0, 1.0, 0.0)),
    "disk, brought": (StandInDevice, (0.0, 0.0, 1.0)),
    "three": (StandInDevice, (0.33, 0.33, 0.34)),
    "device and disk": (StandInDevice, (0.99, 0.0, 0.01)),
}


class Bench:
    """A store with arenas for the largest block, walked as the executor walks it."""

    def __init__(self, folder: Path, device: Device, shares: Shares) -> None:
        self.lanes = Lanes({"disk_read": 2, "disk_write": 1, "h2d": 1, "d2h": 1}, Timeline())
        self.scratch = Scratch(folder)
        homes = {tier: BATCHES * n for tier, n in hidden_home_bytes(MOST_TOKENS, shares, ROW).items()}
        self.file = self.scratch.create("hidden.bin", homes["disk"]) if "disk" in homes else None
        memory = {tier: host_buffer(n) for tier, n in homes.items() if tier != "disk"}
        self.store = HiddenStore(Mover(device, self.lanes), DTYPE, WIDTH, shares, LAYERS, memory, self.file)
        streamed = hidden_is_streamed(shares, device.is_host)
        self.ring = Ring(host_buffer(DEPTH * round_up(MOST_TOKENS * ROW, PAGE))) if streamed else None

    def close(self) -> None:
        self.lanes.close()
        if self.file is not None:
            self.file.close()
        self.scratch.close()

    def run_block(self, tokens: list[list[int]], ahead: int = DEPTH) -> None:
        """`tokens` of each micro-batch by sweep; 0 when all its rows have finished."""
        self.store.begin_block([max(counts) for counts in zip(*tokens, strict=True)])
        for k, count in enumerate(tokens[0]):
            self.store.begin_sweep(k, count)
        state: dict[int, torch.Tensor] = {}
        order = [(s.sweep, s.layer, s.micro_batch) for s in zigzag(len(tokens), LAYERS, len(tokens[0]))]
        stream: Stream[UnitKey] = Stream(self.ring, iter(order), self.store, ahead)
        for sweep, layer, k in order:
            count = tokens[sweep][k]
            if not count:
                continue
            stream.prefetch()
            region = stream.take((sweep, layer, k))
            x = self.store.open((sweep, layer, k), region)
            assert x.shape == (count, WIDTH) and x.dtype == DTYPE
            if layer:
                assert torch.equal(x, state[k]), f"sweep {sweep}, layer {layer}, micro-batch {k}"
            state[k] = torch.randn(count, WIDTH).to(DTYPE)
            x.copy_(state[k])
            if layer == LAYERS - 1:
                self.store.begin_sweep(k, tokens[sweep + 1][k] if sweep + 1 < len(tokens) else 0)
            stores = self.store.close((sweep, layer, k), region, NOTHING)
            stream.give_back(region, stores)
        stream.drain()
        self.store.settle()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    opened: list[Bench] = []

    def open_bench(place: str) -> Bench:
        device, shares = PLACES[place]
        opened.append(Bench(tmp_path, device(), shares))
        return opened[-1]

    yield open_bench
    for one in opened:
        one.close()


# A micro-batch may have more rows than prompt tokens in another, shrink every sweep, and end before the others.
SHRINKING = [[230, 100, 7], [7, 7, 7], [7, 6, 4], [5, 6, 1], [2, 6, 0], [1, 6, 0], [1, 5, 0]]
# And grow again where prompts enter.
REFILLED = [[20, 9, 40], [4, 3, 2], [130, 2, 5], [6, 230, 1], [6, 5, 90], [1, 4, 0], [100, 0, 0]]


@pytest.mark.parametrize(
    ("place", "ahead"), [*((place, DEPTH) for place in PLACES), ("three", 0), ("host and disk", 0)]
)
def test_each_layer_finds_what_the_one_before_left(bench: Callable[[str], Bench], place: str, ahead: int) -> None:
    one = bench(place)
    one.run_block(SHRINKING, ahead)
    one.run_block([[3, 3], [3, 3], [1, 0]], ahead)
    one.run_block(REFILLED, ahead)


@pytest.mark.parametrize("place", ["host", "device"])
def test_states_that_live_where_layers_run_move_no_byte(bench: Callable[[str], Bench], place: str) -> None:
    one = bench(place)
    one.run_block(SHRINKING)
    assert not any(one.lanes.bytes_moved.values())


@pytest.mark.parametrize("place", ["host, brought", "disk, brought"])
def test_the_embedding_loads_nothing_and_the_head_stores_nothing(bench: Callable[[str], Bench], place: str) -> None:
    one = bench(place)
    one.run_block([[50, 20], [5, 5]])
    one.lanes.close()
    moved = (LAYERS - 1) * (50 + 20 + 5 + 5) * ROW
    assert (one.lanes.bytes_moved["h2d"], one.lanes.bytes_moved["d2h"]) == (moved, moved)


def test_a_block_is_settled_when_its_stores_are_done(bench: Callable[[str], Bench]) -> None:
    """The next one uses their homes anew."""
    one, gate = bench("host, brought"), Done()
    one.store.begin_block([5])
    one.store.begin_sweep(0, 5)
    assert one.ring is not None
    region = one.ring.take(5 * ROW)
    one.store.open((0, 0, 0), region)
    one.store.close((0, 0, 0), region, gate)
    settling = threading.Thread(target=one.store.settle, daemon=True)
    settling.start()
    settling.join(0.05)
    waited = settling.is_alive()
    gate.finish_one()
    settling.join(10)
    assert waited and not settling.is_alive()


@pytest.mark.parametrize("shares", [(0.33, 0.33, 0.34), (0.99, 0.0, 0.01), (0.25, 0.5, 0.25)], ids=str)
def test_a_home_has_room_for_every_smaller_count_too(shares: Shares) -> None:
    """Rounding may give a tier one row more when there are fewer tokens."""
    for most in (1, 2, 3, 5, 17, 100):
        room = hidden_home_bytes(most, shares, PAGE)
        for tokens in range(1, most + 1):
            for part in split_rows(tokens, shares):
                assert part.rows * PAGE <= room[part.tier]
