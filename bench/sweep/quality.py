"""Loss of quality of answers, beside their speed: KL and flips against our full cache in bf16, on a
trained model.

Of settings of ours `evaluate fidelity` at the lengths of the cell, with the flags that the setting
runs with; of peers with bits of their own the same rows and steps, whose tokens they are given. A
JSON line for each setting and lengths in quality.jsonl beside the sweep's lines, made once for each
model.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import common
from bench.baselines.contract import words_of
from bench.sweep.grid import Cell, System
from bench.sweep.runner import BASELINES, Setup, command_of, environment_of, reason_of
from flexgen_h2o import LLM, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.fidelity import divergence, flips, followed
from flexgen_h2o.evaluation.figures import Bootstrap
from flexgen_h2o.evaluation.rows import TextRow, held_out_rows, text_of
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.kvcache.eviction.mixes import table_for
from flexgen_h2o.models.load import find_model

sys.path.append(str(BASELINES))  # where run_ours.py finds contract.py
FILE = "quality.jsonl"
MODEL = "opt-tiny"
PROMPTS = 96
ROWS = 32
LIMIT_S = 3600.0
# as `evaluate fidelity` has them
RESAMPLES = 1000
SEED = 0
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
    """Return what a line says of itself. model: None for any; a folder goes by its name."""
    named = {} if model is None else {"model": Path(model).name}
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


def measure(folder: Path, cell: Cell, systems: Sequence[System], model: str, setup: Setup) -> None:
    """Add the lines that are missing; what fails is said, and the sweep goes on."""
    _measure_ours(folder, cell, systems, model, setup.offload_dir)
    lines = read(folder)
    peers = [system for system in systems if not system.ours and LOSSY.search(system.name)]
    missing = [peer for peer in peers if find(lines, **of_cell(cell, peer.name, model)) is None]
    if not missing:
        return
    rows, full = _reference(model, cell, setup.offload_dir)
    for peer in missing:
        scores = _scores_of(setup, peer, cell, model, rows)
        if isinstance(scores, str):
            print(f"quality of {peer.name} in {cell.name}: not measured, {scores}", flush=True)
        else:
            _keep(folder, of_cell(cell, peer.name, model) | _compared(full, scores))


def _keep(folder: Path, line: Line) -> None:
    line |= {"prompts": PROMPTS, "date": common.date(), "commit": common.commit()}
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")
    kl = line["kl"]["value"]
    flipped = line["flips"]["value"]
    print(f"quality of {line['variant']}: KL {kl:.4f}, flips {flipped:.1%}", flush=True)


def _measure_ours(
    folder: Path, cell: Cell, systems: Iterable[System], model: str, offload_dir: Path
) -> None:
    lines = read(folder)
    missing: dict[
        tuple[str, ...], list[tuple[str, str]]
    ] = {}  # by flags: variants that one command compares
    for system in systems:
        wanted = of_cell(cell, system.variant, model)
        if system.ours and system.variant != EXACT:
            flags, policy = flags_of(system.variant)
            found = find(lines, **wanted)
            if found is None or not set(flags) <= set(
                found["command"]
            ):  # what --kv-bytes chooses may have changed
                missing.setdefault(tuple(flags), []).append((system.variant, policy))
    for some, variants in missing.items():
        fixed = words_of(
            model=model,
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
            line = of_cell(cell, variant, model)
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


def _reference(model: str, cell: Cell, offload_dir: Path) -> tuple[list[TextRow], torch.Tensor]:
    """The rows that `evaluate fidelity` has, and the full cache's logits in bf16: (rows, new
    tokens, vocabulary)."""
    with LLM(
        model, Policy(ROWS, -(-PROMPTS // ROWS)), dtype="bfloat16", offload_dir=offload_dir
    ) as llm:
        rows = held_out_rows(
            text_of(None, llm.model, ""), PROMPTS, cell.prompt_len, cell.gen_len, SEED
        )
        return rows, followed(llm, rows)


def _scores_of(
    setup: Setup, peer: System, cell: Cell, model: str, rows: Sequence[TextRow]
) -> torch.Tensor | str:
    """Return what a peer thinks of the rows, in the shape of `_reference`; or why that is not
    known."""
    weights = find_model(model, None).folder
    assert weights is not None
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "given.json"
        tokens = {
            "prompts": [row.prompt for row in rows],
            "continuations": [row.continuation for row in rows],
        }
        given.write_text(json.dumps(tokens))
        command = [*command_of(setup, peer, cell, weights, PROMPTS, None), "--score", str(given)]
        code, _, said = common.run_limited(command, environment_of(setup, peer)[0], LIMIT_S)
        if code != 0:
            return "out of time" if code is None else reason_of(said) or f"exit code {code}"
        return torch.from_numpy(np.load(given.with_suffix(".npy")))


def _compared(full: torch.Tensor, scores: torch.Tensor) -> Line:
    """KL and flips; as of our policies without the first token, which prompts give."""
    boot = Bootstrap(len(full), RESAMPLES, SEED)
    found = Line()
    for name, measure_of in (("kl", divergence), ("flips", flips)):
        found[name] = boot.mean(measure_of(full[:, 1:], scores[:, 1:]).double().mean(1).numpy())
    return found
