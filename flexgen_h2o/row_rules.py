"""What the rows of a run ask for: how each draws, when it is done, what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.config import ModelSpec
from flexgen_h2o.errors import UsageError
from flexgen_h2o.generation import Course, Row, RowEnd
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.rolling import most_new_tokens
from flexgen_h2o.prompts import Completion, Prompt
from flexgen_h2o.sampling import SamplingParams, StopStrings, TokenChooser, Tokenizer, decode_text


class RowRules:
    """The rules of a run's rows. params: of all of them, or each row's own in the order of `prompts`.

    Raises UsageError for another number of params, and for stop strings without a tokenizer.
    """

    def __init__(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams], spec: ModelSpec,
        tokenizer: Tokenizer | None, eviction: Eviction,
    ) -> None:  # fmt: skip
        self._prompts, self._spec, self._tokenizer, self._eviction = prompts, spec, tokenizer, eviction
        if not isinstance(params, SamplingParams) and len(params) != len(prompts):
            raise UsageError(f"params: {len(params)} for {len(prompts)} prompts")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        self._params = {p.index: one for p, one in zip(prompts, each, strict=True)}
        self.chooser = TokenChooser(params if isinstance(params, SamplingParams) else self._params)
        # Few sets of stop strings occur, and a finder of each is enough.
        self._stops = {stop: StopStrings(tokenizer, stop) for stop in {p.stop for p in each}}
        ends: dict[tuple[tuple[str, ...], bool], RowEnd] = {}
        for p in each:
            if (p.stop, p.ignore_eos) not in ends:
                ends[p.stop, p.ignore_eos] = RowEnd(p, spec.eos_token_ids, self._stops[p.stop])
        self._ends = {index: ends[p.stop, p.ignore_eos] for index, p in self._params.items()}

    def rows(self, course: Course | None = None) -> list[Row]:
        """The rows, with nothing generated. course: as of `LLM.run`. UsageError for a prompt that is too long."""
        found = []
        for prompt in self._prompts:
            params = self._params[prompt.index]
            most = self.most_new_tokens(prompt) if course is None else course.most_new(prompt.index)
            found.append(Row(prompt, most, asked=params.max_tokens, top_logprobs=params.logprobs))
        return found

    def most_new_tokens(self, prompt: Prompt) -> int:
        """As many as were asked for, and as there are positions for."""
        length, positions = len(prompt.token_ids), self._spec.max_positions
        if length > positions:
            raise UsageError(
                f"prompts[{prompt.index}]: {length} tokens, but {self._spec.name} has {positions} positions; shorten it"
            )
        return most_new_tokens(self._eviction, self._spec, length, self._params[prompt.index].max_tokens)

    def end(self, row: Row) -> str | None:
        """Why the row is done with its newest token; None when it is not."""
        return self._ends[row.prompt.index](row)

    def completion(self, row: Row) -> Completion:
        """The row as it is handed out."""
        assert row.finish_reason is not None
        text = None
        if self._tokenizer is not None:
            stops = self._stops[self._params[row.prompt.index].stop]
            text = stops.cut(decode_text(self._tokenizer, row.token_ids))
        logprobs = None if row.top_logprobs is None else list(row.logprobs)
        return Completion(row.prompt.index, row.prompt.text, text, list(row.token_ids), row.finish_reason, logprobs)
