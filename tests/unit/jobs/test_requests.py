"""Lines of every format as requests, and what is wrong with bad ones; finished requests as rows."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from flexgen_h2o.core.files import MAX_LINE_BYTES
from flexgen_h2o.engine.sampling import SamplingParams, TokenLogprobs
from flexgen_h2o.jobs.input import Line
from flexgen_h2o.jobs.output import to_line
from flexgen_h2o.jobs.requests import Kind, Request, RequestReader, RowError
from flexgen_h2o.jobs.responses import error_row, helm_result, success_row, text_logprobs
from flexgen_h2o.models.load import Model

DEFAULTS = SamplingParams(max_tokens=9, temperature=0.5, seed=4)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}<a>{% endif %}"
)


def openai(body: Any, url: str = COMPLETIONS, **other: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **other}


def read(model: Model, value: Any, defaults: SamplingParams = DEFAULTS, number: int = 3) -> Request:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return RequestReader(model, defaults).read(Line(number, text))


def refused(model: Model, value: Any) -> tuple[str, str]:
    with pytest.raises(RowError) as error:
        read(model, value)
    return error.value.code, str(error.value)


# ---- formats


def test_an_openai_line_with_everything(words: Model) -> None:
    body = {
        "model": "gpt-4o",
        "prompt": "def f(x):",
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.9,
        "top_k": -1,
        "seed": 7,
        "stop": "\n",
        "ignore_eos": True,
        "logprobs": 2,
        "n": 1,
        "best_of": 1,
        "echo": False,
        "stream": False,
        "suffix": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "user": "me",
    }
    found = read(words, openai(body))
    assert found.params == SamplingParams(5, 0.0, 0.9, 0, 7, ("\n",), True, 2)
    assert found.kind == "completion" and found.custom_id == "a" and found.asked_model == "gpt-4o"
    assert list(found.prompt_ids) == words.encode("def f(x):") and found.index == 3
    assert found.prompt is None and found.record is None


@pytest.mark.parametrize("field", ["stop", "seed", "logit_bias", "echo", "prompt"])
def test_a_value_that_nests_too_deeply_for_its_error_is_an_error_row(
    words: Model, field: str
) -> None:
    """Parsing takes fewer frames than quoting does, so such a value may get there."""
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(RowError, match=r"nested too deeply|prompt: "):
        RequestReader(words, DEFAULTS).request(openai({"prompt": "a", field: deep}), 1, "a")


def test_token_ids_and_defaults(ids_only: Model) -> None:
    for body in ({"prompt": [5, 6, 7]}, {"prompt_token_ids": [5, 6, 7]}):
        found = read(ids_only, openai(body))
        assert found.prompt_ids == (5, 6, 7)
        assert replace(found.params, seed=4) == DEFAULTS


def test_a_chat_goes_through_the_template(words: Model) -> None:
    model = copy.copy(words)
    tokenizer = copy.deepcopy(words.tokenizer)
    tokenizer.chat_template = TEMPLATE
    model = replace(model, tokenizer=tokenizer)
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": None,
        },
    ]
    found = read(
        model, openai({"messages": messages, "max_completion_tokens": 4, "logprobs": True}, CHAT)
    )
    text = "<system>be brief<user>a\nb<a>"
    assert list(found.prompt_ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (found.kind, found.params.max_tokens, found.params.logprobs) == ("chat", 4, 0)
    many = openai({"messages": messages, "logprobs": True, "top_logprobs": 3}, CHAT)
    assert read(model, many).params.logprobs == 3
    assert (
        read(model, openai({"messages": messages, "logprobs": False}, CHAT)).params.logprobs is None
    )

    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    code, message = refused(model, openai({"messages": messages}, CHAT))
    assert code == "invalid_request" and "roles must alternate" in message


def test_without_a_template_chat_says_so(words: Model, ids_only: Model) -> None:
    line = openai({"messages": [{"role": "user", "content": "hi"}]}, CHAT)
    assert refused(words, line) == (
        "no_chat_template",
        "messages: opt-tiny has no chat template; send it as a prompt",
    )
    assert refused(ids_only, line)[1] == "messages: opt-tiny has no tokenizer; send it as a prompt"


HELM = {
    "request_type": "language-model-inference",
    "model": "together/gpt-neox-20b",
    "prompt": "import os",
    "temperature": 0.3,
    "n": 1,
    "max_tokens": 64,
    "best_of": 1,
    "logprobs": 1,
    "stop": ["###"],
    "echo": False,
    "top_p": 1,
}


def test_helm_requests_and_h2o_articles(words: Model) -> None:
    want = SamplingParams(64, 0.3, 1.0, 0, 0, ("###",), logprobs=1)
    found = read(words, {"scenario": "xsum", "request": HELM})
    assert (found.kind, found.custom_id, json.loads(found.record or b"")) == (
        "helm",
        "line-3",
        HELM,
    )
    assert replace(found.params, seed=0) == want
    keys = ("temperature", "n", "max_tokens", "logprobs", "stop", "top_p")
    article = {"article": "import os", "summary_gt": "no", **{key: HELM[key] for key in keys}}
    also = read(words, article)
    assert (also.kind, json.loads(also.record or b""), also.prompt) == (
        "helm",
        article,
        found.prompt,
    )
    assert also.params == found.params


def test_plain_prompts_keep_their_data_to_themselves(words: Model) -> None:
    """A key of a data set is not a request; one that a request could have counts."""
    found = read(words, {"prompt": "import os", "answer": 42, "max_tokens": 3, "custom_id": "mine"})
    assert (found.kind, found.custom_id, found.params.max_tokens) == ("completion", "mine", 3)
    assert refused(words, {"prompt": "a", "n": 2}) == (
        "unsupported",
        "n: 2 is not supported, only 1",
    )


def test_rows_without_a_seed_draw_from_their_own(words: Model) -> None:
    def seed(custom_id: str, defaults: SamplingParams = DEFAULTS, **body: Any) -> int:
        return read(
            words, openai({"prompt": "a", **body}) | {"custom_id": custom_id}, defaults
        ).params.seed

    assert seed("a") == seed("a") != seed("b") and seed("a") != seed("a", replace(DEFAULTS, seed=5))
    assert seed("a", seed=3) == seed("b", seed=3) == 3
    assert seed("\ud800", seed=None) != seed("a")


# ---- bad lines

BAD = [
    (b"{bad", "invalid_json", "not valid JSON"),
    (b"\xff\xfe", "invalid_json", "not UTF-8"),
    (b"[" * 10**5, "invalid_json", "nested too deeply"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN is not JSON"),
    (b'{"article": "a", "x": 1e400}', "invalid_json", "1e400 is too large a number"),
    (
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        "invalid_json",
        "(a whole number has too many digits)",
    ),
    (
        b'{"prompt": "a", "user": {"x": 1, "x": 2}}',
        "invalid_json",
        "'x' stands twice in one object",
    ),
    ([1], "invalid_request", "a JSON object is expected, not list"),
    ({}, "invalid_request", "prompt: is missing"),
    ({"messages": []}, "invalid_request", "messages: a list of at least one message is expected"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "invalid_request", "not both"),
    ({"prompt_token_ids": "a"}, "invalid_request", "prompt_token_ids: a list"),
    ({"prompt": "a", "custom_id": 3}, "invalid_request", "custom_id: 3 is not a string"),
    (
        {"prompt": {"a": 1}},
        "invalid_request",
        "prompt: a prompt is a string or a list of token ids, not dict",
    ),
    ({"prompt": [5, 2048]}, "invalid_request", "token id 2048 is outside"),
    ({"prompt": []}, "invalid_request", "no tokens"),
    (
        {"prompt": ["a", "b"]},
        "unsupported",
        "prompt: a single prompt is expected here, not a list of 2",
    ),
    ({"prompt": "\ud800"}, "invalid_request", "surrogate"),
    (
        {"prompt": [5] * 1025},
        "context_length_exceeded",
        "prompt: 1025 tokens, but the model has 1024 positions",
    ),
    ({"request": "x"}, "invalid_request", "request: a JSON object"),
    ({"request": {**HELM, "echo": "yes"}}, "invalid_request", "echo: 'yes' is not true or false"),
    (
        {"prompt": "x", "max_tokens": 0},
        "invalid_request",
        "max_tokens: 0 must be at least 1, unless",
    ),
    (
        openai({"messages": [{"role": "user", "content": "x"}], "echo": True}, CHAT),
        "unsupported",
        "echo: works in",
    ),
    ({"article": 3}, "invalid_request", "prompt: a prompt is"),
    (
        {"article": "a", "data": "x" * 20_000},
        "invalid_request",
        "more than 16 KiB beside its prompt",
    ),
    (
        b'{"article": "a", "data": ' + b"[" * 300 + b"]" * 300 + b"}",
        "invalid_request",
        "nests more than 100 levels",
    ),
    (openai({}, custom_id=None), "invalid_request", "custom_id: is missing"),
    (openai([]), "invalid_request", "body: a JSON object"),
    (
        openai({"prompt": "a"}, "/v1/embeddings"),
        "unknown_url",
        "'/v1/embeddings' is none of /v1/completions",
    ),
    (openai({"prompt": "a"}, None), "invalid_request", "url: is missing"),  # type: ignore[arg-type]
    (openai({"prompt": "a"}, 3), "unknown_url", "url: 3"),  # type: ignore[arg-type]
    (openai({"prompt": "a"}, method="GET"), "invalid_request", "method: 'GET' is not POST"),
    (openai({"prompt": "a", "model": 3}), "invalid_request", "model: 3 is not a string"),
    (
        openai({"prompt": "a", "model": "x" * 2000}),
        "invalid_request",
        "model: is longer than 1024 characters",
    ),
    (openai({"prompt": "a", "foo": 1}), "unsupported", "foo: is not supported"),
    (openai({"prompt": "a", "n": True}), "invalid_request", "n: True"),
    (
        openai({"prompt": "a", "n": 0}),
        "invalid_request",
        "n: 0 is not a whole number of at least 1",
    ),
    (openai({"prompt": "a", "n": 2}), "unsupported", "n: 2 is not supported, only 1"),
    (
        openai({"prompt": "a", "best_of": 2}),
        "unsupported",
        "best_of: only 1 and n (1) are supported",
    ),
    (openai({"prompt": "a", "stream": True}), "unsupported", "stream: True is not supported"),
    (openai({"prompt": "a", "stream": 0}), "invalid_request", "stream: 0 is not true or false"),
    (
        openai({"prompt": "a", "stream_options": 3}),
        "invalid_request",
        "stream_options: 3 is not an object",
    ),
    (
        openai({"prompt": "a", "max_tokens": 0}),
        "invalid_request",
        "max_tokens: 0 must be at least 1",
    ),
    (
        openai({"prompt": "a", "max_tokens": 3, "max_completion_tokens": 4}),
        "invalid_request",
        "differ",
    ),
    (openai({"prompt": "a", "temperature": "hot"}), "invalid_request", "temperature: 'hot'"),
    (openai({"prompt": "a", "stop": [""]}), "invalid_request", "stop: ''"),
    (openai({"prompt": "a", "logprobs": True}), "invalid_request", "logprobs: True"),
    (openai({"prompt": "a", "logprobs": 21}), "invalid_request", "logprobs: 21"),
    (openai({"prompt": "a", "top_logprobs": 2}), "unsupported", "top_logprobs"),
    (openai({"messages": "hi"}, CHAT), "invalid_request", "messages: a list"),
    (openai({"messages": ["hi"]}, CHAT), "invalid_request", "messages[0]: an object with role"),
    (
        openai({"messages": [{"role": "user"}]}, CHAT),
        "invalid_request",
        "messages[0].content: a string",
    ),
    (
        openai({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, CHAT),
        "unsupported",
        "'image_url'",
    ),
    (
        openai({"messages": [{"role": "tool", "content": "", "tool_id": "x"}]}, CHAT),
        "unsupported",
        ".tool_id",
    ),
    (
        openai({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, CHAT),
        "unsupported",
        "tools: [{}]",
    ),
    (
        openai({"messages": [{"role": "user", "content": "a"}], "logprobs": 3}, CHAT),
        "invalid_request",
        "logprobs: 3",
    ),
    (
        openai({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}, CHAT),
        "invalid_request",
        "needs",
    ),
]


def test_bad_lines_are_named(words: Model) -> None:
    with pytest.raises(RowError, match=f"longer than {MAX_LINE_BYTES // 2**20} MiB"):
        RequestReader(words, DEFAULTS).read(Line(1, None))
    for value, code, says in BAD:
        found, message = refused(words, value)
        assert (found, says in message) == (code, True), (says, message)
        assert "\n" not in message and len(message) < 300


def test_what_needs_a_tokenizer_says_so(ids_only: Model) -> None:
    assert "needs a tokenizer" in refused(ids_only, {"prompt": "a"})[1]
    assert refused(ids_only, {"prompt": [5], "stop": "x"})[0] == "unsupported"


# ---- Finished requests as rows: the bodies of both APIs, log-probabilities, HELM's result


def test_a_token_as_likely_as_the_last_is_among_the_likeliest() -> None:
    """As many as were asked for, then. The likeliest stays the first, and one that is less likely
    is one more."""
    tied = TokenLogprobs(-2.0, ((1, -1.0), (2, -2.0), (3, -2.0)))
    single = TokenLogprobs(-1.0, ((1, -1.0),))
    other = TokenLogprobs(-3.0, ((1, -1.0), (2, -2.0)))
    found = text_logprobs([9, 9, 9], [tied, single, other], None, None)["top_logprobs"]
    assert [list(one.items()) for one in found] == [
        [("token_id:1", -1.0), ("token_id:2", -2.0), ("token_id:9", -2.0)],
        [("token_id:1", -1.0), ("token_id:9", -1.0)],
        [("token_id:1", -1.0), ("token_id:2", -2.0), ("token_id:9", -3.0)],
    ]


STEPS = [TokenLogprobs(-0.5, ((265, -0.25), (7, -2.0))), TokenLogprobs(-1.0, ())]


def answered(
    model: Model, kind: Kind, logprobs: list[TokenLogprobs] | None = None, **fields: Any
) -> dict[str, Any]:
    request = Request(
        3,
        (5, 6, 7),
        text="text",
        token_ids=[613, 265],
        finish_reason="stop",
        logprobs=logprobs,
        kind=kind,
        custom_id="a",
        **fields,
    )
    return success_row(request, model)


def test_a_text_completion(words: Model) -> None:
    row = answered(words, "completion", STEPS)
    body = row["response"]["body"]
    assert list(row) == ["id", "custom_id", "response", "error"] and row["error"] is None
    assert row["response"]["status_code"] == 200 and body["object"] == "text_completion"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    [choice] = body["choices"]
    first, second, other = (words.tokenizer.decode([i]) for i in (613, 265, 7))
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (
        "text",
        [613, 265],
        "stop",
    )
    assert choice["logprobs"] == {
        "tokens": [first, second],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{second: -0.25, other: -2.0, first: -0.5}, {}],
        "text_offset": [0, min(len(first), len("text"))],
    }


def test_a_request_that_echoes_its_prompt(words: Model) -> None:
    """H2O's lm-eval records: the prompt's tokens and their log-probabilities, and nothing
    generated."""
    found = read(words, {"prompt": "def f(x):", "echo": True, "logprobs": 1, "max_tokens": 0})
    assert (found.params.max_tokens, found.params.prompt_logprobs, found.params.logprobs) == (
        0,
        1,
        1,
    )
    assert found.echo and found.prompt == "def f(x):"
    ids = found.prompt_ids
    scores = [None, *(TokenLogprobs(-float(i), ((i, -0.5),)) for i in range(1, len(ids)))]
    done = replace(found, text="", finish_reason="length", logprobs=[], prompt_logprobs=scores)
    [choice] = success_row(done, words)["response"]["body"]["choices"]
    assert (choice["text"], choice["token_ids"]) == ("def f(x):", [])
    assert choice["logprobs"]["tokens"] == [words.tokenizer.decode([i]) for i in ids]
    assert choice["logprobs"]["token_logprobs"] == [None, *(-float(i) for i in range(1, len(ids)))]
    [likely, own] = (words.tokenizer.decode([i]) for i in (1, ids[1]))
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {likely: -0.5, own: -1.0}]
    done = replace(
        done, prompt=None, text="text", token_ids=[613], finish_reason="stop", logprobs=STEPS[:1]
    )
    [both] = success_row(done, words)["response"]["body"]["choices"]
    assert both["text"] == words.tokenizer.decode(ids, skip_special_tokens=True) + "text"
    assert (
        both["logprobs"]["token_logprobs"][-1] == -0.5
        and len(both["logprobs"]["tokens"]) == len(ids) + 1
    )


def test_a_chat_completion(words: Model) -> None:
    body = answered(words, "chat", STEPS)["response"]["body"]
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "text"} and choice[
        "token_ids"
    ] == [613, 265]
    first, second = choice["logprobs"]["content"]
    text = words.tokenizer.decode([613])
    assert (first["token"], first["logprob"], first["bytes"]) == (text, -0.5, list(text.encode()))
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.25, -2.0] and second[
        "top_logprobs"
    ] == []
    assert answered(words, "chat")["response"]["body"]["choices"][0]["logprobs"] is None
    half = next(i for i in range(300) if "\ufffd" in words.tokenizer.decode([i]))
    done = Request(3, (5,), text="", token_ids=[half], finish_reason="stop", kind="chat")
    done.logprobs = [TokenLogprobs(-0.5, ())]
    [choice] = success_row(done, words)["response"]["body"]["choices"]
    [token] = choice["logprobs"]["content"]
    [byte] = token["bytes"]
    assert token["token"] == f"bytes:\\x{byte:02x}", "a part of a character"


def test_a_helm_result_has_lists_where_helm_reads_lists(words: Model) -> None:
    record = {"prompt": "x"}
    row = answered(words, "helm", record=to_line(record))
    assert row["request"] == record
    assert row["result"]["choices"][0]["logprobs"] == {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    choice = answered(words, "helm", STEPS[1:] * 2, record=to_line(record))["response"]["body"][
        "choices"
    ][0]
    assert choice["logprobs"]["top_logprobs"] is None
    assert helm_result(choice)["choices"][0]["logprobs"]["top_logprobs"] == []


def test_rows_have_the_same_names_whenever_they_are_done(words: Model) -> None:
    one = answered(words, "completion")
    other = answered(words, "chat")
    assert (
        one["id"]
        == other["id"]
        == error_row("a", 3, RowError("x", "y"))["id"]
        != error_row("b", 3, RowError("x", "y"))["id"]
    )
    assert error_row("a", 3, RowError("code", "what")) == {
        "id": one["id"],
        "custom_id": "a",
        "response": None,
        "error": {"code": "code", "message": "line 3: what"},
    }
