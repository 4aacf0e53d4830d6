"""How rows get their tokens and log-probabilities, and when they are done. Sees rows and logits, and no layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import SAMPLING_CHUNK, SCORED_CHUNK
from flexgen_h2o.engine.generation import Callbacks, KnownTokens, MicroBatch, Row, SweepInput, sparing
from flexgen_h2o.engine.prompts import CODE_NOT_FINITE
from flexgen_h2o.engine.sampling import (
    NotFiniteError,
    Sampler,
    Tokenizer,
    check_finite,
    decode_text,
    token_logprobs,
)
from flexgen_h2o.kvcache.prefixes import row_places
from flexgen_h2o.tiers.stream import NOTHING, Waitable

ReadBack = Callable[[torch.Tensor], tuple[torch.Tensor, Waitable]]

# Tokens looked at beyond the longest stop string: a UTF-8 character cut at the window's start spoils up to 4 of them.
_WINDOW_MARGIN = 8


class StopCriteria:
    """When a row is done: end-of-sequence token or stop string ("stop"), or its length ("length").

    tokenizer: None only without stop strings, else UsageError.
    """

    def __init__(self, stop: tuple[str, ...], eos_token_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        if stop and tokenizer is None:
            raise UsageError("--stop: stop strings need a tokenizer and the model's folder has none; leave --stop out")
        self._stop, self._eos, self._tokenizer = stop, frozenset(eos_token_ids), tokenizer
        self._window = max((len(s.encode("utf-8", "surrogatepass")) for s in stop), default=0) + _WINDOW_MARGIN
        self._size = len(tokenizer) if tokenizer is not None and stop else 0
        self._silent = _silent_ids(tokenizer) if tokenizer is not None and stop else frozenset()

    def is_eos(self, token: int) -> bool:
        return token in self._eos

    def __call__(self, row: Row) -> str | None:
        """Why a row is done with its newest token; None where it is not. To be called after each new token."""
        is_given = len(row.token_ids) <= len(row.given)
        own = row.own_ids if row.given else row.token_ids
        if not is_given and (self.is_eos(own[-1]) or self.found(own)):
            return "stop"
        return "length" if len(row.token_ids) >= row.max_new else None

    def found(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest of a row's tokens completed a stop string. Decodes a short tail only."""
        if not self._stop or self._tokenizer is None:
            return False
        tail: list[int] = []
        for token in reversed(token_ids):
            # Tokens without text would use up the window that is counted in tokens of at least one byte.
            if token < self._size and token not in self._silent:
                tail.append(token)
                if len(tail) == self._window:
                    break
        text = decode_text(self._tokenizer, tail[::-1])
        return any(s in text for s in self._stop)

    def text(self, token_ids: Sequence[int]) -> str | None:
        """The text of a row's tokens up to where the earliest stop string begins; None without a tokenizer."""
        return None if self._tokenizer is None else self.cut(decode_text(self._tokenizer, token_ids))

    def cut(self, text: str) -> str:
        """`text` up to where the earliest stop string begins; all of it when there is none."""
        starts = [at for at in map(text.find, self._stop) if at >= 0]
        return text[: min(starts)] if starts else text


def _silent_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that decode to nothing because they are special."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if getattr(token, "special", False)}


