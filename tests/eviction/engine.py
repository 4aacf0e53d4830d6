"""The engine beside the slow reference: policies in pairs, prompts without near ties, one checked
run.

want = wanted(plain, PAIRS["h2o"], (9, 4, 21), 8)
assert_same(want, generate(folder, want.prompts, 8, PAIRS["h2o"].engine, Policy(2, 2), offload_dir))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o import LLM, Completion, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.report import RunReport
from flexgen_h2o.engine.sequence import with_params
from flexgen_h2o.kvcache.eviction import (
    H2O,
    Evicting,
    Eviction,
    H2ONorm,
    Local,
    Random,
    SnapKV,
    Tova,
    TriAttention,
    ValueH2O,
    VaSE,
)
from flexgen_h2o.kvcache.eviction.policy import Columns
from tests.eviction import policies as plain
from tests.eviction.policies import Budget
from tests.eviction.reference import Evicted, PlainModel, Stored, Turn, evicted_greedy
from tests.parity.reference import (
    LOGIT_TOLERANCE,
    MIN_GAP,
    LogitsByRow,
    random_prompts,
    tokens_of,
)

MIN_SCORE_GAP = 1e-5
STAND_IN = MemoryBudget("64MiB", "64MiB", "64MiB")


@dataclass(frozen=True)
class Pair:
    """The same policy for the engine and for the reference."""

    engine: Evicting
    plain: plain.Policy

    @property
    def decides(self) -> bool:
        """Whether scores choose in decode steps: not where the newest always win."""
        return (
            self.plain.in_decode
            and not isinstance(self.engine, Local)
            and self.engine.heavy_size != 0
        )


SIZES: dict[str, Any] = {"heavy_size": 5, "recent_size": 3}
SMALL = Budget(**SIZES)
LARGER: dict[str, Any] = {"heavy_size": 8, "recent_size": 2}

PAIRS: dict[str, Pair] = {
    "h2o": Pair(H2O(**SIZES), plain.h2o(SMALL)),
    "h2o, mostly recent": Pair(
        H2O(heavy_size=2, recent_size=6), plain.h2o(Budget(heavy_size=2, recent_size=6))
    ),
    "h2o, one recent": Pair(
        H2O(heavy_size=7, recent_size=1), plain.h2o(Budget(heavy_size=7, recent_size=1))
    ),
    "h2o, ratios": Pair(H2O(0.5, 0.25), plain.h2o(Budget(0.5, 0.25))),
    "h2o, one ratio": Pair(H2O(0.34), plain.h2o(Budget(0.34, 0.34))),
    "h2o, ratio and size": Pair(
        H2O(heavy_ratio=0.4, recent_size=2), plain.h2o(Budget(0.4, recent_size=2))
    ),
    "h2o, by default": Pair(H2O(), plain.h2o(Budget())),
    "h2o, no heavy": Pair(
        H2O(heavy_size=0, recent_size=8), plain.h2o(Budget(heavy_size=0, recent_size=8))
    ),
    "h2o, prompt only": Pair(H2O(**SIZES, while_decoding=False), plain.h2o(SMALL, in_decode=False)),
    "local": Pair(Local(**SIZES), plain.local(SMALL, sinks=4)),
    "local, window alone": Pair(
        Local(recent_size=6, sinks=0), plain.local(Budget(heavy_size=0, recent_size=6))
    ),
    "local, prompt only": Pair(
        Local(**SIZES, sinks=2, while_decoding=False), plain.local(SMALL, sinks=2, in_decode=False)
    ),
    "h2o-norm": Pair(
        H2ONorm(heavy_size=12, recent_size=3), plain.h2o_norm(Budget(heavy_size=12, recent_size=3))
    ),
    "h2o-norm, plain": Pair(
        H2ONorm(**SIZES, sinks=0, grace=0), plain.h2o_norm(SMALL, sinks=0, grace=0)
    ),
    "h2o-norm, one sink": Pair(
        H2ONorm(**SIZES, sinks=1, grace=4), plain.h2o_norm(SMALL, sinks=1, grace=4)
    ),
    "tova": Pair(Tova(**SIZES), plain.tova(SMALL)),
    "tova, prompt only": Pair(
        Tova(**SIZES, while_decoding=False), replace(plain.tova(SMALL), in_decode=False)
    ),
    "snapkv": Pair(SnapKV(**SIZES, window=4), plain.snapkv(SMALL, rows=4)),
    "snapkv, narrow": Pair(
        SnapKV(**LARGER, window=6, kernel=3), plain.snapkv(Budget(**LARGER), rows=6, kernel=3)
    ),
    "snapkv, prompt only": Pair(
        SnapKV(**SIZES, window=3, kernel=5, while_decoding=False),
        replace(plain.snapkv(SMALL, rows=3, kernel=5), in_decode=False),
    ),
    "h2o-v": Pair(ValueH2O(**SIZES, sinks=0, grace=0), plain.h2o_v(SMALL, sinks=0, grace=0)),
    "h2o-v, two sinks": Pair(
        ValueH2O(**LARGER, sinks=2, grace=3), plain.h2o_v(Budget(**LARGER), sinks=2, grace=3)
    ),
    "random": Pair(Random(**SIZES, seed=3), plain.random(SMALL, seed=3)),
    "h2o, of the sequence": Pair(H2O(kv_budget=0.4), plain.h2o(Budget(kv_budget=0.4))),
    "h2o, of the sequence, prompt only": Pair(
        H2O(kv_budget=0.3, while_decoding=False), plain.h2o(Budget(kv_budget=0.3), in_decode=False)
    ),
    "local, of the sequence": Pair(
        Local(kv_budget=0.35), plain.local(Budget(kv_budget=0.35), sinks=4)
    ),
    "h2o-norm, of the sequence": Pair(
        H2ONorm(kv_budget=0.5, sinks=1, grace=2),
        plain.h2o_norm(Budget(kv_budget=0.5), sinks=1, grace=2),
    ),
    "tova, of the sequence": Pair(Tova(kv_budget=0.35), plain.tova(Budget(kv_budget=0.35))),
    "snapkv, of the sequence": Pair(
        SnapKV(kv_budget=0.4, window=6, kernel=3),
        plain.snapkv(Budget(kv_budget=0.4), rows=6, kernel=3),
    ),
    "vase": Pair(VaSE(**LARGER, sinks=2, window=5), plain.vase(Budget(**LARGER), rows=5, sinks=2)),
    "vase, seeded": Pair(
        VaSE(heavy_size=14, recent_size=2, window=6, kernel=3, seed=5),
        plain.vase(Budget(heavy_size=14, recent_size=2), rows=6, kernel=3, seed=5),
    ),
    "triattention": Pair(TriAttention(**SIZES), plain.triattention(SMALL)),
    "triattention, at an interval": Pair(
        TriAttention(heavy_size=5, recent_size=4, farthest=100, interval=4),
        plain.triattention(Budget(heavy_size=5, recent_size=4), 100, 4),
    ),
    "triattention, of the sequence": Pair(
        TriAttention(kv_budget=0.4, interval=1),
        plain.triattention(Budget(kv_budget=0.4), interval=1),
    ),
    "triattention, prompt only": Pair(
        TriAttention(**SIZES, while_decoding=False),
        replace(plain.triattention(SMALL), in_decode=False),
    ),
    "triattention, prompt protected": Pair(
        TriAttention(heavy_size=18, recent_size=10, farthest=32, interval=2, protect="prompt"),
        plain.protecting(plain.triattention(Budget(heavy_size=18, recent_size=10), 32, 2)),
    ),
    "h2o, protected": Pair(
        H2O(**LARGER, protect=3), plain.protecting(plain.h2o(Budget(**LARGER)), 3)
    ),
    "random, prompt protected": Pair(
        Random(heavy_size=18, recent_size=7, seed=3, protect="prompt"),
        plain.protecting(plain.random(Budget(heavy_size=18, recent_size=7), seed=3)),
    ),
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
    stored: Callable[[], Stored] | None = None,
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
        for attempt in count():
            prompt = [*header, *random_prompts((length,), seed=37 * i + attempt)[0]]
            row = evicted_greedy(
                model, prompt, most, pair.plain, None if stored is None else stored(), turn
            )
            if not row.is_near and row.least_gap > MIN_SCORE_GAP and row.least_token_gap > MIN_GAP:
                break
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


def assert_equal(
    folder: Path,
    want: Wanted,
    pair: Pair,
    policy: Policy,
    offload_dir: Path,
    budget: MemoryBudget | None = None,
) -> Ran:
    ran = generate(
        folder, want.prompts, max(map(len, want.tokens)), pair.engine, policy, offload_dir, budget
    )
    assert_same(want, ran)
    return ran
