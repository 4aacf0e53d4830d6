"""What an eviction policy is: it says how many columns a row keeps, what it needs measured, and ranks columns.

The engine owns everything else: slots, protection of sinks and recent columns, which column leaves, tiers. A new policy
is a file in this folder and a row in `POLICIES`.

What rolling positions ask of a model, a policy and a row.

An eviction policy as a stage of a pipeline sees it, whose blocks are counted from the stage's first one.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from flexgen_h2o.core.config import ModelSpec
from flexgen_h2o.core.errors import UsageError

EVERYTHING = 2**30  # more columns than any row has
# Records of a slot (kvcache/slots.Record), in the order in which they are laid out.
POSITIONS, SCORES, NORMS, RANKS = "positions", "scores", "norms", "ranks"


@dataclass(frozen=True)
class RowBudget:
    """Columns that a row keeps in one layer: the first `sinks`, the `recent` newest, and `heavy` others by rank."""

    sinks: int
    heavy: int
    recent: int

    @property
    def columns(self) -> int:
        return self.sinks + self.heavy + self.recent


@dataclass(frozen=True)
class Needs:
    """What the engine keeps and computes for a policy.

    record: what is kept of each slot, of POSITIONS, SCORES, NORMS and RANKS in this order; () for a policy that drops
    nothing. With RANKS keys are kept before their rotary embeddings, and each is turned by its rank when it is read.
    query_rows: the last rows of a prompt whose column sums are wanted; None for all. query_decay: the row i before the
    last counts query_decay ** i. In a decode step a slot's score becomes fade x score + gain x the probability that it
    received, summed over the query heads of its kv-head. even: the gain is multiplied by columns held / columns seen
    so far, since a query that attends to fewer columns gives more to each. ranks_by_score: `rank` gives the scores
    themselves, so the decode kernel can find the column that leaves.
    """

    record: tuple[str, ...] = ()
    query_rows: int | None = 0
    query_decay: float = 1.0
    decay: float = 1.0
    gain: float = 1.0
    even: bool = False
    ranks_by_score: bool = True


@dataclass(frozen=True)
class Columns:
    """What may be known of the columns of `b` sequences when a policy scores or ranks them.

    positions: (b, kv_heads, n) int32; newest: (b,) int64, the position of the newest column; scores, norms (of the
    values): (b, kv_heads, n) fp32 where the policy's record has them; heavy: (b,) int64, of the rows' budgets; block:
    the transformer block. may_leave: (b, kv_heads, n) bool, False for sinks, recent columns and slots that are not
    filled, whose other entries are arbitrary; ranks of such columns are not looked at.
    """

    block: int
    positions: torch.Tensor
    may_leave: torch.Tensor
    newest: torch.Tensor
    heavy: torch.Tensor
    scores: torch.Tensor | None = None
    norms: torch.Tensor | None = None

    def seen(self) -> torch.Tensor:
        """(b, kv_heads, n) fp32: how many queries saw each column, its own among them."""
        return (self.newest.view(-1, 1, 1) + 1 - self.positions).float()


class Eviction(Protocol):
    """Decides which KV columns a row keeps, apart for each sequence and kv-head."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    def budget(self, prompt_len: int, block: int, num_blocks: int) -> RowBudget:
        """What a row of `prompt_len` tokens keeps in transformer block `block`."""

    def slots(self, prompt_len: int, gen_len: int, block: int, num_blocks: int) -> int:
        """Slots that such a row needs to grow by `gen_len` tokens.

        The newest token's column is never read again, so it needs none.
        """

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        """The scores that a prompt's columns start with.

        sums: (b, kv_heads, n) fp32, the column sums over `query_rows` rows: `needs.query_rows` or, in a shorter
        prompt, all. Asked only where the record has scores. Returns the shape of `sums`.
        """

    def rank(self, columns: Columns) -> torch.Tensor:
        """(b, kv_heads, n) fp32: columns with the lowest leave first, of equal ones the oldest."""

    def to_json(self) -> dict[str, Any]: ...


def is_rolling(eviction: Eviction) -> bool:
    """Does a column's position follow from the columns that its row holds?"""
    return RANKS in eviction.needs.record


def check_rolling(eviction: Eviction, spec: ModelSpec, compresses_cache: bool) -> None:
    """UsageError where columns cannot take other positions than their tokens had."""
    if not is_rolling(eviction):
        return
    if spec.rotary is None:
        raise UsageError(
            f"--positions rolling: needs rotary embeddings, and {spec.name} has learned positions, which its hidden "
            "states and so its keys hold; leave it at original"
        )
    if compresses_cache:
        raise UsageError(
            "--positions rolling: turns keys as they are read, not packed ones; leave out --compress-cache"
        )


def most_new_tokens(eviction: Eviction, spec: ModelSpec, prompt_len: int, asked: int) -> int:
    """New tokens that a prompt of so many tokens may grow by: with original positions as long as there are some, with
    rolling ones as long as its columns are no more than there are positions.

    The newest token needs no position of its own, so a prompt that fills all positions still gets one.
    """
    if not is_rolling(eviction):
        return min(asked, spec.max_positions - prompt_len + 1)

    def is_too_much(new: int) -> bool:
        columns = (eviction.slots(prompt_len, new, block, spec.num_blocks) for block in range(spec.num_blocks))
        return max(columns) > spec.max_positions

    return max(1, bisect_left(range(1, asked + 1), True, key=is_too_much))


@dataclass(frozen=True)
class OfStage:
    """`policy` of a model of `depth` transformer blocks, where block 0 is the model's block `first`."""

    policy: Eviction
    first: int
    depth: int

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def needs(self) -> Needs:
        return self.policy.needs

    def budget(self, prompt_len: int, block: int, num_blocks: int) -> RowBudget:
        return self.policy.budget(prompt_len, self.first + block, self.depth)

    def slots(self, prompt_len: int, gen_len: int, block: int, num_blocks: int) -> int:
        return self.policy.slots(prompt_len, gen_len, self.first + block, self.depth)

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return self.policy.prompt_scores(sums, query_rows)

    def rank(self, columns: Columns) -> torch.Tensor:
        return self.policy.rank(replace(columns, block=self.first + columns.block))

    def to_json(self) -> dict[str, Any]:
        return self.policy.to_json()
