"""`evaluate summarize`: summaries of articles with the full cache and with eviction, by KV size.

This is the experiment of run_summarization.py of h2o_hf and of llama-recipes. Each cell of the grid
(a policy at a size) is a durable batch job with an output of its own (docs/reference/jobs.md).
After a kill, the same command does what is missing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import (
    add_result_flags,
    check_results,
    count,
    file_name,
    note,
    positive,
    results_are_in,
    share,
)
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import (
    EXIT_ALL_ROWS_FAILED,
    EXIT_DONE,
    TooLongError,
    UsageError,
)
from flexgen_h2o.core.files import read_json, usable_path, write_result
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.engine.prompts import check_output_path
from flexgen_h2o.evaluation.articles import (
    LAYOUT,
    as_message,
    read_records,
    rouge_of,
    shortened,
)
from flexgen_h2o.evaluation.kvpress import (
    add_press_flag,
    check_press_folder,
    file_label,
    kv_entries_held,
)
from flexgen_h2o.evaluation.rows import (
    Case,
    add_resamples_flag,
    add_rolling_flag,
    check_cases,
    check_given,
    check_sizes,
    check_tokenizer,
    make_cases,
    paired,
    refuse_sparse,
    window_sizes,
    write_requests,
)
from flexgen_h2o.flags import (
    HIDDEN,
    add_engine_flags,
    add_sampling_flags,
    add_script_flags,
    compression_flags,
    open_llm,
    policy_of,
    sampling_of,
)
from flexgen_h2o.kvcache.eviction import POLICIES, Full, says_budget
from flexgen_h2o.parser import OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.core.model import ModelSpec
    from flexgen_h2o.evaluation.figures import Figures
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.models.load import Model

SCHEMA = 1
# Heavy entries of the windows in llama-recipes' table of XSUM: 64, 128, 256, 512 and 1,024 entries,
# half of each heavy.
HEAVY = (32, 64, 128, 256, 512)
GEN_LEN = 64  # most new tokens of records without `max_tokens`
# Heavy entries by default in the two scripts; there are as many recent ones.
H2O_HF_SIZE = 1024
LLAMA_RECIPES_SIZE = 128
# Flags that replace a field of every record.
OF_RECORDS = ("temperature", "top_p", "top_k", "stop", "ignore_eos")
# Module -> package that it is installed from.
NEEDED = {"rouge_score": "rouge-score", "rouge": "rouge"}


def add_flags(parser: OneLineParser) -> None:
    """Add all flags of `evaluate summarize`.

    The flags of h2o_hf's and llama-recipes' scripts are aliases.
    """
    parser.set_defaults(run=run)
    add_engine_flags(parser)
    add_sampling_flags(parser)
    add = parser.add_argument
    add(
        "--input",
        type=file_name,
        help='.jsonl, one article per line: {"article", "summary_gt", "max_tokens", ...}',
    )
    add(
        "--output-dir",
        type=file_name,
        metavar="DIR",
        help="folder of the jobs: one output per setting, and summary.json",
    )
    add(
        "--output",
        type=file_name,
        metavar="FILE",
        help="instead, for a single setting: the .jsonl that its job writes",
    )
    add_grid_flags(parser, "full local h2o", "prompt + max_tokens", "(32 ... 512)")
    add("--sample-num", type=positive, metavar="N", help="the first N articles only")
    add(
        "--greedy",
        dest="temperature",
        action="store_const",
        const=0.0,
        help="--temperature 0: records say 0.3",
    )
    add(
        "--chat",
        action="store_true",
        default=None,
        help="each article with its instruction is a user's message, put into the model's chat "
        "template",
    )
    add(
        "--gen-len",
        type=positive,
        help=f"most new tokens of all articles (the records' max_tokens, else {GEN_LEN})",
    )
    add(
        "--too-long",
        choices=("cut", "skip"),
        default="cut",
        help="articles beyond the model's positions lose their end, not their instruction; or are "
        "left out (cut)",
    )
    add_resamples_flag(parser)
    add_result_flags(parser)
    add_press_flag(parser)
    _add_aliases(parser)


def add_grid_flags(
    parser: OneLineParser, usual: str, budget_of: str, usual_sizes: str = ""
) -> None:
    """Add the flags that choose policies and sizes.

    usual, usual_sizes: the defaults, for the help. budget_of: what --kv-budget is a share of.
    """
    add = parser.add_argument
    add(
        "--policies",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(POLICIES)} ({usual}); also h2o-norm:sinks=0",
    )
    add(
        "--hh-size",
        type=count,
        nargs="+",
        metavar="N",
        help=f"heavy-hitter KV entries per sequence, one setting each {usual_sizes}".rstrip(),
    )
    add(
        "--recent-size",
        type=positive,
        nargs="+",
        metavar="N",
        help="recent KV entries per sequence, one for each (as many)",
    )
    add(
        "--kv-budget",
        type=share,
        nargs="+",
        metavar="R",
        help=f"shares of {budget_of}, one setting each",
    )
    add_rolling_flag(parser)


def _add_aliases(parser: OneLineParser) -> None:
    add_script_flags(parser)
    add = parser.add_argument
    add("--batch-size", dest="gpu_batch_size", type=positive, **HIDDEN)
    for flag, size in (
        ("--enable-h2o-cache", H2O_HF_SIZE),
        ("--enable-h2o-generation", LLAMA_RECIPES_SIZE),
    ):
        add(flag, dest="script_size", action="store_const", const=size, **HIDDEN)
    add("--num-heavy-hitter-tokens", dest="heavy_of_window", type=int, nargs="+", **HIDDEN)
    add("--num-window-length", dest="window_size", type=positive, nargs="+", **HIDDEN)


def run(args: argparse.Namespace) -> int:
    """Run and score all cells, one after the other, and return the exit code."""
    asked_len = args.gen_len
    args.gen_len = args.gen_len or GEN_LEN
    fields = {name: getattr(args, name) for name in OF_RECORDS if name in args.given}
    fields |= {} if asked_len is None else {"max_tokens": asked_len}
    cells = _check(args)
    total = sum(1 for _ in read_records(args.input, None, fields, GEN_LEN))
    if not total:
        raise UsageError(
            f"--input {args.input}: no record in it, only blank lines or nothing; {LAYOUT}"
        )
    policy, is_auto = policy_of(args)
    refuse_sparse(policy)
    with open_llm(args, policy, is_auto, Full()) as llm:
        if args.chat:
            llm.model.check_chat()
        check_cases(llm, cells)
        spec = llm.model.spec
        facts, lines = _requests(args, llm, fields)
        facts |= {"articles_in_input": total, "compression": compression_flags(policy)}
    if args.dry_run:
        return plan_job(args, lines, largest(cells, spec, policy), policy, is_auto)
    requests = _requests_of(args, cells[0].output)
    write_requests(
        requests,
        lines,
        "articles",
        "leave --input and sampling as they were, ask for as many articles or more, or give "
        "another --output-dir",
    )
    return _run_cells(args, cells, facts, spec, policy, is_auto)


def largest(cells: Sequence[Case], spec: ModelSpec, policy: Policy) -> Case:
    """Return the cell that holds the most KV entries of a sequence with all of the positions."""
    row = spec.max_positions - GEN_LEN, GEN_LEN
    return max(cells, key=lambda cell: kv_entries_held(cell.eviction, spec, policy, [row]))


def plan_job(
    args: argparse.Namespace, lines: Sequence[str], cell: Case, policy: Policy, is_auto: bool
) -> int:
    """Print the plan of a cell's job, for --dry-run, and return the exit code.

    The requests go to a temporary folder, so nothing is written to --output-dir.
    """
    with tempfile.TemporaryDirectory() as folder:
        requests = Path(folder) / "requests.jsonl"
        requests.write_text("".join(lines))
        return run_cell(args, requests, cell, policy, is_auto)


def run_cell(
    args: argparse.Namespace, requests: Path, cell: Case, policy: Policy, is_auto: bool
) -> int:
    """Do what a cell's output lacks, and return the exit code of the batch job."""
    from flexgen_h2o.jobs.job import run_job

    sampling = sampling_of(args) if "temperature" in args else SamplingParams()
    return run_job(args, requests, cell.output, policy, is_auto, cell.eviction, sampling)


