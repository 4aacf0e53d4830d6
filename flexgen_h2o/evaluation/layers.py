"""`evaluate layers`: which layers lose by dropped columns, and the `--kv-layer-schedule` that follows.

One stretch of neighbouring layers at a time keeps a share of its columns, all others keep every column, and the KL of
the next token to the full cache is its loss at that share. Losses of stretches are taken to add up. The budget then
goes where a column saves most: along the lower convex hull of each stretch's losses, the steepest step first, as bits
go to quantisers in Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers" (IEEE Transactions
on Acoustics, Speech and Signal Processing 36 (9), 1988). Rows that chose nothing then say what that gained.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from flexgen_h2o.cli_common import positive, results_are_in, say, write_results
from flexgen_h2o.core.config import without_unused_bits
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.settings import SIZES, UNIFORM
from flexgen_h2o.core.units import markdown_table
from flexgen_h2o.engine.workload import AutoPolicy
from flexgen_h2o.evaluation.rows import SEQUENCE, Case, TextRow, add_row_flags, check_rows
from flexgen_h2o.flags import (
    add_engine_flags,
    add_eviction_flags,
    check_positions,
    compression_flags,
    eviction_of,
    open_llm,
    policy_of,
    say_notes,
)
from flexgen_h2o.kvcache.eviction import Evicting, Full
from flexgen_h2o.kvcache.eviction.policy import EVERYTHING, OfOther, RowBudget, stretch_of
from flexgen_h2o.parser import OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.core.model import ModelSpec
    from flexgen_h2o.evaluation.fidelity import Runner
    from flexgen_h2o.evaluation.figures import Figures

SCHEMA = 1
PROMPTS, RECALL_PROMPTS, GROUPS = 48, 20, 12
TIMES_THE_BUDGET = (0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 4.0)  # shares at which a stretch is measured
LEAST_COLUMNS = 4  # of a row at which a stretch is measured


def add_flags(parser: OneLineParser) -> None:
    add_engine_flags(parser)
    add_eviction_flags(parser)
    parser.set_defaults(dtype="float32", run=run, depths=5)
    parser.add_argument(
        "--groups", type=positive, help=f"measure so many stretches of neighbouring layers (each layer, up to {GROUPS})"
    )
    add_row_flags(parser, PROMPTS, RECALL_PROMPTS, ": half measure, half check")


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes; returns the exit code. What flags get wrong is said before torch is imported."""
    _check(args)
    results_are_in(args.json, args.markdown)
    policy, is_auto = policy_of(args)
    eviction = eviction_of(args, policy)
    if not isinstance(eviction, Evicting):
        raise UsageError("--kv-bytes: is missing; say what all layers keep together, with it or with --kv-budget")
    if eviction.layer_schedule != UNIFORM:
        raise UsageError("--kv-layer-schedule: is what this command finds; leave it out")
    if eviction.protect is not None:
        raise UsageError("--protect: keeps layers from being measured at small shares; leave it out")
    from flexgen_h2o.evaluation.fidelity import Runner

    exact = replace(policy, compress_weight=False, compress_cache=False, int8_compute=False)
    began = time.perf_counter()
    with open_llm(args, without_unused_bits(exact), is_auto, Full()) as llm:
        alone, whole = (Runner(llm, args.keep_mem, 0, how) for how in (None, AutoPolicy(policy) if is_auto else policy))
        result = _search(args, alone, whole, eviction)
        result["settings"]["compression"] = compression_flags(policy)
    result["seconds"] = time.perf_counter() - began
    write_results(args, result, markdown(result))
    return EXIT_DONE


