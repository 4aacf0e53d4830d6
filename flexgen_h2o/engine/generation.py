"""The rows of a block: what each feeds into the next sweep, what it has generated, and when it leaves.

Knows nothing of layers, tiers or weights.

What an eviction policy keeps, and what rows take, in the planner's terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from flexgen_h2o.engine.memory_plan import BlockShape
from flexgen_h2o.engine.prompts import Prompt, make_blocks
from flexgen_h2o.engine.sampling import SamplingParams, StopStrings, TokenLogprobs, token_logprobs
from flexgen_h2o.engine.workload import WorkloadShape
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.policy import Columns
from flexgen_h2o.kvcache.prefixes import PromptGroup, Sharing, common_prefix, group_prompts, pack_prompts, row_ends
from flexgen_h2o.kvcache.slots import Move, plan_moves

LogitsWatch = Callable[[list[int], torch.Tensor], None]
SlotsWatch = Callable[[list[int], torch.Tensor, Columns], None]


@dataclass(eq=False)
class Row:
    """A prompt with what has been generated for it.

    max_new: tokens it may still grow to, at least 1. asked: new tokens that were asked for, by which rows are sorted
    into blocks. top_logprobs: how many of the likeliest tokens get into `logprobs` at each step; None: no `logprobs`.
    max_tokens_per_sweep: the most tokens that a decode sweep may feed of it, where they are known before.
    """

    prompt: Prompt
    max_new: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    asked: int = 0
    top_logprobs: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    max_tokens_per_sweep: int = 1

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.token_ids)


def row_blocks(
    rows: Sequence[Row], gpu_batch_size: int, num_gpu_batches: int, sharing: Sharing | None = None
) -> list[list[list[Row]]]:
    """Rows as blocks of micro-batches, sorted by what they ask for and their length (prompts.make_blocks)."""
    of = {row.prompt.index: row for row in rows}
    prompts = [r.prompt for r in rows]
    blocks = make_blocks(prompts, gpu_batch_size, num_gpu_batches, lambda p: of[p.index].asked, sharing)
    return [[[of[p.index] for p in batch] for batch in block] for block in blocks]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows as `row_blocks` sorts them."""
    return [row for block in row_blocks(rows, 1, 1) for batch in block for row in batch]


def group_rows(
    rows: Sequence[Row], sharing: Sharing | None, common: int = 0, opens: bool = False
) -> tuple[PromptGroup, ...]:  # fmt: skip
    """Which rows of a micro-batch feed a prefix once (prefixes.group_prompts)."""
    return group_prompts([r.prompt.token_ids for r in rows], sharing, common, opens)


@dataclass(frozen=True)
class SweepInput:
    """What a micro-batch feeds into one sweep, its rows' tokens packed one after the other.

    ids, positions: (tokens,) int64; counts: tokens of each row; past: columns each row has in its slots before; common:
    those of the common prefix in front of all of them.
    decoding: the first so many rows feed their newest token; those behind them enter with their prompts. groups: these
    in their order, with the tokens that several of them begin with fed once in front of them. steps: where no row
    enters, the rows' newest tokens may be followed by those that come next, of all rows one after the other: as many
    decode steps, for each of which attention runs apart.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    counts: tuple[int, ...]
    past: tuple[int, ...]
    decoding: int
    groups: tuple[PromptGroup, ...]
    steps: int = 1
    common: int = 0

    @property
    def seen(self) -> int:
        """Columns that the rows have with these tokens."""
        return sum(self.past) + sum(self.counts) + self.decoding * self.common

    @property
    def phase(self) -> str:
        """prefill, decode, or mixed where some rows do this and some that."""
        if self.decoding == 0:
            return "prefill"
        return "decode" if self.decoding == len(self.counts) else "mixed"

    @property
    def prompt_tokens(self) -> int:
        """That are fed for the prompts that enter."""
        return sum(group.tokens for group in self.groups)

    def last(self, step: int = 0) -> torch.Tensor:
        """(rows,) int64: where each row's last token of a step stands in the packed order."""
        ends = [*range(1, self.decoding + 1), *(self.decoding + end for end in row_ends(self.groups))]
        return torch.tensor(ends) - 1 + step * self.decoding


