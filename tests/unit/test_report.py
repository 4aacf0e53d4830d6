"""What blocks count, the run report's JSON contract, FlexGen's lines as its own parser reads them,
projections."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.files import write_result
from flexgen_h2o.engine.generation import BlockStats, Sweep
from flexgen_h2o.engine.report import (
    PhaseReport,
    RunReport,
    log_block,
    project_decode_seconds,
)

GB = 2**30


def make_report(**changes: Any) -> RunReport:
    facts: dict[str, Any] = {
        "model": "facebook/opt-30b",
        "policy": Policy(gpu_batch_size=48, num_gpu_batches=3, percent=(20, 80, 0, 100, 0, 100)),
        "eviction": {"name": "full"},
        "prompt_len": 512,
        "gen_len": 32,
        "num_prompts": 144,
        "prefill": PhaseReport(100.0, 144 * 512),
        "decode": PhaseReport(500.0, 144 * 31),
        "peak_bytes_by_kind": {
            "weights": {"device": GB, "host": 4, "disk": 0},
            "kv": {"device": GB // 2, "host": 6, "disk": 0},
        },
        "io_bytes_by_kind": {
            "weights": {"disk_read": 1, "disk_write": 0, "h2d": 3, "d2h": 0},
            "kv": {"disk_read": 0, "disk_write": 2, "h2d": 0, "d2h": 4},
        },
        "kv": {"slots": 543, "bytes": 5, "full_bytes": 5},
        "predicted": {"prefill_s": 90.0, "decode_s": None},
        "model_bytes": int(55.803 * GB),
        "cache_bytes": GB,
        "hidden_bytes": GB // 8,
    }
    return RunReport(**{**facts, **changes})


# ---- blocks


@pytest.mark.parametrize("keeps_lists", [True, False])
def test_sums_of_a_block(keeps_lists: bool) -> None:
    """A mixed sweep's time is split by its tokens; columns are those of the sweeps behind the
    first, if any."""
    stats = BlockStats(keeps_lists)
    found = []
    seconds = (4.0, 2.0, 1.0)
    sweeps = (Sweep(6, 6, 10, 12, 0), Sweep(8, 2, 20, 30, 7), Sweep(5, 0, 25, 35, 9))
    for spent, sweep in zip(seconds, sweeps, strict=True):
        stats.end_layer(spent)
        stats.end_sweep(sweep, spent)
        found.append((stats.prefill_s, stats.decode_s, stats.held, stats.full, stats.later))
    assert found == [(4.0, 0.0, 10, 12, 0), (4.5, 1.5, 20, 30, 1), (4.5, 2.5, 45, 65, 2)]
    stats.add_seconds(3.0)
    assert (stats.sweeps, stats.prefill_s, stats.decode_s) == (3, 4.5, 5.5)
    lists = (stats.sweep_seconds, stats.layer_seconds, stats.held_by_sweep, stats.read_by_sweep)
    kept = ([4.0, 2.0, 4.0], [4.0, 2.0, 1.0], [10, 20, 25], [0, 7, 9])
    assert lists == (kept if keeps_lists else ([], [], [], []))


# ---- JSON


def test_numbers_that_json_has_not_become_null(tmp_path: Path) -> None:
    extra = {"sweeps": (1.0, math.nan), "nested": {"bad": [math.inf], 3: True}, "nothing": None}
    report = make_report(extra=extra, prefill=PhaseReport(0.0, 5), decode=PhaseReport(math.inf, 0))
    path = tmp_path / "run.json"
    write_result(path, report.to_json(), "--json")
    body = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    nested = {"bad": [None], "3": True}
    assert body["extra"] == {"sweeps": [1.0, None], "nested": nested, "nothing": None}
    assert body["decode"] == {"seconds": None, "tokens_per_s": 0.0, "tokens": 0}


# ---- FlexGen's text


def test_log_block_is_flexgens_to_the_letter() -> None:
    assert log_block(make_report(projected=True)).split("\n") == [
        "model size: 55.803 GB\tcache size: 1.000 GB\thidden size (p): 0.125 GB",
        "peak gpu mem: 1.500 GB\tprojected: True",
        "prefill latency: 100.000 s\tprefill throughput: 737.280 token/s",
        "decode latency: 500.000 s\tdecode throughput: 8.928 token/s",
        "total latency: 600.000 s\ttotal throughput: 7.680 token/s",
    ]
    assert "\tprojected: False\n" in log_block(make_report())


# ---- projection


@pytest.mark.parametrize(
    ("sweeps", "gen_len", "seconds"),
    [
        ([5.0, 3.0, 1.0, 2.0, 3.0], 32, 5 + 3 + 2 * 29),
        ([5.0], 32, 5.0 * 31),
        ([], 1, 0.0),
    ],
)
def test_projection(sweeps: list[float], gen_len: int, seconds: float) -> None:
    assert project_decode_seconds(sweeps, gen_len) == pytest.approx(seconds)
