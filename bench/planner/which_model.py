"""Yield of a night: prompts that a model answers in 10 hours on machines of several sizes, as
the planner predicts.

Nothing runs. For each model and memory the fastest policy for a pile of 10,000 prompts is searched,
in the two ways of SETTINGS, with the saved profiles of a 2-core CPU without a card and of a T4
whose memory is set to other cards' sizes. Prints two tables, a row for each model and card; `-`: no
policy fits. docs/start/which-model.md has a part of them.

    python -m bench.planner.which_model --cells CELLS.jsonl                   all models; goes on where it was ended
    python -m bench.planner.which_model --models Qwen/Qwen3-8B ./my-model
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
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
        self.cells.append(cell)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(cell) + "\n")
        return cell


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
