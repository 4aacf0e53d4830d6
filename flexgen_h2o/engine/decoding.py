"""How rows get their tokens and log-probabilities, and when they are done. Sees rows and logits, and no layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import SAMPLING_CHUNK, SCORED_CHUNK
from flexgen_h2o.engine.detokenizer import Tokenizer, detokenizer_of
from flexgen_h2o.engine.generation import Callbacks, KnownTokens, MicroBatch, Row, SweepInput, sparing
from flexgen_h2o.engine.prompts import CODE_NOT_FINITE
from flexgen_h2o.engine.sampling import (
    NotFiniteError,
    Sampler,
    check_finite,
    token_logprobs,
)
from flexgen_h2o.kvcache.prefixes import row_places
from flexgen_h2o.tiers.stream import NOTHING, Waitable

if TYPE_CHECKING:
    from flexgen_h2o.core.settings import SamplingParams
    from flexgen_h2o.models.load import Model

ReadBack = Callable[[torch.Tensor], tuple[torch.Tensor, Waitable]]

# Tokens looked at beyond the longest stop string: a UTF-8 character cut at the window's start spoils up to 4 of them.
_WINDOW_MARGIN = 8


class StopCriteria:
    """When a row is done: end-of-sequence token, stop token or stop string ("stop"), or its length ("length").

    A stop string may be a special token, or have one in it, although texts leave these out: such strings are looked for
    in the text with its special tokens spelt. tokenizer: None only without stop strings, else UsageError.
    """

    def __init__(
        self, stop: tuple[str, ...], eos_token_ids: Sequence[int], tokenizer: Tokenizer | None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:  # fmt: skip
        if stop and tokenizer is None:
            raise UsageError("--stop: stop strings need a tokenizer and the model's folder has none; leave --stop out")
        self._stop = stop
        self._ends = frozenset(eos_token_ids) | frozenset(stop_token_ids)
        self._detokenizer = None if tokenizer is None else detokenizer_of(tokenizer)
        self._window = max((len(s.encode("utf-8", "surrogatepass")) for s in stop), default=0) + _WINDOW_MARGIN
        self._spelt: tuple[str, ...] = ()  # stop strings with special tokens in them
        if self._detokenizer is not None and stop:
            specials = self._detokenizer.specials
            self._spelt = tuple(s for s in stop if any(content in s for content in specials.values()))
            self._ends |= {token for token, content in specials.items() if content in stop}

    def is_eos(self, token: int) -> bool:
        """Whether a token ends a row."""
        return token in self._ends

    def __call__(self, row: Row) -> str | None:
        """Why a row is done with its newest token; None where it is not. To be called after each new token."""
        is_given = len(row.token_ids) <= len(row.given)
        own = row.own_ids if row.given else row.token_ids
        if not is_given and (own[-1] in self._ends or self.found(own, row.before)):
            return "stop"
        return "length" if len(row.token_ids) >= row.max_new else None

    def found(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> bool:
        """Whether the newest of a row's tokens completed a stop string. Decodes a short tail only. before: the tokens
        that they follow on."""
        if not self._stop or self._detokenizer is None:
            return False
        tail: list[int] = []
        size = 0
        for token in reversed(token_ids):
            has_text = self._detokenizer.has_text(token)
            if not has_text and not (self._spelt and token in self._detokenizer.specials):
                continue
            tail.append(token)
            # Tokens without text would use up the window, which is counted in tokens of at least one byte.
            size += has_text
            if size == self._window:
                break
        context = [] if size == self._window else self._detokenizer.context(before)
        text = self._detokenizer.behind(context, tail[::-1])
        if any(s in text for s in self._stop):
            return True
        if not self._spelt:
            return False
        spelt = self._detokenizer.behind(context, tail[::-1], with_specials=True)
        return any(s in spelt for s in self._spelt)

    def text(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str | None:
        """The text of a row's tokens up to where the earliest stop string begins; None without a tokenizer.

        A token that ends the row is no text, special or not.
        """
        return None if self._detokenizer is None else self.shown(token_ids, before, is_over=True)

    def shown(self, token_ids: Sequence[int], before: Sequence[int], is_over: bool) -> str:
        """`text` of a row that has come so far. Unless it is over, what a stop string may begin with is left out, and
        so are bytes at its end, which the next one may change."""
        assert self._detokenizer is not None
        ids = token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids
        if not is_over:
            ids = ids[: len(ids) - self._detokenizer.bytes_at_end(ids)]
        context = self._detokenizer.context(before)
        text = self._detokenizer.behind(context, ids)
        end = self._end(text, self._stop, is_over)
        if self._spelt and any(token in self._detokenizer.specials for token in ids):
            pieces = self._spell(text, ids, context)
            place = self._end("".join(pieces), self._spelt, is_over)
            end = min(end, _text_before(pieces, place))
        return text[:end]

    def cut(self, text: str) -> str:
        """`text` up to where the earliest stop string begins; all of it when there is none."""
        return text[: self._end(text, self._stop, is_over=True)]

    @staticmethod
    def _end(text: str, stop: Sequence[str], is_over: bool) -> int:
        """Where the earliest stop string begins. Unless it is over, also one that the text's end may be a part of."""
        starts = [at for at in map(text.find, stop) if at >= 0]
        if starts:
            return min(starts)
        if is_over:
            return len(text)
        most = min(max((len(s) - 1 for s in stop), default=0), len(text))
        for size in range(most, 0, -1):
            if any(s.startswith(text[-size:]) for s in stop):
                return len(text) - size
        return len(text)

    def _spell(self, text: str, token_ids: Sequence[int], context: Sequence[int]) -> list[str]:
        """The text of tokens in pieces, with a special token behind each piece except the last."""
        assert self._detokenizer is not None
        specials = self._detokenizer.specials
        pieces: list[str] = []
        at = 0
        for i, token in enumerate(token_ids):
            if token in specials:
                end = max(at, len(self._detokenizer.behind(context, token_ids[:i])))
                pieces += [text[at:end], specials[token]]
                at = end
        return [*pieces, text[at:]]


def stop_criteria(model: Model, params: SamplingParams) -> StopCriteria:
    """Return when an answer with these parameters is done."""
    eos = () if params.ignore_eos else model.spec.eos_token_ids
    return StopCriteria(params.stop, eos, model.tokenizer, params.stop_token_ids)


def _text_before(pieces: Sequence[str], place: int) -> int:
    """How many characters of text are in front of a place; every second piece is a special token, which is no text."""
    count = 0
    for i, piece in enumerate(pieces):
        taken = min(len(piece), place)
        count += 0 if i % 2 else taken
        place -= taken
    return count


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
            found, ready = torch.tensor(self.sampler.sample(logits, indices, steps), device="cpu"), NOTHING

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
        """`Sampler.choose` for all rows; one by one if they have penalties, or if it raises for all of them together
        and rows are spared. What it raises for each of several rows is no row's fault."""
        indices = [row.prompt.index for row in rows]
        failed: Exception | None = None
        if all(row.penalties is None for row in rows):
            try:
                return sampler.choose(logits, indices, steps)
            except Exception as error:
                if not self.watches.spares_rows:
                    raise
                failed = error
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        for i, row in enumerate(rows):
            with sparing(row, self.watches.spares_rows):
                own = logits[i : i + 1]
                if row.penalties is not None and len(row.token_ids) >= len(row.given):
                    own = row.penalties(row.before, row.own_ids, own)
                chosen[i] = sampler.choose(own, indices[i : i + 1], steps[i : i + 1])[0]
        if failed is not None and len(rows) > 1 and all(row.error is not None for row in rows):
            raise failed
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
