"""How near runs in RAM come to the roofline: matrix FLOPs / measured peak + KV bytes / measured bandwidth.

Random weights at the true shape, all in RAM, one large block. The peak of the machine is measured in the same process
before and after each run, and the better of the two counts: a neighbour that leaves in between does not flatter us.
Claim: decode and prefill each reach at least 0.85.

    python bench/roofline.py                                          OPT-1.3B and OPT-6.7B, about 15 minutes
    python bench/roofline.py --model facebook/opt-125m --rows 16 --prompt-len 8 --gen-len 4 --repeats 1 --quiet-wait 0
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import common

from flexgen_h2o.config import MemoryBudget, Policy
from flexgen_h2o.doors import as_flags, positive, run_door
from flexgen_h2o.llm import LLM
from flexgen_h2o.planner.roofline import Peak
from flexgen_h2o.prompts import benchmark_prompts
from flexgen_h2o.report import RunReport, with_roofline
from flexgen_h2o.sampling import SamplingParams


@dataclass(frozen=True)
class Case:
    """One model, with the rows of its micro-batch and its micro-batches: as many as RAM holds the KV cache of."""

    model: str
    rows: int
    batches: int


CASES = (Case("facebook/opt-1.3b", 256, 2), Case("facebook/opt-6.7b", 128, 1))


def main() -> int:
    return run_door("roofline", _run, None)


def _run(argv: list[str] | None) -> int:
    args = _parse(argv)
    cases = CASES if args.model is None else (Case(args.model, args.rows, args.num_gpu_batches),)
    found = [_measure(case, args) for case in cases]
    common.finish({"benchmark": "roofline", "runs": found}, args.output)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_flags(parser, None, None)
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--rows", type=positive, default=256, help="of a micro-batch, with --model (256)")
    add("--num-gpu-batches", type=positive, default=1, help="with --model (1)")
    add("--prompt-len", type=positive, default=64)
    add("--gen-len", type=positive, default=64)
    add("--repeats", type=positive, default=2)
    return parser.parse_args(argv)


def _measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    policy = Policy(case.rows, case.batches)
    prompts = benchmark_prompts(policy.block_size, args.prompt_len, None, 1000)
    params = SamplingParams(args.gen_len, ignore_eos=True)
    prefill, decode, runs = [], [], []
    with LLM(
        case.model, policy, dtype=args.dtype, path=args.path, offload_dir=args.offload_dir,
        budget=MemoryBudget(host=args.host_mem),
    ) as llm:  # fmt: skip
        llm.run(prompts[: min(2, len(prompts))], SamplingParams(2, ignore_eos=True), lambda done: None)  # weights, code
        for _ in range(args.repeats):
            common.wait_for_quiet(args.quiet_wait)
            before = llm.measure_peak()
            with common.Neighbours() as neighbours:
                report = llm.run(prompts, params, lambda done: None)
            report = with_roofline(report, _better(before, llm.measure_peak()))
            ideal = report.extra["roofline"]
            prefill.append(ideal["prefill_s"] / report.prefill.seconds)
            decode.append(ideal["decode_s"] / report.decode.seconds)
            runs.append(_facts(report, neighbours.others))
    common.table(f"{case.model}, {as_flags(policy)}, {args.prompt_len} + {args.gen_len} tokens, {args.dtype}", [
        ("decode, of the roofline", common.Spread(decode).show("")),
        ("prefill, of the roofline", common.Spread(prefill).show("")),
        ("decode tokens/s", common.Spread([r["decode_tokens_per_s"] for r in runs]).show("", 1)),
        ("peak TFLOP/s", common.Spread([r["flops_per_s"] for r in runs]).show("", 2, 1e12)),
        ("memory GB/s", common.Spread([r["memory_bytes_per_s"] for r in runs]).show("", 0, common.GB)),
        ("taken by others", ", ".join(f"{r['others']:.0%}" for r in runs)),
    ])  # fmt: skip
    return {
        "model": case.model, "policy": policy.to_json(), "prompt_len": args.prompt_len, "gen_len": args.gen_len,
        "decode_of_roofline": common.Spread(decode).to_json(), "prefill_of_roofline": common.Spread(prefill).to_json(),
        "runs": runs,
    }  # fmt: skip


def _better(a: Peak, b: Peak) -> Peak:
    return Peak(max(a.flops_per_s, b.flops_per_s), max(a.memory_bytes_per_s, b.memory_bytes_per_s))


def _facts(report: RunReport, others: float) -> dict[str, Any]:
    return {
        "prefill_s": report.prefill.seconds, "decode_s": report.decode.seconds,
        "prefill_tokens_per_s": report.prefill.tokens_per_s, "decode_tokens_per_s": report.decode.tokens_per_s,
        "others": others, **report.extra["roofline"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
