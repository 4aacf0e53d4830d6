"""Rows and micro-batches: what each feeds into the next sweep, what it has generated, and when it leaves.

The executor's view of a run. Knows nothing of layers, tiers or weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol

import torch
from tqdm import tqdm

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import internal_reason
from flexgen_h2o.engine.penalties import Penalties
from flexgen_h2o.engine.prompts import CODE_INTERNAL, Prompt
from flexgen_h2o.engine.sampling import TokenLogprobs
from flexgen_h2o.kernels.workspace import upload_together
from flexgen_h2o.kvcache.eviction.policy import Columns
from flexgen_h2o.kvcache.prefixes import (
    PromptGroup,
    Sharing,
    family_order,
    group_prompts,
    neighbours,
    pack_prompts,
    row_ends,
)
from flexgen_h2o.kvcache.rows import Move, plan_moves
from flexgen_h2o.kvcache.slots import PromptAttention

LogitsWatch = Callable[[list[int], torch.Tensor], None]
SlotsWatch = Callable[[list[int], torch.Tensor, Columns], None]
PromptsWatch = Callable[[list[int], int, PromptAttention], None]


@dataclass(eq=False)
class Row:
    """A prompt with what has been generated for it.

    max_new: tokens it may grow to, at least 1. asked: new tokens that were asked for; rows are sorted by it.
    top_logprobs: how many of the likeliest tokens get into `logprobs` at each step; None: no `logprobs`.
    max_tokens_per_sweep: the most tokens of the row in one decode sweep, where they are known before. given: the first
    tokens that it takes, whatever the logits. scored: last tokens of the prompt whose log-probabilities get into
    `prompt_logprobs`, each with `top_prompt_logprobs` of the likeliest. budget_of: (prompt tokens, new tokens) that its
    KV budget is of; None: its own. penalties: what changes its logits before its own tokens are chosen. error,
    error_code: why it has no answer, where others go on (`Callbacks.spares_rows`), as of `Completion`.
    """

    prompt: Prompt
    max_new: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    asked: int = 0
    top_logprobs: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    max_tokens_per_sweep: int = 1
    given: tuple[int, ...] = ()
    scored: int = 0
    top_prompt_logprobs: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    budget_of: tuple[int, int] | None = None
    penalties: Penalties | None = None
    error: str | None = None
    error_code: str = ""

    def fail(self, code: str, reason: str) -> None:
        """Have no answer; the first reason stays."""
        if self.error is None:
            self.error = reason
            self.error_code = code

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.token_ids)

    @property
    def size(self) -> tuple[int, int]:
        """(prompt tokens, most new tokens) that the KV budget is of."""
        return self.budget_of or (len(self.prompt.token_ids), self.max_new)

    @property
    def own_ids(self) -> list[int]:
        """The tokens that it was not given."""
        return self.token_ids[len(self.given) :]

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens that its own ones follow on."""
        return self.prompt.token_ids + self.given if self.given else self.prompt.token_ids

    @property
    def answered(self) -> int:
        """Its tokens that were asked for."""
        return 0 if self.error is not None else min(len(self.own_ids), self.asked)


def make_blocks(
    rows: Sequence[Row], gpu_batch_size: int, num_gpu_batches: int, sharing: Sharing | None = None
) -> list[list[list[Row]]]:
    """Blocks of at most `num_gpu_batches` micro-batches of at most `gpu_batch_size` rows each.

    Rows that ask for the most new tokens come first (a block runs as many sweeps as its longest answer has tokens),
    then those with the longest prompts, equals in input order. So the block that needs the most memory comes first, and
    every micro-batch but the last is full. sharing: rows that begin alike come together where they fill micro-batches.
    """
    gbs, block = gpu_batch_size, gpu_batch_size * num_gpu_batches
    family = family_order([r.prompt.token_ids for r in rows], sharing, gbs) if sharing else lambda ids: (0, 0)

    def key(row: Row) -> tuple[object, ...]:
        ids = row.prompt.token_ids  # what is scored follows on a context, which neighbours in the input may share
        return -row.asked, family(ids), row.scored - len(ids), row.prompt.index

    ordered = sorted(rows, key=key)
    blocks = [ordered[at : at + block] for at in range(0, len(ordered), block)]
    batches = [[b[at : at + gbs] for at in range(0, len(b), gbs)] for b in blocks]
    if sharing is None:
        return batches
    return [[[b[i] for i in neighbours([r.prompt.token_ids for r in b], sharing)] for b in block] for block in batches]


