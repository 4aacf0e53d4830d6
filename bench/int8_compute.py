"""Products in int8 (`--int8-compute`) against bf16: prefill and decode tokens/s in RAM, at the same batch.

Random weights at the true shape, two engines in one process, run in turn, so that neighbours meet both. Before the
first round each engine is opened and computes its first layers. Ratios are of the runs of a round.

    python bench/int8_compute.py                                      OPT-1.3B, some minutes
    python bench/int8_compute.py --model facebook/opt-125m --rows 8 --gen-len 4 --repeats 1 --quiet-wait 0
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from itertools import islice

import common

from flexgen_h2o.config import MemoryBudget, Policy
from flexgen_h2o.doors import positive, run_door
from flexgen_h2o.llm import LLM
from flexgen_h2o.prompts import benchmark_prompts
from flexgen_h2o.report import RunReport
from flexgen_h2o.sampling import SamplingParams
from flexgen_h2o.schedule import zigzag

FORMS = {"bf16": False, "int8": True}
PHASES = ("prefill", "decode")
FIRST_STEPS = 3


def main() -> int:
    return run_door("int8_compute", _run, None)


def _run(argv: list[str] | None) -> int:
    args = _parse(argv)
    speeds: dict[str, dict[str, list[float]]] = {form: {phase: [] for phase in PHASES} for form in FORMS}
    with contextlib.ExitStack() as stack:
        llms = {form: stack.enter_context(_opened(args, int8)) for form, int8 in FORMS.items()}

        def part(form: str) -> Callable[[], None]:
            def measured() -> None:
                report = _generate(llms[form], args)
                for phase in PHASES:
                    one = getattr(report, phase)
                    speeds[form][phase].append(one.tokens / one.seconds)

            return measured

        for llm in llms.values():
            _generate(llm, args, FIRST_STEPS)
        rounds = common.alternate(args.repeats, [part(form) for form in FORMS], args.quiet_wait)
    found = {form: {phase: common.Spread(v) for phase, v in of.items()} for form, of in speeds.items()}
    gains = {
        phase: common.Spread([b / a for a, b in zip(speeds["bf16"][phase], speeds["int8"][phase], strict=True)])
        for phase in PHASES
    }
    title = f"{args.model}, {args.rows} rows, {args.prompt_len} + {args.gen_len} tokens, all in RAM"
    lines = [(f"{form}, {phase}", of[phase].show("tokens/s", 1)) for form, of in found.items() for phase in PHASES]
    common.table(title, lines + [(f"int8 / bf16, {phase}", gain.show("")) for phase, gain in gains.items()])
    print(f"# others took {common.show_rounds(rounds)}")
    result = {
        "benchmark": "int8_compute", "model": args.model, "rows": args.rows, "prompt_len": args.prompt_len,
        "gen_len": args.gen_len, "rounds": rounds,
        "tokens_per_s": {form: {phase: of[phase].to_json() for phase in PHASES} for form, of in found.items()},
        "int8_over_bf16": {phase: gain.to_json() for phase, gain in gains.items()},
    }  # fmt: skip
    common.finish(result, args.output)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_flags(parser, "facebook/opt-1.3b", None)
    add = parser.add_argument
    add("--rows", type=positive, default=128, help="of the one micro-batch (128)")
    add("--prompt-len", type=positive, default=16)
    add("--gen-len", type=positive, default=13)
    add("--repeats", type=positive, default=3)
    return parser.parse_args(argv)


def _opened(args: argparse.Namespace, int8: bool) -> LLM:
    return LLM(
        args.model, Policy(args.rows, int8_compute=int8), device="cpu", dtype="bfloat16", path=args.path,
        offload_dir=args.offload_dir, budget=MemoryBudget(host=args.host_mem),
    )  # fmt: skip


def _generate(llm: LLM, args: argparse.Namespace, steps: int | None = None) -> RunReport:
    """A whole run, or its first steps."""
    prompts = benchmark_prompts(args.rows, args.prompt_len, None, llm.model.spec.vocab_size)
    params = SamplingParams(args.gen_len, ignore_eos=True)
    order = None if steps is None else lambda layers, batches: islice(zigzag(args.gen_len, layers, batches), steps)
    return llm.run(prompts, params, lambda done: None, order=order)


if __name__ == "__main__":
    sys.exit(main())
