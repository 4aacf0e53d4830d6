"""Lines of the input as requests, and finished requests as rows of the output. A bad line is a RowError.

Field names and meanings are those of OpenAI's completions and chat APIs and of vLLM's additions.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import TooLongError, UsageError, internal_reason, json_reason
from flexgen_h2o.core.units import check_text, shortened
from flexgen_h2o.engine.prompts import CODE_INTERNAL, CODE_NOT_FINITE, Completion, Prompt, make_prompt
from flexgen_h2o.engine.sampling import SamplingParams, Tokenizer, decode_text
from flexgen_h2o.jobs.input import MOST_ID_CHARACTERS, Line
from flexgen_h2o.jobs.output import to_line
from flexgen_h2o.kvcache.eviction import Eviction, Full
from flexgen_h2o.kvcache.eviction.policy import check_budgets
from flexgen_h2o.models.load import Model

FULL = Full()
MOST_MESSAGE_CHARACTERS = 500  # of an error: it may quote the request, which may have any length
# Of a record that is sent back: bytes besides its prompt, since a window keeps thousands, and levels of nesting.
MOST_RECORD_BYTES, MOST_RECORD_LEVELS = 2**14, 100

Kind = Literal["completion", "chat", "helm"]
URLS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}

SAMPLING = frozenset({"temperature", "top_p", "top_k", "seed", "stop", "ignore_eos"})
LENGTH = ("max_completion_tokens", "max_tokens")
# They change nothing in the answer. `model` is that of --model; the answer's body names it.
WITHOUT_EFFECT = frozenset(
    {
        "model", "user", "metadata", "store", "service_tier", "request_id", "safety_identifier", "prompt_cache_key",
        "priority", "stream_options", "request_type", "parallel_tool_calls",
    }
)  # fmt: skip
# Fields that must have one of these values, or null: any other would change the answer.
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "suffix": ("",), "use_beam_search": (False,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "min_p": (0,), "min_tokens": (0,), "logit_bias": ({},), "stop_token_ids": ([],), "bad_words": ([],),
    "allowed_token_ids": (), "prompt_logprobs": (), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "truncate_prompt_tokens": (),
    "add_special_tokens": (True,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "chat_template": (), "chat_template_kwargs": ({},),
    "reasoning_effort": (), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "structured_outputs": (),
}  # fmt: skip
KNOWN = {
    *SAMPLING, *LENGTH, *WITHOUT_EFFECT, *ONLY, "logprobs", "top_logprobs", "echo", "prompt", "prompt_token_ids",
    "messages",
}  # fmt: skip


class RowError(Exception):
    """A request that cannot be run: its row says why, and the job goes on. code: one of docs/reference/jobs.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(shortened(message, MOST_MESSAGE_CHARACTERS))
        self.code = code

    @property
    def is_ours(self) -> bool:
        """Whether the request is not at fault: HTTP's status is 500 then, not 400."""
        return self.code in (CODE_INTERNAL, CODE_NOT_FINITE)


@contextmanager
def row_errors() -> Iterator[None]:
    """Whatever is raised of one row in here becomes its RowError, so that others go on; a request to end goes through.

    Tokenizers and templates are other people's code and raise anything, pyo3's PanicException too, which is no
    `Exception`.
    """
    try:
        yield
    except RowError:
        raise
    except BaseException as error:
        if interrupts.asks_to_end(error):
            raise
        raise RowError(CODE_INTERNAL, internal_reason(error)) from error


def _invalid(message: str) -> RowError:
    return RowError("invalid_request", message)


@dataclass(frozen=True)
class Request:
    """A line to be run. kind: the format of its answer. prompt: its index is the line's number; without its text,
    unless the answer begins with it (`echo`).

    asked_model: the model that it names. record: of a HELM request, what is sent back with the answer, as JSON: parsed
    it takes some thirty times as much memory. row: of the input, as of `Line`.
    """

    kind: Kind
    custom_id: str
    prompt: Prompt
    params: SamplingParams
    asked_model: str | None = None
    record: bytes | None = None
    row: int = 0
    echo: bool = False


# ---- Requests


