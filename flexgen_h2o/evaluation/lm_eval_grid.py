"""`evaluate lm-eval grid`: h2o_hf's three steps for each policy and KV budget.

This is the experiment of the H2O paper's figures 4 and 8. KV entries are dropped inside the
context, so they change the scores of choices of one token too. Each setting is a durable batch job
with an output of its own: after a kill the same command resumes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexgen_h2o.cli_common import check_results, results_are_in, write_results
from flexgen_h2o.core.errors import EXIT_DONE
from flexgen_h2o.core.files import usable_path, write_picture, write_result
from flexgen_h2o.core.units import markdown_table
from flexgen_h2o.evaluation.figures import Figures, draw_intervals, lines_of
from flexgen_h2o.evaluation.kvpress import kept_share
from flexgen_h2o.evaluation.lm_eval_records import (
    RESAMPLES,
    likelihoods_of,
    prompts_of_tasks,
    read_answers,
    request_of,
    results_of,
    task_manager,
)
from flexgen_h2o.evaluation.rows import (
    Case,
    check_cases,
    check_given,
    check_tokenizer,
    given_sizes,
    refuse_sparse,
    write_requests,
)
from flexgen_h2o.evaluation.summarize import (
    cells_of,
    largest,
    make_folders,
    plan_job,
    run_cell,
)
from flexgen_h2o.flags import compression_flags, open_llm, policy_of
from flexgen_h2o.kvcache.eviction import Full, says_budget

SCHEMA = 1
POLICIES = ("full", "local:sinks=0", "h2o")  # the paper's three
BUDGETS = (0.5, 0.2, 0.1)
STDERRS = 1.96  # standard errors on either side in a 95% interval


def run(args: argparse.Namespace, names: list[str]) -> int:
    """Run and score all settings, one after the other, and return the exit code."""
    cells = _check(args)
    policy, is_auto = policy_of(args)
    refuse_sparse(policy)
    with open_llm(args, policy, is_auto, Full()) as llm:
        model = llm.model
        check_tokenizer(model, ", which tasks need; give a folder with one")
        check_cases(llm, cells)
        facts = {
            "measure": "lm-eval",
            "schema": SCHEMA,
            "model": model.name,
            "dtype": llm.dtype,
            "tasks": names,
        }
    facts |= {
        "num_fewshot": args.num_fewshot,
        "limit": args.limit,
        "loglikelihood": args.loglikelihood,
        "compression": compression_flags(policy),
    }
    manager = task_manager(args, names)
    prompts = prompts_of_tasks(args, names, manager)
    lines = [json.dumps(request_of(prompt)) + "\n" for prompt in prompts]
    if args.dry_run:
        return plan_job(args, lines, largest(cells, model.spec, policy), policy, is_auto)
    make_folders(args, cells)
    requests = args.output_dir / "requests.jsonl"
    write_requests(
        requests,
        lines,
        "tasks",
        "leave --tasks, --num-fewshot and --limit as they were, or give another --output-dir",
    )
    is_mean = args.loglikelihood == "mean"
    found: list[Figures] = []
    result = {**facts, "cells": found}
    for cell in cells:
        print(f"# {cell.title}", flush=True)
        run_cell(args, requests, cell, policy, is_auto)
        answers = read_answers(cell.output, "--output-dir")
        answer = likelihoods_of(cell.output, answers, model.encode_plain, is_mean)
        results = results_of(args, names, answer, RESAMPLES, manager)["results"]
        lengths = [(len(one["token_logprobs"]), 0) for one in answers.values()]
        found.append(
            {
                "title": cell.title,
                "policy": cell.label,
                "size": cell.size,
                "output": str(cell.output),
                "eviction": cell.eviction.to_json(),
                "requests": len(answers),
                "kv_share": kept_share(cell.eviction, model.spec, policy, lengths),
                "results": results,
            }
        )
        write_result(args.output_dir / "summary.json", result, "--output-dir")
    write_results(args, result, grid_table(result) + "\n", draw_grid)
    return EXIT_DONE


def _check(args: argparse.Namespace) -> list[Case]:
    """Return the settings. Raise UsageError if flags or files are wrong."""
    check_given(args, "output_dir", "name a folder for the answers")
    check_results(args)
    args.output_dir = usable_path(args.output_dir, "--output-dir")
    args.output = None
    args.policies = args.policies or list(POLICIES)
    if not given_sizes(args) and not all(
        name == Full.name or says_budget(name) for name in args.policies
    ):
        args.kv_budget = list(BUDGETS)
    cells = cells_of(args)
    results_are_in(*(cell.output for cell in cells))
    return cells


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Figures]:
    """Return the value, 95% interval and standard error of each metric, by task and metric.

    results: those of lm-eval for one setting.
    """
    found: dict[tuple[str, str], Figures] = {}
    for task, own in results.items():
        for name, value in own.items():
            metric, _, filtered = name.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = own.get(f"{metric}_stderr,{filtered}")
            spread = STDERRS * error if isinstance(error, int | float) else 0.0
            title = metric if filtered == "none" else name
            found[task, title] = {
                "value": value,
                "low": value - spread,
                "high": value + spread,
                "stderr": error,
            }
    return found


def grid_table(result: Figures) -> str:
    """Return the table of a JSON result: one line per setting, with the metrics of each task."""
    scored = [scores_of(cell["results"]) for cell in result["cells"]]
    columns = list(dict.fromkeys(key for one in scored for key in one))
    head = ["policy", "KV size", "KV of full", *(f"{task} {metric}" for task, metric in columns)]
    rows = [
        [
            f"`{cell['policy']}`",
            cell["size"],
            f"{cell['kv_share']:.1%}",
            *(_number(one.get(key)) for key in columns),
        ]
        for cell, one in zip(result["cells"], scored, strict=True)
    ]
    shots = "the tasks' own numbers of" if result["num_fewshot"] is None else result["num_fewshot"]
    lines = [
        f"Model `{result['model']}` in {result['dtype']}"
        + (f", all with {result['compression']}" if result["compression"] else "")
        + f"; {shots} examples per question; {result['cells'][0]['requests']} different requests.",
        "",
        *markdown_table(head, rows),
        "",
        "Values with their standard errors, as lm-eval has them. KV of full: KV entries of context "
        "and choice.",
    ]
    return "\n".join(lines)


def _number(score: Figures | None) -> str:
    if score is None:
        return ""
    error = score["stderr"]
    return f"{score['value']:.4f}" + (f" ± {error:.4f}" if isinstance(error, int | float) else "")


def draw_grid(result: Figures, path: Path) -> None:
    """Draw the first metric of each task over the KV budget, as the paper's figures do.

    The suffix of `path` names the format. Raise FlexgenError naming --plot if the file cannot be
    written.
    """
    from matplotlib.figure import Figure

    cells = [{**cell, "scores": scores_of(cell["results"])} for cell in result["cells"]]
    panels: dict[str, str] = {}  # task -> metric
    for task, metric in (key for cell in cells for key in cell["scores"]):
        panels.setdefault(task, metric)
    width = min(3, len(panels))
    height = -(-len(panels) // width)
    figure = Figure(figsize=(4.5 * width, 3.8 * height), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False).flatten()
    for ax, (task, metric) in zip(axes, panels.items(), strict=False):
        _draw_task(ax, cells, task, metric)
        ax.set(title=task, xlabel="KV entries, % of the full cache", ylabel=metric)
        ax.grid(alpha=0.3)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{result['model']}: lm-eval's metrics, 95% intervals")
    write_picture(path, figure)


def _draw_task(ax: Any, cells: Sequence[Figures], task: str, metric: str) -> None:
    having = [cell for cell in cells if (task, metric) in cell["scores"]]
    for own, style in lines_of(having, "kv_share"):
        scores = [cell["scores"][task, metric] for cell in own]
        draw_intervals(ax, [100 * cell["kv_share"] for cell in own], scores, style)
        if own[0]["policy"] == Full.name:
            ax.axhline(scores[0]["value"], color=style["color"], linewidth=0.8, linestyle=":")
