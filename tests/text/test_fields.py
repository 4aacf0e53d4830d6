"""Fields of requests: nulls, current fields without effect, messages; and output that no reader of
lines cuts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming as ChatCreateParamsNonStreaming,
)
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming

from flexgen_h2o.core import settings
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import json_line
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.engine.prompts import write_outputs
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.jobs.requests import (
    FIELDS,
    HAS_REMEDY,
    ONLY,
    TEMPLATE_FIELDS,
    URLS,
    ClientRequest,
    Request,
    RequestReader,
    RowError,
)
from flexgen_h2o.models.load import Model, find_model
from flexgen_h2o.serving.answers import RequestRefused, read_asked
from tests.text.conftest import Job
from tests.text.tiny import (
    TEMPLATE,
    chat_line,
    text_line,
    write_llama,
    write_pieces_tokenizer,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
# Fields of a chat that change nothing.
NO_EFFECT: tuple[dict[str, Any], ...] = (
    {"verbosity": "low", "seed": -1, "top_logprobs": 0, "add_special_tokens": False},
    {"prompt_cache_retention": "24h", "prompt_cache_key": "k", "cache_salt": "s"},
    {"return_token_ids": True, "return_tokens_as_token_ids": False, "include_reasoning": True},
    {"prediction": {"type": "content", "content": "hi"}},
    {"tools": [TOOL], "tool_choice": "none"},
    {"functions": [{"name": "f"}], "function_call": "none"},
    {"documents": [], "mm_processor_kwargs": {}, "vllm_xargs": {}, "kv_transfer_params": {}},
    {"repetition_min_count": 0, "max_repetition_pattern_size": 0},
    {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
)
HI = [{"role": "user", "content": "hi"}]
NULLS = dict.fromkeys(("url", "body", "request", "article", "prompt", "text", "messages"))
# Two lines each that ask for the same.
ALIKE: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({**text_line("a", "hi"), "method": None, "request": None, "note": None}, text_line("a", "hi")),
    *(({**NULLS, **line}, line) for line in ({"prompt": "hi"}, {"text": "hi"}, {"messages": HI})),
    (text_line("a", ["hi"]), text_line("a", "hi")),
    (text_line("a", [[5, 6]]), text_line("a", [5, 6])),
    (text_line("a", "hi", stream_options={"include_usage": True}), text_line("a", "hi")),
    # false is the default of vLLM's chat API, and true that of its completions.
    (text_line("a", "hi", add_special_tokens=True), text_line("a", "hi")),
    (text_line("a", "hi", logprobs=2.0, top_k=5.0), text_line("a", "hi", logprobs=2, top_k=5)),
    (text_line("a", "hi", seed=-2), text_line("a", "hi", seed=2**63 - 2)),
)
# Lines that are refused, with the code.
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    *(
        (chat_line("a", "hi", **body), "unsupported")
        for body in (
            {"audio": {"voice": "x"}},
            {"never heard of": 1},
            {"tools": [TOOL], "tool_choice": "auto"},
            {"return_tokens_as_token_ids": True},
            {"include_reasoning": False},
            {"documents": [{"text": "x"}]},
            *({"chat_template_kwargs": {name: []}} for name in ("tokenize", "messages")),
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        )
    ),
    (text_line("a", "hi", add_generation_prompt=False), "unsupported"),
    *(
        (text_line("a", "hi", truncate_prompt_tokens=value), "invalid_request")
        for value in (0, -2, 300, "4", True)
    ),
    (text_line("a", "hi", truncate_prompt_tokens=-1, max_tokens=256), "invalid_request"),
    (text_line("a", ["hi", "you"]), "unsupported"),
    *(
        (chat_line("a", "hi", **body), "invalid_request")
        for body in (
            {"top_logprobs": 1},
            {"max_tokens": 2.5},
            {"seed": 2**63},
            {"seed": -(2**63) - 1},
            {"seed": "1"},
            {"seed": True},
            *({"stop_token_ids": ids} for ids in ("256", [256.5], [-1], [True], {"a": 1})),
            {"reasoning_effort": "a bit"},
            {"chat_template_kwargs": [1]},
            {"continue_final_message": True},
            {"documents": ["x"]},
        )
    ),
)


@pytest.fixture(scope="module")
def model(bytes_model: Path) -> Model:
    return find_model(str(bytes_model), None)


def read(model: Model, line: dict[str, Any]) -> Request:
    return RequestReader(model, SamplingParams()).request(line, 1, "a")


def facts(model: Model, line: dict[str, Any]) -> dict[str, Any]:
    """All fields of a line's request: requests themselves are equal only to themselves."""
    return vars(read(model, line))


