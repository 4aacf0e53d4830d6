"""Claim: keeping 20% of a prompt's columns as H2O does makes decoding several times as fast, and choosing costs little.

Method: the shape of a public OPT, bf16, cut to `--layers` transformer blocks so that prefill takes minutes, not hours
(every block is the same; embedding and head stay whole). In one process and alternating, the same prompts through
- full: every column is kept;
- h2o: --hh-ratio and as many recent (0.1 + 0.1 is 20% of the prompt);
- scored: H2O with a budget for everything, so that it differs from `full` by its scoring alone.
Settings: `ram`, weights and KV in RAM; `disk`, weights in RAM and KV on disk. All have the same batch, and each its own
memory plan. Figures are ratios within a round: decode tokens/s of h2o over full, and seconds of scored over full for
prefill and for decode. The head is as large as in the whole model and would count too much, so decode is also given
at the model's depth: the measured seconds of embedding and head, and those of the blocks times their true number.

`traffic` counts bytes instead (no clock): KV that the tiers moved in a decode sweep, full and h2o, with KV on disk, and
on host with a device tier of its own; beside it slots / (prompt + mean of the tokens generated so far).

    python -m bench.engine.h2o_vs_full ram --model facebook/opt-1.3b [--layers 4] [--rows 64] [--output FILE]
    python -m bench.engine.h2o_vs_full disk --model facebook/opt-6.7b --layers 2 --rows 32 --runs full h2o
    python -m bench.engine.h2o_vs_full traffic --prompt-len 512 --gen-len 512 --rows 8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import common
from bench.common import Spread
from bench.sweep.cut_model import cut_model
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.report import RunReport
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.llm import LLM
from flexgen_h2o.models import built_in_spec

# Shares of weights, KV cache and hidden states on device and host.
PLACES = {"ram": (0, 100, 0, 100, 0, 100), "disk": (0, 100, 0, 0, 0, 100)}
RUNS = ("full", "h2o", "scored")
LENGTHS = {"ram": (1024, 256), "disk": (1024, 24), "traffic": (512, 512)}


@dataclass(frozen=True)
class Run:
    """A report, and the decode seconds that the model would take at its true depth."""

    report: RunReport
    at_depth: float


# What is divided by the same figure of `full`.
RATIOS: dict[str, tuple[str, Callable[[Run], float]]] = {
    "decode tokens/s at the model's depth, h2o / full": ("h2o", lambda r: 1 / r.at_depth),
    "decode tokens/s as run, h2o / full": ("h2o", lambda r: r.report.decode.tokens_per_s),
    "prefill seconds, h2o / full": ("h2o", lambda r: r.report.prefill.seconds),
    "KV bytes held, h2o / full": ("h2o", lambda r: r.report.kv["bytes"]),
    "prefill seconds, scored / full": ("scored", lambda r: r.report.prefill.seconds),
    "decode seconds at the model's depth, scored / full": ("scored", lambda r: r.at_depth),
}
# Only KV moves. A device tier of its own makes host KV travel.
TRAFFIC_PLACES = {"disk": (PLACES["disk"], None), "host": ((100, 0, 0, 100, 100, 0), "6GiB")}
LINKS = {"disk": ("disk_read", "disk_write"), "host": ("h2d", "d2h")}


def main() -> None:
    args = _parse()
    args.folder = cut_model(args.model, args.layers, args.offload_dir)
    result = _traffic(args) if args.setting == "traffic" else _speed(args)
    facts = common.some_of(args, "model", "layers", "rows", "num_gpu_batches", "prompt_len", "gen_len", "hh_ratio")
    common.finish({"benchmark": f"h2o_vs_full {args.setting}", **facts, **result}, args.output)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b")
    parser.add_argument("setting", choices=("ram", "disk", "traffic"))
    add = parser.add_argument
    add("--layers", type=positive, default=4, help="transformer blocks of the cut model (4)")
    add("--rows", type=positive, default=64, help="rows of the block (64)")
    add("--num-gpu-batches", type=positive, default=2, help="micro-batches that the rows are cut into (2)")
    add("--prompt-len", type=positive, help="1024, 512 for traffic")
    add("--gen-len", type=common.decoded, help="256 in ram, 24 on disk, 512 for traffic")
    add("--hh-ratio", type=float, default=0.1, help="heavy columns of the prompt, and as many recent (0.1)")
    add("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="which to run; full is always needed")
    add("--repeats", type=positive, default=3)
    args = parser.parse_args()
    prompt_len, gen_len = LENGTHS[args.setting]
    args.prompt_len, args.gen_len = args.prompt_len or prompt_len, args.gen_len or gen_len
    return args


def _evictions(args: argparse.Namespace) -> dict[str, Eviction]:
    everything = args.prompt_len + args.gen_len
    known: dict[str, Eviction] = {
        "full": Full(),
        "h2o": H2O(heavy_ratio=args.hh_ratio, recent_ratio=args.hh_ratio),
        "scored": H2O(heavy_size=everything, recent_size=1),
    }
    return {name: eviction for name, eviction in known.items() if name == "full" or name in args.runs}


def _open(args: argparse.Namespace, eviction: Eviction, percent: tuple[int, ...], budget: MemoryBudget) -> LLM:
    policy = Policy(-(-args.rows // args.num_gpu_batches), args.num_gpu_batches, percent=percent)  # type: ignore[arg-type]
    other: dict[str, Any] = {"model": str(args.folder), "path": "_DUMMY_", "budget": budget}
    return common.open_llm(args, policy, eviction, **other)


def _run(args: argparse.Namespace, llm: LLM, gen_len: int) -> RunReport:
    prompts = common.benchmark_rows(llm, args.rows, args.prompt_len)
    return llm.run(prompts, SamplingParams(gen_len, ignore_eos=True), lambda done: None)


def _speed(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {name: [] for name in _evictions(args)}

    def run(name: str) -> None:
        # One engine at a time holds memory: each is opened anew, its weights from the page cache.
        with _open(args, _evictions(args)[name], PLACES[args.setting], MemoryBudget(host=args.host_mem)) as llm:
            report = _run(args, llm, args.gen_len)
            runs[name].append(Run(report, _decode_seconds_at_depth(args, llm)))

    parts = [lambda name=name: run(name) for name in runs]  # type: ignore[misc]
    rounds = common.alternate(args.repeats, parts, args.quiet_wait)
    ratios = {
        what: common.ratio_of([figure(run) for run in runs[name]], [figure(run) for run in runs["full"]])
        for what, (name, figure) in RATIOS.items()
        if name in runs
    }
    _show_speed(args, runs, ratios, rounds)
    return {"ratios": ratios, "runs": {name: [_short(r) for r in of] for name, of in runs.items()}, "rounds": rounds}


def _decode_seconds_at_depth(args: argparse.Namespace, llm: LLM) -> float:
    built_in = built_in_spec(args.model)
    assert built_in is not None
    layers, total = llm.num_layers, 0.0
    decode = llm.times[0].layers[layers:]
    for start in range(0, len(decode), layers):
        sweep = decode[start : start + layers]
        ends = sweep[0] + sweep[-1]
        total += ends + (sum(sweep) - ends) * built_in[0].num_blocks / args.layers
    return total


def _short(run: Run) -> dict[str, Any]:
    keys = ("eviction", "prefill", "decode", "peak_bytes", "io_bytes", "kv")
    whole = run.report.to_json()
    return {**{key: whole[key] for key in keys}, "decode_seconds_at_depth": run.at_depth}


def _show_speed(args: argparse.Namespace, runs: dict[str, list[Run]], ratios: dict[str, Spread], rounds: Any) -> None:
    rows = []
    for name, found in runs.items():
        prefill = Spread([r.report.prefill.seconds for r in found])
        decode = Spread([r.report.decode.seconds for r in found])
        host = found[0].report.peak_bytes["host"] / GIB
        rows.append((name, f"prefill {prefill.show('s')}, decode {decode.show('s')}, host tier {host:.2f} GiB"))
    rows += [(what, ratio.show("", 3)) for what, ratio in ratios.items()]
    rows.append(("other processes took", common.show_rounds(rounds)))
    common.table(f"{_title(args)}, KV in {args.setting}; median (min - max) of {args.repeats} rounds", rows)


def _traffic(args: argparse.Namespace) -> dict[str, Any]:
    """KV bytes that a decode sweep moves: what a run with all decode sweeps moved less what one without them did."""
    found: dict[str, Any] = {}
    for place, (percent, device_mem) in TRAFFIC_PLACES.items():
        for name, eviction in list(_evictions(args).items())[:2]:
            with _open(args, eviction, percent, MemoryBudget(device_mem, args.host_mem)) as llm:
                whole, short = _run(args, llm, args.gen_len), _run(args, llm, 1)
            moved = [(whole.io_bytes[link] - short.io_bytes[link]) / (args.gen_len - 1) for link in LINKS[place]]
            found[f"{place} {name}"] = {
                "read": moved[0], "written": moved[1], "moved": sum(moved), "kv": dict(whole.kv)
            }  # fmt: skip
    slots = found["disk h2o"]["kv"]["slots"]
    expected = slots / (args.prompt_len + args.gen_len / 2)
    ratios = {
        "expected": expected,
        "kv_bytes": found["disk h2o"]["kv"]["bytes"] / found["disk h2o"]["kv"]["full_bytes"],
        **{
            f"{place} {way}": found[f"{place} h2o"][way] / found[f"{place} full"][way]
            for place in TRAFFIC_PLACES
            for way in ("moved", "read", "written")
        },
    }
    rows = [(name, f"{ratio:.4f} ({ratio / expected - 1:+.1%})") for name, ratio in ratios.items()]
    common.table(f"{_title(args)}, {slots} slots: h2o / full, and how far it is from expected", rows)
    return {"ratios": ratios, "moved": found}


def _title(args: argparse.Namespace) -> str:
    return f"{args.model}, {args.layers} layers, {args.rows} rows, {args.prompt_len} + {args.gen_len} tokens"


if __name__ == "__main__":
    sys.exit(common.door(main))
