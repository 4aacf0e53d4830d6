"""`python -m flexgen_h2o.evaluate`: what evicted KV columns cost, in figures (`fidelity`), to be read (`text`), and in
streams longer than the cache (`streaming`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import (
    OneLineParser,
    check_files,
    check_picture,
    count,
    file_name,
    flag_of,
    own_name,
    positive,
    results_are_in,
    run_cli,
    say,
)
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import write_result
from flexgen_h2o.core.units import parse_bytes
from flexgen_h2o.evaluation.streaming import add_streaming_flags
from flexgen_h2o.evaluation.text import add_text_flags
from flexgen_h2o.flags import (
    add_engine_flags,
    check_positions,
    compression_flags,
    open_llm,
    place_of,
    policy_of,
    say_idle_flags,
    uncompressed,
)
from flexgen_h2o.kvcache.eviction import POLICIES

if TYPE_CHECKING:
    from flexgen_h2o.core.config import Policy
    from flexgen_h2o.evaluation.fidelity import Runner
    from flexgen_h2o.evaluation.metrics import Cell
    from flexgen_h2o.evaluation.rows import HeldOutText, Lengths, RecallRow, TextRow
    from flexgen_h2o.llm import LLM


BUDGETS = (0.5, 0.2, 0.1)
TEXT_PROMPTS, RECALL_PROMPTS = 200, 100
SCHEMA = 1
OUTPUTS = ("json", "markdown", "plot")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (DESIGN 3.1)."""
    return run_cli("evaluate", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog=own_name("evaluate"), description=__doc__)
    measures = parser.add_subparsers(dest="measure", required=True, metavar="fidelity|text|streaming")
    fidelity = measures.add_parser(
        "fidelity", help="KL, flips, NLL, recall and evicted attention against the full cache"
    )
    _add_fidelity_flags(fidelity)
    # Differences of 1e-4 nats are looked for; --dtype auto takes the checkpoint's own.
    fidelity.set_defaults(dtype="float32", run=_run_fidelity)
    add_text_flags(measures.add_parser("text", help="one's own prompts, full cache and eviction side by side"))
    add_streaming_flags(measures.add_parser("streaming", help="conversations and texts longer than the cache"))
    return parser


