"""Prompts that begin alike: which of a micro-batch share a prefix, and how tokens are packed.

This module has no tensors. The tokens that neighbouring prompts begin with are fed once, and each
prompt's own tokens behind them. Hydragen (Juravsky et al. 2024, arXiv 2402.05099) shares a prefix
over a batch in the same way. The tokens that all prompts of a block begin with may be fed once per
block. Then they are called the common prefix: a group without prompts, in front of the groups of
the first micro-batch.
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
    """When neighbouring prompts share a prefix. `SHARINGS` has the choices."""

    least: int  # the prefix has at least this many tokens
    share: float  # the prefix is at least this share of the mean prompt

    def pays(self, prefix: int, num_prompts: int, tokens: int) -> bool:
        """Return whether `num_prompts` prompts that begin with `prefix` equal tokens share them.

        tokens: of all these prompts together, including the prefix.
        """
        is_long = prefix >= self.least and prefix * num_prompts >= self.share * tokens
        return num_prompts > 1 and is_long


# Sharing costs copies of keys and values, because a prompt's own queries see the prefix in front of
# its own columns. With one copy of the prefix's KV, it also costs up to 0.2 ms per layer in each
# decode step. Sharing saves all matrix products of the prefix. Both bounds are measured with two
# prompts, which gain least in prefill (docs/lab/speed-notes.md, "9. Whole jobs"). `share` depends
# on the prefix, not on the number of prompts, so that a plan for equal prompts bounds what is fed.
WHERE_IT_PAYS = Sharing(least=32, share=0.125)
SHARINGS: dict[str, Sharing | None] = {"auto": WHERE_IT_PAYS, "on": Sharing(1, 0.0), "off": None}


def check_sharing(name: object) -> str:
    """Return `name` if it is a key of `SHARINGS`. Raise UsageError for anything else."""
    if not isinstance(name, str) or name not in SHARINGS:
        raise UsageError(f"share_prefix: {name!r} is not one of {', '.join(SHARINGS)}")
    return name


@dataclass(frozen=True)
class PromptGroup:
    """Neighbouring prompts of a micro-batch that share a prefix. `group_prompts` makes it.

    The group that feeds a common prefix has no prompts.
    """

    prefix: int  # tokens that all prompts begin with and that are fed once; 0: no prefix
    own: tuple[int, ...]  # for each prompt, its tokens behind the prefix; at least one
    common: int = 0  # tokens of a common prefix in front of these, which another group feeds

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return len(self.own)

    @property
    def tokens(self) -> int:
        """Tokens that the group feeds."""
        return self.prefix + sum(self.own)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(self.before + n for n in self.own)

    @property
    def before(self) -> int:
        """Tokens in front of each prompt's own tokens."""
        return self.common + self.prefix

    @property
    def saved(self) -> int:
        """Tokens of the prompts that the group does not feed."""
        return sum(self.lengths) - self.tokens

    @property
    def pairs(self) -> int:
        """Twice the number of (query, key) pairs in attention.

        Without sharing it is the sum of n^2 over the prompt lengths n.
        """
        saved_pairs = (self.num_prompts - 1) * self.before**2 + self.common**2
        return sum(n * n for n in self.lengths) - saved_pairs


def group_prompts(
    prompts: Sequence[TokenIds], sharing: Sharing | None, common: int = 0, opens: bool = False
) -> tuple[PromptGroup, ...]:
    """Return the prompts of a micro-batch as groups, in the order of the prompts.

    sharing: None shares nothing.
    common: tokens of a common prefix.
    opens: the common prefix is fed in front of these prompts.
    """
    found = _group([prompt[common:] for prompt in prompts] if common else prompts, sharing)
    behind = tuple(PromptGroup(group.prefix, group.own, common) for group in found)
    return (PromptGroup(common, ()), *behind) if opens and common else behind


def _group(prompts: Sequence[TokenIds], sharing: Sharing | None) -> Sequence[PromptGroup]:
    """Return the groups of prompts without a common prefix, in the order of the prompts."""
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


def pack_prompts(
    prompts: Sequence[TokenIds], groups: Sequence[PromptGroup]
) -> tuple[list[int], list[int]]:
    """Return the token ids and their positions that a micro-batch feeds, group after group."""
    ids = list[int]()
    positions = list[int]()
    first = 0
    for group in groups:
        start = group.before
        end = first + group.num_prompts
        # A group without prompts feeds the common prefix, with which every prompt begins.
        ids += prompts[first][group.common : start]
        positions += range(group.common, start)
        for prompt in prompts[first:end]:
            ids += prompt[start:]
            positions += range(start, len(prompt))
        first = end
    return ids, positions


