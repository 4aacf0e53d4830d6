"""Sequences and micro-batches.

They know what is fed into the next sweep, what was generated, and when a sequence leaves. This is
the executor's view of a run. The module knows nothing of layers, tiers or weights.
"""

from __future__ import annotations

import sys
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol

import torch
from tqdm import tqdm

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import internal_reason
from flexgen_h2o.engine.sequence import CODE_INTERNAL, Sequence
from flexgen_h2o.kernels.workspace import upload_together
from flexgen_h2o.kvcache.budgets import Move, plan_moves
from flexgen_h2o.kvcache.eviction.policy import Columns
from flexgen_h2o.kvcache.part import Prompts
from flexgen_h2o.kvcache.prefixes import (
    PromptGroup,
    Sharing,
    family_order,
    group_prompts,
    neighbours,
    pack_prompts,
    prompt_ends,
)

LogitsWatch = Callable[[list[int], torch.Tensor], None]
SlotsWatch = Callable[[list[int], torch.Tensor, Columns], None]
PromptsWatch = Callable[[list[int], int, Prompts], None]


def make_blocks(
    rows: abc.Sequence[Sequence],
    gpu_batch_size: int,
    num_gpu_batches: int,
    sharing: Sharing | None = None,
) -> list[list[list[Sequence]]]:
    """Return blocks of micro-batches of sequences.

    A block has at most `num_gpu_batches` micro-batches, and each of them has at most
    `gpu_batch_size` sequences. Sequences that ask for the most new tokens come first, because a
    block runs as many sweeps as its longest answer has tokens. Then come those with the longest
    prompts. Equal ones keep their input order. Every micro-batch but the last is full. Without
    `sharing`, the block that needs the most memory comes first.

    sharing: puts sequences that begin alike together if they fill micro-batches. This comes before
    the length of the prompts.
    """
    gbs = gpu_batch_size
    block = gpu_batch_size * num_gpu_batches
    family = (
        family_order([r.fed_ids for r in rows], sharing, gbs) if sharing else lambda ids: (0, 0)
    )

    def key(row: Sequence) -> tuple[object, ...]:
        # Scored tokens follow a context, which neighbours in the input may share.
        ids = row.fed_ids
        return -row.asked, family(ids), row.scored - len(ids), row.index

    ordered = sorted(rows, key=key)
    blocks = [ordered[at : at + block] for at in range(0, len(ordered), block)]
    batches = [[b[at : at + gbs] for at in range(0, len(b), gbs)] for b in blocks]
    if sharing is None:
        return batches
    return [
        [[b[i] for i in neighbours([r.fed_ids for r in b], sharing)] for b in block]
        for block in batches
    ]


def group_rows(
    rows: abc.Sequence[Sequence], sharing: Sharing | None, common: int = 0, opens: bool = False
) -> tuple[PromptGroup, ...]:
    """Return the sequences of a micro-batch in groups that feed a shared prefix once.

    See prefixes.group_prompts.
    """
    return group_prompts([r.fed_ids for r in rows], sharing, common, opens)


