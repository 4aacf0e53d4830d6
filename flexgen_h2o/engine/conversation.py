"""A row that lives through a whole conversation, its KV cache kept: turns come one after the other and are answered.

The first turn is the row's prompt. Every later token, of a turn or an answer, is a decode step: its column joins the
cache and, where the row is full, takes the slot of the eviction policy's victim. The tokens of a turn are known
beforehand, so one sweep over the weights takes many of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch

from flexgen_h2o.core.units import GIVEN_CHUNK
from flexgen_h2o.engine.decoding import StopCriteria
from flexgen_h2o.engine.detokenizer import PART, Tokenizer, detokenizer_of
from flexgen_h2o.engine.generation import Row
from flexgen_h2o.engine.penalties import Penalties
from flexgen_h2o.engine.prompts import Prompt
from flexgen_h2o.engine.sampling import Sampler, SamplingParams


class Audience(Protocol):
    """Callbacks of a conversation."""

    def given(self, token: int, logits: torch.Tensor) -> None:
        """A token of the newest turn is taken. logits: (vocab,), of the step before it; not to be kept."""

    def said(self, token: int, reason: str | None) -> None:
        """The answer has another token. reason: why it ends there, "stop" or "length"; None: it goes on."""


class Ends(Protocol):
    """When an answer is over."""

    def __call__(self, row: Row, /) -> str | None:
        """Why the answer that this row holds is, with its newest token; None where it goes on."""

    def is_eos(self, token: int) -> bool:
        """Is it a token that ends an answer?"""


class Conversation:
    """A token source (engine.decoding.TokenSource) of one row through all turns.

    left: how many more tokens there is room for.

    first, more: the turns as token ids, one of them at least; the next is asked for when an answer is over and there
    is room, and may be waited for. params: of each answer; ends: when it is over. room: the most tokens that may follow
    on the first turn; where they are used up, the conversation ends. max_tokens_per_sweep: the most tokens of a turn in
    one sweep.
    The end-of-sequence token that ends an answer stays, as all that is said; a turn that begins with the same token,
    as chat templates write it, does not repeat it. penalties: makes those of an answer, which see all that was said.
    """

    def __init__(
        self, first: Sequence[int], more: Iterator[Sequence[int]], params: SamplingParams, ends: Ends,
        audience: Audience, room: int, max_tokens_per_sweep: int = GIVEN_CHUNK,
        penalties: Callable[[], Penalties | None] | None = None,
    ) -> None:  # fmt: skip
        self.prompt = Prompt(0, tuple(first), None)
        self._more, self._sampler, self._ends = more, Sampler(params), ends
        self._max_tokens, self._audience, self.max_tokens_per_sweep = params.max_tokens, audience, max_tokens_per_sweep
        self.room = self.left = room
        self._coming: deque[int] = deque()
        self._answer = Row(self.prompt, self._max_tokens)
        self._is_over = False
        self._make_penalties = penalties
        self._penalties: Penalties | None = None
        self._said = [*first]  # all tokens up to now, if there are penalties
        self._before: list[int] = []  # those that the answer follows on

    def sample(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        self.left = self.room - steps[0] - 1
        if self._coming:
            token = self._coming.popleft()
            self._remember(token)
            self._audience.given(token, logits[0])
            return [token]
        if not self._answer.token_ids and self._make_penalties is not None:
            self._before = [*self._said]
            self._penalties = self._make_penalties()
        if self._penalties is not None:
            logits = self._penalties(self._before, self._answer.token_ids, logits)
        (token,) = self._sampler.sample(logits, rows, steps)
        self._remember(token)
        self._answer.token_ids.append(token)
        reason = self._ends(self._answer)
        self._audience.said(token, reason)
        if reason is not None and self.left:
            self._next_turn(token)
        return [token]

    def _remember(self, token: int) -> None:
        if self._make_penalties is not None:
            self._said.append(token)

    def most_new(self, row: int) -> int:
        return self.room

    def end(self, row: Row) -> str | None:
        if self._is_over:
            return "stop"
        return "length" if len(row.token_ids) >= row.max_new else None

    def known_tokens(self, row: Row) -> Sequence[int]:
        return list(islice(self._coming, self.max_tokens_per_sweep))

    def _next_turn(self, last: int) -> None:
        turn = next(self._more, None)
        self._is_over = turn is None
        self._answer = Row(self.prompt, self._max_tokens)
        if turn is not None:
            is_said = self._ends.is_eos(last) and list(turn[:1]) == [last]
            self._coming.extend(turn[1:] if is_said else turn)


def tokens_after_first(turns: Sequence[Sequence[int]], max_tokens: int) -> int:
    """The most tokens that follow on the first turn where every answer has at most `max_tokens`."""
    return sum(map(len, turns[1:])) + max_tokens * len(turns)


class AnswerText:
    """The text of an answer as it comes: whole characters, and nothing of a stop string. `shown`: up to now.

    before: the tokens that it follows on. ends: tokens that end it, which are no text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: tuple[str, ...], before: Sequence[int] = (), ends: Sequence[int] = ()
    ) -> None:  # fmt: skip
        self._has_text = tokenizer is not None
        self._before = [] if tokenizer is None else detokenizer_of(tokenizer).context(before)
        self._ends = StopCriteria(stop, (), tokenizer, ends)
        self.shown = ""

    def more(self, token_ids: Sequence[int], is_over: bool) -> str:
        """What may be shown now that the answer has these tokens. A character that is not whole yet, and what may
        become a stop string, wait unless the answer is over. Without a tokenizer: the ids."""
        if not self._has_text:
            text = "".join(f"{token} " for token in token_ids)
        else:
            text = self._ends.shown(token_ids, self._before, is_over)
            if text.endswith(PART) and not is_over:
                return ""
        new = text[len(self.shown) :]
        self.shown = max(self.shown, text, key=len)
        return new
