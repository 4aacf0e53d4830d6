"""Settings that flags fill: dataclasses whose fields give their range and their flag.

The module imports nothing heavy.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import check_int, check_number, check_share, check_text, quoted

GREEDY_BELOW = 1e-5  # a temperature below this is greedy
MAX_LOGPROBS = 20  # likeliest tokens per step, as in OpenAI's chat API
# Characters of all stop strings of a sequence together, since they are looked for after each token.
MAX_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 4096
PROMPT = "prompt"  # value of `protect` that protects the whole prompt
DECODE = "decode"
PREFILL = "prefill"
NEW_TOKENS = 256  # most new tokens of a sequence, at every door, if nobody says how many
ORIGINAL = "original"
ROLLING = "rolling"


def setting(default: Any, help: str = "", **rules: Any) -> Any:
    """Return a dataclass field that `check_settings` checks.

    If it has a help text, `flags.add_flags_of` also makes a flag for it.

    rules, for the value: `low` and `high` of a whole number; `high` of a number from 0; `share` for
        a number in (0, 1]; `choices`.
    rules, for the flag: `flag`, its name if it is not the field's; `usual`, the default that the
        help shows; `metavar`, `nargs` and `action` as in argparse.
    """
    return field(default=default, metadata={"help": help, **rules})


def check_settings(settings: Any) -> None:
    """Check every `setting` of a frozen dataclass, and turn numpy's numbers into Python's.

    Raise UsageError, which begins with the field's name, if a value is wrong.
    """
    for f in fields(settings):
        value = getattr(settings, f.name)
        rules = f.metadata
        annotation = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        kind, _, optional = annotation.partition(" | ")
        if not rules or (value is None and optional):
            continue
        if kind == "bool" and not isinstance(value, bool):
            raise UsageError(f"{f.name}: {quoted(value)} is not true or false")
        if kind == "int":
            value = check_int(f.name, value, rules["low"], rules.get("high"))
        elif kind == "float":
            share = rules.get("share", False)
            value = (
                check_share(f.name, value)
                if share
                else check_number(f.name, value, rules.get("high"))
            )
        if "choices" in rules and value not in rules["choices"]:
            raise UsageError(
                f"{f.name}: {quoted(value)} is not one of {', '.join(map(str, rules['choices']))}"
            )
        object.__setattr__(settings, f.name, value)


@dataclass(frozen=True)
class SamplingParams:
    """The rules by which tokens are chosen and a sequence ends. A request or flags fill it.

    Raises UsageError, which names the field, for a value out of range.
    """

    # Most new tokens of a sequence. It may be 0 if prompt_logprobs is set.
    max_tokens: int = setting(NEW_TOKENS, low=0)
    # In [0, 2], as in OpenAI's API. Below 1e-5, choosing is greedy.
    temperature: float = setting(
        0.0, "0: the likeliest token; above 0, up to 2: drawn at random", high=2.0, metavar="T"
    )
    # In [0, 1]; 1 is off. None uses the value of the model's generation_config.json, or 1.
    top_p: float | None = setting(
        None,
        "draw from the likeliest tokens with this probability in sum; 1 is off (the model's)",
        high=1.0,
        metavar="P",
    )
    # 0 is off. None uses the value of the model's generation_config.json, or 0.
    top_k: int | None = setting(
        None, "draw from the K likeliest tokens; 0 is off (the model's)", low=0, metavar="K"
    )
    # From 0 to 2**63 - 1.
    seed: int = setting(0, "seed of the draws", metavar="N", low=0, high=2**63 - 1)
    # Strings that end a sequence. One string, a list or None are accepted too.
    stop: tuple[str, ...] = setting(
        (), "end an answer at this text; may be repeated", metavar="TEXT", action="append"
    )
    # Continue after the end-of-sequence token.
    ignore_eos: bool = setting(False, "go on after the end-of-sequence token")
    # Return the log-probability of each new token and those of this many likeliest tokens, up to
    # 20. None returns none.
    logprobs: int | None = setting(None, low=0, high=MAX_LOGPROBS)
    # The same for the tokens of the prompt. If an eviction policy acts while decoding, prompt
    # tokens beyond its budget are fed in decode steps, so that it acts on them.
    prompt_logprobs: int | None = setting(None, low=0, high=MAX_LOGPROBS)
    # Token ids that the sequence takes one after another, whatever the other settings choose.
    # `logprobs` (1 if it is None) are those of these tokens.
    score: tuple[int, ...] | None = setting(None)
    # "decode" takes each token of `score` in a decode step, like generated tokens, so that eviction
    # acts on them. "prefill" gives the results of the full cache, in one pass over the prompt and
    # these tokens.
    score_mode: str = setting(DECODE, choices=(DECODE, PREFILL))
    # Tokens that end a sequence and are not in its text: at most 4,096.
    stop_token_ids: tuple[int, ...] = setting(())
    # Divides logits above 0 of tokens that occurred before, and multiplies those below 0. 1 is off;
    # None uses the value of the model's generation_config.json.
    repetition_penalty: float | None = setting(None)
    # The answer is a chat's. If the model writes channels, stop strings end its content only.
    # `Model.for_chat` sets it.
    is_chat: bool = setting(False)

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "stop", _check_stop(self.stop))
        object.__setattr__(
            self, "stop_token_ids", _check_token_ids("stop_token_ids", self.stop_token_ids)
        )
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise UsageError(
                f"repetition_penalty: {self.repetition_penalty!r:.60} must be above 0; 1 is off"
            )
        if self.score is not None:
            self._check_score()
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise UsageError(
                "max_tokens: 0 must be at least 1, unless the prompt is scored (prompt_logprobs; "
                "echo in batch files)"
            )

    def _check_score(self) -> None:
        """Check `score` and store it as plain integers. Set max_tokens to their number."""
        given: Any = self.score
        given = given.tolist() if hasattr(given, "tolist") else given
        if not isinstance(given, list | tuple) or not given:
            raise UsageError(f"score: {self.score!r:.60} is not a list of at least one token id")
        if self.prompt_logprobs is not None:
            raise UsageError(
                "prompt_logprobs: cannot be combined with `score`; leave one of them out"
            )
        object.__setattr__(
            self, "score", tuple(check_int("score", token, low=0) for token in given)
        )
        object.__setattr__(self, "max_tokens", len(given))
        object.__setattr__(self, "logprobs", 1 if self.logprobs is None else self.logprobs)

    def changed(self, **values: Any) -> SamplingParams:
        """Return a copy with other values, which are right. Long lists are not checked again."""
        found = copy(self)
        for name, value in values.items():
            object.__setattr__(found, name, value)
        return found

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is chosen, without drawing."""
        return self.temperature < GREEDY_BELOW


