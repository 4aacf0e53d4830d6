"""The engine beside the slow reference: policies in pairs, prompts without near ties, one checked
run.

want = wanted(plain, PAIRS["h2o"], (9, 4, 21), 8)
assert_same(want, generate(folder, want.prompts, 8, PAIRS["h2o"].engine, Policy(2, 2), offload_dir))

tests/eviction/cases.py has this as data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o import LLM, Completion, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.report import RunReport
from flexgen_h2o.engine.sequence import with_params
from flexgen_h2o.kvcache.eviction import EVICTING, Evicting, Eviction, Local
from flexgen_h2o.kvcache.eviction.policy import Columns
from tests.eviction import policies as plain
from tests.eviction.reference import Evicted, PlainModel, Turn, evicted_greedy
from tests.eviction.rounding import Rounded
from tests.parity.reference import (
    LOGIT_TOLERANCE,
    MIN_GAP,
    LogitsByRow,
    random_prompts,
    tokens_of,
)

MIN_SCORE_GAP = 1e-5
MOST_ATTEMPTS = 3000  # prompts of one token are few
STAND_IN = MemoryBudget("64MiB", "64MiB", "64MiB")


@dataclass(frozen=True)
class Pair:
    """The same policy for the engine and for the reference."""

    engine: Evicting
    plain: plain.Policy

    @property
    def decides(self) -> bool:
        """Whether scores choose in decode steps: not where the newest always win."""
        newest_win = isinstance(self.engine, Local) or self.engine.heavy_size == 0
        return self.plain.in_decode and not newest_win


def pair(name: str, **settings: Any) -> Pair:
    return Pair(EVICTING[name](**settings), plain.policy(name, settings))


SMALL: dict[str, Any] = {"heavy_size": 5, "recent_size": 3}
LARGER: dict[str, Any] = {"heavy_size": 8, "recent_size": 2}
WIDE: dict[str, Any] = {"heavy_size": 18, "recent_size": 10}
PROMPT_ONLY = {"while_decoding": False}

PAIRS: dict[str, Pair] = {
    "h2o": pair("h2o", **SMALL),
    "h2o, one recent": pair("h2o", heavy_size=7, recent_size=1),
    "h2o, ratios": pair("h2o", heavy_ratio=0.5, recent_ratio=0.25),
    "h2o, no heavy": pair("h2o", heavy_size=0, recent_size=8),
    "h2o, many": pair("h2o", heavy_size=90, recent_size=45),
    "h2o, prompt only": pair("h2o", **SMALL, **PROMPT_ONLY),
    "h2o, protected": pair("h2o", **LARGER, protect=3),
    "h2o, of the sequence": pair("h2o", kv_budget=0.4),
    "h2o, of the sequence, prompt only": pair("h2o", kv_budget=0.3, **PROMPT_ONLY),
    "local": pair("local", **SMALL),
    "local, of the sequence": pair("local", kv_budget=0.35),
    "h2o-norm": pair("h2o-norm", heavy_size=12, recent_size=3),
    "h2o-norm, one sink": pair("h2o-norm", **SMALL, sinks=1, grace=4),
    "h2o-norm, of the sequence": pair("h2o-norm", kv_budget=0.5, sinks=1, grace=2),
    "tova": pair("tova", **SMALL),
    "tova, of the sequence": pair("tova", kv_budget=0.35),
    "snapkv": pair("snapkv", **SMALL, window=4),
    "snapkv, narrow": pair("snapkv", **LARGER, window=6, kernel=3),
    "random": pair("random", **SMALL, seed=3),
    "random, prompt protected": pair("random", **WIDE, seed=3, protect="prompt"),
}


# ---- what the reference says


@dataclass(frozen=True)
class Wanted:
    prompts: list[list[int]]
    rows: list[Evicted]

    @property
    def tokens(self) -> list[list[int]]:
        return [row.tokens for row in self.rows]


def wanted(
    model: PlainModel,
    pair: Pair,
    lengths: Sequence[int],
    new_tokens: int | Sequence[int],
    stored: Callable[[], Rounded] | None = None,
    turn: Turn | None = None,
    header: Sequence[int] = (),
) -> Wanted:
    """Random prompts of these lengths, each the first that leads to no near tie, with what follows
    on them.

    stored: makes what a cache makes of columns, turn: gives them positions (reference.forward).
    header: tokens before those of every prompt. Refuses references that could not tell right from
    wrong.
    """
    each = [new_tokens] * len(lengths) if isinstance(new_tokens, int) else new_tokens
    prompts = []
    rows = []
    for i, (length, most) in enumerate(zip(lengths, each, strict=True)):
        for attempt in range(MOST_ATTEMPTS):
            prompt = [*header, *random_prompts((length,), seed=37 * i + attempt)[0]]
            row = evicted_greedy(
                model, prompt, most, pair.plain, None if stored is None else stored(), turn
            )
            if not row.is_near and row.least_gap > MIN_SCORE_GAP and row.least_token_gap > MIN_GAP:
                break
        else:
            raise AssertionError("every prompt leads to a near tie: take other lengths")
        prompts.append(prompt)
        rows.append(row)
    assert len({token for row in rows for token in row.tokens}) > 3, (
        "greedy repeats itself: take another seed"
    )
    if pair.decides:
        assert sum(row.promotions for row in rows) > 0, (
            "a plain window would pass: take another seed"
        )
    return Wanted(prompts, rows)


# ---- what the engine does


class SeenByRow:
    """Collects the positions that attention saw: by prompt and block, of each decode step,
    ascending by kv-head."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], list[list[list[int]]]] = {}

    def __call__(self, rows: list[int], filled: torch.Tensor, columns: Columns) -> None:
        for row, held, positions in zip(rows, filled.tolist(), columns.positions, strict=True):
            seen = positions[:, :held].sort(dim=-1).values.tolist()
            self.rows.setdefault((row, columns.block), []).append(seen)


