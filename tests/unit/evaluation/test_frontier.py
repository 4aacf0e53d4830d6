"""The grid of `evaluate frontier`, what it chooses, and its file of measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.figures import on_frontier
from flexgen_h2o.evaluation.frontier import (
    LOSSES,
    REFERENCE,
    SCHEMA,
    SPEED,
    Measurements,
    Setting,
    grid,
    learned,
)
from flexgen_h2o.kvcache.eviction.mixes import read_table

FACTS = {"schema": SCHEMA, "model": "m", "digest": "d"}


def flags(**given: Any) -> argparse.Namespace:
    names = "policies kv_budget kv_bits kv_sizes weight_bits learn kv_rotation model offload_dir"
    return argparse.Namespace(**(dict.fromkeys(names.split()) | given))


def cell(name: str, size: float, kl: float, spread: float = 0.01, **more: Any) -> dict[str, Any]:
    interval = {"value": kl, "low": kl - spread, "high": kl + spread}
    usual = {
        "weights": "16",
        "kv_bytes": None,
        "policy": name,
        "kv_bits": 16,
        "kv_window": None,
        "chosen_by": "",
        "kv_rotation": False,
    }
    return {
        "name": name,
        "kv_share": size,
        "read_share": size,
        "kl": interval,
        "changed": interval,
        **usual,
        **more,
    }


def test_every_policy_at_every_size_in_all_bits_and_the_full_cache_first() -> None:
    found = grid(flags(policies=["full", "h2o"], kv_budget=[0.5, 0.2], kv_bits=["16", "4"]))
    assert found == [
        REFERENCE,
        Setting(kv_bits=4),
        *(Setting("h2o", budget, kv_bits=bits) for budget in (0.5, 0.2) for bits in (16, 4)),
    ]


def test_learning_tries_policies_and_bits_of_equal_bytes() -> None:
    found = grid(flags(policies=["h2o"], kv_sizes=[0.2], kv_bits=["16", "4"], learn=True))
    assert Setting("h2o", kv_bytes=0.2) in found and Setting(kv_bits=4) in found
    for window in (0, 16):
        assert Setting("h2o", kv_bytes=0.2, kv_bits=4, kv_window=window) in found


def test_a_cell_leaves_the_frontier_only_for_a_smaller_one_that_is_surely_better() -> None:
    best = cell("a", 0.2, 0.10)
    worse = cell("b", 0.3, 0.20)
    within = cell("c", 0.3, 0.11)
    whole = cell("d", 1.0, 0.0)
    assert on_frontier([whole, worse, within, best]) == [best, within, whole]


def test_the_mix_of_a_share_loses_least_of_what_fits_into_it(tmp_path: Path) -> None:
    cells = [
        cell("full", 1.0, 0.0),
        cell("full", 0.32, 0.01, kv_bits=4),
        cell("h2o", 0.4, 0.2, kv_bytes=0.4),
        cell("h2o", 0.2, 0.0, kv_bytes=0.2, kv_bits=4, kv_rotation=True),
        cell("h2o", 0.2, 0.3, kv_bytes=0.2),
        cell("h2o-norm", 0.2, 0.1, kv_bytes=0.2, kv_bits=3, kv_window=0),
        cell("h2o", 0.2, 0.01, kv_bytes=0.2, chosen_by="--kv-size 0.2"),
        cell("full", 0.1, 0.0, weights="4"),
        cell("snapkv", 0.1, 0.5, kv_bytes=0.1),
    ]
    about = dict.fromkeys(
        ("dtype", "prompts", "num_prompts", "prompt_len", "gen_len", "continuation")
    )
    path = tmp_path / "table.json"
    path.write_text(json.dumps(learned({**about, "model": "small", "cells": cells})))
    table = read_table(path)
    assert [(mix.least, mix.eviction, mix.cache_bits, mix.cache_window) for mix in table.mixes] == [
        (0.4, "h2o", 4, 16),
        (0.2, "h2o-norm", 3, 0),
        (0.1, "snapkv", 16, 16),
    ]
    assert [(kept.settings, kept.kl, kept.model) for kept in table.small_losses] == [
        ({}, 0.0, "small"),
        ({"compress_cache": True, "cache_bits": 4}, 0.01, "small"),
    ]


def test_rows_of_an_older_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    line = {"setting": {"policy": "full", "kv_read": 0.1}, "kind": LOSSES, "start": 0, "values": []}
    body = json.dumps({"facts": {**FACTS, "schema": 1}}) + "\n" + json.dumps(line) + "\n"
    path.write_text(body)
    with pytest.raises(UsageError, match=r"^--json: .*another version"):
        Measurements(path, FACTS)
    assert path.read_text() == body


@pytest.mark.parametrize("body", [b"", b'{"fac', b'{"facts": {"model": "m", "dig'])
def test_a_file_whose_first_line_was_cut_is_begun_anew(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(body)
    Measurements(path, FACTS).close()
    assert json.loads(path.read_text()) == {"facts": FACTS}


def test_a_model_may_be_spelled_otherwise(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to("m")
    path = tmp_path / "rows.jsonl"
    for name in ("m", "link", f"../{tmp_path.name}/m/"):
        Measurements(path, {**FACTS, "model": f"{tmp_path}/{name}"}).close()
    with pytest.raises(UsageError, match="other prompts"):
        Measurements(path, {**FACTS, "model": str(tmp_path)})


def test_measurements_are_there_again_and_a_line_that_was_cut_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = Measurements(path, FACTS)
    with pytest.raises(UsageError, match="another run measures into"):
        Measurements(path, FACTS)
    first.add(REFERENCE, LOSSES, [[0.0, 0.0, 1.5]])
    first.add(Setting("h2o", 0.2), LOSSES, [[0.1, 0.2, 1.0]], start=1)
    first.add(Setting("h2o", 0.2), LOSSES, [[0.3, 0.2, 1.0]])
    whole = path.read_bytes()
    first.close()
    path.write_bytes(whole + b'{"setting": {"policy": "ful')
    again = Measurements(path, FACTS)
    assert again[Setting("h2o", 0.2), LOSSES] == [[0.3, 0.2, 1.0], [0.1, 0.2, 1.0]]
    assert again.settings == [REFERENCE, Setting("h2o", 0.2)]
    assert again.lacks(REFERENCE, SPEED) and not again.lacks(REFERENCE, LOSSES)
    assert again.lacks(REFERENCE, LOSSES, range(2)) and not again.lacks(
        Setting("h2o", 0.2), LOSSES, range(2)
    )
    assert path.read_bytes() == whole
