"""After the warm-up no kernel is compiled any more; what is compiled is so by another process, and
read from disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexgen_h2o import MemoryBudget, Policy
from flexgen_h2o.checkpoint import formats
from flexgen_h2o.checkpoint.formats import Codec
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.checkpoint.formats.mxfp4 import Mxfp4
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.kernels import jit, triton
from flexgen_h2o.kernels import warm_up as warm_up_module
from flexgen_h2o.kernels.compiled import int8 as int8_loops
from flexgen_h2o.kernels.compiled import products, prompts, rows, slots
from flexgen_h2o.kernels.warm_up import _call_in_a_process, compile_subprocess
from flexgen_h2o.kvcache.eviction import H2O
from tests.gpu.test_cuda_parity import CONFIG, LLAMA, OLMOE, generate, model_folder

CPU = torch.device("cpu")
LOOPS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": loop
    for module in (slots, prompts, rows, int8_loops, products)
    for name, loop in vars(module).items()
    if hasattr(loop, "signatures")
}


def compiled() -> dict[str, int]:
    return {name: len(loop.signatures) for name, loop in LOOPS.items()}


# Columns that AMX multiplies, and others.
SMALL = {**LLAMA, "num_hidden_layers": 2, "intermediate_size": 100}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], str, Any]] = {
    "dense": (CONFIG, {}, "bfloat16", None),
    "float32": (SMALL, {}, "float32", H2O(heavy_size=6, recent_size=3)),
    "int8": (CONFIG, {"int8_compute": True}, "bfloat16", None),
    "4 bits": (SMALL, {"compress_weight": True, "compress_cache": True}, "bfloat16", None),
    "4 bits in int8": (
        SMALL,
        {"compress_weight": True, "int8_compute": True},
        "bfloat16",
        H2O(heavy_size=6, recent_size=3, positions="rolling"),
    ),
    "8 bits": (
        CONFIG,
        {"compress_weight": True, "weight_bits": 8, "compress_cache": True},
        "bfloat16",
        H2O(heavy_size=6, recent_size=3),
    ),
    "experts": (OLMOE, {}, "bfloat16", None),
}


@pytest.mark.parametrize(("config", "more", "dtype", "eviction"), RUNS.values(), ids=RUNS)
def test_a_run_compiles_nothing_after_its_warm_up(
    tmp_path: Path, monkeypatch, config: dict[str, Any], more: dict[str, Any], dtype: str, eviction
) -> None:
    before = dict[str, int]()

    opened = Engine.__init__

    def watched(*given: Any) -> None:
        before.update(compiled())
        opened(*given)

    monkeypatch.setattr(Engine, "__init__", watched)
    policy = Policy(3, 2, **more)
    folder = model_folder(tmp_path, config)
    generate(folder, policy, "cpu", MemoryBudget(host="1GiB"), dtype, eviction)
    assert before and compiled() == before


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


def test_a_numba_without_its_stamp_caches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would run loops of an earlier version of this package."""

    def njit(function: Any, cache: bool = False, **options: Any) -> Any:
        return SimpleNamespace(cached=cache, _cache=SimpleNamespace(_cache_file=object()))

    monkeypatch.setattr(jit, "_njit", njit)
    assert not jit.jit(abs).cached


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
