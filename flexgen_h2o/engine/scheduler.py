"""The start of sequences, their micro-batches and blocks, and a scheduler of them.

Micro-batches know what is fed into the next sweep, and when a sequence leaves.

With continuous batching (`--refill`) a finished sequence gives its place in the running block to
the next one. The new sequence prefills in the sweep in which the others decode, and shares their
weight load.
"""

from __future__ import annotations

from collections import Counter, abc, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.settings import PREFILL
from flexgen_h2o.core.units import FORCED_CHUNK
from flexgen_h2o.engine.decoding import check_can_stop
from flexgen_h2o.engine.generation import BlockStats
from flexgen_h2o.engine.penalties import penalties_of
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.sampling import Logprobs
from flexgen_h2o.engine.sequence import Scoring, Sequence
from flexgen_h2o.kernels.workspace import upload_together
from flexgen_h2o.kvcache.budgets import Move, plan_moves
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens
from flexgen_h2o.kvcache.prefixes import (
    PromptGroup,
    Sharing,
    family_order,
    group_prompts,
    neighbours,
    pack_prompts,
    prompt_ends,
)
from flexgen_h2o.models.load import Model

More = Callable[[], abc.Sequence[Sequence] | None]


def begin(sequence: Sequence, model: Model, eviction: Eviction) -> None:
    """Make a sequence ready for a run: forget its answer, and set what is known beforehand.

    Raise UsageError if it is longer than the model's positions, if it is to score tokens that the
    model does not have, or for stop strings without a tokenizer. Sequences with `source` or
    `forced` are not checked here.
    """
    sequence.clear()
    if sequence.source is not None:
        return
    if sequence.forced:
        sequence.max_new = len(sequence.forced)
        sequence.scoring = Scoring(sequence.prompt_ids, sequence.forced)
        return
    sequence.params = model.generation.for_drawing(sequence.params)
    params = sequence.params
    check_can_stop(params.stop, model.tokenizer)
    spec = model.spec
    length = len(sequence.prompt_ids)
    if length > spec.max_positions:
        raise UsageError(
            f"prompts[{sequence.index}]: {length} tokens, but {spec.name} has "
            f"{spec.max_positions} positions; "
            "shorten it"
        )
    sequence.scoring = None
    sequence.max_tokens_per_sweep = 1
    sequence.max_new = most_new_tokens(eviction, spec, length, max(1, params.max_tokens))
    if params.score is not None:
        _begin_score(sequence, spec, model.name)
    elif params.prompt_logprobs is not None:
        _begin_echo(sequence, spec, eviction)
    sequence.penalties = None if params.score is not None else penalties_of(model, params)
    sequence.logprobs = None if sequence.top_logprobs is None else Logprobs()


def _begin_score(sequence: Sequence, spec: ModelSpec, model: str) -> None:
    """Let a sequence take the tokens of `params.score`.

    In the mode PREFILL, all of them but the last are fed behind the prompt, and the last one is
    given. Otherwise all are given, in decode steps.
    """
    params = sequence.params
    score = params.score or ()
    top = params.logprobs or 0
    fed_ids = sequence.prompt_ids
    in_prompt = params.score_mode == PREFILL
    if max(score) >= spec.vocab_size:
        raise UsageError(
            f"score: token id {max(score)} is outside the model's vocabulary of {spec.vocab_size}"
        )
    most = spec.max_positions - len(fed_ids) + 1 if in_prompt else sequence.max_new
    if most < len(score):
        raise UsageError(
            f"prompts[{sequence.index}]: {len(fed_ids)} tokens and {len(score)} to score do "
            f"not fit {model}'s {spec.max_positions} positions; shorten one of them"
        )
    given = score
    if in_prompt:
        fed_ids = (*fed_ids, *score[:-1])
        given = score[-1:]
    sequence.max_new = len(given)
    sequence.max_tokens_per_sweep = min(FORCED_CHUNK, len(given))
    sequence.scoring = Scoring(
        fed_ids, given, len(score) - len(given), top, top, logprobs=Logprobs()
    )


def _begin_echo(sequence: Sequence, spec: ModelSpec, eviction: Eviction) -> None:
    """Let a sequence keep log-probabilities of its prompt.

    If the prompt is longer than the KV budget, the rest of it is given in decode steps.
    """
    params = sequence.params
    ids = sequence.prompt_ids
    top = params.prompt_logprobs or 0
    new = min(sequence.max_new, params.max_tokens)
    # The budget counts at least two new tokens. Its slots then last for any number of decode steps.
    size = (len(ids), max(2, new))
    fed = len(ids)
    if eviction.needs.record and getattr(eviction, "while_decoding", False):
        blocks = [block for block in range(spec.num_blocks) if spec.window(block) is None]
        fed = min((fed, *(eviction.budget(*size, block).columns for block in blocks)))
    if fed == len(ids):
        sequence.scoring = Scoring(ids, (), fed - 1, top, params.logprobs, logprobs=Logprobs())
        return
    given = tuple(ids[fed:])
    sequence.max_new = len(given) + new
    sequence.max_tokens_per_sweep = min(FORCED_CHUNK, len(given))
    behind = max(top, params.logprobs or 0)
    sequence.scoring = Scoring(ids[:fed], given, fed - 1, top, behind, size, Logprobs())


