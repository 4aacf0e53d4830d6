"""Steps of the suite, most worth first, as command lines. Data, no running.

The first steps are grouped into three calls, each of which needs nothing of another. Its essential
steps come first, and their limits are 9 minutes together.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import common
from bench.baselines.contract import words_of
from bench.sweep.grid import LLAMA_1B

PARITY_S = 200.0
KERNEL_PARITY_S = 120.0
SHORT_S = 100.0
WRITTEN_S = 200.0  # of weights
MEASURED_S = (
    480.0  # of a profile, which is one to two minutes' work, where others take most of the cores
)
# Of essential steps of the second call on a card.
WEIGHTS_S = 140.0
LAUNCHES_S = 50.0
PROFILE_S = 130.0
PLACED_S = 56.0
# of pytest on a card: hundreds of kernels are compiled, and a process compiles one at a time
TEST_PROCESSES = 12
CALLS = {
    1: "tokens and kernels are right, and kernels fast",
    2: "placements, launches and the link",
    3: "OPT-30B in 4 bits",
}


@dataclass(frozen=True)
class Step:
    """One process. limit: seconds of it; output: where it leaves its results, as its kind has them:
    `tests` pytest's XML, `placement` a run, `figures` a benchmark's JSON. call: of
    CALLS, 0 for what comes after them; essential: what the call is for."""

    name: str
    kind: str
    command: tuple[str, ...]
    limit: float
    output: Path
    environment: dict[str, str] = field(default_factory=dict)
    call: int = 0
    essential: bool = False


@dataclass(frozen=True)
class Setting:
    """Device and sizes of a run. device_mem, host_mem, dtype: as the flags take them; run_limit:
    seconds of a placement's run."""

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
    dtype: str = "bfloat16"


def tiny_setting(results: Path, offload_dir: Path) -> Setting:
    """The same steps on the CPU: a device tier of ordinary memory, which holds the weights and
    little more."""
    return Setting(
        True,
        results,
        offload_dir,
        "cpu",
        "300MiB",
        "2GiB",
        "facebook/opt-125m",
        32,
        8,
        180.0,
    )


# Flags of flex_opt. Six numbers: shares of weights, KV cache and hidden states on device and host,
# the rest on disk.
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
    "all-on-device-sampled": f"{_ALL_ON_DEVICE} --temperature 0.8 --top-p 0.9 --top-k 50 "
    "--cut-gen-len 8",
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
# Flags of bench.gpu.launches: all on the device.
_LAUNCHES: dict[str, str] = {
    "launches-opt": "",
    "launches-opt-h2o": "--hh-ratio 0.1",
    "launches-opt-h2o-packed": "--hh-ratio 0.1 --compress-cache",
    "launches-llama-h2o": f"--hh-ratio 0.1 --model {LLAMA_1B}",
}


def all_steps(setting: Setting) -> list[Step]:
    """Every step of the suite in the order in which they are worth having."""
    large = "facebook/opt-125m" if setting.tiny else "facebook/opt-30b"
    calls = {
        1: _essential(*_parity(setting), _figures(setting, "kernels", "bench.gpu.kernels")),
        2: _placed(setting),
        3: _essential(_placement(setting, "opt-30b-4bit", _LARGE, large, 2 * setting.run_limit)),
    }
    return [
        *(replace(step, call=call) for call, steps in calls.items() for step in steps),
        *_placements(setting, _THEN),
    ]


def _essential(*steps: Step) -> list[Step]:
    return [replace(step, essential=True) for step in steps]


def _placed(setting: Setting) -> list[Step]:
    """The second call: weights, launches, the profile, the policy that it chooses, the link, H2O;
    then, where time is left, the others."""
    launches = {step.name: step for step in _launches(setting)}
    runs = {step.name: step for step in _placements(setting, _FIRST)}
    first = [
        (_weights(setting), WEIGHTS_S),
        *((launches.pop(name), LAUNCHES_S) for name in ("launches-opt", "launches-opt-h2o")),
        (_profile(setting), PROFILE_S),
        *((runs.pop(name), PLACED_S) for name in ("auto", "weights-on-host", "kv-on-host-h2o")),
    ]
    # Where there is no card the limits stay as they are: a CPU takes longer.
    essential = [step if setting.tiny else replace(step, limit=seconds) for step, seconds in first]
    return [*_essential(*essential), *launches.values(), *runs.values()]


