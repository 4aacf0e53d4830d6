"""Read clients' requests, and write finished sequences as OpenAI's bodies, whole or in pieces.

A client's body is a line's body of `batch` (jobs/requests.py) that may also have several prompts,
`n` and `stream`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from flexgen_h2o.cli_common import say
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import internal_reason, json_reason
from flexgen_h2o.core.units import shortened
from flexgen_h2o.engine.channels import ChatText
from flexgen_h2o.engine.conversation import AnswerText
from flexgen_h2o.engine.detokenizer import Places, detokenizer_of
from flexgen_h2o.engine.prompts import STRICT_JSON
from flexgen_h2o.engine.sampling import TokenLogprobs
from flexgen_h2o.engine.sequence import CODE_INTERNAL
from flexgen_h2o.jobs.requests import ClientRequest, Request, RequestReader, RowError
from flexgen_h2o.jobs.responses import chat_logprobs, choice_of, text_logprobs
from flexgen_h2o.models.load import Model

MAX_NUMBERS = 2_000_000  # most numbers in an answer, which is held until its last sequence is done
MAX_SAID = 500  # most characters of an error in the log


class RequestRefused(Exception):
    """A request that gets an error in OpenAI's shape.

    code: names the error for programs.
    status: of HTTP.
    retry_after: seconds, for status 429 and 503.
    """

    def __init__(
        self,
        message: str,
        code: str = "invalid_request",
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        name, colon, _ = str(self).partition(":")
        param = name if colon and name.replace("_", "").isalnum() else None
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error"
        )
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": param, "code": self.code}}


def is_fault(error: BaseException) -> bool:
    """Return whether an error is a real fault.

    It is not if somebody asked for the end, or if asyncio cancelled the task.
    """
    return not interrupts.asks_to_end(error) and not isinstance(error, asyncio.CancelledError)


def say_fault(where: str, error: BaseException) -> None:
    """Write an unforeseen error to the log.

    where: what it happened to.
    """
    say_line(f"{where}: {internal_reason(error)}")


def say_line(line: str) -> None:
    line = shortened(line, MAX_SAID)
    # Half surrogates cannot be printed.
    say("serve", line.encode(errors="backslashreplace").decode())


def internal_error(where: str, error: BaseException) -> RequestRefused:
    """Write an internal error to the log, and return what the client is told."""
    say_fault(where, error)
    return RequestRefused("internal error", CODE_INTERNAL, 500)


def refused(error: RowError) -> RequestRefused:
    """Return what the client is told of a sequence that cannot be run. Log an internal error."""
    if error.code == CODE_INTERNAL:
        say_line(f"a request: {error}")
    return RequestRefused(str(error), error.code, 500 if error.is_internal else 400)


def shutting_down() -> RequestRefused:
    return RequestRefused("the server is shutting down", "shutting_down", 503, retry_after=5)


def json_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raise RequestRefused if it is none."""
    try:
        value = STRICT_JSON.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestRefused("the body is not UTF-8 text", "invalid_json") from error
    except RecursionError as error:
        raise RequestRefused("the body is nested too deeply", "invalid_json") from error
    except ValueError as error:
        raise RequestRefused(
            f"the body is not valid JSON ({json_reason(error)})", "invalid_json"
        ) from error
    if not isinstance(value, dict):
        raise RequestRefused("the body is not a JSON object", "invalid_json")
    return value


def read_asked(
    reader: RequestReader, url: str, body: Mapping[str, Any], rows: int, length: int
) -> ClientRequest:
    """Return the request of a body. Raise RequestRefused, naming the field, if it cannot be run.

    rows: most sequences.
    length: most tokens of a sequence, prompt and answer.
    """
    positions = reader.model.spec.max_positions
    try:
        asked = reader.served(url, body, secrets.token_hex(12), rows)
        firsts = asked.requests[:: asked.n]
        for i, request in enumerate(firsts):
            where = f" (prompt {i} of {len(firsts)})" if len(firsts) > 1 else ""
            _check_length(request, length, positions, where)
    except RowError as error:
        raise refused(error) from error
    if sum(_numbers(one, positions) for one in asked.requests) > MAX_NUMBERS:
        raise RequestRefused(
            f"logprobs: more than {MAX_NUMBERS} numbers in one answer; ask for fewer", "too_large"
        )
    return asked


