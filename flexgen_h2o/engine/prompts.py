"""Prompts in and completions out: reading and checking prompts, writing the output file.

This module knows nothing of models. `encode` is a function from text to token ids, or None without
a tokenizer.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.core.errors import FlexgenError, TooLongError, UsageError, json_reason
from flexgen_h2o.core.files import MAX_LINE_BYTES, json_line, read_lines, replacing
from flexgen_h2o.core.units import check_int, is_text

if TYPE_CHECKING:
    from flexgen_h2o.engine.sampling import TokenLogprobs


Encode = Callable[[str], list[int]]

# Codes of prompts that have no answer through no fault of theirs: their logits are not finite, or
# there was an exception that no check foresaw.
CODE_NOT_FINITE = "not_finite"
CODE_INTERNAL = "internal_error"
BENCHMARK_TEXT = "Paris is the capital city of"
# Ids below this are special tokens in every family's vocabulary (pad, begin, end, unknown).
_FIRST_PLAIN_ID = 4


@dataclass(frozen=True)
class Prompt:
    """One prompt of a run."""

    # Its place in the input.
    index: int
    token_ids: tuple[int, ...]
    # None if the prompt was given as token ids.
    text: str | None


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. RequestTable makes it."""

    # The place of the prompt in the input.
    index: int
    # The text of the prompt; None if it was given as token ids.
    prompt: str | None
    # None without a tokenizer.
    text: str | None
    token_ids: list[int]
    # "stop", "length" or "error".
    finish_reason: str
    # One for each of `token_ids`, if asked for.
    logprobs: list[TokenLogprobs] | None = None
    # One for each token of the prompt, None for the first, if asked for.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # Why there is no answer, in runs that continue without such sequences. finish_reason is then
    # "error".
    error: str | None = None
    # CODE_NOT_FINITE or CODE_INTERNAL; "" without an error.
    error_code: str = ""

    @property
    def logprob(self) -> float:
        """The log-probability of all of token_ids.

        Raises UsageError if no `logprobs` were asked for.
        """
        return math.fsum(one.logprob for one in self._logprobs_of("logprob", 0))

    @property
    def is_greedy(self) -> bool:
        """Whether each of token_ids was the likeliest token.

        Raises UsageError if not even one likeliest token was asked for.
        """
        found = self._logprobs_of("is_greedy", 1)
        return all(one.top[0][0] == token for token, one in zip(self.token_ids, found, strict=True))

    def _logprobs_of(self, name: str, least: int) -> list[TokenLogprobs]:
        found = self.logprobs or []
        if len(found) < len(self.token_ids) or not all(len(one.top) >= least for one in found):
            raise UsageError(
                f"{name}: the result has none; ask for SamplingParams(logprobs={least}) or more"
            )
        return found


def read_prompts(path: Path, encode: Encode | None, vocab_size: int) -> list[Prompt]:
    """Return the prompts of a UTF-8 file in its order.

    A `.txt` file has one prompt per line. A `.jsonl` file has one object per line, with `prompt` or
    `prompt_token_ids`. Blank lines are skipped, so `index` counts prompts, not lines. Other keys of
    a JSON object are ignored, and null is the same as absent. Spaces around a text prompt are kept.
    Token ids must be in [0, vocab_size).

    Raise UsageError that names `--prompts FILE:LINE`.
    """
    read_line = {".txt": lambda line: line, ".jsonl": prompt_of_json}.get(path.suffix.lower())
    if read_line is None:
        raise UsageError(
            f"--prompts {path}: the file name must end in .txt (one prompt per line) or .jsonl"
        )
    prompts: list[Prompt] = []
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

    Raise UsageError if the file cannot be read or a line has more than MAX_LINE_BYTES.
    """
    try:
        for number, (raw, should_continue) in enumerate(read_lines(path), start=1):
            place = f"{flag} {path}:{number}"
            if should_continue:
                raise UsageError(
                    f"{place}: is longer than {MAX_LINE_BYTES // 2**20} MiB; shorten it"
                )
            text = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            try:
                line = text.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(f"{place}: not UTF-8 text; save the file as UTF-8") from error
            if line.strip():
                yield place, line
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror or error}") from error


def prompts_from_python(
    inputs: Sequence[str | Sequence[int]],
    encode: Encode | None,
    vocab_size: int,
    positions: int | None = None,
    name: str = "prompts",
) -> list[Prompt]:
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
    prompts: list[Prompt] = []
    for i, given in enumerate(inputs):
        try:
            prompts.append(make_prompt(i, given, encode, vocab_size, positions))
        except UsageError as error:
            raise UsageError(f"{name}[{i}]: {error}") from error
    return prompts


def benchmark_prompts(
    count: int, length: int, encode: Encode | None, vocab_size: int
) -> list[Prompt]:
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
    return [Prompt(i, token_ids, text) for i in range(count)]


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


def write_outputs(path: Path, completions: Iterable[Completion]) -> None:
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


def output_row(completion: Completion) -> dict[str, Any]:
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
            f"give either prompt or prompt_token_ids, {'not both' if given else 'neither is there'}"
        )
    [(key, value)] = given.items()
    if key == "prompt" and not isinstance(value, str):
        raise UsageError(
            f"prompt must be a string, not {type(value).__name__}; for token ids use "
            "prompt_token_ids"
        )
    if key == "prompt_token_ids" and not isinstance(value, list):
        raise UsageError(
            f"prompt_token_ids must be a list of whole numbers, not {type(value).__name__}"
        )
    return value


def make_prompt(
    index: int, given: object, encode: Encode | None, vocab_size: int, positions: int | None = None
) -> Prompt:
    """Return a prompt made of a text or of token ids.

    Raise UsageError that says what is wrong with it. Raise TooLongError if there are more ids than
    `positions`, before they are checked one by one. For a text, `encode` raises it.
    """
    if not isinstance(given, str):
        size = len(given) if isinstance(given, list | tuple) or getattr(given, "ndim", 0) else 0  # type: ignore[arg-type]
        if positions is not None and size > positions:
            raise TooLongError(
                f"{size} tokens, but the model has {positions} positions; shorten it"
            )
        return Prompt(index, _check_ids(given, vocab_size), None)
    if encode is None:
        raise UsageError(
            "a text prompt needs a tokenizer and this model has none (random weights never do); "
            "give prompt_token_ids"
        )
    if not is_text(given):
        raise UsageError("the prompt holds half of a surrogate pair, which is not text; remove it")
    return Prompt(index, _check_ids(encode(given), vocab_size), given)


def _check_ids(given: object, vocab_size: int) -> tuple[int, ...]:
    """Return token ids as plain ints.

    Arrays and tensors are read by their `tolist`, without importing their libraries.
    """
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, list | tuple):
        raise UsageError(f"a prompt is a string or a list of token ids, not {type(given).__name__}")
    ids = tuple(v.item() if hasattr(v, "item") else v for v in values)
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"token id {value!r:.60} is not a whole number")
        if not 0 <= value < vocab_size:
            raise UsageError(
                f"token id {value!r:.60} is outside the model's vocabulary of {vocab_size}"
            )
    if not ids:
        raise UsageError("the prompt has no tokens; give at least one")
    return ids
