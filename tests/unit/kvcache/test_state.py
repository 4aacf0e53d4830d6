"""Units of state on real tiers: a toy layer, the running mean of hidden states.

It shows what a family of state layers needs of the cache: a layout of fixed bytes per sequence,
homes on every tier, loads and stores, state that is zero when a sequence joins, and a copy for the
sequences that share a prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.loop import zigzag
from flexgen_h2o.kvcache.budgets import plan_moves
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import KVPart, move_rows
from flexgen_h2o.kvcache.store import CacheKey, CacheStore
from flexgen_h2o.tiers.device import host_buffer
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.stream import NOTHING, Ring, Stream
from flexgen_h2o.tiers.transfers import Lanes, Mover
from tests.unit.kvcache.test_store import PLACES

HEADS = 2  # rows per sequence
WIDTH = 5  # numbers of a head's hidden state; its state has one more, the number of tokens
LAYERS = 2
DTYPE = torch.float32
DEPTH = 2


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


class Bench:
    """A store of state for LAYERS layers and two micro-batches of at most `most` sequences."""

    def __init__(self, folder: Path, place: str, most: int) -> None:
        kind, self.shares, on_host = PLACES[place]
        largest = self.layout(most)
        units = 2 * LAYERS
        homes = Counter({p.tier: units * largest.part_bytes(p) for p in largest.parts})
        memory = {tier: host_buffer(n) for tier, n in homes.items() if tier != "disk"}
        for buffer in memory.values():
            buffer.fill_(255)  # old data, which is no number
        self.scratch = Scratch(folder)
        self.file = self.scratch.create("cache.bin", homes["disk"]) if "disk" in homes else None
        self.lanes = Lanes({"disk_read": 2, "disk_write": 1, "h2d": 1, "d2h": 1}, Timeline())
        mover = Mover(kind(), self.lanes)
        nothing = host_buffer(0)
        self.store = CacheStore(mover, DTYPE, memory, self.file, nothing, {}, on_host)
        self.ring = Ring(host_buffer(DEPTH * sum(largest.part_bytes(p) for p in largest.parts)))

    def layout(self, sequences: int) -> UnitLayout:
        return UnitLayout.of_state(sequences, HEADS, WIDTH + 1, DTYPE.itemsize, self.shares)

    def close(self) -> None:
        self.lanes.close()
        if self.file is not None:
            self.file.close()
        self.scratch.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_running_mean_is_kept_on_every_tier(tmp_path: Path, place: str) -> None:
    """Sequences leave and join between sweeps; those that join begin with a shared prefix."""
    bench = Bench(tmp_path, place, 4)
    torch.manual_seed(0)
    layer = RunningMean()
    fed: dict[tuple[int, int], list[torch.Tensor]] = {}  # all that a sequence was fed
    joins = {0: [3, 2], 2: [1, 2], 3: [0, 1], 4: [2, 0]}  # by sweep, for each micro-batch
    leaves = {1: [[1], [0]], 2: [[0, 2], []], 3: [[], [0, 1, 2]]}  # after the sweep
    try:
        bench.store.begin_block([[bench.layout(4)] * 2] * LAYERS, joins[0], is_open=True)
        live = [0, 0]
        steps = list(zigzag(6, LAYERS, 2))
        keys: Iterator[CacheKey] = ((s.sweep, s.layer, s.micro_batch) for s in steps)
        stream = Stream(bench.ring, keys, bench.store, DEPTH)
        for s in steps:
            k = s.micro_batch
            if s.layer == 0:
                bench.store.begin_sweep(k)
            new = joins.get(s.sweep, [0, 0])[k]
            count = live[k] + new
            if count:
                stream.prefetch()
                key = (s.sweep, s.layer, k)
                region = stream.take(key)
                parts, _ = bench.store.open(key, region)
                history = fed.setdefault((s.layer, k), [])
                _step(layer, parts, history, new)
                assert torch.allclose(layer.means(parts), _means(history), atol=1e-6)
                given = bench.store.close(key, region, 1, None, lambda: NOTHING)
                stream.give_back(region, given)
            if s.layer == LAYERS - 1:
                live[k] = count
                moves, order = plan_moves(leaves.get(s.sweep, [[], []])[k], live[k])
                more = joins.get(s.sweep + 1, [0, 0])[k]
                if len(order) < live[k] or more:
                    bench.store.change_rows(k, moves, len(order), more)
                live[k] = len(order)
                for layer_index in range(LAYERS):
                    old = fed[layer_index, k]
                    fed[layer_index, k] = [old[i] for i in order]
        stream.drain()
        bench.store.settle()
    finally:
        bench.close()


def _step(layer: RunningMean, parts: list[KVPart], fed: list[torch.Tensor], new: int) -> None:
    """Feed a token to each sequence, and prompts with a common prefix to `new` more."""
    for sequence in range(len(fed)):
        token = torch.randn(1, HEADS, WIDTH)
        layer.feed(parts, sequence, token)
        fed[sequence] = torch.cat([fed[sequence], token])
    if not new:
        return
    first = len(fed)
    assert not any(bool(p.state.any()) for p in _behind(parts, first * HEADS))
    prefix = torch.randn(3, HEADS, WIDTH)
    layer.feed(parts, first, prefix)
    move_rows(parts, [(first, first + i) for i in range(1, new)], HEADS)
    for i in range(new):
        own = torch.randn(1 + i, HEADS, WIDTH)
        layer.feed(parts, first + i, own)
        fed.append(torch.cat([prefix, own]))


def _behind(parts: list[KVPart], row: int) -> list[KVPart]:
    """Return the parts of the rows from `row` on."""
    return [p.part(max(0, row - p.start), p.rows, 0) for p in parts if p.end > row]


def _means(fed: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([hidden.mean(dim=0) for hidden in fed])


def test_bytes_of_state_do_not_depend_on_tokens() -> None:
    layout = UnitLayout.of_state(3, HEADS, WIDTH, 4, (0.0, 0.5, 0.5))
    assert layout.sequence_bytes == HEADS * WIDTH * 4
    for part in layout.parts:
        assert layout.overlay_bytes(part) == layout.metadata_bytes(part) == 0
        assert layout.live_ranges(part, 3, 1) == [(0, part.rows * WIDTH * 4)]
        assert layout.part_bytes(part) <= layout.room_bytes(part)
