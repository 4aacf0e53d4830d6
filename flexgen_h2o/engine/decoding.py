"""How sequences get their tokens and log-probabilities, and when they are done.

It sees sequences and logits, no layers.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from functools import lru_cache
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import SAMPLING_CHUNK, SCORED_CHUNK
from flexgen_h2o.engine.detokenizer import Tokenizer, detokenizer_of
from flexgen_h2o.engine.generation import Callbacks, sparing
from flexgen_h2o.engine.harmony import Channels, marks_of
from flexgen_h2o.engine.sampling import (
    Logprobs,
    NotFiniteError,
    check_finite,
    choose_tokens,
    of_likeliest,
    token_logprobs,
)
from flexgen_h2o.engine.sequence import CODE_NOT_FINITE, Scoring, Sequence
from flexgen_h2o.kvcache.prefixes import prompt_places
from flexgen_h2o.tiers.stream import NOTHING, Waitable

if TYPE_CHECKING:
    from flexgen_h2o.core.settings import SamplingParams
    from flexgen_h2o.engine.scheduler import MicroBatch, SweepInput
    from flexgen_h2o.models.load import Model

ReadBack = Callable[[torch.Tensor], tuple[torch.Tensor, Waitable]]

# Tokens that are looked at beyond the longest stop string. A UTF-8 character that is cut at the
# start of the window spoils up to 4 of them.
_WINDOW_MARGIN = 8
# Sets of stops that sequences share, and the most stops of such a set.
STOPS_KEPT = 1024
FEW_STOPS = 16


class StopCriteria:
    """Decides when a sequence is done.

    The reason is "stop" for an end-of-sequence token, a stop token or a stop string, and "length"
    for its length. A stop string may be or contain a special token, although texts leave special
    tokens out. Such strings are looked for in the text with its special tokens written out.

    If a chat's answer has channels, stop strings are looked for in its content only: reasoning and
    headers may mention them.

    is_chat: whether the answer is a chat's.
    tokenizer: may be None only if there are no stop strings. Otherwise the constructor raises
        UsageError.
    """

    def __init__(
        self,
        stop: tuple[str, ...],
        eos_token_ids: abc.Sequence[int],
        tokenizer: Tokenizer | None,
        stop_token_ids: abc.Sequence[int] = (),
        is_chat: bool = False,
    ) -> None:
        check_can_stop(stop, tokenizer)
        self._tokenizer = tokenizer
        self._marks = marks_of(tokenizer) if is_chat and stop else None
        self._channels: WeakKeyDictionary[Sequence, Channels] = WeakKeyDictionary()
        self._stop = stop
        self._ends = frozenset(eos_token_ids) | frozenset(stop_token_ids)
        self._detokenizer = None if tokenizer is None else detokenizer_of(tokenizer)
        self._window = (
            max((len(s.encode("utf-8", "surrogatepass")) for s in stop), default=0) + _WINDOW_MARGIN
        )
        self._named_ends: abc.Set[int] = frozenset()  # tokens that only stop strings name
        self._spelt: tuple[str, ...] = ()  # stop strings with special tokens in them
        if self._detokenizer is not None and stop:
            specials = self._detokenizer.specials
            self._spelt = tuple(
                s for s in stop if any(content in s for content in specials.values())
            )
            named = {token for token, content in specials.items() if content in stop}
            self._named_ends = named - self._ends
            self._ends |= named

    def is_eos(self, token: int) -> bool:
        """Return whether a token ends a sequence."""
        return token in self._ends

    def __call__(self, row: Sequence) -> str | None:
        """Return why a sequence is done with its newest token, or None if it is not.

        Call this after each new token.
        """
        is_given = len(row.token_ids) <= len(row.given)
        own = row.generated_ids if row.given else row.token_ids
        if not is_given and (
            self._ends_content(row, own)
            if self._marks is not None
            else own[-1] in self._ends or self.found(own, row.before)
        ):
            return "stop"
        return "length" if len(row.token_ids) >= row.max_new else None

    def _ends_content(self, row: Sequence, own: abc.Sequence[int]) -> bool:
        """Return whether the newest token ends an answer with channels."""
        assert self._marks is not None and self._tokenizer is not None
        channels = self._channels.get(row)
        if channels is None:
            channels = Channels(self._tokenizer, self._marks, row.before)
            self._channels[row] = channels
        for token in own[channels.num_tokens : -1]:
            channels.add(token)
        was_content = channels.content is not None
        channels.add(own[-1])
        if own[-1] in self._ends and (was_content or own[-1] not in self._named_ends):
            return True
        now = channels.content
        return now is not None and self.found(now.token_ids)

    def found(self, token_ids: abc.Sequence[int], before: abc.Sequence[int] = ()) -> bool:
        """Return whether the newest token completed a stop string. Only a short tail is decoded.

        before: the tokens in front of `token_ids`.
        """
        if not self._stop or self._detokenizer is None:
            return False
        tail: list[int] = []
        size = 0
        for token in reversed(token_ids):
            has_text = self._detokenizer.has_text(token)
            if not has_text and not (self._spelt and token in self._detokenizer.specials):
                continue
            tail.append(token)
            # The window is counted in tokens of at least one byte. Tokens without text would use
            # it up.
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

    def text(self, token_ids: abc.Sequence[int], before: abc.Sequence[int] = ()) -> str | None:
        """Return the text of a sequence's tokens up to the earliest stop string.

        Return None without a tokenizer. A token that ends the sequence is never part of the text,
        whether it is special or not.
        """
        return None if self._detokenizer is None else self.shown(token_ids, before, is_over=True)

    def shown(self, token_ids: abc.Sequence[int], before: abc.Sequence[int], is_over: bool) -> str:
        """Return the text of an answer so far, up to the earliest stop string.

        Unless the answer is over, two parts at the end are left out: text with which a stop string
        may begin, and bytes that the next byte may change.
        """
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

    @staticmethod
    def _end(text: str, stop: abc.Sequence[str], is_over: bool) -> int:
        """Return where the earliest stop string begins.

        Unless the answer is over, a stop string counts also if only its beginning is at the end of
        the text.
        """
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

    def _spell(
        self, text: str, token_ids: abc.Sequence[int], context: abc.Sequence[int]
    ) -> list[str]:
        """Return the text of tokens in pieces, with a special token behind each piece
        but the last.
        """
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


def check_can_stop(stop: tuple[str, ...], tokenizer: object | None) -> None:
    """Raise UsageError for stop strings without a tokenizer."""
    if stop and tokenizer is None:
        raise UsageError(
            "--stop: stop strings need a tokenizer and the model's folder has none; leave --stop "
            "out"
        )


def stop_criteria(model: Model, params: SamplingParams) -> StopCriteria:
    """Return what decides when an answer with these parameters is done."""
    eos = () if params.ignore_eos else model.spec.eos_token_ids
    return StopCriteria(
        params.stop, eos, model.tokenizer, params.stop_token_ids, is_chat=params.is_chat
    )


def _text_before(pieces: abc.Sequence[str], place: int) -> int:
    """Return how many characters of text are in front of `place` in the joined pieces.

    Every second piece is a special token, which does not count.
    """
    count = 0
    for i, piece in enumerate(pieces):
        taken = min(len(piece), place)
        count += 0 if i % 2 else taken
        place -= taken
    return count


class Decoding:
    """How the sequences of a run get their tokens, when they are done, and what is kept of them.

    eos_token_ids, tokenizer: those of the model.
    callbacks: those of the run.
    """

    def __init__(
        self,
        eos_token_ids: abc.Sequence[int],
        tokenizer: Tokenizer | None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.watches = callbacks or Callbacks()

        def make(
            stop: tuple[str, ...], ignore_eos: bool, stop_ids: tuple[int, ...], is_chat: bool
        ) -> StopCriteria:
            ends = () if ignore_eos else eos_token_ids
            return StopCriteria(stop, ends, tokenizer, stop_ids, is_chat)

        self._make = make
        # The cache is bounded because each of any number of sequences may have its own stops.
        self._make_shared = lru_cache(STOPS_KEPT)(make)

    def criteria(self, sequence: Sequence) -> StopCriteria:
        """Return what ends a sequence. Raise UsageError for stop strings without a tokenizer."""
        if sequence.criteria is None:
            params = sequence.params
            is_short = len(params.stop) + len(params.stop_token_ids) <= FEW_STOPS
            make = self._make_shared if is_short else self._make
            sequence.criteria = make(
                params.stop, params.ignore_eos, params.stop_token_ids, params.is_chat
            )
        return sequence.criteria

    def known_tokens(self, sequence: Sequence) -> abc.Sequence[int]:
        """Return the tokens that a sequence takes next, as far as they are known."""
        if sequence.source is not None:
            return sequence.source.known_tokens()
        done = len(sequence.token_ids)
        return sequence.given[done : done + sequence.max_tokens_per_sweep]

    def end(self, sequence: Sequence) -> str | None:
        """Return why a sequence is done with its newest token, or None if it is not.

        A sequence takes all its given tokens; its first generated one comes out of the same sweep.
        """
        if sequence.source is not None:
            return sequence.source.end()
        has_own = len(sequence.token_ids) > len(sequence.given)
        reason = None
        if sequence.error is None:
            with sparing(sequence, self.watches.isolates_errors):
                reason = self.criteria(sequence)(sequence)
                goes_on = self.watches.should_continue
                if reason is None and goes_on is not None and has_own and not goes_on(sequence):
                    reason = "length"
        if sequence.error is not None:
            is_last = has_own or len(sequence.token_ids) >= sequence.max_new
            reason = "error" if is_last else None
        return reason

    def finish(self, sequences: abc.Iterable[Sequence]) -> None:
        """Make the answers of finished sequences: texts, and log-probabilities that were asked for.

        A sequence with an error has no tokens.
        """
        for sequence in sequences:
            assert sequence.finish_reason is not None
            with sparing(sequence, self.watches.isolates_errors):
                self._answer(sequence)
            if sequence.error is not None:
                error = sequence.error
                code = sequence.error_code
                sequence.clear()
                sequence.fail(code, error)
                sequence.finish_reason = "error"
            sequence.token_ids = [*sequence.token_ids]

    def _answer(self, sequence: Sequence) -> None:
        params = sequence.params
        scoring = sequence.scoring
        before = sequence.before
        if scoring is not None and params.score is not None:
            sequence.token_ids = [*params.score[: scoring.scored], *sequence.token_ids]
            sequence.logprobs = Logprobs([*scoring.logprobs, *(sequence.logprobs or ())])
            before = sequence.prompt_ids
        elif scoring is not None and params.prompt_logprobs is not None:
            own = len(scoring.given)
            behind = sequence.logprobs or []
            top = params.logprobs
            given = (of_likeliest(one, params.prompt_logprobs) for one in behind[:own])
            sequence.prompt_logprobs = Logprobs(chain([None], scoring.logprobs, given))
            sequence.token_ids = sequence.token_ids[own:][: params.max_tokens]
            sequence.logprobs = (
                None
                if top is None
                else Logprobs(
                    of_likeliest(one, top) for one in islice(behind, own, own + params.max_tokens)
                )
            )
        sequence.text = self.criteria(sequence).text(sequence.token_ids, before)
        if not sequence.token_ids:
            sequence.finish_reason = "length"

    def sample(
        self, micro_batch: MicroBatch, logits: torch.Tensor, read_back: ReadBack
    ) -> Callable[[], list[int]]:
        """Choose the next token of each sequence, and keep the log-probabilities that are wanted.

        Return a function that waits for the tokens, which are on their way to the host, and returns
        them. Call it once, before the sequences get other tokens. It raises NotFiniteError as
        `Callbacks.isolates_errors` says.

        This call itself waits if log-probabilities are asked for or there is a `source`.

        read_back: see `tiers.device.Device`.
        """
        rows = list(micro_batch.rows)
        if self.watches.logits is not None:
            self.watches.logits([r.index for r in rows], logits)
        steps = [max(0, len(r.token_ids) - len(r.given)) for r in rows]
        ready: Waitable = NOTHING
        sources = [r.source for r in rows if r.source is not None]
        if len(sources) == len(rows) > 0:
            tokens_said = [source.sample(logits[i]) for i, source in enumerate(sources)]
            found = torch.tensor(tokens_said, device="cpu")
        else:
            found, ready = read_back(self._choose(rows, logits, steps))

        def tokens() -> list[int]:
            ready.wait()
            return self._taken(rows, found.tolist(), steps)

        if all(row.logprobs is None for row in rows):
            return tokens
        taken = tokens()
        _add_logprobs(rows, taken, logits)
        return lambda: taken

    def _choose(
        self, rows: abc.Sequence[Sequence], logits: torch.Tensor, steps: abc.Sequence[int]
    ) -> torch.Tensor:
        """Call `choose_tokens` for all sequences together, or one by one.

        One by one is used if a sequence has penalties. It is also used if the joint call raises and
        sequences are spared. An exception that each of several sequences raises is no fault of one
        sequence, so it is raised again.
        """
        params = [row.params for row in rows]
        streams = [row.random_stream for row in rows]
        failed: Exception | None = None
        if all(row.penalties is None for row in rows):
            try:
                return choose_tokens(logits, params, streams, steps)
            except Exception as error:
                if not self.watches.isolates_errors:
                    raise
                failed = error
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        for i, row in enumerate(rows):
            with sparing(row, self.watches.isolates_errors):
                own = logits[i : i + 1]
                if row.penalties is not None and len(row.token_ids) >= len(row.given):
                    own = row.penalties(row.before, row.generated_ids, own)
                few = slice(i, i + 1)
                chosen[i] = choose_tokens(own, params[few], streams[few], steps[few])[0]
        if failed is not None and len(rows) > 1 and all(row.error is not None for row in rows):
            raise failed
        return chosen

    def _taken(
        self, rows: abc.Sequence[Sequence], tokens: list[int], steps: abc.Sequence[int]
    ) -> list[int]:
        """Replace chosen tokens by those that sequences take, in place, and return the list.

        Given tokens replace chosen ones. A sequence whose logits are not finite gets an error and
        token 0.
        """
        try:
            check_finite(tokens, [r.index for r in rows], steps)
        except NotFiniteError as error:
            is_damaged = 1 < len(rows) == len(error.places) and not any(r.token_ids for r in rows)
            if is_damaged or not self.watches.isolates_errors:
                raise
            for i in error.places:
                rows[i].fail(CODE_NOT_FINITE, error.reason)
                tokens[i] = 0
        for i, row in enumerate(rows):
            if len(row.token_ids) < len(row.given):
                tokens[i] = row.given[len(row.token_ids)]
        return tokens


def _add_logprobs(
    rows: abc.Sequence[Sequence], tokens: abc.Sequence[int], logits: torch.Tensor
) -> None:
    """Add the log-probabilities of the taken tokens to the sequences that ask for them.

    A sequence with an error gets none.
    """
    asking = [
        (i, top)
        for i, r in enumerate(rows)
        if (top := r.top_logprobs) is not None and r.error is None
    ]
    if asking:
        places, tops = zip(*asking, strict=True)
        own = logits if len(places) == len(rows) else logits[list(places)]
        for i, found in zip(
            places, token_logprobs(own, [tokens[i] for i in places], tops), strict=True
        ):
            kept = rows[i].logprobs
            assert kept is not None
            kept.append(found)


def score_prompts(
    micro_batch: MicroBatch,
    fed: SweepInput,
    logits_at: Callable[[list[int]], torch.Tensor],
    isolates_errors: bool,
) -> None:
    """Add log-probabilities of prompt tokens to the `scoring` of the sequences that enter.

    Raise NotFiniteError if logits are not finite. With isolates_errors, such a sequence gets an
    error instead and others continue.

    logits_at: returns the logits (places, vocab) of at most SCORED_CHUNK places, which are indices
        in the packed tokens of the sweep.
    """
    entering = zip(micro_batch.rows[fed.decoding :], prompt_places(fed.groups), strict=True)
    # (place of the token before, sequence, its scoring, token). Several may have the same place.
    wanted: list[tuple[int, Sequence, Scoring, int]] = []
    for row, (before, in_front, behind) in entering:
        scoring = row.scoring
        if scoring is None:
            continue
        last = len(scoring.fed_ids) - 1
        for at in range(last - scoring.scored, last):
            place = fed.decoding + at + (in_front if at < before else behind)
            wanted.append((place, row, scoring, scoring.fed_ids[at + 1]))
    wanted.sort(key=lambda one: one[0])
    places = list(dict.fromkeys(one[0] for one in wanted))
    number = {place: i for i, place in enumerate(places)}
    for chunk, tokens in groupby(wanted, key=lambda one: number[one[0]] // SCORED_CHUNK):
        first = chunk * SCORED_CHUNK
        of_chunk = list(tokens)
        logits = logits_at(places[first : first + SCORED_CHUNK])
        height = max(1, SAMPLING_CHUNK // logits.shape[1])
        # Tokens that share a place each get a copy of its logits.
        for start in range(0, len(of_chunk), height):
            few = of_chunk[start : start + height]
            own = logits[[number[place] - first for place, *_ in few]]
            tops = [scoring.top for _, _, scoring, _ in few]
            logprobs = token_logprobs(own, [one[-1] for one in few], tops)
            for (_, row, scoring, _), found in zip(few, logprobs, strict=True):
                if math.isnan(found.logprob):
                    error = NotFiniteError(row.index, "in its prompt")
                    if not isolates_errors:
                        raise error
                    row.fail(CODE_NOT_FINITE, error.reason)
                scoring.logprobs.append(found)
