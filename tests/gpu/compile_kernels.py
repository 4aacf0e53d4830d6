"""Compile every Triton kernel ahead of time for cards that are not here: python -m
tests.gpu.compile_kernels [sm ...].

The launches are those that warm a run up: of layers of several shapes, and of weights in few bits.
They are compiled in the 16 bits in which the card computes. On sm75 and sm90 they are compiled in
fp32, too: from sm80 on Triton 3.6 lays fp32 out alike, so sm90's is held to what sm86 and sm89
have. Prints a line for each card and dtype: launches, and the bytes of shared memory that the
hungriest takes.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flexgen_h2o.checkpoint import formats
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.checkpoint.formats.mxfp4 import Mxfp4
from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.elementwise import rms_norm
from flexgen_h2o.kernels.ops import OPERATORS, Layers

# Bytes of shared memory that a block may take, by compute capability: Turing (T4), Ampere (3090),
# Ada (4090), Hopper.
CARDS = {75: 65536, 86: 101376, 89: 101376, 90: 232448}
JOBS = [
    *(
        (card, torch.bfloat16 if card >= 80 else torch.float16, most)
        for card, most in CARDS.items()
    ),
    *((card, torch.float32, CARDS[most]) for card, most in ((75, 75), (90, 86))),
]
# Heads of a kv-head, width, bits of packed slots, what is in front of slots (StepSlots.before), and
# whether columns have scores.
LAYERS: list[tuple[int, int, int | str | None, int, bool]] = [
    (1, 64, None, 0, False),
    (1, 128, None, 2, False),
    (4, 128, None, 0, True),
    (8, 80, None, 0, True),
    (8, 256, None, 1, True),
    (4, 128, "4/3", 0, False),
    (4, 64, 3, 0, True),
    (4, 80, 8, 1, True),
    (4, 256, 4, 0, True),
]


def shared_memory(card: int, dtype: torch.dtype, most: int) -> list[int]:
    """Compile for one card in one dtype. Returns the bytes that a block of each launch takes."""
    found = list[int]()
    target = GPUTarget("cuda", card, 32)
    zero = lambda *_: 0  # noqa: E731
    driver.set_active(
        SimpleNamespace(  # type: ignore[arg-type]
            get_current_target=lambda: target, get_current_device=zero, get_current_stream=zero
        )
    )

    def launch(name: str, grid: tuple[int, ...], arguments: Any, **constants: Any) -> None:
        file, _, function = name.partition(".")
        kernel = getattr(import_module(f"{triton.__name__}.{file}"), function)
        made = kernel.warmup(*arguments, grid=grid, **constants)
        assert "cubin" in made.asm, name
        found.append(made.metadata.shared)
        assert found[-1] <= most, f"{name} {constants}: {found[-1]} bytes on sm{card}, of {most}"

    triton.launch = launch
    triton.supports = lambda *tensors: True
    cpu = torch.device("cpu")  # whose tensors stand for a card's: nothing is launched
    for form in (Groupwise(dtype.itemsize, 4), Groupwise(dtype.itemsize, 8), Mxfp4(dtype.itemsize)):
        formats.warm_up(form, cpu, dtype, experts=True)
    for group, width, bits, before, scored in LAYERS:
        layers = Layers(
            cpu,
            dtype,
            hidden=4096,
            heads=2 * group,
            kv_heads=2,
            width=width,
            pairs=width // 2,
            scored=scored,
            per_query=group == 8 or bits == 8,
            packing=None if bits is None else KVPacking.of(width, bits),
            before=(before,),
        )
        for operator in OPERATORS:
            for given in operator._calls(layers) if operator._kernel is not None else ():
                operator.on_card(*given)
        x = layers.zeros(1, layers.hidden)
        rms_norm(x, x[0], 1.0, x, True)
    return found


def main() -> None:
    chosen = [int(card) for card in sys.argv[1:]] or [*CARDS]
    with ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool:
        made = [(job, pool.submit(shared_memory, *job)) for job in JOBS if job[0] in chosen]
        for (card, dtype, _), done in made:
            shared = done.result()
            print(f"sm{card} {dtype}: {len(shared)} launches, at most {max(shared)} bytes")


if __name__ == "__main__":
    main()
