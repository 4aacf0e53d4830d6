"""Products that the compiled loop of compiled/products.py takes: in bf16, and of int8 weights with uint8 inputs.

It needs AVX-512's instructions for them. Where AMX has its own, oneDNN's products in torch are faster with many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.kernels.workspace import cpu_has, element_of, parallel_rows

if TYPE_CHECKING:
    from flexgen_h2o.kernels.compiled.products import Job

_NEEDED = {torch.bfloat16: ("avx512bf16", "amx-bf16"), torch.uint8: ("avx512vnni", "amx-int8")}
_WORD = 4  # bytes: two columns in bf16, four in int8
_LEAST = 64  # bytes of a row: a vector


@lru_cache
def has_loop(dtype: torch.dtype) -> bool:
    """Is the loop to be used for inputs of this dtype, on this CPU?"""
    if dtype not in _NEEDED:
        return False
    own, faster = _NEEDED[dtype]
    return cpu_has(own) and not cpu_has(faster)


def takes(x: torch.Tensor, columns: int) -> bool:
    """Does the loop take these inputs, with rows of a weight of so many columns?"""
    nbytes = columns * x.itemsize
    return x.device.type == "cpu" and nbytes % _WORD == 0 and nbytes >= _LEAST and has_loop(x.dtype)


def job_of(
    x: torch.Tensor, weight: tuple[int, int, int], bias: torch.Tensor | None, out: torch.Tensor, **in_int8: int
) -> Job:
    """x: (rows, columns), which `takes` has let pass; weight: address, bytes from a row to the next (0: blocked), rows;
    bias: (n,), out: (rows, n), of one dtype. in_int8: the other fields of a Job.
    """
    from flexgen_h2o.kernels.compiled.products import Job

    assert x.stride(1) == out.stride(1) == 1 and out.shape == (len(x), weight[2])
    assert bias is None or (bias.dtype == out.dtype and bias.shape == (weight[2],) and bias.stride(0) == 1)
    start, row_step, rows = weight
    return Job(
        0, len(x), x.data_ptr(), x.stride(0) * x.itemsize, start, row_step, rows, x.shape[1] * x.itemsize // _WORD,
        0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0) * out.itemsize, **in_int8,
    )  # fmt: skip


def run(jobs: Sequence[Job], inputs: torch.dtype, results: torch.dtype, adds: bool, relu: bool) -> None:
    """Multiply; the threads share all panels of all jobs. inputs, results: dtypes."""
    from flexgen_h2o.kernels.compiled import products as loops

    table, panels, nbytes = [], 0, 0
    for job in jobs:
        count = -(-job.rows // BLOCK_ROWS)
        table.append((panels, *job[1:]))
        panels += count
        nbytes += count * BLOCK_ROWS * job.words * _WORD
    numbers = np.array(table, dtype=np.int64)
    loop = partial(
        loops.multiply, element_of(inputs), element_of(results), (numbers.ctypes.data, len(jobs), panels),
        loops.Ending(adds, relu), torch.get_num_threads() - 1,
    )  # fmt: skip
    parallel_rows(loop, panels, nbytes // panels)
