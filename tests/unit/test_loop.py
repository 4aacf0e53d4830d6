"""The zig-zag order: every step once, micro-batches innermost, and each weight load named once."""

from __future__ import annotations

from itertools import groupby, pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.engine.loop import weight_sequence, zigzag

few = st.integers(0, 6)


@given(few, few, few)
def test_every_step_comes_once_and_in_lexical_order(sweeps: int, layers: int, batches: int) -> None:
    steps = [(s.sweep, s.layer, s.micro_batch) for s in zigzag(sweeps, layers, batches)]
    assert set(steps) == set(product(range(sweeps), range(layers), range(batches)))
    assert all(a < b for a, b in pairwise(steps))


@given(few, st.lists(st.integers(0, 3), max_size=8))
def test_weights_are_named_when_they_change(sweeps: int, units: list[int]) -> None:
    needed = [units[s.layer] for s in zigzag(sweeps, len(units), 3)]
    assert list(weight_sequence(sweeps, tuple(units))) == [unit for unit, _ in groupby(needed)]
