"""How time grows with rows, prompt length, layers and the memory budget: measured, and as the planner predicts it.

A public shape cut to `--layers` blocks (every block is the same), random bf16 weights, full KV cache, one change at a
time. Everything is in RAM, but for the budget: there `--policy auto` plans the block and the placement for a share of
what the run takes in RAM. The machine's profile is measured first (40 s), so that lines and points saw the same hour;
`--hardware FILE` takes a saved one. Draws `--plot FILE`: points are medians with least and most, lines predictions.

    python -m bench.planner.scaling --plot scaling.png                              OPT-1.3B cut to 4 blocks, 8 minutes
    python -m bench.planner.scaling --model facebook/opt-125m --layers 2 --axes rows --repeats 1 --quiet-wait 0
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import common
from bench.sweep.cut_model import cut_model
from flexgen_h2o.cli_common import check_picture, positive
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.engine.report import RunReport
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.workload import AutoPolicy
from flexgen_h2o.planner.measure.run import measure

PHASES = ("prefill", "decode")
ROWS, PROMPT_LEN = 32, 64


@dataclass(frozen=True)
class Point:
    """A run. budget: share of the host bytes that the run takes all in RAM, None for no budget."""

    rows: int = ROWS
    prompt_len: int = PROMPT_LEN
    layers: int | None = None  # those of --layers
    budget: float | None = None


# Each axis: the label of the picture, and what changes along it.
AXES: dict[str, tuple[str, dict[float, Point]]] = {
    "rows": ("rows", {n: Point(rows=n) for n in (1, 4, 16, 32, 64, 128)}),
    "prompt": ("prompt tokens, 8 rows", {n: Point(rows=8, prompt_len=n) for n in (32, 128, 256, 512, 1024)}),
    "layers": ("transformer blocks", {n: Point(layers=n) for n in (1, 2, 4, 8, 12)}),
    "budget": ("RAM as a share of all in RAM", {s: Point(budget=s) for s in (0.4, 0.55, 0.7, 0.85, 1.05)}),
}


def main() -> int:
    args = _parse()
    args.profile = args.hardware or measure("cpu", args.offload_dir, lambda line: None, dtypes=("bfloat16",))
    axes: dict[str, Any] = {}
    for axis in args.axes:
        label, points = AXES[axis]
        reports: dict[float, list[RunReport]] = {at: [] for at in points}
        parts = [partial(_measure, args, point, reports[at]) for at, point in points.items()]
        rounds = common.alternate(args.repeats, parts, args.quiet_wait)
        found = {at: {phase: _figures(of, phase) for phase in PHASES} for at, of in reports.items()}
        axes[axis] = {"label": label, "points": found, "rounds": rounds}
        rows = [(f"{at:g}", ", ".join(f"{p} {f[p]['seconds'].show('s')}" for p in PHASES)) for at, f in found.items()]
        common.table(f"{label}: {args.model}, {args.layers} blocks", rows)
    result = {
        "benchmark": "scaling", "model": args.model, "layers": args.layers, "gen_len": args.gen_len, "axes": axes,
    }  # fmt: skip
    common.finish(result, args.output)
    if args.plot is not None:
        _draw(result, args.plot)
    return 0


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b")
    add = parser.add_argument
    add("--layers", type=positive, default=4, help="transformer blocks of the cut model (4)")
    add("--gen-len", type=common.decoded, default=9)
    add("--axes", nargs="+", choices=AXES, default=list(AXES))
    add("--repeats", type=positive, default=3)
    add("--hardware", help="a profile's file or name, instead of measuring")
    add("--plot", action=common.ResultFile, help="picture to draw (.png, .svg, .pdf)")
    args = parser.parse_args()
    if args.plot is not None:
        check_picture(args.plot)
    return args


def _measure(args: argparse.Namespace, point: Point, into: list[RunReport]) -> None:
    if point.budget is None:
        into.append(_generate(args, point, Policy(point.rows), args.host_mem))
        return
    whole = _generate(args, point, Policy(point.rows), None).peak_bytes
    budget = int(point.budget * (whole["device"] + whole["host"]))
    into.append(_generate(args, point, AutoPolicy(Policy()), str(budget)))


def _generate(args: argparse.Namespace, point: Point, policy: Policy | AutoPolicy, host_mem: str | None) -> RunReport:
    folder = cut_model(args.model, point.layers or args.layers, args.offload_dir)
    other: dict[str, Any] = {"model": str(folder), "path": "_DUMMY_", "budget": MemoryBudget(host=host_mem)}
    with common.open_llm(args, policy, hardware=args.profile, **other) as llm:
        prompts = common.benchmark_rows(llm, point.rows, point.prompt_len)
        return llm.run(prompts, SamplingParams(args.gen_len, ignore_eos=True), lambda done: None)


def _figures(reports: list[RunReport], phase: str) -> dict[str, Any]:
    seconds = common.Spread([getattr(report, phase).seconds for report in reports])
    return {"seconds": seconds, "predicted_s": [report.predicted[f"{phase}_s"] or 0.0 for report in reports]}


def _draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    axes = result["axes"]
    figure = Figure(figsize=(4.2 * len(axes), 4), layout="constrained")
    for panel, of in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes.values(), strict=True):
        for phase, color in zip(PHASES, ("C0", "C1"), strict=True):
            at = list(of["points"])
            spreads = [p[phase]["seconds"] for p in of["points"].values()]
            middle = [s.median for s in spreads]
            errors = [[s.median - min(s.values) for s in spreads], [max(s.values) - s.median for s in spreads]]
            panel.errorbar(at, middle, errors, fmt="o", color=color, capsize=3, label=f"{phase}, measured")
            predicted = [common.Spread(p[phase]["predicted_s"]).median for p in of["points"].values()]
            panel.plot(at, predicted, color=color, alpha=0.6, label=f"{phase}, predicted")
        panel.set(xlabel=of["label"], ylabel="seconds")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(f"{result['model']} cut to {result['layers']} blocks, {ROWS} rows of {PROMPT_LEN} + "
                    f"{result['gen_len']} tokens where nothing else is said, bf16")  # fmt: skip
    with common.writing("--plot", path, "the result is printed"):
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(common.door(main))