@dataclass(frozen=True)
class SweepInput:
    """The tokens of a micro-batch in one sweep, packed one sequence after another.

    MicroBatch makes it. The executor has the tensors on the device. `parts` cuts a sweep into parts
    of the same type.
    """

    # (tokens,) int64.
    ids: torch.Tensor
    # (tokens,) int64: the position of each token in its sequence.
    positions: torch.Tensor
    # (sequences,) int64: index in `ids` of each sequence's last token of the first step. In a part
    # these are the values of the unsplit input.
    ends: torch.Tensor
    # Tokens of each sequence.
    counts: tuple[int, ...]
    # KV entries that each sequence has in its slots before the sweep.
    past: tuple[int, ...]
    # The first so many sequences feed their newest token. The others are new and feed their
    # prompts.
    decoding: int
    # The prompts of the new sequences; each shared prefix is fed once in front of its sequences.
    groups: tuple[PromptGroup, ...]
    # Decode steps in this sweep; above 1 only if the next tokens of every sequence are known.
    # Tokens are packed step by step.
    steps: int = 1
    # KV entries of the common prefix in front of every sequence.
    common: int = 0
    # In a part of a sweep: the sequences with prompts in earlier parts.
    num_earlier_prompts: int = 0

    def parts(self, most: int) -> list[SweepInput]:
        """Cut the input into parts, in order, of at most `most` tokens or of one prompt.

        Sequences that decode are in the first part. Sequences that share a prefix stay together.
        """
        if len(self.ids) <= most:
            return [self]
        of_parts = [list[PromptGroup]()]
        room = most - self.decoding * self.steps
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
        found = list[SweepInput]()
        token = 0
        row = 0
        for groups in of_parts:
            first = 0 if found else self.decoding
            tokens = slice(
                token, token + first * self.steps + sum(group.tokens for group in groups)
            )
            rows = slice(row, row + first + sum(group.num_prompts for group in groups))
            found.append(
                replace(
                    self,
                    ids=self.ids[tokens],
                    positions=self.positions[tokens],
                    counts=self.counts[rows],
                    past=self.past[rows],
                    decoding=first,
                    groups=tuple(groups),
                    num_earlier_prompts=max(0, row - self.decoding),
                )
            )
            token = tokens.stop
            row = rows.stop
        return found

    def seen(self, window: int | None = None) -> int:
        """Return the number of KV entries of all sequences, these tokens included.

        window: count at most so many newest entries of each sequence.
        """
        common = (self.common if i < self.decoding else 0 for i in range(len(self.counts)))
        held = [sum(of_row) for of_row in zip(self.past, self.counts, common, strict=True)]
        return sum(held if window is None else (min(window, n) for n in held))

    @property
    def phase(self) -> str:
        """The phase of the sequences: prefill, decode, or mixed."""
        if self.decoding == 0:
            return "prefill"
        return "decode" if self.decoding == len(self.counts) else "mixed"

    @property
    def prompt_tokens(self) -> int:
        return sum(group.tokens for group in self.groups)

    def last(self, step: int = 0) -> slice | torch.Tensor:
        """Return where each sequence's last token of a step is in the packed order.

        It is a slice if no prompts are fed, because the tokens are then neighbours.
        """
        return self.ends if self.groups else slice(step * self.decoding, (step + 1) * self.decoding)

    def to(self, where: torch.device) -> SweepInput:
        """Copy the tensors to a device, in one copy."""
        ids, positions, ends = upload_together([self.ids, self.positions, self.ends], where)
        return replace(self, ids=ids, positions=positions, ends=ends)


KnownTokens = Callable[[Sequence], abc.Sequence[int]]


