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

from flexgen_h2o.core.files import json_line
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.engine.prompts import write_outputs
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.jobs.requests import (
    FIELDS,
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
from tests.text.tiny import chat_line, text_line

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
NO_EFFECT: dict[str, dict[str, Any]] = {
    "nulls": {
        "audio": None,
        "prediction": None,
        "verbosity": None,
        "web_search_options": None,
        "never heard of": None,
        "tools": None,
        "stop": None,
        "logprobs": None,
        "seed": None,
        "n": None,
        "response_format": None,
    },
    "verbosity": {"verbosity": "low"},
    "cache": {"prompt_cache_retention": "24h", "prompt_cache_key": "k", "cache_salt": "s"},
    "ids": {"return_token_ids": True, "return_tokens_as_token_ids": False},
    "a prediction": {"prediction": {"type": "content", "content": "hi"}},
    "tools that are not chosen": {"tools": [TOOL], "tool_choice": "none"},
    "functions that are not chosen": {"functions": [{"name": "f"}], "function_call": "none"},
    "empty": {
        "documents": [],
        "mm_processor_kwargs": {},
        "vllm_xargs": {},
        "kv_transfer_params": {},
        "include_reasoning": True,
    },
    "zeros": {
        "repetition_min_count": 0,
        "min_repetition_pattern_size": 0,
        "max_repetition_pattern_size": 0,
    },
    "options of a cache": {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
}


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


@pytest.mark.parametrize("name", NO_EFFECT)
def test_fields_that_change_nothing(name: str, model: Model) -> None:
    """As lines of a batch, and as requests to the server: one reader has them."""
    plain = read(model, chat_line("a", "hi"))
    line = chat_line("a", "hi", **NO_EFFECT[name])
    assert facts(model, line) == vars(plain)
    [asked] = read_asked(
        RequestReader(model, SamplingParams()), line["url"], line["body"], 8, 200
    ).requests
    assert asked.prompt_ids == plain.prompt_ids
    if name != "a prediction":
        assert facts(model, text_line("a", "hi", **NO_EFFECT[name])) == facts(
            model, text_line("a", "hi")
        )


def test_nulls_of_the_line_itself(model: Model) -> None:
    line = {**text_line("a", "hi"), "method": None, "request": None, "article": None, "note": None}
    assert facts(model, line) == facts(model, text_line("a", "hi"))
    nulls = {
        "prompt": "hi",
        "url": None,
        "body": None,
        "method": None,
        "request": None,
        "custom_id": None,
    }
    assert read(model, nulls).prompt_ids == read(model, {"prompt": "hi"}).prompt_ids
    for line in (
        {"prompt": "hi"},
        {"text": "hi"},
        {"messages": [{"role": "user", "content": "hi"}]},
    ):
        others = dict.fromkeys(("url", "body", "request", "article", "prompt", "text", "messages"))
        assert facts(model, {**others, **line}) == facts(model, line)


@pytest.mark.parametrize(
    "body",
    [
        {"audio": {"voice": "x"}},
        {"never heard of": 1},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"return_tokens_as_token_ids": True},
        {"web_search_options": {}},
        {"include_reasoning": False},
    ],
)
def test_fields_that_would_change_the_answer_are_still_refused(
    body: dict[str, Any], model: Model
) -> None:
    assert refused(model, chat_line("a", "hi", **body))[0] == "unsupported"
    line = chat_line("a", "hi", **body)
    with pytest.raises(RequestRefused) as error:
        read_asked(RequestReader(model, SamplingParams()), line["url"], line["body"], 8, 200)
    assert error.value.status == 400


# ---- One reader for lines of a batch and for requests to the server

ROWS = 8
POSITIONS = 256
# Of every type, good for some field and bad for others.
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    21,
    -1,
    -2,
    1.0,
    2.0,
    0.5,
    2**70,
    "",
    "x",
    "1",
    "low",
    "none",
    "auto",
    "\ud83e",
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
    ["x", 5],
    {},
    {"x": 1},
    {"include_usage": True},
    {"include_usage": 1},
    {"5": 1},
    {"type": "text"},
    {"type": "json_object"},
    ["text"],
    [{"role": "user", "content": "x"}],
)
APIS: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/completions": (CompletionCreateParamsNonStreaming, {"prompt": "hi"}),
    "/v1/chat/completions": (
        ChatCreateParamsNonStreaming,
        {"messages": [{"role": "user", "content": "hi"}]},
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
    taken = {name for name in FIELDS if ONLY.get(name) != ()} - of_the_other
    assert taken <= answered, "each has a value that is taken"


@pytest.mark.parametrize(
    ("body", "n", "prompts"),
    [({"n": 3}, 3, 1), ({"prompt": ["a", "b"], "n": 2.0, "best_of": 2}, 2, 2)],
)
def test_several_answers_of_the_server(
    body: dict[str, Any], n: int, prompts: int, model: Model
) -> None:
    """`n` to each prompt, one after another, with seeds of their own."""
    reader = RequestReader(model, SamplingParams())
    asked = read_asked(
        reader, "/v1/completions", {"prompt": "a", "seed": 5, **body}, ROWS, POSITIONS
    )
    assert asked.n == n and len(asked.requests) == n * prompts
    assert [bytes(one.prompt_ids) for one in asked.requests] == [b"a"] * n + [b"b"] * n * (
        prompts - 1
    )
    assert (
        len({one.params.seed for one in asked.requests[:n]}) == n
        and asked.requests[0].params.seed == 5
    )


def test_an_error_says_of_which_prompt_it_is(model: Model) -> None:
    reader = RequestReader(model, SamplingParams())
    url = "/v1/completions"
    for body, says in (
        ({"prompt": ["a", "\ud83e"]}, r"surrogate.*\(prompt 1 of 2\)"),
        ({"prompt": [[5], [5] * 150], "max_tokens": 9}, r"takes 100 together \(prompt 1 of 2\)"),
        ({"prompt": ["a"] * 5, "n": 2}, "prompt: 10 answers in one request, at most 8"),
        ({"prompt": "a", "n": 9}, "n: 9 answers in one request, at most 8"),
    ):
        with pytest.raises(RequestRefused, match=says):
            read_asked(reader, url, body, ROWS, 100)


def test_a_list_of_one_prompt_in_a_line(model: Model) -> None:
    """As the server has it, and OpenAI."""
    assert facts(model, text_line("a", ["hi"])) == facts(model, text_line("a", "hi"))
    assert facts(model, text_line("a", [[5, 6]])) == facts(model, text_line("a", [5, 6]))
    assert (
        refused(model, text_line("a", ["hi", "you"]))[1]
        == "prompt: a single prompt is expected here, not a list of 2"
    )


def test_stream_options_without_a_stream(model: Model) -> None:
    """They change nothing then."""
    assert facts(model, text_line("a", "hi", stream_options={"include_usage": True})) == facts(
        model, text_line("a", "hi")
    )


def test_special_tokens_of_chats_are_the_templates(model: Model) -> None:
    """false is the default of vLLM's chat API, and true that of its completions."""
    assert facts(model, chat_line("a", "hi", add_special_tokens=False)) == facts(
        model, chat_line("a", "hi")
    )
    assert facts(model, text_line("a", "hi", add_special_tokens=True)) == facts(
        model, text_line("a", "hi")
    )
    for line in (
        chat_line("a", "hi", add_special_tokens=True),
        text_line("a", "hi", add_special_tokens=False),
    ):
        assert refused(model, line)[0] == "unsupported"


def test_counts_that_are_written_as_floats(model: Model) -> None:
    body = {
        "max_completion_tokens": 2.0,
        "max_tokens": 2,
        "top_k": 5.0,
        "logprobs": True,
        "top_logprobs": 3.0,
    }
    found = read(model, chat_line("a", "hi", **body)).params
    assert (found.max_tokens, found.top_k, found.logprobs) == (2, 5, 3)
    assert type(found.max_tokens) is int
    for name in ("max_tokens", "top_k", "seed"):
        assert refused(model, chat_line("a", "hi", **{name: 2.5}))[0] == "invalid_request"
    assert read(model, text_line("a", "hi", logprobs=2.0)).params.logprobs == 2


def test_seeds_of_64_bits(model: Model) -> None:
    """-1 is none, as in vLLM."""
    plain = read(model, chat_line("a", "hi"))
    assert facts(model, chat_line("a", "hi", seed=-1)) == vars(plain)
    seeds = {
        read(model, chat_line("a", "hi", seed=seed)).params.seed
        for seed in (-2, -3, -(2**63), 0, 2**63 - 1, 7.0)
    }
    assert seeds == {2**63 - 2, 2**63 - 3, 0, 2**63 - 1, 7}
    for wrong in (2**63, -(2**63) - 1, "1", True):
        assert refused(model, chat_line("a", "hi", seed=wrong))[0] == "invalid_request"


def test_top_logprobs_of_nothing(model: Model) -> None:
    assert read(model, chat_line("a", "hi", top_logprobs=0)).params.logprobs is None
    assert refused(model, chat_line("a", "hi", top_logprobs=1))[0] == "invalid_request"


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
MESSAGES: dict[str, tuple[Any, str]] = {
    "plain": ([{"role": "user", "content": "hi"}], "user||||hi;"),
    "a name": ([{"role": "user", "content": "hi", "name": "bob"}], "user|bob|||hi;"),
    "a type": ([{"role": "user", "content": "hi", "type": "text"}], "user||||hi;"),
    "thoughts": (
        [{"role": "assistant", "content": "yes", "reasoning_content": "hm"}],
        "assistant||hm||yes;",
    ),
    "thoughts by another name": (
        [{"role": "assistant", "content": "yes", "reasoning": "hm"}],
        "assistant||hm||yes;",
    ),
    "thoughts alone": (
        [{"role": "assistant", "content": None, "reasoning_content": "hm"}],
        "assistant||hm||;",
    ),
    "empty ones": (
        [
            {
                "role": "assistant",
                "content": "",
                "refusal": None,
                "audio": None,
                "tool_calls": [],
                "function_call": None,
            }
        ],
        "assistant||||;",
    ),
    "one part": ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "user||||a;"),
    "parts": ([{"role": "user", "content": TWO}], "user||||a\nb;"),
    "other parts": (
        [
            {
                "role": "user",
                "content": [
                    "a",
                    {"type": "input_text", "text": "b"},
                    {"type": "refusal", "refusal": "c"},
                ],
            }
        ],
        "user||||a\nb\nc;",
    ),
    "no parts": ([{"role": "user", "content": []}], "user||||;"),
}


