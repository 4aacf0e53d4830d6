"""Random ways to keep the KV cache small against the slow reference: policies with budgets,
protected columns, a whole first layer, columns by layer, compressed columns, on random placements,
with refill and shared prefixes.

A run is drawn from its index alone. The default suite takes a few; FLEXGEN_KV_RUNS=2000 bash
scripts/slow_tests.sh tests/eviction/test_fuzz.py takes as many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from tests.eviction.cases import KEEPS_ALL, Known
from tests.eviction.engine import (
    MIN_SCORE_GAP,
    STAND_IN,
    Pair,
    Wanted,
    assert_same,
    cut,
    pair,
    run_with,
)
from tests.eviction.reference import Evicted, evicted_greedy
from tests.eviction.rounding import Rotated, Rounded
from tests.parity.reference import MIN_GAP, random_prompts

RUNS = int(os.environ.get("FLEXGEN_KV_RUNS", "200"))
FEW = 8
CHUNK = 50
SHAPES = (
    "normal",
    "one layer",
    "llama",
    "llama, one kv-head, odd sizes",
    "gpt_neox",
    "post-norm, narrow embedding (350m)",
)


def draw_policy(rng: random.Random) -> Pair:
    """Any policy of any size, with what goes with all of them, or all columns, of which a share is
    read."""
    heavy = rng.randint(1, 12)
    recent = rng.randint(1, 8)
    settings: dict[str, Any] = {"heavy_size": heavy, "recent_size": recent}
    if rng.random() < 0.3:
        settings = {"kv_budget": round(rng.uniform(0.15, 0.9), 2)}
    seed = rng.randrange(9)
    window = rng.randint(2, 9)
    kernel = rng.choice((1, 3, 5))
    sinks = rng.randint(0, 3)
    grace = rng.randint(0, 4)
    own: dict[str, dict[str, Any]] = {
        "h2o": {},
        "local": {"sinks": sinks},
        "h2o-norm": {"sinks": sinks, "grace": grace},
        "tova": {},
        "snapkv": {"window": window, "kernel": kernel},
        "random": {"seed": seed},
    }
    name = rng.choice(tuple(own))
    settings |= own[name]
    if rng.random() < 0.15:  # all columns, some of which are read
        share = round(rng.uniform(0.05, 0.9), 2)
        return Pair(pair(name, **settings).engine, replace(KEEPS_ALL, share=share))
    settings["while_decoding"] = rng.random() < 0.85
    if name in ("h2o", "random", "snapkv") and "heavy_size" in settings and rng.random() < 0.4:
        settings["protect"] = rng.randint(1, heavy + recent - 1)
    return pair(name, **settings)


def draw_placement(rng: random.Random, share: float) -> Policy:
    """Where things lie, how columns are compressed, and the share that counts."""

    def shares() -> tuple[int, int]:
        device = rng.choice((0, 0, 30, 50, 100))
        return device, rng.choice((0, 30, 100 - device)) if device < 100 else 0

    packing: dict[str, Any] = {
        "compress_cache": True,
        "cache_bits": rng.choice((3, 4, 8, "4/3")),
        "cache_window": rng.choice((0, 4, 8)),
        "cache_rotation": rng.random() < 0.4,
    }
    return Policy(
        rng.randint(1, 4),
        rng.randint(1, 3),
        (*shares(), *shares(), *shares()),
        overlap=rng.random() < 0.7,
        cpu_cache_compute=rng.random() < 0.3,
        sep_layer=rng.random() < 0.5,
        attn_sparsity=share,
        **(packing if rng.random() < 0.5 else {}),
    )


def check(index: int, known: Callable[[str], Known], folder: Path) -> bool:
    """Run what the index stands for; False where a near tie lets rounding decide."""
    rng = random.Random(index)
    shape = rng.choice(SHAPES)
    one = known(shape)
    drawn = draw_policy(rng)
    policy = draw_placement(rng, drawn.plain.share)
    eviction = drawn.engine if drawn.plain.share == 1 else None
    rows = rng.randint(1, 5)
    header = random_prompts((rng.choice((0, 0, 6)) or 1,), index)[0]
    lengths = [rng.randint(1, 20) for _ in range(rows)]
    most = [rng.randint(1, 9) for _ in range(rows)]
    prompts = [[*header, *random_prompts((n,), 31 * index + i)[0]] for i, n in enumerate(lengths)]
    found = references(one, prompts, most, drawn, policy, edges=1.0)
    if found is None:
        return False
    budget = STAND_IN if rng.random() < 0.6 else None
    refill = rng.random() < 0.5
    with LLM(
        str(one.folder), policy, eviction, dtype="float32", budget=budget, offload_dir=folder
    ) as llm:
        llm.share_prefix = rng.choice(("auto", "on", "off"))
        ran = run_with(llm, prompts, [SamplingParams(max_tokens=n) for n in most], refill)
    try:
        assert_same(cut(Wanted(prompts, found), most), ran)
    except AssertionError:
        if references(one, prompts, most, drawn, policy, edges=16.0) is not None:
            raise
        return False  # a code that was nearer to its edge than products are equal
    return True


def references(
    one: Known, prompts: list[list[int]], most: list[int], drawn: Pair, policy: Policy, edges: float
) -> list[Evicted] | None:
    """What the reference makes of each prompt; None where one is a near tie. edges: of packed
    codes, how near is near."""
    found = []
    for prompt, new in zip(prompts, most, strict=True):
        kind = Rotated if policy.cache_rotation else Rounded
        packed = (
            kind(policy.cache_bits, policy.cache_window, edges) if policy.compress_cache else None
        )
        row = evicted_greedy(one.plain, prompt, new, drawn.plain, packed)
        if row.is_near:
            return None
        row = row if drawn.plain.share == 1 else row.without_kept()
        if row.least_gap <= MIN_SCORE_GAP or row.least_token_gap <= MIN_GAP:
            return None
        found.append(row)
    return found


@pytest.mark.parametrize(
    "start",
    [0, *(pytest.param(start, marks=pytest.mark.slow) for start in range(FEW, RUNS, CHUNK))],
)
def test_random_runs(start: int, known: Callable[[str], Known], tmp_path: Path) -> None:
    """Most of them decide something."""
    indices = range(start, start + FEW if not start else min(RUNS, start + CHUNK))
    told = 0
    for index in indices:
        try:
            told += check(index, known, tmp_path)
        except Exception as error:
            error.add_note(f"run {index}")
            raise
    assert told >= len(indices) // 4
