"""Linear maps and row look-ups over a matrix that is held in row parts.

A matrix split over tiers arrives as several parts, each a run of its rows; a whole one as a single part. No part is
ever copied together: each is multiplied where it lies and fills its own columns of the result.

Rows in bf16 may be in oneDNN's blocked layout, in which a CPU multiplies them faster than in order. They are blocked in
place, some at a time: the bytes are the same in another order, so that the memory plan and the owner of the memory need
not know. The operations are private to torch: those that compiled models call, and the function of its C interface that
makes a tensor around given memory. They are tried once; where they are missing or differ, rows stay in order.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.core.units import BLOCK_CHUNK, BLOCK_ROWS, TOKEN_CHUNK


class RowPart(ABC):
    """Some rows of a matrix in the form in which they are multiplied. All parts of a matrix have inputs of one kind."""

    @abstractmethod
    def __len__(self) -> int: ...

    def inputs(self, x: torch.Tensor) -> Iterator[tuple[slice, Any]]:
        """x (rows, columns) as `multiply` takes it, some rows at a time: which rows, and these. One is used before the
        next is made."""
        yield slice(0, len(x)), x

    @abstractmethod
    def multiply(self, inputs: Any, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        """out = x W^T + bias; adds: to what is there. bias: (n,), out: (rows, n), whose rows need not be adjacent."""

    def multiply_relu(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """relu(x W^T + bias) in `out`, or in memory of the product's own."""
        return torch.relu_(linear(x, (self,), bias, out))

    @abstractmethod
    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """The rows `ids` (int64, (n,)) into out (n, columns)."""


RowParts = tuple[RowPart, ...]


@dataclass(frozen=True)
class DenseRows(RowPart):
    """Rows (n, columns) in the compute dtype, in order; or a vector (n,), which is never split."""

    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        if adds:
            out.addmm_(inputs, self.rows.t())
            if bias is not None:
                out.add_(bias)
        elif bias is None:
            torch.mm(inputs, self.rows.t(), out=out)
        else:
            torch.addmm(bias, inputs, self.rows.t(), out=out)

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self.rows, 0, ids, out=out)


