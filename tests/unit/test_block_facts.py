"""What is measured of a block: sums with lists and without are the same ones."""

from __future__ import annotations

import pytest

from flexgen_h2o.engine.metrics import BlockLists, BlockStats, KvUse, Sweep

SWEEPS = (Sweep(4.0, 1.0, 10, 12, 0), Sweep(2.0, 0.25, 20, 30, 7), Sweep(1.0, 0.0, 25, 35, 9))


@pytest.mark.parametrize("kind", [BlockStats, BlockLists])
def test_sums(kind: type[BlockStats]) -> None:
    """A mixed sweep is shared out by its tokens; columns are those of the sweeps behind the first, if there are any."""
    facts, found = kind(), []
    for sweep in SWEEPS:
        facts.end_layer(0.5)
        facts.end_sweep(sweep)
        found.append((facts.prefill_s, facts.decode_s, facts.held, facts.full, facts.later, facts.read))
    assert found == [(4.0, 0.0, 10, 12, 0, 0), (4.5, 1.5, 20, 30, 1, 7), (4.5, 2.5, 45, 65, 2, 16)]
    facts.add_seconds(3.0)
    assert (facts.sweeps, facts.prefill_s, facts.decode_s) == (3, 4.5, 5.5)


def test_lists() -> None:
    facts = BlockLists()
    for sweep in SWEEPS:
        facts.end_layer(sweep.seconds / 2)
        facts.end_layer(sweep.seconds / 2)
        facts.end_sweep(sweep)
    facts.add_seconds(0.5)
    assert facts.times.sweeps == [4.0, 2.0, 1.5] and facts.times.layers == [2.0, 2.0, 1.0, 1.0, 0.5, 0.5]
    assert facts.kv_use == KvUse([10, 20, 25], [0, 7, 9])