def _check_length(request: Request, most: int, positions: int, where: str) -> None:
    """Raise RowError if a sequence needs more tokens than the server takes.

    positions: of the model. A server that takes this many lets max_tokens exceed the room that is
    left.
    where: which of several prompts it is, for the error.
    """
    length = len(request.prompt_ids)
    new = request.params.max_tokens
    # The newest token needs no position.
    asked = length + (max(0, new - 1) if most < positions else 0)
    if asked > most:
        raise RowError(
            "context_length_exceeded",
            f"prompt: {length} tokens, and max_tokens {new}, but this server takes {most} "
            f"together{where}",
        )


def _numbers(request: Request, positions: int) -> int:
    """Return the most tokens and log-probabilities that the answer to a request can have.

    An answer ends at the model's positions.
    """
    params = request.params
    echoed = len(request.prompt_ids) if request.echo else 0
    return (min(params.max_tokens, positions) + echoed) * (
        1 if params.logprobs is None else 2 + params.logprobs
    )


def body_of(asked: ClientRequest, model: Model) -> dict[str, Any]:
    """Return the answer to a request whose sequences are done."""
    choices = [{**choice_of(one, model), "index": i} for i, one in enumerate(asked.requests)]
    return {**_head(asked, model, ""), "choices": choices, "usage": usage_of(asked)}


def usage_of(asked: ClientRequest) -> dict[str, int]:
    """Return the token counts. A prompt counts once, however many choices it has."""
    prompt = sum(len(request.prompt_ids) for request in asked.requests[:: asked.n])
    new = sum(len(request.token_ids) for request in asked.requests)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _head(asked: ClientRequest, model: Model, piece: str) -> dict[str, Any]:
    """Return the fields that all answers and pieces begin with.

    piece: suffix of a chat answer's `object`.
    """
    chat = asked.is_chat
    kind = f"chat.completion{piece}" if chat else "text_completion"
    name = f"{'chatcmpl' if chat else 'cmpl'}-{asked.id}"
    return {"id": name, "object": kind, "created": asked.created, "model": model.name}


