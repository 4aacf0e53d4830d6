"""Measures of a decode step, means with intervals, and what tables and pictures share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flexgen_h2o.core.config import DTYPE_BYTES, Policy
from flexgen_h2o.core.files import write_picture
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import markdown_table
from flexgen_h2o.engine.generation import LogitsWatch
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.report import sizes_of
from flexgen_h2o.evaluation.rows import TextRow
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.llm import LLM

Array = NDArray[np.float64]
Figures = dict[str, Any]  # a part of the JSON result
LEVEL = 0.95  # probability that an interval covers
BF16_BYTES = DTYPE_BYTES["bfloat16"]


class Bootstrap:
    """Percentile intervals (Efron and Tibshirani 1993, chapter 13) from `count` resamples of `n`
    prompts.

    A prompt is drawn with all its steps or questions, since values of one prompt are not
    independent. Equal seeds draw equal prompts, so differences between policies are paired. An
    interval is {value, low, high, n}: the estimate, the ends of its 95% interval, and the number of
    prompts.
    """

    def __init__(self, n: int, count: int, seed: int) -> None:
        self._drawn = np.random.default_rng(seed).integers(0, n, size=(count, n))

    def mean(self, values: Array) -> Figures:
        """Return the interval of the mean. values: one per prompt, (n,)."""
        return self._interval(float(values.mean()), values[self._drawn].mean(axis=1))

    def ratio(self, above: Array, below: Array) -> Figures:
        """Return the interval of sum(above) / sum(below), each (n,).

        A resample in which the sum of `below` is 0 does not count.
        """
        drawn = below[self._drawn].sum(axis=1)
        found = above[self._drawn].sum(axis=1)[drawn > 0] / drawn[drawn > 0]
        return self._interval(float(above.sum() / below.sum()), found)

    def _interval(self, value: float, resampled: Array) -> Figures:
        low, high = np.percentile(resampled, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
        return {"value": value, "low": float(low), "high": float(high), "n": self._drawn.shape[1]}


def surprise(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of tokens in nats: (rows,) float64.

    logits: (rows, vocab). tokens: (rows,) int64.
    """
    return -logits.double().log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def perplexity(nats: float) -> float:
    """Return exp(nats) of a mean surprise. The result is finite however large `nats` is."""
    return math.exp(min(700.0, nats))


def by_step(rows: int, see: Callable[[list[int], list[int], torch.Tensor], None]) -> LogitsWatch:
    """Return a watch of the logits of `rows` rows that calls see(rows, steps, logits).

    The step of each row is counted from 0.
    """
    seen = [0] * rows

    def watch(at: list[int], logits: torch.Tensor) -> None:
        steps = [seen[row] for row in at]
        for row in at:
            seen[row] += 1
        see(at, steps, logits)

    return watch


def held_kv(llm: LLM, row: tuple[int, int], new_tokens: int) -> tuple[int, int]:
    """Return (KV entries, bytes) that a row held in the LLM's last run after `new_tokens` new
    tokens.

    Both are sums over all transformer blocks. The newest token has no entry yet. Bytes count keys
    and values with their scales. They also count centres and unpacked entries, which lie beside the
    slots and are reserved in full. row: its prompt tokens and most new tokens.
    """
    eviction = llm.eviction
    held = 0
    nbytes = 0
    assert llm.policy is not None
    for block, layout in enumerate(
        _layouts(llm.model.spec, llm.policy, eviction, row, DTYPE_BYTES[llm.dtype])
    ):
        kept = min(row[0], eviction.budget(*row, block).columns)
        columns = max(1, min(layout.slots, kept + new_tokens - 1))
        held += columns
        nbytes += layout.kv_heads * (columns * layout.column_bytes + layout.beside_bytes)
    return held, nbytes


def kv_share(spec: ModelSpec, policy: Policy, eviction: Eviction, row: tuple[int, int]) -> float:
    """Return the bytes of a row's KV cache as a share of the full cache's bytes in bf16.

    The row has all its tokens. Scales, centres and unpacked entries are counted. row: its prompt
    tokens and most new tokens.
    """
    held = sum(
        layout.sequence_bytes for layout in _layouts(spec, policy, eviction, row, BF16_BYTES)
    )
    full: int = sizes_of(spec, {row: 1}, BF16_BYTES)[1]
    return held / full


def _layouts(
    spec: ModelSpec, policy: Policy, eviction: Eviction, row: tuple[int, int], itemsize: int
) -> list[UnitLayout]:
    """Return the KV layout of one row in each transformer block. itemsize: bytes per number."""
    memory = MemoryPlanner(spec, policy, itemsize, device_is_host=True)
    return [
        memory.kv_layout(
            1, eviction.slots(*row, block), memory.record_in(block, eviction.needs.record)
        )
        for block in range(spec.num_blocks)
    ]


# Losses of one policy along the continuations of n rows: (n, 3) float64, means over decode steps.
# The columns are KL to the full cache in nats, share of steps whose likeliest token is another
# one, and negative log-likelihood of the continuation in nats.
Losses = Array


def losses_of(losses: Losses, full: Losses, bootstrap: Bootstrap, changed: str) -> Figures:
    """Return the means of a policy's losses over prompts.

    full: losses of the full cache. changed: name of the share of changed tokens in the result.
    """
    return {
        "kl": bootstrap.mean(losses[:, 0]),
        changed: bootstrap.mean(losses[:, 1]),
        "nll": bootstrap.mean(losses[:, 2]),
        "nll_less_full": bootstrap.mean(losses[:, 2] - full[:, 2]),
    }


