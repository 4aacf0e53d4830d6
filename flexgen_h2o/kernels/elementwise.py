"""Compute gates, RMS norms, rotary embeddings, and weighted sums of experts' outputs.

Gates: SwiGLU (Shazeer 2020) without its matrix products, and the gate of gpt-oss. RMS norm: Zhang
and Sennrich 2019. Results are rounded where transformers rounds. On the CPU, fp32 and bf16 use
compiled loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from flexgen_h2o.core.units import NORM_CHUNK, ROTARY_CHUNK
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.workspace import (
    element_of,
    is_compiled,
    mismatch,
    parallel_rows,
    row_slices,
    some_rows,
)

# weighted sums on a card: rows searched at a time, and columns added at a time
_ROWS = 256
_COLUMNS = 256


def silu_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Set gate = silu(gate) x up in place, and return it.

    silu is computed in fp32 and rounded to the dtype before the product. gate, up: (rows, width) of
    one dtype, contiguous.
    """
    if triton.supports(gate) and gate.is_contiguous() and up.is_contiguous():
        count = gate.numel()
        reference = partial(silu_gated_reference, gate, up)
        triton.launch(
            "rows.silu_gated", (-(-count // 1024),), reference, (gate, up, count), BLOCK=1024
        )
        return gate
    if not is_compiled(gate):
        return silu_gated_reference(gate, up)
    if (
        gate.shape != up.shape
        or gate.dtype != up.dtype
        or not (gate.is_contiguous() and up.is_contiguous())
    ):
        raise mismatch("silu_gated: gate and up", gate, up)
    from flexgen_h2o.kernels.compiled import rows as row_loops

    rows, width = gate.shape
    loop = partial(
        row_loops.silu_rows, element_of(gate.dtype), gate.data_ptr(), up.data_ptr(), width
    )
    parallel_rows(loop, rows, 3 * width * gate.itemsize)
    return gate


def silu_gated_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `silu_gated` in torch operations."""
    return F.silu(gate, inplace=True).mul_(up)


def clamped_gate(x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> torch.Tensor:
    """Set out = (up + 1) x gate x sigmoid(alpha x gate), and return it (gpt-oss; OpenAI 2025).

    gate is first limited to at most `limit`, and up to +-`limit`. x: (rows, 2 x width), gate and up
    alternate; out: (rows, width). Both of one dtype, contiguous.
    """
    if triton.supports(x) and x.is_contiguous() and out.is_contiguous():
        count = out.numel()
        reference = partial(clamped_gate_reference, x, alpha, limit, out)
        arguments = x, out, float(alpha), float(limit), count
        triton.launch("rows.clamped_gate", (-(-count // 1024),), reference, arguments, BLOCK=1024)
        return out
    if not is_compiled(x):
        return clamped_gate_reference(x, alpha, limit, out)
    rows, width = out.shape
    fits = x.shape == (len(out), 2 * out.shape[1]) and x.dtype == out.dtype
    if not fits or not (x.is_contiguous() and out.is_contiguous()):
        raise mismatch("clamped_gate: x and out", x, out)
    from flexgen_h2o.kernels.compiled import rows as row_loops

    job = row_loops.Gate(width, x.data_ptr(), out.data_ptr(), np.float32(alpha), np.float32(limit))
    parallel_rows(
        partial(row_loops.clamped_gate_rows, element_of(x.dtype), job), rows, 3 * width * x.itemsize
    )
    return out


def clamped_gate_reference(
    x: torch.Tensor, alpha: float, limit: float, out: torch.Tensor
) -> torch.Tensor:
    """Compute `clamped_gate` in torch operations, NORM_CHUNK rows at a time."""
    for rows, into in zip(x.split(NORM_CHUNK), out.split(NORM_CHUNK), strict=True):
        gate = rows[:, ::2].clamp(max=limit)
        up = rows[:, 1::2].clamp(-limit, limit)
        into.copy_(up.add_(1).mul_(gate * torch.sigmoid(gate * alpha)))
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, once: bool = False
) -> torch.Tensor:
    """Set out = weight x (x / sqrt(mean(x^2) + eps)), and return it.

    The norm is computed in fp32, rounded to x's dtype, then multiplied with the weight. once: round
    only after the weight, as in gpt-oss.

    x, out: (rows, width), or contiguous (tokens, heads, width) with one row per head. They may be
    the same tensor. weight: (width,). All are of one dtype. A row's result depends on that row
    alone. The compiled loop adds in another order than torch.
    """
    if not is_compiled(x) and not triton.supports(x):
        return rms_norm_reference(x, weight, eps, out, once)
    if x.dim() == 3:
        rms_norm(x.view(-1, x.shape[2]), weight, eps, out.view(-1, out.shape[2]), once)
        return out
    if triton.supports(x):
        width = x.shape[1]
        reference = partial(rms_norm_reference, x, weight, eps, out, once)
        sizes = x.stride(0), out.stride(0), width, eps
        block = triton.power_of_two(width)
        triton.launch(
            "rows.rms_norm", (len(x),), reference, (x, weight, out, *sizes), ONCE=once, BLOCK=block
        )
        return out
    ok = x.shape == out.shape == (len(x), *weight.shape)
    if not ok or any(t.dtype != x.dtype or t.stride(-1) != 1 for t in (x, weight, out)):
        raise mismatch("rms_norm: x, weight and out", x, weight, out)
    from flexgen_h2o.kernels.compiled import rows as row_loops

    x_step, out_step = (t.stride(0) * t.itemsize for t in (x, out))
    norm = row_loops.Norm(
        once, x.shape[1], x.data_ptr(), x_step, weight.data_ptr(), out.data_ptr(), out_step
    )
    loop = partial(row_loops.norm_rows, element_of(x.dtype), norm, np.float32(eps))
    parallel_rows(loop, len(x), 2 * x.shape[1] * x.itemsize)
    return out


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, once: bool = False
) -> torch.Tensor:
    """Compute `rms_norm` in torch operations, as transformers does.

    NORM_CHUNK rows, or tokens, are in fp32 at a time.
    """
    for rows, into in zip(x.split(NORM_CHUNK), out.split(NORM_CHUNK), strict=True):
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if once:
            into.copy_((wide * scale).mul_(weight))
        else:
            into.copy_(wide * scale).mul_(weight)
    return out


def add_weighted(
    x: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Add x[i] weights[i] to out[tokens[i]], one row after the other.

    Product and sum are rounded to the dtype of x. x: (rows, width), contiguous; tokens: (rows,)
    int32; weights: (rows,) fp32; out: (tokens, width), contiguous, of the dtype of x.
    """
    on_card = triton.supports(x)
    if not on_card and not is_compiled(x):
        add_weighted_reference(x, tokens, weights, out)
        return
    ok = (
        x.shape == (*tokens.shape, out.shape[1])
        and tokens.shape == weights.shape
        and x.dtype == out.dtype
    )
    ok &= tokens.dtype == torch.int32 and weights.dtype == torch.float32
    if not ok or not all(t.is_contiguous() for t in (x, tokens, weights, out)):
        raise mismatch("add_weighted: x, tokens, weights and out", x, tokens, weights, out)
    if on_card:
        grid = (len(x), -(-x.shape[1] // _COLUMNS))
        reference = partial(add_weighted_reference, x, tokens, weights, out)
        arguments = x, tokens, weights, out, *x.shape
        triton.launch("rows.add_weighted", grid, reference, arguments, ROWS=_ROWS, BLOCK=_COLUMNS)
        return
    from flexgen_h2o.kernels.compiled import rows as row_loops

    job = row_loops.Weighted(*x.shape, *(t.data_ptr() for t in (x, tokens, weights, out)))
    loop = partial(row_loops.add_weighted_columns, element_of(x.dtype), job)
    # Each thread adds some columns of all rows, so that no two threads add to one number.
    parallel_rows(
        loop, -(-x.shape[1] // row_loops.COLUMNS), 3 * len(x) * row_loops.COLUMNS * x.itemsize
    )


def add_weighted_reference(
    x: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute `add_weighted` in torch operations."""
    added = (x * weights.unsqueeze(1)).to(x.dtype)
    if out.device.type == "cpu":
        out.index_add_(0, tokens, added)
    else:  # a card's index_add_ adds the rows of a token in any order
        out.index_put_((tokens.long(),), added, accumulate=True)


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

    def rotate(self, tensors: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        """Rotate heads in place.

        tensors: (tokens, heads, d) of one dtype; positions: (tokens,) integers, on any device.
        """
        if (
            len(tensors) == 2
            and triton.supports(*tensors)
            and all(t.stride(1) == t.shape[2] for t in tensors)
        ):
            self._rotate_on_card(tensors[0], tensors[1], positions)
            return
        self.rotate_torch(tensors, positions)

    def _rotate_on_card(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        pairs = len(self._frequencies)
        tokens, heads, width = q.shape
        reference = partial(self.rotate_torch, (q, k), positions)
        given = q, k, positions.to(q.device), self._frequencies, self._scaling
        sizes = q.stride(0), k.stride(0), heads, width, pairs
        grid = tokens, heads + k.shape[1]
        triton.launch(
            "rows.rotate", grid, reference, (*given, *sizes), BLOCK=triton.power_of_two(pairs)
        )

    def rotate_torch(self, tensors: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        """Compute `rotate` in torch operations, or in compiled loops if they give the same bits."""
        where = tensors[0].device
        dtype = tensors[0].dtype
        for here in row_slices(len(positions), 1, most=ROTARY_CHUNK):
            cos, sin = self._newest_angles(some_rows(positions, here).to(where), dtype)
            for t in tensors:
                if where.type == "cpu" and dtype == torch.bfloat16 and t.stride(2) == 1:
                    _rotate_heads(t[here], cos, sin)
                else:
                    _rotate(t[here], t[here], cos.unsqueeze(1), sin.unsqueeze(1))

    def rotated(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """Return a copy of keys (rows, slots, d), each rotated by its rank.

        ranks: (rows, slots) int32. A slot whose rank is not below the number of slots is empty; its
        result has no meaning.
        """
        return (
            self._rotated_compiled(keys, ranks)
            if is_compiled(keys)
            else self.rotated_reference(keys, ranks)
        )

    def rotated_reference(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """Compute `rotated` in torch operations."""
        cos, sin = self._angles(torch.arange(keys.shape[1], device=keys.device), keys.dtype)
        out = keys.clone()
        index = ranks.clamp(max=keys.shape[1] - 1).long()
        _rotate(keys, out, cos[index], sin[index])
        return out

    def _rotated_compiled(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """Compute `rotated` in the compiled loop, which rounds only once, at the end."""
        from flexgen_h2o.kernels.compiled import rows as rotary_loops

        rows, slots, width = keys.shape
        pairs = len(self._frequencies)
        ok = keys.is_contiguous() and ranks.is_contiguous() and ranks.shape == keys.shape[:2]
        if not ok or ranks.dtype != torch.int32 or 2 * pairs > width:
            raise mismatch(f"rotated: keys, ranks and {pairs} pairs", keys, ranks)
        cos, sin = self._angles(torch.arange(slots, device="cpu"), torch.float32)
        out = torch.empty_like(keys)
        job = rotary_loops.RotaryJob(
            slots,
            width,
            pairs,
            keys.data_ptr(),
            ranks.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
        )
        loop = partial(rotary_loops.rotate_rows, element_of(keys.dtype), job)
        parallel_rows(loop, rows, 2 * slots * width * keys.itemsize)
        return out

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


def _rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate heads in bf16 (tokens, heads, d) in place, with the same bits as `_rotate`.

    cos, sin: (tokens, pairs) in bf16. It is not used for fp32, because a compiled loop may fuse a
    product with a sum, which rounds less often.
    """
    from flexgen_h2o.kernels.compiled import rows as rotary_loops

    tokens, heads, width = x.shape
    pairs = cos.shape[1]
    if 2 * pairs > width:
        raise ValueError(f"rotate: {2 * pairs} numbers of {width} cannot turn")
    token, head = (2 * step for step in x.stride()[:2])
    job = rotary_loops.RotateHeadsJob(
        heads, pairs, x.data_ptr(), token, head, cos.data_ptr(), sin.data_ptr()
    )
    parallel_rows(
        partial(rotary_loops.rotate_heads, element_of(x.dtype), job), tokens, 8 * heads * pairs
    )


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
