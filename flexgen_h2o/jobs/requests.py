"""Read lines of the input as requests; a bad line raises RowError.

responses.py makes rows of finished requests. Field names and meanings are those of OpenAI's
completions and chat APIs and of vLLM's additions.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import TooLongError, UsageError, internal_reason, json_reason
from flexgen_h2o.core.settings import GREEDY_BELOW
from flexgen_h2o.core.units import check_text, kind_of_json, quoted, shortened
from flexgen_h2o.engine.field_names import (
    DO_SAMPLE,
    IDLE_AMONG_SETTINGS,
    IDLE_VALUES,
    MAX_CHECKED,
    PROMPTS,
    instead_of,
    is_settings,
    keys_text,
    near_name,
    own_name,
)
from flexgen_h2o.engine.prompts import encode_prompt
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import CODE_INTERNAL, CODE_NOT_FINITE, Sequence
from flexgen_h2o.jobs.input import MAX_ID_CHARACTERS, Line
from flexgen_h2o.jobs.output import to_line
from flexgen_h2o.kvcache.eviction import Eviction, Full
from flexgen_h2o.kvcache.eviction.policy import check_budgets
from flexgen_h2o.models.load import Model

FULL = Full()
MAX_MESSAGE_CHARACTERS = 500  # an error message may quote the request, which may have any length
# Limits of a record that is sent back: bytes besides its prompt (a window keeps thousands of
# records), and levels of nesting.
MAX_RECORD_BYTES = 2**14
MAX_RECORD_LEVELS = 100
# Members of a list or an object of a request. Lists that are longer say nothing: a context of a
# million tokens has fewer messages.
MAX_MESSAGES = 16_384
MAX_PARTS = 16_384
MAX_TEMPLATE_OPTIONS = 256

Kind = Literal["completion", "chat", "helm"]
URLS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# Fields of requests, in a batch line and in a request to the server. Null is the same as absent.
# What the prompt is.
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
# Types and ranges of these fields, and of the length, are those of `SamplingParams`.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "repetition_penalty",
)
LENGTH_FIELDS = ("max_completion_tokens", "max_tokens")
# What a chat template gets besides messages.
TEMPLATE_FIELDS = ("reasoning_effort", "chat_template_kwargs")
# How the prompt becomes tokens, as in vLLM.
ENCODING_FIELDS = ("add_special_tokens", "truncate_prompt_tokens")
# Where a chat's prompt ends, and documents for the template.
CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "documents")
# Values of these fields that change nothing in a text completion.
IDLE_IN_COMPLETIONS: dict[str, Any] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "documents": [],
}
# Fields of whole numbers, which some clients write as 2.0.
COUNT_FIELDS = (
    *LENGTH_FIELDS,
    "top_k",
    "seed",
    "logprobs",
    "top_logprobs",
    "n",
    "best_of",
    "truncate_prompt_tokens",
)
# Fields that change nothing, whatever their value. The model of --model answers, and the answer's
# body names it.
IDLE_FIELDS = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "request_id",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "priority",
    "request_type",
    "parallel_tool_calls",
    "verbosity",
    "prediction",
    "return_token_ids",
    "cache_salt",
)
# Fields of which only these values are supported: any other would change the answer.
ONLY: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "chat_template": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "max_repetition_pattern_size": (0,),
    "min_repetition_pattern_size": (0,),
    "repetition_min_count": (0,),
}
# Fields for which docs/reference/not-supported.md has a remedy.
HAS_REMEDY = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tools",
    "functions",
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "logit_bias",
    "suffix",
    "stream",
    "url",
    "content",
)
FIELDS = frozenset(
    (
        *PROMPT_FIELDS,
        *SAMPLING_FIELDS,
        *TEMPLATE_FIELDS,
        *ENCODING_FIELDS,
        *CHAT_FIELDS,
        *COUNT_FIELDS,
        "echo",
        "stream",
        "stream_options",
        *IDLE_FIELDS,
        *ONLY,
    )
)
# Fields that other programs may name in another way, or users mistype.
NAMED = (*SAMPLING_FIELDS, *LENGTH_FIELDS, *TEMPLATE_FIELDS, *COUNT_FIELDS, *ENCODING_FIELDS, *ONLY)
# Keys of a plain line that are no columns: its own, and those of other formats.
FORMAT_KEYS = ("custom_id", "article", "request", "method", "url", "body")
MAX_COLUMN_CHARACTERS = 40
COLUMNS_SHOWN = 8
MAX_COLUMNS = 100  # names of columns without effect that are remembered
# Fields that have no effect if the other field's value is "none".
IGNORED_IF_NONE = {"tools": "tool_choice", "functions": "function_call"}
# Types of text parts in a message's content, in OpenAI's two APIs, and the member that has the
# text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MESSAGE_TYPES = ("text", "message")  # the type of a whole message, as some clients write it
REASONING = ("reasoning_content", "reasoning")  # names of the thoughts of an earlier answer


_FIELD_NAME = re.compile(r"[\w.\[\]-]+")


class RowError(Exception):
    """A request that cannot be run. Its output row has the reason, and the job continues.

    code: one of the codes in docs/reference/jobs.md.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(shortened(message, MAX_MESSAGE_CHARACTERS))
        self.code = code

    @property
    def field(self) -> str | None:
        """The field that the message begins with, such as `tools`; None if it names none."""
        name, colon, _ = str(self).partition(":")
        return name if colon and name.isascii() and _FIELD_NAME.fullmatch(name) else None

    @property
    def is_internal(self) -> bool:
        """Whether the request is not at fault. The HTTP status is 500 then, and 400 otherwise."""
        return self.code in (CODE_INTERNAL, CODE_NOT_FINITE)