def summarise_recall(
    rows: Sequence[TextRow], right: Sequence[Sequence[bool]], resamples: int, seed: int
) -> Figures:
    """Return the share of right answers, by place of the question.

    right: as `FidelityRunner.recall` returns it. Rows are resampled with all their questions.
    """
    bootstrap = Bootstrap(len(rows), resamples, seed)
    # The prompt ends with the first question.
    asked = [(i, place == 0) for i, row in enumerate(rows) for place in range(len(row.questions))]
    row, inside = (np.array(column) for column in zip(*asked, strict=True))
    hits = np.array([ok for of_row in right for ok in of_row])
    figures: Figures = {}
    for name, chosen in (("inside", inside), ("after", ~inside)):
        if chosen.any():  # a short continuation has no room for a second question
            above, below = (
                np.bincount(row[mask], minlength=len(rows)).astype(float)
                for mask in (hits & chosen, chosen)
            )
            figures[name] = {**bootstrap.ratio(above, below), "questions": int(chosen.sum())}
    return figures


# ---- Tables and pictures

# A column of a table: its title, and a function that returns the text for a cell.
Column = tuple[str, Callable[[Figures], str]]


def table_of(columns: Sequence[Column], cells: Sequence[Figures]) -> str:
    """Return a table in Markdown with one row per cell."""
    rows = [[show(cell) for _, show in columns] for cell in cells]
    return "\n".join(markdown_table([title for title, _ in columns], rows))


def loss_columns(changed: str) -> list[Column]:
    """Return the columns for bytes held and losses. changed: as for `losses_of`."""
    return [
        ("KV bytes held", lambda cell: f"{cell['kv_share']:.1%}"),
        ("KL, nats", lambda cell: number(cell["kl"], 4)),
        ("changed tokens", lambda cell: percent(cell[changed])),
        ("NLL - full", lambda cell: number(cell["nll_less_full"], 3)),
    ]


# What the columns of `loss_columns` mean, for someone who sees the table for the first time.
LEGEND = (
    "KL: distance of the next token's probabilities from those of the full cache. Changed tokens: "
    "steps at which another token became the likeliest. NLL - full: how much less likely the text "
    "itself became. All are 0 if nothing is lost. KL and NLL are in nats (natural logarithm)."
)


def number(interval: Figures | None, digits: int) -> str:
    """Return an interval as text, `value [low, high]`; "" for None."""
    if interval is None:
        return ""
    return (
        f"{interval['value']:.{digits}f} [{interval['low']:.{digits}f}, "
        f"{interval['high']:.{digits}f}]"
    )


def percent(interval: Figures) -> str:
    """Return an interval of shares as text, in percent."""
    value, low, high = (100 * interval[key] for key in ("value", "low", "high"))
    return f"{value:.1f}% [{low:.1f}, {high:.1f}]"


MARKS = "osD^vP*X<>h"  # matplotlib's marker of each policy in turn


def lines_of(
    cells: Sequence[Figures],
    size: str,
    kind_of: Callable[[Figures], str] = lambda cell: str(cell["policy"]),
) -> Iterator[tuple[list[Figures], Figures]]:
    """Yield the cells of one kind after another, ordered by the figure `size`, and the style of
    their line in a picture."""
    for i, kind in enumerate(dict.fromkeys(map(kind_of, cells))):
        own = [cell for cell in cells if kind_of(cell) == kind]
        style = {
            "label": kind,
            "color": f"C{i % 10}",
            "marker": MARKS[i % len(MARKS)],
            "markersize": 5,
        }
        yield sorted(own, key=lambda cell: cell[size]), style


def draw_intervals(
    ax: Any, sizes: Sequence[float], intervals: Sequence[Figures], style: Figures
) -> None:
    """Draw intervals over sizes into matplotlib axes."""
    values = [one["value"] for one in intervals]
    # A percentile interval may not contain its estimate; matplotlib takes no negative lengths.
    below = [max(0.0, one["value"] - one["low"]) for one in intervals]
    above = [max(0.0, one["high"] - one["value"]) for one in intervals]
    ax.errorbar(sizes, values, yerr=[below, above], capsize=2, linewidth=1.2, **style)


def on_frontier(cells: Sequence[Figures]) -> list[Figures]:
    """Return the cells that no cell of the same or a smaller size beats, smallest first.

    A cell beats another if its KL is lower and their intervals do not overlap.
    """
    ordered = sorted(cells, key=lambda cell: (cell["kv_share"], cell["kl"]["value"]))
    return [
        cell
        for i, cell in enumerate(ordered)
        if not any(smaller["kl"]["high"] < cell["kl"]["low"] for smaller in ordered[:i])
    ]


def draw_losses(
    cells: Sequence[Figures],
    title: str,
    path: Path,
    kind_of: Callable[[Figures], str] = lambda cell: str(cell["policy"]),
) -> None:
    """Draw KL against the bytes held, one line per kind of cell.

    The suffix of `path` names the format. Raise FlexgenError naming --plot if the file cannot be
    written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    ax = figure.subplots()
    drawn = [cell for cell in cells if cell["kl"]["value"] > 0]
    for own, style in lines_of(drawn, "kv_share", kind_of):
        draw_intervals(ax, [cell["kv_share"] for cell in own], [cell["kl"] for cell in own], style)
    line = on_frontier(drawn)
    x = [cell["kv_share"] for cell in line]
    y = [cell["kl"]["value"] for cell in line]
    ax.plot(x, y, color="black", linestyle=":", label="nothing smaller is better")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="bytes of the KV cache, share of bf16",
        ylabel="KL to the full cache, nats",
    )
    ax.grid(alpha=0.3, which="both")
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title)
    write_picture(path, figure)