Coming = Callable[[Row], Sequence[int]]


class MicroBatch:
    """Rows computed together. They leave as they finish; the others close ranks, and new ones may enter behind them.

    common: tokens of the common prefix of all rows, those that enter too. opens: it is fed in front of the first ones.
    """

    def __init__(
        self, rows: Sequence[Row], sharing: Sharing | None = None, common: int = 0, opens: bool = False
    ) -> None:  # fmt: skip
        self.rows, self._common = list(rows), common
        self._entering = group_rows(rows, sharing, common, opens)

    @property
    def prompt_tokens(self) -> int:
        """That the next sweep is fed for rows that enter."""
        return sum(group.tokens for group in self._entering)

    def sweep_input(self, known_tokens: Coming | None = None) -> SweepInput:
        """The newest token of each row that has one, then the prompts of those that enter.

        known_tokens: where none enters, also the tokens that follow, as many as all rows know.
        """
        decoding = sum(bool(r.token_ids) for r in self.rows)
        before, prompts = self.rows[:decoding], [r.prompt.token_ids for r in self.rows[decoding:]]
        past = [r.length - 1 - self._common for r in before]
        ids, positions = pack_prompts(prompts, self._entering)
        known = [[r.token_ids[-1], *(known_tokens(r) if known_tokens and not prompts else ())] for r in before]
        fits = (
            min(len(k), r.max_tokens_per_sweep, r.max_new - len(r.token_ids))
            for k, r in zip(known, before, strict=True)
        )
        steps = min(fits, default=1)
        return SweepInput(
            ids=torch.tensor([k[step] for step in range(steps) for k in known] + ids),
            positions=torch.tensor([r.length - 1 + step for step in range(steps) for r in before] + positions),
            counts=(steps,) * decoding + tuple(map(len, prompts)),
            past=(*past, *(0 for _ in prompts)),
            decoding=decoding,
            groups=self._entering,
            steps=steps,
            common=self._common,
        )

    def append_tokens(self, tokens: Sequence[int], finish: Callable[[Row], str | None]) -> tuple[list[Row], list[Move]]:
        """Append each row's new token. Returns the rows that finish with it and the moves that fill their places."""
        self._entering = ()
        for row, token in zip(self.rows, tokens, strict=True):
            row.token_ids.append(token)
            row.finish_reason = finish(row)
        leaving = [i for i, row in enumerate(self.rows) if row.finish_reason is not None]
        finished = [self.rows[i] for i in leaving]
        moves, order = plan_moves(leaving, len(self.rows))
        self.rows = [self.rows[i] for i in order]
        return finished, moves

    def admit(self, rows: Sequence[Row], sharing: Sharing | None = None) -> None:
        """They take the places behind the others, with the next sweep."""
        self.rows += rows
        self._entering = group_rows(rows, sharing, self._common)


class Waiting(Protocol):
    """Rows that wait for a place in a running block; refill.Queue."""

    def take(self, places: int, tokens: int) -> list[Row]:
        """Those that enter now: at most `places` rows, whose prompts feed `tokens` tokens at most in all."""


class Chooser(Protocol):
    """Chooses the next token of each row: sampling.Sampler, or a token source (engine/requests.py)."""

    def sample(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]: ...


