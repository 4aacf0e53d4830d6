"""The compiled loops of `quantised`: matrices of checkpoints in few bits into bf16 or fp32.

Two neighbours at a time: in bf16 they make one 4-byte word, so that a vector of words is stored as it comes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels.jit import bits_to_float, bytes_at, jit, planes, set_number, words_at

_PAIRS = 16  # of a block
_BLOCK = 32


class Mxfp4Job(NamedTuple):
    """Addresses of the first row's blocks, scales and numbers; groups: blocks of a row; out_step: bytes from a row of
    `out` to the next."""

    blocks: int
    scales: int
    groups: int
    out: int
    out_step: int


@jit
def unpack_mxfp4(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1."""
    size = 4 // planes(element)
    for row in range(first, end):
        scales = bytes_at(job.scales + row * job.groups)
        blocks, out = job.blocks + row * job.groups * _PAIRS, job.out + row * job.out_step
        for group in range(job.groups):
            scale = np.uint32(scales[group])
            at, to = blocks + group * _PAIRS, out + group * _BLOCK * size
            if np.uint32(2) <= scale <= np.uint32(252):
                _block(element, at, (scale - np.uint32(1)) << np.uint32(7), to)
            else:  # some numbers are too small or too large for what follows
                _any_block(element, at, scale, to)


@jit
def _block(element, at, base, out):  # type: ignore[no-untyped-def]
    codes = bytes_at(at)
    if planes(element) == 2:
        for i in range(_PAIRS):
            code = np.uint32(codes[i])
            words_at(out)[i] = _half(code, base) | (_half(code >> np.uint32(4), base) << np.uint32(16))
    else:
        for i in range(_PAIRS):
            code = np.uint32(codes[i])
            words_at(out)[2 * i] = _half(code, base) << np.uint32(16)
            words_at(out)[2 * i + 1] = _half(code >> np.uint32(4), base) << np.uint32(16)


@jit
def _half(code, base):  # type: ignore[no-untyped-def]
    """The upper 16 bits of a float32, which has no others. e2m1's exponent and mantissa bits lie together, as those of
    a float do: they are added to the scale's exponent less one. 0.5, which is not normal there, and 0 are not."""
    magnitude = code & np.uint32(7)
    bits = base + (magnitude << np.uint32(6))
    bits = base if magnitude == np.uint32(1) else bits
    bits = np.uint32(0) if magnitude == np.uint32(0) else bits
    return bits | ((code & np.uint32(8)) << np.uint32(12))


@jit
def _any_block(element, at, scale, out):  # type: ignore[no-untyped-def]
    # Twice the number times half the power, or half times twice: 2^-127 and 2^128 are no float32 with all their bits.
    shift = np.int32(1) if scale > np.uint32(127) else np.int32(-1)
    power = bits_to_float(np.uint32((np.int32(scale) - shift) << np.int32(23)))
    codes, base = bytes_at(at), np.uint32((126 + shift) << np.int32(7))
    for i in range(_BLOCK):
        code = np.uint32(codes[i >> 1]) >> np.uint32(4 * (i & 1))
        set_number(element, out, i, bits_to_float(np.uint32(_half(code, base) << np.uint32(16))) * power)
