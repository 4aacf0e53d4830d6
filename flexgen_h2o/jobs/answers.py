"""Choices of OpenAI's completions and chat completions, with their log-probabilities and our `token_ids`.

The result of a HELM request as h2o_hf's scripts write it, and HELM's import reads it.

A finished request, or one that cannot be run, as a row of the output.
"""

from __future__ import annotations

import hashlib
import json
import time
from itertools import accumulate
from typing import Any

from flexgen_h2o.engine.prompts import Completion
from flexgen_h2o.engine.sampling import Tokenizer, TokenLogprobs
from flexgen_h2o.jobs.requests import Request, RowError
from flexgen_h2o.models.load import Model


def completion_choice(done: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The one choice of a text completion. text: null without a tokenizer."""
    return {
        "index": 0,
        "text": done.text,
        "logprobs": None if done.logprobs is None else _completion_logprobs(done, done.logprobs, tokenizer),
        "finish_reason": done.finish_reason,
        "token_ids": done.token_ids,
    }


def chat_choice(done: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The one choice of a chat completion."""
    logprobs = None
    if done.logprobs is not None:
        steps = zip(done.token_ids, done.logprobs, strict=True)
        logprobs = {
            "content": [
                {
                    **_chat_token(token, one.logprob, tokenizer),
                    "top_logprobs": [_chat_token(other, value, tokenizer) for other, value in one.top],
                }
                for token, one in steps
            ]
        }
    return {
        "index": 0,
        "message": {"role": "assistant", "content": done.text},
        "logprobs": logprobs,
        "finish_reason": done.finish_reason,
        "token_ids": done.token_ids,
    }


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """A single token as text, special ones too; `token_id:N` without a tokenizer."""
    if tokenizer is None:
        return f"token_id:{token}"
    return str(tokenizer.decode([token], skip_special_tokens=False))


def _completion_logprobs(done: Completion, steps: list[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    tokens = [token_text(token, tokenizer) for token in done.token_ids]
    top = [{token_text(other, tokenizer): value for other, value in one.top} for one in steps]
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in steps],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)),
    }


def _chat_token(token: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """bytes: null where the token is a part of a character only."""
    text = token_text(token, tokenizer)
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def helm_result(choice: dict[str, Any]) -> dict[str, Any]:
    """choice: of a text completion. Times are not measured for single rows, and constant in h2o_hf too."""
    nothing: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    logprobs = choice["logprobs"] or nothing
    return {
        "choices": [
            {
                "text": choice["text"],
                "logprobs": {**logprobs, "top_logprobs": logprobs["top_logprobs"] or []},
                "finish_reason": choice["finish_reason"],
            }
        ],
        "request_time": {"batch_time": 0, "batch_size": 1},
    }


def success_row(request: Request, done: Completion, model: Model) -> dict[str, Any]:
    """OpenAI's batch line with the answer; a HELM request also has `request` and `result`, as h2o_hf writes them."""
    own, is_chat = _own(request.custom_id), request.kind == "chat"
    choice = (chat_choice if is_chat else completion_choice)(done, model.tokenizer)
    prompt_tokens, new_tokens = len(request.prompt.token_ids), len(done.token_ids)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{own}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        },
    }
    row: dict[str, Any] = {"id": f"batch_req_{own}", "custom_id": request.custom_id}
    if request.record is not None:
        row |= {"request": json.loads(request.record), "result": helm_result(choice)}
    return {**row, "response": {"status_code": 200, "request_id": own, "body": body}, "error": None}


def error_row(custom_id: str, number: int, error: RowError) -> dict[str, Any]:
    """number: of the line."""
    return {
        "id": f"batch_req_{_own(custom_id)}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": error.code, "message": f"line {number}: {error}"},
    }


def _own(custom_id: str) -> str:
    """The same id for a row whenever it is done."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
