"""Text in its place: spaces of SentencePiece, characters of several tokens, bytes, keys and offsets
of tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.engine.conversation import AnswerText
from flexgen_h2o.engine.decoding import StopCriteria
from flexgen_h2o.engine.detokenizer import Detokenizer, detokenizer_of
from flexgen_h2o.engine.sampling import TokenLogprobs
from flexgen_h2o.jobs.responses import success_row
from flexgen_h2o.models.load import Model, find_model
from tests.text.conftest import Job
from tests.text.tiny import (
    chat_line,
    streamed,
    text_line,
    write_bytes_tokenizer,
    write_llama,
    write_pieces_tokenizer,
    write_script,
)

Run = Callable[..., Job]
PIECES = ("▁The", "▁cat", "cat", "sat", "▁sat", "▁", "é", "A", "\ufffd")
UNICORN = "\N{UNICORN FACE}"


@pytest.fixture(scope="module")
def pieces_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As LLaMA 2. Behind " The" come " cat", "sat", " sat" and the end; "cat" is the second
    likeliest behind " The"."""
    folder = tmp_path_factory.mktemp("models") / "pieces"
    ids = write_pieces_tokenizer(folder, PIECES)
    script = [ids[name] for name in ("▁The", "▁cat", "sat", "▁sat", "</s>")]
    write_script(folder, script, {ids["cat"]: 4.0}, bos_token_id=1, eos_token_id=2)
    return folder