def _search(args: argparse.Namespace, alone: Runner, whole: Runner, eviction: Evicting) -> Figures:
    """The schedule, what it follows from, and what it gains. alone: without compression; whole: as rows will run."""
    from flexgen_h2o.evaluation.fidelity import rows_of

    llm, spec = whole.llm, whole.llm.model.spec
    stretches = _stretches(spec, args.groups)
    whole.check([Case(UNIFORM, eviction, budget_of=SEQUENCE)])
    budget = llm.eviction.budget(args.prompt_len, args.gen_len, stretches[0][0], spec.num_blocks)
    share = budget.columns / (args.prompt_len + args.gen_len)
    shares = _shares(share, args)
    check_positions(args, llm.model.name, spec.max_positions)
    texts, recalls = rows_of(args, whole)
    if len(texts) < 2:
        raise UsageError(
            f"--prompts {args.prompts}: has 1 prompt, and half of the prompts measure and half check; give 2"
        )
    say_notes("evaluate layers", args, llm)
    losses = _measure(alone, [*texts[::2], *_cut(recalls[::2])], stretches, eviction, shares)
    given = share_out(losses, [len(blocks) for blocks in stretches], shares, share)
    schedule = "/".join(f"{one:.3g}" for one in given)
    layers = [
        {"first": blocks[0], "last": blocks[-1], "loss": loss, "share": one}
        for blocks, loss, one in zip(stretches, losses, given, strict=True)
    ]
    names = ("prompt_len", "gen_len", "continuation", "seed")
    settings = {name: getattr(args, name) for name in names} | {"dtype": llm.dtype}
    settings |= {"prompts": len(texts), "recall_prompts": len(recalls)}
    return {
        "measure": "layers", "schema": SCHEMA, "model": llm.model.name, "eviction": eviction.to_json(),
        "settings": settings, "share": share, "shares": shares, "layers": layers, "schedule": schedule,
        **_compare(args, whole, texts[1::2], recalls[1::2], eviction, schedule),
    }  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    """And the defaults that depend on other flags."""
    if args.attn_sparsity not in (None, 1):
        raise UsageError("--attn-sparsity: reads a share of the full cache, and no KV entry is dropped; leave it out")
    check_rows(args, PROMPTS, RECALL_PROMPTS)
    for flag, rows, or_none in (
        ("--num-prompts", args.num_prompts, ""),
        ("--recall-prompts", args.recall_prompts, "0 or "),
    ):
        if rows == 1:
            raise UsageError(f"{flag} 1: half of the prompts measure and half check; give {or_none}at least 2")


def _shares(share: float, args: argparse.Namespace) -> list[float]:
    """At which a stretch is measured: of the columns of prompt and continuation, ascending, all below 1."""
    if share >= 1:
        raise UsageError("--kv-budget: keeps every KV entry, so there is nothing to share out; give a smaller one")
    tokens = args.prompt_len + args.gen_len
    by_columns = {int(times * share * tokens): times * share for times in TIMES_THE_BUDGET}
    least = min(LEAST_COLUMNS, int(share * tokens))
    return [one for columns, one in by_columns.items() if least <= columns < tokens]


# ---- Layers


def _stretches(spec: ModelSpec, groups: int | None) -> list[list[int]]:
    """Transformer blocks that get one weight of the schedule: neighbours among those without a window."""
    layers = [block for block in range(spec.num_blocks) if spec.window(block) is None]
    if groups == 1 or len(layers) < 2:
        name = f"--groups {groups}" if groups else f"--model {spec.name}"
        raise UsageError(
            f"{name}: one group of layers gets the whole budget; give at least 2, or a model of more layers"
        )
    if groups is not None and groups > len(layers):
        raise UsageError(
            f"--groups {groups}: {spec.name} drops KV entries in {len(layers)} layers; give at most as many"
        )
    asked = min(groups or GROUPS, len(layers))
    found: list[list[int]] = [[] for _ in range(asked)]
    for layer, block in enumerate(layers):
        found[stretch_of(layer, len(layers), asked)].append(block)
    return found


@dataclass(frozen=True)
class InBlocks(OfOther):
    """`policy` in some transformer blocks, numbered as it counts them; the others keep every column."""

    blocks: tuple[int, ...]

    def budget(self, prompt_len: int, gen_len: int, block: int, num_blocks: int) -> RowBudget:
        if block in self.blocks:
            return self.policy.budget(prompt_len, gen_len, block, num_blocks)
        return RowBudget(0, 0, EVERYTHING)

    def slots(self, prompt_len: int, gen_len: int, block: int, num_blocks: int) -> int:
        policy = self.policy if block in self.blocks else Full()
        return policy.slots(prompt_len, gen_len, block, num_blocks)


def _cut(rows: Sequence[TextRow]) -> list[TextRow]:
    """Recall rows whose continuations are equally long."""
    shortest = min((len(row.continuation) for row in rows), default=0)
    return [replace(row, continuation=row.continuation[:shortest]) for row in rows]


def _measure(
    runner: Runner,
    rows: Sequence[TextRow],
    stretches: Sequence[Sequence[int]],
    eviction: Evicting,
    shares: Sequence[float],
) -> list[list[float]]:
    """(stretches, shares): the KL of each stretch alone at each share, a mean over steps and rows, in nats."""
    sizes: dict[str, Any] = dict.fromkeys((*SIZES, "kv_bytes"))
    layers = [*chain(*stretches)]  # all without a window, which policies count alone
    cases = [
        Case(name_of(*blocks), InBlocks(replace(eviction, **sizes, kv_budget=share), numbers), share, SEQUENCE)
        for blocks in stretches
        for numbers in [tuple(map(layers.index, blocks))]
        for share in shares
    ]
    losses = np.zeros(len(cases))
    for length in {len(row.continuation) for row in rows}:
        alike = [row for row in rows if len(row.continuation) == length]
        losses += [len(alike) / len(rows) * found.kl.mean() for found in runner.texts(alike, cases)[1]]
    by_stretch: list[list[float]] = losses.reshape(len(stretches), len(shares)).tolist()
    return by_stretch


