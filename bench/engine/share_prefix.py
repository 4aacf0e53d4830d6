"""Rows that share a few-shot header: with the header computed once and its KV in one copy, and both for each row.

Both ways in turn, in one process, on the same prompts: a header of random tokens, and questions of random tokens. Their
tokens are compared: in fp32 (--dtype float32) they are equal. With --hh-ratio the header is computed once a
micro-batch, and each row has its own columns of it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from dataclasses import dataclass, field
from typing import Any

from bench import common
from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.cli_common import positive
from flexgen_h2o.engine.report import RunReport
from flexgen_h2o.kvcache.eviction import H2O, Full
from flexgen_h2o.kvcache.prefixes import SHARINGS, group_prompts

IN_RAM = (100, 0, 100, 0, 100, 0)
WAYS = ("off", "on")


@dataclass
class Ways:
    """Repeats of one header and question length. tokens: by way, of the last repeat."""

    reports: dict[str, list[RunReport]] = field(default_factory=lambda: {way: [] for way in WAYS})
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)

    def seconds(self, way: str, phase: str) -> common.Spread:
        return common.Spread([getattr(report, phase).seconds for report in self.reports[way]])

    def kv_bytes(self, way: str) -> dict[str, int]:
        """That decode sweeps held on average, that slots and the copy reserve, and of all buffers of the run."""
        report = self.reports[way][0]
        copied = report.extra["common_prefix"]["kv_bytes"]
        held, reserved = report.kv["bytes"], report.extra["kv_reserved_bytes"] + copied
        return {"held": held, "reserved": reserved, "copy": copied, "peak": sum(report.peak_bytes.values())}

    def speedup(self, phase: str) -> common.Spread:
        """Of the pairs of runs, one after the other."""
        return common.ratio_of(self.seconds("off", phase).values, self.seconds("on", phase).values)

    @property
    def same_rows(self) -> int:
        return sum(a == b for a, b in zip(*self.tokens.values(), strict=True))


def main() -> int:
    args = _parse()
    eviction = H2O(args.hh_ratio, args.hh_ratio) if args.hh_ratio else Full()
    policy = Policy(args.gpu_batch_size, args.num_gpu_batches, percent=tuple(args.percent))
    found = []
    with contextlib.ExitStack() as stack:
        llms: dict[str, LLM] = {}
        for way in WAYS:  # each with buffers of its own, which are touched before what counts
            llms[way] = stack.enter_context(common.open_llm(args, policy, eviction, device="auto"))
            llms[way].share_prefix = way
        for header in args.header:
            for question in args.question:
                common.wait_for_quiet(args.quiet_wait)
                prompts = _prompts(llms["off"], policy.block_size, header, question)
                found.append(_facts(args, prompts, header, question, _measure(llms, args, prompts)))
    common.finish({"eviction": eviction.to_json(), "policy": policy.to_json(), "found": found}, args.output)
    return 0


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "opt-tiny")
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--gpu-batch-size", type=positive, default=16, help="rows of a micro-batch (16)")
    add("--num-gpu-batches", type=positive, default=1, help="micro-batches of the block (1)")
    add("--percent", type=int, nargs=6, default=IN_RAM, help="placement (all in RAM)")
    add("--header", type=int, nargs="+", default=[400], help="tokens that all rows begin with (400)")
    add("--question", type=positive, nargs="+", default=[60], help="tokens of each row behind them (60)")
    add("--gen-len", type=positive, default=8, help="new tokens of each row (8)")
    add("--hh-ratio", type=float, help="H2O with so many heavy and as many recent columns (full cache)")
    add("--repeats", type=positive, default=5, help="pairs of runs (5)")
    return parser.parse_args()


def _prompts(llm: LLM, rows: int, header: int, question: int) -> list[list[int]]:
    generator, vocab = random.Random(0), llm.model.spec.vocab_size

    def some(count: int) -> list[int]:
        return [generator.randrange(4, vocab) for _ in range(count)]

    shared = some(header)
    return [[*shared, *some(question)] for _ in range(rows)]


def _measure(llms: dict[str, LLM], args: argparse.Namespace, prompts: list[list[int]]) -> Ways:
    """The first run of each way opens the engine and warms up, and does not count."""
    found, params = Ways(), SamplingParams(args.gen_len, ignore_eos=True)
    for turn in range(args.repeats + 1):
        for way, llm in llms.items():
            found.tokens[way] = [out.token_ids for out in llm.generate(prompts, params)]
            assert llm.report is not None
            if turn:
                found.reports[way].append(llm.report)
    return found


def _facts(
    args: argparse.Namespace, prompts: list[list[int]], header: int, question: int, ways: Ways
) -> dict[str, Any]:
    """A line of the table, and what the JSON object has of it."""
    fed = {way: ways.reports[way][0].extra["prefill_fed_tokens"] for way in WAYS}
    is_shared = any(g.prefix for g in group_prompts(prompts[: args.gpu_batch_size], SHARINGS["auto"]))
    kv = {way: ways.kv_bytes(way) for way in WAYS}
    phases = ("prefill", "decode", "total") if args.gen_len > 1 else ("prefill",)
    common.table(f"{len(prompts)} rows, header {header}, questions {question}, {args.gen_len} new tokens", [
        ("tokens fed to prefill", f"{fed['off']} without, {fed['on']} with; auto shares: {is_shared}"),
        *((f"{p}, without and with", f"{ways.seconds('off', p).show('s', 3)}, {ways.seconds('on', p).show('s', 3)}: "
           f"{ways.speedup(p).show('x')}") for p in phases),
        ("KV held", f"{kv['off']['held'] / common.MB:.1f} MB, {kv['on']['held'] / common.MB:.1f} MB: "
         f"{kv['off']['held'] / kv['on']['held']:.2f} x; reserved {kv['off']['reserved'] / common.MB:.1f} MB, "
         f"{kv['on']['reserved'] / common.MB:.1f} MB, of it {kv['on']['copy'] / common.MB:.1f} MB the copy"),
        ("rows with the same tokens", f"{ways.same_rows} of {len(prompts)}"),
    ])  # fmt: skip
    return {
        "rows": len(prompts), "header": header, "question": question, "fed": fed, "auto_shares": is_shared,
        "same_rows": ways.same_rows, "kv_bytes": kv,
        "seconds": {way: {p: ways.seconds(way, p) for p in phases} for way in WAYS},
        "speedup": {p: ways.speedup(p) for p in phases},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.door(main))
