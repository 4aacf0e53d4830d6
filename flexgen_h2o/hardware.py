"""`python -m flexgen_h2o.hardware`: measure this machine's hardware profile, which the planner predicts with."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from flexgen_h2o.cli_common import OneLineParser, file_name, not_empty, results_are_in, run_cli, say
from flexgen_h2o.core.errors import EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import DEFAULT_OFFLOAD_DIR, check_writable, usable_path
from flexgen_h2o.core.units import format_seconds
from flexgen_h2o.flags import say_idle_flags
from flexgen_h2o.planner.profile import HardwareProfile, find_profile, read_profile, write_profile

PROMISED, PROMISED_S = "one to two minutes", (50, 130)
MOST_AGAIN_S = 60.0  # for what other processes disturbed
CACHED = ""  # --show without a name


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (DESIGN 3.1)."""
    return run_cli("hardware", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="hardware", description=__doc__)
    add = parser.add_argument
    add(
        "--output",
        type=file_name,
        metavar="FILE",
        help="also write the profile here (JSON); it is kept for later anyway",
    )
    add(
        "--offload-dir",
        type=not_empty,
        default=DEFAULT_OFFLOAD_DIR,
        help=f"whose disk is measured (default {DEFAULT_OFFLOAD_DIR})",
    )
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--machine", type=not_empty, metavar="NAME", help="the profile's name (default: from the card or the CPU)")
    add(
        "--show",
        nargs="?",
        const=CACHED,
        metavar="NAME",
        help="measure nothing; print a profile file, a shipped profile by its name, or the one kept for this machine",
    )
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    args.offload_dir = usable_path(args.offload_dir, "--offload-dir")
    if args.show is not None:
        profile = _shown(args)
    else:
        profile = _measured(args)
    from flexgen_h2o.planner.measure.table import table

    print(table(profile))
    say_idle_flags("hardware", args)
    return EXIT_DONE


def _shown(args: argparse.Namespace) -> HardwareProfile:
    for flag, given in (("--output", args.output), ("--machine", args.machine)):
        if given is not None:
            raise UsageError(f"{flag} and --show: nothing is measured with --show; leave one of them out")
    if args.show != CACHED:
        return read_profile(find_profile(args.show, "--show"), "--show")
    from flexgen_h2o.planner.measure.machine import cached_profile

    found = cached_profile(args.device, args.offload_dir)
    if found is None:
        raise UsageError("--show: no profile of this machine is kept; measure one: python -m flexgen_h2o.hardware")
    return found


def _measured(args: argparse.Namespace) -> HardwareProfile:
    if args.output is not None:
        args.output = usable_path(args.output, "--output")
        check_writable(args.output, "--output")
        results_are_in(args.output)
    from flexgen_h2o.planner.measure.machine import store
    from flexgen_h2o.planner.measure.run import measure, measure_again

    promise = [f"takes {PROMISED} where the machine is quiet, up to 2 GiB of disk and 1 GiB of memory meanwhile"]

    def progress(line: str) -> None:  # the first one comes when nothing can be refused any more
        for said in (*promise, line):
            _say(said)
        promise.clear()

    began = time.monotonic()
    profile = measure(args.device, args.offload_dir, progress)
    if profile.was_disturbed:
        profile = measure_again(profile, args.device, args.offload_dir, _say, MOST_AGAIN_S)
    took = time.monotonic() - began
    if not PROMISED_S[0] <= took <= PROMISED_S[1]:
        _say(f"took {format_seconds(took)}, not the {PROMISED} that were promised")
    if args.machine is not None:
        profile = replace(profile, machine=args.machine)
    if args.output is not None:
        write_profile(args.output, profile)
    try:
        _say(f"kept in {store(profile, args.device, args.offload_dir)}")
    except FlexgenError as error:  # a home that cannot be written to: what was measured is still worth showing
        _say(f"not kept for later runs: {error}")
    return profile


def _say(line: str) -> None:
    say("hardware", line)


if __name__ == "__main__":
    sys.exit(main())