@dataclass(frozen=True)
class Ran:
    completions: list[Completion]
    logits: Mapping[int, list[torch.Tensor]]
    seen: Mapping[tuple[int, int], list[list[list[int]]]]
    report: RunReport

    @property
    def tokens(self) -> list[list[int]]:
        return tokens_of(self.completions)


def generate(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    eviction: Eviction | None,
    policy: Policy | str,
    offload_dir: Path,
    budget: MemoryBudget | None = None,
    dtype: str = "float32",
    share_prefix: str = "auto",
) -> Ran:
    with LLM(
        str(folder), policy, eviction, dtype=dtype, budget=budget, offload_dir=offload_dir
    ) as llm:
        llm.share_prefix = share_prefix
        return run_with(llm, prompts, SamplingParams(max_tokens=new_tokens))


def run_with(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    refill: bool = False,
) -> Ran:
    read = prompts_from_python(prompts, None, llm.model.spec.vocab_size)
    done: list[Completion] = []
    logits = LogitsByRow()
    seen = SeenByRow()
    watch: Callable[..., None] | None = seen if llm.eviction.needs.record else None
    report = llm.run(
        with_params(read, params), done.extend, Callbacks(logits, watch), refill=refill
    )
    return Ran(sorted(done, key=lambda c: c.index), logits.rows, seen.rows, report)


def assert_same(want: Wanted, ran: Ran) -> None:
    """Tokens, logits, and for every decode step the columns that each layer and kv-head held."""
    assert ran.tokens == want.tokens
    for i, (prompt, row) in enumerate(zip(want.prompts, want.rows, strict=True)):
        assert (torch.stack(ran.logits[i]) - row.logits).abs().max() <= LOGIT_TOLERANCE, f"row {i}"
        for step, kept in enumerate(row.kept[: len(row.tokens) - 1]):
            for block, heads in enumerate(kept):
                if not heads:
                    assert (i, block) not in ran.seen, "nothing is recorded within windows"
                    continue
                own = len(prompt) + step
                expected = [[*held, own] for held in heads]
                assert ran.seen[i, block][step] == expected, (
                    f"row {i}, decode step {step}, block {block}"
                )


def cut(want: Wanted, tokens: Sequence[int]) -> Wanted:
    """The rows after so many tokens each."""
    rows = [
        replace(row, tokens=row.tokens[:n], logits=row.logits[:n], kept=row.kept[:n])
        for row, n in zip(want.rows, tokens, strict=True)
    ]
    return replace(want, rows=rows)
