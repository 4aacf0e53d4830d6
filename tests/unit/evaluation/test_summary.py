"""Figures, tables and the picture, from results made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.evaluation.figures import (
    TextFidelity,
    draw,
    markdown,
    summarise_divergence,
    summarise_recall,
    summarise_texts,
)
from flexgen_h2o.evaluation.rows import Question, TextRow, make_cells

N, STEPS = 6, 12


def recall_row(depth: int) -> TextRow:
    inside, after = Question(0.1 + depth / 2, True, (0,)), Question(0.2 + depth / 2, False, (3,))
    return TextRow((1,), (2, 3), (inside, after), depth)


@pytest.fixture
def result() -> dict[str, Any]:
    full_nll = np.full((N, STEPS), 2.0)
    cells = make_cells(["local", "h2o", "h2o-norm"], [0.5, 0.1])
    scale = {"local": 3.0, "h2o": 2.0, "h2o-norm": 1.0}
    found = [
        TextFidelity(
            cell, 10, np.full((N, STEPS), scale[cell.label]) * np.arange(1, N + 1)[:, None],
            full_nll + scale[cell.label], np.zeros((N, STEPS), dtype=bool), np.full((N, 2), 0.25),
        )
        for cell in cells
    ]  # fmt: skip
    full, figures = summarise_texts(full_nll, found, 100, 0)
    rows = [recall_row(i % 2) for i in range(N)]
    for one in (full, *figures):
        one["recall"] = summarise_recall(rows, [[True, i % 2 == 0] for i in range(N)], 100, 0)
    for one in figures:
        one["greedy"] = summarise_divergence(np.array([3, 4, 12, 12, 12, 5]), 12, 100, 0)
    settings = {
        "prompt_len": 20, "gen_len": STEPS + 1, "continuation": "text", "seed": 0, "budgets": [0.5, 0.1],
        "dtype": "float32", "compression": "",
    }  # fmt: skip
    text = {"prompts": N, "steps": STEPS, "mean_prompt_len": 20.0}
    return {
        "model": "m", "settings": settings, "text": text, "recall": {"prompts": N}, "full": full, "cells": figures,
    }  # fmt: skip


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
    assert [(part["at"], part["value"], part["questions"]) for part in recall["after"]["by_depth"]] == [
        (pytest.approx(0.2), 1.0, 3),
        (pytest.approx(0.7), 0.0, 3),
    ]


def test_tables_put_the_worst_policy_first_and_the_full_cache_last(result: dict[str, Any]) -> None:
    lines = markdown(result).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("### 10%"))
    table = [line for line in lines[start : start + 9] if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:]] == ["`local`", "`h2o`", "`h2o-norm`", "full"]
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
    names = {line.split("|")[1].strip() for line in markdown(result).splitlines() if line[0:1] == "|"}
    assert {name for name in names if "full" in name} == {
        "`full`, --compress-cache --cache-bits 4", "full, uncompressed", "full, uncompressed: NLL"
    }  # fmt: skip


def test_the_picture(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FlexgenError, match="--plot"):
        draw(result, tmp_path / "p.nonsense")
