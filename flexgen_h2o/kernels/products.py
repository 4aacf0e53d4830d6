"""Products that the compiled loop of compiled/products.py takes: in bf16, and of int8 weights with uint8 inputs.

It takes AMX's instructions for them where there are any, else AVX-512's, else AVX2's. With AMX rows in order are
multiplied as fast by oneDNN in torch, in bf16, as they would be here; without AVX-512 torch multiplies bf16 number by
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.kernels.workspace import cpu_has, element_of, mismatch, multiplies_slowly, parallel_rows

_WORD = 4  # bytes: two columns in bf16, four in int8
_LEAST = 64  # bytes of a row: a vector
_AMX_WORDS = 16  # of a row of a register of AMX
MXFP4, PACKED = 1, 2  # how rows are coded
_AS_LONG = 24  # input rows that are multiplied with a weight as long as it takes to come from memory


@lru_cache
def has_loop(dtype: torch.dtype, in_order: bool = False) -> bool:
    """Is the loop to be used for inputs of this dtype, on this CPU? in_order: with rows that are not blocked."""
    if dtype != torch.bfloat16:
        return dtype == torch.uint8 and (cpu_has("avx512vnni") or cpu_has("avx2"))
    if cpu_has("avx512bf16"):
        return not cpu_has("amx-bf16") or (has_amx() and not in_order)
    return multiplies_slowly("cpu", dtype) and cpu_has("fma")


@lru_cache
def has_amx() -> bool:
    """Does AMX multiply: has this CPU its instructions, and does Linux let this process use its registers?"""
    ask = getattr(torch.cpu, "_init_amx", None)  # private; once it is gone, AVX-512 multiplies int8, and torch bf16
    return cpu_has("amx-int8") and cpu_has("amx-bf16") and ask is not None and bool(ask())


def instructions() -> str:
    """The widest for products that this CPU has; AVX-512 may lack those for bf16. Empty where there are none."""
    wider = (("AVX-512", "avx512bf16"), ("AVX-512 without bf16", "avx512bw"), ("AVX2", "avx2"))
    return "AMX" if has_amx() else next((name for name, feature in wider if cpu_has(feature)), "")


def takes(x: torch.Tensor, columns: int, in_order: bool = False) -> bool:
    """Does the loop take these inputs, with rows of a weight of so many columns? in_order: as for `has_loop`."""
    nbytes = columns * x.itemsize
    return x.device.type == "cpu" and nbytes % _WORD == 0 and nbytes >= _LEAST and has_loop(x.dtype, in_order)


class Job(NamedTuple):
    """A product of some input rows with some rows of a weight. Addresses and bytes.

    first: panels of the jobs before it; tokens: input rows; rows: of the weight; words: of a row.
    row_step: from a row of the weight to the next; 0: it is blocked. bias: 0 where there is none.
    In int8 alone: the scales of the inputs, of the rows, and the sums of these; with inputs around 128, `zero` times a
    row's sum is added to its products. ends: of rows in 4 bits (packing.SlotPacking), which become int8 a panel at a
    time in the caches, bytes from a row to its scales and least values; 0 of others.
    In bf16 alone: coded: rows are codes of 4 bits, which become bf16 in the same way: MXFP4 or PACKED, 0 of others;
    scales, scale_step: of what says how a row's are scaled; tables: the address of MXFP4's.
    """

    first: int
    tokens: int
    x: int
    x_step: int
    weight: int
    row_step: int
    rows: int
    words: int
    bias: int
    out: int
    out_step: int
    x_scales: int = 0
    scales: int = 0
    scale_step: int = 0
    row_sums: int = 0
    sum_step: int = 0
    zero: int = 0
    ends: int = 0
    coded: int = 0
    tables: int = 0


def job_of(
    x: torch.Tensor, weight: tuple[int, int, int, int], bias: torch.Tensor | None, out: torch.Tensor, **others: int
) -> Job:
    """x: (rows, columns), which `takes` has let pass; weight: address, bytes from a row to the next (0: blocked), rows,
    columns; bias: (n,), out: (rows, n), of one dtype. others: the other fields of a Job.
    """
    (tokens, columns), (x_step, x_one), (out_step, out_one) = x.shape, x.stride(), out.stride()
    start, row_step, rows, wanted = weight
    biases = 0
    if bias is not None:
        biases = bias.data_ptr()
        if bias.dtype != out.dtype or bias.shape != (rows,) or bias.stride() != (1,):
            raise mismatch("products: bias and out", bias, out)
    if x_one != 1 or out_one != 1 or columns != wanted or out.shape != (tokens, rows):
        raise mismatch(f"products: x, a weight of {rows} x {wanted} and out", x, out)
    itemsize = x.itemsize
    return Job(
        0, tokens, x.data_ptr(), x_step * itemsize, start, row_step, rows, columns * itemsize // _WORD, biases,
        out.data_ptr(), out_step * out.itemsize, **others,
    )  # fmt: skip


def run(jobs: Sequence[Job], inputs: torch.dtype, results: torch.dtype, adds: bool, relu: bool) -> None:
    """Multiply; the threads share all panels of all jobs. inputs, results: dtypes."""
    from flexgen_h2o.kernels.compiled import products as loops

    table, panels, nbytes = [], 0, 0
    for job in jobs:
        count = -(-job.rows // BLOCK_ROWS)
        table.append((panels, *job[1:]))
        panels += count
        nbytes += count * BLOCK_ROWS * job.words * _WORD * (1 + job.tokens // _AS_LONG)
    numbers = np.array(table, dtype=np.int64)
    loop = partial(
        loops.multiply, _kind_of(jobs, inputs), element_of(results), (numbers.ctypes.data, len(jobs), panels),
        loops.Ending(adds, relu), torch.get_num_threads(),
    )  # fmt: skip
    parallel_rows(loop, panels, nbytes // panels)


def _kind_of(jobs: Sequence[Job], inputs: torch.dtype) -> np.number[Any]:
    """The number whose type tells the loop what inputs are, and what multiplies."""
    is_float = inputs == torch.bfloat16
    if has_amx() and not any(job.words % _AMX_WORDS for job in jobs):
        return np.int16(0) if is_float else np.int8(0)
    if cpu_has("avx512bf16" if is_float else "avx512vnni"):
        return element_of(inputs)
    return np.uint32(0) if is_float else np.int32(0)