def _weights(setting: Setting) -> Step:
    """Return the step that writes the weights of the call's models, random ones: no run is then cut
    short by writing them."""
    output = setting.results / "runs" / "weights.json"
    flags = words_of(dtype=setting.dtype, offload_dir=setting.offload_dir, output=output)
    command = _module("bench.gpu.weights", setting.model, LLAMA_1B, *flags)
    return Step("weights", "figures", command, WRITTEN_S, output)


def _module(name: str, *words: str) -> tuple[str, ...]:
    """The command that runs a module."""
    return (sys.executable, "-m", name, *words)


def _parity(setting: Setting) -> Iterator[Step]:
    """Tokens of the engine, and kernels beside their references; where there is no card by Triton's
    interpreter."""
    interpreted = setting.device == "cpu"
    kernels = [f"tests/unit/kernels/test_triton{of}.py" for of in ("", "_prompts", "_weights")]
    for name, tests, marked, limit in (
        ("parity-tests", ("tests/gpu",), "gpu", 1.5 * PARITY_S if interpreted else PARITY_S),
        (
            "kernel-tests",
            kernels,
            "not slow" if interpreted else "slow or not slow",
            KERNEL_PARITY_S,
        ),
    ):
        found = setting.results / f"{name}.xml"
        paths = (str(common.ROOT / path) for path in tests)
        how = ("-q", "--rootdir", str(common.ROOT), "-m", marked, f"--junitxml={found}")
        command = _module("pytest", *how, *paths, *_processes(setting))
        environment = {"FLEXGEN_GPU_TEST_DEVICE": setting.device}
        yield Step(name, "tests", command, limit, found, environment)


def _processes(setting: Setting) -> tuple[str, ...]:
    """Flags of pytest: several processes on a card, where pytest-xdist is there."""
    if setting.device == "cpu" or find_spec("xdist") is None:
        return ()
    return "-n", str(min(TEST_PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"


def _figures(setting: Setting, name: str, module: str, *flags: str) -> Step:
    output = setting.results / "runs" / f"{name}.json"
    usual = words_of(device=setting.device, quiet_wait=0, output=output)
    return Step(name, "figures", _module(module, *usual, *flags), SHORT_S, output)


def _launches(setting: Setting) -> Iterator[Step]:
    """Return the steps that count launches of two families. The LLaMA shape is small: launches do
    not depend on the width."""
    for name, own in _LAUNCHES.items():
        flags = words_of(
            model=setting.model,
            prompt_len=setting.prompt_len,
            offload_dir=setting.offload_dir,
            dtype=setting.dtype,
        )
        yield _figures(setting, name, "bench.gpu.launches", *flags, *own.split())


def _profile(setting: Setting) -> Step:
    """Return the step that measures this machine, where predictions of the placements come from."""
    output = setting.results / "runs" / "profile.json"
    flags = words_of(device=setting.device, offload_dir=setting.offload_dir, output=output)
    command = _module("flexgen_h2o.hardware", *flags)
    return Step("profile", "figures", command, MEASURED_S, output)


def runs_of(steps: Sequence[Step], kind: str) -> dict[str, Any]:
    """Return what the steps of a kind left, JSON objects by name; nothing of one that left none, or
    was killed meanwhile."""
    found = {}
    for step in steps:
        if step.kind == kind:
            with suppress(FileNotFoundError, ValueError):
                found[step.name] = json.loads(step.output.read_text())
    return found


def _placements(setting: Setting, flags: dict[str, str]) -> Iterator[Step]:
    for name, text in flags.items():
        yield _placement(setting, name, text, setting.model, setting.run_limit)


def _placement(setting: Setting, name: str, flags: str, model: str, limit: float) -> Step:
    output = setting.results / "runs" / f"{name}.json"
    usual = words_of(
        model=model,
        path="_DUMMY_",
        dtype=setting.dtype,
        device=setting.device,
        device_mem=setting.device_mem,
        host_mem=setting.host_mem,
        prompt_len=setting.prompt_len,
        gen_len=setting.gen_len,
        offload_dir=setting.offload_dir,
    )
    command = _module("bench.gpu.watch_flex_opt", str(output), *usual, *flags.split())
    return Step(name, "placement", command, limit, output)
