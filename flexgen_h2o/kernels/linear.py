"""Linear maps and row look-ups over a matrix that is held in row parts.

A matrix split over tiers arrives as several parts, each a run of its rows; a whole one as a single part. No part is
ever copied together: each is multiplied where it lies and fills its own columns of the result, or, where rows are
inputs (`InputRows`), adds its share to all of them.

In bf16 on a CPU the compiled loop of kernels/products.py multiplies, where there is one, and torch elsewhere: in fp32,
some of the weight at a time, where the CPU has AVX2 alone. Rows may be in the loop's blocked layout, in which it need
not bring them first; with AMX it takes only these. They are blocked in place: the bytes are the same in another order,
so that the memory plan and the owner of the memory need not know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from flexgen_h2o.core.packing import WORD
from flexgen_h2o.core.units import BLOCK_CHUNK, BLOCK_ROWS
from flexgen_h2o.kernels import products, triton
from flexgen_h2o.kernels.workspace import multiplies_slowly, row_slices, some_rows

_INPUTS = 512  # that are fp32 at a time


class RowPart(ABC):
    """Some rows of a matrix in the form in which they are multiplied. All parts of a matrix have inputs of one kind."""

    codes: ClassVar[torch.dtype] = torch.bfloat16  # of inputs, in jobs of the compiled loop

    @abstractmethod
    def __len__(self) -> int: ...

    def inputs(self, x: torch.Tensor) -> Iterator[tuple[slice, Any]]:
        """x (rows, columns) as products take it, some rows at a time: which rows, and these, of which slices can be
        taken, each row once. One is used before the next is made."""
        yield slice(0, x.shape[0]), x  # len() of a tensor takes several times as long

    @abstractmethod
    def job(self, inputs: Any, bias: torch.Tensor | None, out: torch.Tensor) -> products.Job | None:
        """`multiply` as a job of the compiled loop, which goes by address; None where that does not take it."""

    def multiply(self, inputs: Any, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        """out = x W^T + bias; adds: to what is there. bias: (n,), out: (rows, n), whose rows need not be adjacent."""
        raise NotImplementedError("is multiplied by the compiled loop alone")

    def product(self, start: int, inputs: Any, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> Product:
        """What this part, whose rows begin at `start` of the matrix, is to do for out (rows, all of the matrix)."""
        here = slice(start, start + len(self))
        return self, inputs, None if bias is None else bias[here], out[:, here], adds

    @abstractmethod
    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """The rows `ids` (int64, (n,)) into out (n, columns)."""


class Table(RowPart):
    """Rows that are looked up and never multiplied."""

    def job(self, inputs: Any, bias: torch.Tensor | None, out: torch.Tensor) -> NoReturn:
        raise NotImplementedError("a table is looked up in")


RowParts = tuple[RowPart, ...]
Product = tuple[RowPart, Any, torch.Tensor | None, torch.Tensor, bool]  # a part, and the arguments of `multiply`


@dataclass(frozen=True)
class DenseRows(RowPart):
    """Rows (n, columns) in the compute dtype, in order; or a vector (n,), which is never split."""

    rows: torch.Tensor

    def __len__(self) -> int:
        return self.rows.shape[0]

    def job(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> products.Job | None:
        if not products.takes(inputs, self.rows.shape[1], in_order=True) or self.rows.stride(1) != 1:
            return None
        rows = self.rows
        return products.job_of(inputs, (rows.data_ptr(), rows.stride(0) * rows.itemsize, *rows.shape), bias, out)

    def multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
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

    def _multiply_in_fp32(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        """Some inputs and some outputs at a time."""
        for own in row_slices(len(inputs), 1, most=_INPUTS):
            x = inputs[own].float()
            for some in row_slices(*self.rows.shape):
                result = x @ self.rows[some].float().t()
                if bias is not None:
                    result += bias[some]
                out[own, some] = result.add_(out[own, some]) if adds else result

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self.rows, 0, ids, out=out)


@dataclass(frozen=True)
class InputRows(DenseRows):
    """Rows (n, outputs) of a matrix that is stored for x W: each belongs to an input. The sum over inputs is rounded
    after each part."""

    def multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        DenseRows(self.rows.t()).multiply(inputs, bias, out, adds)

    def job(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """The loop takes rows that belong to outputs."""

    def product(
        self, start: int, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool
    ) -> Product:
        return self, inputs[:, start : start + len(self)], None if start else bias, out, adds or start > 0

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError("tables of embeddings are not stored so")


def linear(x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out = x W^T + bias. x: (rows, in), weight parts: (out_i, in), bias: (out,), out: (rows, sum out_i)."""
    linear_each(x, ((weight, bias, out),))
    return out


