"""What is to be run, for the planner: rows, lengths, and the KV columns that an eviction policy keeps.

Imports no torch: the planner plans with it before anything heavy is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.core.config import Policy, check_bits_used, read_policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import usable_path
from flexgen_h2o.core.units import TOKEN_CHUNK
from flexgen_h2o.engine.memory_plan import BlockShape
from flexgen_h2o.kvcache.eviction.policy import NO_RECORD, RowRecord, record_of
from flexgen_h2o.kvcache.prefixes import PromptGroup, Sharing, common_prefix, longest_alike

if TYPE_CHECKING:
    from flexgen_h2o.engine.generation import Row
    from flexgen_h2o.kvcache.eviction import Eviction


@dataclass(frozen=True)
class WorkloadShape:
    """A pile of prompts. prompt_len, gen_len: tokens of the longest prompt, and the most new tokens.

    slots: the most KV slots of a row in each transformer block. kept: columns of its prompt that are left there after
    prefill. record: what is kept of a row besides its columns, of the longest. scored: prefill sums the columns of
    whole prompts. by_length: rows keep a share of their own prompt, not a number of columns.
    sequence: the most prompt and new tokens of a row together, where rows keep a share of theirs; otherwise 0.
    prefix: tokens that all prompts begin with, fed once a micro-batch. common: the same, fed once a block and held in
    one copy in front of all slots. At most one of the two is above 0. windows: of ModelSpec. in_one_launch: of the
    policy's Needs. per_sweep: the most tokens of a row in a decode sweep. sharing, scores, whole_head: as of
    BlockShape, sharing also of some rows that begin alike.
    """

    rows: int
    prompt_len: int
    gen_len: int
    slots: tuple[int, ...]
    kept: tuple[int, ...]
    record: RowRecord = NO_RECORD
    scored: bool = False
    by_length: bool = False
    sequence: int = 0
    prefix: int = 0
    common: int = 0
    windows: tuple[int | None, ...] = ()
    in_one_launch: bool = True
    per_sweep: int = 1
    sharing: int = 0
    scores: bool = False
    whole_head: bool = False

    @classmethod
    def full(cls, rows: int, prompt_len: int, gen_len: int, num_blocks: int) -> WorkloadShape:
        """Of the full cache."""
        slots = (prompt_len + gen_len - 1,) * num_blocks
        return cls(rows, prompt_len, gen_len, slots, (prompt_len,) * num_blocks)

    def union(self, other: WorkloadShape) -> WorkloadShape:
        """The smallest shape that covers both, of one eviction policy and model."""
        return replace(
            self,
            rows=max(self.rows, other.rows),
            prompt_len=max(self.prompt_len, other.prompt_len),
            gen_len=max(self.gen_len, other.gen_len),
            slots=tuple(map(max, self.slots, other.slots)),
            kept=tuple(map(max, self.kept, other.kept)),
            by_length=self.by_length or other.by_length,
            sequence=max(self.sequence, other.sequence),
            prefix=min(self.prefix, other.prefix),
            common=min(self.common, other.common),
            per_sweep=max(self.per_sweep, other.per_sweep),
            sharing=max(self.sharing, other.sharing),
            scores=self.scores or other.scores,
            whole_head=self.whole_head or other.whole_head,
        )

    def in_one_copy(self, common: int) -> WorkloadShape:
        """The same, with the full cache's columns of `common` first tokens in one copy; windows hold their own."""
        left = [(n, m) if window else (n - common, m - common) for n, m, window in self.kinds]
        slots, kept = zip(*left, strict=True)
        return replace(self, slots=slots, kept=kept, prefix=0, common=common, sharing=self.prompt_len)

    def columns(self, block: int, sweep: int, prompt_len: float) -> int:
        """Columns of a row with a prompt of `prompt_len` tokens after a sweep."""
        if self.windows and self.windows[block] is not None:
            return min(round(prompt_len) + sweep, self.slots[block])
        if self.sequence:
            return self._columns_of_sequence(block, sweep, prompt_len)
        if self.by_length:
            kept = max(1, round(self.kept[block] * prompt_len / self.prompt_len))
            return kept + min(sweep, self.slots[block] - self.kept[block])
        return min(round(min(self.kept[block], prompt_len - self.common)) + sweep, self.slots[block])

    def _columns_of_sequence(self, block: int, sweep: int, prompt_len: float) -> int:
        """The longest row's budget cut to a row of `prompt_len` + `gen_len` tokens."""
        share = min(prompt_len + self.gen_len, self.sequence) / self.sequence
        kept, slots = self.kept[block], self.slots[block]
        if slots < kept + self.gen_len - 1:  # columns leave while decoding; one slot is the newcomer's
            budget = max(1, round((slots - 1) * share))
            return min(min(budget, round(prompt_len)) + sweep, budget + 1)
        left = prompt_len if kept == self.prompt_len else min(prompt_len, kept * share)
        return max(1, round(left)) + sweep

    @property
    def kinds(self) -> list[tuple[int, int, int | None]]:
        """What tells transformer blocks apart: slots, kept, window."""
        return [*zip(self.slots, self.kept, self.windows or (None,) * len(self.slots), strict=True)]

    def block(self, sizes: Sequence[int]) -> Block:
        """Micro-batches of so many equal prompts. The first is fed the common prefix."""
        length, before = self.prompt_len, (self.prefix, self.common)
        return tuple(Batch.even(rows, length, *before, opens=k == 0) for k, rows in enumerate(sizes))

    def slots_of(self, block: int, prompt_len: int) -> int:
        """Slots of a micro-batch whose longest prompt has `prompt_len` tokens."""
        return self.slots[block] if prompt_len == self.prompt_len else self.columns(block, self.gen_len - 1, prompt_len)


