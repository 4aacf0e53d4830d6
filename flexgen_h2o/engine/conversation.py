"""A sequence that lives through a whole conversation and keeps its KV cache.

Turns come one after another and are answered.

The first turn is the sequence's prompt. Every later token, of a turn or an answer, is a decode
step. Its KV entry joins the cache. If the sequence's slots are full, it takes the slot of the
eviction policy's victim. The tokens of a turn are known beforehand, so one sweep over the weights
takes many of them.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import torch

from flexgen_h2o.core.units import FORCED_CHUNK
from flexgen_h2o.engine.decoding import StopCriteria
from flexgen_h2o.engine.detokenizer import PART, Tokenizer, detokenizer_of
from flexgen_h2o.engine.penalties import Penalties
from flexgen_h2o.engine.sampling import SamplingParams, sample_tokens
from flexgen_h2o.engine.sequence import Sequence


class Audience(Protocol):
    """Callbacks of a conversation."""

    def given(self, token: int, logits: torch.Tensor) -> None:
        """Called when a token of the newest turn is taken.

        logits: (vocab,), those of the step before the token. They may not be kept.
        """

    def said(self, token: int, reason: str | None) -> None:
        """Called when the answer has another token.

        reason: why the answer ends there, "stop" or "length"; None if it continues.
        """


class Conversation:
    """The tokens of one sequence through all turns. It is the `source` of that sequence.

    The end-of-sequence token that ends an answer stays in the sequence, as everything that was said
    does. A turn that begins with the same token, as chat templates write it, does not repeat it.

    first, more: the turns as token ids, at least one. The next turn is asked for when an answer is
        over and there is room. `more` may block until it comes.
    params: the parameters of each answer.
    ends: decides when an answer is over.
    room: the most tokens that may follow the first turn. Once they are used up, the conversation
        ends.
    max_tokens_per_sweep: the most tokens of a turn in one sweep.
    penalties: makes the penalties of an answer. They see everything that was said.

    `sequence` is to be run. `left` is the number of tokens for which there is still room. If
    `is_stopped` returns True, the answer ends as "interrupted".
    """

    def __init__(
        self,
        first: abc.Sequence[int],
        more: Iterator[abc.Sequence[int]],
        params: SamplingParams,
        ends: StopCriteria,
        audience: Audience,
        room: int,
        max_tokens_per_sweep: int = FORCED_CHUNK,
        penalties: Callable[[], Penalties | None] = lambda: None,
    ) -> None:
        self.sequence = Sequence(0, tuple(first), source=self, max_new=room)
        self.sequence.max_tokens_per_sweep = max_tokens_per_sweep
        self._more = more
        self._params = params
        self._ends = ends
        self._audience = audience
        self.room = room
        self.left = room
        self._pending_tokens: deque[int] = deque()
        self._answer = self._new_answer()
        self._is_over = False
        self.is_stopped: Callable[[], bool] = lambda: False
        self._make_penalties = penalties
        self._penalties: Penalties | None = None
        self._before: list[int] = []  # the tokens in front of the answer

    def _new_answer(self) -> Sequence:
        prompt_ids = self.sequence.prompt_ids
        return Sequence(0, prompt_ids, params=self._params, max_new=self._params.max_tokens)

    def sample(self, logits: torch.Tensor) -> int:
        """Return the next token. logits: (vocab,)."""
        step = len(self.sequence.token_ids)
        self.left = self.room - step - 1
        if self._pending_tokens:
            token = self._pending_tokens.popleft()
            self._audience.given(token, logits)
            return token
        if not self._answer.token_ids:
            self._before = [*self.sequence.prompt_ids, *self.sequence.token_ids]
            self._penalties = self._make_penalties()
        row = logits[None]
        if self._penalties is not None:
            row = self._penalties(self._before, self._answer.token_ids, row)
        (token,) = sample_tokens(row, [self._params], [0], [step])
        self._answer.token_ids.append(token)
        reason = self._ends(self._answer) or ("interrupted" if self.is_stopped() else None)
        self._audience.said(token, reason)
        if reason is not None and self.left:
            self._next_turn(token)
        return token

    def end(self) -> str | None:
        """Return why the sequence is done with its newest token, or None if it is not."""
        if self._is_over:
            return "stop"
        return "length" if len(self.sequence.token_ids) >= self.room else None

    def known_tokens(self) -> abc.Sequence[int]:
        """Return the tokens that the sequence takes next, as far as they are known.

        More than `Sequence.max_tokens_per_sweep` of them are not needed.
        """
        return list(islice(self._pending_tokens, self.sequence.max_tokens_per_sweep))

    def _next_turn(self, last: int) -> None:
        turn = next(self._more, None)
        self._is_over = turn is None
        self._answer = self._new_answer()
        if turn is not None:
            is_said = self._ends.is_eos(last) and list(turn[:1]) == [last]
            self._pending_tokens.extend(turn[1:] if is_said else turn)


def tokens_after_first(turns: abc.Sequence[abc.Sequence[int]], max_tokens: int) -> int:
    """Return the most tokens after the first turn if every answer has at most `max_tokens`."""
    return sum(map(len, turns[1:])) + max_tokens * len(turns)


class AnswerText:
    """The text of an answer as it comes: whole characters, and no part of a stop string.

    before: the tokens in front of the answer.
    ends: tokens that end the answer and are not part of its text.

    `shown` is the text up to now.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: tuple[str, ...],
        before: abc.Sequence[int] = (),
        ends: abc.Sequence[int] = (),
    ) -> None:
        self._has_text = tokenizer is not None
        self._before = [] if tokenizer is None else detokenizer_of(tokenizer).context(before)
        self._ends = StopCriteria(stop, (), tokenizer, ends)
        self.shown = ""

    def more(self, token_ids: abc.Sequence[int], is_over: bool) -> str:
        """Return the new text to show, now that the answer has these tokens.

        An incomplete character, and text that may become a stop string, wait unless the answer is
        over. Without a tokenizer, the ids are returned as text.
        """
        if not self._has_text:
            text = "".join(f"{token} " for token in token_ids)
        else:
            text = self._ends.shown(token_ids, self._before, is_over)
            if text.endswith(PART) and not is_over:
                return ""
        new = text[len(self.shown) :]
        self.shown = max(self.shown, text, key=len)
        return new
