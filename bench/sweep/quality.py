"""Loss of quality of answers, beside their speed: KL and flips against our full cache in bf16, on a
trained model.

`evaluate fidelity` at the lengths of the cell, with the flags that the setting runs with. A JSON
line for each setting and lengths in quality.jsonl beside the sweep's lines. Those of other systems
with bits of their own were made by the commits that they name.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import common
from bench.baselines.contract import words_of
from bench.sweep.grid import Cell, System
from bench.sweep.runner import BASELINES
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.kvcache.eviction.mixes import table_for

sys.path.append(str(BASELINES))  # where run_ours.py finds contract.py
FILE = "quality.jsonl"
MODEL = "opt-tiny"
PROMPTS = 96
ROWS = 32
LIMIT_S = 3600.0
EXACT = "full"  # the variant that the others are compared with
# Peers whose weights, products or, of OpenVINO by its own default, KV cache are not bf16.
LOSSY = re.compile(r"int8|int4|q\d|\dbit|openvino")
Line = dict[str, Any]


def read(folder: Path) -> list[Line]:
    """UsageError names a line that is none."""
    path = folder / FILE
    lines = []
    for number, text in enumerate(path.read_text().splitlines() if path.is_file() else [], 1):
        try:
            line = json.loads(text)
            float(line["kl"]["value"]), float(line["flips"]["value"])
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{path}: line {number} does not say what answers lose; remove it"
            ) from error
        lines.append(line)
    return lines


def find(lines: Iterable[Line], **wanted: object) -> Line | None:
    """The newest with these values."""
    return next((line for line in [*lines][::-1] if wanted.items() <= line.items()), None)


def of_cell(cell: Cell, variant: str, model: str | None = None) -> Line:
    """Return what a line says of itself. model: None for any."""
    named = {} if model is None else {"model": model}
    return {"variant": variant, "prompt_len": cell.prompt_len, "gen_len": cell.gen_len, **named}


def flags_of(variant: str) -> tuple[list[str], str]:
    """Return the flags of `evaluate fidelity` for a variant of ours, and the name of its policy in
    what that finds."""
    ours = runpy.run_path(str(BASELINES / "systems" / "run_ours.py"))
    _, _, *flags = ours["variant_flags"](variant)
    shares = {"--hh-ratio": "prompt", "--kv-budget": "sequence", "--kv-bytes": "bytes"}
    if (
        not flags or flags[0] not in shares
    ):  # beside the full cache a policy is compared: it has one to name
        full = words_of(policies="h2o", budgets=0.2, budgets_of="sequence")
        return [*flags, *full], Full.name
    flag, share, *rest = flags
    policy = "h2o"
    number = float(share) * (2 if flag == "--hh-ratio" else 1)
    if flag == "--kv-bytes":
        mix = table_for().mix_of(number)
        policy = mix.eviction
        rest += words_of(
            compress_cache=True, cache_bits=mix.cache_bits, cache_window=mix.cache_window
        )
    return [*rest, *words_of(policies=policy, budgets=number, budgets_of=shares[flag])], policy


def _keep(folder: Path, line: Line) -> None:
    line |= {"prompts": PROMPTS, "date": common.date(), "commit": common.commit()}
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")
    kl = line["kl"]["value"]
    flipped = line["flips"]["value"]
    print(f"quality of {line['variant']}: KL {kl:.4f}, flips {flipped:.1%}", flush=True)


def measure(folder: Path, cell: Cell, systems: Iterable[System], offload_dir: Path) -> None:
    """Add the lines of ours that are missing; what fails is said, and the sweep goes on."""
    lines = read(folder)
    # by flags: variants that one command compares
    missing: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for system in systems:
        if system.ours and system.variant != EXACT:
            flags, policy = flags_of(system.variant)
            found = find(lines, **of_cell(cell, system.variant, MODEL))
            # what --kv-bytes chooses may have changed
            if found is None or not set(flags) <= set(found["command"]):
                missing.setdefault(tuple(flags), []).append((system.variant, policy))
    for some, variants in missing.items():
        fixed = words_of(
            model=MODEL,
            dtype="bfloat16",
            prompt_len=cell.prompt_len,
            gen_len=cell.gen_len,
            num_prompts=PROMPTS,
            recall_prompts=0,
            gpu_batch_size=ROWS,
            device="cpu",
        )
        command = ["-m", "flexgen_h2o.evaluate", "fidelity", *fixed, *some]
        cells = _cells(command, offload_dir)
        if isinstance(cells, str):
            print(f"quality of {variants[0][0]} in {cell.name}: not measured, {cells}", flush=True)
            continue
        for variant, policy in variants:
            line = of_cell(cell, variant, MODEL)
            line |= {name: cells[policy][name] for name in ("kl", "flips", "kv_share")}
            _keep(folder, line | {"command": command})


def _cells(command: list[str], offload_dir: Path) -> dict[str, Any] | str:
    """Return what the command finds, by policy; or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        whole = [sys.executable, *command, "--offload-dir", str(offload_dir), "--json", str(output)]
        code, _, said = common.run_limited(whole, common.environment(), LIMIT_S)
        if code != 0:
            return (
                "out of time"
                if code is None
                else (said.strip().splitlines() or [f"exit code {code}"])[-1]
            )
        return {cell["policy"]: cell for cell in json.loads(output.read_text())["cells"]}
