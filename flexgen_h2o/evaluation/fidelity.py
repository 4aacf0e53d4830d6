"""`evaluate fidelity`: policies compared with the full cache on the same text (teacher forcing)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from flexgen_h2o.cli_common import say, write_results
from flexgen_h2o.core.config import DTYPE_BYTES, Policy, without_unused_bits
from flexgen_h2o.core.errors import EXIT_DONE
from flexgen_h2o.engine.generation import LogitsWatch
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.workload import AutoPolicy, base_of
from flexgen_h2o.evaluation.figures import (
    LEGEND,
    Bootstrap,
    Column,
    Figures,
    Losses,
    by_step,
    draw_losses,
    kv_share,
    loss_columns,
    losses_of,
    number,
    percent,
    summarise_recall,
    surprise,
    table_of,
)
from flexgen_h2o.evaluation.rows import (
    Case,
    TextRow,
    held_out_rows,
    make_cells,
    recall_rows,
    rows_of_file,
    text_of,
)
from flexgen_h2o.flags import check_positions, compression_flags, open_llm, say_notes
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, Needs
from flexgen_h2o.llm import LLM

SCHEMA = 2
FLIPS = "flips"  # name of the share of changed tokens in the JSON


def run(args: argparse.Namespace, policy: Policy, is_auto: bool) -> int:
    """Measure what the flags ask for, print and write the result, and return the exit code."""
    exact = replace(
        policy, compress_weight=False, compress_cache=False, int8_compute=False, attn_sparsity=1.0
    )
    plain = without_unused_bits(exact)
    cases = make_cells(args.policies, args.budgets, policy != plain, args.budgets_of)
    began = time.perf_counter()
    with open_llm(args, plain, is_auto, Full()) as llm:
        runner = FidelityRunner(llm, args.keep_mem, AutoPolicy(policy) if is_auto else policy)
        runner.check(cases)
        check_positions(args, llm.model.name, llm.model.spec.max_positions)
        texts, recalls = rows_of(args, runner)
        say_notes("evaluate fidelity", args, llm)
        result = _facts(args, llm, policy, cases, texts, recalls)
        result |= runner.summary(texts, cases, args.resamples, args.seed)
        for figures, case in (
            (result["full"], None),
            *zip(result["cells"], cases, strict=True),
        ):
            if recalls:
                right = runner.recall(recalls, case)
                figures["recall"] = summarise_recall(recalls, right, args.resamples, args.seed)
                who = case.title if case else "the full cache"
                _say(f"recall of {who}: {figures['recall']['inside']['value']:.0%}")
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
        recalls = recall_rows(ours, args.recall_prompts, *lengths, args.seed)
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
    recalls: Sequence[TextRow],
) -> Figures:
    """Return the facts about the run for the JSON result."""
    names = ("prompt_len", "gen_len", "continuation", "resamples", "seed", "budgets_of")
    return {
        "measure": "fidelity",
        "schema": SCHEMA,
        "model": llm.model.name,
        "settings": {
            **{name: getattr(args, name) for name in names},
            "budgets": list(dict.fromkeys(case.budget for case in cases)),
            "compression": compression_flags(policy),
            "policies": list(args.policies),
            "prompts": None if args.prompts is None else str(args.prompts),
            "dtype": llm.dtype,
        },
        "text": {"prompts": len(texts)},
        "recall": {"prompts": len(recalls)} if recalls else None,
    }


def _say(line: str) -> None:
    say("evaluate", line)


# ---- Table and picture


def markdown(result: Figures) -> str:
    """Return the table of a fidelity result (fidelity JSON), the largest budget first."""
    settings = result["settings"]
    recall = result["full"].get("recall", {})
    texts = f"{result['text']['prompts']} of text"
    if recall:
        texts += f", {result['recall']['prompts']} of recall"
    said = "".join(f"; {percent(found)} of recall {place}" for place, found in recall.items())
    head = (
        f"Model `{result['model']}` in {settings['dtype']}; prompts of {settings['prompt_len']} "
        f"tokens, {settings['gen_len']} tokens followed ({settings['continuation']}), {texts}"
        + (f"; all with {settings['compression']}" if settings["compression"] else "")
        + f"; 95% bootstrap intervals over prompts in brackets; seed {settings['seed']}.\n"
        f"The full cache, uncompressed: NLL {number(result['full']['nll'], 3)}{said}."
    )
    columns: list[Column] = [
        ("policy", lambda cell: f"`{cell['policy']}`"),
        (f"share of the {settings['budgets_of']}", lambda cell: f"{cell['budget']:.0%}"),
        *loss_columns(FLIPS),
    ]
    legend = LEGEND
    if recall:
        legend += " Recall: right answers to questions about the prompt, at its end and later."
    for place in recall:
        columns.append(
            (f"recall {place}", lambda cell, place=place: percent(cell["recall"][place]))  # type: ignore[misc]
        )
    cells = sorted(result["cells"], key=lambda cell: (-cell["budget"], -cell["kl"]["value"]))
    return f"{head}\n\n{table_of(columns, cells)}\n\n{legend}\n"


def draw(result: Figures, path: Path) -> None:
    """Draw KL against the bytes held (`draw_losses`)."""
    settings = result["settings"]
    title = f"{result['model']}: {settings['prompt_len']} + {settings['gen_len']} tokens"
    draw_losses(result["cells"], f"{title}, {result['text']['prompts']} prompts", path)


# ---- Losses of one step


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


# ---- Runs


@dataclass(frozen=True)
class Probe(Full):
    """The full cache, with attention scores recorded as they are for policies that score.

    Prompts are computed exactly as they are for these policies, so that a policy which drops
    nothing loses exactly nothing. Prompts are scored by one query row, which the first decode step
    forgets.
    """

    name: ClassVar[str] = "probe"

    @property
    def needs(self) -> Needs:
        return Needs(record=(POSITIONS, SCORES), query_rows=1, decay=0.0, gain=1.0)


class FidelityRunner:
    """Run one open LLM with one eviction policy after another.

    keep_bytes: most host memory for the results of the full cache; rows are followed in chunks that
    fit. compared: the policy of the compared runs, which may compress KV or weights. None: the
    reference's policy. `Case.policy` overrides it.
    """

    def __init__(
        self, llm: LLM, keep_bytes: int, compared: Policy | AutoPolicy | None = None
    ) -> None:
        self.llm = llm
        self._keep_bytes = keep_bytes
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
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        done = self._use(None).generate([row.prompt for row in rows], params)
        return [
            replace(row, continuation=tuple(one.token_ids))
            for row, one in zip(rows, done, strict=True)
        ]

    def chunks(self, rows: Sequence[TextRow], steps: int) -> Iterator[tuple[int, list[TextRow]]]:
        """Yield (number of the first, rows) of chunks whose reference fits in `keep_bytes`.

        steps: tokens of a continuation.
        """
        nbytes = steps * self.llm.model.spec.vocab_size * DTYPE_BYTES[self.llm.dtype]
        size = max(1, self._keep_bytes // nbytes)
        for start in range(0, len(rows), size):
            yield start, [*rows[start : start + size]]

    def texts(self, rows: Sequence[TextRow], cases: Sequence[Case]) -> tuple[Losses, list[Losses]]:
        """Follow all rows with the full cache and with each case's policy.

        Continuations must be equally long. Return the losses of the full cache, and those of each
        case.
        """
        full: list[Losses] = []
        parts: list[list[Losses]] = [[] for _ in cases]
        for start, chunk in self.chunks(rows, len(rows[0].continuation)):
            logits, losses = self.reference(chunk)
            _say(f"full cache, rows {start + 1} - {start + len(chunk)} of {len(rows)}")
            full.append(losses)
            for case, found in zip(cases, parts, strict=True):
                found.append(self.compare(chunk, logits, case))
                _say(f"{case.title}: KL {found[-1][:, 0].mean():.4f}")
        return np.concatenate(full), [np.concatenate(found) for found in parts]

    def summary(
        self, rows: Sequence[TextRow], cases: Sequence[Case], resamples: int, seed: int
    ) -> Figures:
        """Return the figures of the full cache (`full`) and of each case (`cells`) along rows."""
        full, found = self.texts(rows, cases)
        bootstrap = Bootstrap(len(rows), resamples, seed)
        lengths = [row.lengths for row in rows]
        cells = [
            {
                "policy": case.label,
                "budget": case.budget,
                "kv_share": self.share(case, lengths),
                "eviction": case.eviction.to_json(),
                **losses_of(losses, full, bootstrap, FLIPS),
            }
            for case, losses in zip(cases, found, strict=True)
        ]
        return {"full": {"nll": bootstrap.mean(full[:, 2])}, "cells": cells}

    def reference(self, rows: Sequence[TextRow]) -> tuple[torch.Tensor, Losses]:
        """Follow n rows with the full cache. Their continuations must be equally long.

        Return the logits, (n, steps, vocab) in the compute dtype on the host, and the full cache's
        own losses: 0, 0, NLL.
        """
        tokens = tokens_of(rows)
        llm = self._use(None)
        llm.eviction = Probe()
        logits = followed(llm, rows)
        nats = surprise(logits[:, 1:].flatten(0, 1), tokens[:, 1:].flatten())
        losses = np.zeros((len(rows), 3))
        losses[:, 2] = nats.view(len(rows), -1).mean(dim=1)
        return logits, losses

    def compare(self, rows: Sequence[TextRow], full: torch.Tensor, case: Case) -> Losses:
        """Follow rows with a case's policy, and return the losses.

        full: the full cache's logits of these rows, as `reference` returns them.

        Only decode steps are compared: the first token comes from the prefill, which is exact.
        """
        tokens = tokens_of(rows)
        found = np.zeros((*tokens.shape, 3))

        def see(at: list[int], steps: list[int], logits: torch.Tensor) -> None:
            decoding = [i for i, step in enumerate(steps) if step > 0]
            if not decoding:
                return
            rows_at = [at[i] for i in decoding]
            steps_at = [steps[i] for i in decoding]
            seen = logits.cpu()[decoding]
            wanted = full[rows_at, steps_at]
            found[rows_at, steps_at, 0] = divergence(wanted, seen)
            found[rows_at, steps_at, 1] = flips(wanted, seen)
            found[rows_at, steps_at, 2] = surprise(seen, tokens[rows_at, steps_at])

        if not case.eviction.needs.record and base_of(self._placed(case)).attn_sparsity == 1:
            case = replace(case, eviction=Probe())
        follow(self._use(case), rows, by_step(len(rows), see))
        return np.asarray(found[:, 1:].mean(axis=1))

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

        follow(self._use(case), rows, by_step(len(rows), see))
        return [
            [
                all(said[step] == row.continuation[step] for step in answer)
                for answer in row.questions
            ]
            for row, said in zip(rows, likeliest.tolist(), strict=True)
        ]

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


def tokens_of(rows: Sequence[TextRow]) -> torch.Tensor:
    """Return the continuations of n rows, which are equally long: (n, steps) int64."""
    return torch.tensor([row.continuation for row in rows], device="cpu")


def follow(llm: LLM, rows: Sequence[TextRow], watch: LogitsWatch) -> None:
    """Follow the continuations of rows."""
    llm.follow([row.prompt for row in rows], [row.continuation for row in rows], watch)


def followed(llm: LLM, rows: Sequence[TextRow]) -> torch.Tensor:
    """Return the logits along the continuations of n rows: (n, steps, vocab), on the host.

    Continuations must be equally long.
    """
    kept = torch.empty(0, dtype=torch.float32, device="cpu")

    def keep(at: list[int], steps: list[int], logits: torch.Tensor) -> None:
        nonlocal kept
        if not len(kept):
            shape = (len(rows), len(rows[0].continuation), logits.shape[-1])
            kept = torch.empty(shape, dtype=logits.dtype, device="cpu")
        kept[at, steps] = logits.cpu()

    follow(llm, rows, by_step(len(rows), keep))
    return kept
