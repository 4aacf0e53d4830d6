"""Runs policies and the full cache along the same continuations (teacher forcing), and makes figures of the arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from flexgen_h2o.core.config import DTYPE_BYTES, Policy
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.workload import AutoPolicy
from flexgen_h2o.evaluation.metrics import Bootstrap, Cell, Figures, FullWatch, PolicyWatch, Probe, TokenWatch, surprise
from flexgen_h2o.evaluation.rows import RecallRow, TextRow
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.llm import LLM

Say = Callable[[str], None]
Placed = Policy | AutoPolicy
Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True)
class TextFidelity:
    """How far a policy is from the full cache along text; n prompts, s decode steps, arrays as in PolicyWatch.

    columns: mean kept of a prompt, over rows and transformer blocks. mass: None if it was not watched.
    """

    cell: Cell
    columns: float
    kl: np.ndarray
    nll: np.ndarray
    flipped: np.ndarray
    mass: np.ndarray | None


class Runner:
    """Runs one open LLM with one eviction policy after another.

    keep_bytes: most host memory for what is kept of the full cache's run at a time; rows are worked through in chunks
    that fit. mass_steps: decode steps, evenly apart, whose attention is kept (0: none). compared: how the runs
    are placed that are compared with the full cache, where they hold what they have in fewer bits.
    """

    def __init__(
        self, llm: LLM, keep_bytes: int, mass_steps: int, say: Say = lambda line: None, compared: Placed | None = None
    ) -> None:
        self._llm, self._keep_bytes, self._mass_steps, self._say = llm, keep_bytes, mass_steps, say
        self._reference, self._compared = llm.asked_policy, compared or llm.asked_policy

    def greedy(self, rows: Sequence[TextRow], tokens: int) -> list[TextRow]:
        """The rows with the model's own greedy continuation under the full cache."""
        found = self._generate(None, [row.prompt for row in rows], tokens)
        return [replace(row, continuation=tuple(ids)) for row, ids in zip(rows, found, strict=True)]

    def texts(self, rows: Sequence[TextRow], cells: Sequence[Cell]) -> tuple[np.ndarray, list[TextFidelity]]:
        """Follow all rows, whose continuations are equally long, with the full cache and with each cell's policy.

        Returns nats of the reference tokens with the full cache, (n, s) float64, and a result a cell.
        """
        size = max(1, self._keep_bytes // self._row_bytes(rows))
        parts: list[list[TextFidelity]] = [[] for _ in cells]
        full_nll = []
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            full, tokens = self._watch_full(chunk), torch.tensor([row.continuation for row in chunk])
            self._say(f"full cache, rows {start + 1} - {start + len(chunk)} of {len(rows)}")
            nll = surprise(full.logits[:, 1:].flatten(0, 1), tokens[:, 1:].flatten())
            full_nll.append(nll.view(len(chunk), -1).numpy())
            for cell, found in zip(cells, parts, strict=True):
                found.append(self._watch_cell(cell, chunk, tokens, full))
                self._say(f"{cell.label} at {cell.budget:.0%}: KL {found[-1].kl.mean():.4f}")
        return np.concatenate(full_nll), [_join(found) for found in parts]

    def recall(self, rows: Sequence[RecallRow], eviction: Eviction | None) -> list[list[bool]]:
        """For each row and question: are all tokens of the answer the likeliest ones? eviction: None for the
        reference."""
        watch = TokenWatch(len(rows), max(len(row.continuation) for row in rows))
        prompts, continuations = [row.prompt for row in rows], [row.continuation for row in rows]
        self._use(eviction).follow(prompts, continuations, watch.see_logits)
        return [
            [all(said[step] == row.continuation[step] for step in question.answer) for question in row.questions]
            for row, said in zip(rows, watch.tokens.tolist(), strict=True)
        ]

    def first_divergence(self, rows: Sequence[TextRow], cells: Sequence[Cell], tokens: int) -> list[np.ndarray]:
        """For each cell, (n,): the first of `tokens` greedy tokens that is not the full cache's; `tokens` if none."""
        prompts = [row.prompt for row in rows]
        full = np.array(self._generate(None, prompts, tokens))
        found = []
        for cell in cells:
            other = np.array(self._generate(cell.eviction, prompts, tokens)) != full
            found.append(np.where(other.any(axis=1), other.argmax(axis=1), tokens))
            self._say(f"{cell.label} at {cell.budget:.0%}: greedy tokens equal up to {np.median(found[-1]):.0f}")
        return found

    def check(self, cells: Sequence[Cell]) -> None:
        """UsageError for a policy that cannot run, before the first of them has run for long."""
        for cell in cells:
            self._use(cell.eviction).check_plan()

    def _use(self, eviction: Eviction | None) -> LLM:
        """The LLM reads its policies at each run and opens new buffers where they need others. None: the reference."""
        self._llm.eviction = eviction or Full()
        self._llm.use(self._reference if eviction is None else self._compared)
        return self._llm

    def _generate(self, eviction: Eviction | None, prompts: Tokens, tokens: int) -> list[list[int]]:
        done = self._use(eviction).generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        return [completion.token_ids for completion in done]

    def _row_bytes(self, rows: Sequence[TextRow]) -> int:
        spec, steps = self._llm.model.spec, len(rows[0].continuation)
        columns = max(len(row.prompt) for row in rows) + steps
        weights = min(self._mass_steps, steps - 1) * spec.num_blocks * spec.num_kv_heads * columns * 4
        return steps * spec.vocab_size * DTYPE_BYTES[self._llm.dtype] + weights

    def _watch_full(self, rows: Sequence[TextRow]) -> FullWatch:
        steps = len(rows[0].continuation)
        watched = np.linspace(0, steps - 2, min(self._mass_steps, steps - 1)).round().astype(int)
        watch = FullWatch([len(row.prompt) for row in rows], steps, frozenset(watched.tolist()))
        self._follow(None, rows, watch)
        return watch

    def _watch_cell(self, cell: Cell, rows: Sequence[TextRow], tokens: torch.Tensor, full: FullWatch) -> TextFidelity:
        blocks = self._llm.model.spec.num_blocks
        watch = PolicyWatch(full, tokens, blocks)
        self._follow(cell.eviction if cell.eviction.needs.record else Probe(), rows, watch)
        kept = [
            min(len(row.prompt), cell.eviction.budget(len(row.prompt), block, blocks).columns)
            for row in rows
            for block in range(blocks)
        ]
        mass = watch.mass.numpy() if full.mass_steps else None
        kl, nll, flipped = watch.kl.numpy(), watch.nll.numpy(), watch.flipped.numpy()
        return TextFidelity(cell, sum(kept) / len(kept), kl, nll, flipped, mass)

    def _follow(self, eviction: Eviction | None, rows: Sequence[TextRow], watch: FullWatch | PolicyWatch) -> None:
        prompts, continuations = [row.prompt for row in rows], [row.continuation for row in rows]
        slots = watch.see_slots if self._mass_steps else None
        llm = self._use(eviction)
        if eviction is None:
            llm.eviction = Probe()
        llm.follow(prompts, continuations, watch.see_logits, slots)


def _join(parts: Sequence[TextFidelity]) -> TextFidelity:
    """Chunks of rows of one cell, put together."""
    rows = [len(part.kl) for part in parts]
    whole = {name: np.concatenate([getattr(p, name) for p in parts]) for name in ("kl", "nll", "flipped")}
    mass = None if parts[0].mass is None else np.concatenate([p.mass for p in parts if p.mass is not None])
    return TextFidelity(parts[0].cell, float(np.average([p.columns for p in parts], weights=rows)), **whole, mass=mass)


STEP_BINS = 6
BASELINE = H2O.name


def summarise_texts(
    full_nll: np.ndarray, results: Sequence[TextFidelity], resamples: int, seed: int
) -> tuple[Figures, list[Figures]]:
    """The figures of the full cache, and those of each cell, with its difference to the baseline at its budget."""
    n, steps = full_nll.shape
    bootstrap = Bootstrap(n, resamples, seed)
    bins = [part for part in np.array_split(np.arange(steps), min(STEP_BINS, steps)) if len(part)]
    full = {
        "nll": bootstrap.mean(full_nll.mean(axis=1)),
        "by_step": [_bin(part, {"nll": full_nll}, bootstrap) for part in bins],
    }
    cells = [_cell(found, full_nll, bins, bootstrap) for found in results]
    for found, figures in zip(results, cells, strict=True):
        figures["kl_less_baseline"] = _less_baseline(found, results, bootstrap)
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
        return {**bootstrap.ratio(above, below), "questions": int(chosen.sum())}

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
        "first": bootstrap.mean(first.astype(float)),
        "median": float(np.median(first)),
        "never": bootstrap.mean((first == tokens).astype(float)),
    }


