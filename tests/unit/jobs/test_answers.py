"""Finished requests as rows: the bodies of both APIs, log-probabilities, HELM's result."""

from __future__ import annotations

from typing import Any

from flexgen_h2o.engine.prompts import Completion, Prompt
from flexgen_h2o.engine.sampling import SamplingParams, TokenLogprobs
from flexgen_h2o.jobs.output import to_line
from flexgen_h2o.jobs.requests import Kind, Request, RowError, error_row, helm_result, success_row
from flexgen_h2o.models.load import Model

STEPS = [TokenLogprobs(-0.5, ((265, -0.25), (7, -2.0))), TokenLogprobs(-1.0, ())]


def answered(model: Model, kind: Kind, logprobs: list[TokenLogprobs] | None = None, **fields: Any) -> dict[str, Any]:
    request = Request(kind, "a", Prompt(3, (5, 6, 7), None), SamplingParams(), **fields)
    return success_row(request, Completion(3, None, "text", [613, 265], "stop", logprobs), model)


def test_a_text_completion(words: Model) -> None:
    row = answered(words, "completion", STEPS)
    body = row["response"]["body"]
    assert list(row) == ["id", "custom_id", "response", "error"] and row["error"] is None
    assert row["response"]["status_code"] == 200 and body["object"] == "text_completion"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    [choice] = body["choices"]
    first, second, other = (words.tokenizer.decode([i]) for i in (613, 265, 7))
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("text", [613, 265], "stop")
    assert choice["logprobs"] == {
        "tokens": [first, second],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{second: -0.25, other: -2.0}, {}],
        "text_offset": [0, len(first)],
    }


def test_a_chat_completion(words: Model) -> None:
    body = answered(words, "chat", STEPS)["response"]["body"]
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "text"} and choice["token_ids"] == [613, 265]
    first, second = choice["logprobs"]["content"]
    text = words.tokenizer.decode([613])
    assert (first["token"], first["logprob"], first["bytes"]) == (text, -0.5, list(text.encode()))
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.25, -2.0] and second["top_logprobs"] == []
    assert answered(words, "chat")["response"]["body"]["choices"][0]["logprobs"] is None
    half = next(i for i in range(300) if "\ufffd" in words.tokenizer.decode([i]))
    done = Completion(3, None, "", [half], "stop", [TokenLogprobs(-0.5, ())])
    request = Request("chat", "a", Prompt(3, (5,), None), SamplingParams())
    [token] = success_row(request, done, words)["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (token["bytes"], token["token"]) == (None, "\ufffd"), "a part of a character"


def test_a_helm_result_has_lists_where_helm_reads_lists(words: Model) -> None:
    record = {"prompt": "x"}
    row = answered(words, "helm", record=to_line(record))
    assert row["request"] == record
    assert row["result"]["choices"][0]["logprobs"] == {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
    }  # fmt: skip
    choice = answered(words, "helm", STEPS[1:] * 2, record=to_line(record))["response"]["body"]["choices"][0]
    assert choice["logprobs"]["top_logprobs"] is None
    assert helm_result(choice)["choices"][0]["logprobs"]["top_logprobs"] == []


def test_rows_have_the_same_names_whenever_they_are_done(words: Model) -> None:
    one, other = answered(words, "completion"), answered(words, "chat")
    assert one["id"] == other["id"] == error_row("a", 3, RowError("x", "y"))["id"] != error_row("b", 3, RowError("x", "y"))["id"]  # noqa: E501  # fmt: skip
    assert error_row("a", 3, RowError("code", "what")) == {
        "id": one["id"], "custom_id": "a", "response": None, "error": {"code": "code", "message": "line 3: what"},
    }  # fmt: skip
