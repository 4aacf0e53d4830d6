"""Scores, KV size and speed of the cells of `evaluate summarize`.

They are written as JSON, as a table, as a picture, and in kvpress's layout.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexgen_h2o.cli_common import write_results
from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.files import write_picture
from flexgen_h2o.core.units import format_bytes, markdown_table
from flexgen_h2o.engine.report import column_bytes
from flexgen_h2o.evaluation.articles import (
    METRICS,
    ROUGE,
    ROUGE_SCORE,
    prompt_of,
    split_instruction,
)
from flexgen_h2o.evaluation.figures import Bootstrap, Figures, draw_intervals, lines_of, number
from flexgen_h2o.evaluation.kvpress import (
    RATIO_OF,
    PressRun,
    kept_share,
    kv_entries_held,
    write_press_run,
)
from flexgen_h2o.jobs.output import rows_of
from flexgen_h2o.jobs.sidecar import read_status
from flexgen_h2o.kvcache.eviction import Full

if TYPE_CHECKING:
    from flexgen_h2o.core.config import Policy
    from flexgen_h2o.core.model import ModelSpec
    from flexgen_h2o.evaluation.rows import Case

_TITLES = dict(zip(ROUGE_SCORE, ("ROUGE-1", "ROUGE-2", "ROUGE-L"), strict=True))


@dataclass(frozen=True)
class ArticleSummary:
    """A summary that a job has written; made by `read_answers`."""

    number: int  # line of its request, from 1
    text: str  # the summary
    reference: str  # a person's summary
    prompt: str  # prompt as it was run
    prompt_tokens: int
    max_tokens: int  # most new tokens, as asked for
    new_tokens: int  # tokens that were generated


def read_answers(output: Path, requests: Path) -> list[ArticleSummary]:
    """Return the answers of a job in the order of the articles, errors left out.

    requests: the job's input.
    """
    records: dict[int, dict[str, Any]] = {}
    found = []
    for _, row in rows_of(output):
        if row["error"] is not None:
            continue
        number = int(row["custom_id"].removeprefix("line-"))
        body = row["response"]["body"]
        choice = body["choices"][0]
        if "request" in row:
            record = row["request"]
            text = choice["text"]
        else:  # a chat's answer does not contain its request
            if not records:
                lines = requests.read_text(encoding="utf-8").splitlines()
                records = {i: json.loads(line) for i, line in enumerate(lines, start=1)}
            record = records[number]
            text = choice["message"]["content"]
        found.append(
            ArticleSummary(
                number=number,
                text=text,
                reference=record["summary_gt"],
                prompt=prompt_of(record),
                prompt_tokens=body["usage"]["prompt_tokens"],
                max_tokens=record["max_tokens"],
                new_tokens=body["usage"]["completion_tokens"],
            )
        )
    return sorted(found, key=lambda one: one.number)


def kept(
    cell: Case, answers: Sequence[ArticleSummary], spec: ModelSpec, policy: Policy, dtype: str
) -> Figures:
    """Return what a cell's KV cache held: means over rows at their longest, prompt + max_tokens."""
    nbytes = column_bytes(spec, policy, DTYPE_BYTES[dtype])[0]
    blocks = spec.num_blocks
    n = max(1, len(answers))
    lengths = [(one.prompt_tokens, one.max_tokens) for one in answers]
    held = kv_entries_held(cell.eviction, spec, policy, lengths)
    share = kept_share(cell.eviction, spec, policy, lengths)
    return {
        "title": cell.title,
        "policy": cell.label,
        "size": cell.size,
        "positions": cell.positions,
        "eviction": cell.eviction.to_json(),
        "output": str(cell.output),
        "articles": len(answers),
        "empty": sum(not one.text.strip() for one in answers),
        "prompt_tokens": sum(one.prompt_tokens for one in answers) / n,
        "new_tokens": sum(one.new_tokens for one in answers) / n,
        "kv_columns": held / blocks / n,
        "kv_bytes": held * nbytes / n,
        "kv_share": share,
        "compression_ratio": 1 - share,
    }


def speed(output: Path, before: Mapping[str, Any]) -> Figures:
    """Return new tokens, seconds and tokens/s of the run that wrote the output's last rows.

    If this run had nothing to do, the figures are those of an earlier one (`before`). They are None
    if it has none.
    """
    status = read_status(output)
    if status.tokens:
        return {
            "tokens": status.tokens,
            "seconds": status.seconds,
            "tokens_per_s": status.tokens_per_s,
        }
    return {name: before.get(name) for name in ("tokens", "seconds", "tokens_per_s")}


def means(
    scores: Mapping[int, Sequence[float]],
    reference: Mapping[int, Sequence[float]],
    resamples: int,
    seed: int,
) -> Figures:
    """Return the mean of each metric over articles, and its paired difference to `reference`.

    The difference is None if the reference has other articles. scores, reference: values of
    METRICS, by number of the article.
    """
    if not scores:
        return {"scores": None, "less_first": None}
    values = np.array(list(scores.values()))
    bootstrap = Bootstrap(len(scores), resamples, seed)
    found: Figures = {
        "scores": {name: bootstrap.mean(values[:, i]) for i, name in enumerate(METRICS)}
    }
    less = None
    if reference and list(reference) == list(scores):
        gaps = values - np.array(list(reference.values()))
        less = {name: bootstrap.mean(gaps[:, i]) for i, name in enumerate(METRICS)}
    return {**found, "less_first": less}


def say_means(figures: Figures) -> None:
    """Print the line of scores that h2o_hf's script prints."""
    if figures["scores"] is not None:
        print(
            ", ".join(f"{name}: {figures['scores'][name]['value']:.6f}" for name in ROUGE),
            flush=True,
        )


