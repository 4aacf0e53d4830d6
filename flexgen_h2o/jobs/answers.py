"""A finished request, or one that cannot be run, as a row of the output."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from flexgen_h2o.jobs.fields import RowError
from flexgen_h2o.jobs.helm_format import helm_result
from flexgen_h2o.jobs.openai_format import chat_choice, completion_choice
from flexgen_h2o.jobs.requests import Request
from flexgen_h2o.prompts import Completion
from flexgen_h2o.source import Model


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