@contextmanager
def row_errors(where: str = "", names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn any error of one row into its RowError, so that other rows continue.

    where: added to the message of a RowError.
    names: by a field that a message begins with, the name that the row gives it.

    A request to end the process is not caught. Tokenizers and templates are other people's code and
    raise anything, including pyo3's PanicException, which is not an `Exception`.
    """
    try:
        yield
    except RowError as error:
        own = error.field or ""
        name = (names or {}).get(own, own)
        if not where and name == own:
            raise
        raise RowError(error.code, f"{name}{str(error)[len(own) :]}{where}") from error
    except RecursionError as error:
        # Quoting the value in an error fails at fewer levels than parsing it.
        raise RowError("invalid_json", "not valid JSON (nested too deeply)") from error
    except BaseException as error:
        if interrupts.asks_to_end(error):
            raise
        raise RowError(CODE_INTERNAL, internal_reason(error)) from error


def _invalid(message: str) -> RowError:
    return RowError("invalid_request", message)


@dataclass(eq=False)
class Request(Sequence):
    """A sequence with what its answer's row needs, made by `RequestReader`.

    `index` is the line number. `prompt` is kept only if `echo`. `params` have a seed of their own.
    """

    kind: Kind = "completion"  # the format of the answer
    custom_id: str = ""  # the line's own id, or the one used in its place
    asked_model: str | None = None  # the model that the request names
    # JSON of a HELM request, to send back with the answer. Parsed it would take about thirty times
    # the memory.
    record: bytes | None = None
    row: int = 0  # number of the row in the input, as in `Line`
    echo: bool = False  # whether the answer begins with the prompt
    # Who gets the answer of the server, a Ticket or an OpenBatch; `Service` sets it.
    owner: Any = None
    held_bytes: int = 0  # its `most_bytes` when it was read; `JobRun` sets it

    def release(self) -> None:
        super().release()
        self.record = None

    @property
    def most_bytes(self) -> int:
        return super().most_bytes + sys.getsizeof(self.record)


@dataclass(frozen=True)
class ClientRequest:
    """The sequences of a request to the server, made by `RequestReader.served`."""

    id: str  # 24 hex digits, made for this request
    # `n` requests per prompt; those of one prompt follow one another. `index` is the place here.
    requests: tuple[Request, ...]
    n: int = 1  # answers per prompt
    stream: bool = False  # whether answers are sent in pieces
    usage: bool = False  # whether the last piece of a stream has the token counts
    created: int = field(default_factory=lambda: int(time.time()))  # when it was read

    @property
    def is_chat(self) -> bool:
        return self.requests[0].kind == "chat"


@dataclass(frozen=True)
class RequestReader:
    """Makes requests of lines."""

    model: Model  # encodes prompts and applies its chat template
    defaults: SamplingParams  # values of fields that a line does not have
    eviction: Eviction = FULL  # the eviction policy of the run
    # Whether texts are messages in the model's chat template. None: lines of a .txt file and
    # `{"text": ...}` are messages if the model has a template, and `{"prompt": ...}` is not.
    chat: bool | None = None
    system: str | None = None  # a system message before each text that is a message
    endpoint: str | None = None  # the endpoint of all lines; None for any
    # Lines by the name of a column that they have and that nothing reads, up to MAX_COLUMNS names.
    # The reader fills it, and a job tells the user.
    columns: Counter[str] = field(default_factory=Counter)
    # False: fields are checked, prompts are not tokenized, and requests cannot be run.
    encodes: bool = True
    # The most tokens of a prompt and its answer together that a server takes; None: the model's
    # positions. A request that does not limit its answer gets what its prompt leaves.
    most_tokens: int | None = None

    def texts_settings(self) -> dict[str, Any]:
        """Return the settings that answers to texts also depend on, for a job's sidecar.

        Empty by default.
        """
        given = {"chat": self.chat, "system": self.system}
        given = {name: value for name, value in given.items() if value is not None}
        return {"texts": given} if given else {}

    def read(self, line: Line) -> Request:
        """Return the request of a line. Raise RowError that names the field if it cannot be run."""
        with row_errors():
            try:
                value = line.parse()
            except ValueError as error:
                if line.is_plain:
                    raise _invalid(
                        f"{error}; save the file as UTF-8 text, with shorter lines"
                    ) from error
                raise RowError("invalid_json", f"not valid JSON ({json_reason(error)})") from error
            if line.is_plain and not self.encodes:  # all such lines are alike
                return Request(line.number, (), row=line.row)
            return self.request(value, line.number, line.id_in(value), line.row)

    def request(self, value: Any, number: int, custom_id: str, row: int = 0) -> Request:
        """Return the request of a line's parsed value.

        custom_id: the line's own id, or the one used in its place.
        """
        [request] = self._requests(value, number, custom_id, None).requests
        request.row = row
        kind = "completion" if request.kind == "helm" else request.kind
        if self.endpoint is not None and kind != URLS[self.endpoint]:
            raise RowError(
                "unknown_url",
                f"url: is of another endpoint than the batch, which is for {self.endpoint}",
            )
        return request

    def columns_text(self) -> str | None:
        """Return a note on the columns that nothing reads. None if there are none."""
        names = [*self.columns]
        if not names:
            return None
        more = f" and {len(names) - COLUMNS_SHOWN} more" if len(names) > COLUMNS_SHOWN else ""
        shown = ", ".join(names[:COLUMNS_SHOWN])
        return (
            f"columns of the input that are not read: {shown}{more}; answers have the custom_id "
            "of their line"
        )

    def served(self, url: str, body: Mapping[str, Any], custom_id: str, most: int) -> ClientRequest:
        """Read a request to the server with at most `most` answers."""
        value = {"custom_id": custom_id, "url": url, "body": body}
        asked = self._requests(value, 0, custom_id, most)
        for i, request in enumerate(asked.requests):
            request.index = i
        return asked

    def _requests(self, value: Any, number: int, custom_id: str, most: int | None) -> ClientRequest:
        """Read the requests of a parsed value.

        most: most answers. None: the value is a file's line, which has one answer and cannot be
        streamed.
        """
        names: dict[str, str] = {}
        with row_errors(names=names):
            kind, fields, given, is_strict = _fields_of(self._with_texts_read(value))
            record = _kept_record(fields, given) if kind == "helm" else None
            if not is_strict:
                fields = self._with_own_names(fields, names, is_record=record is not None)
            fields = _checked_fields(fields)
            n, stream, usage = _answers_of(fields, most is not None)
            prompts = _prompts_of(fields, given, kind == "chat")
            _check_count(n, prompts, most)
            params = _sampling_of(fields, kind == "chat", self.defaults)
            found: list[Request] = []
            for i, prompt in enumerate(prompts):
                name = custom_id if len(prompts) == 1 else f"{custom_id}-{i}"
                where = f" (prompt {i} of {len(prompts)})" if len(prompts) > 1 else ""
                with row_errors(where):
                    request = self._request(kind, fields, params, prompt, number + i, name)
                request.record = record
                found += [_variant(request, choice) for choice in range(n)]
            return ClientRequest(custom_id, tuple(found), n, stream, usage)

    def _request(
        self,
        kind: Kind,
        fields: Mapping[str, Any],
        params: SamplingParams,
        given: Any,
        number: int,
        custom_id: str,
    ) -> Request:
        """Return one request.

        params: those of all its prompts; see `_with_seed`.
        given: the prompt or the messages.
        """
        is_chat = kind == "chat"
        echo = _echo(fields, is_chat)
        params = _with_seed(params, fields, self.defaults, custom_id)
        options = self._template_options(fields, is_chat)
        if is_chat:
            params = self.model.for_chat(params)
        if params.stop and self.model.tokenizer is None:
            raise RowError(
                "unsupported",
                "stop: needs a tokenizer, and the model's folder has none; leave it out",
            )
        asked_model = _short_text(fields, "model")
        has_limit = any(name in fields for name in LENGTH_FIELDS)
        encode = self._encoding(fields, is_chat, params.max_tokens, has_limit)
        ids = self._prompt_ids(given, encode, options if is_chat else None)
        if not has_limit and self.most_tokens is not None:
            room = self.most_tokens - len(ids) + 1  # The newest token needs no position.
            if 0 < room < params.max_tokens:
                params = params.changed(max_tokens=room)
        try:
            if self.encodes:
                check_budgets(self.eviction, self.model.spec, len(ids), max(1, params.max_tokens))
        except UsageError as error:
            raise RowError("does_not_fit", str(error)) from error
        return Request(
            number,
            array("i", ids),
            given if echo and isinstance(given, str) and encode["keep"] is None else None,
            params,
            kind=kind,
            custom_id=custom_id,
            asked_model=asked_model,
            echo=echo,
        )

    def _with_texts_read(self, value: Any) -> Any:
        """Return the value of a line with its text, if it has one, as a prompt or as messages."""
        others = ("url", "body", "method", "request", "article")
        if not isinstance(value, dict) or any(value.get(name) is not None for name in others):
            return value
        if value.get("text") is not None:
            name = "text"
            is_chat = self.model.has_chat_template if self.chat is None else self.chat
        elif isinstance(value.get("prompt"), str):
            name = "prompt"
            is_chat = bool(self.chat)
        else:
            return value
        text = value[name]
        if not isinstance(text, str):
            raise _invalid(f"text: a string is expected, not {kind_of_json(text)}")
        rest = {other: of_other for other, of_other in value.items() if other != name}
        if not is_chat:
            return {**rest, "prompt": text}
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {**rest, "messages": [*before, {"role": "user", "content": text}]}

    def _with_own_names(
        self, fields: Mapping[str, Any], names: dict[str, str], is_record: bool
    ) -> dict[str, Any]:
        """Return the fields of a plain line by their own names, and without columns of data.

        Other programs' names are understood, also in an object of settings. Raise RowError for a
        name that is nearly a field's, and for a setting that is not understood.

        names: gets the name in the line of each field that has another one there.
        is_record: the line is sent back whole, so that no column is lost.
        """
        found: dict[str, Any] = {}
        unknown = 0
        for name, value in fields.items():
            if value is None or name in FORMAT_KEYS:
                continue
            if is_settings(name, value, NAMED):
                for inner, one in _object(dict(fields), name).items():
                    where = f"{name}.{inner}"
                    _put(found, names, where, _own_setting(where, inner, one, True), one)
                continue
            if name in FIELDS:
                own: str | None = name
            elif unknown < MAX_CHECKED:
                own = _own_setting(name, name, value, False)
            else:  # of a wide table, where mistyped names are not looked for
                own = own_name(name, NAMED)
            unknown += own is None
            _put(found, names, name, own, value)
            if own is None and not is_record and len(self.columns) < MAX_COLUMNS:
                self.columns[shortened(name, MAX_COLUMN_CHARACTERS)] += 1
        return _with_do_sample(found, self.defaults)

    def _encoding(
        self, fields: Mapping[str, Any], is_chat: bool, max_tokens: int, has_limit: bool
    ) -> dict[str, Any]:
        """Return how the prompt becomes tokens: the arguments of `Model.encode`.

        has_limit: whether the request itself limits its answer to `max_tokens`. If not, at least
            half of the positions are for the prompt.
        """
        adds = fields.get("add_special_tokens")
        adds = not is_chat if adds is None else _flag("add_special_tokens", adds)
        keep = fields.get("truncate_prompt_tokens")
        positions = self.model.spec.max_positions
        if keep is not None:
            name = "truncate_prompt_tokens"
            if type(keep) is not int or not (keep == -1 or keep >= 1):
                raise _invalid(f"{name}: {quoted(keep)} is neither -1 nor a whole number above 0")
            if keep > positions:
                raise _invalid(f"{name}: {keep} is above the {positions} positions; lower it")
            if keep == -1:
                keep = positions - max_tokens
                keep = keep if has_limit else max(keep, positions // 2)
            if keep < 1:
                raise _invalid(
                    f"{name}: -1 leaves no token of the prompt beside {max_tokens} new ones in "
                    f"{positions} positions; lower max_tokens"
                )
        return {"add_special_tokens": adds, "keep": keep}

    def _prompt_ids(
        self, given: Any, encoding: dict[str, Any], options: dict[str, Any] | None
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt, or of messages.

        encoding: as `_encoding` returns it. options: of the chat template; None for a prompt.
        """
        if options is not None:
            given = self._chat_ids(given, options, encoding)
        elif isinstance(given, list):
            if given and isinstance(given[0], str | list):
                raise RowError(
                    "unsupported",
                    f"prompt: a single prompt is expected here, not a list of {len(given)}",
                )
            if encoding["keep"] is not None:
                given = given[-encoding["keep"] :]
        encode = partial(self.model.encode, **encoding) if self.encodes else _no_tokens
        spec = self.model.spec
        try:
            ids = encode_prompt(
                given,
                encode if self.model.tokenizer is not None else None,
                spec.vocab_size,
                spec.max_positions,
            )
        except TooLongError as error:
            raise RowError("context_length_exceeded", f"prompt: {error}") from error
        except UsageError as error:
            raise _invalid(f"prompt: {error}") from error
        if len(ids) > spec.max_positions:
            sizes = f"{len(ids)} tokens, but {self.model.name} has {spec.max_positions} positions"
            raise RowError("context_length_exceeded", f"prompt: {sizes}")
        return ids

    def _template_options(self, fields: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
        """Return what the chat template gets besides the messages, as in vLLM.

        These are `chat_template_kwargs` and, under its own name, `reasoning_effort`. Raise RowError
        for names that control how the template is called.
        """
        names = (*TEMPLATE_FIELDS, *CHAT_FIELDS)
        given = {name: fields[name] for name in names if name in fields}
        if not is_chat:
            for name, default in IDLE_IN_COMPLETIONS.items():
                if name in given and _same(given[name], default):
                    del given[name]
        if given and not is_chat:
            raise RowError(
                "unsupported", f"{next(iter(given))}: works in chat requests only; leave it out"
            )
        options = given.pop("chat_template_kwargs", {})
        if not isinstance(options, dict):
            raise _invalid(f"chat_template_kwargs: {quoted(options)} is not an object")
        _check_size("chat_template_kwargs", options, MAX_TEMPLATE_OPTIONS)
        for name in options:
            if name in self.model.reserved_options:
                raise RowError(
                    "unsupported",
                    f"chat_template_kwargs.{name}: cannot be set for the chat template; leave it "
                    "out",
                )
        effort = given.get("reasoning_effort")
        if effort is not None and effort not in EFFORTS:
            raise _invalid(f"reasoning_effort: {quoted(effort)} is none of {', '.join(EFFORTS)}")
        given |= {name: value for name, value in options.items() if value is not None}
        return self._call_options(given)

    def _call_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a template with the arguments of its call checked."""
        begins = _flag("add_generation_prompt", options.get("add_generation_prompt", True))
        if _flag("continue_final_message", options.get("continue_final_message")) and begins:
            raise _invalid(
                "continue_final_message: true goes with add_generation_prompt false; give both"
            )
        documents = options.get("documents", [])
        if not isinstance(documents, list) or not all(isinstance(one, dict) for one in documents):
            raise _invalid("documents: a list of objects is expected, with title and text")
        if documents and not self.model.reads_in_template("documents"):
            raise RowError(
                "unsupported",
                f"documents: the chat template of {self.model.name} does not read them; put their "
                "text into a message",
            )
        return options if documents else {k: v for k, v in options.items() if k != "documents"}

    def _chat_ids(self, given: Any, options: dict[str, Any], encoding: dict[str, Any]) -> list[int]:
        messages = _checked_messages(given, self.model.min_content_parts)
        if not self.model.has_chat_template:
            missing = "tokenizer" if self.model.tokenizer is None else "chat template"
            raise RowError(
                "no_chat_template",
                f"messages: {self.model.name} has no {missing}; send it as a prompt",
            )
        try:
            if not self.encodes:
                return _no_tokens("")
            return self.model.encode_chat(messages, options, **encoding)
        except TooLongError as error:
            raise RowError("context_length_exceeded", f"messages: {error}") from error
        except UsageError as error:  # what the template has made of them is no text
            raise _invalid(f"messages: {error}") from error
        except ValueError as error:
            raise _invalid(f"messages: the chat template does not take them ({error})") from error


def _no_tokens(text: str) -> list[int]:
    """Return one token for any text: what is checked does not depend on it."""
    return [0]


def _fields_of(value: Any) -> tuple[Kind, dict[str, Any], Any, bool]:
    """Return (kind, fields, prompt or messages, whether an unknown field is an error) of a line's
    value.

    Formats: OpenAI's batch lines, HELM's requests, H2O's articles, plain messages and prompts.
    """
    if not isinstance(value, dict):
        raise _invalid(f"a JSON object is expected, not {kind_of_json(value)}")
    _short_text(value, "custom_id", 1)
    if any(value.get(name) is not None for name in ("url", "body", "method")):
        _required(value, "custom_id")
        url = _required(value, "url")
        body = _object(value, "body")
        kind = URLS.get(url) if isinstance(url, str) else None
        if kind is None:
            raise RowError(
                "unknown_url", f"url: {quoted(url)} is none of {', '.join(URLS)}{_page_of('url')}"
            )
        if value.get("method") not in (None, "POST"):
            raise _invalid(f"method: {quoted(value['method'])} is not POST")
        return (
            kind,
            body,
            _required(body, "messages")
            if kind == "chat"
            else _plain_prompt(body, ("prompt", "prompt_token_ids")),
            True,
        )
    if value.get("request") is not None:
        record = _object(value, "request")
        return "helm", record, _required(record, "prompt"), False
    if value.get("article") is not None:
        return "helm", value, value["article"], False
    if (
        value.get("messages") is not None
        and value.get("prompt") is None
        and value.get("prompt_token_ids") is None
    ):
        return "chat", value, value["messages"], False
    return "completion", value, _plain_prompt(value, PROMPTS), False


def _own_setting(where: str, name: str, value: Any, among_settings: bool) -> str | None:
    """Return the field that a name of a plain line means. None if it has no effect.

    Raise RowError naming `where` if it is nearly a field, or a setting that is not understood.
    """
    if value is None or (among_settings and name in IDLE_AMONG_SETTINGS):
        return None
    if name in IDLE_VALUES and _same(value, IDLE_VALUES[name]):
        return None
    own = DO_SAMPLE if name == DO_SAMPLE else own_name(name, NAMED, among_settings)
    if among_settings and own is None and name in FIELDS and name not in PROMPT_FIELDS:
        own = name
    if own is not None:
        return own
    remedy = _remedy(name)
    if remedy or among_settings:
        raise RowError("unsupported", f"{where}: {remedy or 'is not supported; leave it out'}")
    return None


def _remedy(name: str) -> str:
    """Return what to do about an unknown name of a field. Empty if nothing is known of it."""
    instead = instead_of(name)
    if instead is not None:
        return instead
    near = near_name(name, NAMED)
    if near is None:
        return ""
    return f"is not a field; did you mean {near}? If it is a column of data, rename it"


def _put(
    found: dict[str, Any], names: dict[str, str], where: str, own: str | None, value: Any
) -> None:
    """Add a field that a plain line may give under several names, with one value.

    names: gets the name that the line gives it.
    """
    if own is None or value is None:
        return
    if own in found and not _same(found[own], value):
        raise _invalid(f"{where}: the line has another value of {own}; give one of them")
    found[own] = value
    if where != own:
        names[own] = where


def _with_do_sample(fields: dict[str, Any], defaults: SamplingParams) -> dict[str, Any]:
    """Return the fields with transformers' `do_sample` as a temperature."""
    rest = {name: value for name, value in fields.items() if name != DO_SAMPLE}
    if DO_SAMPLE not in fields:
        return rest
    if not _flag(DO_SAMPLE, fields[DO_SAMPLE]):
        return {**rest, "temperature": 0.0}
    temperature = rest.get("temperature", defaults.temperature)
    if isinstance(temperature, int | float) and temperature < GREEDY_BELOW:
        raise _invalid(f"{DO_SAMPLE}: true needs a temperature above 0; give temperature")
    return rest


def _checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null, with counts as whole numbers.

    Raise RowError naming the first field that would change the answer and is unsupported.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if name not in FIELDS:
            own = own_name(name, NAMED)
            remedy = f"is not a field; give {own}" if own else _remedy(name)
            raise RowError("unsupported", f"{name}: {remedy or 'is not supported; leave it out'}")
        if name in COUNT_FIELDS and isinstance(value, float) and value.is_integer():
            given[name] = int(value)
        if (
            name in IGNORED_IF_NONE
            and given.get(IGNORED_IF_NONE[name]) == "none"
            and isinstance(value, list)
        ):
            continue
        only = ONLY.get(name)
        if only is not None and not any(_same(value, allowed) for allowed in only):
            instead = " or ".join(map(quoted, only))
            raise RowError(
                "unsupported",
                f"{name}: {quoted(value)} is not supported"
                f"{f', only {instead}' if instead else '; leave it out'}{_page_of(name)}",
            )
    return given


def _answers_of(fields: Mapping[str, Any], may_stream: bool) -> tuple[int, bool, bool]:
    """Return the answers per prompt, whether they are streamed, and whether with token counts."""
    n = _count(fields, "n")
    if _count(fields, "best_of") not in (1, n):
        raise RowError(
            "unsupported", f"best_of: only 1 and n ({n}) are supported{_page_of('best_of')}"
        )
    stream = _flag("stream", fields.get("stream"))
    if stream and not may_stream:
        raise RowError(
            "unsupported", f"stream: true is not supported, only false{_page_of('stream')}"
        )
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise _invalid(f"stream_options: {quoted(options)} is not an object")
    return n, stream, _flag("stream_options.include_usage", options.get("include_usage"))


def _prompts_of(fields: Mapping[str, Any], given: Any, is_chat: bool) -> list[Any]:
    """Return the prompts of a request.

    OpenAI's `prompt` may be a list of texts or of lists of token ids.
    """
    is_list = not is_chat and isinstance(given, list) and given is fields.get("prompt")
    if is_list and given and isinstance(given[0], str | list):
        return list(given)
    return [given]


def _check_count(n: int, prompts: list[Any], most: int | None) -> None:
    """Raise RowError if there are more answers than allowed.

    most: as in `RequestReader._requests`.
    """
    count = n * len(prompts)
    if count <= (1 if most is None else most):
        return
    is_list = len(prompts) > 1
    if most is not None:
        name = "prompt" if is_list else "n"
        raise RowError(
            "too_many_rows",
            f"{name}: {count} answers in one request, at most {most}; ask for fewer",
        )
    if is_list:
        raise RowError(
            "unsupported", f"prompt: a single prompt is expected here, not a list of {len(prompts)}"
        )
    raise RowError("unsupported", f"n: {n} is not supported, only 1{_page_of('n')}")


def _variant(request: Request, choice: int) -> Request:
    """Return the request for answer number `choice`: all but the first get a seed of their own."""
    if not choice:
        return request
    text = f"{request.params.seed}:{choice}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    return replace(request, params=request.params.changed(seed=seed))


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name, 1)
    if type(value) is not int or value < 1:
        raise _invalid(f"{name}: {quoted(value)} is not a whole number of at least 1")
    return value


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _invalid(f"{name}: {quoted(value)} is not true or false")
    return bool(value)


def _with_seed(
    params: SamplingParams, fields: Mapping[str, Any], defaults: SamplingParams, custom_id: str
) -> SamplingParams:
    """Return the parameters of one row.

    A row without a seed gets one made of the default seed and its id, so that its answer depends on
    no other row.
    """
    if fields.get("seed", -1) != -1:
        return params
    name = f"{defaults.seed}:{custom_id}".encode("utf-8", "surrogatepass")
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
    return params.changed(seed=seed)


def _sampling_of(
    fields: Mapping[str, Any], is_chat: bool, defaults: SamplingParams
) -> SamplingParams:
    """Return the sampling that the fields ask for; absent fields come from `defaults`.

    Raise RowError naming a bad field.
    """
    given = {name: fields[name] for name in SAMPLING_FIELDS if name in fields}
    if given.get("top_k") == -1:  # vLLM: off
        given["top_k"] = 0
    seed = given.get("seed")
    if seed == -1:  # vLLM: no seed
        del given["seed"]
    elif type(seed) is int and -(2**63) <= seed < 0:  # vLLM accepts these seeds too
        given["seed"] = seed + 2**63
    lengths = [fields[name] for name in LENGTH_FIELDS if name in fields]
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
    """Return whether the prompt is a part of the answer, with log-probabilities of its own."""
    echo = _flag("echo", fields.get("echo"))
    if echo and is_chat:
        raise RowError("unsupported", "echo: works in text completions only; leave it out")
    return echo


def _num_logprobs(fields: Mapping[str, Any], is_chat: bool) -> Any:
    """Return how many of the likeliest tokens get log-probabilities; None for no log-probabilities.

    In completions `logprobs` is the number; in chat it is true, and `top_logprobs` is the number.
    """
    wanted = fields.get("logprobs")
    top = fields.get("top_logprobs")
    if not is_chat:
        if top is not None:
            raise RowError(
                "unsupported",
                "top_logprobs: works in chat requests only; give the number as logprobs",
            )
        return wanted
    if wanted is not None and not isinstance(wanted, bool):
        raise _invalid(f"logprobs: {quoted(wanted)} is not true or false")
    if top and not wanted:
        raise _invalid("top_logprobs: needs logprobs to be true")
    return (0 if top is None else top) if wanted else None


def _same(value: Any, allowed: Any) -> bool:
    """Return whether the values are equal. True and 1 are not: a count of true is a mistake."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _check_size(name: str, value: Sized, most: int) -> None:
    if len(value) > most:
        raise _invalid(f"{name}: has {len(value)} entries, at most {most}; give fewer")


def _page_of(name: str) -> str:
    """Return where to read what to do instead of a field. Empty for fields without a remedy."""
    return "; see docs/reference/not-supported.md" if name in HAS_REMEDY else ""


def _kept_record(record: dict[str, Any], prompt: Any) -> bytes:
    """Return the record as JSON.

    Raise RowError if it nests too deeply or is too large besides its prompt.
    """
    level: Iterable[Any] = [record]
    for _ in range(MAX_RECORD_LEVELS):
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise _invalid(f"the record is sent back, and nests more than {MAX_RECORD_LEVELS} levels")
    kept = to_line(record)
    if len(kept) > MAX_RECORD_BYTES:
        others = {name: value for name, value in record.items() if value is not prompt}
        if len(to_line(others)) > MAX_RECORD_BYTES:
            raise _invalid(
                f"the record is sent back, and has more than {MAX_RECORD_BYTES // 2**10} KiB "
                "beside its prompt"
            )
    return kept


def _plain_prompt(fields: dict[str, Any], wanted: tuple[str, ...]) -> Any:
    """Return the prompt of an object, in which the `wanted` keys may have one."""
    given = [name for name in ("prompt", "prompt_token_ids") if fields.get(name) is not None]
    if len(given) != 1:
        raise _invalid(
            "give either prompt or prompt_token_ids, not both"
            if given
            else f"prompt: is missing; {keys_text(fields, wanted)}"
        )
    value = fields[given[0]]
    if given[0] == "prompt_token_ids" and not isinstance(value, list):
        raise _invalid(
            f"prompt_token_ids: a list of token ids is expected, not {kind_of_json(value)}"
        )
    return value


def _checked_messages(messages: Any, min_content_parts: int | None) -> list[dict[str, Any]]:
    """Return text messages in the form that a chat template gets.

    min_content_parts: as in `_content`.
    """
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages: a list of at least one message is expected")
    _check_size("messages", messages, MAX_MESSAGES)
    return [
        _checked_message(f"messages[{i}]", message, min_content_parts)
        for i, message in enumerate(messages)
    ]


def _checked_message(where: str, message: Any, min_content_parts: int | None) -> dict[str, Any]:
    """Return a message's role and content, and what else templates read.

    These are a name, and the thoughts of an earlier answer.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _invalid(f"{where}: an object with role and content is expected")
    found: dict[str, Any] = {"role": _check_text(f"{where}.role", message["role"])}
    others: dict[str, str] = {}
    for name, value in message.items():
        if name in ("role", "content") or value in (None, [], ""):
            continue
        if name == "name" or name in REASONING:
            if not isinstance(value, str):
                raise _invalid(f"{where}.{name}: {quoted(value)} is not a string")
            others[REASONING[0] if name in REASONING else name] = _check_text(
                f"{where}.{name}", value
            )
        elif name != "type" or value not in MESSAGE_TYPES:
            raise RowError("unsupported", f"{where}.{name}: is not supported")
    content = message.get("content")
    if content is None and REASONING[0] in others:
        content = ""
    found["content"] = _content(where, content, min_content_parts)
    return found | others


def _content(where: str, content: Any, min_content_parts: int | None) -> str | list[dict[str, str]]:
    """Return the content as text, or as parts if the chat template reads several
    (`Model.min_content_parts`).

    Otherwise several parts become lines of one text. Both are as in vLLM.
    """
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _invalid(f"{where}.content: a string is expected")
    _check_size(f"{where}.content", parts, MAX_PARTS)
    texts = [_check_text(f"{where}.content", _text_of_part(where, part)) for part in parts]
    if min_content_parts is not None and len(texts) >= max(2, min_content_parts):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _text_of_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise RowError(
            "unsupported",
            f"{where}.content: parts of type {quoted(kind)} are not supported, only text"
            f"{_page_of('content')}",
        )
    return text


def _check_text(where: str, text: str) -> str:
    try:
        return check_text(where, text)
    except UsageError as error:
        raise _invalid(str(error)) from error


def _required(fields: dict[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise _invalid(f"{name}: is missing; {keys_text(fields, (name,))}")
    return fields[name]


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = _required(fields, name)
    if not isinstance(value, dict):
        raise _invalid(f"{name}: a JSON object is expected, not {kind_of_json(value)}")
    return value


def _short_text(fields: Mapping[str, Any], name: str, least: int = 0) -> str | None:
    """Return a string of at most MAX_ID_CHARACTERS characters, or None if the field is absent."""
    value = fields.get(name)
    if value is not None and (not isinstance(value, str) or len(value) < least):
        raise _invalid(
            f"{name}: {quoted(value)} is not a string"
            + (" with at least one character" if least else "")
        )
    if value is not None and len(value) > MAX_ID_CHARACTERS:
        raise _invalid(f"{name}: is longer than {MAX_ID_CHARACTERS} characters")
    return value