class StreamEvents:
    """Makes the events of a streamed answer, as the bytes to be sent."""

    def __init__(self, asked: ClientRequest, model: Model) -> None:
        self._asked = asked
        self._model = model
        self._choices = [_Choice(request, model) for request in asked.requests]

    def first(self) -> Iterator[bytes]:
        if self._asked.is_chat:
            for i in range(len(self._choices)):
                yield self._event(
                    i, {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                )

    def token(self, i: int, token: int, logprobs: TokenLogprobs | None) -> Iterator[bytes]:
        """Yield the event for another token of choice `i`, if there is text to show."""
        found = self._choices[i].more(token, logprobs)
        if found is not None:
            yield self._event(i, found)

    def end(self, i: int) -> bytes:
        """Return the last piece of choice `i`, which is done, with the reason why it ends."""
        return self._event(i, self._choices[i].rest())

    def last(self) -> Iterator[bytes]:
        if self._asked.usage:
            usage = {"choices": [], "usage": usage_of(self._asked)}
            yield _event({**_head(self._asked, self._model, ".chunk"), **usage})
        yield b"data: [DONE]\n\n"

    def _event(self, i: int, choice: dict[str, Any]) -> bytes:
        return _event(
            {**_head(self._asked, self._model, ".chunk"), "choices": [{**choice, "index": i}]}
        )


class _Choice:
    """The pieces of one choice. An answer that begins with its prompt (`echo`) is one piece."""

    def __init__(self, request: Request, model: Model) -> None:
        self._request = request
        self._model = model
        prompt = request.prompt_ids
        self._is_chat = request.kind == "chat"
        self._chat_text = ChatText(model.tokenizer, request.params, prompt)
        self._text = AnswerText(
            model.tokenizer, request.params.stop, prompt, request.params.stop_token_ids
        )
        self._ids: list[int] = []
        self._new: list[int] = []  # tokens that no piece has had
        # Log-probabilities of these tokens; those of all tokens if a chat has channels.
        self._logprobs: list[TokenLogprobs] = []
        self._chat_has_channels = self._is_chat and self._chat_text.has_reasoning
        self._sent = 0  # tokens of such a chat's content whose log-probabilities a piece has had
        # Places of tokens in the text are used only with log-probabilities.
        has_places = (
            not self._is_chat
            and model.tokenizer is not None
            and request.params.logprobs is not None
        )
        self._places = Places(detokenizer_of(model.tokenizer), prompt) if has_places else None

    def more(self, token: int, logprobs: TokenLogprobs | None) -> dict[str, Any] | None:
        if self._request.echo:
            return None
        self._add([token], [] if logprobs is None else [logprobs])
        return self._piece(None)

    def rest(self) -> dict[str, Any]:
        done = self._request
        if done.echo:
            return choice_of(done, self._model)
        shown = len(self._ids)
        self._add(done.token_ids[shown:], (done.logprobs or [])[shown:])
        piece = self._piece(done.finish_reason)
        assert piece is not None
        return piece

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._ids += token_ids
        self._new += token_ids
        self._logprobs += logprobs
        if self._places is not None:
            for token in token_ids:
                self._places.add(token)

    def _piece(self, reason: str | None) -> dict[str, Any] | None:
        """Return what may be shown now, or None if that is nothing and the answer continues.

        reason: why the answer ends; None if it continues.
        """
        is_over = reason is not None
        if self._is_chat:
            content, reasoning = self._chat_text.more(self._ids, is_over)
        else:
            content = self._text.more(self._ids, is_over)
            reasoning = ""
        if not (content or reasoning or is_over):
            return None
        if self._model.tokenizer is None:
            content = ""
        starts = self._starts(is_over)
        count = len(self._new) if starts is None else len(starts)
        ids = self._new[:count]
        scored = ids  # the tokens of `logprobs`
        del self._new[:count]
        logprobs: list[TokenLogprobs] | None = None
        if self._request.params.logprobs is not None and self._chat_has_channels:
            places = self._chat_text.content_places(is_over)[self._sent :]
            self._sent += len(places)
            scored = [self._ids[i] for i in places]
            logprobs = [self._logprobs[i] for i in places]
        elif self._request.params.logprobs is not None:
            logprobs = self._logprobs[:count]
            del self._logprobs[:count]
        rest = {"finish_reason": reason, "token_ids": ids}
        tokenizer = self._model.tokenizer
        if not self._is_chat:
            found = None if logprobs is None else text_logprobs(ids, logprobs, starts, tokenizer)
            return {"text": content, "logprobs": found, **rest}
        delta = {"content": content}
        if self._chat_text.has_reasoning:  # each piece names the part that it belongs to
            parts = {"reasoning_content": reasoning, "content": content}
            delta = {name: part for name, part in parts.items() if part} or {"content": ""}
        return {
            "delta": delta,
            "logprobs": None if logprobs is None else chat_logprobs(scored, logprobs, tokenizer),
            **rest,
        }

    def _starts(self, is_over: bool) -> list[int] | None:
        """Return the places of the tokens that are sent now: those that begin in the text that is
        shown.

        Other tokens wait for more text, because a stop string may cut them off.
        """
        if self._places is None:
            return None
        if is_over:
            self._places.settle()
        shown = len(self._text.shown)
        starts = self._places.starts[len(self._ids) - len(self._new) :]
        return (
            [min(start, shown) for start in starts]
            if is_over
            else [*takewhile(lambda at: at < shown, starts)]
        )


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def error_event(error: RequestRefused) -> bytes:
    """Return the event that ends a stream after an error."""
    return _event(error.body)
