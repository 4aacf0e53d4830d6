"""Choices of OpenAI's completions and chat completions, with their log-probabilities and our `token_ids`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from flexgen_h2o.prompts import Completion
from flexgen_h2o.sampling import Tokenizer, TokenLogprobs


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