@dataclass(frozen=True)
class RequestReader:
    """Makes requests of lines. defaults: of the fields that a line does not have. eviction: the run's."""

    model: Model
    defaults: SamplingParams
    eviction: Eviction = FULL

    def read(self, line: Line) -> Request:
        """RowError for a line that cannot be run; its message names the field."""
        with row_errors():
            try:
                value = line.parse()
            except ValueError as error:
                raise RowError("invalid_json", f"not valid JSON ({json_reason(error)})") from error
            return self.request(value, line.number, line.id_in(value), line.row)

    def request(self, value: Any, number: int, custom_id: str, row: int = 0) -> Request:
        """`read` of a line's value. custom_id: its own, or what stands for it."""
        with row_errors():
            try:
                return self._request(value, number, custom_id, row)
            except RecursionError as error:  # an error quotes the value: fewer levels are too many than to parse
                raise RowError("invalid_json", "not valid JSON (nested too deeply)") from error

    def _request(self, value: Any, number: int, custom_id: str, row: int) -> Request:
        kind, fields, given, is_strict = _fields_of(value)
        record = _kept_record(fields, given) if kind == "helm" else None
        _check_fields(fields, is_strict)
        echo = _echo(fields, kind == "chat")
        params = _sampling_of(fields, kind == "chat", self.defaults, custom_id)
        if params.stop and self.model.tokenizer is None:
            raise RowError("unsupported", "stop: needs a tokenizer, and the model's folder has none")
        asked_model = _short_text(fields, "model")
        prompt = self._prompt(number, self._chat_ids(given) if kind == "chat" else given)
        prompt = Prompt(prompt.index, prompt.token_ids, prompt.text if echo else None)
        try:
            check_budgets(self.eviction, self.model.spec, len(prompt.token_ids), max(1, params.max_tokens))
        except UsageError as error:
            raise RowError("does_not_fit", str(error)) from error
        return Request(kind, custom_id, prompt, params, asked_model, record, row, echo)

    def _prompt(self, number: int, given: Any) -> Prompt:
        if isinstance(given, list) and given and isinstance(given[0], str | list):
            raise RowError("unsupported", f"prompt: a single prompt is expected here, not a list of {len(given)}")
        encode, spec = self.model.encode if self.model.tokenizer is not None else None, self.model.spec
        try:
            prompt = make_prompt(number, given, encode, spec.vocab_size, spec.max_positions)
        except TooLongError as error:
            raise RowError("context_length_exceeded", f"prompt: {error}") from error
        except UsageError as error:
            raise _invalid(f"prompt: {error}") from error
        if len(prompt.token_ids) > spec.max_positions:
            sizes = f"{len(prompt.token_ids)} tokens, but {self.model.name} has {spec.max_positions} positions"
            raise RowError("context_length_exceeded", f"prompt: {sizes}")
        return prompt

    def _chat_ids(self, given: Any) -> list[int]:
        messages = _checked_messages(given)
        if not self.model.has_chat_template:
            missing = "tokenizer" if self.model.tokenizer is None else "chat template"
            raise RowError("no_chat_template", f"messages: {self.model.name} has no {missing}; send it as a prompt")
        try:
            return self.model.encode_chat(messages)
        except TooLongError as error:
            raise RowError("context_length_exceeded", f"messages: {error}") from error
        except UsageError as error:  # what the template has made of them is no text
            raise _invalid(f"messages: {error}") from error
        except ValueError as error:
            raise _invalid(f"messages: the chat template does not take them ({error})") from error


def _fields_of(value: Any) -> tuple[Kind, dict[str, Any], Any, bool]:
    """(kind, fields of the request, its prompt or messages, is a field that nobody knows an error?) of a line's value.

    Formats: OpenAI's batch lines, HELM's requests, H2O's articles, plain prompts.
    """
    if not isinstance(value, dict):
        raise _invalid(f"a JSON object is expected, not {type(value).__name__}")
    _short_text(value, "custom_id", 1)
    if {"url", "body", "method"} & value.keys():
        _required(value, "custom_id")
        url, body = _required(value, "url"), _object(value, "body")
        kind = URLS.get(url) if isinstance(url, str) else None
        if kind is None:
            raise RowError("unknown_url", f"url: {url!r} is none of {', '.join(URLS)}")
        if value.get("method", "POST") != "POST":
            raise _invalid(f"method: {value['method']!r} is not POST")
        return kind, body, _required(body, "messages") if kind == "chat" else _plain_prompt(body), True
    if "request" in value:
        record = _object(value, "request")
        return "helm", record, _required(record, "prompt"), False
    if "article" in value:
        return "helm", value, value["article"], False
    return "completion", value, _plain_prompt(value), False


def _check_fields(fields: Mapping[str, Any], is_strict: bool) -> None:
    """RowError naming the first field that would change the answer and cannot."""
    for name, value in fields.items():
        if name not in KNOWN and is_strict:
            raise RowError("unsupported", f"{name}: is not supported")
        if name in ONLY and value is not None and not any(_same(value, allowed) for allowed in ONLY[name]):
            instead = " or ".join(map(repr, ONLY[name])) or "leave it out"
            raise RowError("unsupported", f"{name}: {_quoted(value)} is not supported, only {instead}")


