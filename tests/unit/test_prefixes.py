"""Which prompts share a prefix, and how they are packed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kvcache.prefixes import (
    PromptGroup,
    Sharing,
    group_prompts,
    pack_prompts,
    row_ends,
)

ON = Sharing(1, 0.0)
Prompts = list[tuple[int, ...]]
# Few tokens, so that beginnings meet by chance.
ALIKE = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12
)


# ---- groups


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        ([(1, 2, 3)], [(0, (3,))]),
        ([(1, 2, 3), (1, 2, 4, 5)], [(2, (1, 2))]),
        ([(1, 2, 3)] * 3, [(2, (1, 1, 1))]),  # the last token is always a row's own
        ([(1, 2), (1, 2, 3)], [(1, (1, 2))]),
        ([(1,), (1, 2)], [(0, (1, 2))]),
        ([(1, 2), (3, 4)], [(0, (2, 2))]),
        ([(9,), (1, 2, 3), (1, 2, 4), (8, 8), (7,)], [(0, (1,)), (2, (1, 1)), (0, (2, 1))]),
        ([(1, 1, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2)], [(2, (1, 1)), (2, (1, 1))]),
    ],
)
def test_groups(prompts: Prompts, groups: list[tuple[int, tuple[int, ...]]]) -> None:
    assert group_prompts(prompts, ON) == tuple(PromptGroup(*group) for group in groups)


@given(ALIKE, st.sampled_from([None, ON, Sharing(2, 0.0), Sharing(1, 0.5)]))
def test_whatever_is_shared_the_prompts_come_back(
    prompts: Prompts, sharing: Sharing | None
) -> None:
    """Each row's tokens and positions, and where its last token stands."""
    groups = group_prompts(prompts, sharing)
    ids, positions = pack_prompts(prompts, groups)
    assert len(ids) == len(positions) == sum(g.tokens for g in groups)
    start = 0
    row = 0
    ends = row_ends(groups)
    for group in groups:
        prefix = list(range(start, start + group.prefix))
        start += group.prefix
        for own in group.own:
            fed = [*prefix, *range(start, start + own)]
            start += own
            assert own >= 1 and ends[row] == start
            assert tuple(ids[i] for i in fed) == prompts[row] and [
                positions[i] for i in fed
            ] == list(range(len(fed)))
            row += 1
    assert row == len(prompts)
    if sharing is None:
        assert groups == (PromptGroup(0, tuple(map(len, prompts))),)


@given(
    ALIKE,
    st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple),
    st.booleans(),
    st.booleans(),
)
def test_a_common_prefix_is_fed_once(
    prompts: Prompts, header: tuple[int, ...], opens: bool, shares: bool
) -> None:
    """By a group without rows in front of the others, or not at all; the others' tokens and
    positions go on behind."""
    common = len(header)
    sharing = ON if shares else None
    groups = group_prompts([(*header, *p) for p in prompts], sharing, common, opens)
    ids, positions = pack_prompts([(*header, *p) for p in prompts], groups)
    before = common if opens else 0
    assert tuple(ids[:before]) == header[:before] and positions[:before] == list(range(before))
    behind = group_prompts(prompts, sharing)
    assert groups[opens:] == tuple(PromptGroup(g.prefix, g.own, common) for g in behind)
    owns, places = pack_prompts(prompts, behind)
    assert ids[before:] == owns and positions[before:] == [common + place for place in places]
    assert row_ends(groups) == [before + end for end in row_ends(behind)]
    assert sum(g.tokens for g in groups) == len(ids)
    assert sum(g.saved for g in groups) == len(prompts) * common - before + sum(
        g.saved for g in behind
    )


# ---- order
