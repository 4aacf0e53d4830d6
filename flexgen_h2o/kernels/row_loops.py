"""The compiled loops of `rms_norm` and `gated`: one pass where torch operations make several, each into new memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels.jit import bits_to_float, exp2, jit
from flexgen_h2o.kernels.packed_loops import number_at, set_number
from flexgen_h2o.kernels.rounding_loops import to_bf16
from flexgen_h2o.kernels.vectors import planes

_LOG2_E = np.float32(1.4426950408889634)
_HIGH = np.uint32(0xFFFF0000)


@jit
def rounded(element, x):  # type: ignore[no-untyped-def]
    """x as it would be read back: in bf16 rounded to it."""
    if planes(element) == 2:
        return bits_to_float(to_bf16(x) & _HIGH)
    else:
        return x


class Norm(NamedTuple):
    """Addresses of x, weight, out, whose rows are x_step and out_step bytes apart."""

    width: int
    x: int
    x_step: int
    weight: int
    out: int
    out_step: int


@jit
def norm_rows(element, job, eps, first, end):  # type: ignore[no-untyped-def]
    """`rms_norm` of rows first..end-1. element: a number whose type says what they hold: uint16 for bf16, float32."""
    for row in range(first, end):
        x, out = job.x + row * job.x_step, job.out + row * job.out_step
        total = np.float32(0)
        for i in range(job.width):
            total += number_at(element, x, i) * number_at(element, x, i)
        scale = np.float32(1) / np.sqrt(total / np.float32(job.width) + eps)
        for i in range(job.width):
            normed = rounded(element, number_at(element, x, i) * scale)
            set_number(element, out, i, normed * number_at(element, job.weight, i))


@jit
def silu_rows(element, gate, up, width, first, end):  # type: ignore[no-untyped-def]
    """gate = silu(gate) x up for rows first..end-1 at the addresses `gate` and `up`."""
    size = 2 if planes(element) == 2 else 4
    gate, up = gate + size * first * width, up + size * first * width
    for i in range((end - first) * width):
        x = number_at(element, gate, i)
        active = rounded(element, x / (np.float32(1) + exp2(-x * _LOG2_E)))
        set_number(element, gate, i, active * number_at(element, up, i))