def write_press(
    folder: Path, cell: Case, answers: Sequence[ArticleSummary], figures: Figures, facts: Figures
) -> None:
    """Write a cell in kvpress's layout.

    The article is the context, the instruction is the question.
    """
    settings = {
        "seed": facts["seed"],
        "press_init_command": json.dumps(figures["eviction"]),
        "dtype": facts["dtype"],
        "compression_ratio_of": RATIO_OF,
        "kv_size": cell.size or None,
        "positions": cell.positions,
        "compression": facts["compression"] or None,
        "articles": len(answers),
        "cut": facts["cut"],
        "fields": facts["fields"],
    }
    run = PressRun(
        Path(facts["input"]).stem,
        facts["model"],
        cell.label,
        round(figures["compression_ratio"], 6),
        fraction=len(answers) / facts["articles_in_input"],
        settings=settings,
    )
    rows = (
        {
            "question": split_instruction(one.prompt)[2],
            "answer_prefix": "",
            "answer": one.reference,
            "max_new_tokens": one.max_tokens,
            "predicted_answer": one.text,
        }
        for one in answers
    )
    write_press_run(
        folder, run, rows, {name: score["value"] for name, score in figures["scores"].items()}
    )


def show(args: argparse.Namespace, result: Figures) -> None:
    """Print the table. Write it, all figures and the picture if they are asked for."""
    is_scored = any(cell["scores"] is not None for cell in result["cells"])
    write_results(args, result, summary_table(result) + "\n", draw_summaries if is_scored else None)


def summary_table(result: Figures) -> str:
    """Return the table: one row per cell, with scores in hundredths, as papers print them."""
    first = result["cells"][0]["title"]
    names = [
        "policy",
        "KV size",
        "KV columns",
        "KV a row",
        "of full",
        *_TITLES.values(),
        f"ROUGE-2 - {first}'s",
        "`rouge` 1 / 2 / l",
        "new tokens",
        "tokens/s",
        "articles",
    ]
    rows = [_row(cell) for cell in result["cells"]]
    head = [
        f"Model `{result['model']}` in {result['dtype']}"
        + (f", all with {result['compression']}" if result["compression"] else "")
        + f"; {result['articles']} articles of {Path(result['input']).name}, {result['cut']} cut "
        "to the model's "
        f"positions, {result['skipped']} left out; "
        + ("as messages of a chat; " if result.get("chat") else "")
        + _sampling(result["fields"]),
        "",
    ]
    foot = [
        "",
        "F measures x 100, means over articles with 95% bootstrap intervals: rouge-score with "
        "stemming, beside it the "
        "package `rouge`, which h2o_hf takes. KV: mean over rows at their longest, prompt + "
        "max_tokens. tokens/s: new "
        "ones over all seconds of the cell's job.",
    ]
    return "\n".join([*head, *markdown_table(names, rows), *foot])


def _sampling(fields: Figures) -> str:
    if not fields:
        return "sampling as the records say"
    return "sampling as the records say, but " + ", ".join(
        f"{name} {value}" for name, value in fields.items()
    )


def _row(cell: Figures) -> list[str]:
    kept = [f"{cell['kv_columns']:.0f}", format_bytes(cell["kv_bytes"]), f"{cell['kv_share']:.1%}"]
    speed = "" if cell["tokens_per_s"] is None else f"{cell['tokens_per_s']:.0f}"
    scores = cell["scores"]
    less = cell["less_first"]
    if scores is None:
        return [f"`{cell['policy']}`", cell["size"], *kept, "", "", "", "", "", "", speed, "0"]
    return [
        f"`{cell['policy']}`",
        cell["size"],
        *kept,
        *(number(_hundredths(scores[name]), 2) for name in _TITLES),
        "" if less is None else number(_hundredths(less["rouge2"]), 2),
        " / ".join(f"{100 * scores[name]['value']:.2f}" for name in ROUGE),
        f"{cell['new_tokens']:.1f}",
        speed,
        f"{cell['articles']}",
    ]


def _hundredths(interval: Figures) -> Figures:
    return {name: 100 * interval[name] for name in ("value", "low", "high")}


def draw_summaries(result: Figures, path: Path) -> None:
    """Draw ROUGE-1, -2 and -L and tokens/s over the KV bytes that a row holds.

    The suffix of `path` names the format. Raise FlexgenError naming --plot if the file cannot be
    written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    scored = [cell for cell in result["cells"] if cell["scores"] is not None]
    for cells, style in lines_of(scored, "kv_bytes"):
        at = [cell["kv_bytes"] / 2**20 for cell in cells]
        for ax, name in zip(axes, _TITLES, strict=False):
            draw_intervals(ax, at, [cell["scores"][name] for cell in cells], style)
            if style["label"] == Full.name:
                ax.axhline(
                    cells[0]["scores"][name]["value"],
                    color=style["color"],
                    linewidth=0.8,
                    linestyle=":",
                )
        timed = [(x, cell["tokens_per_s"]) for x, cell in zip(at, cells, strict=True)]
        timed = [(x, y) for x, y in timed if y is not None]
        if timed:
            axes[3].plot(*zip(*timed, strict=True), linewidth=1.2, **style)
    for ax, title in zip(
        axes, (*(f"{one}, F" for one in _TITLES.values()), "new tokens/s"), strict=True
    ):
        ax.set(title=title, xlabel="KV cache of a row, MiB", xscale="log")
        ax.grid(alpha=0.3)
        ax.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{result['model']}: {result['articles']} articles, 95% bootstrap intervals")
    write_picture(path, figure)