def with_template(bytes_model: Path, folder: Path, template: str) -> Model:
    shutil.copytree(bytes_model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return find_model(str(folder), None)


def prompt_of(model: Model, messages: Any) -> str:
    ids = read(model, chat_line("a", "", messages=messages)).prompt_ids
    return bytes(ids).decode()


@pytest.mark.parametrize("name", MESSAGES)
def test_what_the_template_gets_of_a_message(name: str, bytes_model: Path, tmp_path: Path) -> None:
    """As in vLLM, parts of text are lines."""
    messages, text = MESSAGES[name]
    assert prompt_of(with_template(bytes_model, tmp_path / "model", SHOWS), messages) == text


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


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"role": "user"}, "invalid_request"),
        ({"role": "user", "content": None}, "invalid_request"),
        ({"content": "x"}, "invalid_request"),
        ({"role": "user", "content": "x", "name": 3}, "invalid_request"),
        ({"role": "user", "content": "x", "name": "\ud83e"}, "invalid_request"),
        ({"role": "user", "content": "x", "reasoning_content": "\ud83e"}, "invalid_request"),
        ({"role": "user", "content": "x", "type": "image"}, "unsupported"),
        ({"role": "tool", "content": "x", "tool_call_id": "c"}, "unsupported"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "unsupported"),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "unsupported"),
        ({"role": "user", "content": [3]}, "unsupported"),
    ],
)
def test_messages_that_are_refused(message: dict[str, Any], code: str, model: Model) -> None:
    found, text = refused(model, chat_line("a", "", messages=[message]))
    assert found == code and "messages[0]" in text


