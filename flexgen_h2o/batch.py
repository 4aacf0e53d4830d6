"""Answer the prompts of a file as a job that survives being killed: an older name of `generate -i FILE -o OUT`."""

from __future__ import annotations

import sys

from flexgen_h2o.cli_common import own_name, run_cli
from flexgen_h2o.generate import answer, job_parser
from flexgen_h2o.parser import OneLineParser

MAX_TOKENS = 32


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, 4 if every line is an error."""
    return run_cli("batch", _run, argv)


def _parser() -> OneLineParser:
    return job_parser(f"flexgen-h2o {own_name('batch')}", __doc__, MAX_TOKENS)


def _run(argv: list[str] | None) -> int:
    return answer(_parser().parse_args(argv), needs_output=True)


if __name__ == "__main__":
    sys.exit(main())
