"""Policies against each other on the same prompts: what compression, int8 products, weights on disk and smaller KV
caches give and cost.

Each claim names its policies; the first is what the others are divided by. All engines are open in one process and run
in turn, so that neighbours meet all of them. Before the first round each engine is opened and computes its first
layers. Ratios are of the runs of a round; random weights at the true shape, the full KV cache but for the kv claims.

    python -m bench.engine.compare_policies 4bit-disk           weights in 4 bits, all on disk, few rows
    python -m bench.engine.compare_policies 4bit-ram            weights in 4 bits, in RAM, a large block
    python -m bench.engine.compare_policies 4bit-int8-disk      weights in 4 bits and products in int8, as 4bit-disk
    python -m bench.engine.compare_policies 4bit-int8-ram       the same in RAM, as 4bit-ram
    python -m bench.engine.compare_policies disk                weights on disk beside weights in RAM, a large block
    python -m bench.engine.compare_policies int8                products in int8 against bf16, in RAM
    python -m bench.engine.compare_policies kv-disk --layers 6  ways to a smaller KV cache, which lies on disk
    python -m bench.engine.compare_policies kv-ram --layers 6   the same in RAM
    python -m bench.engine.compare_policies kv-device --layers 6    the same in RAM behind a stand-in device of 3 GiB
    python -m bench.engine.compare_policies kv-rows --model facebook/opt-6.7b --layers 4    rows that the same RAM holds
    python -m bench.engine.compare_policies int8 --model facebook/opt-125m --rows 8 --gen-len 4 --repeats 1
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bench import common
from bench.common import ON_DISK
from bench.sweep.cut_model import cut_model
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.engine.loop import zigzag
from flexgen_h2o.engine.report import RunReport
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.kvcache.eviction import H2O, H2ONorm, make_eviction
from flexgen_h2o.kvcache.eviction.mixes import table_for
from flexgen_h2o.llm import LLM

PHASES = ("prefill", "decode", "total")
FIRST_STEPS = 3
IN_RAM, A_THIRD = (0, 100, 0, 100, 0, 100), (0, 33, 0, 100, 0, 100)
KV_ON_DISK, KV_BEHIND_A_LINK = (100, 0, 0, 0, 100, 0), (100, 0, 0, 100, 100, 0)


@dataclass(frozen=True)
class Claim:
    """policies: fields of `Policy` by name, and "eviction". rows: of the one micro-batch, None where each policy has
    its own ("gpu_batch_size"); lengths in tokens. percent: of policies that have none of their own. device_mem: of a
    stand-in device."""

    policies: dict[str, dict[str, Any]]
    rows: int | None
    prompt_len: int
    gen_len: int
    percent: tuple[int, ...] = IN_RAM
    device_mem: str | None = None


SHARE = 0.2  # of the sequence: of its bytes, or of its columns


def _mix(share: float) -> dict[str, Any]:
    """What `--kv-bytes` takes for a share of the bytes."""
    mix = table_for().mix_of(share)
    return {
        "compress_cache": True, "cache_bits": mix.cache_bits, "cache_window": mix.cache_window,
        "eviction": make_eviction(mix.eviction, kv_bytes=share),
    }  # fmt: skip


SMALLER_KV: dict[str, dict[str, Any]] = {
    "full": {},
    "4 bits": {"compress_cache": True},
    f"--kv-bytes {SHARE}": _mix(SHARE),
    f"h2o-norm, {SHARE:.0%} of the columns": {"eviction": H2ONorm(kv_budget=SHARE)},
    f"h2o, {SHARE:.0%} of the columns": {"eviction": H2O(kv_budget=SHARE)},
}
# Rows whose KV, with a third of the weights, takes 8 GiB of RAM: OPT-6.7B, 512 + 512, by `policy_search`.
ROWS_OF_8_GIB: dict[str, dict[str, Any]] = {
    f"{name}, {rows} rows": {"gpu_batch_size": rows, **fields}
    for name, rows, fields in (
        ("full", 6, {}),
        ("4 bits", 20, {"compress_cache": True}),
        ("--kv-bytes 0.2", 27, _mix(0.2)),
        ("--kv-bytes 0.1", 45, _mix(0.1)),
        ("h2o, 20% of the columns", 28, {"eviction": H2O(kv_budget=0.2)}),
    )
}

CLAIMS = {
    "4bit-disk": Claim(
        {
            "bf16": {"percent": ON_DISK},
            "8 bits": {"percent": ON_DISK, "compress_weight": True, "weight_bits": 8},
            "4 bits": {"percent": ON_DISK, "compress_weight": True},
        },
        4, 8, 9,
    ),
    "4bit-ram": Claim({"bf16": {}, "4 bits": {"compress_weight": True}}, 256, 8, 9),
    "4bit-int8-disk": Claim(
        {
            "bf16": {"percent": ON_DISK},
            "4 bits": {"percent": ON_DISK, "compress_weight": True},
            "4 bits, int8": {"percent": ON_DISK, "compress_weight": True, "int8_compute": True},
        },
        4, 8, 9,
    ),
    "4bit-int8-ram": Claim({"bf16": {}, "4 bits, int8": {"compress_weight": True, "int8_compute": True}}, 256, 8, 9),
    "disk": Claim({"in RAM": {}, "on disk": {"percent": ON_DISK}}, 256, 8, 9),
    "int8": Claim({"bf16": {}, "int8": {"int8_compute": True}}, 128, 16, 13),
    "kv-disk": Claim(SMALLER_KV, 8, 1536, 512, KV_ON_DISK),
    "kv-ram": Claim(SMALLER_KV, 8, 1536, 512),
    "kv-device": Claim(SMALLER_KV, 16, 512, 512, KV_BEHIND_A_LINK, "3GiB"),
    "kv-rows": Claim(ROWS_OF_8_GIB, None, 512, 512, A_THIRD),
}  # fmt: skip


def main() -> int:
    args = _parse()
    claim = CLAIMS[args.claim]
    speeds: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PHASES} for name in claim.policies}
    kv: dict[str, dict[str, int]] = {}
    rows = {name: fields.get("gpu_batch_size", args.rows) for name, fields in claim.policies.items()}
    with contextlib.ExitStack() as stack:
        llms = {name: stack.enter_context(_open(args, claim, fields)) for name, fields in claim.policies.items()}

        def part(name: str) -> Callable[[], None]:
            def measured() -> None:
                report = _generate(llms[name], rows[name], args)
                for phase in PHASES:
                    speeds[name][phase].append(getattr(report, phase).tokens_per_s)
                kv[name] = report.kv

            return measured

        for name, llm in llms.items():
            _generate(llm, rows[name], args, FIRST_STEPS)
        rounds = common.alternate(args.repeats, [part(name) for name in llms], args.quiet_wait)
    common.finish(_result(args, speeds, rounds) | {"kv": kv}, args.output)
    return 0


def _open(args: argparse.Namespace, claim: Claim, fields: dict[str, Any]) -> LLM:
    settings = {name: value for name, value in fields.items() if name != "eviction"}
    policy = Policy(**{"gpu_batch_size": args.rows, "percent": claim.percent, **settings})
    model = args.model if args.layers is None else str(cut_model(args.model, args.layers, args.offload_dir))
    budget = MemoryBudget(claim.device_mem, args.host_mem)
    return common.open_llm(args, policy, fields.get("eviction"), model=model, budget=budget)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b")
    parser.add_argument("claim", choices=CLAIMS)
    add = parser.add_argument
    add("--rows", type=positive, help="of the one micro-batch (the claim's); not with kv-rows")
    add("--prompt-len", type=positive)
    add("--gen-len", type=common.decoded)
    add("--layers", type=positive, help="transformer blocks of a model that is cut to them (all)")
    add("--repeats", type=positive, default=5)
    args = parser.parse_args()
    if args.rows is not None and CLAIMS[args.claim].rows is None:
        parser.error(f"--rows {args.rows}: each policy of {args.claim} has its own; leave it out")
    for name in ("rows", "prompt_len", "gen_len"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(CLAIMS[args.claim], name))
    return args


def _generate(llm: LLM, rows: int, args: argparse.Namespace, steps: int | None = None) -> RunReport:
    """A whole run, or its first steps."""
    prompts = common.benchmark_rows(llm, rows, args.prompt_len)
    params = SamplingParams(args.gen_len, ignore_eos=True)
    order = None if steps is None else lambda layers, batches: islice(zigzag(args.gen_len, layers, batches), steps)
    return llm.run(prompts, params, lambda done: None, order=order)


def _result(
    args: argparse.Namespace, speeds: dict[str, dict[str, list[float]]], rounds: list[dict[str, float]]
) -> dict[str, Any]:
    """Print the table; return the JSON object."""
    base, *others = speeds
    ratios = {
        f"{name} / {base}, {phase}": common.ratio_of(speeds[name][phase], speeds[base][phase])
        for name in others
        for phase in PHASES
    }
    found = {f"{name}, {phase}": common.Spread(v) for name, of in speeds.items() for phase, v in of.items()}
    layers = f", {args.layers} layers" if args.layers else ""
    rows = f", {args.rows} rows" if args.rows else ""  # otherwise the policies' names have them
    title = f"{args.claim}: {args.model}{layers}{rows}, {args.prompt_len} + {args.gen_len} tokens"
    lines = [(what, speed.show("tokens/s", 1)) for what, speed in found.items()]
    common.table(title, lines + [(what, ratio.show("")) for what, ratio in ratios.items()])
    print(f"# others took {common.show_rounds(rounds)}")
    return {
        "benchmark": "compare_policies", "claim": args.claim, "rounds": rounds,
        **common.some_of(args, "model", "layers", "rows", "prompt_len", "gen_len"),
        "tokens_per_s": found, "ratios": ratios,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.door(main))
