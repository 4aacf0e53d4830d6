"""MiniKV's memory and speed grid (its mem_spd_test): batch x prompt x output x policy, as CSV and as a picture.

    python -m bench.sweep.mem_spd --quick --output mem_spd.csv --plot mem_spd.png
    python -m bench.sweep.mem_spd --model facebook/opt-1.3b --path _DUMMY_ --batch 1 8 32 --prompt-len 512 1024 \\
        --gen-len 128 --policies full h2o:0.25 h2o-4bit:0.25 --output mem_spd.csv
    python -m bench.sweep.mem_spd --batch_prompt_output "[(1,128,16),(8,128,16)]" --ratio 0.25 --output mem_spd.csv

Each measurement is a process of its own (bench/baselines/ours), planned for what RAM is free or for --host-mem. One
that does not fit, is killed for want of memory, or takes too long is a row, and the grid goes on. All are kept as JSON
lines beside the CSV: what is there is not measured again.

Good: H2O's kv_bytes are 2R of the prompt's; peak memory grows with batch x (prompt + output) as they do; and the policy
that holds less is no slower at equal batch.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import common
from bench.baselines.contract import DTYPES
from bench.sweep.__main__ import _read_system
from bench.sweep.grid import Cell, System
from bench.sweep.runner import Setup, describe, measure
from bench.sweep.store import BF16, DOES_NOT_FIT, FAILED, MEASURED, REFUSED, TIMEOUT, Key, Line, Store, claimed
from flexgen_h2o.cli_common import check_picture, positive
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import check_writable, usable_path, write_picture, write_result
from flexgen_h2o.core.units import GIB, parse_bytes
from flexgen_h2o.models.load import find_checkpoint, find_model
from flexgen_h2o.parser import OneLineParser

Shape = tuple[int, int, int]  # batch, prompt, output
POLICIES = ("full", "h2o:0.25", "h2o-4bit:0.25")
QUICK = tuple((batch, prompt, 16) for prompt in (128, 512) for batch in (1, 8))
# Of MiniKV's scripts, for LLaMA-2-7B on a card: batch, prompt and output, one after the other.
MINIKV: tuple[Shape, ...] = (
    *((batch, 2048, 1024) for batch in (1, 2, 4, 8, 16, 32)),
    *((1, prompt, 1024) for prompt in (1024, 2048, 4096, 8192, 16384, 32768)),
    *((1, 1024, output) for output in (2048, 4096, 8192, 16384, 32768, 65536)),
)
SPREAD = ("mean", "std", "min", "Q1", "median", "Q3", "max")
# MiniKV's columns, then ours: what its definitions leave out.
COLUMNS = (
    "strategy", "model", "batch_size", "prompt_length", "output_length", "quantization", "ratio", "OOM",
    *(f"latency_{name}" for name in SPREAD), *(f"peak_mem_usage_{name}" for name in SPREAD), "peak_mem_reserved_mean",
    "tokens/second", "status", "reason", "repeats", "prefill_s", "decode_s", "prefill_tokens_per_s",
    "decode_tokens_per_s", "generated_tokens_per_s", "peak_rss_bytes", "peak_device_bytes", "peak_host_bytes",
    "peak_disk_bytes", "kv_slots", "kv_bytes", "kv_full_bytes", "others",
)  # fmt: skip


def main() -> int:
    args = _parse()
    shapes, systems = _shapes(args), [_read_system(f"ours-{policy}") for policy in _policies(args)]
    model = find_model(args.model, args.path)
    positions = model.spec.max_positions
    folder = find_checkpoint(model, DTYPES[args.dtype], args.offload_dir, 0, progress=False).folder
    setup = Setup(args.offload_dir / "no-peers", args.offload_dir, args.threads, args.limit, args.quiet_wait,
                  args.device, args.device_mem, args.dtype)  # fmt: skip
    lines_path = args.output.with_suffix(".jsonl")
    with claimed(lines_path):
        grid = Grid(setup, Store(lines_path, args.again, dtype=args.dtype), folder, args)
        wanted = [(s, shape, r) for shape in shapes for s in systems for r in range(1, args.repeats + 1)]
        lines = []
        for system, shape, repeat in wanted:
            lines.append(grid.line(system, shape, repeat, positions))
            write_result(args.output, as_csv(lines), "--output")
    if args.plot is not None:
        draw(lines, args.plot)
    print(f"written: {args.output}")
    return 1 if any(line["status"] == FAILED for line in lines) else 0


@dataclass(frozen=True)
class Grid:
    """What all measurements share."""

    setup: Setup
    store: Store
    folder: Path
    args: argparse.Namespace

    def line(self, system: System, shape: Shape, repeat: int, positions: int) -> Line:
        """A measurement, made now or found; what the model has no positions for is refused without a process."""
        batch, prompt, output = shape
        budget = self.args.host_mem or "none"
        key = Key(system.name, self.args.model, prompt, output, budget, batch, repeat)
        found, how = self.store.find(key), " (kept)"
        if found is None:
            how, cell = "", Cell(self.args.model, prompt, output, budget, (batch, batch))
            if prompt + output - 1 > positions:
                found = vars(key) | {"status": REFUSED, "reason": f"the model has {positions} positions"}
            else:
                found = self.store.add(key, measure(self.setup, system, cell, self.folder, batch))
        print(f"{system.variant} {batch} x ({prompt} + {output}): {describe(found)}{how}", flush=True)
        return found


def as_csv(lines: Sequence[Line]) -> str:
    """A row for each shape and policy, over its repeats."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[n] for n in ("system", "rows", "prompt_len", "gen_len")), []).append(line)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row_of(group) for group in groups.values())
    return text.getvalue()