def refused(model: Model, line: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(RowError) as error:
        read(model, line)
    return error.value.code, str(error.value)


@pytest.mark.parametrize(
    ("line", "same"),
    [*((chat_line("a", "hi", **body), chat_line("a", "hi")) for body in NO_EFFECT), *ALIKE],
)
def test_lines_that_ask_for_the_same(
    line: dict[str, Any], same: dict[str, Any], model: Model
) -> None:
    assert facts(model, line) == facts(model, same)


@pytest.mark.parametrize(("line", "code"), REFUSED)
def test_fields_that_would_change_the_answer_are_refused(
    line: dict[str, Any], code: str, model: Model
) -> None:
    assert refused(model, line)[0] == code


# ---- Plain lines, whose names may be those of other programs

# Fields of a plain line, and those of the same line with its own names.
OTHER_NAMES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    *(
        ({name: 3}, {"max_tokens": 3})
        for name in ("max_new_tokens", "maxTokens", "max-output-tokens", "n_predict", "num_predict")
    ),
    ({"sampling_params": {"max_tokens": 3, "topP": 0.5}}, {"max_tokens": 3, "top_p": 0.5}),
    (
        {"options": {"num_predict": 3, "num_ctx": 99, "temp": 1}},
        {"max_tokens": 3, "temperature": 1},
    ),
    ({"parameters": {"max_new_tokens": 3, "until": ["x"]}}, {"max_tokens": 3, "stop": ["x"]}),
    ({"generation_config": {"use_cache": True, "seed": 7, "num_beams": 1}}, {"seed": 7}),
    ({"generationConfig": {"maxOutputTokens": 3}}, {"max_tokens": 3}),
    ({"settings": {"max_tokens": 3}, "samplingParams": {"seed": 7}}, {"max_tokens": 3, "seed": 7}),
    ({"n_predict": -1, "options": {"num_predict": -1, "seed": 7}}, {"seed": 7}),
    # A wide table, in which mistyped names are not looked for.
    (
        {**{f"column_{i}": i for i in range(256)}, "temprature": 2, "maxTokens": 3},
        {"max_tokens": 3},
    ),
    ({"stop_sequences": ["x"], "repeat_penalty": 2}, {"stop": ["x"], "repetition_penalty": 2}),
    ({"do_sample": False, "temperature": 1}, {"temperature": 0.0}),
    ({"do_sample": True, "temperature": 1}, {"temperature": 1}),
    ({"max_new_tokens": 3, "max_tokens": 3, "max_length": None}, {"max_tokens": 3}),
    ({"id": 5, "label": "x", "options": ["A", "B"], "config": {"a": 1}, "temp": 20}, {}),
    ({"top1": 0.5, "step": 3, "score": 1, "stopped": "x", "users": [], "predict": 1}, {}),
)
# Fields of a plain line that are refused, and what the message says.
MISTAKEN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_token": 3}, "max_token: is not a field; did you mean max_tokens?"),
    ({"temprature": 1}, "temprature: is not a field; did you mean temperature?"),
    ({"repitition_penalty": 1}, "did you mean repetition_penalty?"),
    ({"max_new_token": 1}, "did you mean max_new_tokens?"),
    ({"sampling_param": {}}, "did you mean sampling_params?"),
    ({"sampling_params": {"max_tokes": 3}}, "sampling_params.max_tokes: is not a field; did you"),
    ({"sampling_params": {"foo": 3}}, "sampling_params.foo: is not supported"),
    ({"sampling_params": 3}, "sampling_params: a JSON object is expected"),
    ({"options": {"num_predict": 3, "mirostat": 2}}, "options.mirostat: "),
    ({"max_length": 30}, "max_length: counts the prompt too; give max_tokens"),
    ({"top_n_tokens": 3}, "top_n_tokens: give logprobs"),
    ({"do_sample": True}, "do_sample: true needs a temperature above 0"),
    ({"max_new_tokens": 3, "max_tokens": 4}, "another value of max_tokens"),
    ({"max_new_tokens": "many"}, 'max_new_tokens: "many"'),
    ({"options": {"num_predict": -3}}, "options.num_predict: -3"),
    ({"max_tok": 3}, "did you mean max_tokens?"),
    *(
        ({name: "x"}, f"{name}: is not a field; did you mean {own}?")
        for own, names in {
            "stop": "stopp stops sotp stp sstop Stop",
            "seed": "seeed sead seedd sed",
            "top_p": "top_pp tpo_p to_p",
            "top_k": "top_kk",
            "stop_words": "stop_word",
        }.items()
        for name in names.split()
    ),
)
# Columns of data that are one letter or so from a field.
COLUMNS = (
    *("step", "stop_name", "seed_id", "label", "top", "top1", "top_n", "tops", "topic", "id"),
    *("index", "score", "speed", "see", "shop", "tool", "mode", "users", "echo_id", "text_id"),
)
# An object without a prompt, and what the message says.
WITHOUT_PROMPT: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "prompt: is missing; the object has no key"),
    ({"question": "x", "id": 3}, "found question, id; did you mean text by question?"),
    ({"promt": "x"}, "did you mean prompt by promt?"),
    ({"Prompt": "x"}, "did you mean prompt by Prompt?"),
    ({"id": 3, "mesages": HI}, "found id, mesages; did you mean messages by mesages?"),
    ({"conversations": HI}, "did you mean messages by conversations?"),
    ({"prompt": None, "x" * 99: 1}, f"found prompt (null), {'x' * 27}...; give messages, prompt"),
    ({f"key{i}": i for i in range(9)}, "key5 and 3 more; "),
    ({**text_line("a", "x"), "body": {"promt": "x"}}, "found promt; did you mean prompt by promt?"),
    ({**chat_line("a", "x"), "body": {"message": HI}}, "did you mean messages by message?"),
    ({"custom_id": "a", "url": "/v1/completions", "bdy": {}}, "did you mean body by bdy?"),
    ({"request": {"promptt": "x"}}, "did you mean prompt by promptt?"),
)


