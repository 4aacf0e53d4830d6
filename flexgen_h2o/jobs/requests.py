"""Lines of the input as requests. A bad line is a RowError. Finished requests as rows: responses.py.

Field names and meanings are those of OpenAI's completions and chat APIs and of vLLM's additions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import TooLongError, UsageError, internal_reason, json_reason
from flexgen_h2o.core.units import check_text, shortened
from flexgen_h2o.engine.prompts import CODE_INTERNAL, CODE_NOT_FINITE, Prompt, make_prompt
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.input import MOST_ID_CHARACTERS, Line
from flexgen_h2o.jobs.output import to_line
from flexgen_h2o.kvcache.eviction import Eviction, Full
from flexgen_h2o.kvcache.eviction.policy import check_budgets
from flexgen_h2o.models.load import Model

FULL = Full()
# Codes of rows that failed through no fault of theirs.
NOT_FINITE = CODE_NOT_FINITE
INTERNAL = CODE_INTERNAL
MOST_MESSAGE_CHARACTERS = 500  # of an error: it may quote the request, which may have any length
# Of a record that is sent back: bytes besides its prompt, since a window keeps thousands, and levels of nesting.
MOST_RECORD_BYTES, MOST_RECORD_LEVELS = 2**14, 100

Kind = Literal["completion", "chat", "helm"]
URLS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}

SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "stop_token_ids", "repetition_penalty"}
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
OF_TEMPLATE = ("reasoning_effort", "chat_template_kwargs")  # what a chat template gets besides messages
LENGTH = ("max_completion_tokens", "max_tokens")
# Counts, which some clients write as 2.0.
WHOLE = frozenset({*LENGTH, "top_k", "seed", "logprobs", "top_logprobs"})
# They change nothing in the answer. `model` is that of --model; the answer's body names it.
WITHOUT_EFFECT = frozenset(
    {
        "model", "user", "metadata", "store", "service_tier", "request_id", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "priority", "stream_options", "request_type", "parallel_tool_calls", "verbosity",
        "prediction", "return_token_ids", "cache_salt",
    }
)  # fmt: skip
# Fields that must have one of these values, or null: any other would change the answer.
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "suffix": ("",), "use_beam_search": (False,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "length_penalty": (1,),
    "min_p": (0,), "min_tokens": (0,), "logit_bias": ({},), "bad_words": ([],),
    "allowed_token_ids": (), "prompt_logprobs": (), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "truncate_prompt_tokens": (),
    "add_special_tokens": (True,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "chat_template": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "return_tokens_as_token_ids": (False,), "include_reasoning": (True,), "documents": ([],),
    "logits_processors": ([],), "mm_processor_kwargs": ({},), "vllm_xargs": ({},),
}  # fmt: skip
# Of these fields, what a choice of "none" leaves without effect.
NOT_CHOSEN = {"tools": "tool_choice", "functions": "function_call"}
# Parts of a message's content that are text, in OpenAI's two APIs, each with the member that has it.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MESSAGE_TYPES = ("text", "message")  # of a message as a whole, as some clients write it
REASONING = ("reasoning_content", "reasoning")  # names of an earlier answer's thoughts
KNOWN = {
    *SAMPLING, *LENGTH, *WITHOUT_EFFECT, *OF_TEMPLATE, *ONLY, "logprobs", "top_logprobs", "echo", "prompt",
    "prompt_token_ids", "messages",
}  # fmt: skip


class RowError(Exception):
    """A request that cannot be run: its row says why, and the job goes on. code: one of docs/reference/jobs.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(shortened(message, MOST_MESSAGE_CHARACTERS))
        self.code = code

    @property
    def is_ours(self) -> bool:
        """Whether the request is not at fault: HTTP's status is 500 then, not 400."""
        return self.code in (INTERNAL, NOT_FINITE)


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
        raise RowError(INTERNAL, internal_reason(error)) from error


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


