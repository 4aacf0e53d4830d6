"""Policies against each other on the same prompts: what compression, int8 products and weights on disk give and cost.

Each claim names its policies; the first is what the others are divided by. All engines are open in one process and run
in turn, so that neighbours meet all of them. Before the first round each engine is opened and computes its first
layers. Ratios are of the runs of a round; random weights at the true shape, full KV cache.

    python -m bench.engine.compare_policies 4bit-disk           weights in 4 bits, all on disk, few rows
    python -m bench.engine.compare_policies 4bit-ram            weights in 4 bits, in RAM, a large block
    python -m bench.engine.compare_policies 4bit-int8-disk      weights in 4 bits and products in int8, as 4bit-disk
    python -m bench.engine.compare_policies 4bit-int8-ram       the same in RAM, as 4bit-ram
    python -m bench.engine.compare_policies disk                weights on disk beside weights in RAM, a large block
    python -m bench.engine.compare_policies int8                products in int8 against bf16, in RAM
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
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import Policy
from flexgen_h2o.engine.loop import zigzag
from flexgen_h2o.engine.report import RunReport
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.llm import LLM

PHASES = ("prefill", "decode")
FIRST_STEPS = 3
IN_RAM, ON_DISK = (0, 100, 0, 100, 0, 100), (0, 0, 0, 100, 0, 100)


@dataclass(frozen=True)
class Claim:
    """policies: fields of `Policy` by name. rows: of the one micro-batch; lengths in tokens."""

    policies: dict[str, dict[str, Any]]
    rows: int
    prompt_len: int
    gen_len: int


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
}  # fmt: skip


def main() -> int:
    args = _parse()
    speeds: dict[str, dict[str, list[float]]] = {
        name: {phase: [] for phase in PHASES} for name in CLAIMS[args.claim].policies
    }
    with contextlib.ExitStack() as stack:
        llms = {
            name: stack.enter_context(common.open_llm(args, Policy(args.rows, **{"percent": IN_RAM, **fields})))
            for name, fields in CLAIMS[args.claim].policies.items()
        }

        def part(name: str) -> Callable[[], None]:
            def measured() -> None:
                report = _generate(llms[name], args)
                for phase in PHASES:
                    speeds[name][phase].append(getattr(report, phase).tokens_per_s)

            return measured

        for llm in llms.values():
            _generate(llm, args, FIRST_STEPS)
        rounds = common.alternate(args.repeats, [part(name) for name in llms], args.quiet_wait)
    common.finish(_result(args, speeds, rounds), args.output)
    return 0


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b")
    parser.add_argument("claim", choices=CLAIMS)
    add = parser.add_argument
    add("--rows", type=positive, help="of the one micro-batch (the claim's)")
    add("--prompt-len", type=positive)
    add("--gen-len", type=common.decoded)
    add("--repeats", type=positive, default=5)
    args = parser.parse_args()
    for name in ("rows", "prompt_len", "gen_len"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(CLAIMS[args.claim], name))
    return args


def _generate(llm: LLM, args: argparse.Namespace, steps: int | None = None) -> RunReport:
    """A whole run, or its first steps."""
    prompts = common.benchmark_rows(llm, args.rows, args.prompt_len)
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
    title = f"{args.claim}: {args.model}, {args.rows} rows, {args.prompt_len} + {args.gen_len} tokens"
    lines = [(what, speed.show("tokens/s", 1)) for what, speed in found.items()]
    common.table(title, lines + [(what, ratio.show("")) for what, ratio in ratios.items()])
    print(f"# others took {common.show_rounds(rounds)}")
    return {
        "benchmark": "compare_policies", "claim": args.claim, "model": args.model, "rows": args.rows,
        "prompt_len": args.prompt_len, "gen_len": args.gen_len, "rounds": rounds,
        "tokens_per_s": found, "ratios": ratios,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.door(main))
