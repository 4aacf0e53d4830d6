"""Run products in the compiled loop: bf16, or int8 weights with uint8 inputs.

The loop is in compiled/products.py.

The loop uses AMX instructions if the CPU has them, else AVX-512, else AVX2. With AMX, oneDNN in
torch multiplies bf16 rows in order as fast as the loop would. Without AVX-512, torch multiplies
bf16 one number at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.kernels.workspace import (
    cpu_has,
    element_of,
    mismatch,
    multiplies_slowly,
    parallel_rows,
)

_WORD = 4  # bytes: two columns in bf16, four in int8
_LEAST = 64  # fewest bytes per row: one vector
_AMX_WORDS = 16  # 4-byte words per row of an AMX register
# values of `ProductJob.coded`: how the codes of a row are coded
MXFP4 = 1
PACKED = 2
# multiplying a weight with this many input rows takes as long as reading the weight from memory
_AS_LONG = 24


@lru_cache
def has_loop(dtype: torch.dtype, in_order: bool = False) -> bool:
    """Return whether the loop is to be used for inputs of this dtype on this CPU.

    in_order: the rows of the weight are not blocked.
    """
    if dtype != torch.bfloat16:
        return dtype == torch.uint8 and (cpu_has("avx512vnni") or cpu_has("avx2"))
    if cpu_has("avx512bf16"):
        return not cpu_has("amx-bf16") or (has_amx() and not in_order)
    return multiplies_slowly("cpu", dtype) and cpu_has("fma")


@lru_cache
def has_amx() -> bool:
    """Return whether the CPU has AMX, and Linux lets this process use its registers."""
    # private in torch; if it disappears, AVX-512 multiplies int8, and torch multiplies bf16
    ask = getattr(torch.cpu, "_init_amx", None)
    return cpu_has("amx-int8") and cpu_has("amx-bf16") and ask is not None and bool(ask())


def instructions() -> str:
    """Return the name of the widest instructions for products on this CPU, or "" if it has none.

    A CPU with AVX-512 may lack the instructions for bf16.
    """
    wider = (("AVX-512", "avx512bf16"), ("AVX-512 without bf16", "avx512bw"), ("AVX2", "avx2"))
    return "AMX" if has_amx() else next((name for name, feature in wider if cpu_has(feature)), "")


def supports(x: torch.Tensor, columns: int, in_order: bool = False) -> bool:
    """Return whether the loop accepts these inputs, with rows of a weight of so many columns.

    in_order: as in `has_loop`.
    """
    nbytes = columns * x.itemsize
    return (
        x.device.type == "cpu"
        and nbytes % _WORD == 0
        and nbytes >= _LEAST
        and has_loop(x.dtype, in_order)
    )


class ProductJob(NamedTuple):
    """Describe the product of some input rows with some rows of a weight, for the compiled loop.

    Made by `job_of`, and read by name in the loop. All steps are in bytes, and all tensors are
    addresses.
    """

    # panels (BLOCK_ROWS rows of a weight) of the jobs before this one; `run` sets it
    first: int
    tokens: int  # input rows
    x: int  # address of the inputs
    x_step: int  # bytes from an input row to the next
    weight: int  # address of the weight
    row_step: int  # bytes from a row of the weight to the next; 0: the weight is blocked
    rows: int  # rows of the weight
    words: int  # 4-byte words per row
    bias: int  # address of (rows,) in the dtype of the results; 0: no bias
    out: int  # address of the results
    out_step: int  # bytes from a row of results to the next
    x_scales: int = 0  # only int8: address of the inputs' scales
    # Address of the rows' scales: only int8, or coded rows in bf16.
    scales: int = 0
    # Bytes from a row's scales to the next row's.
    scale_step: int = 0
    row_sums: int = 0  # only int8: address of the sums of each row's codes
    sum_step: int = 0  # only int8: bytes from a row's sum to the next row's
    # Only int8, with inputs around 128: `zero` times a row's sum is added to its products.
    zero: int = 0
    # Only int8, rows of 4 bits (packing.SlotPacking), which become int8 panel by panel in the
    # caches: bytes from a row to its scales and least values. Otherwise 0.
    ends: int = 0
    # Only bf16, rows of 4-bit codes, which become bf16 panel by panel in the caches: MXFP4 or
    # PACKED. Otherwise 0.
    coded: int = 0
    tables: int = 0  # only MXFP4: address of its tables


def job_of(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    weight: int,
    row_step: int,
    rows: int,
    columns: int,
    **others: int,
) -> ProductJob:
    """Return the ProductJob for these tensors. Raise ValueError if they do not go together.

    x: (tokens, columns), for which `supports` is true. bias: (rows,), and out: (tokens, rows), both
    of one dtype. columns: of the weight. The others are fields of the ProductJob.
    """
    tokens = x.shape[0]
    x_step, x_one = x.stride()
    out_step, out_one = out.stride()
    biases = 0
    if bias is not None:
        biases = bias.data_ptr()
        if bias.dtype != out.dtype or bias.shape != (rows,) or bias.stride() != (1,):
            raise mismatch("products: bias and out", bias, out)
    if x_one != 1 or out_one != 1 or x.shape[1] != columns or out.shape != (tokens, rows):
        raise mismatch(f"products: x, a weight of {rows} x {columns} and out", x, out)
    itemsize = x.itemsize
    return ProductJob(
        first=0,
        tokens=tokens,
        x=x.data_ptr(),
        x_step=x_step * itemsize,
        weight=weight,
        row_step=row_step,
        rows=rows,
        words=columns * itemsize // _WORD,
        bias=biases,
        out=out.data_ptr(),
        out_step=out_step * out.itemsize,
        **others,
    )


def run(
    jobs: Sequence[ProductJob], inputs: torch.dtype, results: torch.dtype, adds: bool, relu: bool
) -> None:
    """Multiply all jobs; the threads share all panels of all jobs.

    inputs, results: the dtypes. adds: add to the results. relu: apply relu to the results.
    """
    from flexgen_h2o.kernels.compiled import products as loops

    table = []
    panels = 0
    nbytes = 0
    for job in jobs:
        count = -(-job.rows // BLOCK_ROWS)
        table.append(job._replace(first=panels))
        panels += count
        nbytes += count * BLOCK_ROWS * job.words * _WORD * (1 + job.tokens // _AS_LONG)
    numbers = np.array(table, dtype=np.int64)
    loop = partial(
        loops.multiply,
        _kind_of(jobs, inputs),
        element_of(results),
        (numbers.ctypes.data, len(jobs), panels),
        adds,
        relu,
        torch.get_num_threads(),
    )
    parallel_rows(loop, panels, nbytes // panels)


def _kind_of(jobs: Sequence[ProductJob], inputs: torch.dtype) -> np.number[Any]:
    """Return a number whose type tells the loop the inputs' dtype and the instructions."""
    is_float = inputs == torch.bfloat16
    if has_amx() and not any(job.words % _AMX_WORDS for job in jobs):
        return np.int16(0) if is_float else np.int8(0)
    if cpu_has("avx512bf16" if is_float else "avx512vnni"):
        return element_of(inputs)
    return np.uint32(0) if is_float else np.int32(0)
