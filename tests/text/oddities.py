"""Lines with every oddity of Unicode, for jobs and for the server."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.text.tiny import chat_line, text_line

# Halves of pairs, ends of lines, marks of order and direction, joiners, combining marks, private
# and unassigned characters, the last one, and spellings of special tokens.
ODD = (
    "\ud83e",
    "\udd84",
    "\ud83e\udd84",
    "\udfff",
    "\x00",
    "\x85",
    "\u2028",
    "\u2029",
    "\ufeff",
    "\ufffe",
    "\uffff",
    "\u202e",
    "\u200d",
    "\u200b",
    "e\u0301",
    "\u0301",
    "\ufffd",
    "\ue000",
    "\U000e0001",
    "\U0010ffff",
    "\U0001f984",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u4e2d",
    "\u0130",
    "\ufb01",
    "\x1c",
    "\x7f",
    "\r\n",
    " ",
    "\u3000",
    "<|end|>",
    "</s>",
    "<0xF0>",
    "\u2581",
    "{{ x }}",
    "{% raw %}",
)


def texts() -> st.SearchStrategy[str]:
    """Of any characters, halves of pairs among them."""
    anything = st.text(st.characters(), max_size=12)
    return st.lists(st.one_of(st.sampled_from(ODD), anything), min_size=1, max_size=6).map("".join)


@st.composite
def lines(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """A line of a chat or a text, with oddities in its content, role, name, stop strings or
    options."""
    body: dict[str, Any] = {"max_tokens": draw(st.integers(1, 3))}
    if draw(st.booleans()):
        body["stop"] = draw(st.lists(texts(), max_size=2))
    if draw(st.booleans()):
        body["user"] = draw(texts())
    if not draw(st.booleans()):
        body |= draw(st.sampled_from([{}, {"logprobs": 2}, {"echo": True, "logprobs": 1}]))
        return text_line(name, draw(texts()), **body)
    content = draw(st.one_of(texts(), st.lists(texts(), max_size=3)))
    message: dict[str, Any] = {
        "role": draw(st.one_of(st.just("user"), texts())),
        "content": content,
    }
    if draw(st.booleans()):
        message["name"] = draw(texts())
    if draw(st.booleans()):
        body["chat_template_kwargs"] = {"option": draw(texts())}
    body |= draw(st.sampled_from([{}, {"logprobs": True, "top_logprobs": 2}]))
    return chat_line(name, "", messages=[message], **body)


def line_lists(size: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    """As many lines, each with an id of its own."""
    return st.tuples(*(lines(f"odd {i}") for i in range(size))).map(list)
