"""Prompts in and completions out: reading and checking prompts, writing the output file.

This module knows nothing of models. `encode` is a function from text to token ids, or None without
a tokenizer.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter, abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Any

from flexgen_h2o.core.errors import FlexgenError, TooLongError, UsageError, json_reason
from flexgen_h2o.core.files import (
    MAX_LINE_BYTES,
    is_being_written,
    json_line,
    read_lines,
    replacing,
)
from flexgen_h2o.core.foreign_files import HEAD_BYTES, kind_of, where_else
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.core.units import check_int, is_text, kind_of_json, quoted
from flexgen_h2o.engine.field_names import is_settings, keys_text, own_name
from flexgen_h2o.engine.sequence import Sequence

Encode = Callable[[str], list[int]]

# Settings of lines that jobs read.
_SETTINGS = ("max_tokens", "max_completion_tokens", *(f.name for f in fields(SamplingParams)))
_BOM = b"\xef\xbb\xbf"
BENCHMARK_TEXT = "Paris is the capital city of"
# Ids below this are special tokens in every family's vocabulary (pad, begin, end, unknown).
_FIRST_PLAIN_ID = 4


def read_prompts(path: Path, encode: Encode | None, vocab_size: int) -> list[Sequence]:
    """Return the prompts of a UTF-8 file in its order.

    A `.txt` file has one prompt per line. A `.jsonl` file has one object per line, with `prompt` or
    `prompt_token_ids`. Blank lines are skipped, so `index` counts prompts, not lines. Other keys of
    a JSON object are ignored, and null is the same as absent. Spaces around a text prompt are kept.
    Token ids must be in [0, vocab_size).

    Raise UsageError that names `--prompts FILE:LINE`.
    """
    read_line = {".txt": lambda line: line, ".jsonl": prompt_of_json}.get(path.suffix.lower())
    if read_line is None:
        what = kind_of(path, b"", "prompt") or where_else(str(path))
        raise UsageError(
            f"--prompts {path}: the file name must end in .txt (one prompt per line) or .jsonl"
            f"{f'; it {what}' if what.startswith(('is ', 'has ')) else f'; {what}' if what else ''}"
        )
    prompts: list[Sequence] = []
    for place, line in lines_of(path, "--prompts"):
        try:
            prompts.append(make_prompt(len(prompts), read_line(line), encode, vocab_size))
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
    if not prompts:
        raise UsageError(f"--prompts {path}: no prompt in it, only blank lines or nothing")
    return prompts


def lines_of(path: Path, flag: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a UTF-8 file that are not blank, each after its `FLAG FILE:LINE`.

    Raise UsageError if the file cannot be read or a line has more than MAX_LINE_BYTES. Raise it
    also if the last line has no newline and a process is still writing the file.
    """
    try:
        for number, (raw, should_continue) in enumerate(read_lines(path), start=1):
            place = f"{flag} {path}:{number}"
            if should_continue:
                raise UsageError(
                    f"{place}: is longer than {MAX_LINE_BYTES // 2**20} MiB; shorten it"
                )
            if not raw.endswith(b"\n"):
                check_complete(path, place)
            what = kind_of(path, raw[:HEAD_BYTES], "prompt") if number == 1 else None
            if what is not None:
                raise UsageError(f"{flag} {path}: {what}")
            try:
                line = without_bom(raw).removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                found = "UTF-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "not UTF-8"
                raise UsageError(f"{place}: {found} text; save the file as UTF-8") from error
            if line.strip():
                yield place, line
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror or error}") from error


def without_bom(raw: bytes) -> bytes:
    """Return a line without byte order marks before it.

    In a file that was joined of others they may precede any line.
    """
    while raw.startswith(_BOM):
        raw = raw.removeprefix(_BOM)
    return raw


def check_complete(path: Path, place: str) -> None:
    """Raise UsageError if a file whose last line has no newline is still being written.

    place: that line, for the error.
    """
    if is_being_written(path):
        raise UsageError(
            f"{place}: has no newline at its end, and another process is still writing to the "
            "file; wait for its end, and run again"
        )


