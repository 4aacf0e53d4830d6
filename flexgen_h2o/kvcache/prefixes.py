"""Prompts that begin alike: which rows of a micro-batch share a prefix, and how their tokens are packed. No tensors.

The tokens that neighbouring rows begin with are fed once, and each row's own behind them (Hydragen, Juravsky et al.
2024, arXiv 2402.05099, shares a prefix over a batch in the same way). What all rows of a block begin with may be fed
once a block, as a group without rows in front of the first micro-batch's; it is called their common prefix then.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flexgen_h2o.core.errors import UsageError

TokenIds = Sequence[int]


@dataclass(frozen=True)
class Sharing:
    """When neighbouring rows share a prefix: where it has `least` tokens and `share` of their mean prompt, or more."""

    least: int
    share: float

    def pays(self, prefix: int, rows: int, tokens: int) -> bool:
        """rows: that begin with `prefix` equal tokens; tokens: of all of their prompts."""
        return rows > 1 and prefix >= self.least and prefix * rows >= self.share * tokens


# What sharing costs is copies of keys and values (a row's own queries see the prefix in front of its own columns) and,
# with one copy of its KV, up to 0.2 ms a layer in each decode step. What it saves is all products of the prefix. Both
# bounds are measured where prefill gains least, with two rows (docs/lab/speed-notes.md, "9. Whole jobs"). `share`
# looks at the prefix, not at the number of rows, so that a plan for equal prompts bounds what is fed.
WHERE_IT_PAYS = Sharing(least=32, share=0.125)
SHARINGS: dict[str, Sharing | None] = {"auto": WHERE_IT_PAYS, "on": Sharing(1, 0.0), "off": None}


def check_sharing(name: object) -> str:
    """A key of `SHARINGS`; UsageError for anything else."""
    if not isinstance(name, str) or name not in SHARINGS:
        raise UsageError(f"share_prefix: {name!r} is not one of {', '.join(SHARINGS)}")
    return name


@dataclass(frozen=True)
class PromptGroup:
    """Neighbouring rows of a micro-batch: `prefix` tokens that all of them begin with, 0 for none, then `own` tokens of
    each, at least one.

    common: tokens of a common prefix in front of these, which are fed elsewhere. The group that feeds it has no rows.
    """

    prefix: int
    own: tuple[int, ...]
    common: int = 0

    @property
    def rows(self) -> int:
        return len(self.own)

    @property
    def tokens(self) -> int:
        """That are fed."""
        return self.prefix + sum(self.own)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(self.before + n for n in self.own)

    @property
    def before(self) -> int:
        """Tokens in front of each row's own."""
        return self.common + self.prefix

    @property
    def saved(self) -> int:
        """Tokens that need not be fed."""
        return sum(self.lengths) - self.tokens

    @property
    def pairs(self) -> int:
        """Twice the pairs of a query and a key that attention works out: the sum of n^2 where nothing is shared."""
        return sum(n * n for n in self.lengths) - (self.rows - 1) * self.before**2 - self.common**2


def group_prompts(
    prompts: Sequence[TokenIds], sharing: Sharing | None, common: int = 0, opens: bool = False
) -> tuple[PromptGroup, ...]:  # fmt: skip
    """The prompts of a micro-batch in their order, as groups. sharing: None shares nothing.

    common: tokens of a common prefix. opens: it is fed in front of these prompts.
    """
    found = _group([prompt[common:] for prompt in prompts] if common else prompts, sharing)
    behind = tuple(PromptGroup(group.prefix, group.own, common) for group in found)
    return (PromptGroup(common, ()), *behind) if opens and common else behind


def _group(prompts: Sequence[TokenIds], sharing: Sharing | None) -> Sequence[PromptGroup]:
    if sharing is None:
        return [PromptGroup(0, tuple(map(len, prompts)))]
    found: list[PromptGroup] = []
    for first, end, prefix in _runs(prompts, sharing.least):
        lengths = tuple(len(p) for p in prompts[first:end])
        if sharing.pays(prefix, end - first, sum(lengths)):
            found.append(PromptGroup(prefix, tuple(n - prefix for n in lengths)))
        elif found and not found[-1].prefix:
            found[-1] = PromptGroup(0, found[-1].own + lengths)
        else:
            found.append(PromptGroup(0, lengths))
    return found