class MicroBatch:
    """Sequences that are computed together.

    Finished sequences leave, the last ones take their places, and new ones may join behind them.

    common: tokens of the prefix that all sequences have in common.
    opens: this micro-batch feeds the common prefix, in front of its first sequences.
    """

    def __init__(
        self,
        rows: abc.Sequence[Sequence],
        sharing: Sharing | None = None,
        common: int = 0,
        opens: bool = False,
    ) -> None:
        self.rows = list(rows)
        self._common = common
        self._new_groups = group_rows(rows, sharing, common, opens)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the next sweep."""
        return sum(group.tokens for group in self._new_groups)

    def sweep_input(self, known_tokens: KnownTokens | None = None) -> SweepInput:
        """Return the newest token of each sequence that has one, then the prompts of new sequences.

        known_tokens: if there are no new sequences, the following tokens are fed too, as many as
            are known of all.
        """
        decoding = sum(bool(r.token_ids) for r in self.rows)
        before = self.rows[:decoding]
        prompts = [r.fed_ids for r in self.rows[decoding:]]
        ids, positions = pack_prompts(prompts, self._new_groups)
        known = [
            [r.token_ids[-1], *(known_tokens(r) if known_tokens and not prompts else ())]
            for r in before
        ]
        fits = (
            min(len(k), r.max_tokens_per_sweep, r.max_new - len(r.token_ids))
            for k, r in zip(known, before, strict=True)
        )
        steps = min(fits, default=1)
        return SweepInput(
            ids=torch.tensor([k[step] for step in range(steps) for k in known] + ids, device="cpu"),
            positions=torch.tensor(
                [r.length - 1 + step for step in range(steps) for r in before] + positions,
                device="cpu",
            ),
            ends=torch.tensor(
                [*range(decoding), *(decoding + end - 1 for end in prompt_ends(self._new_groups))],
                device="cpu",
            ),
            counts=(steps,) * decoding + tuple(map(len, prompts)),
            past=(*(r.length - 1 - self._common for r in before), *(0 for _ in prompts)),
            decoding=decoding,
            groups=self._new_groups,
            steps=steps,
            common=self._common,
        )

    def append_tokens(
        self, tokens: abc.Sequence[int], finish: Callable[[Sequence], str | None]
    ) -> tuple[list[Sequence], list[Move]]:
        """Append one new token to each sequence, and remove the sequences that finish with it.

        Return the finished sequences and the moves that fill their places.

        finish: returns the finish reason of a sequence, or None if it continues.
        """
        self._new_groups = ()
        for row, token in zip(self.rows, tokens, strict=True):
            row.token_ids.append(token)
            row.finish_reason = finish(row)
        leaving = [i for i, row in enumerate(self.rows) if row.finish_reason is not None]
        finished = [self.rows[i] for i in leaving]
        moves, order = plan_moves(leaving, len(self.rows))
        self.rows = [self.rows[i] for i in order]
        return finished, moves

    def admit(self, rows: abc.Sequence[Sequence], sharing: Sharing | None = None) -> None:
        """Add sequences behind the others. Their prompts are fed in the next sweep."""
        self.rows += rows
        self._new_groups = group_rows(rows, sharing, self._common)


class Listener(Protocol):
    """Functions that are called during a run, on its thread."""

    def sweep(self, tokens: int) -> None:
        """Called when a micro-batch has got `tokens` new tokens."""

    def finish(self, rows: abc.Sequence[Sequence]) -> None:
        """Called when these sequences are done. They are handed out next."""


class Silent:
    """A listener that shows nothing."""

    def sweep(self, tokens: int) -> None:
        pass

    def finish(self, rows: abc.Sequence[Sequence]) -> None:
        pass


class Progress:
    """The progress bar of a run, on a terminal only: tokens, tokens per second, time left.

    If a sequence stops early, the total shrinks by the tokens that it does not need.
    """

    def __init__(self, total_tokens: int) -> None:
        with interrupts.held():  # tqdm starts a thread
            self._bar = tqdm(
                total=total_tokens,
                unit="token",
                desc="generate",
                disable=not self.on_terminal(),
                file=sys.stderr,
            )

    @staticmethod
    def on_terminal() -> bool:
        return sys.stderr is not None and sys.stderr.isatty()

    def sweep(self, tokens: int) -> None:
        self._bar.update(tokens)

    def finish(self, rows: abc.Sequence[Sequence]) -> None:
        spared = sum(r.max_new - len(r.token_ids) for r in rows)
        if spared and self._bar.total is not None:
            self._bar.total -= spared

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()


@dataclass(frozen=True)
class Callbacks:
    """Functions called during a run, and how the run treats failures.

    The functions may not keep the tensors.
    """

    # Called at every step with (prompt indices, logits (sequences, vocab)).
    logits: LogitsWatch | None = None
    # Called with what attention saw in each layer of a decode sweep: (prompt indices, (sequences,)
    # filled slots, the KV entries of these sequences). Layers with windows are not shown: they hold
    # what they attend to.
    slots: SlotsWatch | None = None
    # Used instead of the progress bar.
    listener: Listener | None = None
    # Called with the attention of prompts if the eviction policy scores prompts: (prompt indices,
    # transformer block, attention). Layers with windows are not shown.
    prompts: PromptsWatch | None = None
    # Called after each generated token that does not end the sequence. If it returns False, the
    # sequence ends there with the reason "length".
    should_continue: Callable[[Sequence], bool] | None = None
    # If something raises for a sequence, or its logits are not finite, only this sequence ends with
    # an error. Otherwise the run ends with the exception. If the first logits of a whole
    # micro-batch of two or more are not finite, the run ends: the model is damaged. Sparing does
    # not work in a pipeline, because only the last rank sees logits.
    isolates_errors: bool = False


@contextmanager
def sparing(row: Sequence, isolates_errors: bool) -> Iterator[None]:
    """Turn an exception about one sequence into its error if others continue.

    See `Callbacks.isolates_errors`. A request to end the process passes through.
    """
    try:
        yield
    except BaseException as error:
        if not isolates_errors or interrupts.asks_to_end(error):
            raise
        row.fail(CODE_INTERNAL, internal_reason(error))


@dataclass
class Sweep:
    """Counts of one sweep of a block. The executor fills them.

    A KV entry is one key and one value of every KV head.
    """

    # Tokens that were fed.
    fed: int = 0
    # Those of them that came from prompts.
    prompts: int = 0
    # KV entries of all sequences and layers.
    held: int = 0
    # KV entries that the full cache would have held.
    full: int = 0
    # KV entries that decode attention read.
    read: int = 0
    # Sequences, summed over all layers with a KV cache.
    units: int = 0


@dataclass
class BlockStats:
    """Sums over the sweeps of a block, and lists of what each sweep took."""

    # Whether the lists are kept. They are not if sequences may join, because the block may then run
    # for any number of sweeps.
    keeps_lists: bool = True
    # All sweeps of the block so far.
    sweeps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    # `held`, `full` and `units` are sums of those of `Sweep` over the sweeps after the first. Until
    # the second they are those of the first.
    held: int = 0
    full: int = 0
    units: int = 0
    # Prompt tokens that were computed.
    fed_tokens: int = 0
    # Seconds of each sweep.
    sweep_seconds: list[float] = field(default_factory=list)
    # Seconds of each layer of each sweep, over all micro-batches.
    layer_seconds: list[float] = field(default_factory=list)
    # KV entries held and read in each sweep, as in `Sweep`.
    held_by_sweep: list[int] = field(default_factory=list)
    read_by_sweep: list[int] = field(default_factory=list)
    _prompt_share: float = 0.0  # share of prompt tokens in the newest sweep

    @property
    def later(self) -> int:
        """The number of sweeps after the first."""
        return max(0, self.sweeps - 1)

    def end_layer(self, seconds: float) -> None:
        """Add the seconds of a layer in a sweep, over all micro-batches."""
        if self.keeps_lists:
            self.layer_seconds.append(seconds)

    def end_sweep(self, sweep: Sweep, seconds: float) -> None:
        """Add the counts and seconds of a sweep."""
        if self.sweeps == 1:  # the first sweep counts only while it is the only one
            self.held = self.full = self.units = 0
        self.held += sweep.held
        self.full += sweep.full
        self.units += sweep.units
        self.sweeps += 1
        self._prompt_share = sweep.prompts / sweep.fed
        if self.keeps_lists:
            self.sweep_seconds.append(0.0)
            self.held_by_sweep.append(sweep.held)
            self.read_by_sweep.append(sweep.read)
        self.add_seconds(seconds)

    def add_seconds(self, seconds: float) -> None:
        """Add to the seconds of the newest sweep.

        A mixed sweep's seconds are split between prefill and decode by its tokens.
        """
        self.prefill_s += seconds * self._prompt_share
        self.decode_s += seconds * (1 - self._prompt_share)
        if self.keeps_lists:
            self.sweep_seconds[-1] += seconds
