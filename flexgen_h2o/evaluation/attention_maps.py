"""Measures of the attention of prompts, as the engine computes it.

They are sparsity, accumulated scores, co-occurrence of tokens, and the loss if KV entries are
removed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flexgen_h2o.cli_common import say, write_results
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import with_params
from flexgen_h2o.evaluation.attention_tables import TOP_SHARES, draw, markdown
from flexgen_h2o.evaluation.fidelity import FidelityRunner, Probe
from flexgen_h2o.evaluation.figures import Array, Bootstrap, Figures
from flexgen_h2o.evaluation.rows import Case, TextRow, held_out_rows, rows_of_file, text_of
from flexgen_h2o.flags import check_positions, compression_flags, open_llm, say_notes
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, Columns, Needs, RowBudget
from flexgen_h2o.kvcache.eviction.random_columns import Random
from flexgen_h2o.kvcache.part import Prompts
from flexgen_h2o.llm import LLM

SCHEMA = 1
# Bytes per probability while it is sorted and summed up: fp32 values and int64 places.
ENTRY_BYTES = 32
# kinds of entries that `Without` removes
HEAVY = "heavy"
RANDOM = "random"


def measure(args: argparse.Namespace, policy: Policy, is_auto: bool) -> int:
    """Measure what the flags ask for, print and write the result, and return the exit code."""
    began = time.perf_counter()
    with open_llm(args, policy, is_auto, Probe()) as llm:
        llm.share_prefix = "off"  # a shared prefix would be computed, and so seen, once only
        cases = removals(args.remove, args.sinks, args.seed)
        llm.check_plan()
        if llm.model.spec.windows:
            raise UsageError(
                f"--model {args.model}: has sliding windows, and full attention is measured; give "
                "another model"
            )
        check_positions(args, llm.model.name, llm.model.spec.max_positions)
        rows = _rows(args, llm)
        say_notes("evaluate attention", args, llm)
        seen = watch(llm, rows, args)
        result = _facts(args, llm, policy, rows) | summarise(seen, rows, args)
        if cases:
            runner = FidelityRunner(llm, args.keep_mem)
            result["removal"] = runner.summary(rows, cases, args.resamples, args.seed)
    result["seconds"] = time.perf_counter() - began
    write_results(args, result, markdown(result), draw)
    return EXIT_DONE


def _rows(args: argparse.Namespace, llm: LLM) -> list[TextRow]:
    lengths = args.prompt_len, args.gen_len
    if args.prompts is not None:
        return rows_of_file(args.prompts, llm.model, *lengths, False, args.num_prompts)
    ours = text_of(None, llm.model, "; give --prompts with prompt_token_ids")
    return held_out_rows(ours, args.num_prompts, *lengths, args.seed)


def _facts(args: argparse.Namespace, llm: LLM, policy: Policy, rows: Sequence[TextRow]) -> Figures:
    names = (
        "prompt_len",
        "gen_len",
        "mass",
        "near_zero",
        "first_query",
        "window",
        "remove",
        "sinks",
        "resamples",
        "seed",
    )
    return {
        "measure": "attention",
        "schema": SCHEMA,
        "model": llm.model.name,
        "settings": {
            **{name: getattr(args, name) for name in names},
            "prompts": None if args.prompts is None else str(args.prompts),
            "dtype": llm.dtype,
            "compression": compression_flags(policy),
        },
        "rows": len(rows),
    }


# ---- Attention of prompts


class AttentionMaps:
    """Sums and means of the attention of n prompts, all of `length` tokens.

    shape: (n, transformer blocks, query heads). settings: the flags; `keep_mem` limits how many
    queries are worked on at a time.
    """

    def __init__(
        self, shape: tuple[int, int, int], length: int, settings: argparse.Namespace
    ) -> None:
        n, blocks, _ = shape
        self._settings = settings
        # Both are (n, blocks, heads) float64, means over the queries from `first_query` on.
        # needed: smallest share of the entries seen by a query that holds `mass` of its attention.
        # near_zero: share of the entries below --near-zero times the query's largest entry.
        self.needed = np.zeros(shape)
        self.near_zero = np.zeros(shape)
        # scores: (n, blocks, length) float64, attention that each position got from all queries of
        # all heads. by_rank: (blocks, length) float64, scores of a kv-head as shares of their sum,
        # largest first, a mean over rows and kv-heads.
        self.scores = np.zeros((n, blocks, length))
        self.by_rank = np.zeros((blocks, length))

    def see(self, rows: list[int], block: int, attention: Prompts) -> None:
        """Add the attention of rows in a block.

        It is `Callbacks.prompts` of a run of these prompts.
        """
        assert attention.lse is not None
        for i, row in enumerate(rows):
            q, k, lse = (t[i : i + 1] for t in (attention.q, attention.k, attention.lse))
            self._see_row(row, block, replace(attention, q=q, k=k, lse=lse))

    def _see_row(self, row: int, block: int, one: Prompts) -> None:
        kv_heads, n = one.k.shape[1:3]
        heads = one.q.shape[1]
        at = self._settings
        tile = max(1, at.keep_mem // (ENTRY_BYTES * heads * n))
        sums = torch.zeros(kv_heads, n, dtype=torch.float64, device="cpu")
        for first, p in probabilities(one, tile):
            sums += p.double().sum(dim=1).view(kv_heads, -1, n).sum(dim=1).cpu()
            skipped = min(max(0, at.first_query - first), p.shape[1])
            if skipped < p.shape[1]:
                seen = torch.arange(first + skipped + 1, first + p.shape[1] + 1, device=p.device)
                for into, found in (
                    (self.needed, columns_needed(p[:, skipped:], at.mass) / seen),
                    (self.near_zero, near_zero(p[:, skipped:], seen, at.near_zero)),
                ):
                    into[row, block] += found.double().sum(dim=1).cpu().numpy() / (
                        n - at.first_query
                    )
        self.scores[row, block] = sums.sum(dim=0).numpy()
        ranked = (
            (sums / sums.sum(dim=1, keepdim=True)).sort(dim=1, descending=True).values.mean(dim=0)
        )
        self.by_rank[block] += ranked.numpy() / len(self.needed)


def probabilities(one: Prompts, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the attention matrix of one prompt, `rows` queries at a time.

    Each item is (index of the first query, (heads, queries, n) fp32).
    """
    assert one.lse is not None
    _, heads, m, _ = one.q.shape
    kv_heads, n = one.k.shape[1:3]
    keys = one.k[0].float()
    for start in range(0, m, rows):
        end = min(m, start + rows)
        before = n - m
        q = one.q[0, :, start:end].float().view(kv_heads, heads // kv_heads, end - start, -1)
        p = (q @ keys.unsqueeze(1).transpose(2, 3)).view(heads, end - start, n)
        p = p.mul_(one.scale).sub_(one.lse[0, :, start:end, None]).exp_()
        yield before + start, p.tril_(before + start)


def columns_needed(p: torch.Tensor, mass: float) -> torch.Tensor:
    """Return how many of a query's largest entries together hold `mass` of its attention.

    The result is (heads, queries) int64. p: (heads, queries, n), the attention probabilities.
    """
    held = p.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    return ((held < mass * held[..., -1:]).sum(dim=-1) + 1).clamp_max(p.shape[-1])


def near_zero(p: torch.Tensor, seen: torch.Tensor, share: float) -> torch.Tensor:
    """Return the share of a query's entries below `share` times its largest: (heads, queries).

    Query i has seen[i] entries. p: (heads, queries, n).
    """
    above = (p >= share * p.amax(dim=-1, keepdim=True)).sum(dim=-1)
    return 1 - above / seen


def watch(llm: LLM, rows: Sequence[TextRow], settings: argparse.Namespace) -> AttentionMaps:
    """Run the prompts of `rows` with the full cache, and return the sums of their attention."""
    spec = llm.model.spec
    length = len(rows[0].prompt)
    maps = AttentionMaps((len(rows), spec.num_blocks, spec.num_heads), length, settings)
    prompts = prompts_from_python([row.prompt for row in rows], None, spec.vocab_size)
    llm.eviction = Probe()
    asked = with_params(prompts, SamplingParams(1, ignore_eos=True))
    llm.run(asked, lambda done: None, Callbacks(prompts=maps.see))
    say("evaluate", f"attention of {len(rows)} prompts seen")
    return maps


# ---- Figures


def fit(values: Array, last: int, is_power: bool) -> tuple[float, float]:
    """Fit ln(value) to ln(rank), or to the rank itself, by least squares. Return (slope, r2).

    The ranks are 1..last. is_power: fit to ln(rank). Ranks without a score are left out. The result
    is (0, 0) if fewer than two are left, or all their values are equal.
    """
    ranks = np.arange(1, last + 1, dtype=np.float64)
    y = values[:last]
    x = ranks[y > 0]
    y = np.log(y[y > 0])
    if len(x) < 2 or np.ptp(y) == 0:
        return 0.0, 0.0
    x = np.log(x) if is_power else x
    slope, offset = np.polyfit(x, y, 1)
    return float(slope), float(
        1 - ((y - slope * x - offset) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    )


def spearman(a: Array, b: Array) -> float:
    """Return Spearman's rank correlation.

    Equal values share the mean of their ranks. The result is 0 if `a` or `b` does not vary.
    """
    x, y = (_ranks(values) for values in (a, b))
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else 0.0


def _ranks(values: Array) -> Array:
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    middles = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(middles, dtype=np.float64)[at]


def co_occurrence(
    prompts: Sequence[Sequence[int]], window: int
) -> tuple[NDArray[np.int64], dict[str, Array]]:
    """Return the distinct tokens of prompts, ordered by id, and how often they occur together.

    "occurrences": how often each occurs. "neighbours": its distinct other tokens within `window`
    positions of one of its places.
    """
    ids, counts = np.unique(np.concatenate([np.asarray(p) for p in prompts]), return_counts=True)
    pairs: set[int] = set()
    for prompt in prompts:
        places = np.searchsorted(ids, prompt)
        for away in range(1, min(window, len(places) - 1) + 1):
            a = places[:-away]
            b = places[away:]
            pairs.update((a * len(ids) + b)[a != b].tolist(), (b * len(ids) + a)[a != b].tolist())
    firsts = np.fromiter(pairs, dtype=np.int64, count=len(pairs)) // max(1, len(ids))
    neighbours = np.bincount(firsts, minlength=len(ids)).astype(float)
    return ids, {"occurrences": counts.astype(float), "neighbours": neighbours}


def summarise(
    maps: AttentionMaps, rows: Sequence[TextRow], settings: argparse.Namespace
) -> Figures:
    """Return the figures of attention for the JSON result.

    They are sparsity and power law of each transformer block, and how the scores of tokens
    correlate with their occurrences and neighbours.
    """
    bootstrap = Bootstrap(len(rows), settings.resamples, settings.seed)
    length = len(rows[0].prompt)
    last = max(2, length // 2)
    blocks: list[Figures] = []
    for block, curve in enumerate(maps.by_rank):
        power, r2 = fit(curve, last, is_power=True)
        _, exponential_r2 = fit(curve, last, is_power=False)
        blocks.append(
            {
                "block": block,
                "columns_needed": bootstrap.mean(maps.needed[:, block].mean(axis=1)),
                "near_zero": bootstrap.mean(maps.near_zero[:, block].mean(axis=1)),
                "exponent": -power,
                "r2": r2,
                "exponential_r2": exponential_r2,
                "held_by_top": {
                    f"{s:g}": float(curve[: max(1, int(s * length))].sum()) for s in TOP_SHARES
                },
                "score_by_rank": curve.tolist(),
            }
        )
    fitted = {
        "method": "least squares of ln(score) on ln(rank)",
        "first_rank": 1,
        "last_rank": last,
    }
    plain = ("exponent", "r2", "exponential_r2")
    mean: Figures = {
        "columns_needed": bootstrap.mean(maps.needed.mean(axis=(1, 2))),
        "near_zero": bootstrap.mean(maps.near_zero.mean(axis=(1, 2))),
        **{name: fmean(float(block[name]) for block in blocks) for name in plain},
        "held_by_top": {
            f"{s:g}": fmean(block["held_by_top"][f"{s:g}"] for block in blocks) for s in TOP_SHARES
        },
    }
    return {
        "fit": fitted,
        "blocks": blocks,
        "mean": mean,
        "tokens": _tokens(maps, rows, settings.window),
    }


def _tokens(maps: AttentionMaps, rows: Sequence[TextRow], window: int) -> Figures:
    """Return rank correlations over the distinct tokens, for all blocks together.

    "score" is summed over all places of a token, as in the paper. "per_query" is the score of a
    place divided by the number of queries that see it, a mean over the token's places. Thus neither
    frequent tokens nor early places score higher for that alone.
    """
    prompts = [row.prompt for row in rows]
    ids, known = co_occurrence(prompts, window)
    places = np.searchsorted(ids, np.array(prompts)).ravel()
    length = maps.scores.shape[2]
    queries = np.arange(length, 0, -1)

    def by_token(values: Array) -> Array:
        sums = np.bincount(places, weights=values.ravel(), minlength=len(ids))
        return sums.astype(np.float64)

    scores = maps.scores.sum(axis=1)
    total = by_token(scores)
    even = by_token(scores / queries) / known["occurrences"]
    return {
        "distinct": len(ids),
        "spearman": {
            f"{name} of {what}": spearman(values, of)
            for what, values in (("score", total), ("per_query", even))
            for name, of in known.items()
        },
        "points": {
            "score": (total / total.sum()).tolist(),
            **{name: of.tolist() for name, of in known.items()},
        },
    }


# ---- KV entries removed


@dataclass(frozen=True)
class Without(Full):
    """The full cache without a share of the prompt's entries, chosen for each kv-head on its own.

    No query after the prompt sees the removed entries; the prompt's own attention sees every entry.
    Nothing is evicted while decoding.
    """

    name: ClassVar[str] = "without"

    # Share of the prompt's entries that is removed.
    share: float = 0.5
    # HEAVY removes the entries with the largest accumulated scores, RANDOM those drawn by `seed`.
    kind: str = HEAVY
    # Number of first entries that stay.
    sinks: int = 0
    seed: int = 0

    @property
    def needs(self) -> Needs:
        return Needs(record=(POSITIONS, SCORES), query_rows=None, ranks_by_score=False)

    def budget(self, prompt_len: int, gen_len: int, block: int) -> RowBudget:
        return RowBudget(self.sinks, prompt_len - int(self.share * prompt_len) - self.sinks, 0)

    def slots(self, prompt_len: int, gen_len: int, block: int = 0) -> int:
        return max(1, self.budget(prompt_len, gen_len, block).columns + gen_len - 1)

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None
        return -columns.scores if self.kind == HEAVY else Random(seed=self.seed).rank(columns)

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "share": self.share,
            "kind": self.kind,
            "sinks": self.sinks,
            "seed": self.seed,
        }


def removals(shares: Sequence[float], sinks: int, seed: int) -> list[Case]:
    """Return three cases per share.

    They remove the heavy hitters, the heavy hitters behind the first `sinks` entries, and as many
    random entries.
    """
    return [
        Case(label, Without(share, kind, first, seed), 1 - share, size=f"at {1 - share:.0%}")
        for share in shares
        for label, kind, first in (
            ("heavy hitters", HEAVY, 0),
            (f"heavy hitters but the first {sinks}", HEAVY, sinks),
            ("random columns", RANDOM, 0),
        )
    ]
