"""`evaluate fidelity`: policies compared with the full cache on the same text (teacher forcing)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flexgen_h2o.cli_common import say, write_results
from flexgen_h2o.core.config import DTYPE_BYTES, Policy, without_unused_bits
from flexgen_h2o.core.errors import EXIT_DONE
from flexgen_h2o.engine.generation import LogitsWatch, SlotsWatch
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.workload import AutoPolicy, base_of
from flexgen_h2o.evaluation.figures import (
    Array,
    Figures,
    TextFidelity,
    by_step,
    draw,
    kv_share,
    markdown,
    summarise_divergence,
    summarise_recall,
    summarise_speeds,
    summarise_texts,
    surprise,
)
from flexgen_h2o.evaluation.rows import (
    Case,
    TextRow,
    columns_of,
    held_out_rows,
    make_cells,
    recall_rows,
    rows_of_file,
    text_of,
)
from flexgen_h2o.flags import check_positions, compression_flags, open_llm, say_notes
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, Columns, Needs
from flexgen_h2o.llm import LLM

SCHEMA = 1


def run(args: argparse.Namespace, policy: Policy, is_auto: bool) -> int:
    """Measure what the flags ask for, print and write the result, and return the exit code."""
    exact = replace(
        policy, compress_weight=False, compress_cache=False, int8_compute=False, attn_sparsity=1.0
    )
    plain = without_unused_bits(exact)
    cases = make_cells(args.policies, args.budgets, policy != plain, args.budgets_of)
    began = time.perf_counter()
    with open_llm(args, plain, is_auto, Full()) as llm:
        runner = FidelityRunner(
            llm, args.keep_mem, args.mass_steps, AutoPolicy(policy) if is_auto else policy
        )
        runner.check(cases)
        check_positions(args, llm.model.name, llm.model.spec.max_positions)
        texts, recalls = rows_of(args, runner)
        say_notes("evaluate fidelity", args, llm)
        result = _facts(args, llm, policy, cases, texts) | _measure(
            args, runner, texts, recalls, cases
        )
    result["seconds"] = time.perf_counter() - began
    write_results(args, result, markdown(result), draw)
    return EXIT_DONE


def rows_of(
    args: argparse.Namespace, runner: FidelityRunner
) -> tuple[list[TextRow], list[TextRow]]:
    """Return the rows of text and the rows of recall.

    Raise UsageError if the file or the model cannot provide them.
    """
    model = runner.llm.model
    lengths = (args.prompt_len, args.gen_len)
    texts = []
    recalls = []
    greedy = args.continuation == "greedy"
    if args.prompts is None or args.recall_prompts:
        ours = text_of(None, model, "; give --prompts with prompt_token_ids")
        recalls = recall_rows(ours, args.recall_prompts, *lengths, args.depths, args.seed)
        if args.prompts is None:
            texts = held_out_rows(ours, args.num_prompts, *lengths, args.seed)
    if args.prompts is not None:
        or_else = ", or follow the model's own tokens with --continuation greedy"
        texts = rows_of_file(args.prompts, model, *lengths, greedy, args.num_prompts, or_else)
    return runner.greedy(texts, args.gen_len) if greedy else texts, recalls


def _facts(
    args: argparse.Namespace,
    llm: LLM,
    policy: Policy,
    cases: Sequence[Case],
    texts: Sequence[TextRow],
) -> Figures:
    """Return the facts about the run for the JSON result."""
    names = ("prompt_len", "gen_len", "continuation", "depths", "mass_steps", "resamples", "seed")
    return {
        "measure": "fidelity",
        "schema": SCHEMA,
        "model": llm.model.name,
        "settings": {
            **{name: getattr(args, name) for name in names},
            "budgets": list(dict.fromkeys(case.budget for case in cases)),
            "budgets_of": args.budgets_of,
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
            "mean_columns": sum(columns_of(row, args.budgets_of) for row in texts) / len(texts),
        },
    }


def _measure(
    args: argparse.Namespace,
    runner: FidelityRunner,
    texts: list[TextRow],
    recalls: list[TextRow],
    cases: Sequence[Case],
) -> Figures:
    how = args.resamples, args.seed
    full, found = summarise_texts(*runner.texts(texts, cases), *how)
    if args.free_run:
        for figures, first in zip(
            found, runner.first_divergence(texts, cases, args.gen_len), strict=True
        ):
            figures["greedy"] = summarise_divergence(first, args.gen_len, *how)
    if args.speed:
        for figures, speeds in zip(
            found, runner.speeds(texts, cases, args.gen_len, args.speed), strict=True
        ):
            figures["speed"] = summarise_speeds(*speeds)
    if recalls:
        for figures, case in ((full, None), *zip(found, cases, strict=True)):
            figures["recall"] = summarise_recall(recalls, runner.recall(recalls, case), *how)
            who = case.title if case else "the full cache"
            _say(f"recall of {who}: {figures['recall']['inside']['value']:.0%}")
    return {"recall": {"prompts": len(recalls)} if recalls else None, "full": full, "cells": found}


def _say(line: str) -> None:
    say("evaluate", line)


def divergence(full: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
    """Return KL(full || policy) of the next token, in nats: (rows,) float64.

    full, policy: logits, (rows, vocab) of any float dtype. The KL is computed in float64: it is
    exactly 0 if the logits are the same, and differences of 1e-9 are meaningful.
    """
    p = full.double().log_softmax(dim=-1)
    q = policy.double().log_softmax(dim=-1)
    return (p.exp() * (p - q)).sum(dim=-1)


def flips(full: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
    """Return whether the likeliest token differs between two logits (rows, vocab): (rows,) bool.

    The lower index counts as likeliest if logits are equal.
    """
    return full.argmax(dim=-1) != policy.argmax(dim=-1)


def evicted_mass(
    weights: torch.Tensor, positions: torch.Tensor, filled: torch.Tensor
) -> torch.Tensor:
    """Return the share of attention probability on dropped KV entries: (rows, kv_heads) float32.

    weights: (rows, kv_heads, columns), the full cache's probability of each position of the
    sequence. positions: (rows, kv_heads, slots) int, the positions that the policy holds. Slot j
    counts if j < filled[row]; the others are arbitrary. The measure is the "attention loss" of
    cold-compress.
    """
    counts = torch.arange(positions.shape[-1], device=positions.device) < filled.view(-1, 1, 1)
    index = positions.long().clamp(0, weights.shape[-1] - 1)
    held = weights.gather(-1, index).masked_fill(~counts, 0.0).sum(dim=-1)
    return (1 - held / weights.sum(dim=-1)).clamp_min(0)


@dataclass(frozen=True)
class Probe(Full):
    """The full cache, with one step's attention probabilities as its scores.

    A score is summed over the query heads of a kv-head, so all scores sum to the number of these
    heads. Prompts are scored by one query row, which the first decode step forgets. Thus no score
    is ever undefined, and prompts are computed exactly as they are for policies that score.
    """

    name: ClassVar[str] = "probe"

    @property
    def needs(self) -> Needs:
        return Needs(record=(POSITIONS, SCORES), query_rows=1, decay=0.0, gain=1.0)


class FullWatch:
    """Keep logits and attention of the full cache along the continuations of n rows.

    prompt_lens: prompt tokens of each row. steps: tokens of every continuation. mass_steps: decode
    steps whose attention is kept; 0 is the first after the prefill. All tensors are on the host.
    """

    def __init__(self, prompt_lens: Sequence[int], steps: int, mass_steps: frozenset[int]) -> None:
        self.prompt_lens = prompt_lens
        self.steps = steps
        self.mass_steps = mass_steps
        # (n, steps, vocab) in the compute dtype; empty until the first logits come.
        self.logits = torch.empty(0, dtype=torch.float32, device="cpu")
        # (decode step, transformer block) -> attention probability of each position, summed over
        # the query heads of a kv-head: (n, kv_heads, longest prompt + steps) fp32.
        self.weights: dict[tuple[int, int], torch.Tensor] = {}
        self.see_logits = by_step(len(prompt_lens), self._keep)

    def _keep(self, rows: list[int], steps: list[int], logits: torch.Tensor) -> None:
        if not len(self.logits):
            self.logits = torch.empty(
                len(self.prompt_lens),
                self.steps,
                logits.shape[-1],
                dtype=logits.dtype,
                device="cpu",
            )
        self.logits[rows, steps] = logits.cpu()

    def decode_step(self, rows: Sequence[int], columns: Columns) -> int:
        """Return the decode step of a micro-batch, whose rows are all at the same one.

        Step 0 is the first after the prefill.
        """
        return int(columns.newest[0]) - self.prompt_lens[rows[0]]

    def see_slots(self, rows: list[int], filled: torch.Tensor, columns: Columns) -> None:
        """Keep the attention of a watched step of a run with `Probe` (a `SlotsWatch`)."""
        step = self.decode_step(rows, columns)
        if step not in self.mass_steps:
            return
        assert columns.scores is not None
        positions = columns.positions.cpu().long()
        scores = columns.scores.cpu()
        place = (step, columns.block)
        if place not in self.weights:
            shape = (len(self.prompt_lens), positions.shape[1], max(self.prompt_lens) + self.steps)
            self.weights[place] = torch.zeros(shape, dtype=torch.float32, device="cpu")
        unused = torch.arange(positions.shape[-1], device="cpu") >= filled.cpu().view(-1, 1, 1)
        found = torch.zeros(
            len(rows), *self.weights[place].shape[1:], dtype=torch.float32, device="cpu"
        )
        found.scatter_add_(-1, positions.masked_fill(unused, 0), scores.masked_fill(unused, 0.0))
        self.weights[place][rows] = found


@dataclass(frozen=True)
class Reference:
    """The full cache's results along the continuations of n rows; made by `Runner.reference`."""

    watch: FullWatch  # logits and attention of the full cache
    tokens: torch.Tensor  # (n, s + 1) int64: the continuations
    nll: Array  # (n, s) float64, nats: negative log-likelihood of each token after the first


