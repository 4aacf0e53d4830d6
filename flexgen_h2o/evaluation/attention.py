"""`evaluate attention`: the H2O paper's observations of attention, on any model that runs here.

The observations are those of arXiv 2306.14048, section 3. This module has the flags and their
checks; `attention_maps` measures.
"""

from __future__ import annotations

import argparse

from flexgen_h2o.cli_common import count, positive
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.rows import OUR_TEXT, add_row_flags, check_rows, refuse_sparse
from flexgen_h2o.flags import add_engine_flags, policy_of
from flexgen_h2o.parser import OneLineParser

# Prompts by default, and the first query that counts by default.
PROMPTS = 64
MAX_SEED = 2**31  # of the eviction policy `random`, which --remove compares with
MIN_SEEN = 32


def add_flags(parser: OneLineParser) -> None:
    """Add all flags of `evaluate attention`."""
    add_engine_flags(parser)
    parser.set_defaults(dtype="float32", run=run)
    add = parser.add_argument
    number = f"prompts ({PROMPTS}; of a file all)"
    add_row_flags(parser, OUR_TEXT, number, (256, 64), "256MiB")
    add(
        "--mass",
        type=float,
        default=0.95,
        metavar="P",
        help="share of a query's attention that the counted KV entries must cover (0.95)",
    )
    add(
        "--near-zero",
        type=float,
        default=0.01,
        metavar="P",
        help="the paper's sparsity: entries below this share of their query's largest one (0.01)",
    )
    add(
        "--first-query",
        type=count,
        metavar="N",
        help=f"sparsity is a mean over the queries from this one on ({MIN_SEEN}, or half of a "
        "shorter prompt)",
    )
    add(
        "--window",
        type=positive,
        default=5,
        metavar="N",
        help="two tokens co-occur when at most N positions apart (5)",
    )
    add(
        "--remove",
        nargs="*",
        type=float,
        default=(0.05, 0.2),
        metavar="SHARE",
        help="shares of the prompt's KV entries that are removed (0.05 0.2); without a value "
        "nothing is",
    )
    add(
        "--sinks",
        type=positive,
        default=4,
        metavar="N",
        help="first KV entries that one of the removals leaves (4)",
    )


def run(args: argparse.Namespace) -> int:
    """Check the flags before torch is imported, measure, and return the exit code."""
    _check(args)
    policy, is_auto = policy_of(args)
    refuse_sparse(policy, "changes the attention that is measured")
    from flexgen_h2o.evaluation.attention_maps import measure

    return measure(args, policy, is_auto)


def _check(args: argparse.Namespace) -> None:
    """Check the flags, and set the defaults that depend on other flags.

    Raise UsageError naming one.
    """
    check_rows(args, PROMPTS)
    for flag, share in (("--mass", args.mass), ("--near-zero", args.near_zero)):
        if not 0 < share < 1:
            raise UsageError(f"{flag} {share:g}: is not between 0 and 1, both excluded")
    if args.prompt_len < 4:
        raise UsageError(
            f"--prompt-len {args.prompt_len}: a power law is fitted to half of the ranks; give at "
            "least 4"
        )
    if args.first_query is None:
        args.first_query = min(MIN_SEEN, args.prompt_len // 2)
    if args.first_query >= args.prompt_len:
        raise UsageError(
            f"--first-query {args.first_query}: the last token of --prompt-len is "
            f"{args.prompt_len - 1}; give that "
            "or less"
        )
    if args.seed > MAX_SEED:
        raise UsageError(f"--seed {args.seed}: is larger than {MAX_SEED}")
    for i, share in enumerate(args.remove):
        if share in args.remove[:i]:
            raise UsageError(f"--remove: {share:g} is given twice")
        removed = int(share * args.prompt_len) if 0 < share < 1 else 0
        if not 1 <= removed <= args.prompt_len - args.sinks:
            raise UsageError(
                f"--remove {share:g}: must remove at least 1 of {args.prompt_len} KV entries and "
                f"leave {args.sinks} "
                "(--sinks)"
            )
