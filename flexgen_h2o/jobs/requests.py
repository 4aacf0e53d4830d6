"""The fields of a request: what they mean here, which have no effect, and which would and are not supported.

Names and meanings are those of OpenAI's completions and chat API, and of vLLM's additions to it.

A line of the input as a request: which format it is in, its prompt, what it asks for. A bad line is a RowError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from flexgen_h2o.core.errors import TooLongError, UsageError, json_reason
from flexgen_h2o.engine.prompts import Prompt, make_prompt
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.input import MOST_ID_CHARACTERS, Line
from flexgen_h2o.jobs.output import to_line
from flexgen_h2o.models.load import Model

MOST_MESSAGE_CHARACTERS = 500  # what a request says may be quoted in it, and that may have any length


class RowError(Exception):
    """A request that cannot be run: its row says why, and the job goes on. code: one of docs/jobs.md."""

    def __init__(self, code: str, message: str) -> None:
        is_long = len(message) > MOST_MESSAGE_CHARACTERS
        super().__init__(message[: MOST_MESSAGE_CHARACTERS - 3] + "..." if is_long else message)
        self.code = code


SAMPLING = frozenset({"temperature", "top_p", "top_k", "seed", "stop", "ignore_eos"})
LENGTH = frozenset({"max_tokens", "max_completion_tokens"})
LOGPROBS = frozenset({"logprobs", "top_logprobs"})
PROMPT = frozenset({"prompt", "prompt_token_ids", "messages"})
# They change nothing in the answer. `model` is that of --model; the answer's body says which.
WITHOUT_EFFECT = frozenset(
    {
        "model", "user", "metadata", "store", "service_tier", "request_id", "safety_identifier", "prompt_cache_key",
        "priority", "stream_options", "request_type", "parallel_tool_calls",
    }
)  # fmt: skip
# What can only be left at these values (or null), because other values would change the answer.
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "stream": (False,), "suffix": ("",), "use_beam_search": (False,),
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
KNOWN = SAMPLING | LENGTH | LOGPROBS | PROMPT | WITHOUT_EFFECT | ONLY.keys()


def check_fields(fields: Mapping[str, Any], lenient: bool) -> None:
    """RowError naming the first field that would change the answer and cannot. lenient: unknown names are data."""
    for name, value in fields.items():
        if name not in KNOWN and not lenient:
            raise RowError("unsupported", f"{name}: is not supported")
        if name in ONLY and value is not None and not any(_same(value, allowed) for allowed in ONLY[name]):
            instead = " or ".join(map(repr, ONLY[name])) or "leave it out"
            raise RowError("unsupported", f"{name}: {_short(value)} is not supported, only {instead}")


def sampling_of(fields: Mapping[str, Any], is_chat: bool, defaults: SamplingParams, custom_id: str) -> SamplingParams:
    """What the fields ask for; what they do not say comes from `defaults`. RowError naming a bad one.

    A row without a seed draws from one that is made of the default seed and its id, so neighbours do not matter.
    """
    given = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    if given.get("top_k") == -1:  # vLLM's way to say off
        given["top_k"] = 0
    if "seed" not in given:
        given["seed"] = _own_seed(defaults.seed, custom_id)
    lengths = {name: fields[name] for name in sorted(LENGTH) if fields.get(name) is not None}
    if len(set(map(repr, lengths.values()))) > 1:
        raise RowError("invalid_request", "max_tokens and max_completion_tokens differ; give one of them")
    for value in lengths.values():
        given["max_tokens"] = value
    given["logprobs"] = _logprobs(fields, is_chat)
    try:
        return replace(defaults, **given)
    except UsageError as error:
        raise RowError("invalid_request", str(error)) from error


def _logprobs(fields: Mapping[str, Any], is_chat: bool) -> Any:
    """How many of the likeliest tokens; None for no log-probabilities. A number, in chat true with `top_logprobs`."""
    wanted, top = fields.get("logprobs"), fields.get("top_logprobs")
    if not is_chat:
        if top is not None:
            raise RowError("unsupported", "top_logprobs: is of chat requests; logprobs is the number here")
        return wanted
    if wanted not in (None, True, False):
        raise RowError("invalid_request", f"logprobs: {_short(wanted)} is not true or false")
    if top is not None and not wanted:
        raise RowError("invalid_request", "top_logprobs: needs logprobs to be true")
    return (0 if top is None else top) if wanted else None


def _own_seed(seed: int, custom_id: str) -> int:
    name = f"{seed}:{custom_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and true and 1 are not: a count of true is a mistake."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


Kind = Literal["completion", "chat", "helm"]
# Of a record that is sent back: bytes beside its prompt, since a window keeps thousands, and levels that nest.
MOST_RECORD_BYTES, MOST_RECORD_LEVELS = 2**14, 100
URLS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}


@dataclass(frozen=True)
class Request:
    """A row to be run. kind: how it is answered. prompt: its index is the number of the line; without its text.

    asked_model: the model that it names. record: of a HELM request, what is sent back with the answer,
    as JSON: parsed it takes some thirty times as much.
    """

    kind: Kind
    custom_id: str
    prompt: Prompt
    params: SamplingParams
    asked_model: str | None = None
    record: bytes | None = None


@dataclass(frozen=True)
class _Asked:
    """The fields of a request, taken out of its line. lenient: names that mean nothing here are data beside it."""

    kind: Kind
    fields: dict[str, Any]
    prompt: Any
    lenient: bool
    record: dict[str, Any] | None = None


@dataclass(frozen=True)
class RequestReader:
    """Makes requests of lines. defaults: what a line does not say."""

    model: Model
    defaults: SamplingParams

    def read(self, line: Line) -> Request:
        """RowError for a line that cannot be run; its message names the field."""
        value = _value(line)
        asked, custom_id = _asked(value), line.id_in(value)
        record = None if asked.record is None else _kept_record(asked.record, asked.prompt)
        check_fields(asked.fields, asked.lenient)
        params = sampling_of(asked.fields, asked.kind == "chat", self.defaults, custom_id)
        if params.stop and self.model.tokenizer is None:
            raise RowError("unsupported", "stop: needs a tokenizer, and the model's folder has none")
        named = asked.fields.get("model")
        if named is not None and not isinstance(named, str):
            raise RowError("invalid_request", f"model: {named!r} is not a string")
        if named is not None and len(named) > MOST_ID_CHARACTERS:
            raise RowError("invalid_request", f"model: is longer than {MOST_ID_CHARACTERS} characters")
        prompt = self._chat(line, asked) if asked.kind == "chat" else self._prompt(line, asked.prompt)
        return Request(asked.kind, custom_id, prompt, params, named, record)

    def _prompt(self, line: Line, given: Any) -> Prompt:
        if isinstance(given, list) and given and isinstance(given[0], str | list):
            raise RowError("unsupported", f"prompt: {len(given)} prompts in one line; give each a line of its own")
        encode, spec = self.model.encode if self.model.tokenizer is not None else None, self.model.spec
        try:
            return self._fitting(make_prompt(line.number, given, encode, spec.vocab_size, spec.max_positions))
        except TooLongError as error:
            raise RowError("context_length_exceeded", f"prompt: {error}") from error
        except UsageError as error:
            raise RowError("invalid_request", f"prompt: {error}") from error

    def _chat(self, line: Line, asked: _Asked) -> Prompt:
        messages = _checked_messages(asked.prompt)
        if not self.model.has_chat_template:
            missing = "tokenizer" if self.model.tokenizer is None else "chat template"
            raise RowError("no_chat_template", f"messages: {self.model.name} has no {missing}; send it as a prompt")
        try:
            ids = self.model.encode_chat(messages)
        except TooLongError as error:
            raise RowError("context_length_exceeded", f"messages: {error}") from error
        except ValueError as error:
            raise RowError("invalid_request", f"messages: the chat template does not take them ({error})") from error
        return self._prompt(line, ids)

    def _fitting(self, prompt: Prompt) -> Prompt:
        """Without its text, which nobody needs again."""
        length, positions = len(prompt.token_ids), self.model.spec.max_positions
        if length > positions:
            raise RowError(
                "context_length_exceeded", f"prompt: {length} tokens, but {self.model.name} has {positions} positions"
            )
        return Prompt(prompt.index, prompt.token_ids, None)


def _value(line: Line) -> Any:
    try:
        return line.parse()
    except ValueError as error:
        raise RowError("invalid_json", f"not valid JSON ({json_reason(error)})") from error


def _asked(value: Any) -> _Asked:
    """A line by its format: OpenAI's batch lines, HELM's requests, H2O's articles, plain prompts."""
    if not isinstance(value, dict):
        raise RowError("invalid_request", f"a JSON object is expected, not {type(value).__name__}")
    given = value.get("custom_id")
    if given is not None and (not isinstance(given, str) or not given):
        raise RowError("invalid_request", f"custom_id: {given!r} is not a string with at least one character")
    if given is not None and len(given) > MOST_ID_CHARACTERS:
        raise RowError("invalid_request", f"custom_id: is longer than {MOST_ID_CHARACTERS} characters")
    if {"url", "body", "method"} & value.keys():
        return _openai(value)
    if "request" in value:
        record = _object(value, "request")
        return _Asked("helm", record, _required(record, "prompt"), True, record)
    if "article" in value:
        return _Asked("helm", {k: v for k, v in value.items() if k != "custom_id"}, value["article"], True, value)
    return _Asked("completion", value, _plain_prompt(value), True)


