"""Measure how fast this machine computes and reads memory and disk, for plans. It takes 1 to 2
minutes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flexgen_h2o.cli_common import file_name, not_empty, results_are_in, run_cli, say
from flexgen_h2o.core.errors import EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import DEFAULT_OFFLOAD_DIR, check_writable, usable_path
from flexgen_h2o.core.units import aligned, format_bytes, format_seconds, three_digits
from flexgen_h2o.flags import say_idle_flags
from flexgen_h2o.parser import OneLineParser
from flexgen_h2o.planner.profile import (
    ComputeRates,
    Curve,
    HardwareProfile,
    find_profile,
    read_profile,
    write_profile,
)

PROMISED = "one to two minutes"
PROMISED_S = (50, 130)
CACHED = ""  # --show without a name
GIGA = 1e9
MICRO = 1e-6
RATES = {
    "disk_read_bytes_per_s": "disk, read",
    "disk_write_bytes_per_s": "disk, write",
    "h2d_bytes_per_s": "host to device, pinned",
    "d2h_bytes_per_s": "device to host, pinned",
    "h2d_unpinned_bytes_per_s": "host to device",
    "d2h_unpinned_bytes_per_s": "device to host",
    "host_memory_bytes_per_s": "host memory",
    "device_memory_bytes_per_s": "device memory",
    "overlay_bytes_per_s": "merging pending KV entries into units from disk",
}
SECONDS = {
    "kernel_s": "kernel",
    "transfer_s": "copy between host and device",
    "disk_request_s": "disk request",
    "step_s": "step of a layer and micro-batch",
    "attention_step_s": "more, with attention",
    "eviction_step_s": "more, with eviction",
    "row_s": "added per row",
    "short_read_compute_s": "more, for each short disk read",
    "cache_load_step_s": "more, with a KV unit from another tier",
    "graph_step_s": "step that is one CUDA graph",
}
SHARES = {
    "disk_read_beside_compute": "disk read beside compute",
    "compute_beside_disk_read": "compute beside disk read",
    "link_both_ways": "link, each way while both are busy",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    return run_cli("hardware", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="flexgen-h2o hardware", description=__doc__)
    add = parser.add_argument
    kept = "also write the profile here (JSON); it is kept for later anyway"
    add("--output", type=file_name, metavar="FILE", help=kept)
    disk = f"whose disk is measured (default {DEFAULT_OFFLOAD_DIR})"
    add("--offload-dir", type=not_empty, default=DEFAULT_OFFLOAD_DIR, help=disk)
    add("--device", default="auto", help="auto, cpu or cuda")
    add(
        "--machine",
        type=not_empty,
        metavar="NAME",
        help="the profile's name (default: from the GPU or the CPU)",
    )
    shown = (
        "measure nothing; print a profile file, a shipped profile by its name, or the one kept "
        "for this machine"
    )
    add("--show", nargs="?", const=CACHED, metavar="NAME", help=shown)
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    args.offload_dir = usable_path(args.offload_dir, "--offload-dir")
    profile = _measured(args) if args.show is None else _shown(args)
    print(table(profile))
    say_idle_flags("hardware", args)
    return EXIT_DONE


def _shown(args: argparse.Namespace) -> HardwareProfile:
    for flag, given in (("--output", args.output), ("--machine", args.machine)):
        if given is not None:
            raise UsageError(
                f"{flag} and --show: nothing is measured with --show; leave one of them out"
            )
    if args.show != CACHED:
        return read_profile(find_profile(args.show, "--show"), "--show")
    from flexgen_h2o.planner.measure.run import cached_profile

    found = cached_profile(args.device, args.offload_dir)
    if found is None:
        raise UsageError(
            "--show: no profile of this machine is kept; measure one: flexgen-h2o hardware"
        )
    return found


def _measured(args: argparse.Namespace) -> HardwareProfile:
    if args.output is not None:
        args.output = usable_path(args.output, "--output")
        check_writable(args.output, "--output")
        results_are_in(args.output)
    from flexgen_h2o.planner.measure.run import measure, store

    promise = [
        f"takes {PROMISED} where the machine is quiet, up to 2 GiB of disk and 1 GiB of memory "
        "meanwhile"
    ]

    def progress(line: str) -> None:  # the first line comes when nothing can be refused any more
        for said in (*promise, line):
            _say(said)
        promise.clear()

    began = time.monotonic()
    profile = measure(args.device, args.offload_dir, progress)
    took = time.monotonic() - began
    if not PROMISED_S[0] <= took <= PROMISED_S[1]:
        _say(f"took {format_seconds(took)}, not the {PROMISED} that were promised")
    if args.machine is not None:
        profile = replace(profile, machine=args.machine)
    if args.output is not None:
        write_profile(args.output, profile)
    try:
        _say(f"kept in {store(profile, args.device, args.offload_dir)}")
    except FlexgenError as error:
        # The home folder cannot be written to. The measurements are still shown.
        _say(f"not kept for later runs: {error}")
    return profile


def _say(line: str) -> None:
    say("hardware", line)


def table(profile: HardwareProfile) -> str:
    """Return the whole profile as text, one line per figure or curve: GB/s (10^9), GFLOP/s,
    microseconds.
    """
    lines = [f"{profile.machine}: {profile.description}", f"{profile.source}, {profile.date}"]
    sizes = [
        ("device", profile.device_mem_bytes),
        ("host", profile.host_mem_bytes),
        ("disk", profile.disk_mem_bytes),
    ]
    lines += ["", "memory", *_columns([(name, format_bytes(size)) for name, size in sizes if size])]
    groups = (("GB/s", RATES, GIGA), ("us", SECONDS, MICRO), ("share left", SHARES, 1.0))
    for unit, names, scale in groups:
        figures = [
            (what, three_digits(getattr(profile, field) / scale)) for field, what in names.items()
        ]
        lines += ["", unit, *_columns(figures)]
    for dtype, rates in profile.compute.items():
        lines += ["", *_compute(dtype, rates)]
    if profile.notes:
        lines += ["", "notes", *(f"  {name}: {note}" for name, note in profile.notes.items())]
    return "\n".join(lines)


def _compute(dtype: str, rates: ComputeRates) -> Iterator[str]:
    products = [(shape, i, c) for shape, by_inner in rates.matmul_flops_per_s for i, c in by_inner]
    rows = [rows for rows, _ in products[0][2].points]
    head = ["rows", *(f"{r:g}" for r in rows)]
    body = [
        [f"{i:g} to {i * shape:g}", *(three_digits(c.at(r) / GIGA) for r in rows)]
        for shape, i, c in products
    ]
    yield f"{dtype}: products, GFLOP/s"
    yield from _columns([head, *body])
    faster = {
        "blocked": rates.blocked_speedup,
        "int8": rates.int8_speedup,
        "int8 from int4": rates.int4_speedup,
    }
    yield from _curves(
        {f"times faster, {held}": curve for held, curve in faster.items()}, scale=1.0
    )
    yield f"{dtype}: GFLOP/s by tokens of a prompt"
    yield from _curves(
        {
            "attention of prompts": rates.prefill_attention_flops_per_s,
            "column sums": rates.column_sums_flops_per_s,
        }
    )
    yield f"{dtype}: GB/s of decode attention by head width"
    yield from _curves(
        {
            "device": rates.device_attention_bytes_per_s,
            "device, scored": rates.device_scored_attention_bytes_per_s,
            "host": rates.host_attention_bytes_per_s,
            "host, scored": rates.host_scored_attention_bytes_per_s,
        }
    )
    others = {
        "norms and activations, GB/s": rates.elementwise_bytes_per_s,
        "int4 to dtype on the device, GB/s": rates.device_dequantise_bytes_per_s,
        "int4 to dtype on the host, GB/s": rates.host_dequantise_bytes_per_s,
        "sampling, G logits/s": rates.logits_per_s,
    }
    yield f"{dtype}: others"
    yield from _columns([(what, three_digits(rate / GIGA)) for what, rate in others.items()])
    if rates.decode_speedup:
        yield f"{dtype}: quantised checkpoints, times faster than int4 to dtype"
        yield from _columns(
            [(name, three_digits(ratio)) for name, ratio in rates.decode_speedup.items()]
        )


def _curves(curves: dict[str, Curve], scale: float = GIGA) -> list[str]:
    """Return one line per curve. Curves of a profile share their sizes or have one point each."""
    return _columns(
        [
            [what, *(f"{size:g}: {three_digits(rate / scale)}" for size, rate in c.points)]
            for what, c in curves.items()
        ]
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows, right=True)]


if __name__ == "__main__":
    sys.exit(main())
