"""Channels of an answer as gpt-oss writes them ("harmony").

Reasoning is in another channel than what is meant for the user.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from functools import lru_cache

from flexgen_h2o.engine.detokenizer import Tokenizer, detokenizer_of

FINAL = "final"
ROLE = "assistant"  # the role whose messages an answer consists of


START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")  # each ends a message


@lru_cache(maxsize=8)
def marks_of(tokenizer: Tokenizer | None) -> dict[int, str] | None:
    """Return the special tokens that delimit messages, by id.

    Return None for a tokenizer whose models write no channels.
    """
    specials = {} if tokenizer is None else detokenizer_of(tokenizer).specials
    found = {i: name for i, name in specials.items() if name in (START, CHANNEL, MESSAGE, *ENDS)}
    return found if {START, CHANNEL, MESSAGE, ENDS[0]} <= set(found.values()) else None


@dataclass
class ChannelMessage:
    """A message of an answer, or a header. `Channels` fills it."""

    is_final: bool = True  # whether it is meant for the user
    token_ids: list[int] = field(default_factory=list)  # without marks
    places: list[int] = field(default_factory=list)  # of these tokens in the answer


class Channels:
    """Sorts the tokens of an answer into messages.

    A header names the channel of its message. A model may leave out the marks. So text in a header
    that no message follows counts as a final message. When the answer is over, it does so only if
    no mark began the header.

    messages: those of the answer, in order.
    """

    def __init__(
        self, tokenizer: Tokenizer, marks: dict[int, str], prompt: abc.Sequence[int]
    ) -> None:
        self.messages: list[ChannelMessage] = []
        self.num_tokens = 0  # tokens of the answer that were added
        self._header: ChannelMessage | None  # the newest header; None within a message
        self._name: list[int] | None  # tokens of the channel's name; None in front of it
        self._is_explicit: bool  # whether a mark began the header
        self._is_final: bool  # whether the newest message is meant for the user
        self._detokenizer = detokenizer_of(tokenizer)
        self._marks = marks
        self._begin_header(False)
        starts = [i for i, token in enumerate(prompt) if marks.get(token) == START]
        if not starts:  # the answer continues a text: it is a final message until a mark comes
            self._header = None
        else:  # the prompt ends in the header of the answer, or within its first message
            for token in prompt[starts[-1] :]:
                self.add(token)
            self.messages.clear()
            self.num_tokens = 0
        if self._header is None:
            self.messages.append(ChannelMessage(self._is_final))
        else:
            self._header = ChannelMessage()
            self._is_explicit = False

    def add(self, token: int) -> None:
        """Add the next token of the answer."""
        place = self.num_tokens
        self.num_tokens += 1
        mark = self._marks.get(token)
        if mark in ENDS:
            self._end_message()
        elif mark == START:
            self._begin_header(True)
        elif mark == CHANNEL:
            self._begin_header(True)
            self._name = []
        elif mark == MESSAGE:
            self._is_final = self._channel() in ("", FINAL)
            self._header = None
            self.messages.append(ChannelMessage(self._is_final))
        else:
            newest = self.messages[-1] if self._header is None else self._header
            newest.token_ids.append(token)
            newest.places.append(place)
            if self._header is not None and self._name is not None:
                self._name.append(token)

    def leave_out(self) -> None:
        """Note that the next token of the answer is in no message."""
        self.num_tokens += 1

    @property
    def content(self) -> ChannelMessage | None:
        """The message for the user that the next token would join. None if it would join none."""
        if self._header is None:
            return self.messages[-1] if self.messages[-1].is_final else None
        return None if self._is_explicit else self._header

    def is_mark(self, token: int) -> bool:
        """Return whether a token ends a message."""
        return self._marks.get(token) in ENDS

    def end(self) -> None:
        """Note that no token follows."""
        if not self._is_explicit:
            self._end_message()

    def _begin_header(self, is_explicit: bool) -> None:
        self._header = ChannelMessage()
        self._name = None
        self._is_explicit = is_explicit
        self._is_final = True

    def _end_message(self) -> None:
        header = self._header
        text = "" if header is None else self._detokenizer.text(header.token_ids)
        if header is not None and text.strip() not in ("", ROLE):
            self.messages.append(header)
        self._begin_header(False)

    def _channel(self) -> str:
        words = self._detokenizer.text(self._name or []).split()
        return words[0] if words else ""