def _cell(found: TextFidelity, full_nll: np.ndarray, bins: Sequence[np.ndarray], bootstrap: Bootstrap) -> Figures:
    flipped, more = found.flipped.astype(float), found.nll - full_nll
    figures = {
        "policy": found.cell.label,
        "budget": found.cell.budget,
        "columns": found.columns,
        "eviction": found.cell.eviction.to_json(),
        "kl": bootstrap.mean(found.kl.mean(axis=1)),
        "kl_p95": bootstrap.percentile(found.kl, 95),
        "flips": bootstrap.mean(flipped.mean(axis=1)),
        "nll": bootstrap.mean(found.nll.mean(axis=1)),
        "nll_less_full": bootstrap.mean(more.mean(axis=1)),
        "by_step": [
            _bin(part, {"kl": found.kl, "flips": flipped, "nll": found.nll, "nll_less_full": more}, bootstrap)
            for part in bins
        ],
    }
    if found.mass is not None:
        figures["evicted_mass"] = bootstrap.mean(found.mass.mean(axis=1))
        figures["evicted_mass_by_block"] = found.mass.mean(axis=0).tolist()
    return figures


def _bin(part: np.ndarray, values: dict[str, np.ndarray], bootstrap: Bootstrap) -> Figures:
    """Means over some decode steps, which are counted from 1: token 0 comes from the prefill."""
    means = {name: bootstrap.mean(v[:, part].mean(axis=1)) for name, v in values.items()}
    return {"first": int(part[0]) + 1, "last": int(part[-1]) + 1, **means}


def _less_baseline(found: TextFidelity, every: Sequence[TextFidelity], bootstrap: Bootstrap) -> Figures | None:
    """The paired difference of the mean KL to the baseline's; None where the baseline is not there or is meant."""
    base = next((o for o in every if o.cell.label == BASELINE and o.cell.budget == found.cell.budget), None)
    if base is None or base is found:
        return None
    return bootstrap.mean((found.kl - base.kl).mean(axis=1))
