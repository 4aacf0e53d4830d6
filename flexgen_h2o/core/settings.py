"""Settings that flags fill: dataclasses whose fields say their range and their flag. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import check_int, check_number, check_share, check_text

GREEDY_BELOW = 1e-5
MOST_LOGPROBS = 20  # likeliest tokens a step, as in OpenAI's chat API
MOST_STOP_CHARACTERS = 4096  # of all stop strings of a row together: they are looked for after each token
PROMPT = "prompt"  # what `protect` protects; "none" is None
DECODE, PREFILL = "decode", "prefill"
ORIGINAL, ROLLING = "original", "rolling"


def setting(default: Any, help: str = "", **rules: Any) -> Any:
    """A field that `check_settings` checks and, where it has a help text, `flags.add_flags_of` makes a flag for.

    rules: `low` and `high` of a whole number, or of a number from 0; `share`: a number in (0, 1]; `choices`. For the
    flag: `flag` (its name, if it is not the field's), `usual` (what help says of the default), and `metavar`, `nargs`
    and `action`, as argparse has them.
    """
    return field(default=default, metadata={"help": help, **rules})


def check_settings(settings: Any) -> None:
    """Check every `setting` of a frozen dataclass, and keep numpy's numbers as Python's.

    Raises UsageError that begins with the field's name.
    """
    for f in fields(settings):
        value, rules = getattr(settings, f.name), f.metadata
        kind, _, optional = str(f.type).partition(" | ")
        if not rules or (value is None and optional):
            continue
        if kind == "bool" and not isinstance(value, bool):
            raise UsageError(f"{f.name}: {value!r:.60} is not true or false")
        if kind == "int":
            value = check_int(f.name, value, rules["low"], rules.get("high"))
        elif kind == "float":
            share = rules.get("share", False)
            value = check_share(f.name, value) if share else check_number(f.name, value, rules.get("high"))
        if "choices" in rules and value not in rules["choices"]:
            raise UsageError(f"{f.name}: {value!r:.60} is not one of {', '.join(map(str, rules['choices']))}")
        object.__setattr__(settings, f.name, value)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a row ends; checked here, UsageError names the field.

    max_tokens: most new tokens of a row. temperature: below 1e-5 is greedy. top_p: in [0, 1], 1 is off.
    top_k: 0 is off. seed: 0 .. 2**63 - 1. stop: strings that end a row (one string, a list or None are taken too).
    ignore_eos: go on after the end-of-sequence token. logprobs: give the log-probability of each new token and those of
    so many of the likeliest, up to 20; None gives none. stop_token_ids: tokens that end a row and are not in its text.
    repetition_penalty: divides logits above 0 of tokens that were there before, and multiplies others; 1 is off, None
    takes that of the model's generation_config.json. prompt_logprobs: the same of the prompt's tokens; then
    max_tokens may be 0. With a policy that drops columns while decoding, prompt tokens beyond its budget are taken in
    decode steps, so that it acts on them.

    score: token ids that the row takes one after another, whatever the others say; `logprobs` (1 where it is None) are
    theirs. score_mode: "decode" takes each in a decode step, as generated tokens, so that eviction acts on them;
    "prefill" gives what the full cache gives, in one pass over the prompt and them.
    """

    max_tokens: int = setting(32, low=0)
    temperature: float = setting(0.0, "0: the likeliest token; above 0: drawn at random", metavar="T")
    top_p: float = setting(1.0, "draw from the likeliest tokens with this probability in sum", high=1.0, metavar="P")
    top_k: int = setting(0, "draw from the K likeliest tokens; 0 is off", low=0, metavar="K")
    seed: int = setting(0, "seed of the draws", metavar="N", low=0, high=2**63 - 1)
    stop: tuple[str, ...] = setting((), "end an answer at this text; may be repeated", metavar="TEXT", action="append")
    ignore_eos: bool = setting(False, "go on after the end-of-sequence token")
    logprobs: int | None = setting(None, low=0, high=MOST_LOGPROBS)
    prompt_logprobs: int | None = setting(None, low=0, high=MOST_LOGPROBS)
    score: tuple[int, ...] | None = setting(None)
    score_mode: str = setting(DECODE, choices=(DECODE, PREFILL))
    stop_token_ids: tuple[int, ...] = setting(())
    repetition_penalty: float | None = setting(None)

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "stop", _check_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _check_token_ids("stop_token_ids", self.stop_token_ids))
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise UsageError(f"repetition_penalty: {self.repetition_penalty!r:.60} must be above 0; 1 is off")
        if self.score is not None:
            self._check_score()
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise UsageError(
                "max_tokens: 0 must be at least 1, unless the prompt is scored (prompt_logprobs; echo in batch files)"
            )

    def _check_score(self) -> None:
        """And keep `score` as plain numbers, as many as max_tokens."""
        given: Any = self.score
        given = given.tolist() if hasattr(given, "tolist") else given
        if not isinstance(given, list | tuple) or not given:
            raise UsageError(f"score: {self.score!r:.60} is not a list of at least one token id")
        if self.prompt_logprobs is not None:
            raise UsageError("prompt_logprobs: cannot be combined with `score`; leave one of them out")
        object.__setattr__(self, "score", tuple(check_int("score", token, low=0) for token in given))
        object.__setattr__(self, "max_tokens", len(given))
        object.__setattr__(self, "logprobs", 1 if self.logprobs is None else self.logprobs)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without drawing."""
        return self.temperature < GREEDY_BELOW


def _check_stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        raise UsageError(f"stop: {value!r:.60} is not a string or a list of strings")
    for s in strings:
        if not isinstance(s, str) or not s:
            raise UsageError(f"stop: {s!r:.60} is not a string with at least one character")
        check_text("stop", s)
    if sum(map(len, strings)) > MOST_STOP_CHARACTERS:
        raise UsageError(f"stop: the strings have more than {MOST_STOP_CHARACTERS} characters in all; shorten them")
    return tuple(strings)


def _check_token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name}: {value!r:.60} is not a list of token ids")
    return tuple(check_int(name, token, low=0) for token in value)


SIZES = ("heavy_ratio", "recent_ratio", "heavy_size", "recent_size")


@dataclass(frozen=True)
class EvictionSettings:
    """Settings of a policy that keeps heavy + recent columns a row: as shares of the row's prompt, as counts, or as a
    share of the row's prompt and its new tokens together.

    heavy_ratio, recent_ratio: in (0, 1]; int(ratio x prompt tokens) columns, at least 1. heavy_size, recent_size:
    columns; heavy 0 is what the H2O paper calls "local". What is not given of recent is as heavy; nothing at all is
    0.1 each. while_decoding: False drops columns of the prompt only and keeps all that are generated (FlexGen's H2O
    without --hh-all). positions: "original", or "rolling": while decoding a column's position is its rank among those
    that its row holds (StreamingLLM, Xiao et al. 2024, section 3.2), so that rows may grow past the positions that the
    model was trained for. Needs rotary embeddings. kv_budget: instead of ratios and sizes, in (0, 1]; int(kv_budget x
    (prompt tokens + most new tokens)) columns, at least 1, half of them heavy and half recent, an odd one recent.

    kv_bytes: instead of ratios, sizes and kv_budget, in (0, 1]; as many columns as fit this share of the bytes that
    prompt and most new tokens take in bf16, beside what lies beside packed columns.

    protect: columns of the prompt that never leave: the first N, or "prompt", all of them. They count as columns that
    stay; heavy and recent ones share what is left as they would share all.

    Raises UsageError for a setting out of range.
    """

    heavy_ratio: float | None = setting(
        None,
        "heavy-hitter KV entries: 0.2 is 20% of the prompt's tokens, and as many recent ones (0.1)",
        flag="--hh-ratio",
        metavar="R",
        share=True,
    )
    recent_ratio: float | None = setting(
        None, "recent KV entries: 0.2 is 20% of the prompt's tokens (as --hh-ratio)", metavar="R", share=True
    )
    heavy_size: int | None = setting(
        None, "heavy-hitter KV entries, a count; 0 keeps recent ones only", flag="--hh-size", metavar="N", low=0
    )
    recent_size: int | None = setting(None, "recent KV entries, a count (as --hh-size)", metavar="N", low=1)
    while_decoding: bool = setting(True, "false: drop KV entries of the prompt only", flag="--hh-all")
    positions: str = setting(
        ORIGINAL,
        "rolling: positions count the kept KV entries only, so that a text may outgrow the model's length",
        choices=(ORIGINAL, ROLLING),
    )
    kv_budget: float | None = setting(
        None,
        "KV entries: 0.2 is 20% of prompt + --max-tokens, half of them heavy hitters and half recent",
        metavar="R",
        share=True,
    )
    kv_bytes: float | None = setting(
        None,
        "KV cache in this share of its bytes, such as 20%; the method is chosen, unless --eviction names one",
        usual="100%",
        metavar="SHARE",
        share=True,
    )
    protect: str | int | None = setting(
        None, "KV entries that always stay: prompt, all of the prompt's; N, its first N; none", metavar="N|prompt|none"
    )

    def __post_init__(self) -> None:
        for kind in ("heavy", "recent"):
            if getattr(self, f"{kind}_ratio") is not None and getattr(self, f"{kind}_size") is not None:
                raise UsageError(
                    f"{kind}_size: both a count and a share of {kind} KV entries are given; give one of them"
                )
        check_settings(self)
        given = [name for name in SIZES if getattr(self, name) is not None]
        given += [name for name in ("kv_bytes", "kv_budget") if getattr(self, name) is not None]
        if len(given) > 1 and given[-1] not in SIZES:
            raise UsageError(
                f"{given[-1]}: says how many KV entries stay, and so does {given[0]}; leave one of them out"
            )
        if self.heavy_size == 0 and self.recent_size is None and self.recent_ratio is None:
            raise UsageError("heavy_size: 0 alone leaves nothing; say with recent_size how many recent KV entries stay")
        object.__setattr__(self, "protect", _check_protect(self.protect))


def _check_protect(value: str | int | None) -> str | int | None:
    """PROMPT, a number of columns, or None, from what a flag or a caller gives."""
    if value is None or value in (PROMPT, "none"):
        return PROMPT if value == PROMPT else None
    if isinstance(value, str):
        if not value.isdecimal():
            raise UsageError(f"protect: {value!r:.60} is not prompt, none or a number of KV entries")
        value = int(value)
    return check_int("protect", value, low=1)
