"""Courses: what steers rows instead of their sampling parameters, such as teacher forcing.

What the rows of a run ask for: how each draws, when it is done, what becomes of it.

Refill: rows that wait for the places of those that finish, so that a block's sweeps stay full.

A row that enters prefills in the sweep in which its neighbours decode, and shares their weight load.

The rows of a run: in which blocks they are, and which of them enter a block that is running.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import torch

from flexgen_h2o.core.config import ModelSpec
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.schedule import Step
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.generation import Callbacks, Chooser, Decoding, Row, StopCriteria, in_order
from flexgen_h2o.engine.metrics import BlockLists, BlockStats, RunStats
from flexgen_h2o.engine.prompts import Completion, Prompt, prompts_from_python
from flexgen_h2o.engine.sampling import Sampler, SamplingParams, StopStrings, Tokenizer, decode_text
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens


class TokenSource(Chooser, Protocol):
    """Which tokens rows take, and when they are done."""

    @property
    def max_tokens_per_sweep(self) -> int:
        """The most tokens of a row that a sweep may feed."""

    def most_new(self, row: int) -> int:
        """The most tokens that the row of this index takes."""

    def end(self, row: Row) -> str | None:
        """Why the row is done with its newest token (Decoding.end)."""

    def known_tokens(self, row: Row) -> Sequence[int]:
        """The tokens that it will take next, as far as they are known; `at_once` of them are enough."""


@dataclass(frozen=True)
class ForcedTokens:
    """Teacher forcing: rows take the tokens that they are given, whatever the logits: `tokens[row][step]`."""

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


def steered(
    token_source: TokenSource | None, sampler: Chooser, end: Callable[[Row], str | None], watches: Callbacks
) -> Decoding:
    """Decoding by a token source; without one, as the others say."""
    if token_source is None:
        return Decoding(sampler, end, watches)
    return Decoding(token_source, token_source.end, watches, token_source.known_tokens)


def forced_rows(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], eviction: Eviction, spec: ModelSpec,
    max_tokens_per_sweep: int,
) -> tuple[list[Prompt], ForcedTokens]:  # fmt: skip
    """Prompts of token ids, each with the tokens that it is to take. UsageError where they do not fit together."""
    read = prompts_from_python(prompts, None, spec.vocab_size)
    after = prompts_from_python(continuations, None, spec.vocab_size)
    if len(read) != len(after):
        raise UsageError(f"continuations: {len(after)} for {len(read)} prompts")
    for prompt, more in zip(read, after, strict=True):
        length, new = len(prompt.token_ids), len(more.token_ids)
        if length > spec.max_positions or most_new_tokens(eviction, spec, length, new) < new:
            raise UsageError(
                f"prompts[{prompt.index}]: with its continuation longer than {spec.max_positions} positions"
            )
    return read, ForcedTokens({p.index: p.token_ids for p in after}, max_tokens_per_sweep)


STOPS_KEPT = 1024  # sets of stop strings: rows may all have others, and there may be any number of rows


class RequestTable:
    """The rules of a run's rows. params: of all of them, or each row's own in the order of `prompts`.

    Raises UsageError, as `add` does, for another number of params, and for stop strings without a tokenizer.
    """

    def __init__(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams], spec: ModelSpec,
        tokenizer: Tokenizer | None, eviction: Eviction,
    ) -> None:  # fmt: skip
        self._prompts, self._spec, self._tokenizer, self._eviction = prompts, spec, tokenizer, eviction
        self._params: dict[int, SamplingParams] = {}
        self.sampler = Sampler(params if isinstance(params, SamplingParams) else self._params)
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

    def _row_end(self, stop: tuple[str, ...], ignore_eos: bool) -> StopCriteria:
        return StopCriteria(SamplingParams(ignore_eos=ignore_eos), self._spec.eos_token_ids, self._stops(stop))

    def rows(self, token_source: TokenSource | None = None) -> list[Row]:
        """The rows, with nothing generated. token_source: as of `LLM.run`. UsageError for a prompt that is too long."""
        return self._rows(self._prompts, token_source)

    def _rows(self, prompts: Sequence[Prompt], token_source: TokenSource | None) -> list[Row]:
        found = []
        for prompt in prompts:
            params = self._params[prompt.index]
            most = self.most_new_tokens(prompt) if token_source is None else token_source.most_new(prompt.index)
            max_tokens_per_sweep = 1 if token_source is None else token_source.max_tokens_per_sweep
            found.append(
                Row(
                    prompt,
                    most,
                    asked=params.max_tokens,
                    top_logprobs=params.logprobs,
                    max_tokens_per_sweep=max_tokens_per_sweep,
                )
            )
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


MoreRows = Callable[[], Sequence[Row]]


def nobody() -> Sequence[Row]:
    """No further rows."""
    return ()


class Queue:
    """Rows in the order in which they enter. more: gives further rows when all have entered; none: that was all.

    common: tokens of each prompt that are not fed again. `entered` counts the rows that have entered.
    """

    def __init__(self, rows: Sequence[Row], more: MoreRows = nobody, common: int = 0) -> None:
        self._rows, self._more, self._common = deque(rows), more, common
        self.entered = 0

    def take(self, places: int, tokens: int) -> list[Row]:
        """Those that enter now: at most `places` rows, whose prompts feed `tokens` tokens at most in all.

        A prompt that is too long for what is left of these waits, and shorter ones behind it may pass; it is the first
        to be asked next time.
        """
        taken: list[Row] = []
        waiting: list[Row] = []
        while len(taken) < places and tokens > 0 and (self._rows or (not waiting and self._read_on())):
            row = self._rows.popleft()
            length = len(row.prompt.token_ids) - self._common
            if length <= tokens:
                taken.append(row)
                tokens -= length
            else:
                waiting.append(row)
        self._rows.extendleft(reversed(waiting))
        self.entered += len(taken)
        return taken

    def _read_on(self) -> bool:
        self._rows.extend(self._more())
        return bool(self._rows)


More = Callable[[], tuple[Sequence[Prompt], Sequence[SamplingParams]] | None]


@dataclass(frozen=True)
class RunRows:
    """`rows` in `blocks`, or in one block and a `queue` of those that enter it. stats: counts them all.

    common: tokens that all begin with, whose KV is held in one copy.
    """

    rows: list[Row]
    blocks: list[list[list[Row]]]
    queue: Queue | None
    stats: RunStats
    common: int = 0

    def most_sweeps(self, loads: int) -> int | None:
        """How often the weights come, `loads` micro-batches sharing them; None where rows enter: any number."""
        if self.queue is not None:
            return None
        return sum(max(r.max_new for batch in block for r in batch) * -(-len(block) // loads) for block in self.blocks)


def run_blocks(
    executor: Executor, work: RunRows, order: Callable[[int], Iterator[Step]] | None, on_tokens: Callable[[int], None]
) -> None:
    """Run them one after another. order: of a block's steps by its number of micro-batches, instead of all of them."""
    for block in work.blocks:
        facts = BlockLists() if work.queue is None else BlockStats()
        with torch.inference_mode():
            executor.run_block(block, facts, order(len(block)) if order else None, on_tokens, work.queue)
        work.stats.blocks.append(facts)
        if order:  # it may have ended within a sweep: the next block's weights begin anew
            executor.restart()
    executor.finish()


def run_rows(
    rules: RequestTable,
    rows: list[Row],
    blocks: list[list[list[Row]]],
    refill: bool,
    more: More | None,
    common: int = 0,
) -> RunRows:
    """refill, more: as of `LLM.run`. Rows that all end together gain nothing by waiting, and stay in their blocks.

    common: as of `RunRows`; rows of `more` begin with the same.
    """
    stats = RunStats()
    stats.begin(rows)
    if not refill or (more is None and (len(blocks) == 1 or not rules.may_end_apart(rows))):
        return RunRows(rows, blocks, None, stats, common)

    def feed() -> list[Row]:
        found = more() if more is not None else None
        further = in_order(rules.add(*found)) if found is not None else []
        stats.begin(further)
        return further

    waiting = [row for block in blocks[1:] for batch in block for row in batch]
    return RunRows(rows, blocks[:1], Queue(waiting, feed, common), stats, common)