@pytest.mark.parametrize("prompt", [{"prompt": "hi"}, {"text": "hi"}, {"messages": HI}])
def test_other_names_in_plain_lines(prompt: dict[str, Any], model: Model) -> None:
    for other, own in OTHER_NAMES:
        assert facts(model, {**prompt, **other}) == facts(model, {**prompt, **own}), other
    for fields, says in MISTAKEN:
        assert says in refused(model, {**prompt, **fields})[1], fields
    for name in COLUMNS:
        assert facts(model, {**prompt, name: "x"}) == facts(model, prompt), name


def test_a_missing_prompt_says_what_is_there(model: Model) -> None:
    for line, says in WITHOUT_PROMPT:
        code, why = refused(model, line)
        assert code == "invalid_request" and says in why, why


def test_values_are_quoted_as_json_and_remedies_have_a_page(model: Model) -> None:
    page = (Path(__file__).parents[2] / "docs/reference/not-supported.md").read_text()
    for name in HAS_REMEDY:
        assert f"`{name}`" in page or name in ("url", "content"), name
    for body, says in (
        ({"tools": [TOOL]}, 'tools: [{"type": "function", "function"'),
        ({"stop": [True]}, "stop: true is not"),
        ({"seed": {"a": None}}, 'seed: {"a": null} is not'),
        ({"stream": True}, "only false; see docs/reference/not-supported.md"),
        ({"min_p": 0.5}, "only 0; see docs/reference/not-supported.md"),
        ({"length_penalty": "\x1b"}, 'length_penalty: "\\u001b" is not supported, only 1'),
    ):
        assert says in refused(model, {"messages": HI, **body})[1]


def test_columns_that_nothing_reads_are_counted(model: Model) -> None:
    reader = RequestReader(model, SamplingParams())
    for _ in range(2):
        reader.request({"prompt": "hi", "custom_id": "a", "label": 1, "user": "x"}, 1, "a")
    reader.request({"article": "hi", "summary_gt": "x"}, 1, "a")  # sent back whole
    assert reader.columns == {"label": 2}


