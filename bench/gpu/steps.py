"""What the suite runs, most worth first, as command lines. Data, no running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import common
from bench.sweep.grid import GRIDS, Cell, systems_of

PARITY_S = 200.0
TESTS = "tests.xml"


@dataclass(frozen=True)
class Step:
    """One process. limit: seconds of it; kind: `tests`, `placement` or `sweep`; output: where it leaves its results."""

    name: str
    kind: str
    command: tuple[str, ...]
    limit: float
    output: Path
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """Where and at what size. device_mem, host_mem: as the flags take them; limits: seconds of a run and of a cell."""

    tiny: bool
    results: Path
    offload_dir: Path
    device: str = "cuda"
    device_mem: str = "15GiB"
    host_mem: str = "40GiB"
    model: str = "facebook/opt-6.7b"
    prompt_len: int = 512
    gen_len: int = 32
    run_limit: float = 150.0
    cell_limit: float = 400.0
    measurement_limit: float = 150.0


def tiny_setting(results: Path, offload_dir: Path) -> Setting:
    """The same steps on the CPU: a device tier of ordinary memory, which holds the weights and little more."""
    return Setting(
        True, results, offload_dir, "cpu", "300MiB", "2GiB", "facebook/opt-125m", 32, 8, 60.0, 120.0, 60.0
    )  # fmt: skip


# Flags of flex_opt. Six numbers: shares of weights, KV cache and hidden states on device and host, the rest on disk.
_KV_ON_HOST = "--percent 80 20 0 100 100 0 --gpu-batch-size 8 --num-gpu-batches 4"
_ALL_ON_DEVICE = "--percent 100 0 100 0 100 0 --gpu-batch-size 4"
_WEIGHTS_ON_HOST = "--percent 0 100 100 0 100 0 --gpu-batch-size 16"
_THREE_TIERS = "--percent 30 40 30 40 50 50 --gpu-batch-size 8 --cut-gen-len 4"
_FIRST: dict[str, str] = {
    "auto": "--policy auto",
    "auto-h2o": "--policy auto --hh-ratio 0.1",
    "weights-on-host": _WEIGHTS_ON_HOST,
    "kv-on-host": f"{_KV_ON_HOST} --cut-gen-len 8",
    "kv-on-host-attention-there": f"{_KV_ON_HOST} --cpu-cache-compute --cut-gen-len 4",
    "kv-on-host-h2o": f"{_KV_ON_HOST} --hh-ratio 0.1 --cut-gen-len 8",
    "weights-4bit-on-host": f"{_WEIGHTS_ON_HOST} --compress-weight",
    "weights-4bit-on-device-h2o": f"{_ALL_ON_DEVICE} --compress-weight --hh-ratio 0.1",
}
_THEN: dict[str, str] = {
    "all-on-device": _ALL_ON_DEVICE,
    "all-on-device-sampled": f"{_ALL_ON_DEVICE} --temperature 0.8 --top-p 0.9 --top-k 50 --cut-gen-len 8",
    "three-tiers": _THREE_TIERS,
    "three-tiers-h2o": f"{_THREE_TIERS} --hh-ratio 0.1",
    "three-tiers-4bit": f"{_THREE_TIERS} --compress-weight",
    "weights-8bit-on-host": f"{_WEIGHTS_ON_HOST} --compress-weight --weight-bits 8",
    "weights-on-host-not-pinned": f"{_WEIGHTS_ON_HOST} --pin-weight false --cut-gen-len 8",
    "weights-on-host-sequential": f"{_WEIGHTS_ON_HOST} --overlap false --cut-gen-len 8",
    "weights-on-disk": "--percent 0 0 100 0 100 0 --gpu-batch-size 16 --cut-gen-len 4",
    "kv-and-hidden-on-disk": "--percent 80 20 0 0 0 0 --gpu-batch-size 8 --cut-gen-len 4",
    "kv-4bit-on-host": f"{_KV_ON_HOST} --compress-cache --cut-gen-len 8",
    "kv-4bit-on-device-h2o": f"{_ALL_ON_DEVICE} --compress-cache --hh-ratio 0.1 --cut-gen-len 8",
    "int8": f"{_WEIGHTS_ON_HOST} --int8-compute",
}
_LARGE = "--policy auto --compress-weight --cut-gen-len 4"


def all_steps(setting: Setting) -> list[Step]:
    """Every step of the suite in the order in which they are worth having."""
    six, thirty, minikv = (
        (("gpu-tiny",) * 2 + ("mem-spd-tiny",)) if setting.tiny else ("gpu-6.7b", "gpu-30b", "mem-spd")
    )
    cells = GRIDS[six]
    large = "facebook/opt-125m" if setting.tiny else "facebook/opt-30b"
    return [
        _parity(setting),
        *_placements(setting, _FIRST),
        _cell(setting, "table", six, cells[0]),
        _placement(setting, "opt-30b-4bit", _LARGE, large, 2 * setting.run_limit),
        *_placements(setting, _THEN),
        *(_cell(setting, "mem-spd", minikv, cell) for cell in GRIDS[minikv]),
        *(_cell(setting, "table", six, cell) for cell in cells[1:]),
        *(_cell(setting, "table", thirty, cell) for cell in GRIDS[thirty] if cell not in cells),
    ]


def _parity(setting: Setting) -> Step:
    found = setting.results / TESTS
    tests = str(common.ROOT / "tests" / "gpu")
    command = (
        sys.executable, "-m", "pytest", "-q", "--rootdir", str(common.ROOT), "-m", "gpu", tests, f"--junitxml={found}"
    )  # fmt: skip
    return Step("parity-tests", "tests", command, PARITY_S, found, {"FLEXGEN_GPU_TEST_DEVICE": setting.device})


def _placements(setting: Setting, flags: dict[str, str]) -> Iterator[Step]:
    for name, text in flags.items():
        yield _placement(setting, name, text, setting.model, setting.run_limit)


def _placement(setting: Setting, name: str, flags: str, model: str, limit: float) -> Step:
    output = setting.results / "runs" / f"{name}.json"
    command = (
        sys.executable, "-m", "bench.gpu.watch_flex_opt", str(output), "--model", model, "--path", "_DUMMY_",
        "--dtype", "bfloat16", "--device", setting.device, "--device-mem", setting.device_mem,
        "--host-mem", setting.host_mem, "--prompt-len", str(setting.prompt_len), "--gen-len", str(setting.gen_len),
        "--offload-dir", str(setting.offload_dir), *flags.split(),
    )  # fmt: skip
    return Step(name, "placement", command, limit, output)


def _cell(setting: Setting, table: str, grid: str, cell: Cell) -> Step:
    """One cell of the sweep. Lines go to <table>.jsonl, so that a step which was cut short goes on where it was."""
    first, last = cell.rows
    values = (cell.model, cell.prompt_len, cell.gen_len, cell.budget, first, last)
    name = f"{table} {cell.model.split('-')[-1]} {cell.prompt_len}+{cell.gen_len}"
    if table == "mem-spd":
        name += f" x {first}"
    command = (
        sys.executable, "-m", "bench.sweep", "--cell", ",".join(map(str, values)), "--device", setting.device,
        "--device-mem", setting.device_mem, "--offload-dir", str(setting.offload_dir),
        "--results", str(setting.results), "--name", table, "--limit", f"{setting.measurement_limit:.0f}",
        "--quiet-wait", "0", "--repeats", "0", "--systems", *(system.name for system in systems_of(grid, cell)),
    )  # fmt: skip
    return Step(name, "sweep", command, setting.cell_limit, setting.results / f"{table}.jsonl")
