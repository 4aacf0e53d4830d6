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
from flexgen_h2o.jobs.responses import helm_result, success_row, text_logprobs
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
    body: dict[str, Any] = {
        "model": "gpt-4o",
        "prompt": "def f(x):",
        "max_tokens": 5,
        "temperature": 0,
    }
    body |= {"top_p": 0.9, "top_k": -1, "seed": 7, "stop": "\n", "ignore_eos": True, "logprobs": 2}
    body |= {"n": 1, "echo": False, "stream": False, "suffix": None, "presence_penalty": 0.0}
    found = read(words, openai(body))
    assert found.params == SamplingParams(5, 0.0, 0.9, 0, 7, ("\n",), True, 2)
    assert (found.kind, found.custom_id, found.asked_model) == ("completion", "a", "gpt-4o")
    assert list(found.prompt_ids) == words.encode("def f(x):") and found.index == 3
    assert found.prompt is None and found.record is None


def test_a_chat_goes_through_the_template(words: Model) -> None:
    tokenizer = copy.deepcopy(words.tokenizer)
    tokenizer.chat_template = TEMPLATE
    model = replace(words, tokenizer=tokenizer)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    for fields, logprobs in (
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False}, None),
    ):
        body = {"messages": messages, "max_completion_tokens": 4, **fields}
        found = read(model, openai(body, CHAT))
        assert (found.kind, found.params.max_tokens) == ("chat", 4)
        assert found.params.logprobs == logprobs
    text = "<system>be brief<user>a<a>"
    assert list(found.prompt_ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    code, message = refused(model, openai({"messages": messages}, CHAT))
    assert code == "invalid_request" and "roles must alternate" in message


def test_a_helm_request_is_kept_as_it_came(words: Model) -> None:
    request = {"request_type": "language-model-inference", "model": "together/gpt-neox-20b"}
    request |= {"prompt": "import os", "temperature": 0.3, "n": 1, "max_tokens": 64, "best_of": 1}
    request |= {"logprobs": 1, "stop": ["###"], "echo": False, "top_p": 1}
    found = read(words, {"scenario": "xsum", "request": request})
    assert (found.kind, json.loads(found.record or b"")) == ("helm", request)
    assert replace(found.params, seed=0) == SamplingParams(
        64, 0.3, 1.0, seed=0, stop=("###",), logprobs=1
    )


def test_plain_prompts_keep_their_data_to_themselves(words: Model) -> None:
    """A key of a data set is not a request; one that a request could have counts."""
    found = read(words, {"prompt": "import os", "answer": 42, "max_tokens": 3, "custom_id": "mine"})
    assert (found.kind, found.custom_id, found.params.max_tokens) == ("completion", "mine", 3)


def test_rows_without_a_seed_draw_from_their_own(words: Model) -> None:
    def seed(custom_id: str, defaults: SamplingParams = DEFAULTS, **body: Any) -> int:
        return read(
            words, openai({"prompt": "a", **body}) | {"custom_id": custom_id}, defaults
        ).params.seed

    assert seed("a") == seed("a") != seed("b") and seed("a") != seed("a", replace(DEFAULTS, seed=5))
    assert seed("a", seed=3) == seed("b", seed=3) == 3
    assert seed("\ud800", seed=None) != seed("a")


# ---- bad lines

CHATTED = {"messages": [{"role": "user", "content": "a"}]}
# The error's code; how the message begins; a line.
BAD = r"""
invalid_json            | not valid JSON (Expe | {bad
invalid_json            | not valid JSON (NaN  | {"prompt": "a", "temperature": NaN}
invalid_json            | not valid JSON ('x'  | {"user": {"x": 1, "x": 2}}
invalid_request         | a JSON object        | [1]
invalid_request         | prompt: is missing   | {}
invalid_request         | messages: a list     | {"messages": []}
invalid_request         | give either prompt or | {"prompt": "a", "prompt_token_ids": [1]}
invalid_request         | prompt_token_ids:    | {"prompt_token_ids": "a"}
invalid_request         | custom_id: 3         | {"prompt": "a", "custom_id": 3}
invalid_request         | prompt: token id 2048 | {"prompt": [5, 2048]}
unsupported             | prompt: a single     | {"prompt": ["a", "b"]}
invalid_request         | prompt:              | {"prompt": "\ud800"}
invalid_request         | request:             | {"request": "x"}
invalid_request         | echo: "yes"          | {"request": {"prompt": "a", "echo": "yes"}}
invalid_request         | custom_id: is missing | {"url": "/v1/completions", "body": {}}
invalid_request         | body:                | {"custom_id": "a", "url": "/v1/completions"}
unknown_url             | url:                 | {"custom_id": "a", "url": "/v1/x", "body": {}}
"""
# The same, of fields of a completion, and of a chat. docs/reference/not-supported.md has a remedy
# for each that is unsupported.
BAD_FIELDS = r"""
unsupported             | foo:                 | {"foo": 1}
invalid_request         | n: 0                 | {"n": 0}
unsupported             | n: 2                 | {"n": 2}
unsupported             | best_of:             | {"best_of": 2}
unsupported             | stream:              | {"stream": true}
unsupported             | suffix:              | {"suffix": "z"}
unsupported             | min_p:               | {"min_p": 0.1}
unsupported             | presence_penalty:    | {"presence_penalty": 0.5}
unsupported             | frequency_penalty:   | {"frequency_penalty": 0.5}
unsupported             | logit_bias:          | {"logit_bias": {"5": 1}}
unsupported             | structured_outputs:  | {"structured_outputs": {"regex": "a"}}
unsupported             | guided_json:         | {"guided_json": {}}
invalid_request         | stream_options:      | {"stream_options": 3}
invalid_request         | max_tokens and       | {"max_tokens": 3, "max_completion_tokens": 4}
invalid_request         | temperature:         | {"temperature": "hot"}
unsupported             | top_logprobs:        | {"top_logprobs": 2}
"""
BAD_CHATS = r"""
unsupported             | echo:                | {"echo": true}
invalid_request         | messages[0]:         | {"messages": ["hi"]}
invalid_request         | messages[0].content: | {"messages": [{"role": "user"}]}
unsupported             | tools:               | {"tools": [{}]}
unsupported             | functions:           | {"functions": [{}]}
unsupported             | response_format:     | {"response_format": {"type": "json_object"}}
invalid_request         | logprobs:            | {"logprobs": 3}
invalid_request         | top_logprobs:        | {"top_logprobs": 3}
"""
LARGE: list[tuple[str, str, Any]] = [
    ("invalid_json", "not valid JSON (not UTF-8", b"\xff\xfe"),
    ("invalid_json", "not valid JSON (nested", b"[" * 10**5),
    ("invalid_json", "not valid JSON (a whole", b'{"seed": ' + b"9" * 5000 + b"}"),
    ("context_length_exceeded", "prompt: 1025", {"prompt": [5] * 1025}),
    ("invalid_request", "the record", {"article": "a", "data": "x" * 20_000}),
    ("invalid_request", "the record", b'{"article": "a", "x": ' + b"[" * 300 + b"]" * 300 + b"}"),
    ("invalid_request", "model:", openai({"prompt": "a", "model": "x" * 2000})),
    ("invalid_request", "method:", openai({"prompt": "a"}, method="GET")),
]


def cases_of(table: str) -> list[list[str]]:
    return [[part.strip() for part in line.split("|", 2)] for line in table.strip().splitlines()]


def test_bad_lines_are_named(words: Model) -> None:
    with pytest.raises(RowError, match=f"longer than {MAX_LINE_BYTES // 2**20} MiB"):
        RequestReader(words, DEFAULTS).read(Line(1, None))
    cases = [(code, begins, line.encode()) for code, begins, line in cases_of(BAD)] + LARGE
    for table, plain, url in (
        (BAD_FIELDS, {"prompt": "a"}, COMPLETIONS),
        (BAD_CHATS, CHATTED, CHAT),
    ):
        for code, begins, body in cases_of(table):
            cases.append((code, begins, openai({**plain, **json.loads(body)}, url)))
    for code, begins, value in cases:
        found, message = refused(words, value)
        assert found == code and message.startswith(begins), (code, begins, message)
        assert "\n" not in message and len(message) < 300


def test_what_needs_a_tokenizer_says_so(ids_only: Model) -> None:
    assert "needs a tokenizer" in refused(ids_only, {"prompt": "a"})[1]
    assert refused(ids_only, openai(CHATTED, CHAT))[0] == "no_chat_template"
    assert [*read(ids_only, {"prompt_token_ids": [5, 6, 7]}).prompt_ids] == [5, 6, 7]
    assert refused(ids_only, {"prompt": [5], "stop": "x"})[0] == "unsupported"


# ---- Finished requests as rows: the bodies of both APIs, log-probabilities, HELM's result


def test_a_token_as_likely_as_the_last_is_among_the_likeliest() -> None:
    """There are as many as were asked for then. The likeliest stays the first. A token that is less
    likely is one more."""
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
    usual = {"text": "text", "token_ids": [613, 265], "finish_reason": "stop", "custom_id": "a"}
    request = Request(3, (5, 6, 7), logprobs=logprobs, kind=kind, **(usual | fields))
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


def test_a_chat_completion(words: Model) -> None:
    [choice] = answered(words, "chat", STEPS)["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "text"}
    first, second = choice["logprobs"]["content"]
    text = words.tokenizer.decode([613])
    assert (first["token"], first["logprob"], first["bytes"]) == (text, -0.5, list(text.encode()))
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.25, -2.0]
    assert second["top_logprobs"] == []


def test_a_part_of_a_character_is_named_by_its_byte(words: Model) -> None:
    half = next(i for i in range(300) if "\ufffd" in words.tokenizer.decode([i]))
    body = answered(words, "chat", STEPS[1:], token_ids=[half])["response"]["body"]
    [token] = body["choices"][0]["logprobs"]["content"]
    [byte] = token["bytes"]
    assert token["token"] == f"bytes:\\x{byte:02x}"


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
