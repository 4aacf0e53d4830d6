"""Compute gates, RMS norms, rotary embeddings, and weighted sums of experts' outputs.

Gates: SwiGLU (Shazeer 2020) without its matrix products, and the gate of gpt-oss. RMS norm: Zhang
and Sennrich 2019. Results are rounded where transformers rounds. On the CPU, fp32 and bf16 use
compiled loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flexgen_h2o.core.units import NORM_CHUNK, ROTARY_CHUNK
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.ops import Layers, op, run_loop
from flexgen_h2o.kernels.workspace import row_slices, some_rows

_NUMBERS = 1024  # numbers that a card's kernel computes at a time
# weighted sums on a card: rows searched at a time, and columns added at a time
_ROWS = 256
_COLUMNS = 256
_LOOP_COLUMNS = 64  # columns that the compiled loop of weighted sums adds at a time


@op
def silu_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Set gate = silu(gate) x up in place, and return it.

    silu is computed in fp32 and rounded to the dtype before the product. gate, up: (rows, width) of
    one dtype, contiguous.
    """
    return F.silu(gate, inplace=True).mul_(up)


@silu_gated.requires
def _are_gates(gate: torch.Tensor, up: torch.Tensor) -> bool:
    return gate.shape == up.shape and _are_contiguous(gate, up)


