"""Make rows of the output of finished requests, in the shape of OpenAI's answers.

requests.py reads the requests.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from flexgen_h2o.core.units import shortened
from flexgen_h2o.engine.channels import ChatText
from flexgen_h2o.engine.detokenizer import Detokenizer, Tokenizer, common_start, detokenizer_of
from flexgen_h2o.engine.sampling import TokenLogprobs
from flexgen_h2o.jobs.output import to_line
from flexgen_h2o.jobs.requests import MAX_MESSAGE_CHARACTERS, Request, RowError, row_errors
from flexgen_h2o.models.load import Model

MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON lacks; as in vLLM


def output_line(request: Request, model: Model) -> bytes:
    """Return the row of a finished request as a line. A request fails if its row cannot be made."""
    if request.error is None:
        try:
            with row_errors():
                return to_line(success_row(request, model))
        except RowError as error:
            request.fail(error.code, str(error))
    return to_line(error_row(request))


def success_row(request: Request, model: Model) -> dict[str, Any]:
    """Return OpenAI's batch line with the answer.

    A HELM request's line also has `request` and `result`, as h2o_hf writes them.
    """
    digest = _id_digest(request.custom_id)
    is_chat = request.kind == "chat"
    choice = choice_of(request, model)
    prompt_tokens = len(request.prompt_ids)
    new_tokens = len(request.token_ids)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
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
    row: dict[str, Any] = {"id": f"batch_req_{digest}", "custom_id": request.custom_id}
    if request.record is not None:
        row |= {"request": json.loads(request.record), "result": helm_result(choice)}
    return {
        **row,
        "response": {"status_code": 200, "request_id": digest, "body": body},
        "error": None,
    }


def error_row(request: Request) -> dict[str, Any]:
    """Return the row of a request that has failed."""
    return {
        "id": f"batch_req_{_id_digest(request.custom_id)}",
        "custom_id": request.custom_id,
        "response": None,
        "error": {"code": request.error_code, "message": error_message(request)},
    }


def error_message(request: Request) -> str:
    return f"line {request.index}: {shortened(request.error or '', MAX_MESSAGE_CHARACTERS)}"


def helm_result(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a result as h2o_hf writes it and HELM reads it. Its times are constants, as in h2o_hf.

    choice: of a text completion.
    """
    nothing: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    logprobs = choice["logprobs"] or nothing
    answer = {
        "text": choice["text"],
        "logprobs": {**logprobs, "top_logprobs": logprobs["top_logprobs"] or []},
        "finish_reason": choice["finish_reason"],
    }
    return {"choices": [answer], "request_time": {"batch_time": 0, "batch_size": 1}}


def choice_of(request: Request, model: Model) -> dict[str, Any]:
    """Return the answer to a finished request as OpenAI's `choice`."""
    found = (_chat_choice if request.kind == "chat" else _text_choice)(request, model)
    return found | {"finish_reason": request.finish_reason, "token_ids": request.token_ids}


def _chat_choice(request: Request, model: Model) -> dict[str, Any]:
    """Return the choice of a chat completion.

    Its content is null without a tokenizer. Only models that write channels have reasoning_content.
    """
    message: dict[str, Any] = {"role": "assistant", "content": request.text}
    ids = request.token_ids
    found = request.logprobs
    text = ChatText(model.tokenizer, request.params, request.prompt_ids)
    if text.has_reasoning:
        content, reasoning = text.more(ids, True)
        message |= {"content": content, "reasoning_content": reasoning}
        if found is not None:  # those of the content alone
            places = text.content_places(True)
            ids = [ids[i] for i in places]
            found = [found[i] for i in places]
    logprobs = None if found is None else chat_logprobs(ids, found, model.tokenizer)
    return {"index": 0, "message": message, "logprobs": logprobs}


