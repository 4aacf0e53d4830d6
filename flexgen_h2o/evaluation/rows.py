"""The prompts that quality is measured on, each with the tokens that are to follow on it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flexgen_h2o.errors import UsageError
from flexgen_h2o.evaluation.python_sources import is_held_out, read_text, stdlib_files
from flexgen_h2o.evaluation.recall import Encode, Planter, RecallRow
from flexgen_h2o.prompts import read_prompts
from flexgen_h2o.source import Model


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of what follows on it."""

    prompt: int
    continuation: int

    @property
    def both(self) -> int:
        return self.prompt + self.continuation


@dataclass(frozen=True)
class TextRow:
    """Token ids. continuation: () where the model's own is still to be generated."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class HeldOutText:
    """Sources that the shipped model did not see in training, as token ids of a model's tokenizer.

    start: what a prompt begins with (BOS); encode: token ids of more text, without special tokens.
    """

    encode: Encode
    start: tuple[int, ...]
    tokens: list[int]


def held_out_text(model: Model) -> HeldOutText:
    """Raises UsageError for a model without a tokenizer."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UsageError(f"--model {model.name}: has no tokenizer; give --prompts with prompt_token_ids")

    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    tokens: list[int] = []
    for path in filter(is_held_out, stdlib_files()):
        tokens += [*model.encode_more(read_text(path)), *end]
    return HeldOutText(model.encode_more, tuple(model.encode("")), tokens)


def held_out_rows(text: HeldOutText, count: int, lengths: Lengths, seed: int) -> list[TextRow]:
    """Stretches of the text that do not overlap, drawn at random. UsageError if there are not so many."""
    if lengths.prompt <= len(text.start):
        raise UsageError(f"--prompt-len {lengths.prompt}: a prompt begins with {len(text.start)} special token(s)")
    size = lengths.both - len(text.start)
    stretches = len(text.tokens) // size
    if count > stretches:
        raise UsageError(
            f"--num-prompts {count}: Python's own sources give {stretches} held-out rows of {lengths.both} tokens; "
            "ask for fewer or give --prompts"
        )
    starts = [size * i for i in random.Random(seed).sample(range(stretches), count)]
    rows = [(*text.start, *text.tokens[at : at + size]) for at in starts]
    return [TextRow(row[: lengths.prompt], row[lengths.prompt :]) for row in rows]


def rows_of_file(path: Path, model: Model, lengths: Lengths, greedy: bool, most: int | None) -> list[TextRow]:
    """Rows of a prompt file in its order, at most `most`.

    Text is cut into prompt and continuation, and rows that are too short for both are left out; where the model's
    greedy continuation is to be followed, rows are prompts and keep their length, up to that of a prompt. UsageError if
    no row is left.
    """
    encode = partial(model.encode_beginning, tokens=lengths.both) if model.tokenizer is not None else None
    found = [p.token_ids for p in read_prompts(path, encode, model.spec.vocab_size)]
    long_enough = found if greedy else [ids for ids in found if len(ids) >= lengths.both]
    if not long_enough:
        raise UsageError(
            f"--prompts {path}: no row has {lengths.both} tokens (--prompt-len + --gen-len), the longest has "
            f"{max(map(len, found))}; lower them, or follow the model's own tokens with --continuation greedy"
        )
    end = lengths.prompt if greedy else lengths.both
    return [TextRow(ids[: lengths.prompt], ids[lengths.prompt : end]) for ids in long_enough[:most]]


def recall_rows(text: HeldOutText, count: int, lengths: Lengths, depths: int, seed: int) -> list[RecallRow]:
    """`count` rows, which state their pairs at each of the depths in turn."""
    planter = Planter(text.encode, text.start, text.tokens, lengths.prompt, lengths.continuation, depths)
    rng = random.Random(seed)
    return [planter.row(rng, i % depths) for i in range(count)]
