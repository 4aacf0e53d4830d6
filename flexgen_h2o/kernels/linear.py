"""Multiply by a matrix that is held in row parts, and look its rows up.

A matrix that is split over tiers arrives as several parts, and each is a run of its rows. A matrix
that is not split arrives as one part. Parts are never copied together: each part is multiplied
where its memory is. It fills its own columns of the result. A matrix that is stored for x W is cut
into runs of columns instead: each part adds its share to all columns of the result.

In bf16 on a CPU, the compiled loop of kernels/products.py multiplies if it supports the CPU.
Otherwise torch multiplies: on a CPU with only AVX2 in fp32, a part of the weight at a time.

Rows may be stored in the compiled loop's blocked layout, so that the loop need not rearrange them
first. With AMX, the loop accepts only blocked rows. Rows are blocked in place. The bytes are the
same in another order, so the memory plan and the owner of the memory need not know about it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from flexgen_h2o.core.packing import WORD
from flexgen_h2o.core.units import BLOCK_CHUNK, BLOCK_ROWS
from flexgen_h2o.kernels import products, triton
from flexgen_h2o.kernels.workspace import multiplies_slowly, row_slices, some_rows

_INPUTS = 512  # input rows that are converted to fp32 at a time


class Matrix(ABC):
    """Hold some rows of a matrix, in the form in which they are multiplied.

    All parts of a matrix accept inputs of one kind.
    """

    # dtype of the inputs in jobs of the compiled loop
    codes: ClassVar[torch.dtype] = torch.bfloat16

    @abstractmethod
    def __len__(self) -> int: ...

    def inputs(self, x: torch.Tensor) -> Iterator[tuple[slice, Any]]:
        """Yield x (rows, columns) in the form that products accept, some rows at a time.

        Each item is the slice of rows and the prepared inputs. The inputs can be sliced, but each
        row may be taken only once. The caller uses one item before it asks for the next.
        """
        yield slice(0, x.shape[0]), x  # len() of a tensor takes several times as long as shape[0]

    def job(
        self, inputs: Any, bias: torch.Tensor | None, out: torch.Tensor
    ) -> products.ProductJob | None:
        """Return `multiply` as a job of the compiled loop, or None if the loop does not support it.

        A job holds addresses, so the tensors must outlive it.
        """
        return None

    def multiply(
        self, inputs: Any, bias: torch.Tensor | None, out: torch.Tensor, adds: bool
    ) -> None:
        """Set out = x W^T + bias, or add that to `out` if `adds`.

        bias: (n,); out: (rows, n), whose rows need not be adjacent.
        """
        raise NotImplementedError("is looked up in, or multiplied by the compiled loop alone")

    @abstractmethod
    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the rows `ids` (int64, (n,)) to out (n, columns)."""


RowParts = tuple[Matrix, ...]


class MatrixProduct(NamedTuple):
    """Say what one product reads and fills; the arguments of `Matrix.multiply`."""

    part: Matrix
    inputs: Any  # (rows, columns) in the form that the part's `inputs` yields
    bias: torch.Tensor | None  # (n,), for the n rows of the part
    out: torch.Tensor  # (rows, n); its rows need not be adjacent
    adds: bool  # add to what `out` contains

    def multiply(self) -> None:
        self.part.multiply(self.inputs, self.bias, self.out, self.adds)