def _run_cells(
    args: argparse.Namespace,
    cells: Sequence[Case],
    facts: Figures,
    spec: ModelSpec,
    policy: Policy,
    is_auto: bool,
) -> int:
    """Run the job of each cell and score its answers. Return the exit code.

    After each cell summary.json is written. It has the cells so far, and those of earlier runs.
    """
    from flexgen_h2o.evaluation import summary

    before = _earlier(args)
    codes = []
    found: dict[str, Figures] = {}
    reference = dict[int, list[float]]()
    for cell in cells:
        print(f"# {cell.title}", flush=True)
        requests = _requests_of(args, cell.output)
        codes.append(run_cell(args, requests, cell, policy, is_auto))
        answers = summary.read_answers(cell.output, requests)
        scores = {one.number: rouge_of(one.text, one.reference) for one in answers}
        figures = summary.kept(cell, answers, spec, policy, facts["dtype"])
        figures |= summary.speed(cell.output, before.get(cell.title, {}))
        figures |= summary.means(scores, reference, args.resamples, args.seed)
        if cell is cells[0]:  # the full cache is the first cell if it is asked for
            reference = scores
        found[cell.title] = figures
        summary.say_means(figures)
        whole = {**facts, "cells": list((before | found).values())}
        write_result(
            _summary_of(args), whole, "--output-dir" if args.output is None else "--output"
        )
        if args.kvpress_dir is not None and answers:
            summary.write_press(args.kvpress_dir, cell, answers, figures, facts)
    summary.show(args, {**facts, "cells": list(found.values())})
    return (
        EXIT_ALL_ROWS_FAILED if all(code == EXIT_ALL_ROWS_FAILED for code in codes) else EXIT_DONE
    )