@silu_gated.loop
def _silu_rows(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    rows, width = gate.shape
    row_bytes = 3 * width * gate.itemsize
    addresses = gate.data_ptr(), up.data_ptr()
    run_loop("rows.silu_rows", gate.dtype, rows, row_bytes, *addresses, width)
    return gate


@silu_gated.kernel
def _silu_kernel(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    count = gate.numel()
    grid = (-(-count // _NUMBERS),)
    triton.launch("rows.silu_gated", grid, (gate, up, count), BLOCK=_NUMBERS)
    return gate


@silu_gated.example
def _silu_calls(layers: Layers) -> Iterator[tuple[torch.Tensor, ...]]:
    if layers.pairs:
        yield layers.zeros(1, layers.hidden), layers.zeros(1, layers.hidden)


@op
def clamped_gate(x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> torch.Tensor:
    """Set out = (up + 1) x gate x sigmoid(alpha x gate), and return it (gpt-oss; OpenAI 2025).

    gate is first limited to at most `limit`, and up to +-`limit`. x: (rows, 2 x width), gate and up
    alternate; out: (rows, width). Both of one dtype, contiguous. Torch operations compute
    NORM_CHUNK rows at a time.
    """
    for rows, into in zip(x.split(NORM_CHUNK), out.split(NORM_CHUNK), strict=True):
        gate = rows[:, ::2].clamp(max=limit)
        up = rows[:, 1::2].clamp(-limit, limit)
        into.copy_(up.add_(1).mul_(gate * torch.sigmoid(gate * alpha)))
    return out


@clamped_gate.requires
def _are_clamped(x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> bool:
    return x.shape == (len(out), 2 * out.shape[1]) and _are_contiguous(x, out)


@clamped_gate.loop
def _clamped_rows(x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> torch.Tensor:
    rows, width = out.shape
    row_bytes = 3 * width * x.itemsize
    limits = np.float32(alpha), np.float32(limit)
    addresses = x.data_ptr(), out.data_ptr()
    run_loop("rows.clamped_gate_rows", x.dtype, rows, row_bytes, *addresses, width, *limits)
    return out


@clamped_gate.kernel
def _clamped_kernel(x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> torch.Tensor:
    count = out.numel()
    grid = (-(-count // _NUMBERS),)
    arguments = x, out, float(alpha), float(limit), count
    triton.launch("rows.clamped_gate", grid, arguments, BLOCK=_NUMBERS)
    return out


@clamped_gate.example
def _clamped_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    if layers.pairs and layers.is_on_cpu:
        yield layers.zeros(1, 2 * layers.hidden), 1.0, 1.0, layers.zeros(1, layers.hidden)


@op
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, once: bool = False
) -> torch.Tensor:
    """Set out = weight x (x / sqrt(mean(x^2) + eps)), and return it.

    The norm is computed in fp32, rounded to x's dtype, then multiplied with the weight, as
    transformers does. once: round only after the weight, as in gpt-oss.

    x, out: (rows, width), or contiguous (tokens, heads, width) with one row per head. They may be
    the same tensor. weight: (width,). All are of one dtype. A row's result depends on that row
    alone. The compiled loop adds in another order than torch. Torch operations have NORM_CHUNK
    rows, or tokens, in fp32 at a time.
    """
    for rows, into in zip(x.split(NORM_CHUNK), out.split(NORM_CHUNK), strict=True):
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if once:
            into.copy_((wide * scale).mul_(weight))
        else:
            into.copy_(wide * scale).mul_(weight)
    return out


@rms_norm.requires
def _can_be_normed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, once: bool = False
) -> bool:
    # plain comparisons: this check runs several times a layer in each decode step
    return (
        (x.dim() == 2 or (x.is_contiguous() and out.is_contiguous()))
        and x.shape == out.shape
        and weight.shape == x.shape[-1:]
        and x.dtype == weight.dtype == out.dtype
        and x.stride(-1) == weight.stride(-1) == out.stride(-1) == 1
    )


@rms_norm.loop
def _norm_rows(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, once: bool = False
) -> torch.Tensor:
    width = x.shape[-1]
    item = x.itemsize
    rows = x.numel() // width
    steps = (item * (t.stride(0) if t.dim() == 2 else width) for t in (x, out))
    addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    numbers = once, width, *addresses, *steps, np.float32(eps)
    run_loop("rows.norm_rows", x.dtype, rows, 2 * width * item, *numbers)
    return out


@rms_norm.kernel
def _norm_kernel(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, once: bool = False
) -> torch.Tensor:
    width = x.shape[-1]
    steps = (t.stride(0) if t.dim() == 2 else width for t in (x, out))
    arguments = x, weight, out, *steps, width, eps
    block = triton.power_of_two(width)
    triton.launch("rows.rms_norm", (x.numel() // width,), arguments, ONCE=once, BLOCK=block)
    return out


@rms_norm.example
def _norm_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    if layers.pairs:
        for shape in ((1, layers.hidden), (1, layers.heads, layers.width)):
            x = layers.zeros(*shape)
            yield x, layers.zeros(shape[-1]), 1.0, torch.empty_like(x)


@op
def add_weighted(
    x: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Add x[i] weights[i] to out[tokens[i]], one row after the other.

    Product and sum are rounded to the dtype of x. x: (rows, width), contiguous; tokens: (rows,)
    int32; weights: (rows,) fp32; out: (tokens, width), contiguous, of the dtype of x.
    """
    added = (x * weights.unsqueeze(1)).to(x.dtype)
    if out.device.type == "cpu":
        out.index_add_(0, tokens, added)
    else:  # a card's index_add_ adds the rows of a token in any order
        out.index_put_((tokens.long(),), added, accumulate=True)


@add_weighted.requires
def _can_be_added(
    x: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> bool:
    fit = x.shape == (*tokens.shape, out.shape[1]) and tokens.shape == weights.shape
    kinds = tokens.dtype == torch.int32 and weights.dtype == torch.float32
    contiguous = tokens.is_contiguous() and weights.is_contiguous()
    return fit and kinds and contiguous and _are_contiguous(x, out)


@add_weighted.loop
def _add_columns(
    x: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    # Each thread adds some columns of all rows, so that no two threads add to one number.
    count = -(-x.shape[1] // _LOOP_COLUMNS)
    nbytes = 3 * len(x) * _LOOP_COLUMNS * x.itemsize
    addresses = (t.data_ptr() for t in (x, tokens, weights, out))
    numbers = _LOOP_COLUMNS, *x.shape, *addresses
    run_loop("rows.add_weighted_columns", x.dtype, count, nbytes, *numbers)


@add_weighted.kernel
def _add_kernel(
    x: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    grid = len(x), -(-x.shape[1] // _COLUMNS)
    arguments = x, tokens, weights, out, *x.shape
    triton.launch("rows.add_weighted", grid, arguments, ROWS=_ROWS, BLOCK=_COLUMNS)


@add_weighted.example
def _weighted_calls(layers: Layers) -> Iterator[tuple[torch.Tensor, ...]]:
    if layers.pairs and layers.is_on_cpu:
        x = layers.zeros(1, layers.hidden)
        weights = layers.zeros(1, dtype=torch.float32)
        yield x, weights.int(), weights, torch.zeros_like(x)


def _are_contiguous(*tensors: torch.Tensor) -> bool:
    """Return whether tensors are contiguous and of one dtype."""
    return all(t.is_contiguous() and t.dtype == tensors[0].dtype for t in tensors)


class Rotation:
    """Apply the rotary embeddings of a model.

    Pairs of numbers of a head rotate by position x frequency.

    frequencies: (pairs,) fp32; scaling: from config.Rotary. Angles, sines and cosines are in fp32,
    products in the dtype of what is rotated.
    """

    def __init__(self, frequencies: torch.Tensor, scaling: float) -> None:
        self._frequencies = frequencies
        self._scaling = scaling
        self._newest: tuple[torch.Tensor, torch.dtype, tuple[torch.Tensor, torch.Tensor]] | None = (
            None
        )

    @op
    def rotate(self, tensors: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        """Rotate heads in place.

        tensors: (tokens, heads, d) of one dtype; positions: (tokens,) integers, on any device.
        """
        for here, cos, sin in self._angles_of(tensors[0], positions):
            for t in tensors:
                _rotate(t[here], t[here], cos.unsqueeze(1), sin.unsqueeze(1))

    @rotate.loop_if(
        lambda _, tensors, positions: all(
            t.device.type == "cpu" and t.dtype == torch.bfloat16 and t.stride(2) == 1
            for t in tensors
        )
    )
    def _rotate_rows(self, tensors: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        """Give the same bits as torch operations.

        There is no loop for fp32, because compiled code may fuse a product with a sum, which rounds
        less often.
        """
        for here, cos, sin in self._angles_of(tensors[0], positions):
            for t in tensors:
                some = t[here]
                tokens, heads, width = some.shape
                pairs = cos.shape[1]
                if 2 * pairs > width:
                    raise ValueError(f"rotate: {2 * pairs} numbers of {width} cannot turn")
                steps = 2 * some.stride(0), 2 * some.stride(1)
                addresses = some.data_ptr(), cos.data_ptr(), sin.data_ptr()
                numbers = heads, pairs, *steps, *addresses
                run_loop("rows.rotate_heads", some.dtype, tokens, 8 * heads * pairs, *numbers)

    @rotate.kernel_if(
        lambda _, tensors, positions: (
            len(tensors) == 2
            and triton.supports(*tensors)
            and all(t.stride(1) == t.shape[2] for t in tensors)
        )
    )
    def _rotate_kernel(self, tensors: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        q, k = tensors
        pairs = len(self._frequencies)
        tokens, heads, width = q.shape
        given = q, k, positions.to(q.device), self._frequencies, self._scaling
        sizes = q.stride(0), k.stride(0), heads, width, pairs
        grid = tokens, heads + k.shape[1]
        triton.launch("rows.rotate", grid, (*given, *sizes), BLOCK=triton.power_of_two(pairs))

    @op
    def rotated(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """Return a copy of keys (rows, slots, d), each rotated by its rank.

        ranks: (rows, slots) int32. A slot whose rank is not below the number of slots is empty; its
        result has no meaning.
        """
        cos, sin = self._angles(torch.arange(keys.shape[1], device=keys.device), keys.dtype)
        out = keys.clone()
        index = ranks.clamp(max=keys.shape[1] - 1).long()
        _rotate(keys, out, cos[index], sin[index])
        return out

    @rotated.requires
    def _are_ranked(self, keys: torch.Tensor, ranks: torch.Tensor) -> bool:
        contiguous = keys.is_contiguous() and ranks.is_contiguous()
        fit = ranks.shape == keys.shape[:2] and 2 * len(self._frequencies) <= keys.shape[2]
        return contiguous and fit and ranks.dtype == torch.int32

    @rotated.loop
    def _rotated_rows(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """Round only once, at the end."""
        rows, slots, width = keys.shape
        cos, sin = self._angles(torch.arange(slots, device="cpu"), torch.float32)
        out = torch.empty_like(keys)
        addresses = (t.data_ptr() for t in (keys, ranks, cos, sin, out))
        numbers = slots, width, len(self._frequencies), *addresses
        run_loop("rows.rotate_rows", keys.dtype, rows, 2 * slots * width * keys.itemsize, *numbers)
        return out

    def _angles_of(
        self, heads: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield slices of ROTARY_CHUNK tokens, with their cosines and sines."""
        for here in row_slices(len(positions), 1, most=ROTARY_CHUNK):
            some = some_rows(positions, here).to(heads.device)
            yield here, *self._newest_angles(some, heads.dtype)

    def _newest_angles(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `_angles`, cached for the next layers, which rotate by the same tensor."""
        if self._newest is None or self._newest[0] is not positions or self._newest[1] != dtype:
            self._newest = positions, dtype, self._angles(positions, dtype)
        return self._newest[2]

    def _angles(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions, each (positions, pairs)."""
        frequencies = self._frequencies.to(positions.device)
        angles = positions.float().unsqueeze(1) * frequencies
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


@Rotation.rotate.example
def _rotate_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    if layers.pairs:
        q = layers.zeros(1, layers.heads, layers.width)
        k = layers.zeros(1, layers.kv_heads, layers.width)
        positions = layers.zeros(1, dtype=torch.int64)
        yield Rotation(layers.zeros(layers.pairs, dtype=torch.float32), 1.0), (q, k), positions


@Rotation.rotated.example
def _rotated_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    if layers.rolling:
        frequencies = layers.zeros(layers.width // 2, dtype=torch.float32)
        ranks = layers.zeros(1, 4, dtype=torch.int32)
        yield Rotation(frequencies, 1.0), layers.zeros(1, 4, layers.width), ranks


def _rotate(x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Set out = x with pairs (i, i + pairs) of its last dimension rotated; `out` may be x.

    cos, sin: (..., pairs).
    """
    pairs = cos.shape[-1]
    first = x[..., :pairs]
    second = x[..., pairs : 2 * pairs]
    rotated = (first * cos).sub_(second * sin)
    out[..., pairs : 2 * pairs] = (second * cos).add_(first * sin)
    out[..., :pairs] = rotated