def _kept_record(record: dict[str, Any], prompt: Any) -> bytes:
    """A record as it is kept until it is sent back."""
    level: Iterable[Any] = [record]
    for _ in range(MOST_RECORD_LEVELS):
        level = [child for one in level for child in _children(one)]
    if level:
        raise RowError("invalid_request", f"the record is sent back, and nests more than {MOST_RECORD_LEVELS} levels")
    kept = to_line(record)
    if len(kept) > MOST_RECORD_BYTES:
        beside = {name: value for name, value in record.items() if value is not prompt}
        if len(to_line(beside)) > MOST_RECORD_BYTES:
            raise RowError(
                "invalid_request",
                f"the record is sent back, and has more than {MOST_RECORD_BYTES // 2**10} KiB beside its prompt",
            )
    return kept


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _openai(value: dict[str, Any]) -> _Asked:
    _required(value, "custom_id")
    url, body = _required(value, "url"), _object(value, "body")
    kind = URLS.get(url) if isinstance(url, str) else None
    if kind is None:
        raise RowError("unknown_url", f"url: {url!r} is none of {', '.join(URLS)}")
    if value.get("method", "POST") != "POST":
        raise RowError("invalid_request", f"method: {value['method']!r} is not POST")
    if kind == "chat":
        return _Asked(kind, body, _required(body, "messages"), False)
    return _Asked(kind, body, _plain_prompt(body), False)


