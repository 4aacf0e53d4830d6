"""After the warm-up no kernel is compiled any more; what is compiled is so by another process, and
read from disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.checkpoint import formats
from flexgen_h2o.checkpoint.formats import Codec
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.checkpoint.formats.int8 import Int8
from flexgen_h2o.checkpoint.formats.mxfp4 import Mxfp4
from flexgen_h2o.core.packing import KVPacking, int8_row_bytes
from flexgen_h2o.kernels import jit, triton
from flexgen_h2o.kernels import warm_up as warm_up_module
from flexgen_h2o.kernels.compiled import int8 as int8_loops
from flexgen_h2o.kernels.compiled import products, prompts, rows, slots
from flexgen_h2o.kernels.elementwise import Rotation, clamped_gate, rms_norm, silu_gated
from flexgen_h2o.kernels.hadamard import hadamard
from flexgen_h2o.kernels.int8 import (
    BUFFERS,
    Int8Rows,
    RequantisedRows,
    pack_int8_rows,
    requantise_rows,
)
from flexgen_h2o.kernels.linear import DenseRows, linear_relu, linear_shared_input
from flexgen_h2o.kernels.packed import pack_columns, pack_rows, unpack_rows
from flexgen_h2o.kernels.prefill_attention import causal_attention_lse, column_sums
from flexgen_h2o.kernels.slot_form import SlotForm
from flexgen_h2o.kernels.slots import attend
from flexgen_h2o.kernels.warm_up import _call_in_a_process, compile_subprocess, warm_up
from flexgen_h2o.kernels.workspace import Workspace

CPU = torch.device("cpu")
BF16 = torch.bfloat16
LOOPS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": loop
    for module in (slots, prompts, rows, int8_loops, products)
    for name, loop in vars(module).items()
    if hasattr(loop, "signatures")
}


def compiled() -> dict[str, int]:
    return {name: len(loop.signatures) for name, loop in LOOPS.items()}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_nothing_is_left_to_compile(dtype: torch.dtype) -> None:
    """Neither of attention, over packed slots too, nor of what a model with rotary embeddings and
    rolling needs."""
    packing = KVPacking.of(64, 4)
    warm_up(CPU, dtype, scored=True)
    warm_up(CPU, dtype, scored=True, packing=packing, rolling=True, rotary=True)
    before = compiled()
    assert rows.norm_rows.signatures and slots.attend_rows.signatures
    q = torch.randn(3, 5, 70, 64).to(dtype)
    filled = torch.full((5,), 9, dtype=torch.int32)
    attend(q[0, :, :2].contiguous(), q[:2], q[:2], filled, 0.5)
    packed = pack_columns(q[:2], packing.keys)
    attend(q[0, :, :2].contiguous(), packed, packed, filled, 0.5, form=SlotForm(packing))
    column_sums(q, q, causal_attention_lse(q, q, q, 0.3)[1], 0.3)
    Rotation(torch.ones(8), 1.0).rotated(torch.zeros(3, 5, 16).to(dtype), torch.zeros(3, 5).int())
    x = torch.randn(5, 3, 16).to(dtype)
    Rotation(torch.ones(8), 1.0).rotate((x,), torch.arange(5))
    hadamard(x)
    silu_gated(rms_norm(x[:, 0], x[0, 0], 1e-5, x[:, 1].clone()), x[:, 2].contiguous())
    clamped_gate(x[:, 0].contiguous(), 1.7, 7.0, torch.empty(5, 8, dtype=dtype))
    assert compiled() == before


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (Groupwise(2, 4), "4 bits"),
        (Groupwise(2, 8), "8 bits"),
        (Groupwise(2, 4, in_int8=True), "4 bits in int8"),
        (Int8(2), "int8"),
        (Codec(2), "dense"),
    ],
)
def test_what_a_format_of_weights_needs_is_compiled(form: Codec, kind: str) -> None:
    """To unpack, and to multiply with a bias and without, into a result and added to it.

    Columns that AMX multiplies, and others.
    """
    all_columns = (100, 128)
    stored = {}
    for columns in all_columns:  # packed ahead
        rows = torch.randn(128, columns)
        stored["dense", columns] = rows.to(BF16)
        stored["int8", columns] = pack_int8_rows(rows)
        for bits in (4, 8):
            stored[f"{bits} bits", columns] = pack_rows(rows, bits)
    sizes = dict.fromkeys(BUFFERS, 2**17)
    memory = Workspace(torch.empty(sum(sizes.values()), dtype=torch.uint8), sizes, BF16)
    warm_up(CPU, BF16, scored=False, weights=partial(formats.warm_up, form))
    before = compiled()
    for columns in all_columns:
        rows = stored[kind.removesuffix(" in int8"), columns]
        if kind.endswith(" bits"):
            unpack_rows(rows, int(kind[0]), torch.empty(128, columns, dtype=BF16))
            continue
        part = {
            "dense": lambda rows, *_: DenseRows(rows),
            "int8": Int8Rows,
            "4 bits in int8": RequantisedRows,
        }[kind](rows, columns, memory)
        x = torch.randn(3, columns).to(BF16)
        out = torch.zeros(3, 128, dtype=BF16)
        for bias in (None, torch.randn(128).to(BF16)):
            for adds in (False, True):
                linear_shared_input(x, [((part,), bias, out)], adds)
        linear_relu(x, (part,), None, out)
        if kind == "4 bits in int8":
            requantise_rows(
                rows, torch.empty(128, int8_row_bytes(columns), dtype=torch.uint8), columns
            )
    assert compiled() == before


@pytest.mark.parametrize(
    "form", [Groupwise(4, 4), Groupwise(4, 8), Mxfp4(4)], ids=lambda form: form.name
)
def test_a_card_is_warmed_up_for_products_with_codes(
    form: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few and of more rows, with a bias and without, into a result and added to it."""
    seen = set()

    def launch(name: str, grid: object, given: object, **constants: Any) -> None:
        if name == "products.few_rows":
            kind = ("one", "dense", "coded")[constants["TABLE"] * (1 + bool(constants["BITS"]))]
            seen.add((kind, constants["TOKENS"], constants["BIASED"], constants["ADDS"]))

    monkeypatch.setattr(triton, "supports", lambda *tensors: True)
    monkeypatch.setattr(triton, "launch", launch)
    formats.warm_up(form, CPU, torch.float32)
    assert seen == (alone := set(product(["one"], (16, 32), (False, True), (False, True))))
    formats.warm_up(form, CPU, torch.float32, experts=True)
    assert seen - alone == set(product(("dense", "coded"), (16, 32), (False, True), [False]))


