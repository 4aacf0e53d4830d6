"""Measures of a decode step, means with intervals, and fidelity as tables and as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from flexgen_h2o.evaluation.rows import Case, TextRow
from flexgen_h2o.kvcache.eviction import H2O, Eviction
from flexgen_h2o.kvcache.eviction.policy import record_of
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.llm import LLM

Array = NDArray[np.float64]
Figures = dict[str, Any]  # a part of the JSON result
LEVEL = 0.95  # probability that an interval covers
BF16_BYTES = DTYPE_BYTES["bfloat16"]
STEP_BINS = 6  # ranges of decode steps that figures by step are means over
BASELINE = H2O.name  # policy whose KL is subtracted in the paired comparison


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

    def percentile(self, values: Array, percent: float) -> Figures:
        """Return the interval of a percentile of all values together. values: (n, steps)."""
        found = [np.percentile(values[rows], percent) for rows in self._drawn]
        return self._interval(float(np.percentile(values, percent)), np.array(found))

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
    record = record_of(eviction)
    memory = MemoryPlanner(spec, policy, itemsize, device_is_host=True)
    return [
        memory.kv_layout(1, eviction.slots(*row, block), memory.record_in(block, record))
        for block in range(spec.num_blocks)
    ]


@dataclass(frozen=True)
class TextFidelity:
    """How far a policy is from the full cache along the continuations of n rows; made by `Runner`.

    Only decode steps are compared: the first token comes from the prefill, which is exact.
    """

    case: Case
    # Mean KV entries kept per row and block, capped at the number that the budget is a share of.
    columns: float
    # Share of the full cache's bytes in bf16, a mean over rows (`kv_share`).
    share: float
    kl: Array  # (n, steps) float64, nats
    nll: Array  # (n, steps) float64, nats
    flipped: NDArray[np.bool_]  # (n, steps): is the likeliest token another one?
    # Attention probability on evicted entries, (n, blocks) float64: means over heads and watched
    # steps; None if it was not watched.
    mass: Array | None

    @classmethod
    def joined(cls, parts: Sequence[TextFidelity], rows: Sequence[int]) -> TextFidelity:
        """Join the results of one case over chunks of rows. rows: number of rows in each chunk."""
        first = parts[0]
        weights = np.array(rows) / sum(rows)
        columns = float(weights @ [part.columns for part in parts])
        share = float(weights @ [part.share for part in parts])
        kl, nll, flipped = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("kl", "nll", "flipped")
        )
        mass = (
            None
            if first.mass is None
            else np.concatenate([part.mass for part in parts if part.mass is not None])
        )
        return cls(first.case, columns, share, kl, nll, flipped, mass)


def summarise_texts(
    full_nll: Array, results: Sequence[TextFidelity], resamples: int, seed: int
) -> tuple[Figures, list[Figures]]:
    """Return the figures of the full cache, and those of each case.

    A case's figures have its difference to the baseline at the same budget. full_nll: (n, steps)
    float64. Decode steps are counted from 1 here: token 0 comes from the prefill.
    """
    n, steps = full_nll.shape
    bootstrap = Bootstrap(n, resamples, seed)
    bins = np.array_split(np.arange(steps), min(STEP_BINS, steps))

    def of_bins(**values: Array) -> list[Figures]:
        return [
            {
                "first": int(part[0]) + 1,
                "last": int(part[-1]) + 1,
                **{name: bootstrap.mean(v[:, part].mean(axis=1)) for name, v in values.items()},
            }
            for part in bins
        ]

    baselines = {found.case.budget: found for found in results if found.case.label == BASELINE}
    cells = []
    for found in results:
        values = {
            "kl": found.kl,
            "flips": found.flipped.astype(float),
            "nll": found.nll,
            "nll_less_full": found.nll - full_nll,
        }
        figures: Figures = {
            "policy": found.case.label,
            "budget": found.case.budget,
            "budget_of": found.case.budget_of,
            "columns": found.columns,
            "kv_share": found.share,
            "eviction": found.case.eviction.to_json(),
        }
        figures |= {name: bootstrap.mean(value.mean(axis=1)) for name, value in values.items()}
        figures |= {"kl_p95": bootstrap.percentile(found.kl, 95), "by_step": of_bins(**values)}
        if found.mass is not None:
            figures["evicted_mass"] = bootstrap.mean(found.mass.mean(axis=1))
            figures["evicted_mass_by_block"] = found.mass.mean(axis=0).tolist()
        base = baselines.get(found.case.budget, found)
        paired = None if base is found else bootstrap.mean((found.kl - base.kl).mean(axis=1))
        cells.append({**figures, "kl_less_baseline": paired})
    return {"nll": bootstrap.mean(full_nll.mean(axis=1)), "by_step": of_bins(nll=full_nll)}, cells


def summarise_recall(
    rows: Sequence[TextRow], right: Sequence[Sequence[bool]], resamples: int, seed: int
) -> Figures:
    """Return the share of right answers, by place of the question and by depth of the pair asked
    for.

    right: as `Runner.recall` returns it. Rows are resampled with all their questions.
    """
    bootstrap = Bootstrap(len(rows), resamples, seed)
    asked = [(i, row.depth, q.inside, q.at) for i, row in enumerate(rows) for q in row.questions]
    row, depth, inside, at = (np.array(column) for column in zip(*asked, strict=True))
    hits = np.array([ok for of_row in right for ok in of_row])

    def share(chosen: NDArray[np.bool_]) -> Figures:
        above, below = (
            np.bincount(row[mask], minlength=len(rows)).astype(float)
            for mask in (hits & chosen, chosen)
        )
        return {**bootstrap.ratio(above, below), "questions": int(chosen.sum())}

    figures: Figures = {}
    for name, place in (("inside", inside), ("after", ~inside)):
        if place.any():  # a short continuation has no room for a second question
            parts = [place & (depth == d) for d in np.unique(depth[place])]
            by_depth = [{"at": float(at[part].mean()), **share(part)} for part in parts]
            figures[name] = {**share(place), "by_depth": by_depth}
    return figures


def summarise_speeds(full: Sequence[float], own: Sequence[float]) -> Figures:
    """Return the median tokens/s over rounds, and the median, least and largest ratio to `full`.

    full, own: tokens/s of each round.
    """
    ratios = sorted(a / b for a, b in zip(own, full, strict=True))
    names = ("tokens_per_s", "full_tokens_per_s", "ratio", "least", "largest")
    return dict(
        zip(
            names,
            (np.median(own), np.median(full), np.median(ratios), ratios[0], ratios[-1]),
            strict=True,
        )
    )


def summarise_divergence(
    first: NDArray[np.int_], tokens: int, resamples: int, seed: int
) -> Figures:
    """Return where greedy answers first differ. first: (n,), as from `Runner.first_divergence`."""
    bootstrap = Bootstrap(len(first), resamples, seed)
    return {
        "first": bootstrap.mean(first.astype(float)),
        "median": float(np.median(first)),
        "never": bootstrap.mean((first == tokens).astype(float)),
    }


def markdown(result: Figures) -> str:
    """Return the tables of a fidelity result (fidelity JSON), one per budget.

    The worst policy is first, the full cache last.
    """
    settings = result["settings"]
    text = result["text"]
    recall = result["recall"]
    head = [
        f"Model `{result['model']}` in {settings['dtype']}; prompts of {settings['prompt_len']} "
        "tokens, "
        f"{settings['gen_len']} tokens followed ({settings['continuation']}), {text['prompts']} of "
        "text"
        + (f", {recall['prompts']} of recall" if recall else "")
        + (
            f"; all rows but the last of a table with {settings['compression']}"
            if settings["compression"]
            else ""
        )
        + f"; 95% bootstrap intervals over prompts in brackets; seed {settings['seed']}."
    ]
    parts = [head]
    for budget in settings["budgets"]:
        cells = [cell for cell in result["cells"] if cell["budget"] == budget]
        cells.sort(key=lambda cell: -cell["kl"]["value"])
        of = (
            "bytes in bf16"
            if settings["budgets_of"] == "bytes"
            else f"{settings['budgets_of']}'s columns"
        )
        parts.append([f"### {budget:.0%} of the {of}", "", *_main(cells, result)])
    parts.append(["### NLL by step: nats over the full cache's", "", *_by_step(result)])
    titles = {"inside": "at the end of the prompt", "after": "after the prompt"}
    for place in result["full"].get("recall", {}):
        parts.append(
            [f"### Recall by depth, question {titles[place]}", "", *_by_depth(result, place)]
        )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _names(result: Figures) -> tuple[str, Callable[[Figures], str]]:
    """Return the first column of the reference's line, and a function that returns it for a cell.

    If the compared runs are compressed, the full cache is one of them, so the two are told apart.
    """
    compression = result["settings"]["compression"]
    if not compression:
        return "full", lambda cell: f"`{cell['policy']}`"
    return (
        "full, uncompressed",
        lambda cell: (
            f"`{cell['policy']}`" + (f", {compression}" if cell["policy"] == "full" else "")
        ),
    )


def _main(cells: Sequence[Figures], result: Figures) -> list[str]:
    full = result["full"]
    text = result["text"]
    reference, name_of = _names(result)
    # Each column: its head, a function of the cell, and the text for the full cache.
    columns: list[tuple[str, Callable[[Figures], str], str]] = [
        ("policy", name_of, reference),
        ("columns", lambda cell: f"{cell['columns']:.0f}", f"{text['mean_columns']:.0f}"),
        ("KV bytes / full bf16", lambda cell: f"{cell['kv_share']:.1%}", "100%"),
        ("KL, nats", lambda cell: number(cell["kl"], 3), "0"),
        ("KL p95", lambda cell: number(cell["kl_p95"], 2), "0"),
        ("flips", lambda cell: percent(cell["flips"]), "0"),
        (
            "NLL - full",
            lambda cell: number(cell["nll_less_full"], 3),
            f"0 (NLL {number(full['nll'], 3)})",
        ),
        ("KL minus h2o's", lambda cell: number(cell["kl_less_baseline"], 3), ""),
    ]
    if "evicted_mass" in cells[0]:
        columns.append(("evicted mass", lambda cell: percent(cell["evicted_mass"]), "0"))
    for place, found in full.get("recall", {}).items():
        of_cell = partial(lambda place, cell: percent(cell["recall"][place]), place)
        columns.append((f"recall, question {place}", of_cell, percent(found)))
    if "speed" in cells[0]:
        columns.append(("tokens/s", lambda cell: _speed(cell["speed"]), ""))
    if "greedy" in cells[0]:
        tokens = f"{result['settings']['gen_len']}"
        columns.append(
            ("equal greedy tokens", lambda cell: number(cell["greedy"]["first"], 1), tokens)
        )
    heads, of_cells, of_full = zip(*columns, strict=True)
    return markdown_table(heads, [*([of(cell) for of in of_cells] for cell in cells), of_full])


def _speed(found: Figures) -> str:
    return (
        f"{found['tokens_per_s']:.1f}, {found['ratio']:.2f}x [{found['least']:.2f}, "
        f"{found['largest']:.2f}] full"
    )


def _by_step(result: Figures) -> list[str]:
    bins = result["full"]["by_step"]
    reference, name_of = _names(result)
    rows = [
        [
            name_of(cell),
            f"{cell['budget']:.0%}",
            *(number(part["nll_less_full"], 3) for part in cell["by_step"]),
        ]
        for cell in result["cells"]
    ]
    rows.append([f"{reference}: NLL", "", *(number(part["nll"], 3) for part in bins)])
    return markdown_table(
        ["policy", "budget", *(f"{part['first']} - {part['last']}" for part in bins)], rows
    )


def _by_depth(result: Figures, name: str) -> list[str]:
    full = result["full"]["recall"][name]["by_depth"]
    reference, name_of = _names(result)
    rows = [
        [name_of(cell), f"{cell['budget']:.0%}", *map(percent, cell["recall"][name]["by_depth"])]
        for cell in result["cells"]
    ]
    rows.append([reference, "", *map(percent, full)])
    return markdown_table(
        ["policy", "budget", *(f"stated at {part['at']:.0%}" for part in full)], rows
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


def draw(result: Figures, path: Path) -> None:
    """Draw KL, flips and recall over budgets, and KL over steps at the smallest budget.

    The suffix of `path` names the format. Raise FlexgenError naming --plot if the file cannot be
    written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    smallest = min(cell["budget"] for cell in result["cells"])
    for cells, style in by_policy(result["cells"], "budget"):
        over_budgets(axes[0], cells, [c["kl"] for c in cells], style)
        over_budgets(axes[1], cells, [c["flips"] for c in cells], style)
        steps = cells[0]["by_step"]
        if cells[0]["budget"] == smallest:
            middles = [(part["first"] + part["last"]) / 2 for part in steps]
            axes[2].errorbar(middles, [part["kl"]["value"] for part in steps], **style)
        if "after" in cells[0].get("recall", {}):
            over_budgets(axes[3], cells, [c["recall"]["after"] for c in cells], style)
    budgets = f"columns kept, share of the {result['settings']['budgets_of']}"
    decode = "decode step"
    titles = (
        ("KL to the full cache, nats a step", budgets),
        ("top-1 flips, share of steps", budgets),
        (f"KL at {smallest:.0%}, by step", decode),
        ("exact recall, asked after the prompt", budgets),
    )
    for ax, (title, below) in zip(axes, titles, strict=True):
        ax.set(title=title, xlabel=below)
        ax.grid(alpha=0.3)
        ax.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    settings = result["settings"]
    figure.suptitle(
        f"{result['model']}: {settings['prompt_len']} + {settings['gen_len']} tokens, "
        f"{result['text']['prompts']} "
        "prompts, 95% bootstrap intervals"
    )
    write_picture(path, figure)


def by_policy(cells: Sequence[Figures], size: str) -> Iterator[tuple[list[Figures], Figures]]:
    """Yield the cells of one policy after another, ordered by the figure `size`, and the style of
    its line."""
    for i, policy in enumerate(dict.fromkeys(cell["policy"] for cell in cells)):
        own = sorted(
            (cell for cell in cells if cell["policy"] == policy), key=lambda cell: cell[size]
        )
        yield (
            own,
            {
                "label": policy,
                "color": f"C{i % 10}",
                "marker": MARKS[i % len(MARKS)],
                "markersize": 5,
            },
        )


def over_budgets(ax: Any, cells: list[Figures], intervals: list[Figures], style: Figures) -> None:
    """Draw the intervals of cells over their budgets into matplotlib axes."""
    budgets = [cell["budget"] for cell in cells]
    values = [one["value"] for one in intervals]
    # A percentile interval may not contain its estimate; matplotlib takes no negative lengths.
    below = [max(0.0, one["value"] - one["low"]) for one in intervals]
    above = [max(0.0, one["high"] - one["value"]) for one in intervals]
    ax.errorbar(budgets, values, yerr=[below, above], capsize=2, linewidth=1.2, **style)