# ---- Cells and requests


def _check(args: argparse.Namespace) -> list[Case]:
    """Return the cells. Raise UsageError if flags or files are wrong, before torch is imported."""
    check_given(args, "input", f"name a .jsonl file of articles: {LAYOUT}")
    if (args.output_dir is None) == (args.output is None):
        raise UsageError(
            "--output-dir: is missing; name a folder for the answers, or with one setting a file "
            "with --output"
        )
    check_results(args, ("input",), "output")
    if not args.input.is_file():
        raise UsageError(f"--input {args.input}: no such file; {LAYOUT}")
    sampling_of(args)
    check_press_folder(args)
    cells = cells_of(args)
    if args.output is not None and len(cells) > 1:
        raise UsageError(
            f"--output {args.output}: holds one setting, and there are {len(cells)}; give "
            "--output-dir DIR"
        )
    if args.output is None:
        args.output_dir = usable_path(args.output_dir, "--output-dir")
    if not args.dry_run:
        make_folders(args, cells)
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"summarize: needs {' and '.join(missing)}; pip install -e '.[eval]' in a clone"
        )
    results_are_in(*(cell.output for cell in cells))
    return cells


def make_folders(args: argparse.Namespace, cells: Sequence[Case]) -> None:
    """Make the folder of the jobs. Raise UsageError if an output could not be written there."""
    folder = args.output_dir
    try:
        if folder is not None:
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output-dir {folder}: {error.strerror or error}; its parent must be there"
        ) from error
    for cell in cells:
        check_output_path(cell.output)


def cells_of(args: argparse.Namespace) -> list[Case]:
    """Return the cells, the full cache first, then each policy at each size."""
    is_h2o = vars(args).get("script_size") is not None
    usual = (
        ("h2o",) if is_h2o else ("full",) if args.output is not None else ("full", "local", "h2o")
    )
    names = args.policies or usual
    sizes = _sizes(args)
    others = [name for name in names if name != Full.name]
    named = make_cases([name for name in names if name == Full.name], {}, None)
    own = {} if args.positions is None else {"positions": args.positions}
    sized = [name for name in others if not says_budget(name)]
    check_sizes(args, names)
    named += make_cases([name for name in others if name not in sized], own, None)
    for size, settings in sizes.items() if sized else ():
        cases = make_cases(sized, {**settings, **own}, None)
        named += [replace(case, size=size) for case in cases]
    return [replace(case, output=_output_of(args, case.label, case.size)) for case in named]