def group_rows(
    rows: Sequence[Row], sharing: Sharing | None, common: int = 0, opens: bool = False
) -> tuple[PromptGroup, ...]:  # fmt: skip
    """Which rows of a micro-batch feed a prefix once (prefixes.group_prompts)."""
    return group_prompts([r.prompt.token_ids for r in rows], sharing, common, opens)


@dataclass(frozen=True)
class SweepInput:
    """The tokens of a micro-batch in one sweep, packed row after row.

    ids, positions: (tokens,) int64; ends: (rows,) int64, the place of each row's last token in them, of the first step,
    and in a part those of the whole. The executor has them on the device. counts: tokens of each row. past: columns
    that each row has in its slots before.
    decoding: the first so many rows feed their newest token; the others are new and feed their prompts. groups: the
    prompts, each shared prefix fed once in front of its rows. steps: decode steps in this sweep, above 1 only where
    every row's next tokens are known; tokens are packed step by step. common: columns of the common prefix in front of
    every row. entered: in a part of a sweep, rows with prompts in earlier parts.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    counts: tuple[int, ...]
    past: tuple[int, ...]
    decoding: int
    groups: tuple[PromptGroup, ...]
    steps: int = 1
    common: int = 0
    entered: int = 0

    def parts(self, most: int) -> list[SweepInput]:
        """The same in parts of at most `most` tokens, or of one prompt, in order: rows that decode are in the first.
        Rows that share a prefix stay together."""
        if len(self.ids) <= most:
            return [self]
        of_parts, room = [list[PromptGroup]()], most - self.decoding * self.steps
        for group in self.groups:
            for piece in [group] if group.before else [PromptGroup(0, (own,)) for own in group.own]:
                part = of_parts[-1]
                if piece.tokens > room and (part or (self.decoding and len(of_parts) == 1)):
                    of_parts.append(part := [])
                    room = most
                room -= piece.tokens
                if part and not (piece.before or part[-1].before):
                    piece = PromptGroup(0, part.pop().own + piece.own)
                part.append(piece)
        found, token, row = list[SweepInput](), 0, 0
        for groups in of_parts:
            first = 0 if found else self.decoding
            tokens = slice(token, token + first * self.steps + sum(group.tokens for group in groups))
            rows = slice(row, row + first + sum(group.rows for group in groups))
            found.append(
                replace(
                    self, ids=self.ids[tokens], positions=self.positions[tokens], counts=self.counts[rows],
                    past=self.past[rows], decoding=first, groups=tuple(groups), entered=max(0, row - self.decoding),
                )
            )  # fmt: skip
            token, row = tokens.stop, rows.stop
        return found

    def seen(self, window: int | None = None) -> int:
        """Columns of all rows with these tokens; of each row the newest `window` at most."""
        common = (self.common if i < self.decoding else 0 for i in range(len(self.counts)))
        held = [sum(of_row) for of_row in zip(self.past, self.counts, common, strict=True)]
        return sum(held if window is None else (min(window, n) for n in held))

    @property
    def phase(self) -> str:
        """prefill, decode, or mixed."""
        if self.decoding == 0:
            return "prefill"
        return "decode" if self.decoding == len(self.counts) else "mixed"

    @property
    def prompt_tokens(self) -> int:
        return sum(group.tokens for group in self.groups)

    def last(self, step: int = 0) -> slice | torch.Tensor:
        """Where each row's last token of a step is in the packed order: neighbours where no prompts are fed."""
        return self.ends if self.groups else slice(step * self.decoding, (step + 1) * self.decoding)

    def to(self, where: torch.device) -> SweepInput:
        """On a device, in one copy."""
        ids, positions, ends = upload_together([self.ids, self.positions, self.ends], where)
        return replace(self, ids=ids, positions=positions, ends=ends)