def forced_sequences(
    prompts: abc.Sequence[abc.Sequence[int]],
    continuations: abc.Sequence[abc.Sequence[int]],
    eviction: Eviction,
    spec: ModelSpec,
    max_tokens_per_sweep: int,
) -> list[Sequence]:
    """Return sequences that take the tokens of their continuations.

    Raise UsageError if a prompt and its continuation do not fit the model's positions or the
    eviction policy.
    """
    read = prompts_from_python(prompts, None, spec.vocab_size)
    after = prompts_from_python(continuations, None, spec.vocab_size, name="continuations")
    if len(read) != len(after):
        raise UsageError(f"continuations: {len(after)} for {len(read)} prompts; give one for each")
    for sequence, more in zip(read, after, strict=True):
        length = len(sequence.prompt_ids)
        new = len(more.prompt_ids)
        if length > spec.max_positions or most_new_tokens(eviction, spec, length, new) < new:
            raise UsageError(
                f"prompts[{sequence.index}]: {length} tokens and the {new} of its continuation do "
                f"not fit {spec.name}'s "
                f"{spec.max_positions} positions; shorten one of them"
            )
        sequence.forced = tuple(more.prompt_ids)
        sequence.max_tokens_per_sweep = max_tokens_per_sweep
    return read


def can_differ(sequences: abc.Sequence[Sequence], spec: ModelSpec) -> bool:
    """Return whether sequences may end at different times. Others gain nothing by refill."""
    asked = [one.params for one in sequences if one.params.score is None]
    can_stop = any(
        p.stop or p.stop_token_ids or (spec.eos_token_ids and not p.ignore_eos) for p in asked
    )
    return can_stop or len({one.max_new for one in sequences}) > 1


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
        self._new_groups = group_prompts([r.fed_ids for r in rows], sharing, common, opens)

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
        self._new_groups = group_prompts([r.fed_ids for r in rows], sharing, self._common)


class Scheduler:
    """Decides when sequences run.

    They run in blocks one after another, or in one block that all others join in order.

    more: returns further sequences once all have joined, or an empty list if there are none. If it
        is given, sequences join the running block.
    common: tokens that all sequences begin with and that are not fed again.

    Attributes:
    stats: one entry for each block that has run.
    joined: the number of sequences that have joined the running block.
    sizes: how many sequences there are of each `Sequence.size`.
    prompt_tokens: the sum of all `Sequence.fed_ids`. It counts a shared prefix once per sequence,
        although the prefix is computed only once.
    decoded: tokens that finished sequences got after their first one.
    """

    def __init__(
        self,
        blocks: list[list[list[Sequence]]],
        more: Callable[[], abc.Sequence[Sequence]] | None = None,
        common: int = 0,
    ) -> None:
        self.is_continuous = more is not None
        self.common = common
        self.blocks = blocks[:1] if self.is_continuous else blocks
        self._queue = deque(
            row for block in blocks[len(self.blocks) :] for batch in block for row in batch
        )
        self._more = more
        self.stats: list[BlockStats] = []
        self.joined = 0
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.prompt_tokens = 0
        self.decoded = 0
        self._count([one for block in blocks for batch in block for one in batch])

    def most_sweeps(self, loads: int) -> int | None:
        """Return the most times that the weights are loaded, or None if sequences may join.

        Sequences that end before `max_new` tokens need fewer.

        loads: micro-batches that share each load.
        """
        if self.is_continuous:
            return None
        return sum(
            max(r.max_new for batch in block for r in batch) * -(-len(block) // loads)
            for block in self.blocks
        )

    def take(self, places: int, tokens: int) -> list[Sequence]:
        """Return the sequences that join now.

        They are at most `places`, with at most `tokens` prompt tokens in all, without the common
        ones. A prompt that is too long for what is left of `tokens` stays first in the queue.
        Shorter prompts behind it may join before it.
        """
        taken: list[Sequence] = []
        waiting: list[Sequence] = []
        while (
            len(taken) < places
            and tokens > 0
            and (self._queue or (not waiting and self._read_more()))
        ):
            row = self._queue.popleft()
            length = len(row.fed_ids) - self.common
            if length <= tokens:
                taken.append(row)
                tokens -= length
            else:
                waiting.append(row)
        self._queue.extendleft(reversed(waiting))
        self.joined += len(taken)
        return taken

    def _read_more(self) -> bool:
        if self._more is not None:
            found = self._more()
            self._count(found)
            self._queue.extend(found)
        return bool(self._queue)

    def _count(self, sequences: abc.Sequence[Sequence]) -> None:
        self.sizes.update(one.size for one in sequences)
        self.prompt_tokens += sum(len(one.fed_ids) for one in sequences)

    def count_finished(self, sequences: abc.Sequence[Sequence]) -> None:
        """Count the tokens of sequences that have ended, before their answers are cut."""
        self.decoded += sum(max(0, len(one.token_ids) - 1) for one in sequences)