def test_an_error_names_its_field(model: Model) -> None:
    """Also in OpenAI's lines, where unknown names are refused."""
    body = {"max_new_tokens": 3}
    assert refused(model, text_line("a", "hi", **body))[1].endswith("give max_tokens")
    for line, name in (
        (text_line("a", "hi", **body), "max_new_tokens"),
        ({"prompt": "hi", "temprature": 1}, "temprature"),
        ({"messages": [{"role": "user", "content": "x", "a": 1}]}, "messages[0].a"),
        ({"prompt": "hi", "max_tokens": 1, "max_completion_tokens": 2}, None),
    ):
        with pytest.raises(RowError) as error:
            read(model, line)
        assert error.value.field == name


# ---- How a prompt becomes tokens


def test_special_tokens_and_the_last_tokens_of_a_prompt(tmp_path: Path) -> None:
    """As in vLLM: special tokens stay, and text is cut at its beginning."""
    names = write_pieces_tokenizer(tmp_path, "abcdefgh▁")
    write_llama(tmp_path)
    model = find_model(str(tmp_path), None)

    def ids(prompt: Any, **body: Any) -> list[int]:
        return list(read(model, text_line("a", prompt, **body)).prompt_ids)

    whole = ids("abcdefgh")
    assert whole[0] == names["<s>"]
    assert ids("abcdefgh", add_special_tokens=False) == whole[1:]
    assert ids("abcdefgh", truncate_prompt_tokens=99) == whole
    assert ids("abcdefgh", truncate_prompt_tokens=3) == [whole[0], *whole[-2:]]
    assert ids("abcdefgh", truncate_prompt_tokens=3, add_special_tokens=False) == whole[-3:]
    assert ids([5, 6, 7], truncate_prompt_tokens=2.0) == [6, 7]
    assert ids([5] * 9 + [6] * 300, truncate_prompt_tokens=-1, max_tokens=56) == [6] * 200
    long = ids("a" * 300_000 + "bcd", truncate_prompt_tokens=5)
    assert long == [whole[0], names["a"], *(names[one] for one in "bcd")]
    line = text_line("a", "abcdefgh", truncate_prompt_tokens=3, echo=True)
    assert read(model, line).prompt is None  # the echo is of the tokens that are left
    messages = [{"role": "user", "content": "a" * 999}]
    chat = read(model, chat_line("a", "", messages=messages, truncate_prompt_tokens=4))
    assert len(chat.prompt_ids) == 4
    chat = read(model, chat_line("a", "b", add_special_tokens=True))
    plain = read(model, chat_line("a", "b")).prompt_ids
    assert list(chat.prompt_ids) == [names["<s>"], *plain]


# ---- One reader for lines of a batch and for requests to the server

ROWS = 8
POSITIONS = 256
# Of every type, good for some field and bad for others.
NUMBERS: tuple[Any, ...] = (True, False, 0, 1, 2, 21, -1, -2, 2.0, 0.5, 2**70)
STRINGS: tuple[Any, ...] = ("", "x", "1", "low", "none", "auto", "\ud83e")
LISTS: tuple[Any, ...] = (
    [],
    ["x"],
    ["x", "y"],
    [""],
    [5],
    [5, 6],
    [[5, 6]],
    [[5], [6]],
    [-3],
    [{}],
)
MORE: tuple[Any, ...] = (["x", 5], {}, {"x": 1}, {"include_usage": True}, {"5": 1}, ["text"])
TYPES: tuple[Any, ...] = ({"type": "text"}, {"type": "json_object"})
VALUES = (None, *NUMBERS, *STRINGS, *LISTS, *MORE, *TYPES, [{"role": "user", "content": "x"}])
APIS: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/completions": (CompletionCreateParamsNonStreaming, {"prompt": "hi"}),
    "/v1/chat/completions": (
        ChatCreateParamsNonStreaming,
        {"messages": HI},
    ),
}


def names_of(api: type) -> set[str]:
    """Fields of OpenAI's schema, with those of the streaming form, and all that the reader
    knows."""
    typed: Any = api
    return {*typed.__required_keys__, *typed.__optional_keys__, *FIELDS, "never heard of"}


def shown(request: Request) -> tuple[Any, ...]:
    """What a request says, without its name and the seed that is made of it."""
    prompt = (list(request.prompt_ids), request.prompt)
    return (
        request.kind,
        prompt,
        replace(request.params, seed=0),
        request.asked_model,
        request.echo,
    )


def of_batch(model: Model, url: str, body: dict[str, Any]) -> tuple[Any, ...]:
    try:
        return (shown(read(model, {"custom_id": "a", "method": "POST", "url": url, "body": body})),)
    except RowError as error:
        return 400, error.code, str(error)


