"""Kernels for cards in Triton (Tillet et al. 2019), each beside a reference in torch operations.

Every launch goes through `launch`. Triton is imported where a kernel is launched: the package works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

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
