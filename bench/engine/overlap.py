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

from bench import common
from bench.common import ON_DISK, Spread, run_sweeps, steady
from bench.engine.reader import Reader
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.llm import LLM
from flexgen_h2o.models.load import find_model

IN_RAM = (0, 100, 0, 100, 0, 100)
BALANCED_WITHIN = 0.15
MOST_ROWS = 512
SEARCH_STEPS = 5


KINDS = ("compute", "read", "sequential", "overlapped")
Seconds = dict[str, list[float]]  # of a decode sweep, by kind, one value a repeat


def _ratios(seconds: Seconds) -> dict[str, Spread]:
    rounds = list(zip(*(seconds[kind] for kind in KINDS), strict=True))
    return {
        "speedup": Spread([s / o for _, _, s, o in rounds]),
        "ideal_speedup": Spread([(c + r) / max(c, r) for c, r, _, _ in rounds]),
        "share_of_ideal": Spread([max(c, r) / o for c, r, _, o in rounds]),
        "sequential_over_sum": Spread([s / (c + r) for c, r, s, _ in rounds]),
    }


def main() -> None:
    args = _parse()
    with ExitStack() as stack:
        model, on_disk = find_model(args.model, args.path), Policy(percent=ON_DISK)
        reader = stack.enter_context(Reader(model, on_disk, args.dtype, args.offload_dir))
        reader.read(1)
        rows = args.rows or _balanced_rows(args, reader)
        seconds: Seconds = {kind: [] for kind in KINDS}
        llms = {
            "compute": stack.enter_context(_open(args, rows, IN_RAM, True)),
            "sequential": stack.enter_context(_open(args, rows, ON_DISK, False)),
            "overlapped": stack.enter_context(_open(args, rows, ON_DISK, True)),
        }
        for llm in llms.values():  # opens the engines, warms up
            run_sweeps(llm, rows, args.prompt_len, 2)

        def engine(kind: str) -> None:
            found = steady(run_sweeps(llms[kind], rows, args.prompt_len, args.sweeps))
            seconds[kind].append(found.seconds_a_sweep)

        def read() -> None:
            seconds["read"].append(_seconds_to_read(reader, args.sweeps - 2))

        parts = [lambda: engine("compute"), read, lambda: engine("sequential"), lambda: engine("overlapped")]
        rounds = common.alternate(args.repeats, parts, args.quiet_wait)
        report = llms["overlapped"].report
        assert report is not None
    spreads, ratios = {kind: Spread(values) for kind, values in seconds.items()}, _ratios(seconds)
    look_ahead, peak = report.extra["look_ahead_units"], report.peak_bytes["host"]
    common.table(
        f"{args.model}: {rows} rows in {args.num_gpu_batches} micro-batches, seconds a decode sweep, "
        f"median (min - max) of {args.repeats} repeats",
        [
            *(
                (f"{kind} alone" if kind in KINDS[:2] else kind, spread.show("s", 3))
                for kind, spread in spreads.items()
            ),
            ("sequential / overlapped", ratios["speedup"].show("")),
            ("ideal: sum / max", ratios["ideal_speedup"].show("")),
            ("share of the ideal: max / overlapped", ratios["share_of_ideal"].show("%", 0, 0.01)),
            ("sequential / sum", ratios["sequential_over_sum"].show("")),
            ("units loaded ahead", str(look_ahead)),
            ("RAM of the overlapped run", f"{peak / common.GB:.2f} GB"),
            ("other processes took", common.show_rounds(rounds)),
        ],
    )
    result = {
        "benchmark": "overlap", "model": args.model, "rows": rows, "policy": report.policy.to_json(),
        "look_ahead_units": look_ahead, "host_peak_bytes": peak, "seconds_per_sweep": spreads, **ratios,
        "rounds": rounds,
    }  # fmt: skip
    common.finish(result, args.output)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b")
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
    return common.open_llm(args, policy, budget=MemoryBudget(host=args.host_mem if percent == ON_DISK else None))


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


if __name__ == "__main__":
    sys.exit(common.door(main))
