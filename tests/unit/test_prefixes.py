"""Which prompts share a prefix, and how they are packed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.generation import make_blocks
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.kvcache.prefixes import (
    SHARINGS,
    WHERE_IT_PAYS,
    PromptGroup,
    Sharing,
    check_sharing,
    common_prefix,
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


def text(*parts: tuple[int, int]) -> tuple[int, ...]:
    """(token, count) pairs."""
    return tuple(token for token, count in parts for _ in range(count))


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


def test_a_row_with_less_in_common_does_not_spoil_the_others() -> None:
    """Four rows share 20 tokens; joining them, the two behind would leave 2 for all."""
    long = text((1, 20))
    short = text((1, 2), (2, 9))
    prompts = [(*long, i) for i in range(4)] + [(*short, 3), (*short, 4)]
    assert group_prompts(prompts, ON) == (PromptGroup(20, (1,) * 4), PromptGroup(11, (1, 1)))
    assert (
        group_prompts(
            [prompts[0], prompts[1], *[text((1, 19), (2, 1), (i, 1)) for i in range(9)]], ON
        )[0].rows
        == 11
    )


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


@given(ALIKE, st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple))
def test_no_less_is_saved_than_by_one_prefix_for_all(
    prompts: Prompts, header: tuple[int, ...]
) -> None:
    """What plans for equal prompts count on."""
    whole = [(*header, *p) for p in prompts]
    common = common_prefix(whole)
    assert sum(g.saved for g in group_prompts(whole, ON)) >= (len(whole) - 1) * common
    assert common >= len(header) or len(whole) == 1
    assert all(
        a[:common] == b[:common] and min(len(a), len(b)) > common for a, b in pairwise(whole)
    )


def test_auto_leaves_what_does_not_pay() -> None:
    least = WHERE_IT_PAYS.least
    header = text((1, least))
    paying = [(*header, i) for i in range(3)]
    assert group_prompts(paying, WHERE_IT_PAYS) == (PromptGroup(least, (1, 1, 1)),)
    assert group_prompts([p[1:] for p in paying], WHERE_IT_PAYS) == (PromptGroup(0, (least,) * 3),)
    rest = int(least / WHERE_IT_PAYS.share) - least
    for own, is_shared in ((rest, True), (rest + 1, False)):
        prompts = [header + text((2 + i, own)) for i in range(2)]
        assert (group_prompts(prompts, WHERE_IT_PAYS)[0].prefix > 0) is is_shared


def test_names() -> None:
    assert check_sharing("auto") == "auto" and SHARINGS["off"] is None
    for bad in ("maybe", None, True):
        with pytest.raises(UsageError, match=r"share_prefix: .* is not one of auto, on, off"):
            check_sharing(bad)


# ---- order


def blocks(prompts: Prompts, gbs: int, sharing: Sharing | None) -> list[list[list[int]]]:
    rows = [Sequence(i, p, max_new=1) for i, p in enumerate(prompts)]
    return [
        [[r.index for r in batch] for batch in block]
        for block in make_blocks(rows, gbs, 2, sharing)
    ]


def test_prompts_that_fill_micro_batches_are_brought_together() -> None:
    """Two headers in turn, of the same lengths; within each the longest first, and the longest
    header's first."""
    prompts = [text((1 + i % 2, 4), (9, 1 + i // 2)) for i in range(8)]
    assert blocks(prompts, 4, None) == [[[6, 7, 4, 5], [2, 3, 0, 1]]]
    assert blocks(prompts, 4, Sharing(4, 0.0)) == [[[6, 4, 2, 0], [7, 5, 3, 1]]]