def prompts_from_python(
    inputs: abc.Sequence[str | abc.Sequence[int]],
    encode: Encode | None,
    vocab_size: int,
    positions: int | None = None,
    name: str = "prompts",
) -> list[Sequence]:
    """Return prompts from strings and token ids, in any mix.

    Token ids are lists, tuples, 1-D numpy arrays or torch tensors of ints. They are checked like
    those of a file. No inputs give no prompts.

    Raise UsageError that names `prompts[i]`, or `name` in place of `prompts`.

    positions: see `make_prompt`.
    """
    if isinstance(inputs, str | bytes):
        raise UsageError(
            f"{name}: a list of {name} is needed, not one string; write [{name.removesuffix('s')}]"
        )
    if isinstance(inputs, Mapping) or not isinstance(inputs, Iterable):
        raise UsageError(f"{name}: a list of {name} is needed, not {type(inputs).__name__}")
    prompts: list[Sequence] = []
    for i, given in enumerate(inputs):
        try:
            prompts.append(make_prompt(i, given, encode, vocab_size, positions))
        except UsageError as error:
            raise UsageError(f"{name}[{i}]: {error}") from error
    return prompts


def benchmark_prompts(
    count: int, length: int, encode: Encode | None, vocab_size: int
) -> list[Sequence]:
    """Return `count` copies of FlexGen's benchmark prompt, each of exactly `length` tokens.

    The text's tokens are repeated after what the tokenizer puts first (BOS). FlexGen pads with
    masked tokens on the left instead. With encode=None the ids are random with a fixed seed and
    depend on `length` and `vocab_size` only. They leave out the four special ids if the vocabulary
    has more.

    Raise UsageError for bad arguments, and if the tokenizer does not belong to the model.
    """
    check_int("number of prompts", count, low=1)
    check_int("--prompt-len", length, low=1)
    check_int("vocab_size", vocab_size, low=1)
    text: str | None = None
    if encode is not None and (whole := encode(BENCHMARK_TEXT)):
        # The prefix is what a tokenizer puts around an empty text, as far as the real text starts
        # with it.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(encode(""), whole, strict=False))
        prefix = [first for first, _ in same]
        body = whole[len(prefix) :] or whole
        ids = [*prefix, *islice(cycle(body), length)][:length]
        text = BENCHMARK_TEXT if ids == whole else None
    else:
        low = _FIRST_PLAIN_ID if vocab_size > _FIRST_PLAIN_ID else 0
        generator = random.Random(0)
        ids = [low + int(generator.random() * (vocab_size - low)) for _ in range(length)]
    try:
        token_ids = _check_ids(ids, vocab_size)
    except UsageError as error:
        raise UsageError(f"the tokenizer does not belong to the model: {error}") from error
    return [Sequence(i, token_ids, text) for i in range(count)]


def check_output_path(path: Path) -> None:
    """Raise UsageError, before the run, if --output could not be written after it."""
    if path.suffix.lower() != ".jsonl":
        raise UsageError(f"--output {path}: the file name must end in .jsonl")
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        raise UsageError(f"--output {path}: is a folder; name a file in it")
    if not folder.is_dir():
        raise UsageError(f"--output {path}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output {path}: no permission to write in {folder}")


def write_outputs(path: Path, completions: Iterable[Sequence]) -> None:
    """Write completions as JSON lines in input order. The file appears whole or not at all.

    Raise FlexgenError that names --output if it cannot be written (a full disk, a folder that went
    away).
    """
    try:
        with replacing(path) as file:
            for completion in sorted(completions, key=lambda c: c.index):
                file.write(json_line(output_row(completion)) + "\n")
    except OSError as error:
        raise FlexgenError(f"--output {path}: {error.strerror or error}") from error


