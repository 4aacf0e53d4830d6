"""Measure what a smaller KV cache costs: in figures (fidelity), in texts to read (text), in long
streams (streaming).

Aliases are the flags of h2o_hf's run_text_generation and streaming scripts, and of llama-recipes'
run_streaming.py.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from flexgen_h2o.cli_common import (
    check_files,
    count,
    file_name,
    flag_of,
    positive,
    results_are_in,
    run_cli,
    share,
)
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.rows import (
    OUR_TEXT,
    add_continuation_flag,
    add_rolling_flag,
    add_row_flags,
    check_rows,
    check_sizes,
    refuse_sparse,
    window_sizes,
)
from flexgen_h2o.flags import (
    HIDDEN,
    add_engine_flags,
    add_eviction_flags,
    add_h2o_hf_flags,
    add_prompt_flags,
    add_sampling_flags,
    eviction_of,
    policy_of,
    turn_format,
)
from flexgen_h2o.kvcache.eviction import POLICIES, says_budget
from flexgen_h2o.parser import OneLineParser

# Workflows with flags of their own: name -> (module of `evaluation/` with `add_flags(parser)`, one
# line of help). The module may not import torch. add_flags sets `run`, a function of the parsed
# arguments that returns the exit code.
WORKFLOWS: dict[str, tuple[str, str]] = {
    "frontier": (
        "frontier",
        "what answers lose, and what is saved: policies, sizes and bits against the full cache",
    ),
    "data-wrangling": (
        "data_wrangling",
        "entity matching, error detection and imputation, as fm_data_tasks has them",
    ),
    "summarize": (
        "summarize",
        "summaries of articles by size of the KV cache: ROUGE, bytes, tokens/s",
    ),
    "helm": ("helm", "HELM's requests for batch jobs, and their answers for HELM's cache"),
    "attention": (
        "attention",
        "sparsity, heavy hitters and what removing them does: the H2O paper's observations",
    ),
    "lm-eval": ("lm_eval", "tasks of lm-eval, with the engine as its model"),
}
BUDGETS = (0.5, 0.2, 0.1)
TEXT_PROMPTS = 200
RECALL_PROMPTS = 100
TEXT_GEN_LEN = 64
# heavy KV entries, and as many recent ones: llama-recipes' defaults
SIZE = 128
TURN_GEN_LEN = 64
STREAMS = 8
STREAM_LEN = 1024
WINDOWS = 4
# Flags for turns or for a text. A text has its own tokens, and none are drawn.
OF_TURNS = (
    "turns",
    "num_turns",
    "chat",
    "turn_format",
    "gen_len",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "ignore_eos",
)
OF_TEXT = ("stream_len", "streams", "windows")
MT_BENCH = "mt_bench.jsonl"  # file in the folder that h2o_hf's --data_root names


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    return run_cli("evaluate", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="flexgen-h2o evaluate", description=__doc__)
    names = "|".join(("fidelity", "text", "streaming", *WORKFLOWS))
    measures = parser.add_subparsers(dest="measure", required=True, metavar=names)
    for name, add_flags, text in (
        (
            "fidelity",
            _add_fidelity_flags,
            "KL, changed tokens, NLL and recall against the full cache",
        ),
        ("text", _add_text_flags, "one's own prompts, full cache and eviction side by side"),
        ("streaming", _add_streaming_flags, "conversations and texts longer than the cache"),
    ):
        measure = measures.add_parser(name, help=text)
        add_engine_flags(measure)
        add_flags(measure)
    for name, (module, text) in WORKFLOWS.items():
        importlib.import_module(f"flexgen_h2o.evaluation.{module}").add_flags(
            measures.add_parser(name, help=text)
        )
    return parser


def _add_fidelity_flags(parser: OneLineParser) -> None:
    # Differences of 1e-4 nats are measured; --dtype auto would use the checkpoint's own dtype.
    parser.set_defaults(dtype="float32", run=_run_fidelity)
    add = parser.add_argument
    names = list(POLICIES[1:])
    add(
        "--policies",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(names)} (all; none with --attn-sparsity); with settings: "
        "h2o-norm:grace=8,sinks=0",
    )
    add(
        "--budgets",
        nargs="+",
        type=share,
        default=BUDGETS,
        metavar="SHARE",
        help="KV entries kept, as shares of the prompt: half heavy hitters, half recent (0.5 0.2 "
        "0.1)",
    )
    add(
        "--budgets-of",
        choices=("prompt", "sequence", "bytes"),
        default="prompt",
        help="what --budgets are shares of: KV entries of the prompt; of the prompt and the text "
        "after it; or "
        "bytes of these in bf16 (prompt)",
    )
    number = f"prompts ({TEXT_PROMPTS}; of a file all)"
    add_row_flags(parser, OUR_TEXT, number, (256, 96), "1GiB")
    add_continuation_flag(parser)
    recalls = f"recall prompts ({RECALL_PROMPTS}; 0 with --prompts)"
    add("--recall-prompts", type=count, metavar="N", help=recalls)


def _add_text_flags(parser: OneLineParser) -> None:
    parser.set_defaults(run=_run_text)
    add_eviction_flags(parser)
    add_sampling_flags(parser)
    add_prompt_flags(parser, "default: a few lines of Python")
    add = parser.add_argument
    add(
        "--chat",
        action="store_true",
        help="each prompt is a user's message, put into the model's chat template",
    )
    length = f"most new tokens ({TEXT_GEN_LEN})"
    add("--gen-len", type=positive, default=TEXT_GEN_LEN, help=length)
    add("--json", type=file_name, help="write prompts, texts, tokens and KV bytes")
    add_h2o_hf_flags(parser)


def _add_streaming_flags(parser: OneLineParser) -> None:
    parser.set_defaults(run=_run_streaming)
    add_sampling_flags(parser)
    add = parser.add_argument
    add(
        "--policies",
        nargs="+",
        default=("full", "h2o"),
        metavar="NAME",
        help=f"{', '.join(POLICIES)} (full h2o); also h2o:positions=rolling, and with --text "
        "h2o:kv_budget=0.2",
    )
    sizes = "KV entries per sequence"
    add("--hh-size", type=count, metavar="N", help=f"heavy-hitter {sizes} ({SIZE})")
    add("--recent-size", type=positive, metavar="N", help=f"recent {sizes} ({SIZE})")
    add("--kv-budget", type=_no_share, help=argparse.SUPPRESS)
    add_rolling_flag(parser)
    add(
        "--turns",
        type=file_name,
        help=".jsonl with MT-bench's questions, or prompts: .txt, .jsonl",
    )
    add("--num-turns", type=positive, help="only so many of them")
    add("--chat", action="store_true", help="turns are messages in the model's chat template")
    add(
        "--turn-format",
        type=turn_format,
        metavar="TEXT",
        help=r"what a turn becomes, at {turn} ('\n{turn}\n'); \n is a newline",
    )
    add("--gen-len", type=positive, help=f"most tokens of an answer ({TURN_GEN_LEN})")
    add(
        "--text",
        nargs="?",
        const="",
        metavar="FILE",
        help="instead of turns: how surprising a long text is, by window (without FILE: Python's "
        "own sources)",
    )
    add(
        "--stream-len",
        type=positive,
        metavar="N",
        help=f"tokens of a stretch of it ({STREAM_LEN}; of a file all)",
    )
    add("--streams", type=positive, metavar="N", help=f"stretches of it ({STREAMS}; of a file 1)")
    add(
        "--windows",
        type=positive,
        metavar="N",
        help=f"parts of a stretch that are told apart ({WINDOWS})",
    )
    add(
        "--json",
        "--output",
        type=file_name,
        metavar="FILE",
        help="write all figures, and turns with their answers",
    )
    add("--data-root", dest="turns", type=lambda folder: Path(folder) / MT_BENCH, **HIDDEN)
    for flag in ("--enable_h2o_generation", "--enable_streaming_with_H2O"):
        add(flag, dest="policies", action="store_const", const=("h2o",), **HIDDEN)
    add("--num-heavy-hitter-tokens", dest="heavy_of_window", type=int, nargs=1, **HIDDEN)
    add("--num-window-length", dest="window_size", type=positive, nargs=1, **HIDDEN)
    add("--start-size", dest="sinks", type=count, **HIDDEN)


def _no_share(text: str) -> str:
    raise argparse.ArgumentTypeError(
        f"is said in --policies, of stretches of a --text: h2o:kv_budget={text}"
    )


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    code: int = args.run(args)
    return code


# Errors in flags and files are found before torch is imported and anything is loaded.


def _run_fidelity(args: argparse.Namespace) -> int:
    check_rows(args, TEXT_PROMPTS)
    if args.recall_prompts is None:
        args.recall_prompts = 0 if args.prompts else RECALL_PROMPTS
    results_are_in(args.json)
    policy, is_auto = policy_of(args)
    _choose_policies(args, policy)
    from flexgen_h2o.evaluation.fidelity import run

    return run(args, policy, is_auto)


def _choose_policies(args: argparse.Namespace, policy: Policy) -> None:
    """Set the default of --policies.

    Raise UsageError if any is to drop KV entries with --attn-sparsity.
    """
    if policy.attn_sparsity == 1:
        args.policies = args.policies or list(POLICIES[1:])
        return
    if args.policies:
        raise UsageError(
            "--attn-sparsity: reads a share of the full cache, and --policies has "
            f"{args.policies[0]}; leave one of them out"
        )
    if (args.budgets, args.budgets_of) != (BUDGETS, "prompt"):
        raise UsageError(
            "--budgets: say what policies keep, and with --attn-sparsity all KV entries stay; "
            "leave them out"
        )
    args.policies = []


def _run_text(args: argparse.Namespace) -> int:
    if args.prompt is not None and args.prompts is not None:
        raise UsageError("--prompt and --prompts: give one of them")
    if args.eviction == "full":
        raise UsageError(
            "--eviction full: another policy is compared with the full cache; name that policy"
        )
    # The default is h2o, with run_text_generation's shares if none are given.
    args.eviction = args.eviction or "h2o"
    check_files(args, ("prompts",), ("json",))
    results_are_in(args.json)
    policy, is_auto = policy_of(args)
    eviction_of(args, policy)
    from flexgen_h2o.evaluation.text import run

    return run(args, policy, is_auto)


def _run_streaming(args: argparse.Namespace) -> int:
    is_text = args.text is not None
    for name in OF_TURNS if is_text else OF_TEXT:
        if getattr(args, name) and (name, getattr(args, name)) != ("top_p", 1):
            flag = flag_of(name)
            raise UsageError(
                f"{flag} and --text: give one of them"
                if is_text
                else f"{flag}: goes with --text; give it"
            )
    for policy in () if is_text else filter(says_budget, args.policies):
        raise UsageError(
            f"--policies {policy}: the length of a conversation is not known, so shares of it do "
            "not work; give counts (--hh-size, --recent-size)"
        )
    if args.chat and args.turn_format is not None:
        raise UsageError("--turn-format and --chat: give one of them")
    check_files(args, ("turns", "text"), ("json",))
    args.gen_len = args.gen_len or TURN_GEN_LEN
    args.windows = args.windows or WINDOWS
    args.hh_size, args.recent_size = _sizes(args)
    if args.text == "":
        args.streams = args.streams or STREAMS
        args.stream_len = args.stream_len or STREAM_LEN
    results_are_in(args.json)
    placement, is_auto = policy_of(args)
    refuse_sparse(placement)
    from flexgen_h2o.evaluation.streaming import run

    return run(args, placement, is_auto)


def _sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Return the numbers of heavy and of recent KV entries."""
    check_sizes(args, args.policies)
    windows = window_sizes(args, SIZE)
    if windows:
        return windows[0]
    return SIZE if args.hh_size is None else args.hh_size, args.recent_size or SIZE


if __name__ == "__main__":
    sys.exit(main())
