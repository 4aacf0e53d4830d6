"""Kernels for cards in Triton (Tillet et al. 2019), each beside a reference in torch operations.

Every launch goes through `launch`. Triton is imported where a kernel is launched: the package works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from flexgen_h2o.kernels.workspace import upload

DEVICES = {"cuda"}  # types that kernels are launched on
Grid = tuple[int, ...]


@cache
def is_installed() -> bool:
    return find_spec("triton") is not None


def takes(*tensors: torch.Tensor) -> bool:
    """Do kernels compute on these?"""
    return all(t.device.type in DEVICES for t in tensors) and is_installed()


def launch(
    name: str, grid: Grid, reference: Callable[[], object], arguments: tuple[Any, ...], **constants: Any
) -> None:
    """Start a kernel, FILE.FUNCTION of this folder, on the current stream. reference: does the same in torch
    operations, for tests that have no card. constants: what it is compiled for, and how many warps it takes."""
    file, _, function = name.partition(".")
    getattr(import_module(f"{__name__}.{file}"), function)[grid](*arguments, **constants)


def power_of_two(count: int, least: int = 1) -> int:
    """The least power of two that is neither below `count` nor `least`."""
    return max(least, 1 << (count - 1).bit_length())


class PromptLine(NamedTuple):
    """What a card's kernels are told of one prompt of a launch.

    start: where it begins among the tokens of prompts that lie one behind the other; 0 in a batch. rows, keys: its
    queries, which are its last, and its keys. kept_start, kept: of its columns that stay, where they begin and how many
    they are. begin, end: of its columns, those that are ranked. window: its newest columns that stay whole.
    """

    start: int
    rows: int
    keys: int
    kept_start: int = 0
    kept: int = 0
    begin: int = 0
    end: int = 0
    window: int = 0

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.keys)

    @property
    def stays(self) -> slice:
        """Its columns that stay."""
        return slice(self.kept_start, self.kept_start + self.kept)


Lines = tuple[PromptLine, ...]


@lru_cache(maxsize=64)  # of a sweep's micro-batches, with each set of budgets
def prompt_table(lines: Lines, where: torch.device) -> torch.Tensor:
    """(prompts, 8) int32 on a card, copied there once."""
    return upload(torch.tensor(lines, dtype=torch.int32, device="cpu"), where)


def batch_strides(tensor: torch.Tensor, count: int) -> tuple[int, ...]:
    """The first `count` strides; 0 from prompt to prompt where they lie one behind the other in a batch of one."""
    return (tensor.stride(0) if len(tensor) > 1 else 0, *tensor.stride()[1:count])
