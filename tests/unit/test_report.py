"""What blocks count, the run report's JSON contract, FlexGen's lines as its own parser reads them,
projections."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import write_result
from flexgen_h2o.engine.generation import BlockStats, Sweep
from flexgen_h2o.engine.report import (
    PhaseReport,
    RunReport,
    append_log,
    eviction_line,
    log_block,
    log_file_name,
    prediction_line,
    project_decode_seconds,
    sizes_line,
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
        "peak_bytes": {"device": 3 * GB // 2, "host": 10, "disk": 0},
        "io_bytes": {"disk_read": 1, "disk_write": 2, "h2d": 3, "d2h": 4},
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
    sweeps = (
        (4.0, Sweep(6, 6, 10, 12, 0)),
        (2.0, Sweep(8, 2, 20, 30, 7)),
        (1.0, Sweep(5, 0, 25, 35, 9)),
    )
    for seconds, sweep in sweeps:
        stats.end_layer(seconds)
        stats.end_sweep(sweep, seconds)
        found.append((stats.prefill_s, stats.decode_s, stats.held, stats.full, stats.later))
    assert found == [(4.0, 0.0, 10, 12, 0), (4.5, 1.5, 20, 30, 1), (4.5, 2.5, 45, 65, 2)]
    stats.add_seconds(3.0)
    assert (stats.sweeps, stats.prefill_s, stats.decode_s) == (3, 4.5, 5.5)
    assert stats.times.sweeps == ([4.0, 2.0, 4.0] if keeps_lists else [])
    assert stats.times.layers == ([4.0, 2.0, 1.0] if keeps_lists else [])
    assert (stats.times.held, stats.times.read) == (
        ([10, 20, 25], [0, 7, 9]) if keeps_lists else ([], [])
    )


# ---- the KV cache


def test_one_copy_of_what_all_rows_begin_with_is_no_eviction() -> None:
    kv = {"slots": 22, "bytes": 15, "full_bytes": 100}
    assert (
        eviction_line(make_report(kv=kv))
        == "eviction: full, 22 slots a row, 15.0% of the full KV cache"
    )
    said = eviction_line(
        make_report(kv=kv, extra={"common_prefix": {"tokens": 607, "kv_bytes": 9}})
    )
    assert (
        said
        == "eviction: full, 22 slots a row behind one copy of 607 tokens for all, 15.0% of the "
        "full KV cache"
    )


# ---- the prediction


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (
            {"profile": "here"},
            "predicted with here: prefill 90.000 s (measured 100.000 s), decode 400.000 s",
        ),
        (
            {"profile": "here", "profile_disturbed": True},
            "predicted with here (profile measured while other programs were busy: run ",
        ),
        (
            {"profile": "nominal", "profile_disturbed": False},
            "predicted: nothing, this machine was not measured",
        ),
    ],
)
def test_a_prediction_says_how_far_it_can_be_trusted(extra: dict[str, Any], line: str) -> None:
    """Not at all at nominal speeds, which no machine has."""
    said = prediction_line(
        make_report(predicted={"prefill_s": 90.0, "decode_s": 400.0}, extra=extra)
    )
    assert said.startswith(line)
    assert ("90.000" in said) is (extra["profile"] != "nominal")


# ---- JSON


def test_total_counts_generated_tokens_over_both_phases() -> None:
    body = make_report().to_json()
    assert body["total"] == {"seconds": 600.0, "tokens": 144 * 32, "tokens_per_s": 144 * 32 / 600}
    assert body["prefill"]["tokens_per_s"] == 144 * 512 / 100
    assert body["decode"]["tokens_per_s"] == 144 * 31 / 500


def test_json_is_safe_whatever_the_extra_facts_are(tmp_path: Path) -> None:
    extra = {
        "sweeps": (1.0, math.nan),
        "efficiency": np.float32(0.5),
        "counts": np.arange(2),
        "nested": {"bad": [math.inf], 3: True},
        "path": tmp_path,
        "nothing": None,
    }
    report = make_report(extra=extra, prefill=PhaseReport(0.0, 5), decode=PhaseReport(math.inf, 0))
    path = tmp_path / "run.json"
    write_result(path, report.to_json(), "--json")
    body = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert body["extra"] == {
        "sweeps": [1.0, None],
        "efficiency": 0.5,
        "counts": [0, 1],
        "nested": {"bad": [None], "3": True},
        "path": str(tmp_path),
        "nothing": None,
    }
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


def test_log_is_appended_five_lines_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    first = make_report()
    second = make_report(projected=True)
    append_log(path, first)
    append_log(path, second)
    assert path.read_text() == log_block(first) + "\n" + log_block(second) + "\n"
    assert len(path.read_text().splitlines()) == 10


def test_sizes_line() -> None:
    assert sizes_line(int(12.386 * GB) + 1, GB // 2, GB // 1000) == (
        "model size: 12.386 GB, cache size: 0.500 GB, hidden size (prefill): 0.001 GB"
    )


@pytest.mark.parametrize(
    ("model", "changes", "name"),
    [
        (
            "facebook/opt-30b",
            {},
            "fo-30b-gbs48-ngbs3-prompt512-gen32-percent-20-80-0-100-0-100-gpu-cache.log",
        ),
        (
            "/models/opt-6.7b/",
            {"cpu_cache_compute": True},
            "fo-6.7b-gbs48-ngbs3-prompt512-gen32-percent-20-80-0-100-0-100-cpu-cache.log",
        ),
        (
            "plain",
            {"compress_weight": True, "compress_cache": True, "percent": (0, 100, 100, 0, 100, 0)},
            "fo-plain-gbs48-ngbs3-prompt512-gen32-percent-0-100-100-0-100-0-gpu-cache-compw-compc.log",
        ),
        (
            "x/we ird-a b",
            {},
            "fo-a_b-gbs48-ngbs3-prompt512-gen32-percent-20-80-0-100-0-100-gpu-cache.log",
        ),
    ],
)
def test_log_file_name(model: str, changes: dict[str, Any], name: str) -> None:
    assert log_file_name(model, replace(make_report().policy, **changes), 512, 32) == name


# ---- projection


@pytest.mark.parametrize(
    ("sweeps", "gen_len", "seconds"),
    [
        ([5.0, 3.0, 1.0, 2.0, 3.0], 32, 5 + 3 + 2 * 29),
        ([5.0, 3.0, 1.0], 3, 8.0),
        ([5.0, 3.0], 32, 5 + 3 * 30),
        ([5.0], 32, 5.0 * 31),
        ([], 1, 0.0),
    ],
)
def test_projection(sweeps: list[float], gen_len: int, seconds: float) -> None:
    assert project_decode_seconds(sweeps, gen_len) == pytest.approx(seconds)


def test_nothing_to_project_from() -> None:
    with pytest.raises(UsageError, match=r"^--cut-gen-len: "):
        project_decode_seconds([], 2)


# ---- files


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(FlexgenError, match=r"^--json .*: Is a directory"):
        write_result(tmp_path, make_report().to_json(), "--json")
    with pytest.raises(FlexgenError, match=r"^--log-file .*: Is a directory"):
        append_log(tmp_path, make_report())
