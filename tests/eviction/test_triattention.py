"""TriAttention in the engine against the slow reference: kept columns, tokens and logits of several
shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kvcache.eviction import TriAttention
from flexgen_h2o.kvcache.eviction.policy import record_of
from flexgen_h2o.kvcache.eviction.triattention import HeadShape
from tests.eviction import policies as plain
from tests.eviction.conftest import Known
from tests.eviction.engine import (
    PAIRS,
    STAND_IN,
    Pair,
    Wanted,
    assert_equal,
    cut,
    generate,
    run_with,
    wanted,
)
from tests.eviction.policies import Budget
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import LONG, folder_with_eos, random_prompts, token_that_ends


@pytest.mark.parametrize(
    ("shape", "pair", "placement"),
    [
        ("llama", "triattention", "kv split three ways"),
        ("llama", "triattention, at an interval", "kv on disk"),
        ("llama, one kv-head, odd sizes", "triattention, of the sequence", "kv on host"),
        ("llama, biases, one layer, gelu", "triattention", "all on device"),
        ("llama, rope yarn", "triattention, at an interval", "kv split three ways"),
        (
            "gpt_neox",
            "triattention, at an interval",
            "kv split three ways",
        ),  # a quarter of a head turns
        ("gpt_oss", "triattention", "kv on host"),
        ("normal", "triattention, prompt protected", "kv split three ways"),  # nothing turns
    ],
)
def test_shapes(
    shape: str,
    pair: str,
    placement: str,
    known: Callable[[str], Known],
    reference: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    """Prompts of 1 to 21 tokens."""
    policy = Policy(2, 2, PLACEMENTS[placement])
    assert_equal(
        known(shape).folder, reference(shape, pair), PAIRS[pair], policy, tmp_path, STAND_IN
    )


@pytest.mark.parametrize(("heavy", "recent"), [(1, 3), (2, 1), (3, 1)])
def test_tiny_budgets_of_one_sequence(
    heavy: int, recent: int, known: Callable[[str], Known], tmp_path: Path
) -> None:
    sizes = {"heavy_size": heavy, "recent_size": recent}
    pair = Pair(TriAttention(**sizes, interval=1), plain.triattention(Budget(**sizes), interval=1))
    want = wanted(known("llama").plain, pair, (13,), 10)
    assert_equal(known("llama").folder, want, pair, Policy(1, 1), tmp_path, None)


def test_rows_that_end_in_the_middle(
    known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    """What is kept of the prompts' queries moves with the rows behind them."""
    pair = "triattention, at an interval"
    whole = reference("llama", pair, (3, 9, 14, 9, 21, 6), LONG)
    eos = token_that_ends(whole.tokens)
    want = cut(whole, [row.index(eos) + 1 if eos in row else len(row) for row in whole.tokens])
    assert len({len(row) for row in want.tokens}) > 2
    folder = folder_with_eos(known("llama").folder, tmp_path / "model", eos)
    assert_equal(
        folder,
        want,
        PAIRS[pair],
        Policy(3, 2, PLACEMENTS["kv on host and disk"]),
        tmp_path,
        STAND_IN,
    )


@pytest.mark.parametrize("rotary", [4, 3, 0])
def test_scores_are_the_formula(rotary: int) -> None:
    """In float64, the norm term and the series term by term; rotary: pairs that turn of a head of 8
    numbers."""
    rng = np.random.default_rng(rotary)
    group = 3
    n = 11
    count = 17
    newest = 30
    sinks = 2
    recent = 4
    frequencies = tuple(float(10 ** (-i / 3)) for i in range(rotary))
    score = TriAttention(farthest=20, interval=1, heads=HeadShape(group, 8, frequencies))
    queries = rng.normal(size=(group, count, 8)) + 1
    keys = rng.normal(size=(n, 8))
    positions = rng.choice(newest, n, replace=False)

    def turned(x: np.ndarray, places: np.ndarray) -> torch.Tensor:
        out = x.copy()
        for i, frequency in enumerate(frequencies):
            angle = places * frequency
            out[..., i] = x[..., i] * np.cos(angle) - x[..., i + rotary] * np.sin(angle)
            out[..., i + rotary] = x[..., i] * np.sin(angle) + x[..., i + rotary] * np.cos(angle)
        return torch.tensor(out, dtype=torch.float32)

    sums = score.query_sums(turned(queries, np.arange(5, 5 + count))[None], 5)
    may_leave = (positions >= sinks) & (positions <= newest - recent)
    found = score.scores(
        turned(keys, positions)[None],
        score.of_prompt(sums, count, 1)[0],
        torch.tensor([newest]),
        torch.tensor(may_leave)[None],
    )[0]

    of_heads = []
    for q in queries:
        of_keys = np.zeros(n)
        for j, k in enumerate(keys):
            for f in range(8 - rotary):
                alone = f >= rotary
                first = f if not alone else rotary + f
                zq = q[:, first] if alone else q[:, f] + 1j * q[:, f + rotary]
                zk = k[first] if alone else k[f] + 1j * k[f + rotary]
                w = 0.0 if alone else frequencies[f]
                mean = zq.mean()
                phase = np.angle(mean) - np.angle(zk)
                for step in (1, 2, 4, 8, 16):
                    of_keys[j] += (
                        abs(mean) * abs(zk) * np.cos(w * (newest + step - positions[j]) + phase) / 5
                    )
                of_keys[j] += (np.abs(zq).mean() - abs(mean)) * abs(zk)
        some = of_keys[may_leave]
        of_heads.append((of_keys - some.mean()) / some.std())
    np.testing.assert_allclose(found.numpy(), np.max(of_heads, axis=0), atol=2e-5)


def test_an_entered_row_keeps_its_own_queries(
    known: Callable[[str], Known], reference: Callable[..., Wanted], tmp_path: Path
) -> None:
    one = reference("llama", "triattention")
    asked = (3, 12, 1, 5, 2, 9, 12, 1, 4, 2, 8, 3)
    want = cut(Wanted(one.prompts * 2, one.rows * 2), asked)
    params = [SamplingParams(max_tokens=n) for n in asked]
    eviction = PAIRS["triattention"].engine
    policy = Policy(3, 2, PLACEMENTS["kv split three ways"])
    with LLM(
        str(known("llama").folder), policy, eviction, "auto", "float32", STAND_IN, tmp_path
    ) as llm:
        ran = run_with(llm, want.prompts, params, refill=True)
    assert ran.tokens == want.tokens
    assert ran.report.extra["refilled"] > 0


def test_without_a_model_there_are_no_heads() -> None:
    with pytest.raises(UsageError, match=r"^eviction: triattention"):
        record_of(TriAttention())


def test_tokens_do_not_depend_on_the_batch(known: Callable[[str], Known], tmp_path: Path) -> None:
    prompts = random_prompts((21, 9, 17))
    eviction = PAIRS["triattention, at an interval"].engine
    folder = known("llama").folder
    together = generate(folder, prompts, 12, eviction, Policy(3, 1), tmp_path)
    for i, prompt in enumerate(prompts):
        assert generate(folder, [prompt], 12, eviction, Policy(1, 1), tmp_path).tokens == [
            together.tokens[i]
        ]
