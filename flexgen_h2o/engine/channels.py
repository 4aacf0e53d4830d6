"""Channels of an answer as gpt-oss writes them ("harmony").

Reasoning is in another channel than what is meant for the user.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

from collections import abc
from functools import lru_cache

from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.engine.conversation import AnswerText
from flexgen_h2o.engine.detokenizer import Tokenizer, detokenizer_of
from flexgen_h2o.engine.sequence import Sequence

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


class Channels:
    """Sorts the tokens of an answer into messages.

    A header names the channel of its message. A model may leave out the marks. So text in a header
    that no message follows counts as a final message. When the answer is over, it does so only if
    no mark began the header.

    messages: (is it final?, its tokens) of each message, in order.
    """

    def __init__(
        self, tokenizer: Tokenizer, marks: dict[int, str], prompt: abc.Sequence[int]
    ) -> None:
        self.messages: list[tuple[bool, list[int]]] = []
        self._header: list[int] | None  # the newest header; None within a message
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
        if self._header is None:
            self.messages.append((self._is_final, []))
        else:
            self._header.clear()
            self._is_explicit = False

    def add(self, token: int) -> None:
        """Add the next token of the answer."""
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
            self.messages.append((self._is_final, []))
        elif self._header is None:
            self.messages[-1][1].append(token)
        else:
            self._header.append(token)
            if self._name is not None:
                self._name.append(token)

    def is_mark(self, token: int) -> bool:
        """Return whether a token ends a message."""
        return self._marks.get(token) in ENDS

    def end(self) -> None:
        """Note that no token follows."""
        if not self._is_explicit:
            self._end_message()

    def _begin_header(self, is_explicit: bool) -> None:
        self._header = []
        self._name = None
        self._is_explicit = is_explicit
        self._is_final = True

    def _end_message(self) -> None:
        text = self._detokenizer.text(self._header or [])
        if self._header is not None and text.strip() not in ("", ROLE):
            self.messages.append((True, self._header))
        self._begin_header(False)

    def _channel(self) -> str:
        words = self._detokenizer.text(self._name or []).split()
        return words[0] if words else ""


class ChatText:
    """The text of a chat answer as it comes: content and reasoning.

    They are kept apart if the model writes channels. Otherwise everything is content. Call either
    `more` or `shown` as tokens come.

    prompt: the tokens in front of the answer.

    `has_reasoning` says whether the model writes channels.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt: abc.Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = params.stop
        self._ends = frozenset(params.stop_token_ids)
        marks = marks_of(tokenizer)
        self._channels = (
            None if marks is None or tokenizer is None else Channels(tokenizer, marks, prompt)
        )
        self.has_reasoning = self._channels is not None
        self._plain = AnswerText(tokenizer, params.stop, prompt, params.stop_token_ids)
        self._taken = 0  # tokens of the answer that are sorted into messages
        self._texts: list[AnswerText] = []  # one for each message
        self._shows_reasoning = False  # `shown` has returned some
        self._shows_content = False

    def more(self, token_ids: abc.Sequence[int], is_over: bool) -> tuple[str, str]:
        """Return the new content and the new reasoning of an answer that has these tokens.

        See `AnswerText.more`.
        """
        if self._channels is None:
            return self._plain.more(token_ids, is_over), ""
        for token in token_ids[self._taken :]:
            if token not in self._ends or self._channels.is_mark(token):
                self._channels.add(token)
        self._taken = len(token_ids)
        if is_over:
            self._channels.end()
        return self._of_channels(self._channels.messages, is_over)

    def shown(self, token_ids: abc.Sequence[int], is_over: bool) -> str:
        """Return the new text as a terminal shows it: reasoning is in front of the content."""
        content, reasoning = self.more(token_ids, is_over)
        found = reasoning
        if reasoning and not self._shows_reasoning:
            found = f"(thinking) {reasoning}"
            self._shows_reasoning = True
        if content and self._shows_reasoning and not self._shows_content:
            found += "\n\n"
        self._shows_content |= bool(content)
        return found + content

    def _of_channels(
        self, messages: abc.Sequence[tuple[bool, list[int]]], is_over: bool
    ) -> tuple[str, str]:
        assert self._tokenizer is not None
        found = {True: "", False: ""}  # content, reasoning
        for i in range(max(0, len(self._texts) - 1), len(messages)):
            is_final, ids = messages[i]
            if i == len(self._texts):
                self._texts.append(AnswerText(self._tokenizer, self._stop))
                if any(ids for before, ids in messages[:i] if before == is_final):
                    found[is_final] += "\n"
            found[is_final] += self._texts[i].more(ids, is_over or i < len(messages) - 1)
        return found[True], found[False]


def keep_content(done: Sequence, tokenizer: Tokenizer | None) -> None:
    """Leave the content of a chat's answer as its text.

    Reasoning is left out if the model writes channels.
    """
    if marks_of(tokenizer) is not None and done.error is None:
        chat = ChatText(tokenizer, done.params, done.prompt_ids)
        done.text, _ = chat.more(done.token_ids, True)