def linear(x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out = x W^T + bias. x: (rows, in), weight parts: (out_i, in), bias: (out,), out: (rows, sum out_i)."""
    linear_each(x, ((weight, bias, out),))
    return out


def linear_relu(x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """relu(x W^T + bias), the shapes as of `linear`, in `out` or in memory of the product's own."""
    if len(weight) == 1:
        return weight[0].multiply_relu(x, bias, out)
    return torch.relu_(linear(x, weight, bias, out))


def linear_each(
    x: torch.Tensor, maps: Sequence[tuple[RowParts, torch.Tensor | None, torch.Tensor]], adds: bool = False
) -> None:
    """`linear` of the same inputs with each (weight, bias, out); adds: to what is there. Inputs are prepared once for
    all weights of a kind: a quantised checkpoint may have some that are plain."""
    kinds: dict[type[RowPart], list[tuple[RowParts, torch.Tensor | None, torch.Tensor]]] = {}
    for one in maps:
        kinds.setdefault(type(one[0][0]), []).append(one)
    for some in kinds.values():
        for rows, inputs in some[0][0][0].inputs(x):
            for weight, bias, out in some:
                start = 0
                for part in weight:
                    end = start + len(part)
                    part.multiply(inputs, None if bias is None else bias[start:end], out[rows, start:end], adds)
                    start = end


def add_linear(x: torch.Tensor, inputs: torch.Tensor, weight: RowParts, bias: torch.Tensor | None) -> None:
    """x += inputs W^T + bias, in place: the residual sum. x: (rows, out), inputs: (rows, in)."""
    linear_each(inputs, ((weight, bias, x),), adds=True)


def lookup(ids: torch.Tensor, table: RowParts, out: torch.Tensor) -> torch.Tensor:
    """Rows of `table` by `ids` (int64, (n,)) into out (n, width). Ids must be in range."""
    if len(table) == 1:
        table[0].look_up(ids, out)
        return out
    start = 0
    for part in table:
        here = ((ids >= start) & (ids < start + len(part))).nonzero().squeeze(1)
        found = out.new_empty(len(here), out.shape[1])
        part.look_up(ids[here] - start, found)
        out[here] = found
        start += len(part)
    return out


def vector(parts: RowParts) -> torch.Tensor:
    """A tensor of one dimension, which is never split and always in the compute dtype."""
    (whole,) = parts
    assert isinstance(whole, DenseRows)
    return whole.rows


def optional_vector(tensors: Mapping[str, RowParts], name: str) -> torch.Tensor | None:
    """The vector of that name, None where the layer has none."""
    return vector(tensors[name]) if name in tensors else None


# ---- blocked rows

_FOR_ROWS = 32  # of the products that the layout is chosen for; it serves all others
_CHECK_TOLERANCE = 0.05  # of sums of 128 products of values around 1/8, in bf16


@dataclass(frozen=True)
class BlockedRows(RowPart):
    """Some rows of a matrix. opaque: what products take, of shape (rows, columns); its values are those of `memory`,
    in another order."""

    opaque: torch.Tensor
    memory: torch.Tensor

    def __len__(self) -> int:
        return len(self.memory)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, epilogue: str = "none") -> torch.Tensor:
        """x W^T + bias, or with the epilogue "relu" relu of it, in memory of its own: (rows, n).

        x: (rows, columns), rows at most TOKEN_CHUNK, bias: (n,). Rounded once; relu before rounding is relu after it.
        """
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.opaque, bias, epilogue, [], "")
        return found

    def multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        """Rounded as products with rows in order are (linear.DenseRows): once, and where it adds to what is there once
        more for the bias. So the result does not depend on which rows of a matrix are blocked."""
        add = torch.ops.mkldnn._linear_pointwise.binary
        for start in range(0, len(inputs), TOKEN_CHUNK):
            some, there = inputs[start : start + TOKEN_CHUNK], out[start : start + TOKEN_CHUNK]
            if not adds:
                there.copy_(self.product(some, bias))
                continue
            there.copy_(add(some, there.contiguous(), self.opaque, None, "add"))
            if bias is not None:
                there.add_(bias)

    def multiply_relu(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """In a single pass; a copy into `out` would be another."""
        if len(x) > TOKEN_CHUNK:
            return super().multiply_relu(x, bias, out)
        return self.product(x, bias, "relu")

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError("tables of embeddings are not blocked")


def block_rows(rows: torch.Tensor) -> RowParts:
    """Block `rows` (n, columns) where they lie: row parts in order, whose memory is that of `rows`.

    A row part has at most BLOCK_CHUNK bytes. What cannot be blocked stays as it is: all rows where the dtype, the
    device, the number of columns or torch is not right, and those beyond the last multiple of BLOCK_ROWS.
    """
    if not _can_block(rows):
        return (DenseRows(rows),)
    most = BLOCK_CHUNK // (rows.shape[1] * rows.itemsize)
    return tuple(_block(some) if len(some) % BLOCK_ROWS == 0 else DenseRows(some) for some in pieces(rows, most))


def pieces(rows: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """BLOCK_ROWS rows or more, about `most` at a time, a multiple of BLOCK_ROWS; then those that are left, if any."""
    step, end = max(BLOCK_ROWS, most // BLOCK_ROWS * BLOCK_ROWS), len(rows) // BLOCK_ROWS * BLOCK_ROWS
    yield from rows[:end].split(step)
    if end < len(rows):
        yield rows[end:]


def _can_block(rows: torch.Tensor) -> bool:
    right = rows.device.type == "cpu" and rows.dtype == torch.bfloat16 and rows.is_contiguous()
    return right and rows.shape[1] % BLOCK_ROWS == 0 and len(rows) >= BLOCK_ROWS and _works()


def _block(rows: torch.Tensor) -> RowPart:
    """`rows` in place, and a tensor around them; as they are where oneDNN would pad them."""
    moved = torch.ops.mkldnn._reorder_linear_weight(rows, _FOR_ROWS)
    if torch.ops.mkldnn._nbytes(moved) != rows.nbytes:
        return DenseRows(rows)
    layout = torch.ops.mkldnn._get_mkldnn_serialized_md(moved)
    opaque = opaque_tensor(rows, (len(rows), rows.shape[1]), rows.dtype, layout)
    ctypes.memmove(rows.data_ptr(), torch.ops.mkldnn.data_ptr(moved), rows.nbytes)
    return BlockedRows(opaque, rows)


@lru_cache(maxsize=1)
def _works() -> bool:
    """Are the private operations there, and right?"""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator).div_(8) for s in ((5, 128), (192, 128), (192,)))
    rows = weight.bfloat16()
    want = 2 * (x.bfloat16().float() @ rows.float().t()) + bias.bfloat16().float()
    out = torch.zeros(5, 192, dtype=torch.bfloat16)
    try:
        part = _block(rows)
        if not isinstance(part, BlockedRows) or torch.ops.mkldnn.data_ptr(part.opaque) != rows.data_ptr():
            return False
        part.multiply(x.bfloat16(), bias.bfloat16(), out, adds=False)
        relu = part.product(x.bfloat16(), bias.bfloat16(), "relu")
        if not torch.equal(relu, torch.relu(out)):
            return False
        part.multiply(x.bfloat16(), None, out, adds=True)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError):  # gone, renamed, or not for this CPU
        return False
    return torch.allclose(out.float(), want, atol=_CHECK_TOLERANCE, rtol=0.0)


def opaque_tensor(
    memory: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, layout: torch.Tensor
) -> torch.Tensor:
    """`memory`, contiguous, as a matrix of `shape` in a layout, serialised (uint8). It does not keep the memory alive.

    dtype: bfloat16 or int8. Raises AttributeError, OSError or RuntimeError where torch has other operations.
    """
    torch_cpu = _torch_cpu()
    name = str(dtype).removeprefix("torch.")
    sizes, strides = (ctypes.c_int64 * 2)(*shape), (ctypes.c_int64 * 2)(shape[1], 1)
    handle = ctypes.c_void_p()
    code = torch_cpu.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(2), sizes, strides, ctypes.c_int64(0),
        getattr(torch_cpu, f"aoti_torch_dtype_{name}")(), torch_cpu.aoti_torch_device_type_cpu(), 0,
        ctypes.byref(handle), torch_cpu.aoti_torch_layout__mkldnn(), ctypes.c_void_p(layout.data_ptr()),
        ctypes.c_int64(layout.numel()),
    )  # fmt: skip
    if code:
        raise RuntimeError("torch made no tensor of blocked rows")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    opaque: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
    return opaque


@lru_cache(maxsize=1)
def _torch_cpu() -> ctypes.CDLL:
    """The library that torch itself has loaded. OSError where it is not there."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