def row_of(lines: Sequence[Line]) -> dict[str, Any]:
    """The repeats of one measurement as a row.

    MiniKV's tokens/second counts prompts too, batch x (prompt + output) / latency; generated_tokens_per_s is batch x
    output / latency. Its peak_mem_usage is GiB beside an empty process here, peak_mem_reserved what the plan reserves
    of device and host.
    """
    first, measured = lines[0], [line for line in lines if line["status"] in MEASURED]
    variant, _, ratio = first["system"].partition("-")[2].partition(":")
    strategy, _, form = variant.partition("-")
    row: dict[str, Any] = {
        "strategy": strategy, "model": first["model"], "batch_size": first["rows"],
        "prompt_length": first["prompt_len"], "output_length": first["gen_len"], "quantization": form or "none",
        "ratio": ratio, "OOM": not measured and any(line["status"] == DOES_NOT_FIT for line in lines),
        "status": (measured or lines)[-1]["status"], "reason": lines[-1].get("reason", ""), "repeats": len(measured),
    }  # fmt: skip
    if not measured:
        return row

    def mean(name: str) -> float:
        return statistics.fmean(line[name] for line in measured)

    latency, batch = mean("total_s"), first["rows"]
    planned, kv = ([line["setting"][name] for line in measured] for name in ("peak_bytes", "kv"))
    row |= _spread("latency", [line["total_s"] for line in measured])
    row |= _spread("peak_mem_usage", [line["peak_rss_bytes"] / GIB for line in measured])
    row |= {f"peak_{tier}_bytes": max(p[tier] for p in planned) for tier in ("device", "host", "disk")}
    row |= {f"kv_{name}": kv[0][name] for name in ("slots", "bytes", "full_bytes")}
    reserved = statistics.fmean(p["device"] + p["host"] for p in planned) / GIB
    return row | {
        "peak_mem_reserved_mean": _short(reserved),
        "tokens/second": _short((first["prompt_len"] + first["gen_len"]) * batch / latency),
        **{name: _short(mean(name)) for name in ("prefill_s", "decode_s", "decode_tokens_per_s", "others")},
        "prefill_tokens_per_s": _short(batch * first["prompt_len"] / mean("prefill_s")),
        "generated_tokens_per_s": _short(first["gen_len"] * batch / latency),
        "peak_rss_bytes": max(line["peak_rss_bytes"] for line in measured),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    found = (statistics.fmean(values), deviation, min(values), *quartiles, max(values))
    return {f"{name}_{what}": _short(value) for what, value in zip(SPREAD, found, strict=True)}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


# ---- flags


def _parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="opt-tiny", help="hub id, local Hugging Face folder, or opt-tiny (shipped)")
    add("--path", help="folder with checkpoints; _DUMMY_: random weights at the model's true shape")
    add("--quick", action="store_true", help="8 shapes and policies of opt-tiny's size: 2 minutes")
    add("--minikv", action="store_true", help="the shapes of MiniKV's scripts, to 32768 + 1024 and 1024 + 65536 tokens")
    add("--batch", nargs="+", type=positive, metavar="N")
    add("--prompt-len", nargs="+", type=positive, metavar="N")
    add("--gen-len", nargs="+", type=common.decoded, metavar="N")
    add("--batch_prompt_output", "--batch-prompt-output", metavar="LIST", help="as mem_spd_test: '[(1,128,16), ...]'")
    add(
        "--policies",
        nargs="+",
        metavar="NAME",
        help=f"full, h2o:R, each with -4bit, -8bit, -int8 ({' '.join(POLICIES)})",
    )
    add("--ratio", type=float, metavar="R", help="as mem_spd_test: h2o:R alone, heavy and recent columns R each")
    add("--repeats", type=positive, default=1)
    add("--output", type=Path, required=True, metavar="FILE.csv", help="the table; JSON lines go beside it")
    add("--plot", type=Path, metavar="FILE", help="peak memory and tokens/s (.png, .svg; needs matplotlib)")
    add("--again", action="store_true", help="measure what is there once more")
    add("--host-mem", help="budget of RAM of a measurement (what is free)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--device-mem", help="of the device; on a CPU a device tier of RAM")
    add("--dtype", choices=sorted(DTYPES), default=BF16)
    add("--limit", type=common.seconds, default=1800.0, metavar="S", help="most seconds of a measurement (1800)")
    add("--quiet-wait", type=common.seconds, default=0.0, metavar="S", help="most seconds to wait for quiet cores (0)")
    add("--threads", type=positive, default=os.cpu_count())
    add("--offload-dir", type=Path, default=Path("~/flexgen_h2o_offload_dir"), help="weights, disk tier")
    args = parser.parse_args()
    args.output, args.offload_dir = usable_path(args.output, "--output"), args.offload_dir.expanduser()
    if args.output.suffix != ".csv":
        raise UsageError(f"--output {args.output}: the file name must end in .csv; JSON lines go beside it")
    check_writable(args.output, "--output")
    if args.limit == 0:
        raise UsageError("--limit 0: nothing ends in no time; give seconds")
    if args.plot is not None:
        args.plot = usable_path(args.plot, "--plot")
        check_picture(args.plot)
        check_writable(args.plot, "--plot")
    if args.host_mem is not None:
        parse_bytes(args.host_mem, "--host-mem")
    if args.device_mem is not None:
        args.device_mem = parse_bytes(args.device_mem, "--device-mem")
    return args


