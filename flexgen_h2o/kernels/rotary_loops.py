"""The compiled loops of `Rotation`: keys in slots, each turned by its rank; heads of tokens, turned where they are."""

from __future__ import annotations

from typing import NamedTuple

from flexgen_h2o.kernels import vectors
from flexgen_h2o.kernels.jit import floats_at, ints_at, jit
from flexgen_h2o.kernels.packed_loops import number_at, set_number
from flexgen_h2o.kernels.row_loops import rounded


class Job(NamedTuple):
    """Addresses: keys, out of (rows, slots, width); ranks of (rows, slots) int32; cos, sin of (slots, pairs) fp32."""

    slots: int
    width: int
    pairs: int
    keys: int
    ranks: int
    cos: int
    sin: int
    out: int


@jit
def turn_rows(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1; slots of no rank, which hold nothing, are left as they are in `out`.

    element: a number whose type says what keys are: uint16 for bf16, float32 for fp32.
    """
    size = 2 if vectors.planes(element) == 2 else 4
    for slot in range(first * job.slots, end * job.slots):
        rank = ints_at(job.ranks)[slot]
        if rank < job.slots:
            cos, sin = floats_at(job.cos + 4 * rank * job.pairs), floats_at(job.sin + 4 * rank * job.pairs)
            key, out = job.keys + size * slot * job.width, job.out + size * slot * job.width
            for i in range(job.pairs):
                a, b = number_at(element, key, i), number_at(element, key, job.pairs + i)
                set_number(element, out, i, a * cos[i] - b * sin[i])
                set_number(element, out, job.pairs + i, b * cos[i] + a * sin[i])
            for i in range(2 * job.pairs, job.width):
                set_number(element, out, i, number_at(element, key, i))


class Heads(NamedTuple):
    """Addresses: x of (tokens, heads, width), steps in bytes; cos, sin of (tokens, pairs), in the dtype of x."""

    heads: int
    pairs: int
    x: int
    token_step: int
    head_step: int
    cos: int
    sin: int


@jit
def turn_heads(element, job, first, end):  # type: ignore[no-untyped-def]
    """Tokens first..end-1, in place; every product and sum is rounded, as torch operations would."""
    size = 2 if vectors.planes(element) == 2 else 4
    for token in range(first, end):
        cos, sin = job.cos + size * token * job.pairs, job.sin + size * token * job.pairs
        for head in range(job.heads):
            x = job.x + token * job.token_step + head * job.head_step
            for i in range(job.pairs):
                a, b = number_at(element, x, i), number_at(element, x, job.pairs + i)
                c, s = number_at(element, cos, i), number_at(element, sin, i)
                set_number(element, x, i, rounded(element, a * c) - rounded(element, b * s))
                set_number(element, x, job.pairs + i, rounded(element, b * c) + rounded(element, a * s))