def _plain_prompt(fields: dict[str, Any]) -> Any:
    given = [name for name in ("prompt", "prompt_token_ids") if fields.get(name) is not None]
    if len(given) != 1:
        problem = "give either prompt or prompt_token_ids, not both" if given else "prompt: is missing"
        raise RowError("invalid_request", problem)
    value = fields[given[0]]
    if given[0] == "prompt_token_ids" and not isinstance(value, list):
        raise RowError(
            "invalid_request", f"prompt_token_ids: a list of token ids is expected, not {type(value).__name__}"
        )
    return value


def _checked_messages(messages: Any) -> list[dict[str, str]]:
    """Messages of text, each with its role; parts of a content are joined."""
    if not isinstance(messages, list) or not messages:
        raise RowError("invalid_request", "messages: a list of at least one message is expected")
    found = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError("invalid_request", f"{where}: an object with role and content is expected")
        for name, value in message.items():
            if name not in ("role", "content") and value not in (None, [], ""):
                raise RowError("unsupported", f"{where}.{name}: is not supported")
        found.append({"role": message["role"], "content": _content(where, message.get("content"))})
    return found


def _content(where: str, content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise RowError("invalid_request", f"{where}.content: a string is expected")
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError("unsupported", f"{where}.content: parts of type {kind!r} are not supported, only text")
    return "".join(part["text"] for part in parts)


def _required(fields: dict[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise RowError("invalid_request", f"{name}: is missing")
    return fields[name]


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = _required(fields, name)
    if not isinstance(value, dict):
        raise RowError("invalid_request", f"{name}: a JSON object is expected, not {type(value).__name__}")
    return value