class TokenSource(Protocol):
    """Gives rows their tokens and says when they are done, in place of sampling parameters."""

    @property
    def max_tokens_per_sweep(self) -> int:
        """The most tokens of a row in one sweep."""

    def most_new(self, row: int) -> int:
        """The most tokens that the row of this index takes."""

    def sample(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        """The next token of each row, as `Sampler.sample`."""

    def end(self, row: Row) -> str | None:
        """Why the row is done with its newest token; None when it is not."""

    def known_tokens(self, row: Row) -> Sequence[int]:
        """The tokens that the row takes next, as far as they are known; `max_tokens_per_sweep` of them are enough."""


def given_tokens(row: Row) -> Sequence[int]:
    """The tokens that a row takes next, as far as they are given."""
    done = len(row.token_ids)
    return row.given[done : done + row.max_tokens_per_sweep]


@dataclass(frozen=True)
class Chosen:
    """The next token of each row of a micro-batch, on the way to the host.

    ready: they are there. take: waits for them; to be called once, before rows get others. NotFiniteError as of
    `Callbacks.spares_rows`.
    """

    ready: Waitable
    take: Callable[[], list[int]]


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen and when a row is done and why (None: not yet).

    known_tokens: as of `TokenSource`.
    """

    sampler: Sampler | TokenSource
    end: Callable[[Row], str | None]
    watches: Callbacks = field(default_factory=Callbacks)
    known_tokens: KnownTokens = given_tokens

    def sample(self, micro_batch: MicroBatch, logits: torch.Tensor, read_back: ReadBack) -> Chosen:
        """Choose the next token of each row, and keep log-probabilities for the rows that ask for them. It waits for
        these, and for a TokenSource. read_back: as of `tiers.device.Device`."""
        rows = list(micro_batch.rows)
        indices = [r.prompt.index for r in rows]
        if self.watches.logits is not None:
            self.watches.logits(indices, logits)
        steps = [max(0, len(r.token_ids) - len(r.given)) for r in rows]
        if isinstance(self.sampler, Sampler):
            found, ready = read_back(self._choose(self.sampler, rows, logits, steps))
        else:
            found, ready = torch.tensor(self.sampler.sample(logits, indices, steps)), NOTHING

        def tokens() -> list[int]:
            ready.wait()
            return self._taken(rows, found.tolist(), steps)

        if all(row.top_logprobs is None for row in rows):
            return Chosen(ready, tokens)
        taken = tokens()
        _add_logprobs(rows, taken, logits)
        return Chosen(NOTHING, lambda: taken)

    def _choose(
        self, sampler: Sampler, rows: Sequence[Row], logits: torch.Tensor, steps: Sequence[int]
    ) -> torch.Tensor:
        """`Sampler.choose` for all rows. If that raises and rows are spared: one by one, and a row for which it raises
        fails. What it raises for all of several rows is no row's fault."""
        indices = [row.prompt.index for row in rows]
        try:
            return sampler.choose(logits, indices, steps)
        except Exception:
            if not self.watches.spares_rows:
                raise
            chosen = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
            for i, row in enumerate(rows):
                with sparing(row, True):
                    chosen[i] = sampler.choose(logits[i : i + 1], indices[i : i + 1], steps[i : i + 1])[0]
            if len(rows) > 1 and all(row.error is not None for row in rows):
                raise
            return chosen

    def _taken(self, rows: Sequence[Row], tokens: list[int], steps: Sequence[int]) -> list[int]:
        """The tokens that rows take of those that were chosen, in place."""
        try:
            check_finite(tokens, [r.prompt.index for r in rows], steps)
        except NotFiniteError as error:
            is_damaged = 1 < len(rows) == len(error.places) and not any(r.token_ids for r in rows)
            if is_damaged or not self.watches.spares_rows:
                raise
            for i in error.places:
                rows[i].fail(CODE_NOT_FINITE, error.reason)
                tokens[i] = 0
        for i, row in enumerate(rows):
            if len(row.token_ids) < len(row.given):
                tokens[i] = row.given[len(row.token_ids)]
        return tokens


def _add_logprobs(rows: Sequence[Row], tokens: Sequence[int], logits: torch.Tensor) -> None:
    """Of the tokens that rows take, for those that ask for them; of an error there are none."""
    asking = [(i, top) for i, r in enumerate(rows) if (top := r.top_logprobs) is not None and r.error is None]
    if asking:
        places, tops = zip(*asking, strict=True)
        own = logits if len(places) == len(rows) else logits[list(places)]
        for i, found in zip(places, token_logprobs(own, [tokens[i] for i in places], tops), strict=True):
            rows[i].logprobs.append(found)


@dataclass(frozen=True)
class ScoredToken:
    """A prompt token whose log-probability is wanted. place: of the token before it in what a sweep feeds."""

    row: Row
    place: int
    token: int


def scored_tokens(micro_batch: MicroBatch, fed: SweepInput) -> list[ScoredToken]:
    """Those of the rows that enter with a sweep, by place; some may share places."""
    entering = zip(micro_batch.rows[fed.decoding :], row_places(fed.groups), strict=True)
    first = fed.decoding
    found = [
        ScoredToken(row, first + at + (in_front if at < before else behind), row.prompt.token_ids[at + 1])
        for row, (before, in_front, behind) in entering
        for at in range(len(row.prompt.token_ids) - 1 - row.scored, len(row.prompt.token_ids) - 1)
    ]
    return sorted(found, key=lambda one: one.place)


def score_prompts(
    wanted: Sequence[ScoredToken], logits_at: Callable[[list[int]], torch.Tensor], spares_rows: bool = False
) -> None:
    """Add to the rows' `prompt_logprobs`. logits_at: (places, vocab) of at most SCORED_CHUNK places.

    NotFiniteError where logits are not; with spares_rows such a row has an error, and others go on.
    """
    places = list(dict.fromkeys(one.place for one in wanted))
    number = {place: i for i, place in enumerate(places)}
    for chunk, tokens in groupby(wanted, key=lambda one: number[one.place] // SCORED_CHUNK):
        first, of_chunk = chunk * SCORED_CHUNK, list(tokens)
        logits = logits_at(places[first : first + SCORED_CHUNK])
        height = max(1, SAMPLING_CHUNK // logits.shape[1])
        for start in range(0, len(of_chunk), height):  # rows that share a place have a copy of its logits each
            few = of_chunk[start : start + height]
            own = logits[[number[one.place] - first for one in few]]
            tops = [one.row.top_prompt_logprobs for one in few]
            for one, found in zip(few, token_logprobs(own, [one.token for one in few], tops), strict=True):
                if math.isnan(found.logprob):
                    error = NotFiniteError(one.row.prompt.index, "in its prompt")
                    if not spares_rows:
                        raise error
                    one.row.fail(CODE_NOT_FINITE, error.reason)
                one.row.prompt_logprobs.append(found)