@dataclass(frozen=True)
class Batch:
    """A micro-batch. tokens: of its prompts; longest: of the longest prompt; pairs: as of prefixes.PromptGroup.

    saved: tokens that another row of the micro-batch feeds.
    """

    rows: int
    tokens: int
    longest: int
    pairs: int
    saved: int = 0

    @classmethod
    def of(cls, groups: Sequence[PromptGroup]) -> Batch:
        """The prompts of a micro-batch."""
        lengths = [n for group in groups for n in group.lengths]
        pairs, saved = sum(group.pairs for group in groups), sum(group.saved for group in groups)
        return cls(len(lengths), sum(lengths), max(lengths), pairs, saved)

    @classmethod
    @lru_cache(maxsize=4096)  # a search asks for the same few thousands of times
    def even(cls, rows: int, prompt_len: int, prefix: int = 0, common: int = 0, opens: bool = False) -> Batch:
        """Prompts of `prompt_len` tokens that begin with `common` and `prefix` equal ones (prefixes.group_prompts)."""
        group = PromptGroup(prefix, (prompt_len - common - prefix,) * rows, common)
        return cls.of((PromptGroup(common, ()), group) if opens and common else (group,))

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """Micro-batches that are computed as one (loop.joined)."""
        longest = max(b.longest for b in batches)
        rows, tokens, pairs, saved = (sum(getattr(b, n) for b in batches) for n in ("rows", "tokens", "pairs", "saved"))
        return cls(rows, tokens, longest, pairs, saved)

    @property
    def fed(self) -> int:
        """Tokens of the prefill sweep."""
        return self.tokens - self.saved

    @property
    def mean_len(self) -> float:
        return self.tokens / self.rows


Block = tuple[Batch, ...]


@dataclass(frozen=True)
class AutoPolicy:
    """Batch sizes, shares and the side of attention are chosen for each workload; the rest is taken from `base`."""

    base: Policy = field(default_factory=Policy)


def base_of(asked: Policy | AutoPolicy) -> Policy:
    """The policy that has the switches."""
    return asked.base if isinstance(asked, AutoPolicy) else asked


def read_policy_argument(policy: Policy | AutoPolicy | str | Path) -> Policy | AutoPolicy:
    """A policy, "auto" or a policy file. UsageError for a bad file and for bits of what is not compressed."""
    if isinstance(policy, AutoPolicy | Policy):
        check_bits_used(base_of(policy))
        return policy
    if not isinstance(policy, str | os.PathLike):
        raise UsageError(f'policy: {policy!r:.60} is not a Policy, "auto" or a policy file')
    return AutoPolicy() if policy == "auto" else read_policy(usable_path(policy, "--policy")).policy


def even_blocks(policy: Policy, need: WorkloadShape) -> list[tuple[Block, int]]:
    """The blocks of a pile of equal prompts, as (block, how many like it): full ones, and a last one of the rest."""
    full, rest = divmod(need.rows, policy.block_size)
    gbs = policy.gpu_batch_size
    found = [(need.block((gbs,) * policy.num_gpu_batches), full)] if full else []
    if rest:
        batches, left = divmod(rest, gbs)
        found.append((need.block((gbs,) * batches + ((left,) if left else ())), 1))
    return found


