"""A conversation whose KV lives on: one row that takes the tokens of each coming turn, then answers, then the next.

The first turn is the row's prompt. Every later token, given or said, is a decode step: its column joins the cache and,
where the row is full, takes the slot of the column that the eviction policy has named. So room is made for what comes,
column by column, and an eviction policy does in the tenth turn what it does in the first. What is given is known
before, so one sweep over the weights takes many of these steps, layer by layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import torch

from flexgen_h2o.generation import Chooser, Row, RowEnd
from flexgen_h2o.limits import GIVEN_CHUNK
from flexgen_h2o.prompts import Prompt

Turn = Sequence[int]


class Audience(Protocol):
    """Who hears a conversation while it goes on. turn: 0 is the first. They may not keep the logits."""

    def given(self, turn: int, token: int, logits: torch.Tensor) -> None:
        """A token of a turn is taken. logits: (vocab,), what the model expected in its place."""

    def said(self, turn: int, token: int, reason: str | None) -> None:
        """The model's answer to a turn goes on with a token. reason: why it ends with it, "stop" or "length"."""


class Conversation:
    """A course (courses.Course) of one row through all turns, each answered with at most `max_tokens` tokens.

    turns: token ids, one of them at least. chooser: of the answers' tokens; ends: when an answer is over, by its own
    tokens. at_once: the most tokens of a turn in one sweep. room: the most tokens that may follow on the first turn;
    where they are used up, the conversation ends.
    The end-of-sequence token that ends an answer stays, as all that is said; a turn that begins with the same token,
    as chat templates write it, does not repeat it.
    """

    def __init__(
        self, turns: Sequence[Turn], max_tokens: int, chooser: Chooser, ends: RowEnd, audience: Audience,
        room: int | None = None, at_once: int = GIVEN_CHUNK,
    ) -> None:  # fmt: skip
        self._turns, self._max_tokens, self._chooser, self._ends = turns, max_tokens, chooser, ends
        self._audience, self.at_once = audience, at_once
        self._most = tokens_after_first(turns, max_tokens)
        if room is not None:
            self._most = min(self._most, room)
        self._turn = 0
        self._coming: deque[int] = deque()
        self._answer = self._new_answer()

    @property
    def prompt(self) -> Prompt:
        """The first turn, as the row's prompt."""
        return Prompt(0, tuple(self._turns[0]), None)

    def choose(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        if self._coming:
            token = self._coming.popleft()
            self._audience.given(self._turn, token, logits[0])
            return [token]
        (token,) = self._chooser.choose(logits, rows, steps)
        self._answer.token_ids.append(token)
        reason = self._ends(self._answer)
        self._audience.said(self._turn, token, reason)
        if reason is not None:
            self._next_turn(token)
        return [token]

    def most_new(self, row: int) -> int:
        return self._most

    def end(self, row: Row) -> str | None:
        if self._turn == len(self._turns):
            return "stop"
        return "length" if len(row.token_ids) >= row.max_new else None

    def coming(self, row: Row) -> Sequence[int]:
        return list(islice(self._coming, self.at_once))

    def _next_turn(self, last: int) -> None:
        self._turn += 1
        self._answer = self._new_answer()
        if self._turn < len(self._turns):
            turn = list(self._turns[self._turn])
            is_said = self._ends.is_eos(last) and turn[:1] == [last]
            self._coming.extend(turn[1:] if is_said else turn)

    def _new_answer(self) -> Row:
        return Row(self.prompt, self._max_tokens)


def tokens_after_first(turns: Sequence[Turn], max_tokens: int) -> int:
    """The most tokens that follow on the first turn where every answer has at most `max_tokens`."""
    return sum(map(len, turns[1:])) + max_tokens * len(turns)
