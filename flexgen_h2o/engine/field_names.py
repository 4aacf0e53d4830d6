"""Other names of the fields of a request, and mistyped ones.

The names are those of transformers, text-generation-inference, llama.cpp, Ollama, lm-eval, Gemini
and OpenAI's responses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from flexgen_h2o.core.units import shortened


def folded(name: str) -> str:
    """Return a name without case, hyphens and underscores: `maxTokens` is `max_tokens`."""
    return re.sub("[^a-z0-9]", "", name.lower())


# Other name -> the field with that meaning.
SAME_FIELD = {
    **dict.fromkeys(
        (
            "max_new_tokens",
            "max_output_tokens",
            "max_gen_tokens",
            "max_gen_toks",
            "max_gen_len",
            "max_tokens_to_sample",
            "max_tokens_to_generate",
            "max_generated_tokens",
            "max_decode_tokens",
            "num_new_tokens",
            "gen_len",
            "n_predict",
            "num_predict",
        ),
        "max_tokens",
    ),
    **dict.fromkeys(
        ("stop_sequences", "stop_sequence", "stop_strings", "stop_words", "stopping_strings"),
        "stop",
    ),
    "num_return_sequences": "n",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "return_full_text": "echo",
    "ignore_eos_token": "ignore_eos",
}
# Names that have this meaning only among other settings: elsewhere they are ordinary columns.
SAME_AMONG_SETTINGS = {
    "temp": "temperature",
    "until": "stop",
    "length": "max_tokens",
    "truncate": "truncate_prompt_tokens",
}
# Objects of settings that programs put beside the prompt.
SETTINGS = (
    "sampling_params",
    "sampling_parameters",
    "generation_config",
    "generation_params",
    "generation_parameters",
    "generation_kwargs",
    "generate_kwargs",
    "gen_kwargs",
    "extra_body",
)
# These hold settings in some programs, and data in others.
MAYBE_SETTINGS = (
    "options",
    "parameters",
    "params",
    "config",
    "kwargs",
    "settings",
    "generation",
    "request_params",
    "gen_config",
    "gen_params",
)
# Settings of transformers and Ollama that change no token here.
IDLE_AMONG_SETTINGS = frozenset(
    (
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "transformers_version",
        "_from_model_config",
        "num_ctx",
        "num_gpu",
        "num_thread",
        "num_batch",
        "use_mmap",
        "details",
        "decoder_input_details",
        "detokenize",
    )
)
# Settings that are not understood, with the remedy.
INSTEAD = {
    "max_length": "counts the prompt too; give max_tokens, which counts new tokens alone",
    "max_total_tokens": "counts the prompt too; give max_tokens, which counts new tokens alone",
    "min_new_tokens": "is not supported; leave it out",
    "min_length": "is not supported; leave it out",
    "eos_token_id": "is not supported; give stop_token_ids",
    "top_n_tokens": "give logprobs, the number of likeliest tokens",
    "n_probs": "give logprobs, the number of likeliest tokens",
    "num_beams": "answers are not searched by beams; leave it out",
    "num_beam_groups": "answers are not searched by beams; leave it out",
    "no_repeat_ngram_size": "is not supported; give repetition_penalty",
    "repeat_last_n": "repetition_penalty counts all tokens; leave it out",
    "typical_p": "is not supported; give top_p",
    "mirostat": "is not supported; give top_p",
}
# Settings of INSTEAD that change nothing with this value.
IDLE_VALUES: Mapping[str, object] = {
    "min_new_tokens": 0,
    "min_length": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1,
    "mirostat": 0,
    "n_predict": -1,  # llama.cpp and Ollama: no limit
    "num_predict": -1,
}
_INSTEAD = {folded(name): why for name, why in INSTEAD.items()}
_SETTINGS = frozenset(map(folded, SETTINGS))
_MAYBE_SETTINGS = frozenset(map(folded, MAYBE_SETTINGS))
DO_SAMPLE = "do_sample"
# Short fields whose mistyped names are not read as columns of data, and ordinary words that are one
# letter from them.
_SHORT = ("stop", "seed", "echo", "suffix", "top_p", "top_k", "min_p")
_WORDS = (
    *("step", "shop", "slop", "stow", "stoop", "stomp", "strop", "sop"),
    *("see", "seek", "seem", "seen", "seep", "seer", "send", "shed", "sled", "sped", "speed"),
    *("steed", "eco"),
)
PROMPTS = ("messages", "prompt", "prompt_token_ids", "text")
# Columns in which other programs have the prompt.
_LIKE_PROMPTS = ("question", "query", "input", "inputs", "instruction", "content", "document")
_LIKE_MESSAGES = ("conversation", "conversations", "dialog", "dialogue", "chat", "history", "turns")
# A name with at least this many letters may have one mistyped letter, or two.
_ONE_MISTAKE = 6
_TWO_MISTAKES = 10
_LONG = 9  # other programs' names with fewer letters are near to ordinary words
_MAX_NAME = 64  # a longer name is no field's
MAX_CHECKED = 256  # names of a line that are compared with fields, letter by letter
_KEYS = 6  # keys of an object that a message names
_KEY_CHARACTERS = 30


def own_name(name: str, known: tuple[str, ...], among_settings: bool = False) -> str | None:
    """Return the known field that `name` means, or None if it means none.

    known: names of fields. One without an underscore is a common word: it must be written exactly
    unless it stands among settings.
    """
    if len(name) > _MAX_NAME:
        return None
    same = _meanings(known, among_settings)
    return same.get(name) or same.get(folded(name))


@lru_cache
def _meanings(known: tuple[str, ...], among_settings: bool) -> Mapping[str, str]:
    """Return the fields that names mean, by the name and by the folded name."""
    same = {other: other for other in known if among_settings or _is_typical(other)}
    same |= SAME_FIELD | (SAME_AMONG_SETTINGS if among_settings else {})
    return {folded(other): own for other, own in same.items()} | same


def instead_of(name: str) -> str | None:
    """Return why a setting of other programs is not understood, with the remedy."""
    return None if len(name) > _MAX_NAME else _INSTEAD.get(folded(name))


@lru_cache(maxsize=4096)
def near_name(name: str, known: tuple[str, ...]) -> str | None:
    """Return the known field that a mistyped `name` may mean, or None if it is near none."""
    if len(name) > _MAX_NAME:
        return None
    word = folded(name)
    for other in _SHORT:
        if _is_slip(name.lower().replace("-", "_"), other):
            return other
    letters = _letters(word)
    for other, wanted, mistakes in _candidates(known):
        # A mistake changes at most two of the letters that a word has.
        if (letters ^ _letters(wanted)).bit_count() > 2 * mistakes:
            continue
        if 0 < _distance(word, wanted, mistakes) <= mistakes:
            return other
    return "max_tokens" if re.match("max.*tok", word) else None  # such as max_tok


@lru_cache
def _candidates(known: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """Return the fields that a name may be near to: field, folded, and the most mistakes."""
    long = (other for other in SAME_FIELD if len(folded(other)) >= _LONG)
    found = []
    for other in (*filter(_is_typical, known), *long, *SETTINGS, *INSTEAD, DO_SAMPLE):
        word = folded(other)
        found.append((other, word, (len(word) >= _ONE_MISTAKE) + (len(word) >= _TWO_MISTAKES)))
    return found


@lru_cache(maxsize=4096)
def _letters(word: str) -> int:
    """Return the set of a folded word's letters and digits, a bit for each."""
    return sum({1 << ord(letter) for letter in word})