def linear_relu(x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out = relu(x W^T + bias), the shapes as of `linear`. Returns out."""
    for rows, inputs in weight[0].inputs(x):
        multiply_all(_products(inputs, weight, bias, some_rows(out, rows)), relu=True)
    return out


def linear_each(
    x: torch.Tensor, maps: Sequence[tuple[RowParts, torch.Tensor | None, torch.Tensor]], adds: bool = False
) -> None:
    """`linear` of the same inputs with each (weight, bias, out); adds: to what is there. Inputs are prepared once for
    all weights of a kind: a quantised checkpoint may have some that are plain."""
    kinds: dict[torch.dtype, list[tuple[RowParts, torch.Tensor | None, torch.Tensor]]] = {}
    for one in maps:
        kinds.setdefault(one[0][0].codes, []).append(one)
    for some in kinds.values():
        for rows, inputs in some[0][0][0].inputs(x):
            multiply_all(
                [p for weight, bias, out in some for p in _products(inputs, weight, bias, some_rows(out, rows), adds)]
            )


def grouped_linear(
    x: torch.Tensor,
    counts: Sequence[int],
    maps: Sequence[tuple[Sequence[RowParts], Sequence[torch.Tensor] | None, torch.Tensor]],
) -> None:
    """`linear_each` of each expert of a group with the rows that are its own.

    x: (rows, in), sorted by expert; counts: rows of each expert, 0 among them, whose sum is the rows. maps: of each
    expert the weight, of each the bias or none at all, and out (rows, sum out_i) of all. What is compiled is one pass
    over all of them, which the threads share.
    """
    from flexgen_h2o.kernels.coded import multiply_together

    kinds = {weight[0].codes: weight[0] for weights, _, _ in maps for weight in weights}
    for kind, part in kinds.items():  # a quantised checkpoint may have left some matrices plain
        for rows, inputs in part.inputs(x):
            found = []
            for expert, own in _of_experts(counts, rows):
                mine = inputs[own.start - rows.start : own.stop - rows.start]  # taken once: products may change them
                for weights, biases, out in maps:
                    if weights[expert][0].codes == kind:
                        bias = None if biases is None else biases[expert]
                        found += _products(mine, weights[expert], bias, out[own])
            multiply_all(multiply_together(found) if triton.takes(x) else found)


def _of_experts(counts: Sequence[int], rows: slice) -> Iterator[tuple[int, slice]]:
    """Each expert that has any of the rows, and which."""
    start = 0
    for expert, count in enumerate(counts):
        first, end = max(start, rows.start), min(start + count, rows.stop)
        start += count
        if first < end:
            yield expert, slice(first, end)


def _products(
    inputs: Any, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor, adds: bool = False
) -> list[Product]:
    """Of each row part."""
    if len(weight) == 1:
        return [(weight[0], inputs, bias, out, adds)]
    found, start = [], 0
    for part in weight:
        found.append(part.product(start, inputs, bias, out, adds))
        start += len(part)
    return found


def multiply_all(found: Sequence[Product], relu: bool = False) -> None:
    """All of them add to what is there, or none of those that the loop takes. These come first: other parts may take
    the inputs in another form, and change them in place."""
    jobs, others = [], list[Product]()
    for part, inputs, bias, out, adds in found:
        job = part.job(inputs, bias, out)
        if job is None:
            others.append((part, inputs, bias, out, adds))
        else:
            jobs.append(job)
    if jobs:
        products.run(jobs, found[0][0].codes, found[0][3].dtype, found[0][4], relu)
    for part, inputs, bias, out, adds in others:
        part.multiply(inputs, bias, out, adds)
        if relu:
            torch.relu_(out)


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


@dataclass(frozen=True)
class BlockedRows(RowPart):
    """Some rows of a matrix, as many as a multiple of BLOCK_ROWS. memory: (rows, columns), whose values are in another
    order: of BLOCK_ROWS rows each the first two columns, then the next two."""

    memory: torch.Tensor

    def __len__(self) -> int:
        return len(self.memory)

    def job(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> products.Job | None:
        assert inputs.dtype == self.memory.dtype
        return products.job_of(inputs, (self.memory.data_ptr(), 0, *self.memory.shape), bias, out)

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        words = self.memory.shape[1] * self.memory.itemsize // WORD
        some = max(1, BLOCK_CHUNK // (words * WORD))
        for wanted, there in zip(ids.split(some), out.split(some), strict=True):
            there.copy_(words_of_blocks(self.memory.view(-1), words, wanted).view(self.memory.dtype))


def block_rows(rows: torch.Tensor) -> RowParts:
    """Block `rows` (n, columns) where they lie: row parts in order, whose memory is that of `rows`.

    What cannot be blocked stays as it is: all rows where the dtype, the device, the number of columns or the CPU is not
    right, and those beyond the last multiple of BLOCK_ROWS.
    """
    end = len(rows) // BLOCK_ROWS * BLOCK_ROWS
    right = rows.is_contiguous() and rows.shape[1] % BLOCK_ROWS == 0 and products.takes(rows, rows.shape[1])
    if not (right and end):
        return (DenseRows(rows),)
    block_words(rows[:end].view(torch.int32), rows[:end].view(-1))
    blocked = BlockedRows(rows[:end])
    return (blocked,) if end == len(rows) else (blocked, DenseRows(rows[end:]))


def words_of_blocks(memory: torch.Tensor, words: int, ids: torch.Tensor) -> torch.Tensor:
    """The rows `ids` (int64, (n,)) of blocked ones of so many words, which `memory` (flat) holds: (n, words) int32."""
    return memory.view(torch.int32).view(-1, words, BLOCK_ROWS)[ids // BLOCK_ROWS, :, ids % BLOCK_ROWS]


def block_words(words: torch.Tensor, memory: torch.Tensor) -> None:
    """Words of rows (n, words) into the order of blocks, in the first bytes of `memory` (flat), which may be that of
    the rows. n: a multiple of BLOCK_ROWS."""
    out = memory.view(torch.uint8)[: words.numel() * words.itemsize].view(words.dtype)
    step = max(BLOCK_ROWS, BLOCK_CHUNK // (words.shape[1] * words.itemsize) // BLOCK_ROWS * BLOCK_ROWS)
    for some, there in zip(words.split(step), out.split(step * words.shape[1]), strict=True):
        blocks = some.unflatten(0, (-1, BLOCK_ROWS)).transpose(1, 2).contiguous()
        there.copy_(blocks.view(-1))
