"""The rows of a block: what each feeds into the next sweep, what it has generated, and when it leaves.

Knows nothing of layers, tiers or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from flexgen_h2o.kvcache.eviction.policy import Columns
from flexgen_h2o.kvcache.moves import Move, plan_moves
from flexgen_h2o.prompts import Prompt, make_blocks
from flexgen_h2o.sampling import SamplingParams, StopStrings, TokenLogprobs, token_logprobs

LogitsWatch = Callable[[list[int], torch.Tensor], None]
SlotsWatch = Callable[[list[int], torch.Tensor, Columns], None]


@dataclass(eq=False)
class Row:
    """A prompt with what has been generated for it.

    max_new: tokens it may still grow to, at least 1. asked: new tokens that were asked for, by which rows are sorted
    into blocks. top_logprobs: how many of the likeliest tokens get into `logprobs` at each step; None: no `logprobs`.
    """

    prompt: Prompt
    max_new: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    asked: int = 0
    top_logprobs: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.token_ids)


def row_blocks(rows: Sequence[Row], gpu_batch_size: int, num_gpu_batches: int) -> list[list[list[Row]]]:
    """Rows as blocks of micro-batches, sorted by what they ask for and their length (prompts.make_blocks)."""
    of = {row.prompt.index: row for row in rows}
    blocks = make_blocks([r.prompt for r in rows], gpu_batch_size, num_gpu_batches, lambda p: of[p.index].asked)
    return [[[of[p.index] for p in batch] for batch in block] for block in blocks]


@dataclass(frozen=True)
class SweepInput:
    """What a micro-batch feeds into one sweep, its rows' tokens packed one after the other.

    ids, positions: (tokens,) int64; counts: tokens of each row; past: columns each row has in the cache before.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    counts: tuple[int, ...]
    past: tuple[int, ...]

    @property
    def is_prefill(self) -> bool:
        return self.past[0] == 0

    def last(self) -> torch.Tensor:
        """(rows,) int64: where each row's newest token stands in the packed order."""
        return torch.tensor(self.counts).cumsum(0) - 1


class MicroBatch:
    """Rows computed together. They leave as they finish; the others close ranks."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._in_cache = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt.token_ids) for r in self.rows)

    def sweep_input(self) -> SweepInput:
        """The prompts before the first sweep, the newest token of each row after it."""
        fed = [r.token_ids[-1:] if self._in_cache else list(r.prompt.token_ids) for r in self.rows]
        past = tuple(r.length - 1 if self._in_cache else 0 for r in self.rows)
        positions = torch.cat([torch.arange(p, p + len(f)) for p, f in zip(past, fed, strict=True)])
        ids = torch.tensor([i for f in fed for i in f])
        return SweepInput(ids, positions, tuple(map(len, fed)), past)

    def accept(self, tokens: Sequence[int], finish: Callable[[Row], str | None]) -> tuple[list[Row], list[Move]]:
        """Append each row's new token. Returns the rows that finish with it and the moves that fill their places."""
        self._in_cache = True
        for row, token in zip(self.rows, tokens, strict=True):
            row.token_ids.append(token)
            row.finish_reason = finish(row)
        leaving = [i for i, row in enumerate(self.rows) if row.finish_reason is not None]
        finished = [self.rows[i] for i in leaving]
        moves, order = plan_moves(leaving, len(self.rows))
        self.rows = [self.rows[i] for i in order]
        return finished, moves


class Chooser(Protocol):
    """Chooses the next token of each row: sampling.TokenChooser, or a course."""

    def choose(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]: ...


class Course(Chooser, Protocol):
    """What rows do instead of following their sampling parameters: which tokens they take, and when they are done."""

    def most_new(self, row: int) -> int:
        """The most tokens that the row of this index takes."""

    def end(self, row: Row) -> str | None:
        """Why the row is done with its newest token (Decoding.end)."""


@dataclass(frozen=True)
class ForcedTokens:
    """Teacher forcing: rows take the tokens that they are given, whatever the logits: `tokens[row][step]`."""

    tokens: Mapping[int, Sequence[int]]

    def choose(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        return [self.tokens[row][step] for row, step in zip(rows, steps, strict=True)]

    def most_new(self, row: int) -> int:
        return len(self.tokens[row])

    def end(self, row: Row) -> str | None:
        return "length" if len(row.token_ids) >= row.max_new else None


class RowEnd:
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
class Watches:
    """Who looks on.

    logits: every step's, (prompt indices, (rows, vocab)). slots: what the attention of each layer of a decode sweep
    saw, (prompt indices, (rows,) slots that are filled, the columns of these rows). They may not keep the tensors.
    """

    logits: LogitsWatch | None = None
    slots: SlotsWatch | None = None


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen, when a row is done and why (None: not yet), and who looks on."""

    chooser: Chooser
    end: Callable[[Row], str | None]
    watches: Watches = Watches()

    def choose(self, micro_batch: MicroBatch, logits: torch.Tensor) -> list[int]:
        rows = [r.prompt.index for r in micro_batch.rows]
        if self.watches.logits is not None:
            self.watches.logits(rows, logits)
        tokens = self.chooser.choose(logits, rows, [len(r.token_ids) for r in micro_batch.rows])
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