def _is_slip(word: str, field: str) -> bool:
    """Return whether a lowercase word is a short field with at most one mistyped letter.

    The first letter is right, and so is the last of `top_p`: `top_n` is another name.
    """
    if word in _WORDS or word[:1] != field[0] or any(map(str.isdigit, word)):
        return False
    if "_" in field and not word.startswith(field) and word[-2:] != field[-2:]:
        return False
    return _distance(word, field, 1) <= 1


def keys_text(fields: Mapping[str, Any], wanted: tuple[str, ...]) -> str:
    """Return which keys an object has that lacks all `wanted` ones, and which may be meant."""
    keys = [
        shortened(name, _KEY_CHARACTERS) + (" (null)" if value is None else "")
        for name, value in islice(fields.items(), _KEYS)
    ]
    more = f" and {len(fields) - _KEYS} more" if len(fields) > _KEYS else ""
    found = f"found {', '.join(keys)}{more}" if keys else "the object has no key"
    for name, value in islice(fields.items(), MAX_CHECKED):
        own = _meant(name, wanted)
        if own is not None and value is not None:
            return f"{found}; did you mean {own} by {shortened(name, _KEY_CHARACTERS)}?"
    return f"{found}; give {', '.join(wanted[:-1])}{' or ' if wanted[1:] else ''}{wanted[-1]}"


def _meant(name: str, wanted: tuple[str, ...]) -> str | None:
    """Return the one of the names that another name means. None if it is near none of them."""
    word = folded(name)
    for other in wanted:
        mistakes = 1 + (len(folded(other)) >= _ONE_MISTAKE)
        if name != other and _distance(word, folded(other), mistakes) <= mistakes:
            return other
    like = {_LIKE_MESSAGES: ("messages",), _LIKE_PROMPTS: ("text", "prompt")}
    own = (one for words, names in like.items() if word in words for one in names if one in wanted)
    return next(own, None)


def is_settings(name: str, value: Any, known: tuple[str, ...]) -> bool:
    """Return whether a column of a line is an object of settings."""
    if len(name) > _MAX_NAME:
        return False
    word = folded(name)
    if word in _SETTINGS:
        return True
    return (
        word in _MAYBE_SETTINGS
        and isinstance(value, dict)
        and any(own_name(inner, known, True) or inner in INSTEAD for inner in value)
    )


def _is_typical(name: str) -> bool:
    """Return whether no column of data is likely to have a name like this field's."""
    return "_" in name or name in ("temperature", "logprobs")


def _distance(one: str, other: str, most: int) -> int:
    """Return how many letters are added, left out, changed or swapped between two words.

    A distance above `most` is returned as `most + 1`.
    """
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        earlier = before
        before = row
        row = [i]
        for j, there in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != there))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == there:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return min(row[-1], most + 1)
