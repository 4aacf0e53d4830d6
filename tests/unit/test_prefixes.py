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
    prompt_ends,
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
        ([(1, 2, 3)] * 3, [(2, (1, 1, 1))]),  # the last token is always a row's own
        ([(1, 2), (1, 2, 3)], [(1, (1, 2))]),
        ([(1,), (1, 2)], [(0, (1, 2))]),
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
    ends = prompt_ends(groups)
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
