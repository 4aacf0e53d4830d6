"""Measure how fast this machine computes and reads memory and disk, for plans. It takes 1 to 2
minutes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from flexgen_h2o.cli_common import file_name, not_empty, results_are_in, run_cli, say
from flexgen_h2o.core.errors import EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import DEFAULT_OFFLOAD_DIR, check_writable, usable_path
from flexgen_h2o.core.units import GIB, aligned, format_seconds, three_digits
from flexgen_h2o.flags import say_idle_flags
from flexgen_h2o.parser import OneLineParser
from flexgen_h2o.planner.profile import (
    HardwareProfile,
    write_profile,
)

PROMISED = "one to two minutes"
PROMISED_S = (50, 130)
CACHED = ""  # --show without a name
# By the ending of a figure's name in a profile: the unit in which it is shown, and the size of the
# unit. The first ending counts.
UNITS = {
    "_mem_bytes": ("GiB", GIB),
    "_flops_per_s": ("GFLOP/s", 1e9),
    "_bytes_per_s": ("GB/s", 1e9),
    "_per_s": ("G/s", 1e9),
    "_s": ("us", 1e-6),
    "_speedup": ("times as fast", 1.0),
    "": ("share left", 1.0),
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
    from flexgen_h2o.planner.measure.run import cached_profile

    if args.show != CACHED:
        from flexgen_h2o.planner.parts import find_hardware

        here = partial(cached_profile, args.device, args.offload_dir)
        return find_hardware(args.show, here, "--show")
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
    if profile.was_disturbed:
        (note,) = profile.notes.values()
        _say(f"{note}: run flexgen-h2o hardware again when the machine is quiet")
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
    """Return the whole profile as text: one line per figure or curve, with its unit.

    A curve is shown as `size: figure`. Its sizes are those of docs/reference/files.md.
    """
    body = profile.to_json()
    found = [f"{profile.machine}: {profile.description}", f"{profile.source}, {profile.date}", ""]
    numbers = {name: value for name, value in body.items() if type(value) in (int, float)}
    del numbers["schema"]
    found += _columns([_row(name, value) for name, value in numbers.items()])
    for dtype, rates in body["compute"].items():
        found += ["", f"{dtype}: matrix products, GFLOP/s by rows"]
        products = rates.pop("matmul_flops_per_s")
        scale = UNITS["_flops_per_s"][1]
        for shape, by_inner in products.items():
            found += _columns(
                [
                    [f"{inner} to {float(inner) * float(shape):g}", *_cells(curve, scale)]
                    for inner, curve in by_inner.items()
                ]
            )
        found.append(f"{dtype}: others")
        found += _columns([_row(name, value) for name, value in rates.items() if value])
    if profile.notes:
        found += ["", "notes", *(f"  {name}: {note}" for name, note in profile.notes.items())]
    return "\n".join(found)


def _row(name: str, value: float | Mapping[str, float]) -> list[str]:
    """Return the cells of a figure or a curve: its name with its unit, and its numbers."""
    ending = next(ending for ending in UNITS if name.endswith(ending))
    unit, scale = UNITS[ending]
    return [f"{name.removesuffix(ending).replace('_', ' ')}, {unit}", *_cells(value, scale)]


def _cells(value: float | Mapping[str, float], scale: float) -> list[str]:
    """Return numbers in units of this size."""
    if isinstance(value, Mapping):
        return [f"{size}: {three_digits(figure / scale)}" for size, figure in value.items()]
    return [three_digits(value / scale)]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows, right=True)]


if __name__ == "__main__":
    sys.exit(main())