def _check_stop(value: object) -> tuple[str, ...]:
    """Return stop strings as a tuple. Raise UsageError unless they are short, non-empty strings."""
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        raise UsageError(f"stop: {quoted(value)} is not a string or a list of strings")
    if len(strings) > MAX_STOP_CHARACTERS:
        raise UsageError(
            f"stop: has {len(strings)} strings, at most {MAX_STOP_CHARACTERS}; give fewer"
        )
    for s in strings:
        if not isinstance(s, str) or not s:
            raise UsageError(f"stop: {quoted(s)} is not a string with at least one character")
        check_text("stop", s)
    if sum(map(len, strings)) > MAX_STOP_CHARACTERS:
        raise UsageError(
            f"stop: the strings have more than {MAX_STOP_CHARACTERS} characters in all; shorten "
            "them"
        )
    return tuple(strings)


def _check_token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return token ids as a tuple; raise UsageError, which names `name`, for other values."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name}: {quoted(value)} is not a list of token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise UsageError(
            f"{name}: has {len(value)} token ids, at most {MAX_STOP_TOKEN_IDS}; give fewer"
        )
    return tuple(check_int(name, token, low=0) for token in value)


SIZES = ("heavy_ratio", "recent_ratio", "heavy_size", "recent_size")


@dataclass(frozen=True)
class EvictionSettings:
    """Settings of an eviction policy that keeps heavy and recent KV entries of each sequence.

    Their number is a share of the prompt, a count, or a share of the prompt and the new tokens
    together. If recent ones are not given, there are as many as heavy ones. If nothing is given,
    both ratios are 0.1. Raises UsageError for a setting out of range.
    """

    # In (0, 1]: int(ratio x prompt tokens) heavy KV entries, at least 1.
    heavy_ratio: float | None = setting(
        None,
        "heavy-hitter KV entries: 0.2 is 20% of the prompt's tokens, and as many recent ones (0.1)",
        flag="--hh-ratio",
        metavar="R",
        share=True,
    )
    # In (0, 1]: int(ratio x prompt tokens) recent KV entries, at least 1.
    recent_ratio: float | None = setting(
        None,
        "recent KV entries: 0.2 is 20% of the prompt's tokens (as --hh-ratio)",
        metavar="R",
        share=True,
    )
    # A count. 0 is what the H2O paper calls "local".
    heavy_size: int | None = setting(
        None,
        "heavy-hitter KV entries, a count; 0 keeps recent ones only",
        flag="--hh-size",
        metavar="N",
        low=0,
    )
    recent_size: int | None = setting(
        None, "recent KV entries, a count (as --hh-size)", metavar="N", low=1
    )
    # False evicts KV entries of the prompt only and keeps all generated ones (FlexGen's H2O without
    # --hh-all).
    while_decoding: bool = setting(
        True, "false: drop KV entries of the prompt only", flag="--hh-all"
    )
    # "original" or "rolling". With "rolling", the position of a KV entry while decoding is its rank
    # among those that its sequence holds (StreamingLLM, Xiao et al. 2024, section 3.2). So
    # sequences may grow past the positions that the model was trained for. It needs rotary
    # embeddings.
    positions: str = setting(
        ORIGINAL,
        "rolling: positions count the kept KV entries only, so that a text may outgrow the model's "
        "length",
        choices=(ORIGINAL, ROLLING),
    )
    # In (0, 1], instead of ratios and sizes: int(kv_budget x (prompt tokens + most new tokens)) KV
    # entries, at least 1. Half of them are heavy and half recent; an odd one is recent.
    kv_budget: float | None = setting(
        None,
        "KV entries: 0.2 is 20% of prompt + --max-tokens, half of them heavy hitters and half "
        "recent",
        metavar="R",
        share=True,
    )
    # In (0, 1], instead of ratios, sizes and kv_budget: a share of the bytes that the prompt and
    # most new tokens take in bf16. As many KV entries stay as fit this share. What is stored beside
    # packed entries counts too.
    kv_bytes: float | None = setting(
        None,
        "KV cache in this share of its bytes, such as 20%; the method is chosen, unless --eviction "
        "names one",
        usual="100%",
        metavar="SHARE",
        share=True,
    )
    # KV entries of the prompt that are never evicted: the first N, or "prompt" for all of them.
    # They count as entries that stay. Heavy and recent ones share the rest as they would share all.
    protect: str | int | None = setting(
        None,
        "KV entries that always stay: prompt, all of the prompt's; N, its first N; none",
        metavar="N|prompt|none",
    )

    def __post_init__(self) -> None:
        for kind in ("heavy", "recent"):
            if (
                getattr(self, f"{kind}_ratio") is not None
                and getattr(self, f"{kind}_size") is not None
            ):
                raise UsageError(
                    f"{kind}_size: both a count and a share of {kind} KV entries are given; give "
                    "one of them"
                )
        check_settings(self)
        given = [name for name in SIZES if getattr(self, name) is not None]
        given += [name for name in ("kv_bytes", "kv_budget") if getattr(self, name) is not None]
        if len(given) > 1 and given[-1] not in SIZES:
            raise UsageError(
                f"{given[-1]}: says how many KV entries stay, and so does {given[0]}; leave one of "
                "them out"
            )
        if self.heavy_size == 0 and self.recent_size is None and self.recent_ratio is None:
            raise UsageError(
                "heavy_size: 0 alone leaves nothing; say with recent_size how many recent KV "
                "entries stay"
            )
        object.__setattr__(self, "protect", _check_protect(self.protect))


def _check_protect(value: str | int | None) -> str | int | None:
    """Return PROMPT, a number of KV entries, or None, from the value of a flag or a caller.

    Raise UsageError for other values.
    """
    if value is None or value in (PROMPT, "none"):
        return PROMPT if value == PROMPT else None
    if isinstance(value, str):
        if not value.isdecimal():
            raise UsageError(
                f"protect: {value!r:.60} is not prompt, none or a number of KV entries"
            )
        value = int(value)
    return check_int("protect", value, low=1)