def output_row(completion: Sequence) -> dict[str, Any]:
    """Return a completion as JSON, without log-probabilities.

    The output files of batch have those.
    """
    return {
        "index": completion.index,
        "prompt": completion.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _with_each_name_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members as a dict. Raise ValueError if a name occurs twice.

    Python would keep the last value and say nothing of the others.
    """
    found = dict(members)
    if len(found) < len(members):
        name = Counter(name for name, _ in members).most_common(1)[0][0]
        raise ValueError(f"{name!r:.60} stands twice in one object; give it once")
    return found


# This decoder refuses Python's NaN and Infinity, and numbers that would become infinite: they could
# not be written as JSON again.
STRICT_JSON = json.JSONDecoder(
    parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_with_each_name_once
)


def object_of_json(line: str) -> dict[str, Any]:
    """Return the JSON object in a line of a .jsonl file."""
    try:
        body = STRICT_JSON.decode(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not valid JSON ({json_reason(error)})") from error
    if not isinstance(body, dict):
        raise UsageError('a JSON object is expected, such as {"prompt": "text"}')
    return body


def prompt_of_json(line: str) -> object:
    """Return the value of the one prompt key that a line of a .jsonl file must have."""
    body = object_of_json(line)
    given = {key: body[key] for key in ("prompt", "prompt_token_ids") if body.get(key) is not None}
    if len(given) != 1:
        raise UsageError(
            "give either prompt or prompt_token_ids, not both"
            if given
            else f"prompt: is missing; {keys_text(body, ('prompt', 'prompt_token_ids'))}"
        )
    say_unread(body)
    [(key, value)] = given.items()
    if key == "prompt" and not isinstance(value, str):
        raise UsageError(
            f"prompt must be a string, not {kind_of_json(value)}; for token ids use "
            "prompt_token_ids"
        )
    if key == "prompt_token_ids" and not isinstance(value, list):
        raise UsageError(
            f"prompt_token_ids must be a list of whole numbers, not {kind_of_json(value)}"
        )
    return value


def say_unread(body: Mapping[str, Any]) -> None:
    """Tell the user, once per name, that a line has settings where only its prompt is read."""
    for name, value in body.items():
        is_setting = name == "stop" or own_name(name, _SETTINGS) is not None
        if value is not None and (is_setting or is_settings(name, value, _SETTINGS)):
            say_once(
                f"{name:.40} of a line is not read here; give the flag, or run the file with "
                "generate --input, which reads it"
            )


def make_prompt(
    index: int, given: object, encode: Encode | None, vocab_size: int, positions: int | None = None
) -> Sequence:
    """Return a prompt made of a text or of token ids. Raises as `encode_prompt` does."""
    text = given if isinstance(given, str) else None
    return Sequence(index, encode_prompt(given, encode, vocab_size, positions), text)


def encode_prompt(
    given: object, encode: Encode | None, vocab_size: int, positions: int | None = None
) -> tuple[int, ...]:
    """Return the token ids of a prompt, which is a text or token ids.

    Raise UsageError that says what is wrong with it. Raise TooLongError if there are more ids than
    `positions`, before they are checked one by one. For a text, `encode` raises it.
    """
    if not isinstance(given, str):
        size = len(given) if isinstance(given, list | tuple) or getattr(given, "ndim", 0) else 0  # type: ignore[arg-type]
        if positions is not None and size > positions:
            raise TooLongError(
                f"{size} tokens, but the model has {positions} positions; shorten it"
            )
        return _check_ids(given, vocab_size)
    if encode is None:
        raise UsageError(
            "a text prompt needs a tokenizer and this model has none (random weights never do); "
            "give prompt_token_ids"
        )
    if not is_text(given):
        raise UsageError("the prompt holds half of a surrogate pair, which is not text; remove it")
    return _check_ids(encode(given), vocab_size)


def _check_ids(given: object, vocab_size: int) -> tuple[int, ...]:
    """Return token ids as plain ints.

    Arrays and tensors are read by their `tolist`, without importing their libraries.
    """
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, list | tuple):
        raise UsageError(f"a prompt is a string or a list of token ids, not {kind_of_json(given)}")
    ids = tuple(v.item() if hasattr(v, "item") else v for v in values)
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"token id {quoted(value)} is not a whole number")
        if not 0 <= value < vocab_size:
            raise UsageError(
                f"token id {value!r:.60} is outside the model's vocabulary of {vocab_size}"
            )
    if not ids:
        raise UsageError("the prompt has no tokens; give at least one")
    return ids