def of_server(
    model: Model, url: str, body: dict[str, Any]
) -> tuple[tuple[Any, ...], ClientRequest | None]:
    try:
        asked = read_asked(RequestReader(model, SamplingParams()), url, body, ROWS, POSITIONS)
    except RequestRefused as error:
        return (error.status, error.code, str(error)), None
    return tuple(shown(one) for one in asked.requests[:: asked.n]), asked


@pytest.mark.parametrize("url", APIS)
def test_every_field_is_read_alike(url: str, model: Model) -> None:
    """The same verdict with the same message. Only the server gives several answers, and pieces of
    them."""
    assert model.spec.max_positions == POSITIONS
    api, plain = APIS[url]
    answered = set()
    for name in sorted(names_of(api)):
        for value in VALUES:
            body = {**plain, name: value}
            line = of_batch(model, url, body)
            served, asked = of_server(model, url, body)
            if line != served or (asked is not None and (asked.n > 1 or asked.stream)):
                assert line[1] == "unsupported" and name in ("n", "stream", "prompt"), (
                    body,
                    line,
                    served,
                )
                assert line[2].startswith(f"{name}: ")
                assert asked is not None or served[1] in ("too_many_rows", "invalid_request"), (
                    body,
                    served,
                )
            if asked is not None and value is not None:
                answered.add(name)
            if value is None and name not in plain:
                assert line == of_batch(model, url, plain), name
    is_chat = URLS[url] == "chat"
    of_the_other = set() if is_chat else {"prompt_token_ids", "top_logprobs", *TEMPLATE_FIELDS}
    of_the_other |= {"continue_final_message", "documents"} if is_chat else set()
    taken = {name for name in FIELDS if ONLY.get(name) != ()} - of_the_other
    assert taken <= answered, "each has a value that is taken"


def test_several_answers_of_the_server(model: Model) -> None:
    """`n` to each prompt, one after another, with seeds of their own."""
    body = {"prompt": ["a", "b"], "n": 2.0, "best_of": 2, "seed": 5}
    asked = read_asked(
        RequestReader(model, SamplingParams()), "/v1/completions", body, ROWS, POSITIONS
    )
    assert asked.n == 2
    assert [bytes(list(one.prompt_ids)) for one in asked.requests] == [b"a", b"a", b"b", b"b"]
    seeds = [one.params.seed for one in asked.requests]
    assert seeds[0] == 5 and seeds[1] != 5


def test_lists_of_a_request_are_checked_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = settings._check_token_ids
    monkeypatch.setattr(
        settings, "_check_token_ids", lambda name, ids: checked.append(name) or check(name, ids)
    )
    body = {"prompt": ["a", "b"], "n": 3, "stop_token_ids": [*range(300, 4000)]}
    asked = read_asked(
        RequestReader(model, SamplingParams()), "/v1/completions", body, ROWS, POSITIONS
    )
    assert len(checked) <= 2 and len({one.params.seed for one in asked.requests}) == 6
    assert len({id(one.params.stop_token_ids) for one in asked.requests}) == 1


