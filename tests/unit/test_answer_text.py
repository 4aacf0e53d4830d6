"""The text of an answer as it comes: pieces that are whole characters, and nothing of a stop
string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from flexgen_h2o.engine.conversation import AnswerText


class Bytes:
    """A tokenizer whose tokens are bytes."""

    all_special_ids: ClassVar[list[int]] = []

    def __len__(self) -> int:
        return 256

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


def pieces(text: bytes, stop: tuple[str, ...] = (), is_over: bool = True) -> list[str]:
    shown = AnswerText(Bytes(), stop)
    ids: Sequence[int] = list(text)
    return [shown.more(ids[: i + 1], is_over and i + 1 == len(ids)) for i in range(len(ids))]


def test_characters_are_whole() -> None:
    assert pieces("aé€b".encode()) == ["a", "", "é", "", "", "€", "b"]
    assert pieces(b"a\xe2\x82") == ["a", "", "\ufffd"], "the last one cannot become whole any more"
    assert pieces(b"a\xe2\x82", is_over=False) == ["a", "", ""]


@pytest.mark.parametrize(
    ("text", "stop", "said"),
    [
        (b"one\n\n", ("\n\n",), ["o", "n", "e", "", ""]),
        (b"one\ntwo", ("\n\n",), ["o", "n", "e", "", "\nt", "w", "o"]),
        (b"abab!", ("abc", "b!"), ["", "", "ab", "", "a"]),
        (b"ab", ("abc",), ["", "ab"]),
    ],
)
def test_what_may_become_a_stop_string_waits(
    text: bytes, stop: tuple[str, ...], said: list[str]
) -> None:
    assert pieces(text, stop) == said


def test_without_a_tokenizer_the_ids_are_shown() -> None:
    shown = AnswerText(None, ())
    assert [shown.more([5], False), shown.more([5, 70], True)] == ["5 ", "70 "]