def _add_fidelity_flags(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    add = parser.add_argument
    names = list(POLICIES[1:])
    add(
        "--policies", nargs="+", default=names, metavar="NAME",
        help=f"{', '.join(names)} (all); with settings: h2o-norm:decay=0.98,sinks=0",
    )  # fmt: skip
    add(
        "--budgets", nargs="+", type=float, default=BUDGETS, metavar="SHARE",
        help="columns kept as shares of the prompt, half heavy and half recent (0.5 0.2 0.1)",
    )  # fmt: skip
    add("--prompts", type=file_name, help=".txt or .jsonl as flex_opt takes them (default: Python's own sources)")
    add("--num-prompts", type=positive, help=f"text rows ({TEXT_PROMPTS}; of a file all)")
    add("--recall-prompts", type=count, help=f"recall rows ({RECALL_PROMPTS}; 0 with --prompts)")
    add("--prompt-len", type=positive, default=256, help="tokens of a prompt (256)")
    add("--gen-len", type=positive, default=96, help="tokens that are followed after it (96)")
    add(
        "--continuation", choices=("text", "greedy"), default="text",
        help="follow the text itself, or the model's own greedy tokens",
    )  # fmt: skip
    add("--depths", type=positive, default=5, help="places where recall prompts state their pairs (5)")
    add("--mass-steps", type=count, default=12, help="decode steps whose evicted attention is measured (12)")
    add("--free-run", action="store_true", help="also generate freely: where does the first other token come?")
    add("--resamples", type=positive, default=1000, help="of the bootstrap (1000)")
    add("--seed", type=count, default=0, help="of rows and bootstrap")
    add("--keep-mem", default="1GiB", help="RAM for the full cache's logits and attention, beside the budgets (1GiB)")
    add("--json", type=file_name, help="write all figures")
    add("--markdown", type=file_name, help="write the tables that are printed")
    add("--plot", type=file_name, help="write a picture (.png, .svg; needs matplotlib: the extra `plot`)")


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    code: int = args.run(args)
    return code


def _run_fidelity(args: argparse.Namespace) -> int:
    _check(args)
    results_are_in(args.json, args.markdown)
    policy, is_auto = policy_of(args)
    if policy.attn_sparsity != 1:
        raise UsageError("--attn-sparsity: the full cache is the reference here; leave it out")
    from flexgen_h2o.engine.workload import AutoPolicy
    from flexgen_h2o.evaluation.fidelity import Runner
    from flexgen_h2o.evaluation.metrics import make_cells
    from flexgen_h2o.evaluation.rows import Lengths
    from flexgen_h2o.kvcache.eviction import Full

    plain = uncompressed(policy)
    cells, began = make_cells(args.policies, args.budgets, whole=policy != plain), time.perf_counter()
    compared = AutoPolicy(policy) if is_auto else policy
    with open_llm(args, plain, is_auto, Full()) as llm:
        runner = Runner(llm, parse_bytes(args.keep_mem, "--keep-mem"), args.mass_steps, _say, compared)
        runner.check(cells)
        check_positions(args, llm.model.name, llm.model.spec.max_positions)
        lengths = Lengths(args.prompt_len, args.gen_len)
        texts, recalls = _rows(args, llm, runner, lengths)
        say_idle_flags("evaluate fidelity", args, place_of(args, llm))
        result = {**_facts(args, llm, policy, cells, texts), **_measure(args, runner, texts, recalls, cells)}
    result["seconds"] = time.perf_counter() - began
    _show(args, result)
    return EXIT_DONE


def _check(args: argparse.Namespace) -> None:
    """Everything that can be wrong with flags and files, before anything is loaded."""
    if args.gen_len < 2:
        raise UsageError(f"--gen-len {args.gen_len}: the first token comes from the prefill; at least 2 are needed")
    parse_bytes(args.keep_mem, "--keep-mem")
    check_files(args, ("prompts",), OUTPUTS)
    if args.plot is not None:
        check_picture(args.plot)


def _rows(
    args: argparse.Namespace, llm: LLM, runner: Runner, lengths: Lengths
) -> tuple[list[TextRow], list[RecallRow]]:
    """The rows that are measured; UsageError for a file or a model that cannot give them."""
    from flexgen_h2o.evaluation.rows import held_out_rows, held_out_text, recall_rows, rows_of_file

    ours: HeldOutText | None = None
    asked = args.recall_prompts if args.recall_prompts is not None else 0 if args.prompts else RECALL_PROMPTS
    if args.prompts is None or asked:
        ours = held_out_text(llm.model)
    recalls = recall_rows(ours, asked, lengths, args.depths, args.seed) if ours else []
    greedy = args.continuation == "greedy"
    if args.prompts is not None:
        texts = rows_of_file(args.prompts, llm.model, lengths, greedy, args.num_prompts)
    else:
        assert ours is not None
        texts = held_out_rows(ours, args.num_prompts or TEXT_PROMPTS, lengths, args.seed)
    return runner.greedy(texts, args.gen_len) if greedy else texts, recalls


def _facts(
    args: argparse.Namespace, llm: LLM, policy: Policy, cells: Sequence[Cell], texts: Sequence[TextRow]
) -> dict[str, Any]:
    """What was run, in words and numbers."""
    names = ("prompt_len", "gen_len", "continuation", "depths", "mass_steps", "resamples", "seed")
    return {
        "measure": "fidelity",
        "schema": SCHEMA,
        "model": llm.model.name,
        "settings": {
            **{name: getattr(args, name) for name in names},
            "budgets": list(dict.fromkeys(cell.budget for cell in cells)),
            "compression": compression_flags(policy),
            "policies": list(args.policies),
            "prompts": None if args.prompts is None else str(args.prompts),
            "dtype": llm.dtype,
            "python": sys.version.split()[0],
        },
        "text": {
            "prompts": len(texts),
            "steps": args.gen_len - 1,
            "mean_prompt_len": sum(len(row.prompt) for row in texts) / len(texts),
        },
    }


def _measure(
    args: argparse.Namespace, runner: Runner, texts: list[TextRow], recalls: list[RecallRow], cells: list[Cell]
) -> dict[str, Any]:
    from flexgen_h2o.evaluation.fidelity import summarise_divergence, summarise_recall, summarise_texts

    full, found = summarise_texts(*runner.texts(texts, cells), args.resamples, args.seed)
    if args.free_run:
        firsts = runner.first_divergence(texts, cells, args.gen_len)
        for figures, first in zip(found, firsts, strict=True):
            figures["greedy"] = summarise_divergence(first, args.gen_len, args.resamples, args.seed)
    if recalls:
        for figures, eviction in ((full, None), *zip(found, (cell.eviction for cell in cells), strict=True)):
            right = runner.recall(recalls, eviction)
            figures["recall"] = summarise_recall(recalls, right, args.resamples, args.seed)
            who = f"{figures['policy']} at {figures['budget']:.0%}" if eviction else "the full cache"
            _say(f"recall of {who}: {figures['recall']['inside']['value']:.0%}")
    return {"recall": {"prompts": len(recalls)} if recalls else None, "full": full, "cells": found}


def _show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from flexgen_h2o.evaluation.tables import markdown

    text = markdown(result)
    print(text)
    for name, content in (("json", result), ("markdown", text)):
        if getattr(args, name) is not None:
            write_result(getattr(args, name), content, flag_of(name))
    if args.plot is not None:
        from flexgen_h2o.evaluation.tables import draw

        draw(result, args.plot)


def _say(line: str) -> None:
    say("evaluate", line)


if __name__ == "__main__":
    sys.exit(main())