@pytest.mark.parametrize(
    ("url", "body", "says"),
    [
        ("completions", {"stop_token_ids": [5] * 5000}, "stop_token_ids: has 5000 token ids, at"),
        ("completions", {"stop": ["a"] * 5000}, "stop: has 5000 strings, at most 4096"),
        ("completions", {"stop": ["a" * 5000]}, "stop: the strings have more than 4096"),
        ("chat", {"messages": [{"role": "user", "content": "a"}] * 17_000}, "messages: has 17000"),
        (
            "chat",
            {"messages": [{"role": "user", "content": ["a"] * 17_000}]},
            r"messages\[0\].content: has 17000 entries, at most 16384",
        ),
        (
            "chat",
            {"chat_template_kwargs": {f"k{i}": 1 for i in range(300)}},
            "chat_template_kwargs: has 300 entries, at most 256",
        ),
    ],
)
def test_lists_of_a_request_have_limits(
    url: str, body: dict[str, Any], says: str, model: Model
) -> None:
    """In a job, in a request to the server, and in Python where there is such a parameter."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    whole = {**(prompt if url == "chat" else {"prompt": "a"}), **body}
    path = "/v1/chat/completions" if url == "chat" else "/v1/completions"
    reader = RequestReader(model, SamplingParams())
    with pytest.raises(RequestRefused, match=says):
        read_asked(reader, path, whole, ROWS, POSITIONS)
    with pytest.raises(RowError, match=says):
        reader.request({"custom_id": "a", "url": path, "body": whole}, 1, "a")
    if url == "completions":
        with pytest.raises(UsageError, match=says):
            SamplingParams(**body)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ["a", "\ud83e"]}, r"surrogate.*\(prompt 1 of 2\)"),
        ({"prompt": [[5], [5] * 150], "max_tokens": 9}, r"takes 100 together \(prompt 1 of 2\)"),
        ({"prompt": ["a"] * 5, "n": 2}, "prompt: 10 answers in one request, at most 8"),
        ({"prompt": "a", "n": 9}, "n: 9 answers in one request, at most 8"),
    ],
)
def test_an_error_says_of_which_prompt_it_is(body: dict[str, Any], says: str, model: Model) -> None:
    with pytest.raises(RequestRefused, match=says):
        read_asked(RequestReader(model, SamplingParams()), "/v1/completions", body, ROWS, 100)


# ---- messages

SHOWS = (
    "{% for m in messages %}"
    "{{ m.role }}|{{ m.name }}|{{ m.reasoning_content }}|{{ m.type }}|{{ m.content }};"
    "{% endfor %}"
)
PARTS = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
TWO = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
OTHERS = ["a", {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
EMPTY = {"refusal": None, "audio": None, "tool_calls": [], "function_call": None}
# A message, and what the template writes of it.
MESSAGES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"role": "user", "content": "hi", "name": "bob", "type": "text"}, "user|bob|||hi;"),
    ({"role": "assistant", "content": "yes", "reasoning_content": "hm"}, "assistant||hm||yes;"),
    ({"role": "assistant", "content": None, "reasoning": "hm"}, "assistant||hm||;"),
    ({"role": "assistant", "content": "", **EMPTY}, "assistant||||;"),
    ({"role": "user", "content": TWO}, "user||||a\nb;"),
    ({"role": "user", "content": OTHERS}, "user||||a\nb\nc;"),
    ({"role": "user", "content": []}, "user||||;"),
)
WRONG_MESSAGES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"role": "user", "content": None}, "invalid_request"),
    ({"content": "x"}, "invalid_request"),
    ({"role": "user", "content": "x", "name": 3}, "invalid_request"),
    ({"role": "user", "content": "x", "reasoning_content": "\ud83e"}, "invalid_request"),
    ({"role": "user", "content": "x", "type": "image"}, "unsupported"),
    ({"role": "tool", "content": "x", "tool_call_id": "c"}, "unsupported"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "unsupported"),
    ({"role": "user", "content": [3]}, "unsupported"),
)


def with_template(bytes_model: Path, folder: Path, template: str) -> Model:
    shutil.copytree(bytes_model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return find_model(str(folder), None)


def prompt_of(model: Model, messages: Any, **body: Any) -> str:
    ids = read(model, chat_line("a", "", messages=messages, **body)).prompt_ids
    return bytes(list(ids)).decode()


# Options of a chat, and the prompt that the template makes.
OPTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "x"),
    ({"reasoning_effort": "low"}, "lowx"),
    ({"chat_template_kwargs": {"enable_thinking": False, "other": [1]}}, "Falsex"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "highx"),
)


def test_what_the_template_gets(bytes_model: Path, tmp_path: Path) -> None:
    """Of a message and of options. As in vLLM, parts of text are lines."""
    model = with_template(bytes_model, tmp_path / "model", SHOWS)
    for message, text in MESSAGES:
        assert prompt_of(model, [message]) == text
    thinking = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    template = "{{ reasoning_effort }}" + thinking + "{{ messages[0].content }}"
    model = with_template(bytes_model, tmp_path / "other", template)
    for body, text in OPTIONS:
        assert prompt_of(model, [{"role": "user", "content": "x"}], **body) == text
    model = replace(model, template_options={"enable_thinking": True, "reasoning_effort": "max"})
    for body, text in ((OPTIONS[0][0], "maxTruex"), (OPTIONS[2][0], "maxFalsex")):
        assert prompt_of(model, [{"role": "user", "content": "x"}], **body) == text


def test_where_a_chats_prompt_ends_and_documents(bytes_model: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]
    template = "{% if documents %}{{ documents[0].text }}{% endif %}" + TEMPLATE
    model = with_template(bytes_model, tmp_path / "model", template)
    on = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(model, said) == "user: x\nassistant: So\n>"
    assert prompt_of(model, said, add_generation_prompt=False) == "user: x\nassistant: So\n"
    assert prompt_of(model, said, **on) == "user: x\nassistant: So"
    assert prompt_of(model, said[:1], documents=[{"text": "y"}]) == "yuser: x\n>"


KNOWN_ROLES = "{% for m in messages if m.role in ROLES %}{{ m.role }}: {{ m.content }};{% endfor %}"


def test_no_message_is_dropped(bytes_model: Path, tmp_path: Path) -> None:
    """A developer's is the system's, unless the template knows it. Others are errors."""
    order = {"role": "developer", "content": " In French. "}
    hi = {"role": "user", "content": "x"}
    for i, (roles, text) in enumerate(
        (
            (["system", "user"], "system:  In French. ;user: x;"),
            (["developer", "user"], "developer:  In French. ;user: x;"),
        )
    ):
        template = KNOWN_ROLES.replace("ROLES", str(roles))
        model = with_template(bytes_model, tmp_path / str(i), template)
        assert prompt_of(model, [order, hi]) == text
        code, why = refused(model, chat_line("a", "", messages=[hi, {**order, "role": "critic"}]))
        assert code == "invalid_request" and "message 1, whose role is critic" in why


@pytest.mark.parametrize(("message", "code"), WRONG_MESSAGES)
def test_messages_that_are_refused(message: dict[str, Any], code: str, model: Model) -> None:
    found, text = refused(model, chat_line("a", "", messages=[message]))
    assert found == code and "messages[0]" in text


@pytest.mark.parametrize(
    ("template", "least", "alone", "two"),
    [
        (BOTH, 2, "a", "ab"),
        (PARTS, 1, "[a]", "[a][b]"),
        (SHOWS, None, "user||||a;", "user||||a\nb;"),
    ],
)
def test_templates_that_read_parts_get_them(
    template: str, least: int | None, alone: str, two: str, bytes_model: Path, tmp_path: Path
) -> None:
    """The second template reads nothing else, and the third would write a list."""
    model = with_template(bytes_model, tmp_path / "model", template)
    assert model.min_content_parts == least
    assert prompt_of(model, [{"role": "user", "content": "a"}]) == alone
    assert prompt_of(model, [{"role": "user", "content": TWO[:1]}]) == alone
    assert prompt_of(model, [{"role": "user", "content": TWO}]) == two
    assert bytes(model.encode_turn(["a"])).decode() == alone


# ---- lines of the output

# All that some reader of lines takes for the end of one.
ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


def test_no_line_can_be_cut(run_job: Callable[..., Job], bytes_model: Path, tmp_path: Path) -> None:
    """Of ids, prompts that are echoed, records that are sent back, and errors that quote."""
    record = {"article": f"x{ENDS}", "max_tokens": 1, "summary_gt": f"{ENDS}é"}
    lines = [
        text_line(f"a{ENDS}b", f"x{ENDS}y", echo=True, max_tokens=1),
        {"custom_id": f"record{ENDS}", **record},
        text_line(f"error{ENDS}", f"x{ENDS}\ud83e"),
        chat_line(f"field{ENDS}", "x", **{f"na{ENDS}me": 1}),
    ]
    job = run_job(bytes_model, *lines)
    text = (tmp_path / "out.jsonl").read_bytes().decode()
    assert len(text.splitlines()) == len(lines)
    assert [json.loads(line) for line in text.splitlines()] == [*job.rows.values()]
    assert job.choice(f"a{ENDS}b")["text"].startswith(f"x{ENDS}y")
    write_outputs(tmp_path / "o.jsonl", [Sequence(0, (), f"é{ENDS}", text=ENDS, token_ids=[1])])
    [line] = (tmp_path / "o.jsonl").read_bytes().decode().splitlines()
    assert json.loads(line)["prompt"] == f"é{ENDS}"


def test_lines_stay_readable() -> None:
    """Other characters are written as they are, and half surrogates as escapes."""
    assert json_line({"a": "é\U0001f984"}) == '{"a": "é\U0001f984"}'
    assert json_line("\ud83e\u2028").isascii()
    with pytest.raises(ValueError, match="JSON"):
        json_line(float("nan"))
