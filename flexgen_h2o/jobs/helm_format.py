"""The result of a HELM request as h2o_hf's scripts write it, and HELM's import reads it."""

from __future__ import annotations

from typing import Any


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
