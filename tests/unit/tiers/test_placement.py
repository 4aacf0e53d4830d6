"""Shares into rows: everything placed once, each share honoured to within one multiple."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.tiers.stream import Part, Shares, on_host_device, split_rows

pairs = st.integers(0, 100).flatmap(lambda a: st.tuples(st.just(a), st.integers(0, 100 - a)))
shares_of = pairs.map(lambda pair: Policy(percent=(*pair, 0, 0, 0, 0)).weight_shares)


@given(st.integers(0, 5000), shares_of, st.sampled_from([1, 2, 16, 64]))
def test_all_rows_are_placed_once_near_their_share(count: int, shares: Shares, multiple: int) -> None:
    parts = split_rows(count, shares, multiple)
    assert [0, *(p.end for p in parts)] == [*(p.start for p in parts), count]
    assert all(p.rows > 0 for p in parts)
    upper = 0.0
    for tier, share in zip(TIERS, shares, strict=True):
        upper += share
        cut = max((p.end for p in parts if TIERS.index(p.tier) <= TIERS.index(tier)), default=0)
        assert abs(cut - upper * count) <= multiple / 2 + 1e-6 or cut == count
    order = [TIERS.index(p.tier) for p in parts]
    assert order == sorted(set(order))
    rows = {p.tier: p.rows for p in parts}
    for tier, share in zip(TIERS, shares, strict=True):
        assert abs(rows.get(tier, 0) - share * count) <= multiple + 1e-6
        assert share > 0 or tier not in rows
    assert all(p.end % multiple == 0 for p in parts[:-1])


def test_twenty_percent_is_twenty_percent() -> None:
    assert split_rows(4096, (0.2, 0.8, 0.0), 16) == (Part("device", 0, 816), Part("host", 816, 4096))
    assert split_rows(10, (0.2, 0.3, 0.5)) == (Part("device", 0, 2), Part("host", 2, 5), Part("disk", 5, 10))


def test_fewer_rows_than_a_multiple_are_not_split() -> None:
    assert split_rows(3, (0.5, 0.0, 0.5), 16) == (Part("disk", 0, 3),)


@given(shares_of)
def test_where_the_device_is_host_its_share_is_host(shares: Shares) -> None:
    device, host, disk = on_host_device(shares)
    assert (device, disk) == (0, shares[2]) and host == shares[0] + shares[1]
