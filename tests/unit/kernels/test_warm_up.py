"""After the warm-up no kernel is compiled any more."""

from __future__ import annotations

import pytest
import torch

from flexgen_h2o.kernels import column_loops, slot_loops, unpack_loops
from flexgen_h2o.kernels.causal import causal_attention_lse
from flexgen_h2o.kernels.column_sums import column_sums
from flexgen_h2o.kernels.packed_rows import pack_rows, unpack_rows
from flexgen_h2o.kernels.slots import attend
from flexgen_h2o.kernels.warm_up import warm_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_left_to_compile(dtype: torch.dtype) -> None:
    warm_up(torch.device("cpu"), dtype, scored=True)
    compiled = len(slot_loops.attend_rows.signatures), len(column_loops.add_tile.signatures)
    assert min(compiled) >= 1
    q = torch.randn(3, 5, 70, 16).to(dtype)
    attend(q[0, :, :2].contiguous(), q[:2], q[:2], torch.full((5,), 9, dtype=torch.int32), 0.5)
    column_sums(q, q, causal_attention_lse(q, q, q, 0.3)[1], 0.3)
    assert (len(slot_loops.attend_rows.signatures), len(column_loops.add_tile.signatures)) == compiled


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_is_compiled(bits: int) -> None:
    warm_up(torch.device("cpu"), torch.bfloat16, scored=False, weight_bits=bits)
    compiled = len(unpack_loops.unpack.signatures)
    unpack_rows(pack_rows(torch.randn(3, 100), bits), bits, torch.empty(3, 100, dtype=torch.bfloat16))
    assert len(unpack_loops.unpack.signatures) == compiled >= 1
