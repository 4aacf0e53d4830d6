"""Is the searched policy the best? Its measured throughput against a grid of policies, on three workloads.

The grid crosses block sizes, micro-batches and placements that people would try by hand; those that do not fit the
budgets are left out, and of the others `--policies` evenly chosen ones run. The searched policy (`--policy auto` with a
profile measured at the start) runs first and last; the better of its two runs counts, as does the better of two runs
of the grid's best. Claim: at least 0.9 of the best of 20.

    python -m bench.planner.policy_grid                     about 10 minutes
    python -m bench.planner.policy_grid --workloads 1 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.core.units import parse_bytes
from flexgen_h2o.engine.memory_plan import plan_within
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.workload import need_of, shape_of
from flexgen_h2o.flags import as_flags
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models.load import find_model
from flexgen_h2o.planner.measure.run import measure
from flexgen_h2o.planner.profile import HardwareProfile, find_profile, read_profile


@dataclass(frozen=True)
class Workload:
    """rows, prompt_len, gen_len: of equal prompts. heavy: H2O's ratio."""

    name: str
    model: str
    rows: int
    prompt_len: int
    gen_len: int
    host_mem: str
    device_mem: str | None = None
    heavy: float | None = None

    @property
    def eviction(self) -> Eviction:
        return Full() if self.heavy is None else H2O(heavy_ratio=self.heavy)

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget(self.device_mem, self.host_mem, "20GiB")


WORKLOADS = (
    Workload("weights do not fit", "facebook/opt-350m", 32, 16, 16, "400MiB"),
    Workload("KV does not fit", "facebook/opt-125m", 96, 64, 12, "400MiB"),
    Workload("three tiers, H2O", "facebook/opt-350m", 32, 64, 16, "500MiB", "350MiB", 0.1),
)
# Shares of weights, cache and hidden states on device and host that the grid tries.
TWO_TIERS = tuple((w, 0, c, 0, 100, 0) for w in (0, 30, 60, 100) for c in (100, 50, 0))
THREE_TIERS = tuple(
    (*w, *c, *h)
    for w in ((0, 0), (0, 100), (30, 70), (20, 40))
    for c in ((100, 0), (0, 100), (0, 0))
    for h in ((100, 0), (0, 100))
)


def main() -> int:
    args = _parse()
    common.wait_for_quiet(args.quiet_wait)
    if args.hardware is None:
        hardware = measure("cpu", Path(args.offload_dir), lambda line: None, dtypes=("bfloat16",))
    else:
        hardware = read_profile(find_profile(args.hardware))
    results = [_compare(WORKLOADS[i - 1], hardware, args) for i in args.workloads]
    common.table("searched / best of the grid", [(r["workload"], f"{r['share_of_best']:.3f}") for r in results])
    common.finish({"workloads": results, "profile": hardware.to_json()}, args.output)
    return 0


def _parse() -> argparse.Namespace:
    parser = common.weights_parser(__doc__)
    parser.add_argument("--workloads", type=int, nargs="+", choices=(1, 2, 3), default=(1, 2, 3))
    parser.add_argument("--hardware", metavar="FILE", help="a profile of this machine (one is measured)")
    parser.add_argument("--policies", type=positive, default=20, help="of the grid that are run (20)")
    return parser.parse_args()


def _compare(work: Workload, hardware: HardwareProfile, args: argparse.Namespace) -> dict[str, Any]:
    print(f"\n{work.name}: {work.model}, {work.rows} x ({work.prompt_len} + {work.gen_len}), {work.budget}", flush=True)
    grid = _grid(work, args.policies)
    _throughput(work, grid[0], hardware, args)  # writes the weights, warms the caches
    first = _throughput(work, "auto", hardware, args)
    tried = [_throughput(work, policy, hardware, args) for policy in grid]
    best = max(tried, key=lambda r: r["tokens_per_s"])
    again = _throughput(work, best["policy"], hardware, args)
    last = _throughput(work, "auto", hardware, args)
    searched = max(first["tokens_per_s"], last["tokens_per_s"])
    most = max(best["tokens_per_s"], again["tokens_per_s"])
    print(f"searched {searched:.2f} tokens/s, best of {len(grid)}: {most:.2f}", flush=True)
    return {
        "workload": work.name,
        "share_of_best": searched / most,
        "searched": [_plain(first), _plain(last)],
        "best_again": _plain(again),
        "grid": [_plain(r) for r in tried],
    }


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "policy": result["policy"].to_json()}


def _throughput(
    work: Workload, policy: Policy | str, hardware: HardwareProfile, args: argparse.Namespace
) -> dict[str, Any]:
    setting: dict[str, Any] = {"model": work.model, "budget": work.budget, "hardware": hardware}
    with (
        common.open_llm(args, policy, work.eviction, **setting) as llm,
        common.BackgroundLoad() as neighbours,
    ):
        prompts = [p.token_ids for p in common.benchmark_rows(llm, work.rows, work.prompt_len)]
        llm.generate(prompts, SamplingParams(work.gen_len, ignore_eos=True))
        assert llm.report is not None and llm.policy is not None
        found, chosen = llm.report, llm.policy
        said = llm.predicted.tokens_per_s if llm.predicted is not None else None
    which = "searched" if policy == "auto" else "grid"
    print(f"  {found.total.tokens_per_s:8.2f} tokens/s (predicted {said:.2f})  {which}: {as_flags(chosen)}", flush=True)
    return {
        "policy": chosen, "tokens_per_s": found.total.tokens_per_s, "predicted": said, "neighbours": neighbours.others,
    }  # fmt: skip


def _grid(work: Workload, count: int) -> list[Policy]:
    """`count` policies that fit, evenly taken from all of the grid."""
    fitting = [policy for policy in _all(work) if _fits(work, policy)]
    if len(fitting) < count:
        raise UsageError(f"--policies {count}: only {len(fitting)} of the grid fit {work.name}; give fewer")
    return [fitting[i * len(fitting) // count] for i in range(count)]


def _all(work: Workload) -> Iterator[Policy]:
    for percent in TWO_TIERS if work.device_mem is None else THREE_TIERS:
        for block in (work.rows, work.rows // 2, work.rows // 4):
            for batches in (1, 2, 4):
                yield Policy(block // batches, batches, percent)


def _fits(work: Workload, policy: Policy) -> bool:
    spec = find_model(work.model, "_DUMMY_").spec
    need = need_of(work.eviction, work.rows, {(work.prompt_len, work.gen_len)}, spec.num_blocks)
    budgets = {tier: None if size is None else parse_bytes(size) for tier, size in (
        ("device", work.device_mem), ("host", work.host_mem), ("disk", "20GiB"),
    )}  # fmt: skip
    try:
        plan_within(spec, policy, shape_of(policy, need), 2, work.device_mem is None, budgets)
    except DoesNotFitError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(common.door(main))
