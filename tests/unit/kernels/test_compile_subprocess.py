"""Loops are compiled once, by another process; this one loads the result from disk."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexgen_h2o.kernels import jit, warm_up
from flexgen_h2o.kernels.warm_up import compile_subprocess

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


def _write_nothing() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def loaded_in(cache: Path, disk_is_full: bool = False) -> int:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False,
        preexec_fn=_write_nothing if disk_is_full else None,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_this_process_never_compiles(tmp_path: Path) -> None:
    assert loaded_in(tmp_path) == 1
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    assert kept
    assert loaded_in(tmp_path) == 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == kept


def test_where_nothing_can_be_kept_this_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "is_kept", lambda: False)
    monkeypatch.setattr(warm_up, "_call_in_a_process", pytest.fail)
    calls: list[object] = []
    compile_subprocess(calls.append, 1)
    assert calls == [1]


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_where_no_process_starts_this_one_compiles(executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    calls: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> None:
        calls.append(x)
        if len(calls) == 1 and executable:
            raise warm_up._NotCompiledError

    monkeypatch.setattr(warm_up.pickle, "dumps", lambda _: b"")
    compile_subprocess(call, torch.ones(1))
    assert len(calls) == 1 + bool(executable)


def test_a_disk_that_is_full_is_no_failure(tmp_path: Path) -> None:
    assert loaded_in(tmp_path, disk_is_full=True) == 0
    assert not list(tmp_path.rglob("*.nbc"))