def pack_prompts(prompts: Sequence[TokenIds], groups: Sequence[PromptGroup]) -> tuple[list[int], list[int]]:
    """The ids and positions that a micro-batch feeds, group after group."""
    ids, positions, first = list[int](), list[int](), 0
    for group in groups:
        start, end = group.before, first + group.rows
        # A group without rows feeds what any prompt begins with.
        ids += prompts[first][group.common : start]
        positions += range(group.common, start)
        for prompt in prompts[first:end]:
            ids += prompt[start:]
            positions += range(start, len(prompt))
        first = end
    return ids, positions


def row_ends(groups: Sequence[PromptGroup]) -> list[int]:
    """Where the tokens of each row end in what `pack_prompts` gives."""
    ends: list[int] = []
    start = 0
    for group in groups:
        ends += (start + group.prefix + end for end in accumulate(group.own))
        start += group.tokens
    return ends


def row_places(groups: Sequence[PromptGroup]) -> list[tuple[int, int, int]]:
    """For each row: (tokens shared in front of its own, offset of a shared position, offset of an own position); packed
    place = position + offset."""
    places: list[tuple[int, int, int]] = []
    start = 0
    for group in groups:
        ends = accumulate(group.own, initial=group.prefix)
        places += [(group.before, start - group.common, start + end - group.before) for end in list(ends)[:-1]]
        start += group.tokens
    return places


def common_prefix(prompts: Sequence[TokenIds]) -> int:
    """Tokens that all prompts begin with, but for the last token of the shortest: its hidden state is the row's own."""
    return min((_common(a, b) for a, b in pairwise(prompts)), default=0)


def longest_alike(prompts: Sequence[TokenIds], sharing: Sharing) -> int:
    """Tokens of the longest prompt that may share a prefix with others, whatever their order; 0 where none can."""
    families: dict[TokenIds, list[TokenIds]] = {}
    for prompt in prompts:
        families.setdefault(_head(prompt, sharing), []).append(prompt)
    found = 0
    for family in families.values():
        shortest, longest = min(map(len, family)), max(map(len, family))
        if longest > found and len(family) > 1:
            least = max(sharing.least, math.ceil(sharing.share * shortest))
            if max(Counter(tuple(p[:least]) for p in family if len(p) > least).values(), default=0) > 1:
                found = longest
    return found


def family_order(prompts: Sequence[TokenIds], sharing: Sharing, rows: int) -> Callable[[TokenIds], tuple[int, int]]:
    """A key that sorts prompts with equal beginnings together, those with the longest prompt first.

    Only families of at least `rows`, which fill micro-batches of equal beginnings; all others are one family, so that
    a few of them do not separate prompts of equal length.
    """
    sizes = Counter(_head(p, sharing) for p in prompts)
    order: dict[TokenIds, tuple[int, int]] = {}  # by family: -longest, first

    def family(prompt: TokenIds) -> TokenIds:
        head = _head(prompt, sharing)
        return head if sizes[head] >= rows else ()

    for i, prompt in enumerate(prompts):
        longest, first = order.get(family(prompt), (0, i))
        order[family(prompt)] = min(longest, -len(prompt)), first
    return lambda prompt: order[family(prompt)]


def neighbours(prompts: Sequence[TokenIds], sharing: Sharing) -> list[int]:
    """The places of the prompts of a micro-batch, those with equal beginnings brought together, else in their order."""
    first: dict[TokenIds, int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(_head(prompt, sharing), i)
    return sorted(range(len(prompts)), key=lambda i: first[_head(prompts[i], sharing)])


def _head(prompt: TokenIds, sharing: Sharing) -> TokenIds:
    return tuple(prompt[: sharing.least])


def _runs(prompts: Sequence[TokenIds], least: int) -> Iterator[tuple[int, int, int]]:
    """(first, end, common prefix) of neighbours; a row joins those before it as long as this saves more tokens.

    So what is saved is never less than with one prefix for all, where that has `least` tokens.
    """
    first = prefix = 0
    for i in range(1, len(prompts)):
        rows, common = i - first, _common(prompts[i - 1], prompts[i])
        joined = min(prefix, common) if rows > 1 else common
        if common >= least and rows * joined > (rows - 1) * prefix:
            prefix = joined
        else:
            yield first, i, prefix
            first, prefix = i, 0
    yield first, len(prompts), prefix


def _common(a: TokenIds, b: TokenIds) -> int:
    """Equal first tokens of two prompts, at least the last of either left out."""
    most = min(len(a), len(b)) - 1
    # slices are compared in C: quicker than token by token
    return bisect_left(range(1, most + 1), True, key=lambda n: a[:n] != b[:n])
