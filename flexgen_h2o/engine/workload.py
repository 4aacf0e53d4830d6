"""The work that a run has to do, for the planner.

It consists of sequences, lengths, and the KV entries that an eviction policy keeps. This module
imports no torch: the planner plans with it before anything heavy is loaded.
"""

from __future__ import annotations

import os
from collections import abc
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.core.config import Policy, check_bits_used, read_policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import usable_path
from flexgen_h2o.core.units import TOKEN_CHUNK
from flexgen_h2o.engine.memory_plan import BlockShape, most_of
from flexgen_h2o.kvcache.eviction.policy import Needs
from flexgen_h2o.kvcache.prefixes import PromptGroup, Sharing, common_prefix, longest_alike

if TYPE_CHECKING:
    from flexgen_h2o.engine.sequence import Sequence
    from flexgen_h2o.kvcache.eviction import Eviction


# A job's rows that run and wait may take one of so many bytes of the RAM budget.
ROWS_SHARE = 16
# Least rows that a job reads ahead, and blocks of rows.
MIN_WINDOW_ROWS = 1024
MIN_WINDOW_BLOCKS = 4


def window_rows(block_size: int, asked: int | None) -> int:
    """Return the rows that a job reads ahead, in whole blocks.

    asked: the value of --window.
    """
    rows = max(MIN_WINDOW_ROWS, MIN_WINDOW_BLOCKS * block_size) if asked is None else asked
    return -(-rows // block_size) * block_size


@dataclass(frozen=True)
class JobWindow:
    """The RAM for a job's rows, those that run and those that wait. `Planner` makes it."""

    # The most rows that run or wait.
    most_rows: int
    # Mean bytes of a row: tokens of its prompt, and what it may need for its answer.
    row_bytes: int
    # The value of --window.
    asked: int | None = None

    def nbytes(self, block_size: int) -> int:
        """Return the bytes of rows if `block_size` of them run."""
        rows = block_size + window_rows(block_size, self.asked)
        return self.row_bytes * min(self.most_rows, rows)


# Fields of a Workload of which buffers for two workloads need the most and the least.
GROWING = (
    "rows",
    "prompt_len",
    "gen_len",
    "slots",
    "kept",
    "by_length",
    "sequence",
    "max_tokens_per_sweep",
    "sharing",
    "scores",
)
FED_ONCE = ("prefix", "common")


@dataclass(frozen=True)
class Workload:
    """A set of prompts as the planner sees it. `workload_of` and `workload_of_rows` make it."""

    # The number of sequences.
    rows: int
    # Tokens of the longest prompt.
    prompt_len: int
    # The most new tokens of a sequence.
    gen_len: int
    # The most KV slots of a sequence in each transformer block.
    slots: tuple[int, ...]
    # The most KV entries of a sequence's prompt that are left in each transformer block after
    # prefill.
    kept: tuple[int, ...]
    # What the engine measures and records for the eviction policy.
    needs: Needs = field(default_factory=Needs)
    # Whether sequences keep a share of their own prompt, instead of a fixed number of KV entries.
    by_length: bool = False
    # The most prompt and new tokens of a sequence together, if sequences keep a share of both; else
    # 0.
    sequence: int = 0
    # Tokens that all prompts begin with, fed once per micro-batch.
    prefix: int = 0
    # Tokens that all prompts begin with, fed once per block and held in one copy in front of all
    # slots. At most one of `prefix` and `common` is above 0.
    common: int = 0
    # As in ModelSpec.
    windows: tuple[int | None, ...] = ()
    # The most tokens of a sequence in a decode sweep.
    max_tokens_per_sweep: int = 1
    # As in BlockShape, also if only some sequences begin alike.
    sharing: int = 0
    # As in BlockShape.
    scores: bool = False
    # The rows of a job; None outside of jobs, whose callers hold all prompts themselves.
    window: JobWindow | None = None

    @property
    def record(self) -> tuple[str, ...]:
        """Tensors that are recorded of each slot."""
        return self.needs.record

    @property
    def needs_all_logits(self) -> bool:
        """Whether a sequence needs logits of more than one token in a sweep."""
        return self.scores or self.max_tokens_per_sweep > 1

    def held_bytes(self, block_size: int) -> int:
        """Return the bytes of RAM for rows that run and wait, as in BlockShape."""
        return 0 if self.window is None else self.window.nbytes(block_size)

    @classmethod
    def full(cls, rows: int, prompt_len: int, gen_len: int, num_blocks: int) -> Workload:
        """Return the shape of a run with the full cache."""
        slots = (prompt_len + gen_len - 1,) * num_blocks
        return cls(rows, prompt_len, gen_len, slots, (prompt_len,) * num_blocks)

    def union(self, other: Workload) -> Workload:
        """Return the smallest shape that covers both.

        They must be of one eviction policy and model.
        """
        least = {name: min(getattr(self, name), getattr(other, name)) for name in FED_ONCE}
        return replace(self, **most_of(self, other, GROWING), **least)

    def in_one_copy(self, common: int) -> Workload:
        """Return the shape with the KV entries of the first `common` tokens in one copy.

        This needs the full cache. Layers with windows hold their own entries.
        """
        left = [(n, m) if window else (n - common, m - common) for n, m, window in self.kinds]
        slots, kept = zip(*left, strict=True)
        return replace(
            self, slots=slots, kept=kept, prefix=0, common=common, sharing=self.prompt_len
        )

    def columns(self, block: int, sweep: int, prompt_len: float) -> int:
        """Return the number of KV entries of a sequence after a sweep.

        prompt_len: tokens of its prompt.
        sweep: 0 is prefill.
        """
        if self.windows and self.windows[block] is not None:
            return min(round(prompt_len) + sweep, self.slots[block])
        if self.sequence:
            return self._columns_of_sequence(block, sweep, prompt_len)
        if self.by_length:
            kept = max(1, round(self.kept[block] * prompt_len / self.prompt_len))
            return kept + min(sweep, self.slots[block] - self.kept[block])
        return min(
            round(min(self.kept[block], prompt_len - self.common)) + sweep, self.slots[block]
        )

    def _columns_of_sequence(self, block: int, sweep: int, prompt_len: float) -> int:
        """Return the number of KV entries if the budget is a share of prompt and new tokens.

        The budget of the longest sequence is cut to one of `prompt_len` + `gen_len` tokens.
        """
        share = min(prompt_len + self.gen_len, self.sequence) / self.sequence
        kept = self.kept[block]
        slots = self.slots[block]
        if slots < kept + self.gen_len - 1:  # entries leave; one slot is for the new one
            budget = max(1, round((slots - 1) * share))
            return min(min(budget, round(prompt_len)) + sweep, budget + 1)
        left = prompt_len if kept == self.prompt_len else min(prompt_len, kept * share)
        return max(1, round(left)) + sweep

    @property
    def kinds(self) -> list[tuple[int, int, int | None]]:
        """(slots, kept, window) of each transformer block. Blocks with equal triples are alike."""
        return [*zip(self.slots, self.kept, self.windows or (None,) * len(self.slots), strict=True)]

    def block(self, sizes: abc.Sequence[int]) -> Block:
        """Return micro-batches of so many equal prompts. The first one is fed the common prefix."""
        length = self.prompt_len
        before = (self.prefix, self.common)
        return tuple(
            MicroBatchShape.even(rows, length, *before, opens=k == 0)
            for k, rows in enumerate(sizes)
        )

    def slots_of(self, block: int, prompt_len: int) -> int:
        """Return the slots of a sequence in a micro-batch.

        prompt_len: tokens of its longest prompt.
        """
        return (
            self.slots[block]
            if prompt_len == self.prompt_len
            else self.columns(block, self.gen_len - 1, prompt_len)
        )


@dataclass(frozen=True)
class MicroBatchShape:
    """A micro-batch of prompts as the planner sees it."""

    # Sequences.
    rows: int
    # Tokens of the prompts.
    tokens: int
    # Tokens of the longest prompt.
    longest: int
    # As in prefixes.PromptGroup.
    pairs: int
    # Prompt tokens that are not fed, because another sequence of the micro-batch feeds them.
    saved: int = 0
    # Tokens of the longest prompt that shares a prefix with others, or 0. Costs do not depend on
    # it.
    sharing: int = field(default=0, compare=False)

    @classmethod
    def of(cls, groups: abc.Sequence[PromptGroup]) -> MicroBatchShape:
        """Return the micro-batch of these groups of prompts."""
        lengths = [n for group in groups for n in group.lengths]
        pairs = sum(group.pairs for group in groups)
        saved = sum(group.saved for group in groups)
        alike = [g for g in groups if g.common or (g.prefix and g.num_prompts > 1)]
        sharing = max((n for group in alike for n in group.lengths), default=0)
        return cls(len(lengths), sum(lengths), max(lengths), pairs, saved, sharing)

    @classmethod
    @lru_cache(maxsize=4096)  # a search asks thousands of times for the same few
    def even(
        cls, rows: int, prompt_len: int, prefix: int = 0, common: int = 0, opens: bool = False
    ) -> MicroBatchShape:
        """Return a micro-batch of prompts of `prompt_len` tokens.

        They begin with `common` and then `prefix` equal tokens (prefixes.group_prompts).
        """
        group = PromptGroup(prefix, (prompt_len - common - prefix,) * rows, common)
        return cls.of((PromptGroup(common, ()), group) if opens and common else (group,))

    @classmethod
    def joined(cls, batches: abc.Sequence[MicroBatchShape]) -> MicroBatchShape:
        """Return the one micro-batch as which several are computed (loop.joined)."""
        longest = max(b.longest for b in batches)
        rows, tokens, pairs, saved = (
            sum(getattr(b, n) for b in batches) for n in ("rows", "tokens", "pairs", "saved")
        )
        return cls(rows, tokens, longest, pairs, saved)

    @property
    def fed(self) -> int:
        """Tokens of the prefill sweep."""
        return self.tokens - self.saved

    @property
    def mean_len(self) -> float:
        return self.tokens / self.rows


Block = tuple[MicroBatchShape, ...]


@dataclass(frozen=True)
class AutoPolicy:
    """A request to choose a policy for each workload.

    Batch sizes, shares and the side of attention are chosen. Everything else is taken from `base`.
    """

    base: Policy = field(default_factory=Policy)


def base_of(asked: Policy | AutoPolicy) -> Policy:
    """Return the policy that has the switches."""
    return asked.base if isinstance(asked, AutoPolicy) else asked


def read_policy_argument(policy: Policy | AutoPolicy | str | Path) -> Policy | AutoPolicy:
    """Return the policy of an argument: a policy, "auto", or a policy file.

    Raise UsageError for a bad file, and if bits are set for something that is not compressed.
    """
    if isinstance(policy, AutoPolicy | Policy):
        check_bits_used(base_of(policy))
        return policy
    if not isinstance(policy, str | os.PathLike):
        raise UsageError(f'policy: {policy!r:.60} is not a Policy, "auto" or a policy file')
    return AutoPolicy() if policy == "auto" else read_policy(usable_path(policy, "--policy")).policy


def even_blocks(policy: Policy, need: Workload) -> list[tuple[Block, int]]:
    """Return the blocks of a set of equal prompts, as (block, how many like it).

    The last block has the sequences that do not fill a whole one.
    """
    full, rest = divmod(need.rows, policy.block_size)
    gbs = policy.gpu_batch_size
    found = [(need.block((gbs,) * policy.num_gpu_batches), full)] if full else []
    if rest:
        batches, left = divmod(rest, gbs)
        found.append((need.block((gbs,) * batches + ((left,) if left else ())), 1))
    return found


def shape_of(policy: Policy, need: Workload) -> BlockShape:
    """Return the shape of the largest block of a set of equal prompts."""
    rows = min(policy.gpu_batch_size, need.rows)
    batches = min(policy.num_gpu_batches, -(-need.rows // policy.gpu_batch_size))
    shape = shape_of_blocks([need.block((rows,))], need)
    sharing = need.sharing if need.common or rows > 1 else 0
    held_bytes = need.held_bytes(rows * batches)
    return replace(shape, micro_batches=batches, sharing=sharing, held_bytes=held_bytes)


def shape_of_blocks(blocks: abc.Sequence[Block], need: Workload) -> BlockShape:
    """Return the shape that covers all these blocks of micro-batches.

    need: the workload of all sequences.
    """
    batches = [batch for block in blocks for batch in block]
    rows = max(batch.rows for batch in batches)
    decoding = rows * need.max_tokens_per_sweep
    micro_batches = max(map(len, blocks))
    return BlockShape(
        rows=rows,
        micro_batches=micro_batches,
        tokens=max(decoding, *(batch.fed for batch in batches)),
        slots=need.slots,
        record=need.record,
        sharing=max(batch.sharing for batch in batches),
        common=need.common,
        scores=need.scores,
        needs_all_logits=need.needs_all_logits,
        max_attending_tokens=max(TOKEN_CHUNK, decoding, *(batch.longest for batch in batches)),
        held_bytes=need.held_bytes(rows * micro_batches),
    )


def workload_of(
    eviction: Eviction,
    rows: int,
    sizes: set[tuple[int, int]],
    num_blocks: int,
    windows: tuple[int | None, ...] = (),
) -> Workload:
    """Return the shape of `rows` sequences.

    sizes: the (prompt tokens, most new tokens) that occur among them.
    windows: as in ModelSpec, for an eviction policy that is `fitted` (eviction.of_model).
    """
    blocks = range(num_blocks)
    lengths = {prompt for prompt, _ in sizes}
    most_new = max(new for _, new in sizes)
    prompt_len = max(lengths)
    # The first block without a window.
    free = next((block for block in blocks if not windows or windows[block] is None), 0)

    def columns(prompt: int, new: int, block: int = free) -> int:
        return eviction.budget(prompt, new, block).columns

    of_sequence = columns(prompt_len, most_new) != columns(prompt_len, prompt_len + 2 * most_new)
    return Workload(
        rows=rows,
        prompt_len=prompt_len,
        gen_len=most_new,
        slots=tuple(max(eviction.slots(*size, block) for size in sizes) for block in blocks),
        kept=tuple(max(min(size[0], columns(*size, block)) for size in sizes) for block in blocks),
        needs=eviction.needs,
        by_length=columns(min(lengths), most_new) != columns(prompt_len, most_new),
        sequence=max(map(sum, sizes)) if of_sequence else 0,
        windows=windows,
    )


def workload_of_rows(
    eviction: Eviction,
    rows: abc.Sequence[Sequence],
    num_blocks: int,
    windows: tuple[int | None, ...] = (),
    sharing: Sharing | None = None,
) -> Workload:
    """Return the shape of the sequences of a run.

    The prefix in it is one that any two sequences share. So no micro-batch of as many sequences
    feeds more than is planned for equal prompts.

    windows: see `workload_of`.
    sharing: when sequences share a prefix; None: never.
    """
    need = workload_of(eviction, len(rows), {r.size for r in rows}, num_blocks, windows)
    need = replace(
        need,
        max_tokens_per_sweep=max(row.max_tokens_per_sweep for row in rows),
        scores=any(row.scored for row in rows),
    )
    if sharing is None:
        return need
    prompts = [row.fed_ids for row in rows]
    prefix = common_prefix(prompts)
    if not sharing.pays(prefix, 2, 2 * need.prompt_len):
        return replace(need, sharing=longest_alike(prompts, sharing))
    return replace(need, prefix=prefix, sharing=need.prompt_len)
