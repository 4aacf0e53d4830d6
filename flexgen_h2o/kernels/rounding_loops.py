"""Rounding to bf16 in compiled loops: what comes back are bits, of which the upper 16 are the number."""

from __future__ import annotations

import numpy as np

from flexgen_h2o.kernels.jit import float_to_bits, jit

_QUIET = np.uint32(0x400000)  # set in a NaN, so that its upper half is one too


@jit
def to_bf16(x):  # type: ignore[no-untyped-def]
    """x rounded to bf16, half to even; the lower half of the result is of no use."""
    bits = np.uint32(float_to_bits(x))
    return bits | _QUIET if x != x else bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))


@jit
def to_bf16_towards(x, up):  # type: ignore[no-untyped-def]
    """The nearest bf16 number that is not below x (up) or not above it, the lower half 0; NaN stays NaN."""
    bits = np.uint32(float_to_bits(x))
    if x != x:
        bits |= _QUIET
    elif (x < np.float32(0)) != up:  # away from zero
        bits += np.uint32(0xFFFF)
    return np.uint32(bits & np.uint32(0xFFFF0000))