@pytest.fixture(scope="module", params=["bytes", "pieces", "merges"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With each kind of tokenizer; "merges": bytes that are merged to words, of the shipped
    model."""
    if request.param == "merges":
        return find_model(str(PACKAGED["opt-tiny"]), None)
    folder = tmp_path_factory.mktemp("models") / request.param
    if request.param == "bytes":
        write_bytes_tokenizer(folder, ("<|end|>", "<|other|>"))
    else:
        write_pieces_tokenizer(folder, PIECES)
    write_llama(folder)
    return find_model(str(folder), None)


def decoded(model: Model, ids: Sequence[int]) -> str:
    assert model.tokenizer is not None
    return str(model.tokenizer.decode(list(ids), skip_special_tokens=True))


# ---- the first space


def test_the_first_space_of_an_answer(run_job: Run, pieces_model: Path, tmp_path: Path) -> None:
    """As in vLLM, the answer of a chat follows on the template's text."""
    folder = shutil.copytree(pieces_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    ids = [1, find_model(str(folder), None).encode_plain("The")[-1]]
    asked: dict[str, tuple[Any, dict[str, Any], str]] = {
        "text": ("The", {}, " catsat sat"),
        "echo": ("The", {"echo": True}, "The catsat sat"),
        "ids": (ids, {"echo": True}, "The catsat sat"),
        "stop": ("The", {"stop": [" cat"]}, ""),
        "other stop": ("The", {"stop": ["cat"]}, " "),
        "logprobs": ("The", {"logprobs": 2}, " catsat sat"),
    }
    job = run_job(
        folder,
        *(text_line(name, one[0], **{"max_tokens": 3, **one[1]}) for name, one in asked.items()),
        chat_line("chat", "The", max_tokens=3, logprobs=True, top_logprobs=2),
    )
    for name, (_, _, text) in asked.items():
        assert job.choice(name)["text"] == text, name
    assert len(job.choice("stop")["token_ids"]) == 1
    found = job.choice("logprobs")["logprobs"]
    top = found["top_logprobs"][0]
    assert (found["tokens"][0], found["text_offset"][0], [*top]) == (" cat", 0, [" cat", "cat"])
    assert top[" cat"] > top["cat"]
    assert job.choice("chat")["message"]["content"] == " catsat sat"
    first = job.choice("chat")["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == (" cat", [*b" cat"])
    assert [one["token"] for one in first["top_logprobs"]] == [" cat", "cat"]


# ---- any tokens


def tokens(size: int) -> st.SearchStrategy[list[int]]:
    """Of any tokenizer here: its first ids are special tokens and bytes, its last ones words."""
    some = st.one_of(
        st.integers(0, 330),
        st.integers(0, 2100),
        st.sampled_from([240, 159, 166, 132, 243, 162, 169, 135]),
    )
    return st.lists(some, max_size=size)


@given(before=tokens(40), own=tokens(40))
@settings(max_examples=150)
@example(before=[240, 159, 166], own=[132, 65])
@example(before=[239, 191, 189], own=[65])
def test_text_behind_others_is_theirs_less_what_was_there(
    model: Model, before: list[int], own: list[int]
) -> None:
    """By the whole prompt, and by its last tokens alone. What the prompt begins and the answer ends
    is the answer's."""
    found = detokenizer_of(model.tokenizer)
    whole = decoded(model, [*before, *own])
    prompt = decoded(model, before)
    text = found.behind(before, own)
    assert whole.endswith(text)
    assert found.behind(found.context(before), own) == text or "\ufffd" in whole
    if whole.startswith(prompt):
        assert prompt + text == whole


@given(before=tokens(12), own=tokens(60))
@settings(max_examples=150)
def test_pieces_are_the_whole_text_and_places_lie_in_it(
    model: Model, before: list[int], own: list[int]
) -> None:
    detokenizer = detokenizer_of(model.tokenizer)
    shown = AnswerText(model.tokenizer, (), before)
    pieces = [shown.more(own[:i], i == len(own)) for i in range(1, len(own) + 1)]
    text = detokenizer.behind(detokenizer.context(before), own)
    assert "".join(pieces) == text
    starts = detokenizer.starts(before, own)
    assert len(starts) == len(own) and starts == sorted(starts)
    if "\ufffd" not in text + decoded(model, before):
        assert all(start <= len(text) for start in starts)
        for i, start in enumerate(starts):
            in_front = detokenizer.behind(detokenizer.context(before), own[:i])
            if text.startswith(in_front):
                assert start == len(in_front)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@example(text="\ufffd")
@settings(max_examples=150)
def test_bytes_of_tokens_join_to_the_text(model: Model, text: str) -> None:
    """Of texts that the tokenizer keeps as they are; SentencePiece puts a space in front."""
    detokenizer = detokenizer_of(model.tokenizer)
    ids = [token for token in model.encode_plain(text) if token not in detokenizer.specials]
    joined = b"".join(detokenizer.token_bytes(token) for token in ids)
    assert joined.lstrip(b" ") == decoded(model, ids).encode().lstrip(b" ")


def test_names_of_different_tokens_differ(model: Model) -> None:
    """Bytes of a character, bytes that are words too, special tokens, and tokens beyond the
    table."""
    size = model.spec.vocab_size + 20
    detokenizer = detokenizer_of(model.tokenizer)
    names = detokenizer.names(range(size))
    assert len(set(names)) == size and all(names)


# ---- log-probabilities


def likely(*ids: int) -> TokenLogprobs:
    top = tuple((token, -1.0 - i) for i, token in enumerate(dict.fromkeys(ids)))
    return TokenLogprobs(-1.0, top)


def test_a_character_of_four_tokens(run_job: Run, bytes_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bytes_model, tmp_path / "model")
    write_script(folder, [*b">", *UNICORN.encode(), 256])
    job = run_job(
        folder,
        chat_line("chat", "x", max_tokens=4, logprobs=True, top_logprobs=3),
        text_line("text", ">", max_tokens=4, logprobs=5),
        text_line("echo", f"a{UNICORN}b>", max_tokens=4, echo=True, logprobs=5),
        text_line("cut", ">", max_tokens=2, logprobs=1),
        text_line("prompt's", [*b">\xf0\x9f"], max_tokens=2, logprobs=1),
    )
    entries = job.choice("chat")["logprobs"]["content"]
    assert [one["bytes"] for one in entries] == [[byte] for byte in UNICORN.encode()]
    assert all(len({other["token"] for other in one["top_logprobs"]}) == 3 for one in entries)
    text = job.choice("text")
    assert text["text"] == UNICORN and text["logprobs"]["text_offset"] == [0, 0, 0, 0]
    assert text["logprobs"]["tokens"] == [f"bytes:\\x{byte:02x}" for byte in UNICORN.encode()]
    assert all(len(top) == 5 for top in text["logprobs"]["top_logprobs"])
    echo = job.choice("echo")["logprobs"]
    assert echo["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 4, 4, 4, 4]
    columns = (echo["tokens"], echo["top_logprobs"], echo["token_logprobs"])
    for token, top, value in [*zip(*columns, strict=True)][1:]:
        assert top[token] == value and 5 <= len(top) <= 6, "the token that was taken is there"
    assert job.choice("cut")["text"] == "\ufffd"
    assert job.choice("cut")["logprobs"]["text_offset"][0] == 0
    assert job.choice("prompt's")["text"] == UNICORN
    assert job.choice("prompt's")["logprobs"]["text_offset"] == [0, 0]


@given(
    own=tokens(30),
    stop=st.lists(st.sampled_from(["a", "b\n", "\U0001f984", " s", "<|other|>"]), max_size=2),
)
@settings(max_examples=100)
def test_a_stream_is_the_answer_in_pieces(model: Model, own: list[int], stop: list[str]) -> None:
    """Texts, tokens and log-probabilities with their offsets. Rows end where a stop string does."""
    own = [token for token in own if token < model.spec.vocab_size] or [65]
    criteria = StopCriteria(tuple(stop), (), model.tokenizer)
    lengths = range(1, len(own) + 1)
    ends = (i for i in lengths if criteria.is_eos(own[i - 1]) or criteria.found(own[:i], [65, 66]))
    own = own[: next(ends, len(own))]
    found = [likely(*own[i:], 7) for i in range(len(own))]
    line = text_line("a", [65, 66], logprobs=2, stop=stop)
    request, choices = streamed(model, line, own, found)
    request.text = criteria.text(own, request.prompt_ids)
    whole = success_row(request, model)["response"]["body"]["choices"][0]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == own
    logprobs = [choice["logprobs"] for choice in choices]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert [one for part in logprobs for one in part[name] or []] == whole["logprobs"][name]
    offsets = [one for part in logprobs for one in part["text_offset"]]
    assert all(0 <= at <= len(whole["text"]) for at in offsets)
    if "\ufffd" not in whole["text"]:
        assert offsets == whole["logprobs"]["text_offset"]


@given(before=tokens(6), own=tokens(60), stop=st.text("thé o", min_size=1, max_size=3))
@settings(max_examples=150)
def test_a_stop_string_is_found_as_by_decoding_everything(
    model: Model, before: list[int], own: list[int], stop: str
) -> None:
    """Of bytes in any order, mostly not UTF-8, and special tokens between them."""
    own = [*own, *model.encode_plain(stop), *own]
    detokenizer = detokenizer_of(model.tokenizer)
    context = detokenizer.context(before)
    stops = StopCriteria((stop,), (), model.tokenizer)
    lengths = range(1, len(own) + 1)
    found = next((n for n in lengths if stops.found(own[:n], before)), None)
    texts = (detokenizer.behind(context, own[:n]) for n in lengths)
    assert found == next((n for n, text in enumerate(texts, 1) if stop in text), None)


def test_a_value_that_json_has_not(model: Model) -> None:
    """A token that is forbidden has a logarithm of minus infinity."""
    forbidden = TokenLogprobs(float("-inf"), ((66, -0.5),))
    request, _ = streamed(model, text_line("a", [65], logprobs=1), [65], [forbidden])
    request.text = ""
    row = success_row(request, model)
    logprobs = row["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert -9999.0 in logprobs["top_logprobs"][0].values()
    json.dumps(row, allow_nan=False)


def test_long_answers_are_measured_in_windows(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by decoding them again and again."""
    text = "The cat sat é\U0001f984 on " * 40
    ids = model.encode_plain(text)
    detokenizer = Detokenizer(model.tokenizer)  # type: ignore[arg-type]
    sizes: list[int] = []
    decode = Detokenizer.text

    def counted(self: Detokenizer, token_ids: Sequence[int], with_specials: bool = False) -> str:
        sizes.append(len(token_ids))
        return decode(self, token_ids, with_specials)

    monkeypatch.setattr(Detokenizer, "text", counted)
    starts = detokenizer.starts((), ids)
    assert max(sizes) <= 100 < len(ids)
    for i in range(0, len(ids), 37):
        assert starts[i] == len(decoded(model, ids[:i]).rstrip("\ufffd"))