def shape_of(policy: Policy, need: WorkloadShape) -> BlockShape:
    """The largest block of a pile of equal prompts."""
    rows = min(policy.gpu_batch_size, need.rows)
    batches = min(policy.num_gpu_batches, -(-need.rows // policy.gpu_batch_size))
    sharing = need.sharing if need.common or rows > 1 else 0
    decoding = rows * need.per_sweep
    tokens = max(decoding, need.block((rows,))[0].fed)
    return BlockShape(
        rows, batches, tokens, need.slots, need.record, sharing, need.common, need.scores, need.whole_head,
        attending=_attending(need.prompt_len, decoding),
    )  # fmt: skip


def _attending(longest: int, decoding: int) -> int:
    """BlockShape.attending. longest: prompt; decoding: most tokens of a decode sweep."""
    return max(TOKEN_CHUNK, longest, decoding)


def need_of(
    eviction: Eviction, rows: int, sizes: set[tuple[int, int]], num_blocks: int, windows: tuple[int | None, ...] = ()
) -> WorkloadShape:
    """The shape of `rows` rows. sizes: the (prompt tokens, most new tokens) that occur among them. windows: of
    ModelSpec, for a policy that is `fitted` (eviction.of_model)."""
    blocks = range(num_blocks)
    lengths, most_new = {prompt for prompt, _ in sizes}, max(new for _, new in sizes)
    prompt_len = max(lengths)
    free = next((block for block in blocks if not windows or windows[block] is None), 0)  # of a window

    def columns(prompt: int, new: int, block: int = free) -> int:
        return eviction.budget(prompt, new, block).columns

    of_sequence = columns(prompt_len, most_new) != columns(prompt_len, prompt_len + 2 * most_new)
    return WorkloadShape(
        rows=rows,
        prompt_len=prompt_len,
        gen_len=most_new,
        slots=tuple(max(eviction.slots(*size, block) for size in sizes) for block in blocks),
        kept=tuple(max(min(size[0], columns(*size, block)) for size in sizes) for block in blocks),
        record=record_of(eviction),
        scored=eviction.needs.query_rows is None,
        by_length=columns(min(lengths), most_new) != columns(prompt_len, most_new),
        sequence=max(map(sum, sizes)) if of_sequence else 0,
        windows=windows,
        in_one_launch=eviction.needs.in_one_launch,
    )


def need_of_rows(
    eviction: Eviction, rows: Sequence[Row], num_blocks: int, windows: tuple[int | None, ...] = (),
    sharing: Sharing | None = None,
) -> WorkloadShape:  # fmt: skip
    """The shape of the rows of a run. windows: as of `need_of`. sharing: when rows share a prefix; None: never.

    Its prefix is one that any two rows share, so that no micro-batch of as many rows feeds more than is planned for
    equal prompts.
    """
    need = need_of(eviction, len(rows), {r.size for r in rows}, num_blocks, windows)
    per_sweep, scores = max(row.max_tokens_per_sweep for row in rows), any(row.scored for row in rows)
    need = replace(need, per_sweep=per_sweep, scores=scores, whole_head=scores or per_sweep > 1)
    if sharing is None:
        return need
    prompts = [row.prompt.token_ids for row in rows]
    prefix = common_prefix(prompts)
    if not sharing.pays(prefix, 2, 2 * need.prompt_len):
        return replace(need, sharing=longest_alike(prompts, sharing))
    return replace(need, prefix=prefix, sharing=need.prompt_len)


def shape_of_blocks(
    blocks: Sequence[Sequence[Sequence[PromptGroup]]], need: WorkloadShape, rows: Sequence[Row]
) -> BlockShape:
    """The shape that covers all these blocks of micro-batches of rows. need: of the rows."""
    batches = [batch for block in blocks for batch in block]
    most, per_sweep = (
        max(sum(group.rows for group in batch) for batch in batches),
        max(r.max_tokens_per_sweep for r in rows),
    )
    longest = max(max(group.lengths) for batch in batches for group in batch if group.rows)
    return BlockShape(
        rows=most,
        micro_batches=max(map(len, blocks)),
        tokens=max(most * per_sweep, *(sum(group.tokens for group in batch) for batch in batches)),
        slots=need.slots,
        record=need.record,
        sharing=max((max(g.lengths) for batch in batches for g in batch if g.before and g.rows), default=0),
        common=need.common,
        scores=any(row.scored for row in rows),
        whole_head=need.whole_head,
        attending=_attending(longest, most * per_sweep),
    )