# ---- lines of the output

ENDS = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("end", ENDS, ids=ascii)
def test_no_line_can_be_cut(
    end: str, run_job: Callable[..., Job], bytes_model: Path, tmp_path: Path
) -> None:
    """Of ids, prompts that are echoed, records that are sent back, and errors that quote."""
    lines = [
        text_line(f"a{end}b", f"x{end}y", echo=True, max_tokens=1),
        {
            "custom_id": f"record{end}",
            "article": f"x{end}",
            "max_tokens": 1,
            "summary_gt": f"{end}é",
        },
        text_line(f"error{end}", f"x{end}\ud83e"),
        chat_line(f"field{end}", "x", **{f"na{end}me": 1}),
    ]
    job = run_job(bytes_model, *lines)
    assert len(job.rows) == len(lines)
    text = (tmp_path / "out.jsonl").read_bytes().decode()
    assert len(text.splitlines()) == len(lines)
    assert [json.loads(line) for line in text.splitlines()] == [*job.rows.values()]
    assert job.choice(f"a{end}b")["text"].startswith(f"x{end}y")
    write_outputs(tmp_path / "o.jsonl", [Sequence(0, (), f"é{end}", text=f"{end}", token_ids=[1])])
    [line] = (tmp_path / "o.jsonl").read_bytes().decode().splitlines()
    assert json.loads(line)["prompt"] == f"é{end}"


def test_lines_stay_readable() -> None:
    """Other characters are written as they are, and half surrogates as escapes."""
    assert json_line({"a": "é\U0001f984"}) == '{"a": "é\U0001f984"}'
    assert json_line("\u2028\x85é") == '"\\u2028\\u0085é"'
    assert (
        json.loads(json_line("\ud83e\u2028")) == "\ud83e\u2028"
        and json_line("\ud83e\u2028").isascii()
    )
    with pytest.raises(ValueError, match="JSON"):
        json_line(float("nan"))
