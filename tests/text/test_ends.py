"""Where answers end: ends of turns by all of a model's files, special tokens as stop strings, stop
tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.channels import ChatText
from flexgen_h2o.engine.conversation import AnswerText
from flexgen_h2o.engine.decoding import StopCriteria
from flexgen_h2o.engine.sampling import SamplingParams, TokenLogprobs
from flexgen_h2o.jobs.requests import RequestReader
from flexgen_h2o.models.load import find_model
from flexgen_h2o.serving.answers import StreamEvents, read_asked
from tests.text.conftest import Job, Said
from tests.text.tiny import chat_line, edit_json, text_line, write_bytes_tokenizer, write_script

Run = Callable[..., Job]
Door = Callable[..., Said]
END = "<|im_end|>"
TEXT_END = "<|endoftext|>"
SCRIPT = (*b">Hi", END, *b"\nuser: wat", TEXT_END, *b"k")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers "Hi", the end of its turn, and then a user's turn that nobody asked for. Only the
    tokenizer names the turn's end."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    ids = write_bytes_tokenizer(folder, (END, TEXT_END))
    write_script(folder, (ids.get(one, one) for one in SCRIPT), eos_token_id=ids[TEXT_END])
    (folder / "generation_config.json").unlink()
    return folder


HI = {"content": "Hi", "role": "assistant"}


def test_a_chat_ends_where_the_turn_does(run_job: Run, chatty: Path) -> None:
    """A text goes on to the end of a sequence, as transformers' `generate` does."""
    job = run_job(
        chatty,
        chat_line("chat", "Say hi"),
        text_line("text", "x>"),
        chat_line("on", "Say hi", ignore_eos=True),
    )
    choice = job.choice("chat")
    assert (choice["message"], choice["finish_reason"]) == (HI, "stop")
    assert choice["token_ids"] == [*b"Hi", 256]
    assert (
        job.choice("text")["text"] == "Hi\nuser: wat"
        and job.choice("text")["finish_reason"] == "stop"
    )
    assert len(job.choice("on")["token_ids"]) == 40


@pytest.mark.parametrize(
    "place", ["config.json", "generation_config.json", "both", "special_tokens_map.json"]
)
def test_every_file_may_name_the_end_of_a_turn(
    place: str, run_job: Run, chatty: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(chatty, tmp_path / "model")
    edit_json(folder / "tokenizer_config.json", eos_token=TEXT_END)
    if place == "special_tokens_map.json":
        edit_json(folder / "tokenizer_config.json", eos_token=None)
        edit_json(folder / place, eos_token=END)
    elif place == "both":  # a file's own ends do not take those of config.json away
        edit_json(folder / "config.json", eos_token_id=256)
        edit_json(folder / "generation_config.json", eos_token_id=[257])
    else:
        edit_json(folder / "config.json", eos_token_id=257)
        edit_json(folder / place, eos_token_id=[256, 257])
    choice = run_job(folder, chat_line("chat", "Say hi")).choice("chat")
    assert (choice["message"], choice["finish_reason"], len(choice["token_ids"])) == (HI, "stop", 3)


def test_the_chat_command_ends_there_too(chatty: Path) -> None:
    model = find_model(str(chatty), None)
    assert model.turn_ends == (257, 256)
    assert model.for_chat(SamplingParams(stop_token_ids=(3,))).stop_token_ids == (3, 256)
    assert model.for_chat(SamplingParams(ignore_eos=True)).stop_token_ids == ()


STOPS: dict[str, tuple[list[str], str, int]] = {
    "a special token": ([END], "Hi", 3),
    "the end of a sequence": ([TEXT_END], "Hi\nuser: wat", 14),
    "beside others": (["zzz", END], "Hi", 3),
    "with text in front": ([f"i{END}"], "H", 3),
    "with text behind": ([f"{END}\nus"], "Hi", 6),
    "with text around": ([f"i{END}\n"], "H", 4),
    "not there": ([f"{END}!"], "Hi\nuser: wat", 14),
    "the earlier of two": ([f"{END}\nu", "\n"], "Hi", 4),
    "text over a special token": (["i\nu"], "H", 5),
    "plain text": (["user"], "Hi\n", 8),
}


@pytest.mark.parametrize("name", STOPS)
def test_special_tokens_are_stop_strings(name: str, run_job: Run, chatty: Path) -> None:
    """Of texts, of chats, and where the end of a sequence is ignored; streams show the same."""
    stop, text, count = STOPS[name]
    job = run_job(
        chatty,
        text_line("text", "x>", stop=stop),
        text_line("ignoring", "x>", stop=stop, ignore_eos=True, max_tokens=14),
    )
    for row in ("text", "ignoring"):
        choice = job.choice(row)
        assert (choice["text"], len(choice["token_ids"]), choice["finish_reason"]) == (
            text,
            count,
            "length" if name == "not there" and row == "ignoring" else "stop",
        )
    ids = job.choice("text")["token_ids"]
    assert "".join(pieces(chatty, ids, SamplingParams(stop=tuple(stop)))) == text


def pieces(folder: Path, ids: Sequence[int], params: SamplingParams) -> Iterator[str]:
    """A text as it comes, token by token; a piece that was shown is never taken back."""
    tokenizer = find_model(str(folder), None).tokenizer
    shown = AnswerText(tokenizer, params.stop, b"x>", params.stop_token_ids)
    for i in range(1, len(ids) + 1):
        yield shown.more(ids[:i], i == len(ids))


def test_a_special_stop_string_makes_text_wait(chatty: Path) -> None:
    """`i` may be the beginning of what the answer is cut at."""
    params = SamplingParams(stop=(f"i{END}\nu",))
    ids = [*b"Hi", 256, *b"\nx"]
    assert [*pieces(chatty, ids, params)] == ["H", "", "", "", "i\nx"]
    assert [*pieces(chatty, [*b"Hi", 256, *b"\nu"], params)] == ["H", "", "", "", ""]


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [([256], "Hi", 3), ([105], "H", 2), ([999_999, 10], "Hi", 4), ([], "Hi\nuser: wat", 14)],
)
def test_stop_tokens(stop: list[int], text: str, count: int, run_job: Run, chatty: Path) -> None:
    """Their own text is not in the answer's, and they end it whatever is ignored."""
    job = run_job(
        chatty,
        text_line("text", "x>", stop_token_ids=stop),
        text_line("ignoring", "x>", stop_token_ids=stop, ignore_eos=True, max_tokens=14),
        chat_line("chat", "Say hi", stop_token_ids=stop),
    )
    for row in ("text", "ignoring"):
        choice = job.choice(row)
        assert (choice["text"], len(choice["token_ids"])) == (text, count)
    assert job.choice("chat")["message"]["content"] == ("H" if stop == [105] else "Hi")
    ids = job.choice("text")["token_ids"]
    assert "".join(pieces(chatty, ids, SamplingParams(stop_token_ids=tuple(stop)))) == text