def _sampling_of(fields: Mapping[str, Any], is_chat: bool, defaults: SamplingParams, custom_id: str) -> SamplingParams:
    """What the fields ask for; what they do not say comes from `defaults`. RowError naming a bad one.

    A row without a seed gets one made of the default seed and its id, so that its answer depends on no other row.
    """
    given = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    if given.get("top_k") == -1:  # off, in vLLM
        given["top_k"] = 0
    if "seed" not in given:
        name = f"{defaults.seed}:{custom_id}".encode("utf-8", "surrogatepass")
        given["seed"] = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
    lengths = [fields[name] for name in LENGTH if fields.get(name) is not None]
    if len(set(map(repr, lengths))) > 1:
        raise _invalid("max_tokens and max_completion_tokens differ; give one of them")
    if lengths:
        given["max_tokens"] = lengths[0]
    given["logprobs"] = _num_logprobs(fields, is_chat)
    if fields.get("echo"):
        given["prompt_logprobs"] = given["logprobs"] or 0
    try:
        return replace(defaults, **given)
    except UsageError as error:
        raise _invalid(str(error)) from error


def _echo(fields: Mapping[str, Any], is_chat: bool) -> bool:
    """Is the prompt a part of the answer, with log-probabilities of its own?"""
    echo = fields.get("echo")
    if echo is not None and not isinstance(echo, bool):
        raise _invalid(f"echo: {_quoted(echo)} is not true or false")
    if echo and is_chat:
        raise RowError("unsupported", "echo: is of text completions")
    return bool(echo)


def _num_logprobs(fields: Mapping[str, Any], is_chat: bool) -> Any:
    """How many of the likeliest tokens; None for no log-probabilities. A number, in chat true with `top_logprobs`."""
    wanted, top = fields.get("logprobs"), fields.get("top_logprobs")
    if not is_chat:
        if top is not None:
            raise RowError("unsupported", "top_logprobs: is of chat requests; logprobs is the number here")
        return wanted
    if wanted is not None and not isinstance(wanted, bool):
        raise _invalid(f"logprobs: {_quoted(wanted)} is not true or false")
    if top is not None and not wanted:
        raise _invalid("top_logprobs: needs logprobs to be true")
    return (0 if top is None else top) if wanted else None


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and true and 1 are not: a count of true is a mistake."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _quoted(value: Any) -> str:
    return shortened(repr(value), 60)


def _kept_record(record: dict[str, Any], prompt: Any) -> bytes:
    """The record as JSON. RowError where it nests too deeply, or has too much besides its prompt."""
    level: Iterable[Any] = [record]
    for _ in range(MOST_RECORD_LEVELS):
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise _invalid(f"the record is sent back, and nests more than {MOST_RECORD_LEVELS} levels")
    kept = to_line(record)
    if len(kept) > MOST_RECORD_BYTES:
        others = {name: value for name, value in record.items() if value is not prompt}
        if len(to_line(others)) > MOST_RECORD_BYTES:
            raise _invalid(
                f"the record is sent back, and has more than {MOST_RECORD_BYTES // 2**10} KiB beside its prompt"
            )
    return kept


def _plain_prompt(fields: dict[str, Any]) -> Any:
    given = [name for name in ("prompt", "prompt_token_ids") if fields.get(name) is not None]
    if len(given) != 1:
        lacking = "messages: need a url of /v1/chat/completions" if "messages" in fields else "prompt: is missing"
        raise _invalid("give either prompt or prompt_token_ids, not both" if given else lacking)
    value = fields[given[0]]
    if given[0] == "prompt_token_ids" and not isinstance(value, list):
        raise _invalid(f"prompt_token_ids: a list of token ids is expected, not {type(value).__name__}")
    return value


def _checked_messages(messages: Any) -> list[dict[str, str]]:
    """Messages of text, each with its role; the parts of a content are joined."""
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages: a list of at least one message is expected")
    found = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _invalid(f"{where}: an object with role and content is expected")
        _check_text(f"{where}.role", message["role"])
        for name, value in message.items():
            if name not in ("role", "content") and value not in (None, [], ""):
                raise RowError("unsupported", f"{where}.{name}: is not supported")
        found.append({"role": message["role"], "content": _content(where, message.get("content"))})
    return found