class StopCriteria:
    """When a row is done: end-of-sequence token or stop string ("stop"), or its length ("length")."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], stop: StopStrings) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop = stop

    def is_eos(self, token: int) -> bool:
        """Whether a row ends with this token."""
        return token in self._eos

    def __call__(self, row: Row) -> str | None:
        if self.is_eos(row.token_ids[-1]) or self._stop.found(row.token_ids):
            return "stop"
        return "length" if len(row.token_ids) >= row.max_new else None


@dataclass(frozen=True)
class Callbacks:
    """Who looks on.

    logits: every step's, (prompt indices, (rows, vocab)). slots: what the attention of each layer of a decode sweep
    saw, (prompt indices, (rows,) slots that are filled, the columns of these rows). They may not keep the tensors.
    """

    logits: LogitsWatch | None = None
    slots: SlotsWatch | None = None


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen, when a row is done and why (None: not yet), and who looks on.

    known_tokens: the tokens that a row will take next, whatever the logits, as far as that is known.
    """

    sampler: Chooser
    end: Callable[[Row], str | None]
    watches: Callbacks = Callbacks()
    known_tokens: Coming | None = None

    def sample(self, micro_batch: MicroBatch, logits: torch.Tensor) -> list[int]:
        rows = [r.prompt.index for r in micro_batch.rows]
        if self.watches.logits is not None:
            self.watches.logits(rows, logits)
        tokens = self.sampler.sample(logits, rows, [len(r.token_ids) for r in micro_batch.rows])
        note_logprobs(micro_batch.rows, logits, tokens)
        return tokens


def note_logprobs(rows: Sequence[Row], logits: torch.Tensor, tokens: Sequence[int]) -> None:
    """Keep the log-probabilities of this step for the rows that ask for them."""
    asking = [(i, top) for i, row in enumerate(rows) if (top := row.top_logprobs) is not None]
    if asking:
        places, tops = zip(*asking, strict=True)
        own = logits if len(places) == len(rows) else logits[list(places)]
        for i, found in zip(places, token_logprobs(own, [tokens[i] for i in places], tops), strict=True):
            rows[i].logprobs.append(found)


def need_of(eviction: Eviction, rows: int, sizes: set[tuple[int, int]], num_blocks: int) -> WorkloadShape:
    """The need of `rows` rows. sizes: the (prompt tokens, most new tokens) that there are among them."""
    blocks = range(num_blocks)
    lengths = {prompt for prompt, _ in sizes}
    prompt_len = max(lengths)
    return WorkloadShape(
        rows=rows,
        prompt_len=prompt_len,
        gen_len=max(new for _, new in sizes),
        slots=tuple(max(eviction.slots(*size, block, num_blocks) for size in sizes) for block in blocks),
        kept=tuple(min(prompt_len, eviction.budget(prompt_len, block, num_blocks).columns) for block in blocks),
        record=eviction.needs.record,
        scored=eviction.needs.query_rows is None,
        by_length=eviction.budget(min(lengths), 0, 1) != eviction.budget(prompt_len, 0, 1),
    )


def need_of_rows(
    eviction: Eviction, rows: Sequence[Row], num_blocks: int, sharing: Sharing | None = None
) -> WorkloadShape:
    """The need of the rows of a run.

    Its prefix is one that any two of the rows share under `sharing`, so that no micro-batch of so many of them is fed
    more than the plan for equal prompts says.
    """
    sizes = {(len(row.prompt.token_ids), row.max_new) for row in rows}
    need = need_of(eviction, len(rows), sizes, num_blocks)
    prefix = common_prefix([row.prompt.token_ids for row in rows]) if sharing else 0
    if sharing is None or not sharing.pays(prefix, 2, 2 * need.prompt_len):
        return need
    return replace(need, prefix=prefix)


def shape_of_blocks(
    blocks: Sequence[Sequence[Sequence[PromptGroup]]], need: WorkloadShape, max_tokens_per_sweep: int
) -> BlockShape:
    """The shape that covers all these blocks of micro-batches. need: of the rows.

    max_tokens_per_sweep: the most tokens of a row that a decode sweep takes.
    """
    batches = [batch for block in blocks for batch in block]
    rows = max(sum(group.rows for group in batch) for batch in batches)
    return BlockShape(
        rows=rows,
        micro_batches=max(map(len, blocks)),
        tokens=max(rows * max_tokens_per_sweep, *(sum(group.tokens for group in batch) for batch in batches)),
        slots=need.slots,
        record=need.record,
        sharing=max((max(g.lengths) for batch in batches for g in batch if g.before and g.rows), default=0),
        common=need.common,
    )