@dataclass(frozen=True)
class RequestReader:
    """Makes requests of lines.

    defaults: of the fields that a line does not have. eviction: the run's. chat: whether texts are messages in the
    model's chat template; None: lines of a .txt file and `{"text": ...}` are if it has one, `{"prompt": ...}` is not.
    system: a message before each text that is one.
    """

    model: Model
    defaults: SamplingParams
    eviction: Eviction = FULL
    chat: bool | None = None
    system: str | None = None

    def texts_settings(self) -> dict[str, Any]:
        """Return what the answers to texts depend on besides, for a job's sidecar; nothing by default."""
        given = {"chat": self.chat, "system": self.system}
        given = {name: value for name, value in given.items() if value is not None}
        return {"texts": given} if given else {}

    def read(self, line: Line) -> Request:
        """RowError for a line that cannot be run; its message names the field."""
        with row_errors():
            try:
                value = line.parse()
            except ValueError as error:
                if line.is_plain:
                    raise _invalid(f"{error}; save the file as UTF-8 text, with shorter lines") from error
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
        kind, fields, given, is_strict = _fields_of(self._with_texts_read(value))
        record = _kept_record(fields, given) if kind == "helm" else None
        _check_fields(fields, is_strict)
        is_chat = kind == "chat"
        echo = _echo(fields, is_chat)
        params = _sampling_of(fields, is_chat, self.defaults, custom_id)
        options = self._template_options(fields, is_chat)
        if is_chat:
            params = self.model.for_chat(params)
        if params.stop and self.model.tokenizer is None:
            raise RowError("unsupported", "stop: needs a tokenizer, and the model's folder has none; leave it out")
        asked_model = _short_text(fields, "model")
        prompt = self._prompt(number, self._chat_ids(given, options) if is_chat else given)
        prompt = Prompt(prompt.index, prompt.token_ids, prompt.text if echo else None)
        try:
            check_budgets(self.eviction, self.model.spec, len(prompt.token_ids), max(1, params.max_tokens))
        except UsageError as error:
            raise RowError("does_not_fit", str(error)) from error
        return Request(kind, custom_id, prompt, params, asked_model, record, row, echo)

    def _with_texts_read(self, value: Any) -> Any:
        """Return the value of a line with its text, if it has one, as a prompt or as messages."""
        if not isinstance(value, dict) or not value.keys().isdisjoint(("url", "body", "method", "request", "article")):
            return value
        if "text" in value:
            name, is_chat = "text", self.model.has_chat_template if self.chat is None else self.chat
        elif isinstance(value.get("prompt"), str):
            name, is_chat = "prompt", bool(self.chat)
        else:
            return value
        text = value[name]
        if not isinstance(text, str):
            raise _invalid(f"text: a string is expected, not {type(text).__name__}")
        rest = {other: of_other for other, of_other in value.items() if other != name}
        if not is_chat:
            return {**rest, "prompt": text}
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {**rest, "messages": [*before, {"role": "user", "content": text}]}

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

    def _template_options(self, fields: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
        """What the chat template gets besides the messages, as in vLLM: `chat_template_kwargs`, and `reasoning_effort`
        under its own name. RowError for names that say how the template is called."""
        given = {name: fields[name] for name in OF_TEMPLATE if fields.get(name) is not None}
        if given and not is_chat:
            raise RowError("unsupported", f"{next(iter(given))}: works in chat requests only; leave it out")
        options = given.pop("chat_template_kwargs", {})
        if not isinstance(options, dict):
            raise _invalid(f"chat_template_kwargs: {_quoted(options)} is not an object")
        for name in options:
            if name in self.model.reserved_options:
                raise RowError(
                    "unsupported", f"chat_template_kwargs.{name}: cannot be set for the chat template; leave it out"
                )
        effort = given.get("reasoning_effort")
        if effort is not None and effort not in EFFORTS:
            raise _invalid(f"reasoning_effort: {_quoted(effort)} is none of {', '.join(EFFORTS)}")
        return {**given, **options}

    def _chat_ids(self, given: Any, options: dict[str, Any]) -> list[int]:
        messages = _checked_messages(given, self.model.least_parts)
        if not self.model.has_chat_template:
            missing = "tokenizer" if self.model.tokenizer is None else "chat template"
            raise RowError("no_chat_template", f"messages: {self.model.name} has no {missing}; send it as a prompt")
        try:
            return self.model.encode_chat(messages, options)
        except TooLongError as error:
            raise RowError("context_length_exceeded", f"messages: {error}") from error
        except UsageError as error:  # what the template has made of them is no text
            raise _invalid(f"messages: {error}") from error
        except ValueError as error:
            raise _invalid(f"messages: the chat template does not take them ({error})") from error


def _fields_of(value: Any) -> tuple[Kind, dict[str, Any], Any, bool]:
    """(kind, fields of the request, its prompt or messages, is a field that nobody knows an error?) of a line's value.

    Formats: OpenAI's batch lines, HELM's requests, H2O's articles, plain messages and prompts.
    """
    if not isinstance(value, dict):
        raise _invalid(f"a JSON object is expected, not {type(value).__name__}")
    _short_text(value, "custom_id", 1)
    if any(value.get(name) is not None for name in ("url", "body", "method")):
        _required(value, "custom_id")
        url, body = _required(value, "url"), _object(value, "body")
        kind = URLS.get(url) if isinstance(url, str) else None
        if kind is None:
            raise RowError("unknown_url", f"url: {url!r} is none of {', '.join(URLS)}")
        if value.get("method") not in (None, "POST"):
            raise _invalid(f"method: {value['method']!r} is not POST")
        return kind, body, _required(body, "messages") if kind == "chat" else _plain_prompt(body), True
    if value.get("request") is not None:
        record = _object(value, "request")
        return "helm", record, _required(record, "prompt"), False
    if value.get("article") is not None:
        return "helm", value, value["article"], False
    if value.get("messages") is not None and value.get("prompt") is None and value.get("prompt_token_ids") is None:
        return "chat", value, value["messages"], False
    return "completion", value, _plain_prompt(value), False


def _check_fields(fields: Mapping[str, Any], is_strict: bool) -> None:
    """RowError naming the first field that would change the answer and cannot. Null is as good as absent."""
    for name, value in fields.items():
        if value is None:
            continue
        if name not in KNOWN and is_strict:
            raise RowError("unsupported", f"{name}: is not supported")
        if name in NOT_CHOSEN and fields.get(NOT_CHOSEN[name]) == "none" and isinstance(value, list):
            continue
        if name in ONLY and not any(_same(value, allowed) for allowed in ONLY[name]):
            instead = " or ".join(map(repr, ONLY[name])) or "leave it out"
            raise RowError("unsupported", f"{name}: {_quoted(value)} is not supported, only {instead}")


def _sampling_of(fields: Mapping[str, Any], is_chat: bool, defaults: SamplingParams, custom_id: str) -> SamplingParams:
    """What the fields ask for; what they do not say comes from `defaults`. RowError naming a bad one.

    A row without a seed gets one made of the default seed and its id, so that its answer depends on no other row.
    """
    fields = {name: _whole(value) if name in WHOLE else value for name, value in fields.items()}
    given = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    if given.get("top_k") == -1:  # off, in vLLM
        given["top_k"] = 0
    seed = given.get("seed")
    if seed == -1:  # none, in vLLM
        del given["seed"]
    elif type(seed) is int and -(2**63) <= seed < 0:  # vLLM takes them too
        given["seed"] = seed + 2**63
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
        raise RowError("unsupported", "echo: works in text completions only; leave it out")
    return bool(echo)


def _num_logprobs(fields: Mapping[str, Any], is_chat: bool) -> Any:
    """How many of the likeliest tokens; None for no log-probabilities. A number, in chat true with `top_logprobs`."""
    wanted, top = fields.get("logprobs"), fields.get("top_logprobs")
    if not is_chat:
        if top is not None:
            raise RowError("unsupported", "top_logprobs: works in chat requests only; give the number as logprobs")
        return wanted
    if wanted is not None and not isinstance(wanted, bool):
        raise _invalid(f"logprobs: {_quoted(wanted)} is not true or false")
    if top and not wanted:
        raise _invalid("top_logprobs: needs logprobs to be true")
    return (0 if top is None else top) if wanted else None


def _whole(value: Any) -> Any:
    """A whole number that is written with a point, as a count; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
        raise _invalid("give either prompt or prompt_token_ids, not both" if given else "prompt: is missing")
    value = fields[given[0]]
    if given[0] == "prompt_token_ids" and not isinstance(value, list):
        raise _invalid(f"prompt_token_ids: a list of token ids is expected, not {type(value).__name__}")
    return value


def _checked_messages(messages: Any, least_parts: int | None) -> list[dict[str, Any]]:
    """Messages of text as a chat template gets them. least_parts: as of `_content`."""
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages: a list of at least one message is expected")
    return [_checked_message(f"messages[{i}]", message, least_parts) for i, message in enumerate(messages)]


def _checked_message(where: str, message: Any, least_parts: int | None) -> dict[str, Any]:
    """Its role and content, and what templates read besides: a name, and the thoughts of an earlier answer."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _invalid(f"{where}: an object with role and content is expected")
    found: dict[str, Any] = {"role": _check_text(f"{where}.role", message["role"])}
    others: dict[str, str] = {}
    for name, value in message.items():
        if name in ("role", "content") or value in (None, [], ""):
            continue
        if name == "name" or name in REASONING:
            if not isinstance(value, str):
                raise _invalid(f"{where}.{name}: {_quoted(value)} is not a string")
            others[REASONING[0] if name in REASONING else name] = _check_text(f"{where}.{name}", value)
        elif name != "type" or value not in MESSAGE_TYPES:
            raise RowError("unsupported", f"{where}.{name}: is not supported")
    content = message.get("content")
    if content is None and REASONING[0] in others:
        content = ""
    found["content"] = _content(where, content, least_parts)
    return found | others


def _content(where: str, content: Any, least_parts: int | None) -> str | list[dict[str, str]]:
    """A text. Several parts stay parts if the chat template reads them (`Model.least_parts`), and are lines otherwise:
    both as in vLLM."""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _invalid(f"{where}.content: a string is expected")
    texts = [_check_text(f"{where}.content", _text_of_part(where, part)) for part in parts]
    if least_parts is not None and len(texts) >= max(2, least_parts):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _text_of_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise RowError("unsupported", f"{where}.content: parts of type {_quoted(kind)} are not supported, only text")
    return text


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
