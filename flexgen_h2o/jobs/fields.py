"""The fields of a request: what they mean here, which have no effect, and which would and are not supported.

Names and meanings are those of OpenAI's completions and chat API, and of vLLM's additions to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_h2o.errors import UsageError
from flexgen_h2o.sampling import SamplingParams

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