def prompt_ends(groups: Sequence[PromptGroup]) -> list[int]:
    """Return, for each prompt, the end of its tokens in the result of `pack_prompts`."""
    ends: list[int] = []
    start = 0
    for group in groups:
        ends += (start + group.prefix + end for end in accumulate(group.own))
        start += group.tokens
    return ends


def prompt_places(groups: Sequence[PromptGroup]) -> list[tuple[int, int, int]]:
    """Return, for each prompt, the offsets of its positions in the result of `pack_prompts`.

    A prompt's entry is (tokens in front of its own, offset of those, offset of its own tokens). The
    token at a position is at index position + offset.
    """
    places: list[tuple[int, int, int]] = []
    start = 0
    for group in groups:
        ends = accumulate(group.own, initial=group.prefix)
        places += [
            (group.before, start - group.common, start + end - group.before)
            for end in list(ends)[:-1]
        ]
        start += group.tokens
    return places


def common_prefix(prompts: Sequence[TokenIds]) -> int:
    """Return the number of tokens that all prompts begin with.

    It never includes the last token of the shortest prompt, because each one needs the hidden state
    of its own last token.
    """
    return min((_common(a, b) for a, b in pairwise(prompts)), default=0)


def longest_alike(prompts: Sequence[TokenIds], sharing: Sharing) -> int:
    """Return the tokens of the longest prompt that may share a prefix with others, in any order.

    Returns 0 if no prompt may.
    """
    families: dict[TokenIds, list[TokenIds]] = {}
    for prompt in prompts:
        families.setdefault(_head(prompt, sharing), []).append(prompt)
    found = 0
    for family in families.values():
        shortest = min(map(len, family))
        longest = max(map(len, family))
        if longest > found and len(family) > 1:
            least = max(sharing.least, math.ceil(sharing.share * shortest))
            if (
                max(Counter(tuple(p[:least]) for p in family if len(p) > least).values(), default=0)
                > 1
            ):
                found = longest
    return found


def family_order(
    prompts: Sequence[TokenIds], sharing: Sharing, rows: int
) -> Callable[[TokenIds], tuple[int, int]]:
    """Return a sort key that brings prompts with equal beginnings, called families, together.

    Families with the longest prompts come first. Only families of at least `rows` prompts count,
    because they fill whole micro-batches. All other prompts are one family, so that a few equal
    beginnings do not separate prompts of equal length.
    """
    sizes = Counter(_head(p, sharing) for p in prompts)
    # By family: (-tokens of its longest prompt, index of its first prompt).
    order: dict[TokenIds, tuple[int, int]] = {}

    def family(prompt: TokenIds) -> TokenIds:
        head = _head(prompt, sharing)
        return head if sizes[head] >= rows else ()

    for i, prompt in enumerate(prompts):
        longest, first = order.get(family(prompt), (0, i))
        order[family(prompt)] = min(longest, -len(prompt)), first
    return lambda prompt: order[family(prompt)]


def neighbours(prompts: Sequence[TokenIds], sharing: Sharing) -> list[int]:
    """Return an order of a micro-batch's prompts, as indices, with equal beginnings side by side.

    Otherwise the given order is kept.
    """
    first: dict[TokenIds, int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(_head(prompt, sharing), i)
    return sorted(range(len(prompts)), key=lambda i: first[_head(prompts[i], sharing)])


def _head(prompt: TokenIds, sharing: Sharing) -> TokenIds:
    """Return the first tokens of a prompt, which all prompts of its family have."""
    return tuple(prompt[: sharing.least])


def _runs(prompts: Sequence[TokenIds], least: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, end, tokens of their common prefix) for runs of neighbouring prompts.

    A prompt joins the run before it as long as this saves more tokens. So the saving is never
    smaller than with one prefix for all prompts, if that prefix has `least` tokens.
    """
    first = prefix = 0
    for i in range(1, len(prompts)):
        rows = i - first
        common = _common(prompts[i - 1], prompts[i])
        joined = min(prefix, common) if rows > 1 else common
        if common >= least and rows * joined > (rows - 1) * prefix:
            prefix = joined
        else:
            yield first, i, prefix
            first = i
            prefix = 0
    yield first, len(prompts), prefix


def _common(a: TokenIds, b: TokenIds) -> int:
    """Return the number of equal first tokens of two prompts, without the last token of either."""
    most = min(len(a), len(b)) - 1
    # Slices are compared in C, which is faster than token by token.
    return bisect_left(range(1, most + 1), True, key=lambda n: a[:n] != b[:n])
