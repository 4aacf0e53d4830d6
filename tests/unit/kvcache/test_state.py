"""Units of state on real tiers: a toy layer, the running mean of hidden states.

It shows what a family of state layers needs of the cache: a layout of fixed bytes per sequence,
homes on every tier, loads and stores, state that is zero when a sequence joins, and a copy for the
sequences that share a prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.loop import zigzag
from flexgen_h2o.kvcache.budgets import plan_moves
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import KVPart, move_rows
from flexgen_h2o.kvcache.store import CacheStore
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice, host_buffer
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.stream import NOTHING, Ring, Shares, Stream
from flexgen_h2o.tiers.transfers import Lanes, Mover

pytestmark = pytest.mark.timeout(60)

BLOCKS = 2
BATCHES = 2
SWEEPS = 6
DEPTH = 3
HEADS = 2  # rows per sequence
WIDTH = 5  # numbers of a head's hidden state; its state has one more, the number of tokens
DTYPE = torch.float32
# Sequences at the beginning, and those that leave and join after (sweep, micro-batch).
BEGUN = (4, 3)
LEAVING = {(1, 0): [1], (1, 1): [0], (2, 0): [0, 2], (3, 1): [0, 1, 2]}
JOINING = {(1, 0): 1, (1, 1): 1, (3, 0): 2, (3, 1): 2}

# name: device, shares on device, host and disk, whether the layer runs on the host
PLACES: dict[str, tuple[type[Device], Shares, bool]] = {
    "host": (HostDevice, (0.0, 1.0, 0.0), True),
    "host and disk": (HostDevice, (0.0, 0.45, 0.55), True),
    "three": (StandInDevice, (0.3, 0.35, 0.35), False),
    "disk, brought": (StandInDevice, (0.0, 0.0, 1.0), False),
    "three, run on the host": (StandInDevice, (0.3, 0.35, 0.35), True),
}


class RunningMean:
    """A toy layer: the mean of the hidden states of a sequence so far.

    The state of a row is the mean (WIDTH numbers) and the number of tokens.
    """

    def feed(self, parts: list[KVPart], sequence: int, hidden: torch.Tensor) -> None:
        """Feed tokens (tokens, HEADS, WIDTH) of one sequence."""
        for head in range(HEADS):
            row = sequence * HEADS + head
            part = next(p for p in parts if p.start <= row < p.end)
            state = part.state[row - part.start]
            for x in hidden[:, head]:
                state[WIDTH] += 1
                state[:WIDTH] += (x - state[:WIDTH]) / state[WIDTH]

    def means(self, parts: list[KVPart]) -> torch.Tensor:
        """Return the means of all sequences, (sequences, HEADS, WIDTH)."""
        return torch.cat([part.state[:, :WIDTH] for part in parts]).unflatten(0, (-1, HEADS))


@contextmanager
def opened(
    folder: Path, kind: type[Device], layout: UnitLayout, on_host: bool
) -> Iterator[tuple[CacheStore, Ring]]:
    """A store for BLOCKS x BATCHES units, and the ring that brings them."""
    lanes = Lanes({"disk_read": 2, "disk_write": 1, "h2d": 1, "d2h": 1}, Timeline())
    scratch = Scratch(folder)
    homes = {p.tier: BLOCKS * BATCHES * layout.part_bytes(p) for p in layout.parts}
    memory = {tier: host_buffer(nbytes) for tier, nbytes in homes.items() if tier != "disk"}
    for buffer in memory.values():
        buffer.fill_(255)  # what nobody has written holds no numbers
    file = scratch.create("cache.bin", homes["disk"]) if "disk" in homes else None
    store = CacheStore(Mover(kind(), lanes), DTYPE, memory, file, host_buffer(0), {}, on_host)
    yield store, Ring(host_buffer(DEPTH * sum(layout.part_bytes(p) for p in layout.parts)))
    lanes.close()
    if file is not None:
        file.close()
    scratch.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_running_mean_is_kept_on_every_tier(tmp_path: Path, place: str) -> None:
    """Sequences leave and join between sweeps; those that join begin with a shared prefix."""
    layer = RunningMean()
    kind, shares, on_host = PLACES[place]
    layout = UnitLayout.of_state(max(BEGUN), HEADS, WIDTH + 1, DTYPE.itemsize, shares)
    live = [*BEGUN]
    # What was fed to each sequence, by (block, micro-batch).
    fed: dict[tuple[int, int], list[torch.Tensor]] = {
        (b, k): [] for b in range(BLOCKS) for k in range(BATCHES)
    }

    def step(parts: list[KVPart], fed: list[torch.Tensor], joining: int) -> None:
        """Feed a token to each sequence, and prompts with a common prefix to those that join."""
        for sequence in range(len(fed)):
            token = torch.randn(1, HEADS, WIDTH)
            layer.feed(parts, sequence, token)
            fed[sequence] = torch.cat([fed[sequence], token])
        first = len(fed)
        prefix = torch.randn(3, HEADS, WIDTH)
        if joining:
            layer.feed(parts, first, prefix)
        move_rows(parts, [(first, first + i) for i in range(1, joining)], HEADS)
        for i in range(joining):
            own = torch.randn(1 + i, HEADS, WIDTH)
            layer.feed(parts, first + i, own)
            fed.append(torch.cat([prefix, own]))
        means = torch.stack([hidden.mean(dim=0) for hidden in fed])
        assert torch.allclose(layer.means(parts), means, atol=1e-6)

    with opened(tmp_path, kind, layout, on_host) as (store, ring):
        store.begin_block([[layout] * BATCHES] * BLOCKS, live, is_open=True)
        steps = list(zigzag(SWEEPS, BLOCKS, BATCHES))
        keys = ((s.sweep, s.layer, s.micro_batch) for s in steps)
        stream = Stream(ring, keys, store, DEPTH)
        for s in steps:
            k = s.micro_batch
            if s.layer == 0:
                store.begin_sweep(k)
            if not live[k]:
                continue
            stream.prefetch()
            key = (s.sweep, s.layer, k)
            region = stream.take(key)
            parts, _ = store.open(key, region)
            mine = fed[s.layer, k]
            step(parts, mine, live[k] - len(mine))
            stream.give_back(region, store.close(key, region, 1, None, lambda: NOTHING))
            if s.layer == BLOCKS - 1:
                moves, order = plan_moves(LEAVING.get((s.sweep, k), []), live[k])
                joining = JOINING.get((s.sweep, k), 0)
                if len(order) < live[k] or joining:
                    store.change_rows(k, moves, len(order), joining)
                live[k] = len(order) + joining
                for block in range(BLOCKS):
                    fed[block, k] = [fed[block, k][i] for i in order]
        stream.drain()
        store.settle()
