"""How a budget is shared out among layers, by what each loses alone."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.evaluation.layers import share_out

SHARES = [0.1, 0.2, 0.4, 0.7]


def lost(losses: list[float], share: float) -> float:
    """By the lines between what was measured; nothing is lost with every column."""
    points = [*zip(SHARES, losses, strict=True), (1.0, 0.0)]
    for (x, y), (to_x, to_y) in pairwise(points):
        if share <= to_x + 1e-12:
            return y + (to_y - y) * (share - x) / (to_x - x)
    raise AssertionError(share)


@given(
    st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4), min_size=2, max_size=8), st.floats(0.1, 1), st.data()
)
def test_shares_add_up_and_stay_in_range(losses: list[list[float]], share: float, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(losses), max_size=len(losses)))
    found = share_out(losses, sizes, SHARES, share)
    assert all(0.1 <= one <= 1 + 1e-9 for one in found)
    assert sum(one * size for one, size in zip(found, sizes, strict=True)) == pytest.approx(share * sum(sizes))


@given(st.lists(st.tuples(*[st.floats(0, 5)] * 4), min_size=3, max_size=3), st.sampled_from([0.2, 0.4, 0.5, 0.7]))
def test_no_other_sharing_out_loses_less_where_losses_are_convex(steps: list[tuple[float, ...]], share: float) -> None:
    """Slopes that fall with the share; every sharing out in steps of 0.1 is tried."""
    widths = [0.1, 0.2, 0.3, 0.3]
    losses = []
    for slopes in steps:
        falls = [slope * width for slope, width in zip(sorted(slopes, reverse=True), widths, strict=True)]
        losses.append([sum(falls[i:]) for i in range(4)])
    found = share_out(losses, [1, 1, 1], SHARES, share)
    ours = sum(lost(of, one) for of, one in zip(losses, found, strict=True))
    tenths = range(1, 11)
    for others in product(tenths, repeat=2):
        last = round(30 * share) - sum(others)
        if last in tenths:
            theirs = [lost(of, n / 10) for of, n in zip(losses, (*others, last), strict=True)]
            assert ours <= sum(theirs) + 1e-9


def test_by_hand() -> None:
    needs, idle = [0.8, 0.6, 0.3, 0.1], [0.0, 0.0, 0.0, 0.0]
    assert share_out([needs, idle], [1, 1], SHARES, 0.5) == pytest.approx([0.9, 0.1])
    assert share_out([needs, needs], [1, 1], SHARES, 0.4) == pytest.approx([0.4, 0.4])
    assert share_out([needs, idle, idle], [1, 1, 1], SHARES, 0.1) == pytest.approx([0.1] * 3)
    assert share_out([needs, idle], [1, 3], SHARES, 0.25) == pytest.approx([0.7, 0.1])
    # A loss that noise put above those on both sides is passed over.
    assert share_out([[0.4, 0.5, 0.0, 0.0], idle], [1, 1], SHARES, 0.25) == pytest.approx([0.4, 0.1])
