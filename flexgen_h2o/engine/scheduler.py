"""The start of sequences, their blocks, and a scheduler of them.

With continuous batching (`--refill`) a finished sequence gives its place in the running block to
the next one. The new sequence prefills in the sweep in which the others decode, and shares their
weight load.
"""

from __future__ import annotations

from collections import Counter, abc, deque
from collections.abc import Callable

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.settings import PREFILL
from flexgen_h2o.core.units import FORCED_CHUNK
from flexgen_h2o.engine.decoding import check_can_stop
from flexgen_h2o.engine.generation import BlockStats
from flexgen_h2o.engine.penalties import penalties_of
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.sequence import Scoring, Sequence
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens
from flexgen_h2o.kvcache.prefixes import Sharing, family_order, neighbours
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
    sequence.logprobs = None if sequence.top_logprobs is None else []


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
        fed_ids += score[:-1]
        given = score[-1:]
    sequence.max_new = len(given)
    sequence.max_tokens_per_sweep = min(FORCED_CHUNK, len(given))
    sequence.scoring = Scoring(fed_ids, given, len(score) - len(given), top, top)


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
        sequence.scoring = Scoring(ids, (), fed - 1, top, params.logprobs)
        return
    given = ids[fed:]
    sequence.max_new = len(given) + new
    sequence.max_tokens_per_sweep = min(FORCED_CHUNK, len(given))
    behind = max(top, params.logprobs or 0)
    sequence.scoring = Scoring(ids[:fed], given, fed - 1, top, behind, size)


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
        sequence.forced = more.prompt_ids
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