class FidelityRunner:
    """Run one open LLM with one eviction policy after another.

    keep_bytes: most host memory for the results of the full cache; rows are followed in chunks that
    fit. mass_steps: number of decode steps, evenly apart, whose attention is kept (0: none).
    compared: the policy of the compared runs, which may compress KV or weights. None: the
    reference's policy. `Case.policy` overrides it.
    """

    def __init__(
        self,
        llm: LLM,
        keep_bytes: int,
        mass_steps: int,
        compared: Policy | AutoPolicy | None = None,
    ) -> None:
        self.llm = llm
        self._keep_bytes = keep_bytes
        self._mass_steps = mass_steps
        self._reference = llm.asked_policy
        self._compared = compared or llm.asked_policy

    def check(self, cases: Sequence[Case]) -> None:
        """Raise UsageError if a case cannot run.

        Called before the first run, which may be long.
        """
        for case in cases:
            self._use(case).check_plan()

    def greedy(self, rows: Sequence[TextRow], tokens: int) -> list[TextRow]:
        """Return the rows with greedy continuations of `tokens` tokens by the full cache."""
        found = self._generate(None, rows, tokens)
        return [
            replace(row, continuation=tuple(ids))
            for row, ids in zip(rows, found.tolist(), strict=True)
        ]

    def texts(
        self, rows: Sequence[TextRow], cases: Sequence[Case]
    ) -> tuple[Array, list[TextFidelity]]:
        """Follow all rows with the full cache and with each case's policy.

        Continuations must be equally long. Returns the negative log-likelihood of the reference
        tokens with the full cache, (n, s) float64 in nats, and one result per case.
        """
        size = self.rows_at_once(rows, len(rows[0].continuation))
        full_nll: list[Array] = []
        parts: list[list[TextFidelity]] = [[] for _ in cases]
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            reference = self.reference(chunk)
            _say(f"full cache, rows {start + 1} - {start + len(chunk)} of {len(rows)}")
            full_nll.append(reference.nll)
            for case, found in zip(cases, parts, strict=True):
                found.append(self.compare(chunk, reference, case))
                _say(f"{case.title}: KL {found[-1].kl.mean():.4f}")
        sizes = [len(nats) for nats in full_nll]
        return np.concatenate(full_nll), [TextFidelity.joined(found, sizes) for found in parts]

    def rows_at_once(self, rows: Sequence[TextRow], steps: int) -> int:
        """Return how many rows fit in `keep_bytes` with their reference, at least 1.

        steps: tokens of a continuation.
        """
        return max(1, self._keep_bytes // self._row_bytes(rows, steps))

    def reference(self, rows: Sequence[TextRow]) -> Reference:
        """Follow the rows with the full cache. Their continuations must be equally long."""
        watch = self._watch_full(rows)
        tokens = torch.tensor([row.continuation for row in rows], device="cpu")
        nats = surprise(watch.logits[:, 1:].flatten(0, 1), tokens[:, 1:].flatten())
        return Reference(watch, tokens, nats.view(len(rows), -1).numpy())

    def compare(self, rows: Sequence[TextRow], reference: Reference, case: Case) -> TextFidelity:
        """Follow the rows of the reference with a case's policy, and return how they differ."""
        found = self._unmeasured(case, rows, (len(rows), reference.tokens.shape[1] - 1))
        self._compare(rows, reference.tokens, reference.watch, found)
        return found

    def answers(
        self, case: Case, prompts: Sequence[Sequence[int]], tokens: int, ignore_eos: bool = False
    ) -> list[str]:
        """Return the texts of greedy answers; token ids as text if the model has no tokenizer."""
        params = SamplingParams(tokens, ignore_eos=ignore_eos)
        found = self._use(case).generate(prompts, params)
        return [
            one.text if one.text is not None else " ".join(map(str, one.token_ids)) for one in found
        ]

    def share(self, case: Case, lengths: Sequence[tuple[int, int]]) -> float:
        """Return the mean of `kv_share` over rows.

        lengths: (prompt tokens, most new tokens) of each.
        """
        spec = self.llm.model.spec
        policy = base_of(self._placed(case))
        eviction = self._use(case).eviction
        return float(np.mean([kv_share(spec, policy, eviction, row) for row in lengths]))

    def recall(self, rows: Sequence[TextRow], case: Case | None) -> list[list[bool]]:
        """Return for each row and question whether each token of the answer is the likeliest one.

        case: None for the full cache.
        """
        likeliest = np.full((len(rows), max(len(row.continuation) for row in rows)), -1)

        def see(at: list[int], steps: list[int], logits: torch.Tensor) -> None:
            likeliest[at, steps] = logits.argmax(dim=-1).cpu()

        self._follow(self._use(case), rows, by_step(len(rows), see))
        return [
            [
                all(said[step] == row.continuation[step] for step in question.answer)
                for question in row.questions
            ]
            for row, said in zip(rows, likeliest.tolist(), strict=True)
        ]

    def first_divergence(
        self, rows: Sequence[TextRow], cases: Sequence[Case], tokens: int
    ) -> list[NDArray[np.int_]]:
        """Return for each case the first greedy token that is not the full cache's.

        Each array is (n,): the index of that token, or `tokens` if none of so many tokens differs.
        """
        full = self._generate(None, rows, tokens)
        found = []
        for case in cases:
            other = self._generate(case, rows, tokens) != full
            found.append(np.where(other.any(axis=1), other.argmax(axis=1), tokens))
            _say(f"{case.title}: greedy tokens equal up to {np.median(found[-1]):.0f}")
        return found

    def speeds(
        self, rows: Sequence[TextRow], cases: Sequence[Case], tokens: int, rounds: int
    ) -> list[tuple[list[float], list[float]]]:
        """Return for each case the tokens/s of the full cache and its own, by round.

        New tokens are divided by the seconds of prefill and decode together. In each round the case
        is measured directly after the full cache.
        """
        found: list[tuple[list[float], list[float]]] = [([], []) for _ in cases]
        for case, (full, own) in zip(cases, found, strict=True):
            for count in range(rounds + 1):
                for one, seconds in ((None, full), (case, own)):
                    self._generate(one, rows, tokens)
                    if count and self.llm.report is not None:  # the first round warms up
                        seconds.append(self.llm.report.total.tokens_per_s)
            _say(f"{case.title}: {np.median(own):.1f} tokens/s, full {np.median(full):.1f}")
        return found

    def _use(self, case: Case | None) -> LLM:
        """Return the LLM with the policies of a case; None: those of the reference.

        The LLM reads its policies at each run, and opens new buffers if they need others.
        """
        self.llm.eviction = Full()  # works with the placement before and the one after
        self.llm.use(self._placed(case) if case else self._reference)
        if case:
            self.llm.eviction = case.eviction
        return self.llm

    def _placed(self, case: Case) -> Policy | AutoPolicy:
        return case.policy or self._compared

    def _generate(
        self, case: Case | None, rows: Sequence[TextRow], tokens: int
    ) -> NDArray[np.int_]:
        """Return the greedy tokens of a run, (n, tokens). case: None for the full cache."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        done = self._use(case).generate([row.prompt for row in rows], params)
        return np.array([completion.token_ids for completion in done])

    def _row_bytes(self, rows: Sequence[TextRow], steps: int) -> int:
        spec = self.llm.model.spec
        columns = max(len(row.prompt) for row in rows) + steps
        weights = (
            min(self._mass_steps, steps - 1) * spec.num_blocks * spec.num_kv_heads * columns * 4
        )
        return steps * spec.vocab_size * DTYPE_BYTES[self.llm.dtype] + weights

    def _unmeasured(
        self, case: Case, rows: Sequence[TextRow], shape: tuple[int, int]
    ) -> TextFidelity:
        blocks = self.llm.model.spec.num_blocks
        eviction = self._use(case).eviction
        kept = [
            min(columns_of(row, case.budget_of), eviction.budget(*row.lengths, block).columns)
            for row in rows
            for block in range(blocks)
        ]
        mass = np.zeros((len(rows), blocks)) if self._mass_steps else None
        share = self.share(case, [row.lengths for row in rows])
        return TextFidelity(
            case,
            sum(kept) / len(kept),
            share,
            np.zeros(shape),
            np.zeros(shape),
            np.zeros(shape, bool),
            mass,
        )

    def _watch_full(self, rows: Sequence[TextRow]) -> FullWatch:
        steps = len(rows[0].continuation)
        watched = np.linspace(0, steps - 2, min(self._mass_steps, steps - 1)).round().astype(int)
        watch = FullWatch([len(row.prompt) for row in rows], steps, frozenset(watched.tolist()))
        llm = self._use(None)
        llm.eviction = Probe()
        self._follow(llm, rows, watch.see_logits, watch.see_slots)
        return watch

    def _compare(
        self,
        rows: Sequence[TextRow],
        continuations: torch.Tensor,
        full: FullWatch,
        found: TextFidelity,
    ) -> None:
        """Run the policy of `found.case` and write its losses into the arrays of `found`.

        continuations: (n, steps + 1) token ids. Each step is compared with the full cache's.
        """

        def see_logits(at: list[int], steps: list[int], logits: torch.Tensor) -> None:
            decoding = [i for i, step in enumerate(steps) if step > 0]
            if not decoding:
                return
            there = ([at[i] for i in decoding], [steps[i] for i in decoding])
            to = (there[0], [step - 1 for step in there[1]])
            seen = logits.cpu()[decoding]
            wanted = full.logits[there]
            found.kl[to] = divergence(wanted, seen)
            found.flipped[to] = flips(wanted, seen)
            found.nll[to] = surprise(seen, continuations[there])

        def see_slots(at: list[int], filled: torch.Tensor, columns: Columns) -> None:
            weights = full.weights.get((full.decode_step(at, columns), columns.block))
            if weights is not None and found.mass is not None:
                lost = evicted_mass(weights[at], columns.positions.cpu(), filled.cpu())
                found.mass[at, columns.block] += lost.double().mean(dim=1).numpy() / len(
                    full.mass_steps
                )

        case = found.case
        if not case.eviction.needs.record and base_of(self._placed(case)).attn_sparsity == 1:
            case = replace(case, eviction=Probe())
        watch = see_slots if case.eviction.needs.record else None  # --attn-sparsity drops no entry
        self._follow(self._use(case), rows, by_step(len(rows), see_logits), watch)

    def _follow(
        self,
        llm: LLM,
        rows: Sequence[TextRow],
        see_logits: LogitsWatch,
        see_slots: SlotsWatch | None = None,
    ) -> None:
        prompts = [row.prompt for row in rows]
        continuations = [row.continuation for row in rows]
        llm.follow(prompts, continuations, see_logits, see_slots if self._mass_steps else None)
