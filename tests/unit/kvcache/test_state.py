"""Units of state on real tiers: a toy layer, the running mean of hidden states.

It shows what a family of state layers needs of the cache: a layout of fixed bytes per sequence,
homes on every tier, loads and stores, state that is zero when a sequence joins, and a copy for the
sequences that share a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import KVPart, move_rows
from flexgen_h2o.tiers.stream import Shares
from tests.unit.kvcache.test_store import BATCHES, BLOCKS, PLACES, Bench

HEADS = 2  # rows per sequence
WIDTH = 5  # numbers of a head's hidden state; its state has one more, the number of tokens
DTYPE = torch.float32


def state_layout(shares: Shares) -> UnitLayout:
    return UnitLayout.of_state(4, HEADS, WIDTH + 1, DTYPE.itemsize, shares)


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


@pytest.mark.parametrize("place", PLACES)
def test_a_running_mean_is_kept_on_every_tier(tmp_path: Path, place: str) -> None:
    """Sequences leave and join between sweeps; those that join begin with a shared prefix."""
    torch.manual_seed(0)
    layer = RunningMean()

    def step(
        block: int, parts: list[KVPart], _: bool, fed: list[torch.Tensor], new: Sequence[object]
    ) -> tuple[int, None]:
        """Feed a token to each sequence, and prompts with a common prefix to the new ones."""
        for sequence in range(len(fed)):
            token = torch.randn(1, HEADS, WIDTH)
            layer.feed(parts, sequence, token)
            fed[sequence] = torch.cat([fed[sequence], token])
        first = len(fed)
        assert not any(bool(p.state.any()) for p in _behind(parts, first * HEADS))
        prefix = torch.randn(3, HEADS, WIDTH)
        if new:
            layer.feed(parts, first, prefix)
        move_rows(parts, [(first, first + i) for i in range(1, len(new))], HEADS)
        for i in range(len(new)):
            own = torch.randn(1 + i, HEADS, WIDTH)
            layer.feed(parts, first + i, own)
            fed.append(torch.cat([prefix, own]))
        means = torch.stack([hidden.mean(dim=0) for hidden in fed])
        assert torch.allclose(layer.means(parts), means, atol=1e-6)
        return 1, None

    bench = Bench(tmp_path, place, DTYPE, state_layout)
    layouts = [[state_layout(bench.shares)] * BATCHES] * BLOCKS
    leaving = {(1, 0): [1], (1, 1): [0], (2, 0): [0, 2], (3, 1): [0, 1, 2]}
    entering = {(1, 0): [0], (1, 1): [0, 0], (2, 1): [0], (3, 0): [0, 0]}
    try:
        bench.run(layouts, [[0] * 4, [0] * 3], 6, leaving, entering, step)
    finally:
        bench.close()


def _behind(parts: list[KVPart], row: int) -> list[KVPart]:
    """Return the parts of the rows from `row` on."""
    return [p.part(max(0, row - p.start), p.rows, 0) for p in parts if p.end > row]


def test_bytes_of_state_do_not_depend_on_tokens() -> None:
    layout = UnitLayout.of_state(3, HEADS, WIDTH, 4, (0.0, 0.5, 0.5))
    assert (layout.kind, layout.sequence_bytes) == ("state", HEADS * WIDTH * 4)
    for part in layout.parts:
        assert layout.overlay_bytes(part) == layout.metadata_bytes(part) == 0
        assert layout.live_ranges(part, 3, 1) == [(0, part.rows * WIDTH * 4)]
        assert layout.part_bytes(part) <= layout.room_bytes(part)
