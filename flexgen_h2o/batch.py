"""`python -m flexgen_h2o.batch`: a durable job. One JSON line a request in, one a row out; killed, it goes on."""

from __future__ import annotations

import argparse
import contextlib
import sys
from importlib.util import find_spec

from flexgen_h2o.cli_common import (
    OneLineParser,
    check_separate,
    count,
    file_name,
    positive,
    results_are_in,
    run_cli,
)
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import usable_path
from flexgen_h2o.engine.prompts import check_output_path
from flexgen_h2o.flags import (
    add_engine_flags,
    add_eviction_flags,
    add_sampling_flags,
    eviction_of,
    policy_of,
    sampling_of,
    say_idle_flags,
)
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.kvcache.prefixes import SHARINGS


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, 4 where every row is an error."""
    return run_cli("batch", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="batch", description=__doc__)
    add = parser.add_argument
    lines = "a JSON line a request: OpenAI's batch lines, plain prompts, HELM requests"
    add("--input", "-i", type=file_name, help=lines)
    add("--output", "-o", type=file_name, help=".jsonl, a line a row as it is done; what is in it is not done again")
    add("--force", action="store_true", help="go on with an output that was begun with other settings")
    add("--max-errors", type=count, metavar="N", help="end when more than N rows are errors (no limit)")
    add("--window", type=positive, metavar="ROWS", help="rows that are read ahead and sorted (1024, at least 4 blocks)")
    add(
        "--refill", action=argparse.BooleanOptionalAction, default=True,
        help="rows that finish give their places to the next ones while the others go on (on)",
    )  # fmt: skip
    add(
        "--ray", nargs="?", const="", metavar="ADDRESS",
        help="run on the Ray at ADDRESS (a cluster, or auto), an engine an actor; without one on a Ray of its own here",
    )  # fmt: skip
    add(
        "--ray-actors", type=positive, metavar="N", help="engines on Ray, each with the budgets (one a card, or a node)"
    )
    add("--status", action="store_true", help="say how the job that writes --output stands, and do nothing else")
    add("--gen-len", type=positive, default=32, help="most new tokens of a row that does not say (32)")
    add("--share-prefix", choices=tuple(SHARINGS), default="auto", help="compute once what rows begin with (auto)")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    add_eviction_flags(parser)
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    if args.output is None and not args.dry_run:
        raise UsageError("--output: is missing; name the .jsonl file that the job writes")
    args.output = args.output and usable_path(args.output, "--output")
    if args.status and args.dry_run:
        raise UsageError("--status and --dry-run: give one of them")
    if args.status:
        return _show_status(args)
    _check_input(args)
    if not args.dry_run:
        results_are_in(args.output)
        _check_output(args)
    if args.ray_actors and args.ray is None:
        raise UsageError("--ray-actors: goes with --ray; give both")
    if args.ray is not None and (find_spec("ray") is None or find_spec("pyarrow") is None):
        raise UsageError("--ray: needs Ray Data; pip install -e '.[ray]' in a clone")
    policy, is_auto = policy_of(args)
    defaults, eviction = sampling_of(args), eviction_of(args, policy)
    if args.dry_run:
        from flexgen_h2o.jobs.job import plan_job

        return plan_job(args, args.input, policy, is_auto, eviction, defaults)
    with contextlib.closing(OutputFile(args.output)) as output:
        from flexgen_h2o.jobs.job import run

        return run(args, output, policy, is_auto, eviction, defaults)


def _show_status(args: argparse.Namespace) -> int:
    from flexgen_h2o.jobs.sidecar import read_status, status_lines

    print("\n".join(status_lines(read_status(args.output))))
    say_idle_flags("batch --status", args)
    return EXIT_DONE


def _check_input(args: argparse.Namespace) -> None:
    if args.input is None:
        raise UsageError("--input: is missing; name the .jsonl file with the requests")
    args.input = usable_path(args.input, "--input")
    if not args.input.exists():
        raise UsageError(f"--input {args.input}: does not exist")
    if not args.input.is_file():
        raise UsageError(f"--input {args.input}: is not a file; it is read more than once")


def _check_output(args: argparse.Namespace) -> None:
    from flexgen_h2o.jobs.sidecar import sidecar_path, status_path

    check_output_path(args.output)
    check_separate(args, ("input", "policy", "hardware"), ("output",))
    if args.input.resolve() in (path(args.output).resolve() for path in (sidecar_path, status_path)):
        raise UsageError(f"--input {args.input}: is a file that the job writes beside --output; give another name")


if __name__ == "__main__":
    sys.exit(main())