def _content(where: str, content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _invalid(f"{where}.content: a string is expected")
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError("unsupported", f"{where}.content: parts of type {kind!r} are not supported, only text")
    return _check_text(f"{where}.content", "".join(part["text"] for part in parts))


def _check_text(where: str, text: str) -> str:
    try:
        return check_text(where, text)
    except UsageError as error:
        raise _invalid(str(error)) from error


def _required(fields: dict[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise _invalid(f"{name}: is missing")
    return fields[name]


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = _required(fields, name)
    if not isinstance(value, dict):
        raise _invalid(f"{name}: a JSON object is expected, not {type(value).__name__}")
    return value


def _short_text(fields: dict[str, Any], name: str, least: int = 0) -> str | None:
    """A string of at most MOST_ID_CHARACTERS; None where it is absent."""
    value = fields.get(name)
    if value is not None and (not isinstance(value, str) or len(value) < least):
        raise _invalid(f"{name}: {value!r} is not a string" + (" with at least one character" if least else ""))
    if value is not None and len(value) > MOST_ID_CHARACTERS:
        raise _invalid(f"{name}: is longer than {MOST_ID_CHARACTERS} characters")
    return value


# ---- Rows


def success_row(request: Request, done: Completion, model: Model) -> dict[str, Any]:
    """OpenAI's batch line with the answer; a HELM request also has `request` and `result`, as h2o_hf writes them."""
    digest, is_chat = _id_digest(request.custom_id), request.kind == "chat"
    choice: dict[str, Any] = {"index": 0}  # text, content: null without a tokenizer
    if is_chat:
        choice |= {
            "message": {"role": "assistant", "content": done.text},
            "logprobs": chat_logprobs(done, model.tokenizer),
        }
    else:
        text = _echoed_text(request, done, model.tokenizer) if request.echo else done.text
        choice |= {"text": text, "logprobs": completion_logprobs(request, done, model.tokenizer)}
    choice |= {"finish_reason": done.finish_reason, "token_ids": done.token_ids}
    prompt_tokens, new_tokens = len(request.prompt.token_ids), len(done.token_ids)
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
    return {**row, "response": {"status_code": 200, "request_id": digest, "body": body}, "error": None}


def error_row(custom_id: str, number: int, error: RowError) -> dict[str, Any]:
    """number: of the line."""
    return {
        "id": f"batch_req_{_id_digest(custom_id)}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": error.code, "message": f"line {number}: {error}"},
    }


def helm_result(choice: dict[str, Any]) -> dict[str, Any]:
    """As h2o_hf writes it and HELM reads it. choice: of a text completion. Times are constants in h2o_hf too."""
    nothing: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    logprobs = choice["logprobs"] or nothing
    answer = {
        "text": choice["text"],
        "logprobs": {**logprobs, "top_logprobs": logprobs["top_logprobs"] or []},
        "finish_reason": choice["finish_reason"],
    }
    return {"choices": [answer], "request_time": {"batch_time": 0, "batch_size": 1}}


def _echoed_text(request: Request, done: Completion, tokenizer: Tokenizer | None) -> str | None:
    """The prompt as it was given, or as its tokens read, and what follows on it."""
    prompt = request.prompt.text
    if prompt is None and tokenizer is not None:
        prompt = decode_text(tokenizer, request.prompt.token_ids)
    return None if prompt is None else prompt + (done.text or "")


def completion_logprobs(request: Request, done: Completion, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Of the new tokens; with `echo` of the prompt's before them, where the first has none."""
    if done.logprobs is None:
        return None
    ids = [*request.prompt.token_ids, *done.token_ids] if request.echo else done.token_ids
    found = [*(done.prompt_logprobs or ()), *done.logprobs]
    tokens = [_token_text(token, tokenizer) for token in ids]
    top = [one and {_token_text(other, tokenizer): value for other, value in one.top} for one in found]
    return {
        "tokens": tokens,
        "token_logprobs": [one and one.logprob for one in found],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)),
    }


def chat_logprobs(done: Completion, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if done.logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        """bytes: null where the token is only a part of a character."""
        text = _token_text(token, tokenizer)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    steps = zip(done.token_ids, done.logprobs, strict=True)
    return {
        "content": [
            {**entry(token, one.logprob), "top_logprobs": [entry(other, value) for other, value in one.top]}
            for token, one in steps
        ]
    }


def _token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """A single token as text, special ones too; `token_id:N` without a tokenizer."""
    if tokenizer is None:
        return f"token_id:{token}"
    return str(tokenizer.decode([token], skip_special_tokens=False))


def _id_digest(custom_id: str) -> str:
    """The same for a row whenever it is done."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