def test_what_is_compiled_is_stamped_with_all_that_it_has() -> None:
    names = {name for name, *_ in jit._STAMP}
    assert {
        "packing.py",
        "units.py",
        "jit.py",
        "vectors.py",
    } <= names  # of core, of kernels, and below


# ---- in a process of its own

# Runs a loop, and prints how often a compiled loop was loaded from disk.
RUN = """
import flexgen_h2o, torch
from flexgen_h2o.kernels.compiled.rows import silu_rows
from flexgen_h2o.kernels.elementwise import silu_gated
from flexgen_h2o.kernels.warm_up import compile_subprocess

x = torch.zeros(1, 64)
compile_subprocess(silu_gated, x, x)
silu_gated(x, x)
assert len(silu_rows.signatures) == 1
print(sum(silu_rows.stats.cache_hits.values()))
"""


def test_this_process_loads_what_another_compiled(tmp_path: Path) -> None:
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 1 and list(tmp_path.rglob("*.nbc"))


def add_one(x):  # type: ignore[no-untyped-def]
    return x + 1


def test_a_disk_that_is_full_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def save(*_: object) -> None:
        tried.append(1)
        raise OSError(errno.ENOSPC, "no space left on device")

    loop = jit.jit(add_one)
    monkeypatch.setattr(loop._cache, "load_overload", lambda *_: None)
    monkeypatch.setattr(loop._cache._cache_file, "save", save)
    assert loop(2) == 3 and tried


def test_where_nothing_can_be_kept_this_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: None)
    monkeypatch.setattr(warm_up_module, "_call_in_a_process", pytest.fail)
    calls: list[object] = []
    compile_subprocess(calls.append, 1)
    assert calls == [1]


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_where_no_process_starts_this_one_compiles(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    calls: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> None:
        calls.append(x)
        if len(calls) == 1 and executable:
            raise warm_up_module._NotCompiledError

    monkeypatch.setattr(
        warm_up_module, "_call_in_a_process", _call_in_a_process
    )  # as it is outside of tests
    monkeypatch.setattr(warm_up_module.pickle, "dumps", lambda _: b"")
    compile_subprocess(call, torch.ones(1))
    assert len(calls) == 1 + bool(executable)
