"""Policies at budgets as flags give them, metrics of a step by hand, intervals; figures, tables and
the picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.evaluation.fidelity import divergence, evicted_mass, flips
from flexgen_h2o.evaluation.figures import (
    Bootstrap,
    TextFidelity,
    draw,
    markdown,
    over_budgets,
    summarise_divergence,
    summarise_recall,
    summarise_texts,
    surprise,
)
from flexgen_h2o.evaluation.rows import RecallQuestion, TextRow, make_cells
from flexgen_h2o.kvcache.eviction import EVICTING, H2O, H2ONorm
from tests.extras import needs


def test_all_policies_at_all_budgets_each_half_heavy_and_half_recent() -> None:
    cells = make_cells(list(EVICTING), [0.5, 0.1])
    assert len(cells) == 2 * len(EVICTING)
    assert {
        (c.eviction.heavy_ratio, c.eviction.recent_ratio) for c in cells if c.budget == 0.1
    } == {(0.05, 0.05)}
    assert all(c.eviction.budget(100, 50, 0).columns == 10 for c in cells if c.budget == 0.1)
    assert H2O(heavy_ratio=0.25, recent_ratio=0.25) in [c.eviction for c in cells]


def test_budgets_of_the_sequence_are_shares_of_prompt_and_continuation() -> None:
    cells = make_cells(list(EVICTING), [0.5, 0.1], True, "sequence")
    assert [c.budget_of for c in cells] == ["sequence"] * (1 + 2 * len(EVICTING))
    assert all(c.eviction.budget(100, 60, 0).columns == 16 for c in cells if c.budget == 0.1)


def test_a_policy_takes_settings_of_its_own() -> None:
    [cell] = make_cells(["h2o-norm:grace=8,sinks=0,while_decoding=false"], [0.2])
    want = H2ONorm(0.1, 0.1, None, None, False, sinks=0, grace=8)
    assert cell.eviction == want
    assert cell.label.startswith("h2o-norm:grace")


@pytest.mark.parametrize(
    ("policies", "budgets", "says"),
    [
        (["h3o"], [0.1], "--policies h3o: h3o is not one of local, h2o"),
        ([""], [0.1], "--policies : nothing is not one of"),
        (["full"], [0.1], "--policies full: full is not one of"),
        (["h2o:decay=0.9"], [0.1], "decay is not a setting of h2o"),
        (["h2o-norm:decay=0.99"], [0.1], "decay is not a setting of h2o-norm"),
        (["h2o-norm:grace=-2"], [0.1], "--policies h2o-norm:grace=-2: grace: -2 must be between"),
        (["h2o-norm:grace"], [0.1], "grace"),
        (["h2o", "h2o"], [0.1], "--policies: h2o is given twice"),
        (["h2o"], [0.1, 0.1], "--budgets: 0.1 is given twice"),
        (["h2o"], [0.0], "--budgets: 0.0 is not in"),
        (["h2o"], [float("nan")], "--budgets: nan is not in"),
        (
            ["h2o:kv_budget=0.2"],
            [0.1],
            "--policies h2o:kv_budget=0.2: --budgets sets the size; leave kv_budget and",
        ),
    ],
)
def test_what_is_refused(policies: list[str], budgets: list[float], says: str) -> None:
    with pytest.raises(UsageError) as error:
        make_cells(policies, budgets)
    assert says in str(error.value)


# ---- bootstrap


def test_the_interval_holds_the_mean_and_is_as_wide_as_the_standard_error_says() -> None:
    values = np.random.default_rng(2).normal(5, 2, size=400)
    found = Bootstrap(400, 2000, 0).mean(values)
    error = values.std() / 20
    assert found["value"] == pytest.approx(values.mean())
    assert found["low"] < found["value"] < found["high"]
    assert (found["low"], found["high"]) == pytest.approx(
        (found["value"] - 1.96 * error, found["value"] + 1.96 * error), abs=0.03
    )
    assert found["n"] == 400 and found == Bootstrap(400, 2000, 0).mean(values)
    steps = Bootstrap(20, 300, 0).percentile(np.arange(200.0).reshape(20, 10), 95)
    assert (
        steps["value"] == np.percentile(np.arange(200.0), 95)
        and steps["low"] < steps["value"] <= steps["high"]
    )
    share = Bootstrap(4, 500, 0).ratio(
        np.array([3.0, 0.0, 1.0, 0.0]), np.array([3.0, 1.0, 4.0, 0.0])
    )
    assert share["value"] == 0.5 and 0 <= share["low"] < 0.5 < share["high"] <= 1


# ---- metrics of a step


def test_divergence_flips_and_surprise_of_two_coins() -> None:
    """KL looks from the full cache; of equal logits it is exactly nothing, and the lower index
    counts as likeliest."""
    full = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.3, 0.7]])
    policy = torch.tensor([[0.0, math.log(9.0)], [5.0, 5.0], [0.3, 0.7]])
    want = 0.5 * math.log(0.5 / 0.1) + 0.5 * math.log(0.5 / 0.9)
    assert divergence(full, policy).tolist() == pytest.approx([want, 0.0, 0.0], abs=1e-7)
    assert divergence(full, policy)[1:].tolist() == [0.0, 0.0]
    assert flips(full, policy).tolist() == [True, False, False]
    assert surprise(policy[:2], torch.tensor([0, 1])).tolist() == pytest.approx(
        [math.log(10), math.log(2)]
    )


def test_evicted_mass_is_what_the_columns_that_are_gone_would_get() -> None:
    """Two rows, two kv-heads of two query heads each; slots beyond `filled` hold nonsense."""
    weights = torch.tensor(
        [
            [[0.5, 1.0, 0.25, 0.25], [0.0, 0.0, 2.0, 0.0]],
            [[1.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]],
        ]
    )
    positions = torch.tensor([[[3, 1, 99], [0, 3, -7]], [[2, 0, 1], [1, 3, 2]]], dtype=torch.int32)
    lost = evicted_mass(weights, positions, torch.tensor([2, 3]))
    assert torch.allclose(lost, torch.tensor([[1 - 1.25 / 2, 1.0], [0.0, 0.25]]))


# ---- Figures, tables and the picture, from results made by hand


N = 6
STEPS = 12


def recall_row(depth: int) -> TextRow:
    inside = RecallQuestion(0.1 + depth / 2, True, (0,))
    after = RecallQuestion(0.2 + depth / 2, False, (3,))
    return TextRow((1,), (2, 3), (inside, after), depth)


@pytest.fixture
def result() -> dict[str, Any]:
    full_nll = np.full((N, STEPS), 2.0)
    cells = make_cells(["local", "h2o", "h2o-norm"], [0.5, 0.1])
    scale = {"local": 3.0, "h2o": 2.0, "h2o-norm": 1.0}
    found = [
        TextFidelity(
            cell,
            10,
            0.5,
            np.full((N, STEPS), scale[cell.label]) * np.arange(1, N + 1)[:, None],
            full_nll + scale[cell.label],
            np.zeros((N, STEPS), dtype=bool),
            np.full((N, 2), 0.25),
        )
        for cell in cells
    ]
    full, figures = summarise_texts(full_nll, found, 100, 0)
    rows = [recall_row(i % 2) for i in range(N)]
    for one in (full, *figures):
        one["recall"] = summarise_recall(rows, [[True, i % 2 == 0] for i in range(N)], 100, 0)
    for one in figures:
        one["greedy"] = summarise_divergence(np.array([3, 4, 12, 12, 12, 5]), 12, 100, 0)
    settings = {
        "prompt_len": 20,
        "gen_len": STEPS + 1,
        "continuation": "text",
        "seed": 0,
        "budgets": [0.5, 0.1],
        "budgets_of": "prompt",
        "dtype": "float32",
        "compression": "",
    }
    text = {"prompts": N, "steps": STEPS, "mean_prompt_len": 20.0, "mean_columns": 20.0}
    return {
        "model": "m",
        "settings": settings,
        "text": text,
        "recall": {"prompts": N},
        "full": full,
        "cells": figures,
    }


def test_figures_of_a_cell(result: dict[str, Any]) -> None:
    local, h2o, norm = result["cells"][:3]
    assert [c["kl"]["value"] for c in (local, h2o, norm)] == [10.5, 7.0, 3.5]
    assert h2o["kl_less_baseline"] is None
    assert norm["kl_less_baseline"]["value"] == -3.5
    assert norm["kl_less_baseline"]["high"] < 0 < local["kl_less_baseline"]["low"]
    assert local["nll_less_full"] == {"value": 3.0, "low": 3.0, "high": 3.0, "n": N}
    assert local["evicted_mass_by_block"] == [0.25, 0.25]
    assert [(part["first"], part["last"]) for part in local["by_step"]][:2] == [(1, 2), (3, 4)]
    assert local["greedy"]["never"]["value"] == 0.5
    recall = result["full"]["recall"]
    assert (recall["inside"]["value"], recall["after"]["value"]) == (1.0, 0.5)
    assert [
        (part["at"], part["value"], part["questions"]) for part in recall["after"]["by_depth"]
    ] == [
        (pytest.approx(0.2), 1.0, 3),
        (pytest.approx(0.7), 0.0, 3),
    ]


def test_tables_put_the_worst_policy_first_and_the_full_cache_last(result: dict[str, Any]) -> None:
    lines = markdown(result).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("### 10%"))
    table = [line for line in lines[start : start + 9] if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:]] == [
        "`local`",
        "`h2o`",
        "`h2o-norm`",
        "full",
    ]
    assert "| 10 | 50.0% |" in table[4] and "| 20 | 100% |" in table[5]
    assert table[5].endswith("| 13 |"), "all greedy tokens are equal"
    assert "-3.500 [" in table[4] and "25.0% [25.0, 25.0]" in table[4]
    every = [line for line in lines if line.startswith("|")]
    first = [i for i, line in enumerate(every) if set(line) == {"|", "-"}]
    for i, end in zip(first, [*(j - 1 for j in first[1:]), len(every)], strict=True):
        assert len({line.count("|") for line in every[i - 1 : end]}) == 1, every[i - 1]


def test_the_compared_full_cache_and_the_reference_have_other_names(result: dict[str, Any]) -> None:
    """Where the compared runs are compressed, and so one of them has the full cache."""
    result["settings"]["compression"] = "--compress-cache --cache-bits 4"
    for cell in result["cells"]:
        cell["policy"] = "full" if cell["policy"] == "local" else cell["policy"]
    names = {
        line.split("|")[1].strip() for line in markdown(result).splitlines() if line[0:1] == "|"
    }
    assert {name for name in names if "full" in name} == {
        "`full`, --compress-cache --cache-bits 4",
        "full, uncompressed",
        "full, uncompressed: NLL",
    }


@needs("plot")
def test_the_picture(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FlexgenError, match="--plot"):
        draw(result, tmp_path / "p.nonsense")
    drawn: list[object] = []
    counted = "flexgen_h2o.evaluation.figures.over_budgets"
    monkeypatch.setattr(counted, lambda ax, *rest: (drawn.append(ax), over_budgets(ax, *rest)))
    for cell in result["cells"]:
        del cell["recall"]["after"]
    draw(result, tmp_path / "p.png")
    assert len(drawn) == 3 * 2, "KL and flips of three policies"
