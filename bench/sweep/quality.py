"""What the settings of ours lose, beside their speed: KL and flips against the full cache in bf16, on a trained model.

`evaluate fidelity` at the lengths of the cell, with the flags that the setting runs with; a JSON line for each setting
and lengths in quality.jsonl beside the sweep's lines, made once.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import common
from bench.sweep.grid import Cell, System
from bench.sweep.runner import BASELINES
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kvcache.eviction import Full, mix_of

FILE = "quality.jsonl"
MODEL, PROMPTS, ROWS, LIMIT_S = "opt-tiny", 96, 32, 3600.0
EXACT = "full"  # the variant that the others are compared with
Line = dict[str, Any]


def read(folder: Path) -> list[Line]:
    """UsageError names a line that is none."""
    path = folder / FILE
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise UsageError(f"{path}: a line is not JSON ({error}); remove it") from error


def find(lines: Iterable[Line], **wanted: object) -> Line | None:
    """The newest with these values."""
    return next((line for line in [*lines][::-1] if wanted.items() <= line.items()), None)


def of_cell(cell: Cell, variant: str) -> Line:
    """What a line says of itself."""
    return {"variant": variant, "prompt_len": cell.prompt_len, "gen_len": cell.gen_len}


def flags_of(variant: str) -> tuple[list[str], str]:
    """Of `evaluate fidelity` for a variant of ours, and the name of its policy in what that finds."""
    _, _, *flags = runpy.run_path(str(BASELINES / "ours" / "run.py"))["variant_flags"](variant)
    shares = {"--hh-ratio": "prompt", "--kv-budget": "sequence", "--kv-bytes": "bytes"}
    if not flags or flags[0] not in shares:  # beside the full cache a policy is compared: it has one to name
        return [*flags, "--policies", "h2o", "--budgets", "0.2", "--budgets-of", "sequence"], Full.name
    flag, share, *rest = flags
    policy, number = "h2o", float(share) * (2 if flag == "--hh-ratio" else 1)
    if flag == "--kv-bytes":
        mix = mix_of(number)
        policy = mix.eviction
        rest += ["--compress-cache", "--cache-bits", str(mix.cache_bits), "--cache-window", str(mix.cache_window)]
    return [*rest, "--policies", policy, "--budgets", str(number), "--budgets-of", shares[flag]], policy


def measure(folder: Path, cell: Cell, systems: Iterable[System], model: str, offload_dir: Path) -> None:
    """Add the lines that are missing for the systems of ours; what fails is said, and the sweep goes on."""
    lines = read(folder)
    missing: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # by flags: variants that one command compares
    for system in systems:
        wanted = of_cell(cell, system.variant) | {"model": model}
        if system.ours and system.variant != EXACT:
            flags, policy = flags_of(system.variant)
            found = find(lines, **wanted)
            if found is None or not set(flags) <= set(found["command"]):  # what --kv-bytes chooses may have changed
                missing.setdefault(tuple(flags), []).append((system.variant, policy))
    for some, variants in missing.items():
        command = [
            "-m", "flexgen_h2o.evaluate", "fidelity", "--model", model, "--dtype", "bfloat16", "--prompt-len",
            str(cell.prompt_len), "--gen-len", str(cell.gen_len), "--num-prompts", str(PROMPTS),
            "--recall-prompts", "0", "--mass-steps", "0", "--gpu-batch-size", str(ROWS), "--device", "cpu", *some,
        ]  # fmt: skip
        cells = _cells(command, offload_dir)
        if isinstance(cells, str):
            print(f"quality of {variants[0][0]} in {cell.name}: not measured, {cells}", flush=True)
            continue
        for variant, policy in variants:
            line = of_cell(cell, variant) | {"model": model}
            line |= {name: cells[policy][name] for name in ("kl", "flips", "kv_share", "read_share")}
            line |= {"prompts": PROMPTS, "command": command}
            line |= {"date": common.date(), "commit": common.commit()}
            with (folder / FILE).open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"quality of {variant}: KL {line['kl']['value']:.4f}, flips {line['flips']['value']:.1%}", flush=True)


def _cells(command: list[str], offload_dir: Path) -> dict[str, Any] | str:
    """What the command finds, by policy; or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        whole = [sys.executable, *command, "--offload-dir", str(offload_dir), "--json", str(output)]
        code, _, said = common.run_limited(whole, common.environment(), LIMIT_S)
        if code != 0:
            return "out of time" if code is None else (said.strip().splitlines() or [f"exit code {code}"])[-1]
        return {cell["policy"]: cell for cell in json.loads(output.read_text())["cells"]}
