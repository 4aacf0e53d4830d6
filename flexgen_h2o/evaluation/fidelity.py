"""Runs policies beside the full cache through the engine, teacher-forced along the same continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from flexgen_h2o.config import DTYPE_BYTES, Policy
from flexgen_h2o.evaluation.cells import Cell
from flexgen_h2o.evaluation.metrics import surprise
from flexgen_h2o.evaluation.probe import Probe
from flexgen_h2o.evaluation.recall import RecallRow
from flexgen_h2o.evaluation.rows import TextRow
from flexgen_h2o.evaluation.watches import FullWatch, PolicyWatch, TokenWatch
from flexgen_h2o.kvcache.eviction import Eviction, Full
from flexgen_h2o.llm import LLM
from flexgen_h2o.planner.need import AutoPolicy
from flexgen_h2o.sampling import SamplingParams

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


@dataclass(frozen=True)
class TextResults:
    """full_nll: (n, s) float64, nats of the reference tokens with the full cache."""

    full_nll: np.ndarray
    cells: list[TextFidelity]


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

    def texts(self, rows: Sequence[TextRow], cells: Sequence[Cell]) -> TextResults:
        """Follow all rows, whose continuations are equally long, with the full cache and with each cell's policy."""
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
        return TextResults(np.concatenate(full_nll), [_join(found) for found in parts])

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
