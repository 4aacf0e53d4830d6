"""The text of a chat answer: its content, and its reasoning if the model writes channels."""

from __future__ import annotations

from collections import abc

from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.engine.conversation import AnswerText
from flexgen_h2o.engine.detokenizer import Places, Tokenizer, detokenizer_of
from flexgen_h2o.engine.harmony import ChannelMessage, Channels, marks_of
from flexgen_h2o.engine.sequence import Sequence


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
        self._texts: list[AnswerText] = []  # one for each message
        self._starts: dict[int, Places] = {}  # places of tokens in the text of a final message
        self._shows_reasoning = False  # `shown` has returned some
        self._shows_content = False

    def more(self, token_ids: abc.Sequence[int], is_over: bool) -> tuple[str, str]:
        """Return the new content and the new reasoning of an answer that has these tokens.

        See `AnswerText.more`.
        """
        if self._channels is None:
            return self._plain.more(token_ids, is_over), ""
        for token in token_ids[self._channels.num_tokens :]:
            if token not in self._ends or self._channels.is_mark(token):
                self._channels.add(token)
            else:
                self._channels.leave_out()
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
        self, messages: abc.Sequence[ChannelMessage], is_over: bool
    ) -> tuple[str, str]:
        assert self._tokenizer is not None
        found = {True: "", False: ""}  # content, reasoning
        for i in range(max(0, len(self._texts) - 1), len(messages)):
            now = messages[i]
            if i == len(self._texts):
                stop = self._stop if now.is_final else ()
                self._texts.append(AnswerText(self._tokenizer, stop))
                if any(one.token_ids for one in messages[:i] if one.is_final == now.is_final):
                    found[now.is_final] += "\n"
            found[now.is_final] += self._texts[i].more(
                now.token_ids, is_over or i < len(messages) - 1
            )
        return found[True], found[False]

    def content_places(self, is_over: bool) -> list[int]:
        """Return the places in the answer of the tokens that begin in the content up to now.

        Call this after `more`. The model must write channels.
        """
        assert self._channels is not None and self._tokenizer is not None
        found: list[int] = []
        messages = self._channels.messages
        for i, (message, text) in enumerate(zip(messages, self._texts, strict=True)):
            if not message.is_final:
                continue
            if i not in self._starts:
                self._starts[i] = Places(detokenizer_of(self._tokenizer), ())
            starts = self._starts[i].starts
            for token in message.token_ids[len(starts) :]:
                self._starts[i].add(token)
            if is_over or i < len(messages) - 1:
                self._starts[i].settle()
            found += [
                place
                for place, start in zip(message.places, starts, strict=True)
                if start < len(text.shown)
            ]
        return found


def keep_content(done: Sequence, tokenizer: Tokenizer | None) -> None:
    """Leave the content of a chat's answer as its text.

    Reasoning is left out if the model writes channels.
    """
    if marks_of(tokenizer) is not None and done.error is None:
        chat = ChatText(tokenizer, done.params, done.prompt_ids)
        done.text, _ = chat.more(done.token_ids, True)
