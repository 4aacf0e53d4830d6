"""Courses: what steers rows instead of their sampling parameters, such as teacher forcing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flexgen_h2o.config import ModelSpec
from flexgen_h2o.errors import UsageError
from flexgen_h2o.generation import Chooser, Decoding, Row, Watches
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.rolling import most_new_tokens
from flexgen_h2o.prompts import Prompt, prompts_from_python


class Course(Chooser, Protocol):
    """Which tokens rows take, and when they are done."""

    @property
    def at_once(self) -> int:
        """The most tokens of a row that a sweep may feed."""

    def most_new(self, row: int) -> int:
        """The most tokens that the row of this index takes."""

    def end(self, row: Row) -> str | None:
        """Why the row is done with its newest token (Decoding.end)."""

    def coming(self, row: Row) -> Sequence[int]:
        """The tokens that it will take next, as far as they are known; `at_once` of them are enough."""


@dataclass(frozen=True)
class ForcedTokens:
    """Teacher forcing: rows take the tokens that they are given, whatever the logits: `tokens[row][step]`."""

    tokens: Mapping[int, Sequence[int]]
    at_once: int = 1

    def choose(self, logits: torch.Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        return [self.tokens[row][step] for row, step in zip(rows, steps, strict=True)]

    def most_new(self, row: int) -> int:
        return len(self.tokens[row])

    def end(self, row: Row) -> str | None:
        return "length" if len(row.token_ids) >= row.max_new else None

    def coming(self, row: Row) -> Sequence[int]:
        done = len(row.token_ids)
        return self.tokens[row.prompt.index][done : done + self.at_once]


def steered(course: Course | None, chooser: Chooser, end: Callable[[Row], str | None], watches: Watches) -> Decoding:
    """Decoding by a course; without one, as the others say."""
    if course is None:
        return Decoding(chooser, end, watches)
    return Decoding(course, course.end, watches, course.coming)


def forced_rows(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], eviction: Eviction, spec: ModelSpec,
    at_once: int,
) -> tuple[list[Prompt], ForcedTokens]:  # fmt: skip
    """Prompts of token ids, each with the tokens that it is to take. UsageError where they do not fit together."""
    read = prompts_from_python(prompts, None, spec.vocab_size)
    after = prompts_from_python(continuations, None, spec.vocab_size)
    if len(read) != len(after):
        raise UsageError(f"continuations: {len(after)} for {len(read)} prompts")
    for prompt, more in zip(read, after, strict=True):
        length, new = len(prompt.token_ids), len(more.token_ids)
        if length > spec.max_positions or most_new_tokens(eviction, spec, length, new) < new:
            raise UsageError(
                f"prompts[{prompt.index}]: with its continuation longer than {spec.max_positions} positions"
            )
    return read, ForcedTokens({p.index: p.token_ids for p in after}, at_once)
