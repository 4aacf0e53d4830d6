"""What a run leaves besides its completions: report, log lines, trace, projections; and what does
not fit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.checkpoint.safetensors import read_index
from flexgen_h2o.core.timeline import LANES
from tests.doors.conftest import Door, read_json, read_lines
from tests.doors.test_runs import assert_done

CONTRACT = {
    "model",
    "policy",
    "eviction",
    "prompt_len",
    "gen_len",
    "num_prompts",
    "prefill",
    "decode",
    "total",
    "peak_bytes",
    "io_bytes",
    "kv",
    "predicted",
}
BESIDES = {
    "peak_bytes_by_kind",
    "io_bytes_by_kind",
    "projected",
    "model_bytes",
    "cache_bytes",
    "hidden_bytes",
    "extra",
}
# the fixture's defaults
PROMPT_LEN = 8
GEN_LEN = 4


def report_of(door: Door, *flags: object, idle: tuple[str, ...] = ()) -> dict[str, Any]:
    assert_done(door(*flags, "--json report.json --no-log"), *idle)
    return read_json(Path("report.json"))


def test_report_of_a_run_with_everything_on_disk(door: Door, ids_model: Path) -> None:
    sizes = "--gpu-batch-size 2 --num-gpu-batches 3 --dtype float32"
    report = report_of(door, "--percent", *[0] * 6, sizes, "--host-mem 64MiB")
    assert set(report) == CONTRACT | BESIDES
    assert (report["num_prompts"], report["prompt_len"], report["gen_len"]) == (6, 8, 4)
    for phase, count in (("prefill", 6 * PROMPT_LEN), ("decode", 18), ("total", 6 * GEN_LEN)):
        assert report[phase]["tokens"] == count and report[phase]["seconds"] > 0
        assert report[phase]["tokens_per_s"] == pytest.approx(count / report[phase]["seconds"])
    stored = read_index(ids_model)
    matrices = [t for name, t in stored.items() if ".layers." in name and len(t.shape) == 2]
    moved = report["io_bytes"]
    # The blocks' weights come from disk in every sweep.
    assert moved["disk_read"] >= GEN_LEN * sum(t.nbytes for t in matrices)
    assert moved["disk_write"] > 0 and moved["h2d"] == 0
    for name in ("io_bytes", "peak_bytes"):
        kinds = report[f"{name}_by_kind"].values()
        assert {key: sum(of[key] for of in kinds) for key in report[name]} == report[name]
    held = report["peak_bytes"]
    assert 0 < held["host"] <= 64 * 2**20 and held["device"] == 0
    assert held["disk"] >= report["extra"]["kv_reserved_bytes"] >= report["cache_bytes"] > 0
    assert report["kv"]["slots"] == PROMPT_LEN + GEN_LEN - 1
    assert 0 < report["kv"]["bytes"] == report["kv"]["full_bytes"] <= report["cache_bytes"]
    assert report["model_bytes"] == sum(t.nbytes for t in stored.values())


def test_rows_that_end_early_are_counted_as_they_are(
    door: Door, write_jsonl: Callable[..., Path]
) -> None:
    prompts = write_jsonl({"prompt_token_ids": [4] * 64}, {"prompt_token_ids": [4] * 5})
    report = report_of(door, "--prompts", prompts)
    assert (report["num_prompts"], report["prompt_len"]) == (2, 64)
    assert report["prefill"]["tokens"] == 69
    assert report["total"]["tokens"] == 1 + GEN_LEN


# ---- Printed lines and the log file


def test_how_much_is_printed(door: Door) -> None:
    silent, lines, all_of_it = (door("--no-log --gpu-batch-size 1 --verbose", n) for n in (0, 1, 2))
    for answer in (silent, lines, all_of_it):
        assert_done(answer)
    assert silent.out == "" and not list(Path().glob("*.log"))
    assert (
        "model size:" in lines.out
        and "total throughput:" in lines.out
        and "Outputs:" not in lines.out
    )
    assert "Outputs:" in all_of_it.out


# ---- Cut runs


def test_cut_gen_len_projects(door: Door, tmp_path: Path) -> None:
    flags = "--gpu-batch-size 2 --num-gpu-batches 2 --gen-len 40 --output out.jsonl"
    report = report_of(door, flags, "--cut-gen-len 4")
    rows = read_lines(Path("out.jsonl"))
    assert [len(row["token_ids"]) for row in rows] == [4] * 4
    assert report["projected"] is True
    assert (report["decode"]["tokens"], report["total"]["tokens"]) == (4 * 39, 4 * 40)
    measured = sum(report["extra"]["busy_s"].values())
    assert report["decode"]["seconds"] > report["prefill"]["seconds"] / 10 and measured > 0


# ---- Trace


def test_a_trace_has_spans_on_every_lane(door: Door) -> None:
    assert_done(door("--percent", *[30] * 6, "--device-mem 32MiB --trace trace.json"))
    events = read_json(Path("trace.json"))["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [(rows[e["tid"]], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    assert {name.split()[0] for name, _, _ in spans} == set(LANES)
    for (name, _, end), (other, start, _) in pairwise(sorted(spans)):
        assert name != other or end <= start + 1e-3, f"spans of {name} overlap"


# ---- Budgets


def test_a_refused_run_leaves_the_last_output_alone_and_writes_no_weights(
    door: Door, write_jsonl: Callable[..., Path]
) -> None:
    Path("out.jsonl").write_text("yesterday's work\n")
    prompts = write_jsonl({"prompt_token_ids": [4, 5]})
    assert door("--prompts", prompts, "--output out.jsonl --host-mem 1MiB").code == 3
    assert Path("out.jsonl").read_text() == "yesterday's work\n"
    assert door("--path _DUMMY_ --host-mem 1MiB").code == 3
    assert not list(Path("offload").rglob("*.safetensors")), "it could be 60 GB, for nothing"
