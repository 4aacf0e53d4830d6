"""What a night brings: prompts that a model answers in 10 hours on machines of several sizes, as the planner predicts.

Nothing runs. For each model and memory the fastest policy for a pile of 10,000 prompts is searched, in the two ways of
SETTINGS, with the saved profiles of a 2-core CPU without a card and of a T4 whose memory is set to other cards' sizes.
Prints the tables of docs/which-model.md, a row a model; `-`: no policy fits.

    python -m bench.planner.which_model                                       all models: half an hour
    python -m bench.planner.which_model --models Qwen/Qwen3-8B ./my-model
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import common
from flexgen_h2o.cli_common import OneLineParser, positive
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import less_margin
from flexgen_h2o.engine.workload import need_of
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models.load import find_spec
from flexgen_h2o.planner.lp import SearchSpace
from flexgen_h2o.planner.predict import Machine
from flexgen_h2o.planner.profile import find_profile, read_profile
from flexgen_h2o.planner.search import search

MODELS = (
    *(f"Qwen/Qwen3-{size}" for size in ("0.6B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")),
    "allenai/OLMoE-1B-7B-0924", "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1", "facebook/opt-30b",
    "meta-llama/Meta-Llama-3-70B",
)  # fmt: skip
NIGHT_S, GB = 10 * 3600, 10**9
COMPRESSION = ("compress_weight", "compress_cache")
# A title, what is kept of KV, and what may be compressed where that is faster.
SETTINGS = (
    ("Weights and the whole KV cache in 16 bits", Full(), ()),
    ("20% of the KV columns, weights and KV in 4 bits where that is faster", H2O(kv_budget=0.2), COMPRESSION),
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A machine: a saved profile with other memory. card: GB of it, 0 for none."""

    profile: str
    dtype: str
    ram: int
    card: int = 0

    @property
    def name(self) -> str:
        return f"{self.card} GB card, {self.ram} GB" if self.card else f"{self.ram} GB"

    def space(
        self, spec: ModelSpec, args: argparse.Namespace, kept: Eviction, compress: Sequence[str]
    ) -> SearchSpace:  # fmt: skip
        need = need_of(kept, args.num_prompts, {(args.prompt_len, args.gen_len)}, spec.num_blocks)
        machine = Machine(read_profile(find_profile(self.profile)), self.dtype, not self.card)
        memory = {"device": self.card, "host": self.ram, "disk": args.disk}
        budgets = {tier: less_margin(size * GB) for tier, size in memory.items()}
        return SearchSpace(spec, need, Policy(), machine, budgets, compress)


PLACES = (
    *(Place("build-2core", "bfloat16", ram) for ram in (8, 16, 32, 64)),
    *(Place("t4", "float16", 32, card) for card in (8, 16, 24)),
)


def main() -> int:
    args = _parse()
    found: dict[str, list[dict[str, Any]]] = {}
    for title, kept, compress in SETTINGS:
        print(f"\n{title}:\n\n| model | {' | '.join(place.name for place in PLACES)} |")
        print(f"|---|{'---|' * len(PLACES)}", flush=True)
        for name in args.models:
            spec = find_spec(name, None)
            cells = [_predicted(place.space(spec, args, kept, compress)) for place in PLACES]
            found[f"{name}, {title}"] = cells
            shown = (f"{cell['night']:,}" if cell["night"] else "-" for cell in cells)
            print(f"| {name.split('/')[-1]} | {' | '.join(shown)} |", flush=True)
    asked = {name: getattr(args, name) for name in ("num_prompts", "prompt_len", "gen_len", "disk")}
    common.finish({"benchmark": "which_model", **asked, "places": [place.name for place in PLACES], "found": found},
                  args.output)  # fmt: skip
    return 0


def _parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=MODELS, help="hub ids of built-in shapes, or folders with a config.json")
    add("--num-prompts", type=positive, default=10_000, help="of the pile that policies are searched for (10000)")
    add("--prompt-len", type=positive, default=512)
    add("--gen-len", type=positive, default=128)
    add("--disk", type=positive, default=500, metavar="GB", help="free disk (500)")
    add("--output", action=common.ResultFile, help="also write the JSON object here")
    return parser.parse_args()


def _predicted(space: SearchSpace) -> dict[str, Any]:
    """night: prompts that 10 hours are enough for, at the pile's pace."""
    began = time.perf_counter()
    try:
        plan = search(space)
    except DoesNotFitError:
        return {"night": None}
    policy, found = plan.policy, plan.prediction
    night = int(float(f"{space.need.rows * NIGHT_S / found.total_s:.2g}"))
    return {
        "night": night, "tokens_per_s": found.tokens_per_s, "seconds": found.total_s, "bound_by": found.bound_by,
        "compressed": [name for name in COMPRESSION if getattr(policy, name)], "percent": policy.percent,
        "gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches,
        "search_s": time.perf_counter() - began,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.door(main))