def name_of(first: int, *others: int) -> str:
    """Of neighbouring transformer blocks: `layer 3`, `layers 4 - 7`."""
    return f"layers {first} - {others[-1]}" if others else f"layer {first}"


# ---- Sharing out


def share_out(
    losses: Sequence[Sequence[float]], sizes: Sequence[int], shares: Sequence[float], share: float
) -> list[float]:
    """The share of each stretch, `share` in the mean over layers, that loses least if losses of stretches add up.

    losses: (stretches, shares), of a stretch alone that keeps such a share of its columns; all of them lose 0. sizes:
    layers of each stretch. shares: ascending, the first at most `share`. Between two shares a stretch loses what the
    line between them says.
    """
    found = [shares[0]] * len(losses)
    left = (share - shares[0]) * sum(sizes)
    steps = []
    for stretch, (loss, size) in enumerate(zip(losses, sizes, strict=True)):
        for low, high in pairwise(_lower_hull([*zip(shares, loss, strict=True), (1.0, 0.0)])):
            steps.append(((high[1] - low[1]) / (high[0] - low[0]) / size, stretch, high[0]))
    for _, stretch, to in sorted(steps):
        step = max(0.0, min(to - found[stretch], left / sizes[stretch]))
        found[stretch] += step
        left -= step * sizes[stretch]
    return found


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of points (x, y), x ascending, that no line between two others is below."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull


# ---- What it gained


def _compare(
    args: argparse.Namespace,
    runner: Runner,
    texts: Sequence[TextRow],
    recalls: Sequence[TextRow],
    eviction: Evicting,
    schedule: str,
) -> Figures:
    """Figures of the full cache, of the policy with one share for all layers, and of the policy with the schedule."""
    from flexgen_h2o.evaluation.figures import summarise_recall, summarise_texts

    how = args.resamples, args.seed
    evictions = {UNIFORM: eviction, "by layer": replace(eviction, layer_schedule=schedule)}
    cases = [Case(label, one, budget_of=SEQUENCE) for label, one in evictions.items()]
    full, found = summarise_texts(*runner.texts(texts, cases), *how)
    if recalls:
        for figures, one in ((full, None), *zip(found, cases, strict=True)):
            figures["recall"] = summarise_recall(recalls, runner.recall(recalls, one), *how)
    say("evaluate", f"by layer: KL {found[1]['kl']['value']:.4f}, uniform {found[0]['kl']['value']:.4f}")
    return {"full": full, "cells": found}


def markdown(result: Figures) -> str:
    """What was measured, what follows, and what it gained, as tables."""
    from flexgen_h2o.evaluation.figures import number

    settings = result["settings"]
    head = (
        f"Model `{result['model']}` in {settings['dtype']}, `{result['eviction']['name']}`, {result['share']:.1%} of "
        f"the sequence's columns in the mean of the layers; {settings['prompts']} rows of {settings['prompt_len']} + "
        f"{settings['gen_len']} tokens of text and {settings['recall_prompts']} of recall, seed {settings['seed']}."
    )
    names = ["layers", *(f"{share:.1%}" for share in result["shares"]), "share"]
    losses = [
        [
            name_of(*range(one["first"], one["last"] + 1)),
            *(f"{loss:.4f}" for loss in one["loss"]),
            f"{one['share']:.1%}",
        ]
        for one in result["layers"]
    ]
    places = list(result["full"].get("recall", {}))
    rows = [
        [
            cell["policy"], f"{cell['kv_share']:.1%}", number(cell["kl"], 4), f"{cell['flips']['value']:.1%}",
            number(cell["nll_less_full"], 4), *(f"{cell['recall'][place]['value']:.0%}" for place in places),
        ]
        for cell in result["cells"]
    ]  # fmt: skip
    nll = f"0 (NLL {number(result['full']['nll'], 3)})"
    recall = [f"{result['full']['recall'][place]['value']:.0%}" for place in places]
    rows.append(["full", "100.0%", "0", "0", nll, *recall])
    titles = ["shares", "of the bytes", "KL, nats", "flips", "NLL - full", *(f"recall, {place}" for place in places)]
    with_bits = f", with {settings['compression']}" if settings["compression"] else ""
    parts = [
        [head],
        ["### KL of one stretch alone at a share of its columns, and the share that it gets"],
        markdown_table(names, losses),
        [f"### The other half of the rows{with_bits}"],
        markdown_table(titles, rows),
        [f"`--kv-layer-schedule {result['schedule']}`"],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"
