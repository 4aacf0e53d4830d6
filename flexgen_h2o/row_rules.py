"""What the rows of a run ask for: how each draws, when it is done, what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from flexgen_h2o.config import ModelSpec
from flexgen_h2o.courses import Course
from flexgen_h2o.errors import UsageError
from flexgen_h2o.generation import Row, RowEnd
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.rolling import most_new_tokens
from flexgen_h2o.prompts import Completion, Prompt
from flexgen_h2o.sampling import SamplingParams, StopStrings, TokenChooser, Tokenizer, decode_text

STOPS_KEPT = 1024  # sets of stop strings: rows may all have others, and there may be any number of rows


class RowRules:
    """The rules of a run's rows. params: of all of them, or each row's own in the order of `prompts`.

    Raises UsageError, as `add` does, for another number of params, and for stop strings without a tokenizer.
    """

    def __init__(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams], spec: ModelSpec,
        tokenizer: Tokenizer | None, eviction: Eviction,
    ) -> None:  # fmt: skip
        self._prompts, self._spec, self._tokenizer, self._eviction = prompts, spec, tokenizer, eviction
        self._params: dict[int, SamplingParams] = {}
        self.chooser = TokenChooser(params if isinstance(params, SamplingParams) else self._params)
        # Few sets of stop strings occur as a rule, and a finder of each is enough.
        self._stops = lru_cache(STOPS_KEPT)(partial(StopStrings, tokenizer))
        self._ends = lru_cache(STOPS_KEPT)(self._row_end)
        self._register(prompts, params)

    def add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Row]:
        """More rows, where each has its own params."""
        self._register(prompts, params)
        return self._rows(prompts, None)

    def forget(self, rows: Sequence[Row]) -> None:
        """They are handed out; their rules are not asked for again."""
        for row in rows:
            del self._params[row.prompt.index]

    def _register(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> None:
        if not isinstance(params, SamplingParams) and len(params) != len(prompts):
            raise UsageError(f"params: {len(params)} for {len(prompts)} prompts")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        self._params |= {p.index: one for p, one in zip(prompts, each, strict=True)}
        for p in each:
            self._stops(p.stop)

    def _row_end(self, stop: tuple[str, ...], ignore_eos: bool) -> RowEnd:
        return RowEnd(SamplingParams(ignore_eos=ignore_eos), self._spec.eos_token_ids, self._stops(stop))

    def rows(self, course: Course | None = None) -> list[Row]:
        """The rows, with nothing generated. course: as of `LLM.run`. UsageError for a prompt that is too long."""
        return self._rows(self._prompts, course)

    def _rows(self, prompts: Sequence[Prompt], course: Course | None) -> list[Row]:
        found = []
        for prompt in prompts:
            params = self._params[prompt.index]
            most = self.most_new_tokens(prompt) if course is None else course.most_new(prompt.index)
            at_once = 1 if course is None else course.at_once
            found.append(Row(prompt, most, asked=params.max_tokens, top_logprobs=params.logprobs, at_once=at_once))
        return found

    def most_new_tokens(self, prompt: Prompt) -> int:
        """As many as were asked for, and as there are positions for."""
        length, positions = len(prompt.token_ids), self._spec.max_positions
        if length > positions:
            raise UsageError(
                f"prompts[{prompt.index}]: {length} tokens, but {self._spec.name} has {positions} positions; shorten it"
            )
        return most_new_tokens(self._eviction, self._spec, length, self._params[prompt.index].max_tokens)

    def may_end_apart(self, rows: Sequence[Row]) -> bool:
        """Do the rows ask for different numbers of tokens, or may some stop before they have them all?"""
        params = (self._params[row.prompt.index] for row in rows)
        can_stop = any(p.stop or (self._spec.eos_token_ids and not p.ignore_eos) for p in params)
        return can_stop or len({row.max_new for row in rows}) > 1

    def end(self, row: Row) -> str | None:
        """Why the row is done with its newest token; None when it is not."""
        params = self._params[row.prompt.index]
        return self._ends(params.stop, params.ignore_eos)(row)

    def completion(self, row: Row) -> Completion:
        """The row as it is handed out."""
        assert row.finish_reason is not None
        text = None
        if self._tokenizer is not None:
            stops = self._stops(self._params[row.prompt.index].stop)
            text = stops.cut(decode_text(self._tokenizer, row.token_ids))
        logprobs = None if row.top_logprobs is None else list(row.logprobs)
        return Completion(row.prompt.index, row.prompt.text, text, list(row.token_ids), row.finish_reason, logprobs)