KnownTokens = Callable[[Row], Sequence[int]]


class MicroBatch:
    """Rows computed together. Finished rows leave, the others move up (`compact`), and new ones may join behind them.

    common: tokens of the common prefix of all rows. opens: this micro-batch feeds it, in front of its first rows.
    """

    def __init__(
        self, rows: Sequence[Row], sharing: Sharing | None = None, common: int = 0, opens: bool = False
    ) -> None:  # fmt: skip
        self.rows, self._common = list(rows), common
        self._new = group_rows(rows, sharing, common, opens)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the next sweep."""
        return sum(group.tokens for group in self._new)

    def sweep_input(self, known_tokens: KnownTokens | None = None) -> SweepInput:
        """The newest token of each row that has one, then the prompts of new rows.

        known_tokens: without new rows, the tokens that follow are fed too, as many as all rows know.
        """
        decoding = sum(bool(r.token_ids) for r in self.rows)
        before, prompts = self.rows[:decoding], [r.prompt.token_ids for r in self.rows[decoding:]]
        ids, positions = pack_prompts(prompts, self._new)
        known = [[r.token_ids[-1], *(known_tokens(r) if known_tokens and not prompts else ())] for r in before]
        fits = (
            min(len(k), r.max_tokens_per_sweep, r.max_new - len(r.token_ids))
            for k, r in zip(known, before, strict=True)
        )
        steps = min(fits, default=1)
        return SweepInput(
            ids=torch.tensor([k[step] for step in range(steps) for k in known] + ids, device="cpu"),
            positions=torch.tensor(
                [r.length - 1 + step for step in range(steps) for r in before] + positions, device="cpu"
            ),
            ends=torch.tensor([*range(decoding), *(decoding + end - 1 for end in row_ends(self._new))], device="cpu"),
            counts=(steps,) * decoding + tuple(map(len, prompts)),
            past=(*(r.length - 1 - self._common for r in before), *(0 for _ in prompts)),
            decoding=decoding,
            groups=self._new,
            steps=steps,
            common=self._common,
        )

    def append_tokens(self, tokens: Sequence[int], finish: Callable[[Row], str | None]) -> tuple[list[Row], list[Move]]:
        """Append each row's new token. Returns the rows that finish with it and the moves that fill their places."""
        self._new = ()
        for row, token in zip(self.rows, tokens, strict=True):
            row.token_ids.append(token)
            row.finish_reason = finish(row)
        leaving = [i for i, row in enumerate(self.rows) if row.finish_reason is not None]
        finished = [self.rows[i] for i in leaving]
        moves, order = plan_moves(leaving, len(self.rows))
        self.rows = [self.rows[i] for i in order]
        return finished, moves

    def admit(self, rows: Sequence[Row], sharing: Sharing | None = None) -> None:
        """Add rows behind the others; their prompts are fed in the next sweep."""
        self.rows += rows
        self._new = group_rows(rows, sharing, self._common)


class Listener(Protocol):
    """Called while a run goes on, on its thread."""

    def sweep(self, tokens: int) -> None:
        """A micro-batch got `tokens` new tokens."""

    def finish(self, rows: Sequence[Row]) -> None:
        """These rows are done; they are handed out next."""


class Silent:
    """A listener that shows nothing."""

    def sweep(self, tokens: int) -> None:
        pass

    def finish(self, rows: Sequence[Row]) -> None:
        pass


class Progress:
    """The progress bar of a run, on a terminal only: tokens, tokens a second, time left.

    A row that stops early takes the tokens that it does not need off the total.
    """

    def __init__(self, total_tokens: int) -> None:
        with interrupts.held():  # it starts a thread
            self._bar = tqdm(
                total=total_tokens, unit="token", desc="generate", disable=not self.on_terminal(), file=sys.stderr
            )

    @staticmethod
    def on_terminal() -> bool:
        return sys.stderr is not None and sys.stderr.isatty()

    def sweep(self, tokens: int) -> None:
        self._bar.update(tokens)

    def finish(self, rows: Sequence[Row]) -> None:
        spared = sum(r.max_new - len(r.token_ids) for r in rows)
        if spared and self._bar.total is not None:
            self._bar.total -= spared

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


