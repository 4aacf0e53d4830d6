"""Answer the prompts of a file as a job that survives being killed: an older name of `generate -i
FILE -o OUT`."""

from __future__ import annotations

import argparse
import sys

from flexgen_h2o.cli_common import own_name, positive, run_cli
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import usable_path
from flexgen_h2o.flags import add_h2o_hf_flags
from flexgen_h2o.generate import answer, job_parser
from flexgen_h2o.parser import OneLineParser


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code, which is 4 if every line is an error."""
    return run_cli("batch", _run, argv)


def _parser() -> OneLineParser:
    parser = job_parser(f"flexgen-h2o {own_name('batch')}", __doc__)
    _add_run_helm_flags(parser)
    return parser


def _add_run_helm_flags(parser: OneLineParser) -> None:
    """Add the flags of h2o_hf's run_helm.py, which help does not show."""
    add_h2o_hf_flags(parser)
    parser.add_argument(
        "--sample-num", type=positive, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    if "sample_num" in args and args.input is not None:
        _check_sample_num(args)
    return answer(args, needs_output=True)


def _check_sample_num(args: argparse.Namespace) -> None:
    """Raise UsageError if --sample_num asks for fewer requests than the file has, as all are
    answered.
    """
    path = usable_path(args.input, "--input")
    if not path.is_file():
        return  # `answer` reports it
    with path.open("rb") as file:
        requests = sum(1 for line in file if line.strip())
    if args.sample_num < requests:
        raise UsageError(
            f"--sample-num {args.sample_num}: {path} has {requests} requests, and all are "
            "answered; write the first "
            f"{args.sample_num} to a file: head -n {args.sample_num} {path}"
        )


if __name__ == "__main__":
    sys.exit(main())
