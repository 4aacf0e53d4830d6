"""The requests of a run, and a scheduler of their sequences.

One table has the parameters, sequences and completions. With continuous batching (`--refill`) a
finished sequence gives its place in the running block to the next one. The new sequence prefills in
the sweep in which the others decode, and shares their weight load.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.settings import PREFILL
from flexgen_h2o.core.units import FORCED_CHUNK
from flexgen_h2o.engine.decoding import Decoding, StopCriteria, TokenSource
from flexgen_h2o.engine.generation import BlockStats, Callbacks, Row, make_blocks, sparing
from flexgen_h2o.engine.penalties import penalties_of
from flexgen_h2o.engine.prompts import Completion, Prompt, prompts_from_python
from flexgen_h2o.engine.sampling import Sampler, SamplingParams, TokenLogprobs, of_likeliest
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens
from flexgen_h2o.models.load import Model

Params = SamplingParams | Sequence[SamplingParams] | TokenSource
More = Callable[[], tuple[Sequence[Prompt], Sequence[SamplingParams]] | None]
# Cached sets of stop strings. The cache is bounded because each of any number of sequences may
# have its own set.
STOPS_KEPT = 1024


@dataclass(frozen=True)
class ForcedTokens:
    """Teacher forcing: sequences take given tokens, `tokens[index][step]`, whatever the logits."""

    tokens: Mapping[int, Sequence[int]]
    max_tokens_per_sweep: int = 1

    def sample(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        return [self.tokens[row][step] for row, step in zip(rows, steps, strict=True)]

    def most_new(self, row: int) -> int:
        return len(self.tokens[row])

    def end(self, row: Row) -> str | None:
        return "length" if len(row.token_ids) >= row.max_new else None

    def known_tokens(self, row: Row) -> Sequence[int]:
        done = len(row.token_ids)
        return self.tokens[row.prompt.index][done : done + self.max_tokens_per_sweep]


def forced_rows(
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    eviction: Eviction,
    spec: ModelSpec,
    max_tokens_per_sweep: int,
) -> tuple[list[Prompt], ForcedTokens]:
    """Return prompts of token ids, and the tokens that each of them is to take.

    Raise UsageError if a prompt and its continuation do not fit the model's positions or the
    eviction policy.
    """
    read = prompts_from_python(prompts, None, spec.vocab_size)
    after = prompts_from_python(continuations, None, spec.vocab_size, name="continuations")
    if len(read) != len(after):
        raise UsageError(f"continuations: {len(after)} for {len(read)} prompts; give one for each")
    for prompt, more in zip(read, after, strict=True):
        length = len(prompt.token_ids)
        new = len(more.token_ids)
        if length > spec.max_positions or most_new_tokens(eviction, spec, length, new) < new:
            raise UsageError(
                f"prompts[{prompt.index}]: {length} tokens and the {new} of its continuation do "
                f"not fit {spec.name}'s "
                f"{spec.max_positions} positions; shorten one of them"
            )
    return read, ForcedTokens({p.index: p.token_ids for p in after}, max_tokens_per_sweep)


class RequestTable:
    """The requests of a run: parameters, sampler, stop criteria, sequences, completions.

    params: those of all prompts, or a list with one for each of `prompts`, or the source of all
        tokens.

    Attributes:
    rows: the sequences of `prompts`, with nothing generated. Those that `add` returns are not kept.
    sizes: how many sequences there are of each `Row.size`.
    prompt_tokens: tokens that are computed in prefill.
    decoded: tokens that finished sequences got after their first one.

    The constructor and `add` raise UsageError if the number of params is wrong, if there are stop
    strings but no tokenizer, or if a prompt is longer than the model's positions.
    """

    def __init__(
        self, prompts: Sequence[Prompt], params: Params, model: Model, eviction: Eviction
    ) -> None:
        self.model = model
        self._eviction = eviction
        self._source: TokenSource | None = None
        self._params: dict[int, SamplingParams] = {}
        self._isolates_errors = False
        self._sampler = Sampler(params if isinstance(params, SamplingParams) else self._params)
        eos = model.spec.eos_token_ids
        tokenizer = model.tokenizer
        self._make_criteria = lru_cache(STOPS_KEPT)(
            lambda stop, ignore, stop_ids: StopCriteria(
                stop, () if ignore else eos, tokenizer, stop_ids
            )
        )
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.prompt_tokens = self.decoded = 0
        if isinstance(params, SamplingParams):
            each: Sequence[SamplingParams] = [params] * len(prompts)
        elif isinstance(params, Sequence):
            each = params
        else:
            self._source = params
            each = [SamplingParams()] * len(prompts)
        self.rows = self.add(prompts, each)

    def add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Row]:
        """Return sequences for more prompts, each with its own params."""
        if len(params) != len(prompts):
            raise UsageError(f"params: {len(params)} for {len(prompts)} prompts; give one for each")
        for one in params:
            self._make_criteria(one.stop, one.ignore_eos, one.stop_token_ids)
        self._params |= {p.index: one for p, one in zip(prompts, params, strict=True)}
        rows = [self._row(prompt) for prompt in prompts]
        self.sizes.update(row.size for row in rows)
        self.prompt_tokens += sum(len(row.prompt.token_ids) for row in rows)
        return rows

    def _row(self, prompt: Prompt) -> Row:
        params = self._params[prompt.index]
        source = self._source
        if source is not None:
            most = source.most_new(prompt.index)
            return Row(
                prompt,
                most,
                asked=params.max_tokens,
                max_tokens_per_sweep=source.max_tokens_per_sweep,
            )
        spec = self.model.spec
        length = len(prompt.token_ids)
        if length > spec.max_positions:
            raise UsageError(
                f"prompts[{prompt.index}]: {length} tokens, but {spec.name} has "
                f"{spec.max_positions} positions; "
                "shorten it"
            )
        most = most_new_tokens(self._eviction, spec, length, max(1, params.max_tokens))
        if params.score is not None:
            return self._scored_row(prompt, params, most)
        if params.prompt_logprobs is not None:
            row = self._echoed_row(prompt, params, most)
        else:
            row = Row(prompt, most, asked=params.max_tokens, top_logprobs=params.logprobs)
        row.penalties = penalties_of(self.model, params)
        return row

    def _scored_row(self, prompt: Prompt, params: SamplingParams, most: int) -> Row:
        """Return a sequence that takes params.score, in decode steps or behind its prompt."""
        spec = self.model.spec
        score = params.score or ()
        top = params.logprobs or 0
        in_prompt = params.score_mode == PREFILL
        if max(score) >= spec.vocab_size:
            raise UsageError(
                f"score: token id {max(score)} is outside the model's vocabulary of "
                f"{spec.vocab_size}"
            )
        most = spec.max_positions - len(prompt.token_ids) + 1 if in_prompt else most
        if most < len(score):
            raise UsageError(
                f"prompts[{prompt.index}]: {len(prompt.token_ids)} tokens and "
                f"{len(params.score or ())} to score do "
                f"not fit {self.model.name}'s {spec.max_positions} positions; shorten one of them"
            )
        if in_prompt:
            prompt = Prompt(prompt.index, prompt.token_ids + score[:-1], prompt.text)
            score = score[-1:]
        scored = len(params.score or ()) - len(score)
        return Row(
            prompt,
            len(score),
            asked=1,
            top_logprobs=top,
            max_tokens_per_sweep=min(FORCED_CHUNK, len(score)),
            given=score,
            scored=scored,
            top_prompt_logprobs=top,
        )

    def _echoed_row(self, prompt: Prompt, params: SamplingParams, most: int) -> Row:
        """Return a sequence whose prompt gets log-probabilities.

        The part of the prompt beyond the KV budget is taken in decode steps.
        """
        policy = self._eviction
        ids = prompt.token_ids
        asked = params.max_tokens
        length = len(ids)
        top = params.prompt_logprobs or 0
        # Slots for two new tokens or more are enough for any number of decode steps.
        size = (length, max(2, min(most, asked)))
        fed = length
        if policy.needs.record and getattr(policy, "while_decoding", False):
            spec = self.model.spec
            blocks = [block for block in range(spec.num_blocks) if spec.window(block) is None]
            fed = min((length, *(policy.budget(*size, block).columns for block in blocks)))
        if fed == length:
            return Row(
                prompt,
                most,
                asked=asked,
                top_logprobs=params.logprobs,
                scored=length - 1,
                top_prompt_logprobs=top,
            )
        given = ids[fed:]
        return Row(
            Prompt(prompt.index, ids[:fed], prompt.text),
            len(given) + min(most, asked),
            asked=asked,
            top_logprobs=max(top, params.logprobs or 0),
            max_tokens_per_sweep=min(FORCED_CHUNK, len(given)),
            given=given,
            scored=fed - 1,
            top_prompt_logprobs=top,
            budget_of=size,
        )

    def decoding(self, callbacks: Callbacks) -> Decoding:
        """Return how the sequences get their tokens."""
        if self._source is not None:
            return Decoding(self._source, self._source.end, callbacks, self._source.known_tokens)
        self._isolates_errors = callbacks.isolates_errors
        should_continue = callbacks.should_continue

        def end(row: Row) -> str | None:
            # A sequence takes all its given tokens; its first generated one comes out of the
            # same sweep.
            has_own = len(row.token_ids) > len(row.given)
            reason = None
            if row.error is None:
                with sparing(row, callbacks.isolates_errors):
                    reason = self._criteria_of(row)(row)
                    if (
                        reason is None
                        and should_continue is not None
                        and has_own
                        and not should_continue(row)
                    ):
                        reason = "length"
            if row.error is not None:
                reason = "error" if has_own or len(row.token_ids) >= row.max_new else None
            return reason

        return Decoding(self._sampler, end, callbacks)

    def _criteria_of(self, row: Row) -> StopCriteria:
        params = self._params[row.prompt.index]
        return self._make_criteria(params.stop, params.ignore_eos, params.stop_token_ids)

    def finish(self, rows: Sequence[Row]) -> list[Completion]:
        """Count finished sequences, forget their parameters, and return their completions."""
        found = []
        for row in rows:
            assert row.finish_reason is not None
            with sparing(row, self._isolates_errors):
                completion = self._completion(row)
            if row.error is not None:
                completion = Completion(
                    row.prompt.index,
                    row.prompt.text,
                    None,
                    [],
                    "error",
                    error=row.error,
                    error_code=row.error_code,
                )
            found.append(completion)
            self.decoded += max(0, len(row.token_ids) - 1)
            del self._params[row.prompt.index]
        return found

    def _completion(self, row: Row) -> Completion:
        params = self._params[row.prompt.index]
        before = row.prompt_logprobs
        behind = list(row.logprobs)
        token_ids = list(row.token_ids)
        logprobs = None if row.top_logprobs is None else behind
        of_prompt: list[TokenLogprobs | None] | None = None
        before_answer = row.before
        if params.score is not None:
            token_ids = [*params.score[: row.scored], *token_ids]
            logprobs = [*before, *behind]
            before_answer = row.prompt.token_ids[: len(row.prompt.token_ids) - row.scored]
        elif params.prompt_logprobs is not None:
            own = len(row.given)
            of_prompt = [
                None,
                *before,
                *(of_likeliest(one, params.prompt_logprobs) for one in behind[:own]),
            ]
            token_ids = token_ids[own:][: params.max_tokens]
            logprobs = behind[own:][: params.max_tokens]
            top = params.logprobs
            logprobs = None if top is None else [of_likeliest(one, top) for one in logprobs]
        text = self._criteria_of(row).text(token_ids, before_answer)
        assert row.finish_reason is not None
        reason = row.finish_reason if token_ids else "length"
        return Completion(
            row.prompt.index, row.prompt.text, text, token_ids, reason, logprobs, of_prompt
        )

    def finish_rest(self) -> list[Completion]:
        """Finish the sequences that were cut short, and return their completions.

        Their reason is "length".
        """
        rest = [row for row in self.rows if row.finish_reason is None]
        for row in rest:
            row.finish_reason = "length"
        return self.finish(rest)

    def schedule(
        self, blocks: list[list[list[Row]]], refill: bool, more: More | None = None, common: int = 0
    ) -> Scheduler:
        """Return a scheduler of the sequences, given as blocks.

        Sequences that all end together gain nothing by waiting, so they stay in their blocks.

        refill, more: see `LLM.run`.
        common: see `Scheduler`.
        """
        params = (self._params[row.prompt.index] for row in self.rows)
        can_stop = any(
            p.score is None
            and (p.stop or p.stop_token_ids or (self.model.spec.eos_token_ids and not p.ignore_eos))
            for p in params
        )
        end_together = not can_stop and len({row.max_new for row in self.rows}) <= 1
        if not refill or (more is None and (len(blocks) == 1 or end_together)):
            return Scheduler(blocks, None, common)

        def further() -> list[Row]:
            found = more() if more is not None else None
            rows = self.add(*found) if found is not None else []
            return [row for block in make_blocks(rows, 1, 1) for batch in block for row in batch]

        return Scheduler(blocks, further, common)


class Scheduler:
    """Decides when sequences run.

    They run in blocks one after another, or in one block that all others join in order.

    more: returns further sequences once all have joined, or none at the end. If it is given,
        sequences join the running block.
    common: tokens that all sequences begin with and that are not fed again.

    Attributes:
    stats: one entry for each block that has run.
    joined: the number of sequences that have joined the running block.
    """

    def __init__(
        self,
        blocks: list[list[list[Row]]],
        more: Callable[[], Sequence[Row]] | None = None,
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

    def most_sweeps(self, loads: int) -> int | None:
        """Return how often the weights are loaded, or None if sequences may join.

        The number is unknown if sequences may join.

        loads: micro-batches that share each load.
        """
        if self.is_continuous:
            return None
        return sum(
            max(r.max_new for batch in block for r in batch) * -(-len(block) // loads)
            for block in self.blocks
        )

    def take(self, places: int, tokens: int) -> list[Row]:
        """Return the sequences that join now.

        They are at most `places`, with at most `tokens` prompt tokens in all. A prompt that is too
        long for the rest of `tokens` waits, and shorter ones behind it may pass. It is tried first
        the next time.
        """
        taken: list[Row] = []
        waiting: list[Row] = []
        while (
            len(taken) < places
            and tokens > 0
            and (self._queue or (not waiting and self._read_more()))
        ):
            row = self._queue.popleft()
            length = len(row.prompt.token_ids) - self.common
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
            self._queue.extend(self._more())
        return bool(self._queue)
