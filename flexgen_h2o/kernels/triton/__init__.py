"""Kernels for cards in Triton (Tillet et al. 2019).

Every launch goes through `launch`. Triton is imported only when a kernel is launched, so the
package works without it.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from flexgen_h2o.kernels.workspace import upload

DEVICES = {"cuda"}  # device types on which kernels are launched


@cache
def is_installed() -> bool:
    return find_spec("triton") is not None


def supports(*tensors: torch.Tensor) -> bool:
    """Return whether kernels compute on these tensors."""
    for t in tensors:  # most calls have one tensor, for which a generator would cost more
        if t.device.type not in DEVICES:
            return False
    return is_installed()


def launch(name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Start a kernel, FILE.FUNCTION of this folder, on the current stream.

    Only an operator's version for cards may call this, so that a card without Triton, and tests
    without a card, have the version in torch operations.

    constants: constants for which the kernel is compiled, and its number of warps.
    """
    file, _, function = name.partition(".")
    getattr(import_module(f"{__name__}.{file}"), function)[grid](*arguments, **constants)


def power_of_two(count: int, least: int = 1) -> int:
    """Return the least power of two that is at least `count` and at least `least`."""
    return max(least, 1 << (count - 1).bit_length())


class PromptPlace(NamedTuple):
    """Describe one prompt of a launch to a card's kernels.

    Prompts of a launch are a batch, or packed: adjacent in one batch row.
    """

    start: int  # index of its first token among packed prompts; 0 in a batch
    rows: int  # its queries, which belong to its last tokens
    keys: int  # its keys
    kept_start: int = 0  # index of its first column among the columns that stay
    kept: int = 0  # number of its columns that stay
    begin: int = 0  # first of its columns that are ranked
    end: int = 0  # end of its columns that are ranked
    window: int = 0  # its newest columns that stay whole

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.keys)

    @property
    def stays(self) -> slice:
        """The slice of its columns among those that stay."""
        return slice(self.kept_start, self.kept_start + self.kept)


PromptPlaces = tuple[PromptPlace, ...]


@lru_cache(maxsize=64)  # one per micro-batch of a sweep, for each set of budgets
def prompt_table(lines: PromptPlaces, where: torch.device) -> torch.Tensor:
    """Return `lines` as (prompts, 8) int32 on a card, copied there once."""
    return upload(torch.tensor(lines, dtype=torch.int32, device="cpu"), where)


def batch_strides(tensor: torch.Tensor, count: int) -> tuple[int, ...]:
    """Return the first `count` strides of a tensor.

    The stride from prompt to prompt is 0 if prompts are packed in a batch of one.
    """
    return (tensor.stride(0) if len(tensor) > 1 else 0, *tensor.stride()[1:count])