@dataclass(frozen=True)
class Callbacks:
    """Functions called during a run. They may not keep the tensors.

    logits: at every step, (prompt indices, (rows, vocab)). slots: what the attention of each layer of a decode sweep
    saw, (prompt indices, (rows,) slots that are filled, the columns of these rows). listener: instead of the progress
    bar. prompts: the attention of prompts, (prompt indices, transformer block, attention), where the policy scores
    prompts. Layers with windows are not shown: they hold what they attend to. goes_on:
    asked about a row after each of its own tokens that does not end it; where it says no, the row ends there, as of
    length. spares_rows: a row for which something raises, or whose logits are not finite, ends with an error, and
    others go on; except for a micro-batch all of whose first logits are not finite, which is a damaged model. Otherwise
    the run ends with what was raised. Not in a pipeline, whose ranks see no logits but the last.
    """

    logits: LogitsWatch | None = None
    slots: SlotsWatch | None = None
    listener: Listener | None = None
    prompts: PromptsWatch | None = None
    goes_on: Callable[[Row], bool] | None = None
    spares_rows: bool = False


@contextmanager
def sparing(row: Row, spares_rows: bool) -> Iterator[None]:
    """Whatever is raised of one row in here becomes its error if others go on (`Callbacks.spares_rows`).

    A request to end goes through.
    """
    try:
        yield
    except BaseException as error:
        if not spares_rows or interrupts.asks_to_end(error):
            raise
        row.fail(CODE_INTERNAL, internal_reason(error))


@dataclass
class Sweep:
    """Counts of one sweep of a block.

    fed: tokens; prompts: those of them that came from prompts. held: KV columns of all rows and layers (a column is one
    key and one value of every kv-head). full: what the full cache would have held. read: columns that decode attention
    read. units: rows of all layers, each of which holds a KV cache.
    """

    fed: int = 0
    prompts: int = 0
    held: int = 0
    full: int = 0
    read: int = 0
    units: int = 0


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of each sweep of a block, of each layer of each sweep (all its micro-batches), and KV columns of each
    sweep, as of `Sweep`."""

    sweeps: list[float] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)


@dataclass
class BlockStats:
    """Sums over the sweeps of a block.

    held, full, units: as of `Sweep`, of the decode sweeps, of which there are `later`; without one, of the first.
    fed_tokens: prompt tokens that were computed. times: kept unless rows may join the block, which then may go on for
    any number of sweeps.
    """

    keeps_lists: bool = True
    sweeps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    held: int = 0
    full: int = 0
    units: int = 0
    fed_tokens: int = 0
    times: BlockTimes = field(default_factory=BlockTimes)
    _prompts: float = 0.0  # share of the newest sweep's tokens

    @property
    def later(self) -> int:
        return max(0, self.sweeps - 1)

    def end_layer(self, seconds: float) -> None:
        """Add a layer's seconds in a sweep, of all micro-batches."""
        if self.keeps_lists:
            self.times.layers.append(seconds)

    def end_sweep(self, sweep: Sweep, seconds: float) -> None:
        if self.sweeps == 1:  # the first counts only while it is alone
            self.held = self.full = self.units = 0
        self.held += sweep.held
        self.full += sweep.full
        self.units += sweep.units
        self.sweeps += 1
        self._prompts = sweep.prompts / sweep.fed
        if self.keeps_lists:
            self.times.sweeps.append(0.0)
            self.times.held.append(sweep.held)
            self.times.read.append(sweep.read)
        self.add_seconds(seconds)

    def add_seconds(self, seconds: float) -> None:
        """Add to the newest sweep's seconds. A mixed sweep's are split between prefill and decode by its tokens."""
        self.prefill_s += seconds * self._prompts
        self.decode_s += seconds * (1 - self._prompts)
        if self.keeps_lists:
            self.times.sweeps[-1] += seconds