def _shapes(args: argparse.Namespace) -> tuple[Shape, ...]:
    """UsageError where none are asked for, or in two ways."""
    sides = (args.batch, args.prompt_len, args.gen_len)
    listed = args.batch_prompt_output
    if sum((args.quick, args.minikv, any(sides), listed is not None)) != 1:
        raise UsageError(
            "--batch: which shapes are measured is said by --batch, --prompt-len and --gen-len, by "
            "--batch_prompt_output, by --quick or by --minikv; give one of them"
        )
    if args.quick or args.minikv:
        return QUICK if args.quick else MINIKV
    if listed is not None:
        return _listed(listed)
    if not all(sides):
        raise UsageError("--batch: goes with --prompt-len and --gen-len; give all three")
    return tuple((b, p, g) for p in args.prompt_len for g in args.gen_len for b in args.batch)


def _listed(text: str) -> tuple[Shape, ...]:
    try:
        found = [tuple(map(int, shape)) for shape in ast.literal_eval(text)]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        found = []
    if not found or any(len(s) != 3 or min(s) < 1 or s[2] < 2 for s in found):
        raise UsageError(
            f"--batch_prompt_output {text[:60]!r}: is a list such as [(1,128,16),(8,128,16)]: batch, prompt tokens "
            "and at least 2 output tokens"
        )
    return tuple((b, p, g) for b, p, g in found)


def _policies(args: argparse.Namespace) -> Sequence[str]:
    if args.ratio is None:
        return args.policies or (POLICIES[:2] if args.quick else POLICIES)
    if args.policies:
        raise UsageError("--ratio and --policies: give one of them")
    return (f"h2o:{args.ratio:g}",)


# ---- picture

WHY_NOT = {DOES_NOT_FIT: "does not fit", TIMEOUT: "took too long", FAILED: "failed", REFUSED: "too few positions"}


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw peak memory and generated tokens/s of all benchmarks, side by side by policy.

    One that has no figures has a cross and says why.
    """
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(_shape(line) for line in lines))
    systems = list(dict.fromkeys(str(line["system"]) for line in lines))
    figure = Figure(figsize=(max(8.0, 0.6 * len(shapes) * len(systems)), 9), layout="constrained")
    memory, speed = figure.subplots(2, 1)
    memory.set(title="peak memory beside an empty process, GiB")
    speed.set(title="generated tokens/s, prefill + decode")
    width = 0.8 / len(systems)
    for s, system in enumerate(systems):
        for ax, of_line in ((memory, _memory), (speed, _speed)):
            places = [i + (s - (len(systems) - 1) / 2) * width for i in range(len(shapes))]
            heights = []
            for shape, place in zip(shapes, places, strict=True):
                found = [line for line in lines if line["system"] == system and _shape(line) == shape]
                values = [of_line(line) for line in found if line["status"] in MEASURED]
                heights.append(statistics.fmean(values) if values else 0.0)
                if found and not values:
                    ax.plot(place, 0, "x", color="black", clip_on=False)
                    ax.annotate(why_not(found), (place, 0), (0, 6), textcoords="offset points", rotation=90, fontsize=7)
            ax.bar(places, heights, width, label=system.removeprefix("ours-"))
    for ax in (memory, speed):
        ax.set_xticks(range(len(shapes)), [f"{b} x ({p} + {g})" for b, p, g in shapes], rotation=30, ha="right")
        ax.set_ylim(bottom=0)
        ax.grid(axis="y", alpha=0.3)
        ax.legend(fontsize=8)
    speed.set_xlabel("batch x (prompt + output tokens)")
    figure.suptitle(str(lines[0]["model"]))
    write_picture(path, figure)


def why_not(lines: Sequence[Line]) -> str:
    """Return why a benchmark has no figures, of all its repeats."""
    return WHY_NOT[str(lines[-1]["status"])]


def _shape(line: Line) -> Shape:
    return line["rows"], line["prompt_len"], line["gen_len"]


def _memory(line: Line) -> float:
    return float(line["peak_rss_bytes"]) / GIB


def _speed(line: Line) -> float:
    return float(line["tokens_per_s"])


if __name__ == "__main__":
    sys.exit(common.door(main))
