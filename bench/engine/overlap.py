"""Claim: moving and computing at the same time takes little longer than the longer of the two.

Method: rows are searched for which computing a decode sweep (all weights in RAM) takes about as long as reading the
weights (reader.py, nothing computes). Then, alternating in one process and with the same rows: the engine with
--overlap and all weights on disk, the same without, compute alone, reading alone; steady decode sweeps only.

Good: sequential / overlapped close to the ideal (compute + read) / max(compute, read), which is 2 where both are equal;
share of the ideal = max(compute, read) / overlapped, 100% at best. On a CPU reading and computing also share cores and
memory bandwidth, so that less than 100% is expected.

    python -m bench.engine.overlap [--rows 64] [--host-mem 1GiB] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.common import GB, Spread, add_flags, alternate, door, finish, run_sweeps, show_rounds, steady, table
from bench.engine.reader import Reader
from flexgen_h2o.checkpoint.formats import WeightFormat
from flexgen_h2o.cli_common import OneLineParser, positive
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.engine.memory_plan import streamed_bytes, tier_shares
from flexgen_h2o.llm import LLM
from flexgen_h2o.models.load import find_model

ON_DISK = (0, 0, 0, 100, 0, 100)
IN_RAM = (0, 100, 0, 100, 0, 100)
BALANCED_WITHIN = 0.15
MOST_ROWS = 512
SEARCH_STEPS = 5


@dataclass
class Seconds:
    """Of a decode sweep, one value a repeat."""

    compute: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    sequential: list[float] = field(default_factory=list)
    overlapped: list[float] = field(default_factory=list)

    def ratios(self) -> dict[str, Spread]:
        rounds = list(zip(self.compute, self.read, self.sequential, self.overlapped, strict=True))
        return {
            "speedup": Spread([s / o for _, _, s, o in rounds]),
            "ideal_speedup": Spread([(c + r) / max(c, r) for c, r, _, _ in rounds]),
            "share_of_ideal": Spread([max(c, r) / o for c, r, _, o in rounds]),
            "sequential_over_sum": Spread([s / (c + r) for c, r, s, _ in rounds]),
        }


def main() -> None:
    args = _parse()
    with ExitStack() as stack:
        reader = stack.enter_context(_open_reader(args))
        reader.read(1)
        rows = args.rows or _balanced_rows(args, reader)
        seconds = Seconds()
        llms = {
            "compute": stack.enter_context(_open(args, rows, IN_RAM, True)),
            "sequential": stack.enter_context(_open(args, rows, ON_DISK, False)),
            "overlapped": stack.enter_context(_open(args, rows, ON_DISK, True)),
        }
        for llm in llms.values():  # opens the engines, warms up
            run_sweeps(llm, rows, args.prompt_len, 2)

        def engine(kind: str) -> None:
            found = steady(run_sweeps(llms[kind], rows, args.prompt_len, args.sweeps))
            getattr(seconds, kind).append(found.seconds_a_sweep)

        def read() -> None:
            seconds.read.append(_seconds_to_read(reader, args.sweeps - 2))

        parts = [lambda: engine("compute"), read, lambda: engine("sequential"), lambda: engine("overlapped")]
        rounds = alternate(args.repeats, parts, args.quiet_wait)
        result = _result(args, llms["overlapped"], rows, seconds, rounds)
    _show(args, rows, seconds, result)
    finish(result, args.output)


def _parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, "facebook/opt-1.3b", None)
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--rows", type=positive, help="rows of the block (searched for by default)")
    add("--num-gpu-batches", type=positive, default=2, help="micro-batches that the rows are cut into (2)")
    add("--prompt-len", type=positive, default=16)
    add("--sweeps", type=positive, default=6, help="sweeps of a run; prefill and the first decode do not count (6)")
    add("--repeats", type=positive, default=5)
    return parser.parse_args()


def _open(args: argparse.Namespace, rows: int, percent: tuple[int, int, int, int, int, int], overlap: bool) -> LLM:
    """In RAM the budget of --host-mem does not count: it is for the runs that stream."""
    policy = Policy(-(-rows // args.num_gpu_batches), args.num_gpu_batches, percent=percent, overlap=overlap)
    budget = MemoryBudget(host=args.host_mem if percent == ON_DISK else None)
    return LLM(
        args.model, policy, device="cpu", dtype=args.dtype, budget=budget, path=args.path, offload_dir=args.offload_dir
    )


def _open_reader(args: argparse.Namespace) -> Reader:
    model, policy = find_model(args.model, args.path), Policy(percent=ON_DISK)
    shares = tier_shares(policy.weight_shares, device_is_host=True)
    largest = max(streamed_bytes(u, shares, WeightFormat(4), True) for u in model.spec.layers(policy.sep_layer).units)
    return Reader(model, policy, args.dtype, args.offload_dir, 2 * largest)


def _seconds_to_read(reader: Reader, sweeps: int) -> float:
    return reader.read(sweeps)[1] / sweeps


def _balanced_rows(args: argparse.Namespace, reader: Reader) -> int:
    """Rows whose compute takes about as long as the read: the time between two tried numbers is taken as a line."""
    rows, tried = 32, {0: 0.0}
    for _ in range(SEARCH_STEPS):
        read = _seconds_to_read(reader, 2)
        with _open(args, rows, IN_RAM, True) as llm:
            tried[rows] = steady(run_sweeps(llm, rows, args.prompt_len, 4)).seconds_a_sweep
        print(f"# {rows} rows: compute {tried[rows]:.3f} s a sweep, read {read:.3f} s", flush=True)
        if abs(tried[rows] / read - 1) <= BALANCED_WITHIN:
            return rows
        low = max((n for n in tried if tried[n] <= read), default=0)
        high = min((n for n in tried if tried[n] > read and n > low), default=None)
        if high is None:
            guess = min(MOST_ROWS, max(low + 8, int(low * read / tried[low]) if low else 32))
        else:
            guess = low + int((high - low) * (read - tried[low]) / (tried[high] - tried[low]))
        guess = max(args.num_gpu_batches, guess - guess % args.num_gpu_batches)
        if guess in tried:
            break
        rows = guess
    return min((n for n in tried if n), key=lambda n: abs(tried[n] / read - 1))


def _result(
    args: argparse.Namespace, llm: LLM, rows: int, seconds: Seconds, rounds: list[dict[str, float]]
) -> dict[str, Any]:
    assert llm.report is not None
    return {
        "benchmark": "overlap",
        "model": args.model,
        "rows": rows,
        "policy": llm.report.policy.to_json(),
        "look_ahead_units": llm.report.extra["look_ahead_units"],
        "host_peak_bytes": llm.report.peak_bytes["host"],
        "seconds_per_sweep": {name: Spread(values).to_json() for name, values in asdict(seconds).items()},
        **{name: ratio.to_json() for name, ratio in seconds.ratios().items()},
        "rounds": rounds,
    }


def _show(args: argparse.Namespace, rows: int, seconds: Seconds, result: dict[str, Any]) -> None:
    ratios = seconds.ratios()
    table(
        f"{args.model}: {rows} rows in {args.num_gpu_batches} micro-batches, seconds a decode sweep, "
        f"median (min - max) of {args.repeats} repeats",
        [
            ("compute alone", Spread(seconds.compute).show("s", 3)),
            ("reading alone", Spread(seconds.read).show("s", 3)),
            ("sequential", Spread(seconds.sequential).show("s", 3)),
            ("overlapped", Spread(seconds.overlapped).show("s", 3)),
            ("sequential / overlapped", ratios["speedup"].show("")),
            ("ideal: sum / max", ratios["ideal_speedup"].show("")),
            ("share of the ideal: max / overlapped", ratios["share_of_ideal"].show("%", 0, 0.01)),
            ("sequential / sum", ratios["sequential_over_sum"].show("")),
            ("units loaded ahead", str(result["look_ahead_units"])),
            ("RAM of the overlapped run", f"{result['host_peak_bytes'] / GB:.2f} GB"),
            ("other processes took", show_rounds(result["rounds"])),
        ],
    )


if __name__ == "__main__":
    sys.exit(door(main))
