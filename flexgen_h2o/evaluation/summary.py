"""From arrays to figures with intervals: the JSON result, which tables and the picture are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flexgen_h2o.evaluation.bootstrap import Bootstrap
from flexgen_h2o.evaluation.cells import Cell
from flexgen_h2o.evaluation.fidelity import TextFidelity, TextResults
from flexgen_h2o.evaluation.recall import RecallRow
from flexgen_h2o.kvcache.eviction import H2O

STEP_BINS = 6
BASELINE = H2O.name
Figures = dict[str, Any]


def summarise_texts(results: TextResults, resamples: int, seed: int) -> tuple[Figures, list[Figures]]:
    """The figures of the full cache, and those of each cell, with its difference to the baseline at its budget."""
    n, steps = results.full_nll.shape
    bootstrap = Bootstrap(n, resamples, seed)
    bins = [part for part in np.array_split(np.arange(steps), min(STEP_BINS, steps)) if len(part)]
    full = {
        "nll": bootstrap.mean(results.full_nll.mean(axis=1)).to_json(),
        "by_step": [_bin(part, {"nll": results.full_nll}, bootstrap) for part in bins],
    }
    cells = [_cell(found, results.full_nll, bins, bootstrap) for found in results.cells]
    for found, figures in zip(results.cells, cells, strict=True):
        figures["kl_less_baseline"] = _less_baseline(found, results.cells, bootstrap)
    return full, cells


def summarise_recall(rows: Sequence[RecallRow], right: Sequence[Sequence[bool]], resamples: int, seed: int) -> Figures:
    """Shares of questions whose answer is right, by place of the question and by depth of what it asks for.

    right: as of Runner.recall. Rows are resampled with all their questions.
    """
    bootstrap = Bootstrap(len(rows), resamples, seed)
    asked = [(i, row.depth, q.inside, q.at) for i, row in enumerate(rows) for q in row.questions]
    row, depth, inside, at = (np.array(column) for column in zip(*asked, strict=True))
    hits = np.array([ok for of_row in right for ok in of_row])

    def share(chosen: np.ndarray) -> Figures:
        above, below = (np.bincount(row[mask], minlength=len(rows)).astype(float) for mask in (hits & chosen, chosen))
        return {**bootstrap.ratio(above, below).to_json(), "questions": int(chosen.sum())}

    figures: Figures = {}
    for name, place in (("inside", inside), ("after", ~inside)):
        if place.any():  # a short continuation has no room for a second question
            parts = [place & (depth == d) for d in np.unique(depth[place])]
            by_depth = [{"at": float(at[part].mean()), **share(part)} for part in parts]
            figures[name] = {**share(place), "by_depth": by_depth}
    return figures


def summarise_divergence(first: np.ndarray, tokens: int, resamples: int, seed: int) -> Figures:
    """first: (n,) as of Runner.first_divergence."""
    bootstrap = Bootstrap(len(first), resamples, seed)
    return {
        "first": bootstrap.mean(first.astype(float)).to_json(),
        "median": float(np.median(first)),
        "never": bootstrap.mean((first == tokens).astype(float)).to_json(),
    }


def describe(cell: Cell, columns: float) -> Figures:
    return {"policy": cell.label, "budget": cell.budget, "columns": columns, "eviction": cell.eviction.to_json()}


def _cell(found: TextFidelity, full_nll: np.ndarray, bins: Sequence[np.ndarray], bootstrap: Bootstrap) -> Figures:
    flipped, more = found.flipped.astype(float), found.nll - full_nll
    figures = {
        **describe(found.cell, found.columns),
        "kl": bootstrap.mean(found.kl.mean(axis=1)).to_json(),
        "kl_p95": bootstrap.percentile(found.kl, 95).to_json(),
        "flips": bootstrap.mean(flipped.mean(axis=1)).to_json(),
        "nll": bootstrap.mean(found.nll.mean(axis=1)).to_json(),
        "nll_less_full": bootstrap.mean(more.mean(axis=1)).to_json(),
        "by_step": [
            _bin(part, {"kl": found.kl, "flips": flipped, "nll": found.nll, "nll_less_full": more}, bootstrap)
            for part in bins
        ],
    }
    if found.mass is not None:
        figures["evicted_mass"] = bootstrap.mean(found.mass.mean(axis=1)).to_json()
        figures["evicted_mass_by_block"] = found.mass.mean(axis=0).tolist()
    return figures


def _bin(part: np.ndarray, values: dict[str, np.ndarray], bootstrap: Bootstrap) -> Figures:
    """Means over some decode steps, which are counted from 1: token 0 comes from the prefill."""
    means = {name: bootstrap.mean(v[:, part].mean(axis=1)).to_json() for name, v in values.items()}
    return {"first": int(part[0]) + 1, "last": int(part[-1]) + 1, **means}


def _less_baseline(found: TextFidelity, every: Sequence[TextFidelity], bootstrap: Bootstrap) -> Figures | None:
    """The paired difference of the mean KL to the baseline's; None where the baseline is not there or is meant."""
    base = next((o for o in every if o.cell.label == BASELINE and o.cell.budget == found.cell.budget), None)
    if base is None or base is found:
        return None
    return bootstrap.mean((found.kl - base.kl).mean(axis=1)).to_json()
