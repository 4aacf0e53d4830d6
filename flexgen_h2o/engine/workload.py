"""What is to be run, as the planner sees it: rows, lengths, and the KV columns that an eviction policy keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from flexgen_h2o.core.config import Policy
from flexgen_h2o.engine.memory_plan import BlockShape
from flexgen_h2o.kvcache.prefixes import PromptGroup


@dataclass(frozen=True)
class WorkloadShape:
    """A pile of prompts. rows: of them in all; prompt_len, gen_len: tokens of the longest prompt, most new tokens.

    slots: KV slots of the neediest row in each transformer block. kept: columns that are left there of its prompt
    after prefill. record: what is kept of each slot (kvcache/layout.UnitLayout); () for the full cache. scored: the
    column sums of whole prompts are worked out in prefill. by_length: what is kept is a share of each row's own prompt,
    not a number of columns. prefix: tokens that all prompts begin with and that are fed once a micro-batch. common: the
    same, fed once a block and held in one copy in front of all slots; there is one of the two at most.
    """

    rows: int
    prompt_len: int
    gen_len: int
    slots: tuple[int, ...]
    kept: tuple[int, ...]
    record: tuple[str, ...] = ()
    scored: bool = False
    by_length: bool = False
    prefix: int = 0
    common: int = 0

    @classmethod
    def full(cls, rows: int, prompt_len: int, gen_len: int, num_blocks: int) -> WorkloadShape:
        """The need of the full cache."""
        slots = (prompt_len + gen_len - 1,) * num_blocks
        return cls(rows, prompt_len, gen_len, slots, (prompt_len,) * num_blocks)

    def union(self, other: WorkloadShape) -> WorkloadShape:
        """What serves both, of rows of one eviction policy and model."""
        return replace(
            self,
            rows=max(self.rows, other.rows),
            prompt_len=max(self.prompt_len, other.prompt_len),
            gen_len=max(self.gen_len, other.gen_len),
            slots=tuple(map(max, self.slots, other.slots)),
            kept=tuple(map(max, self.kept, other.kept)),
            by_length=self.by_length or other.by_length,
            prefix=min(self.prefix, other.prefix),
            common=min(self.common, other.common),
        )

    def in_one_copy(self, common: int) -> WorkloadShape:
        """The same of the full cache, where `common` tokens that all prompts begin with are held in one copy."""
        slots, kept = (tuple(n - common for n in columns) for columns in (self.slots, self.kept))
        return replace(self, slots=slots, kept=kept, prefix=0, common=common)

    def columns(self, block: int, sweep: int, prompt_len: float) -> int:
        """Columns in the slots of a row with a prompt of `prompt_len` tokens, once the sweep has added its own."""
        if self.by_length:
            kept = max(1, round(self.kept[block] * prompt_len / self.prompt_len))
            return kept + min(sweep, self.slots[block] - self.kept[block])
        return min(round(min(self.kept[block], prompt_len - self.common)) + sweep, self.slots[block])

    def block(self, sizes: Sequence[int]) -> Block:
        """Micro-batches of so many equal prompts. The first is fed the common prefix."""
        length, before = self.prompt_len, (self.prefix, self.common)
        return tuple(_even_batch(rows, length, *before, opens=k == 0) for k, rows in enumerate(sizes))

    def slots_of(self, block: int, prompt_len: int) -> int:
        """Slots of a micro-batch whose longest prompt has `prompt_len` tokens."""
        return self.slots[block] if prompt_len == self.prompt_len else self.columns(block, self.gen_len - 1, prompt_len)


@dataclass(frozen=True)
class Batch:
    """A micro-batch. tokens: of its prompts; longest: tokens of the longest; pairs: prefixes.PromptGroup's.

    saved: tokens that are not fed, because another row of the micro-batch feeds them.
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
    def even(cls, rows: int, prompt_len: int, prefix: int = 0, common: int = 0, opens: bool = False) -> Batch:
        """Prompts of `prompt_len` tokens that begin with `common` and `prefix` equal ones (prefixes.group_prompts)."""
        group = PromptGroup(prefix, (prompt_len - common - prefix,) * rows, common)
        return cls.of((PromptGroup(common, ()), group) if opens and common else (group,))

    @property
    def fed(self) -> int:
        """Tokens of the prefill sweep."""
        return self.tokens - self.saved

    @property
    def mean_len(self) -> float:
        return self.tokens / self.rows


@lru_cache(maxsize=4096)  # a search asks for the same few thousands of times
def _even_batch(rows: int, prompt_len: int, prefix: int, common: int, opens: bool) -> Batch:
    return Batch.even(rows, prompt_len, prefix, common, opens)


Block = tuple[Batch, ...]


@dataclass(frozen=True)
class AutoPolicy:
    """Batch sizes, shares and the side of attention are chosen for each workload; the rest is taken from `base`."""

    base: Policy = field(default_factory=Policy)


def base_of(asked: Policy | AutoPolicy) -> Policy:
    """The policy that has the switches."""
    return asked.base if isinstance(asked, AutoPolicy) else asked


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
    sharing = need.prompt_len if need.common or (need.prefix and rows > 1) else 0
    fed = need.block((rows,))[0].fed
    return BlockShape(rows, batches, fed, need.slots, need.record, sharing, need.common)


def fitted(policy: Policy, need: WorkloadShape) -> Policy:
    """The policy with batch sizes no larger than the pile."""
    shape = shape_of(policy, need)
    return replace(policy, gpu_batch_size=shape.rows, num_gpu_batches=shape.micro_batches)
