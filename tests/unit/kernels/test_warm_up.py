"""After the warm-up no kernel is compiled any more."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flexgen_h2o.checkpoint import formats
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.checkpoint.formats.int8 import Int8
from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.kernels.compiled import int8 as int8_loops
from flexgen_h2o.kernels.compiled import int8 as requantise_loops
from flexgen_h2o.kernels.compiled import prompts as column_loops
from flexgen_h2o.kernels.compiled import prompts as prompt_loops
from flexgen_h2o.kernels.compiled import rows as rotary_loops
from flexgen_h2o.kernels.compiled import rows as row_loops
from flexgen_h2o.kernels.compiled import rows as unpack_loops
from flexgen_h2o.kernels.compiled import slots as slot_loops
from flexgen_h2o.kernels.elementwise import Rotation, rms_norm, silu_gated
from flexgen_h2o.kernels.int8 import Int8Rows, pack_int8_rows, rescale
from flexgen_h2o.kernels.int8_blocked import _works, blank_int8_rows, requantise_rows
from flexgen_h2o.kernels.linear import linear_each
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.kernels.prefill_attention import causal_attention_lse, column_sums
from flexgen_h2o.kernels.slots import attend
from flexgen_h2o.kernels.warm_up import warm_up
from flexgen_h2o.kernels.workspace import Workspace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_left_to_compile(dtype: torch.dtype) -> None:
    warm_up(torch.device("cpu"), dtype, scored=True)
    loops = slot_loops.attend_rows, column_loops.add_tile, prompt_loops.attend_units
    compiled = [len(loop.signatures) for loop in loops]
    assert min(compiled[:2]) >= 1
    q = torch.randn(3, 5, 70, 16).to(dtype)
    attend(q[0, :, :2].contiguous(), q[:2], q[:2], torch.full((5,), 9, dtype=torch.int32), 0.5)
    column_sums(q, q, causal_attention_lse(q, q, q, 0.3)[1], 0.3)
    assert [len(loop.signatures) for loop in loops] == compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_is_compiled(dtype: torch.dtype) -> None:
    warm_up(torch.device("cpu"), dtype, scored=False, rolling=True)
    compiled = len(rotary_loops.rotate_rows.signatures)
    Rotation(torch.ones(8), 1.0).rotated(torch.zeros(3, 5, 16).to(dtype), torch.zeros(3, 5).int())
    assert len(rotary_loops.rotate_rows.signatures) == compiled >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_llama_needs_is_compiled(dtype: torch.dtype) -> None:
    def compiled() -> list[int]:
        loops = (row_loops.norm_rows, row_loops.silu_rows, rotary_loops.rotate_heads)
        return [len(loop.signatures) for loop in loops]

    warm_up(torch.device("cpu"), dtype, scored=False, rotary=True)
    before = compiled()
    x = torch.randn(5, 3, 16).to(dtype)
    Rotation(torch.ones(8), 1.0).rotate((x,), torch.arange(5))
    silu_gated(rms_norm(x[:, 0], x[0, 0], 1e-5, x[:, 1].clone()), x[:, 2].contiguous())
    assert compiled() == before and min(before[:2]) >= 1


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_is_compiled(bits: int) -> None:
    warm_up(torch.device("cpu"), torch.bfloat16, scored=False, weights=partial(formats.warm_up, Groupwise(2, bits)))
    compiled = len(unpack_loops.unpack.signatures)
    unpack_rows(pack_rows(torch.randn(3, 100), bits), bits, torch.empty(3, 100, dtype=torch.bfloat16))
    assert len(unpack_loops.unpack.signatures) == compiled >= 1


def test_unpacking_to_int8_is_compiled() -> None:
    """In order, and where this CPU can, blocked."""
    warm_up(
        torch.device("cpu"),
        torch.bfloat16,
        scored=False,
        weights=partial(formats.warm_up, Groupwise(2, 4, to_int8=True)),
    )
    loops = (requantise_loops.in_order, requantise_loops.blocked)
    compiled = [len(loop.signatures) for loop in loops]
    for columns in (100, 128):
        memory = torch.empty(128, int8_row_bytes(columns), dtype=torch.uint8)
        requantise_rows(pack_rows(torch.randn(128, columns), 4), 0, blank_int8_rows(memory), columns)
    assert [len(loop.signatures) for loop in loops] == compiled and compiled[0] >= 1


def test_products_in_int8_are_compiled() -> None:
    """With a bias and without, into a result and added to it."""
    packed, x = pack_int8_rows(torch.randn(5, 100)), torch.randn(3, 100).to(torch.bfloat16)
    warm_up(torch.device("cpu"), torch.bfloat16, scored=False, weights=partial(formats.warm_up, Int8(2)))
    compiled = len(int8_loops.quantise.signatures), len(int8_loops.rescale.signatures)
    sizes = dict.fromkeys(("int8 inputs", "int8 input scales", "int8 weight scales", "int8 sums"), 320)
    part = Int8Rows(packed, 100, Workspace(torch.empty(1280, dtype=torch.uint8), sizes, torch.bfloat16))
    for bias in (None, torch.randn(5).to(torch.bfloat16)):
        for adds in (False, True):
            out = torch.zeros(3, 5, dtype=torch.bfloat16)
            linear_each(x, [((part,), bias, out)], adds)
            if _works():  # rows are blocked here, whose sums are in float32
                rescale(torch.zeros(3, 5), torch.zeros(3), torch.zeros(5), bias, out, adds)
    assert (len(int8_loops.quantise.signatures), len(int8_loops.rescale.signatures)) == compiled
    assert min(compiled) >= 1
