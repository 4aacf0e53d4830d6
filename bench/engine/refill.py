"""Claim: where answers differ in length, letting new prompts into a running block makes more tokens a second.

Method: `--rows` prompts of 8 to 64 random tokens through one engine, with refill and without, alternating; the tokens
of every row must be the same (fp32). Answers are short for most rows and long for a few, in one of two ways:
- asked: nine rows of ten ask for 4 to 24 tokens, the tenth for 128 to 256. The engine knows, and sorts rows by it;
- stopped: every row asks for 256 and stops by itself: sampled at temperature 1, and each `--end-every`th token id ends
  a row. Nobody knows beforehand. This is the common case: chats and summaries end when they end.
Figure: generated tokens over the seconds of the whole run, prefill and all, on / off within a round.

    python -m bench.engine.refill stopped                      # the shipped model, everything in RAM
    python -m bench.engine.refill asked --output FILE
    python -m bench.engine.refill stopped --model facebook/opt-125m --path _DUMMY_ --percent 0 0 0 100 0 100
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from bench import common
from bench.common import Spread
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.engine.prompts import Completion, Prompt, prompts_from_python
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.llm import LLM

PROMPT_TOKENS, SHORT, LONG = (8, 64), (4, 24), (128, 256)


@dataclass(frozen=True)
class Run:
    """One run of all rows."""

    seconds: float
    tokens: dict[int, list[int]]
    sweeps: int
    io_bytes: dict[str, int]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds

    def to_json(self) -> dict[str, Any]:
        facts = {"seconds": self.seconds, "tokens_per_s": self.tokens_per_s, "sweeps": self.sweeps}
        return {**facts, "io_bytes": self.io_bytes}


def main() -> None:
    args = _parse()
    policy = Policy(args.gpu_batch_size, args.num_gpu_batches, tuple(args.percent))
    with common.open_llm(args, policy, dtype="float32") as llm:
        prompts, params = _work(args, llm)
        _run(llm, prompts[: policy.block_size], params[: policy.block_size], False)  # files and pages are warm
        runs: dict[str, list[Run]] = {"off": [], "on": []}
        parts = [lambda way=way: runs[way].append(_run(llm, prompts, params, way == "on")) for way in runs]
        rounds = common.alternate(args.repeats, parts, args.quiet_wait)
    first = runs["off"][0].tokens
    if any(run.tokens != first for found in runs.values() for run in found):
        raise FlexgenError("refill changed tokens")
    ratio = common.ratio_of(*([run.tokens_per_s for run in runs[way]] for way in ("on", "off")))
    lengths = sorted(map(len, first.values()))
    _show(args, runs, ratio, lengths, rounds)
    result = {
        "benchmark": "refill",
        **common.some_of(
            args, "case", "model", "rows", "gpu_batch_size", "num_gpu_batches", "percent", "end_every", "seed"
        ),
        "answers": {"mean": sum(lengths) / len(lengths), "median": lengths[len(lengths) // 2], "most": lengths[-1]},
        "ratio": ratio,
        "runs": {way: [run.to_json() for run in found] for way, found in runs.items()},
        "same_tokens": True,
        "rounds": rounds,
    }
    common.finish(result, args.output)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "opt-tiny")
    parser.add_argument("case", choices=("asked", "stopped"))
    parser.set_defaults(path=None)
    add = parser.add_argument
    add("--rows", type=positive, default=1000)
    add("--gpu-batch-size", type=positive, default=32)
    add("--num-gpu-batches", type=positive, default=2)
    add("--percent", type=int, nargs=6, default=[0, 100, 0, 100, 0, 100], help="as of flex_opt (all in RAM)")
    add("--end-every", type=positive, default=32, help="stopped: each so manieth token id ends a row (32)")
    add("--seed", type=int, default=0)
    add("--repeats", type=positive, default=3)
    return parser.parse_args()


def _work(args: argparse.Namespace, llm: LLM) -> tuple[list[Prompt], list[SamplingParams]]:
    generator, vocabulary = random.Random(args.seed), llm.model.spec.vocab_size
    given, params = [], []
    for i in range(args.rows):
        given.append([generator.randrange(4, vocabulary) for _ in range(generator.randint(*PROMPT_TOKENS))])
        if args.case == "asked":
            most = generator.randint(*(LONG if generator.random() < 0.1 else SHORT))
            params.append(SamplingParams(most, ignore_eos=True))
        else:
            params.append(SamplingParams(LONG[1], temperature=1.0, seed=args.seed + i))
    if args.case == "stopped":
        ends = tuple(range(args.end_every - 1, vocabulary, args.end_every))
        llm.model = replace(llm.model, spec=replace(llm.model.spec, eos_token_ids=ends))
    return prompts_from_python(given, None, vocabulary), params


def _run(llm: LLM, prompts: list[Prompt], params: list[SamplingParams], refill: bool) -> Run:
    done: list[Completion] = []
    began = time.perf_counter()
    report = llm.run(prompts, params, done.extend, refill=refill)
    seconds = time.perf_counter() - began
    tokens = {one.index: one.token_ids for one in done}
    return Run(seconds, tokens, report.extra["sweeps"], dict(report.io_bytes))


def _show(args: argparse.Namespace, runs: dict[str, list[Run]], ratio: Spread, lengths: list[int], rounds: Any) -> None:
    rows = [
        (f"refill {way}", f"{Spread([r.tokens_per_s for r in found]).show('token/s', 1)}, {found[0].sweeps} sweeps")
        for way, found in runs.items()
    ]
    rows.append(("on / off", ratio.show("")))
    rows.append(("answers", f"median {lengths[len(lengths) // 2]}, most {lengths[-1]}, {sum(lengths)} tokens in all"))
    rows.append(("other processes took", common.show_rounds(rounds)))
    common.table(
        f"{args.model}, {args.case}, {args.rows} rows, fp32; median (min - max) of {args.repeats} rounds", rows
    )


if __name__ == "__main__":
    sys.exit(common.door(main))
