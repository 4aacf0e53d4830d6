"""Prompts in and completions out: reading and checking prompts, writing the output file.

Knows nothing of models: `encode` is a function from text to token ids, None without a tokenizer.
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
from flexgen_h2o.core.files import MOST_LINE_BYTES, json_line, read_lines, replacing
from flexgen_h2o.core.units import check_int, is_text

if TYPE_CHECKING:
    from flexgen_h2o.engine.sampling import TokenLogprobs


Encode = Callable[[str], list[int]]

# Codes of rows that have no answer through no fault of theirs: their logits are not finite, or something raised that
# no check foresaw.
CODE_NOT_FINITE = "not_finite"
CODE_INTERNAL = "internal_error"
BENCHMARK_TEXT = "Paris is the capital city of"
# Ids below this are special tokens in every family's vocabulary (pad, begin, end, unknown).
_FIRST_PLAIN_ID = 4


@dataclass(frozen=True)
class Prompt:
    """One prompt of a run. index: its place in the input. text: None when it was given as token ids."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True)
class Completion:
    """What was generated for the prompt at `index`.

    text: None without a tokenizer. finish_reason: stop or length. logprobs: one for each of token_ids, if asked for.
    prompt_logprobs: one for each token of the prompt, None for the first, if asked for. error: why it has no answer,
    in runs that go on beside such rows; finish_reason is then error. error_code: CODE_NOT_FINITE or CODE_INTERNAL.
    """

    index: int
    prompt: str | None
    text: str | None
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    error_code: str = ""

    @property
    def logprob(self) -> float:
        """The log-probability of all of token_ids. UsageError where no `logprobs` were asked for."""
        return math.fsum(one.logprob for one in self._logprobs_of("logprob", 0))

    @property
    def is_greedy(self) -> bool:
        """Was each of token_ids the likeliest? UsageError where not even the likeliest one's was asked for."""
        found = self._logprobs_of("is_greedy", 1)
        return all(one.top[0][0] == token for token, one in zip(self.token_ids, found, strict=True))

    def _logprobs_of(self, name: str, least: int) -> list[TokenLogprobs]:
        found = self.logprobs or []
        if len(found) < len(self.token_ids) or not all(len(one.top) >= least for one in found):
            raise UsageError(f"{name}: the result has none; ask for SamplingParams(logprobs={least}) or more")
        return found


def read_prompts(path: Path, encode: Encode | None, vocab_size: int) -> list[Prompt]:
    """Prompts of a UTF-8 file in its order: `.txt`, one a line, or `.jsonl`, `prompt` or `prompt_token_ids` a line.

    Blank lines are skipped, so `index` counts prompts, not lines; other keys of a JSON object are ignored, and null
    is the same as absent. Spaces around a text prompt are kept. Token ids must be in [0, vocab_size).
    Raises UsageError naming `--prompts FILE:LINE`.
    """
    read_line = {".txt": lambda line: line, ".jsonl": prompt_of_json}.get(path.suffix.lower())
    if read_line is None:
        raise UsageError(f"--prompts {path}: the file name must end in .txt (one prompt per line) or .jsonl")
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
    """The lines of a UTF-8 file that are not blank, each with `FLAG FILE:LINE`. UsageError for one that cannot be read
    or has more than MOST_LINE_BYTES."""
    try:
        for number, (raw, goes_on) in enumerate(read_lines(path), start=1):
            place = f"{flag} {path}:{number}"
            if goes_on:
                raise UsageError(f"{place}: is longer than {MOST_LINE_BYTES // 2**20} MiB; shorten it")
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
    inputs: Sequence[str | Sequence[int]], encode: Encode | None, vocab_size: int, positions: int | None = None,
    name: str = "prompts",
) -> list[Prompt]:  # fmt: skip
    """Prompts from strings and token ids (lists, tuples, 1-D numpy arrays or torch tensors of ints), any mix.

    Checked as those of a file; raises UsageError naming `prompts[i]`, or what else they are called. No inputs give no
    prompts. positions: as of `make_prompt`.
    """
    if isinstance(inputs, str | bytes):
        raise UsageError(f"{name}: a list of {name} is needed, not one string; write [{name.removesuffix('s')}]")
    if isinstance(inputs, Mapping) or not isinstance(inputs, Iterable):
        raise UsageError(f"{name}: a list of {name} is needed, not {type(inputs).__name__}")
    prompts: list[Prompt] = []
    for i, given in enumerate(inputs):
        try:
            prompts.append(make_prompt(i, given, encode, vocab_size, positions))
        except UsageError as error:
            raise UsageError(f"{name}[{i}]: {error}") from error
    return prompts