@dataclass(frozen=True)
class DenseRows(Matrix):
    """Hold rows (n, columns) in the compute dtype, or a vector (n,).

    A vector is never split. A part of a matrix that is stored for x W has all rows and only some
    columns. The sum over columns is then rounded after each part.

    In the compiled loop's blocked layout, the number of rows is a multiple of BLOCK_ROWS. A block
    has BLOCK_ROWS rows: first their values of columns 0 and 1, then of columns 2 and 3, and so on.
    """

    rows: torch.Tensor  # (n, columns); in order, or in the order of blocks
    blocked: bool = False  # only the compiled loop multiplies blocked rows

    def __len__(self) -> int:
        return self.rows.shape[0]

    def job(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> products.ProductJob | None:
        rows = self.rows
        if self.blocked:
            assert inputs.dtype == rows.dtype
        elif not products.supports(inputs, rows.shape[1], in_order=True) or rows.stride(1) != 1:
            return None
        return products.job_of(
            inputs,
            bias,
            out,
            weight=rows.data_ptr(),
            row_step=0 if self.blocked else rows.stride(0) * rows.itemsize,
            rows=rows.shape[0],
            columns=rows.shape[1],
        )

    def multiply(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool
    ) -> None:
        assert not self.blocked
        if multiplies_slowly(inputs.device.type, inputs.dtype):
            self._multiply_in_fp32(inputs, bias, out, adds)
        elif adds:
            out.addmm_(inputs, self.rows.t())
            if bias is not None:
                out.add_(bias)
        elif bias is None:
            torch.mm(inputs, self.rows.t(), out=out)
        else:
            torch.addmm(bias, inputs, self.rows.t(), out=out)

    def _multiply_in_fp32(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool
    ) -> None:
        """Multiply in fp32, converting some inputs and some rows of the weight at a time."""
        for own in row_slices(len(inputs), 1, most=_INPUTS):
            x = inputs[own].float()
            for some in row_slices(*self.rows.shape):
                result = x @ self.rows[some].float().t()
                if bias is not None:
                    result += bias[some]
                out[own, some] = result.add_(out[own, some]) if adds else result

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        if not self.blocked:
            torch.index_select(self.rows, 0, ids, out=out)
            return
        words = self.rows.shape[1] * self.rows.itemsize // WORD
        some = max(1, BLOCK_CHUNK // (words * WORD))
        for wanted, there in zip(ids.split(some), out.split(some), strict=True):
            there.copy_(words_of_blocks(self.rows.view(-1), words, wanted).view(self.rows.dtype))


@dataclass(frozen=True)
class Table(Matrix):
    """Hold rows that are only looked up, and are decoded or read from a file as that happens."""

    count: int  # rows
    read: Callable[[torch.Tensor, torch.Tensor], None]  # does `look_up`

    def __len__(self) -> int:
        return self.count

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        self.read(ids, out)


def linear(
    x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Set out = x W^T + bias, and return it.

    x: (rows, in); weight parts: (out_i, in); bias: (out,); out: (rows, sum of out_i).
    """
    linear_shared_input(x, ((weight, bias, out),))
    return out


def linear_relu(
    x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Set out = relu(x W^T + bias), with shapes as in `linear`, and return it."""
    for rows, inputs in weight[0].inputs(x):
        multiply_all(_products(inputs, weight, bias, some_rows(out, rows)), relu=True)
    return out


def linear_shared_input(
    x: torch.Tensor,
    maps: Sequence[tuple[RowParts, torch.Tensor | None, torch.Tensor]],
    adds: bool = False,
) -> None:
    """Run `linear` on the same inputs with each (weight, bias, out).

    adds: add to what `out` contains. Inputs are prepared once for all weights of a kind. A
    quantised checkpoint may have several kinds, because some of its weights may be plain.
    """
    kinds: dict[torch.dtype, list[tuple[RowParts, torch.Tensor | None, torch.Tensor]]] = {}
    for one in maps:
        kinds.setdefault(one[0][0].codes, []).append(one)
    for some in kinds.values():
        for rows, inputs in some[0][0][0].inputs(x):
            multiply_all(
                [
                    p
                    for weight, bias, out in some
                    for p in _products(inputs, weight, bias, some_rows(out, rows), adds)
                ]
            )


def grouped_linear(
    x: torch.Tensor,
    counts: Sequence[int],
    maps: Sequence[tuple[Sequence[RowParts], Sequence[torch.Tensor] | None, torch.Tensor]],
) -> None:
    """Run `linear_shared_input` for each expert of a group, with the rows that belong to the
    expert.

    x: (rows, in), sorted by expert. counts: rows per expert, possibly 0; their sum is the number of
    rows. maps: (weight per expert, bias per expert or None, out), where out is (rows, sum of out_i)
    for all experts. The compiled loop runs once for all experts, and its threads share the work.
    """
    from flexgen_h2o.kernels.coded import multiply_together

    kinds = {weight[0].codes: weight[0] for weights, _, _ in maps for weight in weights}
    for kind, part in kinds.items():  # a quantised checkpoint may have left some matrices plain
        for rows, inputs in part.inputs(x):
            found = []
            for expert, own in _of_experts(counts, rows):
                # sliced only once, because products may change the inputs in place
                mine = inputs[own.start - rows.start : own.stop - rows.start]
                for weights, biases, out in maps:
                    if weights[expert][0].codes == kind:
                        bias = None if biases is None else biases[expert]
                        found += _products(mine, weights[expert], bias, out[own])
            multiply_all(multiply_together(found) if triton.supports(x) else found)


def _of_experts(counts: Sequence[int], rows: slice) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has any of the rows, with the slice of rows that belong to it."""
    start = 0
    for expert, count in enumerate(counts):
        first = max(start, rows.start)
        end = min(start + count, rows.stop)
        start += count
        if first < end:
            yield expert, slice(first, end)


def _products(
    inputs: Any, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor, adds: bool = False
) -> list[MatrixProduct]:
    """Return one product per part."""
    if len(weight) == 1:
        return [MatrixProduct(weight[0], inputs, bias, out, adds)]
    found = []
    start = 0
    for part in weight:
        if isinstance(part, DenseRows) and part.rows.shape[1] < inputs.shape[1]:
            end = start + part.rows.shape[1]
            own = inputs[:, start:end]
            found.append(MatrixProduct(part, own, None if start else bias, out, adds or start > 0))
        else:
            end = start + len(part)
            own_bias = None if bias is None else bias[start:end]
            found.append(MatrixProduct(part, inputs, own_bias, out[:, start:end], adds))
        start = end
    return found


def multiply_all(found: Sequence[MatrixProduct], relu: bool = False) -> None:
    """Run all products, each with relu if that is set.

    Products that the compiled loop supports run first and together, and must agree on `adds`. The
    rest follow one by one. They may convert the inputs in place, so they cannot come earlier.
    """
    jobs = []
    others = list[MatrixProduct]()
    for product in found:
        job = product.part.job(product.inputs, product.bias, product.out)
        if job is None:
            others.append(product)
        else:
            jobs.append(job)
    if jobs:
        first = found[0]
        products.run(jobs, first.part.codes, first.out.dtype, first.adds, relu)
    for product in others:
        product.multiply()
        if relu:
            torch.relu_(product.out)


def add_linear(
    x: torch.Tensor, inputs: torch.Tensor, weight: RowParts, bias: torch.Tensor | None
) -> None:
    """Add inputs W^T + bias to x in place: the residual sum. x: (rows, out), inputs: (rows, in)."""
    linear_shared_input(inputs, ((weight, bias, x),), adds=True)


def lookup(ids: torch.Tensor, table: RowParts, out: torch.Tensor) -> torch.Tensor:
    """Copy the rows `ids` (int64, (n,)) of `table` to out (n, width), and return it.

    Ids must be in range.
    """
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
    """Return the tensor of one dimension in `parts`.

    It is never split and always in the compute dtype.
    """
    (whole,) = parts
    assert isinstance(whole, DenseRows)
    return whole.rows


def optional_vector(tensors: Mapping[str, RowParts], name: str) -> torch.Tensor | None:
    """Return the vector of that name, or None if the layer has none."""
    return vector(tensors[name]) if name in tensors else None


# ---- blocked rows


def block_rows(rows: torch.Tensor) -> tuple[DenseRows, ...]:
    """Block `rows` (n, columns) in place, and return row parts in order.

    The parts share the memory of `rows`.

    Rows that cannot be blocked stay as they are. These are all rows if the dtype, device, number of
    columns or CPU is not supported, and rows beyond the last multiple of BLOCK_ROWS.
    """
    end = len(rows) // BLOCK_ROWS * BLOCK_ROWS
    right = (
        rows.is_contiguous()
        and rows.shape[1] % BLOCK_ROWS == 0
        and products.supports(rows, rows.shape[1])
    )
    if not (right and end):
        return (DenseRows(rows),)
    block_words(rows[:end].view(torch.int32), rows[:end].view(-1))
    blocked = DenseRows(rows[:end], blocked=True)
    return (blocked,) if end == len(rows) else (blocked, DenseRows(rows[end:]))


def words_of_blocks(memory: torch.Tensor, words: int, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows `ids` (int64, (n,)) of blocked rows, as (n, words) int32.

    memory: flat, holds the blocked rows; words: 4-byte words per row.
    """
    return memory.view(torch.int32).view(-1, words, BLOCK_ROWS)[
        ids // BLOCK_ROWS, :, ids % BLOCK_ROWS
    ]


def block_words(words: torch.Tensor, memory: torch.Tensor) -> None:
    """Write the words of rows (n, words) in blocked order to the first bytes of `memory` (flat).

    `memory` may be the memory of the rows. n must be a multiple of BLOCK_ROWS.
    """
    out = memory.view(torch.uint8)[: words.numel() * words.itemsize].view(words.dtype)
    step = max(
        BLOCK_ROWS, BLOCK_CHUNK // (words.shape[1] * words.itemsize) // BLOCK_ROWS * BLOCK_ROWS
    )
    for some, there in zip(words.split(step), out.split(step * words.shape[1]), strict=True):
        blocks = some.unflatten(0, (-1, BLOCK_ROWS)).transpose(1, 2).contiguous()
        there.copy_(blocks.view(-1))
