"""Yield of a night: prompts that a model answers in 10 hours on machines of several sizes, as
the planner predicts.

Nothing runs. For each model and memory the fastest policy for a pile of 10,000 prompts is searched,
in the two ways of SETTINGS, with the saved profiles of a 2-core CPU without a card and of a T4
whose memory is set to other cards' sizes. Prints two tables, a row for each model and card; `-`: no
policy fits. docs/start/which-model.md has a part of them.

    python -m bench.planner.which_model --cells CELLS.jsonl                   all models; goes on where it was ended
    python -m bench.planner.which_model --models Qwen/Qwen3-8B ./my-model
    python -m bench.planner.which_model --owned --cells CELLS.jsonl           machines of OWNED: `flexgen-h2o plan`
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import less_margin
from flexgen_h2o.engine.workload import workload_of
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models.load import find_spec
from flexgen_h2o.parser import OneLineParser
from flexgen_h2o.planner.cost_model import Machine
from flexgen_h2o.planner.lp import SearchSpace
from flexgen_h2o.planner.profile import find_profile, read_profile
from flexgen_h2o.planner.search import search

MODELS = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
    "allenai/OLMoE-1B-7B-0924",
    "mistralai/Mixtral-8x7B-v0.1",
    "mistralai/Mixtral-8x22B-v0.1",
    "facebook/opt-30b",
)
NIGHT_S = 10 * 3600
GB = 10**9
# GB
RAM = (8, 16, 32, 64)
CARDS = (0, 8, 16, 24)
# Machines that people own, by name: parts by their data sheets, for --hardware.
OWNED = {
    "laptop": "cores=8,ram=16GB,ram-gbps=60,disk-gbps=3.5,disk=1TB,like=build-2core",
    "desktop, RTX 3060": "gpu=rtx-3060,cores=8,ram=32GB,ram-gbps=50,disk-gbps=3.5,disk=1TB,"
    "like=build-2core",
    "desktop, RTX 4090": "gpu=rtx-4090,cores=16,ram=64GB,ram-gbps=80,disk-gbps=7,disk=2TB,"
    "like=build-2core",
    "cloud, T4": "gpu=t4,cores=4,ram=32GB,ram-gbps=60,disk-gbps=1,disk=500GB,like=build-2core",
}
OWNED_MODELS = MODELS[:3] + MODELS[4:5]
# A title, what is kept of KV, and whether weights and KV are in 4 bits.
SETTINGS = (
    ("Weights as published and the whole KV cache in 16 bits", Full(), False),
    (
        "Weights in 4 bits (those of gpt-oss as published), 20% of the KV columns in 4 bits",
        H2O(kv_budget=0.2),
        True,
    ),
)


@dataclass(frozen=True)
class Place:
    """A machine: a saved profile with other memory. ram, card: GB; card 0 for none."""

    ram: int
    card: int

    def space(
        self, spec: ModelSpec, args: argparse.Namespace, kept: Eviction, in_4_bits: bool
    ) -> SearchSpace:
        need = workload_of(
            kept, args.num_prompts, {(args.prompt_len, args.gen_len)}, spec.num_blocks, spec.windows
        )
        profile, dtype = ("t4", "float16") if self.card else ("build-2core", "bfloat16")
        machine = Machine(read_profile(find_profile(profile)), dtype, not self.card)
        policy = Policy(
            compress_weight=in_4_bits and spec.quantization is None, compress_cache=in_4_bits
        )
        memory = {"device": self.card, "host": self.ram, "disk": args.disk}
        budgets = {tier: less_margin(size * GB) for tier, size in memory.items()}
        return SearchSpace(spec, need, policy, machine, budgets)


def main() -> int:
    args = _parse()
    if args.owned:
        return _owned(args)
    asked = {name: getattr(args, name) for name in ("num_prompts", "prompt_len", "gen_len", "disk")}
    kept = _Cells(args.cells)
    for title, eviction, in_4_bits in SETTINGS:
        print(f"\n{title}:\n\n| model | card | {' | '.join(f'{ram} GB of RAM' for ram in RAM)} |")
        print(f"|---|---|{'---|' * len(RAM)}", flush=True)
        for name in args.models:
            spec = find_spec(name, None)
            for card in CARDS:
                nights = []
                for ram in RAM:
                    key = {"model": name, "setting": title, "ram": ram, "card": card, **asked}
                    nights.append(
                        kept.found(key, Place(ram, card).space(spec, args, eviction, in_4_bits))[
                            "night"
                        ]
                    )
                shown = " | ".join(f"{night:,}" if night else "-" for night in nights)
                print(
                    f"| {name.split('/')[-1]} | {f'{card} GB' if card else 'none'} | {shown} |",
                    flush=True,
                )
    common.finish({"benchmark": "which_model", **asked, "found": kept.cells}, args.output)
    return 0


def _owned(args: argparse.Namespace) -> int:
    """Print the table of the machines that people own. Each cell is a run of the command."""
    kept = _Cells(args.cells)
    print(f"| model | {' | '.join(OWNED)} |\n|---|{'---|' * len(OWNED)}", flush=True)
    for model in OWNED_MODELS if args.models is MODELS else args.models:
        nights = [kept.planned(_command(args, model, OWNED[name])) for name in OWNED]
        shown = " | ".join(f"{night:,}" if night else "-" for night in nights)
        print(f"| {model.split('/')[-1]} | {shown} |", flush=True)
    return 0


def _command(args: argparse.Namespace, model: str, hardware: str) -> list[str]:
    sizes = {
        "--num-prompts": args.num_prompts,
        "--prompt-len": args.prompt_len,
        "--max-tokens": args.gen_len,
    }
    given = [str(word) for pair in sizes.items() for word in pair]
    return ["plan", model, "--hardware", hardware, *given, "--json"]


def _parse() -> argparse.Namespace:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        default=MODELS,
        help="hub ids of built-in shapes, or folders with a config.json",
    )
    add(
        "--num-prompts",
        type=positive,
        default=10_000,
        help="of the pile that policies are searched for (10000)",
    )
    add("--prompt-len", type=positive, default=512)
    add("--gen-len", type=positive, default=128)
    add("--disk", type=positive, default=500, metavar="GB", help="free disk (500)")
    add(
        "--cells",
        type=Path,
        metavar="FILE",
        help="a line a search; what is there is not searched again",
    )
    add("--owned", action="store_true", help="plan for the machines that people own")
    add("--output", action=common.ResultFile, help="also write the JSON object here")
    return parser.parse_args()


class _Cells:
    """The searches that were made, by what was asked; kept in a file of JSON lines, where one is
    given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.cells: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def found(self, asked: dict[str, Any], space: SearchSpace) -> dict[str, Any]:
        profile = space.machine.profile
        key = {**asked, "profile": profile.machine, "measured": profile.date}
        for cell in self.cells:
            if cell["asked"] == key:
                return cell
        cell = {"asked": key, **_predicted(space)}
        self._keep(cell)
        return cell

    def planned(self, command: list[str]) -> int | None:
        """Return the prompts of a night that `flexgen-h2o COMMAND` predicts; None: nothing fits."""
        asked = " ".join(command)
        cell = next((cell for cell in self.cells if cell["asked"] == asked), None)
        if cell is None:
            words = [sys.executable, "-m", "flexgen_h2o.cli", *command]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            found = json.loads(done.stdout)
            cell = {"asked": asked, "night": _night(command, found["eta_s"]), **found}
            del cell["details"]
            self._keep(cell)
        night: int | None = cell["night"]
        return night

    def _keep(self, cell: dict[str, Any]) -> None:
        self.cells.append(cell)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(cell) + "\n")


def _night(command: list[str], seconds: float | None) -> int | None:
    rows = int(command[command.index("--num-prompts") + 1])
    return None if seconds is None else int(float(f"{rows * NIGHT_S / seconds:.2g}"))


def _predicted(space: SearchSpace) -> dict[str, Any]:
    """night: prompts that 10 hours are enough for, at the pile's pace."""
    began = time.process_time()
    try:
        plan = search(space)
    except DoesNotFitError:
        return {"night": None}
    policy = plan.policy
    found = plan.prediction
    night = int(float(f"{space.need.rows * NIGHT_S / found.total_s:.2g}"))
    return {
        "night": night,
        "tokens_per_s": found.tokens_per_s,
        "seconds": found.total_s,
        "bound_by": found.bound_by,
        "percent": policy.percent,
        "gpu_batch_size": policy.gpu_batch_size,
        "num_gpu_batches": policy.num_gpu_batches,
        "search_s": time.process_time() - began,
    }


if __name__ == "__main__":
    sys.exit(common.door(main))