def _sizes(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings of an eviction policy by size as people write it.

    Raise UsageError naming a flag.
    """
    heavy = args.hh_size
    recent = args.recent_size
    pairs = window_sizes(args)
    shares = vars(args).get("kv_budget") or []
    if heavy is None and recent is not None:
        raise UsageError(
            f"--recent-size {recent[0]}: goes with --hh-size; give both (0 heavy ones for a window "
            "alone)"
        )
    if heavy is not None:
        if 0 in heavy and recent is None:
            raise UsageError(
                "--hh-size 0: keeps nothing by itself; say with --recent-size how many recent KV "
                "entries stay"
            )
        pairs = paired("--hh-size", heavy, "--recent-size", recent or heavy)
    elif not pairs and not shares:
        asked = vars(args).get("script_size")
        pairs = [(n, n) for n in (HEAVY if asked is None else (asked,))]
    sizes: dict[str, dict[str, Any]] = {
        f"{h}+{r}": {"heavy_size": h, "recent_size": r} for h, r in pairs
    }
    if len(sizes) < len(pairs) or len(set(shares)) < len(shares):
        raise UsageError(
            "--hh-size, --recent-size, --kv-budget: a size is given twice; give each once"
        )
    return sizes | {str(one): {"kv_budget": one} for one in shares}


def _output_of(args: argparse.Namespace, policy: str, size: str) -> Path:
    if args.output is not None:
        return Path(args.output)
    return Path(args.output_dir) / (file_label(f"{policy}-{size}" if size else policy) + ".jsonl")


def _requests_of(args: argparse.Namespace, output: Path) -> Path:
    """Return the path of the jobs' input, which has the records as they are run."""
    return output.with_name("requests.jsonl" if args.output is None else output.name + ".requests")


def _summary_of(args: argparse.Namespace) -> Path:
    folder = args.output_dir
    output = args.output
    return (
        Path(folder) / "summary.json"
        if output is None
        else Path(output).with_name(output.name + ".summary.json")
    )


def _requests(
    args: argparse.Namespace, llm: LLM, fields: Mapping[str, Any]
) -> tuple[Figures, list[str]]:
    """Return the facts about the run for the JSON result, and the requests of all cells.

    Requests are JSON lines.
    """
    model = llm.model
    check_tokenizer(model, ", and articles are texts; name a folder with one")
    counts = {"articles": 0, "cut": 0, "skipped": 0}
    lines = [*_request_lines(args, model, fields, counts)]
    if not lines:
        raise UsageError(
            f"--too-long skip: all {counts['skipped']} articles are too long for {model.name}; "
            "leave it out, and they are cut"
        )
    if counts["cut"] or counts["skipped"]:
        note(
            "evaluate",
            f"{counts['cut']} articles were cut to the {model.spec.max_positions} positions of "
            f"{model.name}, {counts['skipped']} left out",
        )
    facts = {
        "measure": "summarize",
        "schema": SCHEMA,
        "model": model.name,
        "dtype": llm.dtype,
        "input": str(args.input),
        **counts,
        "too_long": args.too_long,
        "fields": dict(fields),
        "seed": args.seed,
        "resamples": args.resamples,
        "chat": bool(args.chat),
    }
    return facts, lines


def _encoded(args: argparse.Namespace, model: Model, text: str) -> list[int]:
    return model.encode_message(text) if args.chat else model.encode(text)


def _request_lines(
    args: argparse.Namespace, model: Model, fields: Mapping[str, Any], counts: dict[str, int]
) -> Iterator[str]:
    """Yield the records as JSON lines.

    A record that is longer with its new tokens than the model has positions is cut or skipped.
    counts: gets the numbers of "articles", "cut" and "skipped".
    """
    for number, record in enumerate(
        read_records(args.input, args.sample_num, fields, GEN_LEN), start=1
    ):
        room = model.spec.max_positions - record["max_tokens"]
        if args.chat:
            record["article"] = as_message(record["article"])

        def fits(text: str, room: int = room) -> bool:
            try:
                return len(_encoded(args, model, text)) <= room
            except TooLongError:
                return False

        if not fits(record["article"]):
            shorter = shortened(record["article"], fits) if args.too_long == "cut" else None
            if shorter is None and args.too_long == "cut":
                raise UsageError(
                    f"--input {args.input}: record {number} asks for {record['max_tokens']} new "
                    "tokens, and "
                    f"{model.name} has {model.spec.max_positions} positions: no word of its "
                    "article is left; lower "
                    "--gen-len, or give --too-long skip"
                )
            counts["skipped" if shorter is None else "cut"] += 1
            if shorter is None:
                continue
            record["article"] = shorter
        counts["articles"] += 1
        # A chat line is answered as in every other job. Its log-probabilities are not scored, so
        # none are asked for.
        if args.chat:
            message = {"role": "user", "content": record.pop("article")}
            record = {"messages": [message], **record, "logprobs": None}
        yield json.dumps(record) + "\n"


def _earlier(args: argparse.Namespace) -> dict[str, Figures]:
    """Return the cells of an earlier run, by title.

    The result is empty if there was no earlier run, or its summary is damaged.
    """
    try:
        return {cell["title"]: dict(cell) for cell in read_json(_summary_of(args))["cells"]}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