def _text_choice(request: Request, model: Model) -> dict[str, Any]:
    """Return the choice of a text completion.

    Its text is null without a tokenizer. It begins with the prompt if the request asks for its
    echo.
    """
    ids = [*request.prompt_ids, *request.token_ids] if request.echo else request.token_ids
    text: str | None = None
    starts: list[int] | None = None
    if model.tokenizer is not None and request.text is not None:
        detokenizer = detokenizer_of(model.tokenizer)
        prompt = _echoed_prompt(request, detokenizer) if request.echo else ""
        text = prompt + request.text
        if request.logprobs is not None:
            starts = _starts(request, detokenizer, len(prompt), len(text))
    logprobs = None
    if request.logprobs is not None:
        found = [*(request.prompt_logprobs or ()), *request.logprobs]
        logprobs = text_logprobs(ids, found, starts, model.tokenizer)
    return {"index": 0, "text": text, "logprobs": logprobs}


def _starts(request: Request, detokenizer: Detokenizer, prompt: int, whole: int) -> list[int]:
    """Return where the tokens begin in a text of `whole` characters.

    prompt: characters of the echoed prompt at the beginning of the text.
    """
    ids = request.prompt_ids
    starts = [min(prompt + start, whole) for start in detokenizer.starts(ids, request.token_ids)]
    if not request.echo:
        return starts
    return [*(min(start, prompt) for start in detokenizer.starts((), ids)), *starts]


def _echoed_prompt(request: Request, detokenizer: Detokenizer) -> str:
    """Return the prompt as it was given, or decoded from its tokens.

    A character that the prompt only begins belongs to the answer.
    """
    if request.prompt is not None:
        return request.prompt
    ids = request.prompt_ids
    return common_start(detokenizer.text(ids), detokenizer.text([*ids, *request.token_ids]))


def text_logprobs(
    token_ids: Sequence[int],
    found: Sequence[TokenLogprobs | None],
    starts: Sequence[int] | None,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return log-probabilities in the form of text completions.

    The first token of a prompt has none.

    starts: places of the tokens in the text; None without a tokenizer.

    As OpenAI promises, `top_logprobs` also has the chosen token, which may not be among the
    likeliest. Different tokens have different keys.
    """
    tokens: list[str] = []
    top: list[dict[str, float] | None] = []
    for token, one in zip(token_ids, found, strict=True):
        likeliest = [] if one is None else _likeliest(token, one)
        others = [other for other, _ in likeliest]
        names = _names([token, *(other for other in others if other != token)], tokenizer)
        tokens.append(names[token])
        if one is None:
            top.append(None)
            continue
        values = {names[other]: _finite(value) for other, value in likeliest}
        if values:
            values.setdefault(names[token], _finite(one.logprob))
        top.append(values)
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in found],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))
        if starts is None
        else list(starts),
    }


def _likeliest(token: int, found: TokenLogprobs) -> list[tuple[int, float]]:
    """Return the likeliest tokens.

    If the chosen token is as likely as the last of several, it replaces that one. Otherwise there
    would be one more than were asked for. The first stays, because clients take it as the greedy
    choice.
    """
    top = list(found.top)
    if len(top) > 1 and found.logprob == top[-1][1] and token not in (other for other, _ in top):
        top[-1] = (token, found.logprob)
    return top


def chat_logprobs(
    token_ids: Sequence[int], found: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return log-probabilities in the form of chat completions.

    The `bytes` of a token are its own, even if it is a part of a character.
    """
    entries = []
    for token, one in zip(token_ids, found, strict=True):
        others = [other for other, _ in one.top]
        names = _names([token, *(other for other in others if other != token)], tokenizer)

        def entry(token: int, value: float, names: dict[int, str] = names) -> dict[str, Any]:
            own = None if tokenizer is None else list(detokenizer_of(tokenizer).token_bytes(token))
            return {"token": names[token], "logprob": _finite(value), "bytes": own}

        likely = [entry(other, value) for other, value in one.top]
        entries.append({**entry(token, one.logprob), "top_logprobs": likely})
    return {"content": entries}


def _names(token_ids: list[int], tokenizer: Tokenizer | None) -> dict[int, str]:
    """Return a different text for each token; `token_id:N` without a tokenizer."""
    if tokenizer is None:
        return {token: f"token_id:{token}" for token in token_ids}
    return dict(zip(token_ids, detokenizer_of(tokenizer).names(token_ids), strict=True))


def _finite(value: float) -> float:
    return MIN_LOGPROB if value == -math.inf else value


def _id_digest(custom_id: str) -> str:
    """Return a digest of the id, which is the same for a row in every run."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