@pytest.mark.parametrize("wrong", ["256", [256.5], [-1], [True], {"a": 1}])
def test_stop_tokens_are_ids(wrong: Any, run_job: Run, chatty: Path) -> None:
    job = run_job(
        chatty, text_line("a", "x", stop_token_ids=wrong), text_line("b", "x", stop_token_ids=None)
    )
    assert job.error("a")[0] == "invalid_request" and "stop_token_ids: " in job.error("a")[1]
    assert job.rows["b"]["error"] is None


def test_stop_tokens_need_no_tokenizer(run_job: Run, chatty: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(chatty, tmp_path / "model")
    for path in folder.glob("*token*"):
        path.unlink()
    job = run_job(
        folder, text_line("a", [*b"x>"], stop_token_ids=[256]), text_line("b", [*b"x>"], stop=["H"])
    )
    assert job.choice("a")["token_ids"] == [*b"Hi", 256]
    assert job.error("b") == (
        "unsupported",
        "line 2: stop: needs a tokenizer, and the model's folder has none; leave it out",
    )


def test_what_the_template_gets(run_job: Run, chatty: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(chatty, tmp_path / "model")
    thinking = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    template = "{{ reasoning_effort }}" + thinking + "{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(template)
    asked: dict[str, tuple[dict[str, Any], str]] = {
        "nothing": ({}, "x"),
        "nulls": ({"reasoning_effort": None, "chat_template_kwargs": None}, "x"),
        "effort": ({"reasoning_effort": "low"}, "lowx"),
        "thinking": ({"chat_template_kwargs": {"enable_thinking": False, "other": [1]}}, "Falsex"),
        "both": (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "highx",
        ),
    }
    model = find_model(str(folder), None)
    job = run_job(
        folder, *(chat_line(name, "x", max_tokens=1, **body) for name, (body, _) in asked.items())
    )
    for name, (_, text) in asked.items():
        usage = job.rows[name]["response"]["body"]["usage"]
        assert usage["prompt_tokens"] == len(model.encode_plain(text)), name
    wrong = {
        "effort": {"reasoning_effort": "a bit"},
        "no object": {"chat_template_kwargs": [1]},
        "reserved": {"chat_template_kwargs": {"tokenize": True}},
        "messages": {"chat_template_kwargs": {"messages": []}},
        "template": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    }
    job = run_job(
        folder,
        *(chat_line(name, "x", **body) for name, body in wrong.items()),
        text_line("text", "x", reasoning_effort="low"),
    )
    assert {name: job.error(name)[0] for name in job.rows} == {
        "effort": "invalid_request",
        "no object": "invalid_request",
        "reserved": "unsupported",
        "messages": "unsupported",
        "template": "unsupported",
        "text": "unsupported",
    }
    assert (
        "chat_template_kwargs.tokenize: cannot be set for the chat template; leave it out"
        in job.error("reserved")[1]
    )


# ---- channels

MARKS = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")
ANALYSIS = ("<|channel|>", *b"analysis", "<|message|>", *b"Think!", "<|end|>")
FINAL = (
    "<|start|>",
    *b"assistant",
    "<|channel|>",
    *b"final",
    "<|message|>",
    *b"42 \xf0\x9f\xa6\x84",
    "<|return|>",
)
CALL = (
    "<|start|>",
    *b"assistant to=functions.f",
    "<|channel|>",
    *b"commentary json",
    "<|message|>",
    *b"{}",
    "<|call|>",
)
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor "
    "%}<|start|>assistant"
)
CHANNELS: dict[str, tuple[Sequence[int | str], str, str]] = {
    "both": ((*ANALYSIS, *FINAL), "42 \U0001f984", "Think!"),
    "cut in its thoughts": (ANALYSIS[:12], "", "Th"),
    "cut in a header": ((*ANALYSIS, *FINAL[:14]), "", "Think!"),
    "final alone": (FINAL[10:], "42 \U0001f984", ""),
    "no marks": ((*b"plain text", "<|return|>"), "plain text", ""),
    "no marks, cut": ((*b"plain te",), "plain te", ""),
    "thoughts twice": (
        (*ANALYSIS, "<|start|>", *b"assistant", *ANALYSIS, *FINAL),
        "42 \U0001f984",
        "Think!\nThink!",
    ),
    "a tool is called": ((*ANALYSIS, *CALL), "", "Think!\n{}"),
    "an empty channel": (
        ("<|channel|>", *b"analysis", "<|message|>", "<|end|>", *FINAL),
        "42 \U0001f984",
        "",
    ),
    "a header without a message": ((*ANALYSIS, "<|start|>", *b"42", "<|return|>"), "42", "Think!"),
    "nothing behind a header": (
        (*ANALYSIS, "<|start|>", *b"assistant", "<|return|>"),
        "",
        "Think!",
    ),
}


@pytest.fixture(scope="module")
def harmonic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "harmonic"
    ids = write_bytes_tokenizer(folder, MARKS, TEMPLATE)
    script = (
        *b"t",
        "<|channel|>",
        *b"wonder",
        "<|message|>",
        *b"THINK",
        "<|end|>",
        "<|start|>",
        *b"42",
        "<|return|>",
    )
    write_script(folder, (ids.get(one, one) for one in script), eos_token_id=ids["<|return|>"])
    return folder


@pytest.mark.parametrize("prompt", ["a header", "none", "a message", "within a name"])
@pytest.mark.parametrize("name", CHANNELS)
def test_channels(name: str, prompt: str, harmonic: Path) -> None:
    """Whole and token by token; the prompt may end within a message."""
    answer, content, reasoning = CHANNELS[name]
    model = find_model(str(harmonic), None)
    at = {text: 256 + i for i, text in enumerate(MARKS)}
    ids = [at.get(one, one) if isinstance(one, str) else one for one in answer]
    before = model.encode_chat([{"role": "user", "content": "6*7"}])
    if prompt == "none":
        before = [*b"6*7>"]
        if name in ("a header without a message", "nothing behind a header"):
            pytest.skip("without a prompt this answer is another case of this test")
    elif prompt == "a message" and name in ("both", "final alone"):  # which the template has begun
        start = 10 if name == "both" else 7
        before = [*before, *ids[:start]]
        ids = ids[start:]
    elif prompt == "within a name" and name == "both":
        before = [*before, *ids[:4]]
        ids = ids[4:]
    params = SamplingParams()
    assert ChatText(model.tokenizer, params, before).more(ids, True) == (content, reasoning)
    text = ChatText(model.tokenizer, params, before)
    found = [text.more(ids[:i], i == len(ids)) for i in range(1, len(ids) + 1)]
    assert ("".join(one for one, _ in found), "".join(other for _, other in found)) == (
        content,
        reasoning,
    )
    assert all("\ufffd" not in one for one, _ in found)


def test_channels_of_a_job(run_job: Run, harmonic: Path) -> None:
    """An answer that is cut in its thoughts has an empty content, not null. Stop strings cut
    either."""
    job = run_job(
        harmonic,
        chat_line("whole", "6*7"),
        chat_line("cut", "6*7", max_tokens=10),
        chat_line("stop", "6*7", stop="N"),
        chat_line("special", "6*7", stop=["<|end|>"]),
    )
    texts = {
        "whole": ("42", "THINK"),
        "cut": ("", "TH"),
        "stop": ("", "THI"),
        "special": ("", "THINK"),
    }
    for name, (content, reasoning) in texts.items():
        message = job.choice(name)["message"]
        assert message == {
            "role": "assistant",
            "content": content,
            "reasoning_content": reasoning,
        }, name


def test_channels_of_a_stream(harmonic: Path) -> None:
    """Each piece is of the channel that it belongs to, and has its tokens."""
    model = find_model(str(harmonic), None)
    line = chat_line("a", "6*7", stream=True, logprobs=True)
    asked = read_asked(RequestReader(model, SamplingParams()), line["url"], line["body"], 8, 200)
    ids = [260, *b"wonder", 259, *b"THINK", 258, 257, *b"42", 256]
    stream = StreamEvents(asked, model)
    events = [*stream.first()]
    for token in ids[:-1]:
        events += stream.token(0, token, TokenLogprobs(-1.0, ()))
    [request] = asked.requests
    request.token_ids = ids
    request.logprobs = [TokenLogprobs(-1.0, ())] * len(ids)
    request.finish_reason = "stop"
    events.append(stream.end(0))
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    assert [delta for delta in deltas[1:] if delta] == [
        *({"reasoning_content": letter} for letter in "THINK"),
        {"content": "42"},
    ]
    assert [token for choice in choices[1:] for token in choice["token_ids"]] == ids
    assert sum(len(choice["logprobs"]["content"]) for choice in choices[1:]) == len(ids)


def test_channels_on_a_terminal(harmonic: Path, call: Door, tmp_path: Path) -> None:
    """One prompt that is streamed, several, and older names: thoughts in front, no marks; files
    have the content."""
    engine = ("--dtype", "float32", "--offload-dir", "offload", "--max-tokens", 40)
    shown = "(thinking) THINK\n\n42\n"
    assert call("generate", harmonic, "-p", "6*7", *engine).out == shown
    assert (
        call("generate", harmonic, "-p", "6*7", "-p", "6*7", *engine).out.count(f"-\n{shown}") == 2
    )
    one = call("complete", "-m", harmonic, "6*7", "--chat", "--report", "r.json", *engine)
    assert one.out == f"6*7\n\n{shown}"
    two = call("complete", "-m", harmonic, "6*7", "6*7", "--chat", *engine)
    assert two.out.count(f"-\n6*7\n\n{shown}") == 2
    (tmp_path / "p.txt").write_text("6*7\n")
    prompts = ("--prompts", "p.txt", "--chat", "--gen-len", 40, *engine[:4])
    bench = call("flex-opt", "-m", harmonic, *prompts, "--output", "o.jsonl")
    assert "\n0: 6*742\n" in bench.out
    call("evaluate", "text", "-m", harmonic, *prompts, "--hh-size", 20, "--json", "t.json")
    [row] = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert row["full"]["text"] == shown.strip()
    rows = [
        json.loads((tmp_path / "r.json").read_text())["rows"][0],
        json.loads((tmp_path / "o.jsonl").read_text()),
    ]
    assert [row["text"] for row in rows] == ["42", "42"]


def test_older_names_end_an_answer_where_the_turn_ends(
    chatty: Path, call: Door, tmp_path: Path
) -> None:
    engine = ("--dtype", "float32", "--offload-dir", "offload", "--max-tokens", 40)
    assert call("complete", "-m", chatty, "Say hi", "--chat", *engine).out == "Say hi\n\nHi\n"
    (tmp_path / "p.txt").write_text("Say hi\n")
    call("flex-opt", "-m", chatty, "--prompts", "p.txt", "--chat", "--output", "o.jsonl", *engine)
    row = json.loads((tmp_path / "o.jsonl").read_text())
    assert (row["text"], row["finish_reason"], len(row["token_ids"])) == ("Hi", "stop", 3)


def test_other_models_have_no_reasoning(chatty: Path) -> None:
    text = ChatText(find_model(str(chatty), None).tokenizer, SamplingParams(), [*b"x>"])
    assert not text.has_reasoning and text.more([*b"Hi"], True) == ("Hi", "")


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        StopCriteria(("x",), (), None)
    assert json.dumps(SamplingParams(stop_token_ids=[1, 2]).stop_token_ids) == "[1, 2]"