def benchmark_prompts(count: int, length: int, encode: Encode | None, vocab_size: int) -> list[Prompt]:
    """`count` copies of FlexGen's benchmark prompt, each exactly `length` tokens.

    The text's tokens are repeated after what the tokenizer puts first (BOS); FlexGen pads with masked tokens on the
    left instead. With encode=None: seeded ids that depend on `length` and `vocab_size` only, without the four special
    ones where the vocabulary has more. Raises UsageError.
    """
    check_int("number of prompts", count, low=1)
    check_int("--prompt-len", length, low=1)
    check_int("vocab_size", vocab_size, low=1)
    text: str | None = None
    if encode is not None and (whole := encode(BENCHMARK_TEXT)):
        # What a tokenizer puts around an empty text, as far as the real one starts with it, is its prefix.
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
    """Refuse, before the run, an --output that could not be written after it: UsageError."""
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
    """Write completions as JSON lines in input order; the file appears whole or not at all.

    Raises FlexgenError naming --output when it cannot be written (a full disk, a folder that went away).
    """
    try:
        with replacing(path) as file:
            for completion in sorted(completions, key=lambda c: c.index):
                file.write(json_line(output_row(completion)) + "\n")
    except OSError as error:
        raise FlexgenError(f"--output {path}: {error.strerror or error}") from error


def output_row(completion: Completion) -> dict[str, Any]:
    """A completion as JSON, without log-probabilities: the files of batch have them."""
    return {
        "index": completion.index, "prompt": completion.prompt, "text": completion.text,
        "token_ids": completion.token_ids, "finish_reason": completion.finish_reason,
    }  # fmt: skip


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _with_each_name_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a name that stands twice, Python would keep the last value and say nothing of the others."""
    found = dict(members)
    if len(found) < len(members):
        name = Counter(name for name, _ in members).most_common(1)[0][0]
        raise ValueError(f"{name!r:.60} stands twice in one object; give it once")
    return found


# Without Python's NaN and Infinity, and without numbers that would become infinite: no JSON could be written of them.
STRICT_JSON = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_with_each_name_once)


def object_of_json(line: str) -> dict[str, Any]:
    """The JSON object that a line of a .jsonl file is."""
    try:
        body = STRICT_JSON.decode(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not valid JSON ({json_reason(error)})") from error
    if not isinstance(body, dict):
        raise UsageError('a JSON object is expected, such as {"prompt": "text"}')
    return body


def prompt_of_json(line: str) -> object:
    """The value of the one key that a line of a .jsonl file must have."""
    body = object_of_json(line)
    given = {key: body[key] for key in ("prompt", "prompt_token_ids") if body.get(key) is not None}
    if len(given) != 1:
        raise UsageError(f"give either prompt or prompt_token_ids, {'not both' if given else 'neither is there'}")
    [(key, value)] = given.items()
    if key == "prompt" and not isinstance(value, str):
        raise UsageError(f"prompt must be a string, not {type(value).__name__}; for token ids use prompt_token_ids")
    if key == "prompt_token_ids" and not isinstance(value, list):
        raise UsageError(f"prompt_token_ids must be a list of whole numbers, not {type(value).__name__}")
    return value


def make_prompt(
    index: int, given: object, encode: Encode | None, vocab_size: int, positions: int | None = None
) -> Prompt:
    """A prompt of a text or of token ids. UsageError says what is wrong with it; TooLongError: more ids than
    `positions`, before they are checked one by one (of a text, `encode` says so)."""
    if not isinstance(given, str):
        size = len(given) if isinstance(given, list | tuple) or getattr(given, "ndim", 0) else 0  # type: ignore[arg-type]
        if positions is not None and size > positions:
            raise TooLongError(f"{size} tokens, but the model has {positions} positions; shorten it")
        return Prompt(index, _check_ids(given, vocab_size), None)
    if encode is None:
        raise UsageError(
            "a text prompt needs a tokenizer and this model has none (random weights never do); give prompt_token_ids"
        )
    if not is_text(given):
        raise UsageError("the prompt holds half of a surrogate pair, which is not text; remove it")
    return Prompt(index, _check_ids(encode(given), vocab_size), given)


def _check_ids(given: object, vocab_size: int) -> tuple[int, ...]:
    """Token ids as plain ints; arrays and tensors are taken by their `tolist`, without importing their libraries."""
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, list | tuple):
        raise UsageError(f"a prompt is a string or a list of token ids, not {type(given).__name__}")
    ids = tuple(v.item() if hasattr(v, "item") else v for v in values)
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"token id {value!r:.60} is not a whole number")
        if not 0 <= value < vocab_size:
            raise UsageError(f"token id {value!r:.60} is outside the model's vocabulary of {vocab_size}")
    if not ids:
        raise UsageError("the prompt has no tokens; give at least one")
    return ids
