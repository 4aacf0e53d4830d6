"""What a run leaves besides its completions: report, log lines, trace, projections; and what does
not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.checkpoint.safetensors import read_index
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.timeline import LANES
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import OVERLAPPED, BlockShape
from flexgen_h2o.models.load import find_model
from tests.doors.conftest import Answer
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
NUMBER = r"\d+\.\d{3}"
LOG_LINES = [
    rf"model size: {NUMBER} GB\tcache size: {NUMBER} GB\thidden size \(p\): {NUMBER} GB",
    rf"peak gpu mem: {NUMBER} GB\tprojected: (True|False)",
    *(
        rf"{phase} latency: {NUMBER} s\t{phase} throughput: {NUMBER} token/s"
        for phase in ("prefill", "decode", "total")
    ),
]
# the fixture's defaults
PROMPT_LEN = 8
GEN_LEN = 4


def report_of(
    door: Callable[..., Answer], *flags: object, idle: tuple[str, ...] = ()
) -> dict[str, Any]:
    assert_done(door(*flags, "--json", "report.json", "--no-log"), *idle)
    return json.loads(Path("report.json").read_text())


def test_report_of_a_run_with_everything_on_disk(
    door: Callable[..., Answer], ids_model: Path
) -> None:
    flags = (
        "--percent",
        *[0] * 6,
        "--gpu-batch-size",
        2,
        "--num-gpu-batches",
        3,
        "--dtype",
        "float32",
    )
    report = report_of(door, *flags, "--host-mem", "64MiB")
    assert set(report) == CONTRACT | BESIDES
    assert (report["num_prompts"], report["prompt_len"], report["gen_len"]) == (
        6,
        PROMPT_LEN,
        GEN_LEN,
    )
    assert report["eviction"] == {"name": "full"} and report["projected"] is False
    tokens = {"prefill": 6 * PROMPT_LEN, "decode": 6 * (GEN_LEN - 1), "total": 6 * GEN_LEN}
    for phase, count in tokens.items():
        assert report[phase]["tokens"] == count and report[phase]["seconds"] > 0
        assert report[phase]["tokens_per_s"] == pytest.approx(count / report[phase]["seconds"])
    assert report["total"]["seconds"] == pytest.approx(
        report["prefill"]["seconds"] + report["decode"]["seconds"]
    )
    stored = read_index(ids_model)
    matrices = sum(
        t.nbytes for name, t in stored.items() if ".layers." in name and len(t.shape) == 2
    )
    assert report["io_bytes"]["disk_read"] >= GEN_LEN * matrices, (
        "blocks' weights come from disk in every sweep"
    )
    assert report["io_bytes"]["disk_write"] > 0 and report["io_bytes"]["h2d"] == 0
    assert 0 < report["peak_bytes"]["host"] <= 64 * 2**20 and report["peak_bytes"]["device"] == 0
    assert (
        report["peak_bytes"]["disk"]
        >= report["extra"]["kv_reserved_bytes"]
        >= report["cache_bytes"]
        > 0
    )
    assert report["kv"]["slots"] == PROMPT_LEN + GEN_LEN - 1
    assert 0 < report["kv"]["bytes"] == report["kv"]["full_bytes"] <= report["cache_bytes"]
    assert report["model_bytes"] == sum(t.nbytes for t in stored.values())


def test_report_of_a_run_in_three_tiers(door: Callable[..., Answer]) -> None:
    report = report_of(door, "--percent", *[30] * 6, "--device-mem", "32MiB", "--host-mem", "48MiB")
    assert all(report["io_bytes"][link] > 0 for link in ("disk_read", "disk_write", "h2d", "d2h"))
    assert all(0 < report["peak_bytes"][tier] <= 48 * 2**20 for tier in ("device", "host", "disk"))
    assert set(report["predicted"]) == {"prefill_s", "decode_s"}


@pytest.mark.parametrize(
    ("percent", "switches", "device_mem"),
    [
        ((30, 30) * 3, (), ("--device-mem", "32MiB")),
        ((20, 50, 0, 100, 0, 0), ("--hh-ratio", 0.25), ()),
        ((0, 100, 40, 30, 100, 0), ("--compress-cache",), ("--device-mem", "32MiB")),
        (
            (50, 0, 0, 50, 0, 100),
            ("--cpu-cache-compute", "--eviction", "local"),
            ("--device-mem", "32MiB"),
        ),
        ((50, 0, 0, 50, 0, 100), ("--cpu-cache-compute",), ()),
    ],
    ids=str,
)
def test_bytes_by_kind_say_what_percent_placed(
    percent: tuple[int, ...],
    switches: tuple[object, ...],
    device_mem: tuple[str, ...],
    door: Callable[..., Answer],
) -> None:
    """Sums are the totals; what has its home on a tier is held there, and nothing of it
    elsewhere."""
    flags = ("--percent", *percent, "--gpu-batch-size", 5, "--num-gpu-batches", 2, "--gen-len", 20)
    idle = () if device_mem else tuple({"--cpu-cache-compute"} & set(map(str, switches)))
    report = report_of(door, *flags, *switches, *device_mem, idle=idle)
    for name in ("io_bytes", "peak_bytes"):
        kinds = report[f"{name}_by_kind"]
        total = report[name]
        assert {key: sum(of[key] for of in kinds.values()) for key in total} == total
    held = report["peak_bytes_by_kind"]
    moved = report["io_bytes_by_kind"]
    assert set(moved) == {"weights", "kv", "hidden"} < set(held)
    for i, kind in enumerate(("weights", "kv", "hidden")):
        device, host = percent[2 * i : 2 * i + 2]
        disk = 100 - device - host
        assert (held[kind]["disk"] > 0) is (
            disk > 0 and kind != "weights"
        )  # these stay in the checkpoint
        assert (moved[kind]["disk_read"] > 0) is (disk > 0)
        if device_mem:
            vectors = kind == "weights"  # which stay with the device
            assert [held[kind][tier] > 0 for tier in ("device", "host")] == [
                device > 0 or vectors,
                host > 0,
            ]
        else:
            assert held[kind]["device"] == 0 and (
                kind == "hidden" or moved[kind]["h2d"] == moved[kind]["d2h"] == 0
            )
    assert held["workspace"]["device" if device_mem else "host"] > 0


def test_attn_sparsity_saves_no_traffic(door: Callable[..., Answer]) -> None:
    flags = (
        "--percent",
        100,
        0,
        0,
        100,
        100,
        0,
        "--device-mem",
        "32MiB",
        "--prompt-len",
        40,
        "--no-log",
    )
    whole, sparse = (door(*flags, "--attn-sparsity", s, "--json", f"{s}.json") for s in (1.0, 0.2))
    assert_done(whole)
    assert_done(sparse)
    kv, less = (json.loads(Path(f"{s}.json").read_text()) for s in (1.0, 0.2))
    assert kv["io_bytes_by_kind"] == less["io_bytes_by_kind"] and kv["io_bytes"]["h2d"] > 0


def test_rows_that_end_early_are_counted_as_they_are(
    door: Callable[..., Answer], write_jsonl: Callable[..., Path]
) -> None:
    prompts = write_jsonl({"prompt_token_ids": [4] * 64}, {"prompt_token_ids": [4] * 5})
    report = report_of(door, "--prompts", prompts)
    assert (report["num_prompts"], report["prompt_len"]) == (2, 64)
    assert report["prefill"]["tokens"] == 69
    assert report["total"]["tokens"] == 1 + GEN_LEN


# ---- Printed lines and the log file


def test_log_file_is_named_as_flexgen_names_it(door: Callable[..., Answer]) -> None:
    flags = (
        "--percent",
        100,
        0,
        0,
        100,
        100,
        0,
        "--gpu-batch-size",
        2,
        "--num-gpu-batches",
        3,
        "--log-file",
        "auto",
    )
    answer = door(*flags)
    assert_done(answer)
    log = Path(
        f"fo-ids-gbs2-ngbs3-prompt{PROMPT_LEN}-gen{GEN_LEN}-percent-100-0-0-100-100-0-gpu-cache.log"
    )
    lines = log.read_text().splitlines()
    assert len(lines) == len(LOG_LINES)
    for line, pattern in zip(lines, LOG_LINES, strict=True):
        assert re.fullmatch(pattern, line), line
        assert line in answer.out
    assert_done(door(*flags))
    assert len(log.read_text().splitlines()) == 2 * len(LOG_LINES), "a log is appended to"
    assert_done(door(*flags, "--cpu-cache-compute"), "--cpu-cache-compute")
    assert len(list(Path().glob("*-cpu-cache.log"))) == 1


def test_how_much_is_printed(door: Callable[..., Answer]) -> None:
    silent, lines, all_of_it = (
        door("--no-log", "--gpu-batch-size", 1, "--verbose", n) for n in (0, 1, 2)
    )
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


def test_cut_gen_len_projects(door: Callable[..., Answer], tmp_path: Path) -> None:
    flags = (
        "--gpu-batch-size",
        2,
        "--num-gpu-batches",
        2,
        "--gen-len",
        40,
        "--output",
        "out.jsonl",
    )
    report = report_of(door, *flags, "--cut-gen-len", 4)
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [len(row["token_ids"]) for row in rows] == [4] * 4
    assert report["projected"] is True
    assert (report["decode"]["tokens"], report["total"]["tokens"]) == (4 * 39, 4 * 40)
    measured = sum(report["extra"]["busy_s"].values())
    assert report["decode"]["seconds"] > report["prefill"]["seconds"] / 10 and measured > 0


@pytest.mark.parametrize("mode", ["fewer_batch", "breakdown"])
def test_debug_modes_project(mode: str, door: Callable[..., Answer]) -> None:
    flags = ("--percent", *[0] * 6, "--gpu-batch-size", 2, "--num-gpu-batches", 2, "--gen-len", 40)
    answer = door(*flags, "--debug-mode", mode, "--json", "report.json", "--no-log")
    assert_done(answer)
    report = json.loads(Path("report.json").read_text())
    assert report["projected"] is True and report["decode"]["tokens"] == 4 * 39
    assert ("load_weight (per-layer):" in answer.out) is (mode == "breakdown")
    if mode == "breakdown":
        assert report["policy"]["overlap"] is False
        assert "#layers: 6" in answer.out
        seconds = dict(
            re.findall(rf"^(\w+) \(per-\w+\): ({NUMBER}\d*) s$", answer.out, re.MULTILINE)
        )
        kinds = ("compute_layer", "load_cache", "store_cache", "load_hidden", "store_hidden")
        assert set(seconds) == {
            "load_weight",
            *(f"{k}_{phase}" for k in kinds for phase in ("prefill", "decode")),
        }
        assert all(
            float(seconds[name]) > 0
            for name in ("load_weight", "compute_layer_decode", "store_cache_prefill")
        )


@pytest.mark.parametrize("mode", ["--cut-gen-len 2", "--debug-mode fewer_batch"])
def test_cut_runs_of_several_blocks(
    mode: str, door: Callable[..., Answer], ids_model: Path, tmp_path: Path
) -> None:
    """With --policy auto and little RAM the 32 benchmark rows are several blocks, whose weights
    come from disk."""
    folder = tmp_path / "deep"
    new = 40
    folder.mkdir()
    config = json.loads((ids_model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 12}))
    spec = find_model(str(folder), None).spec
    shape = BlockShape(1, 1, PROMPT_LEN, (PROMPT_LEN + new - 1,) * spec.num_blocks)
    plan = MemoryPlanner(spec, Policy(1, 1, (0, 0, 0, 0, 100, 0)), 4, True).plan(
        shape, OVERLAPPED[1]
    )
    host = plan.bytes_on("host") + spec.num_weights
    flags = (
        *mode.split(),
        "--path",
        "_DUMMY_",
        "--gen-len",
        new,
        "--host-mem",
        host,
        "--dtype",
        "float32",
    )
    answer = door(*flags, "--no-log", "--json", "report.json", model=folder)
    assert_done(answer)
    report = json.loads(Path("report.json").read_text())
    assert report["extra"]["blocks"] > 1 and report["policy"]["percent"][0] < 100
    assert report["projected"] is True and report["decode"]["tokens"] == 32 * (new - 1)


# ---- Trace


def test_trace_opens_in_a_viewer(door: Callable[..., Answer]) -> None:
    assert_done(door("--percent", *[30] * 6, "--device-mem", "32MiB", "--trace", "trace.json"))
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {name.split()[0] for name in rows.values()} == set(LANES)
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in rows.values()}
    for e in events:
        if e["ph"] == "X":
            spans[rows[e["tid"]]].append((e["ts"], e["ts"] + e["dur"]))
    assert all(spans[lane] for lane in LANES), "something happened on every lane"
    assert min(start for row in spans.values() for start, _ in row) == 0
    rounding = 1e-3
    for name, row in spans.items():
        assert all(end <= start + rounding for (_, end), (start, _) in pairwise(sorted(row))), name


# ---- Budgets


@pytest.mark.parametrize(
    ("flags", "tier"),
    [
        ("--host-mem 1MiB", "host"),
        ("--host-mem 1MiB --percent 100 0 100 0 100 0", "host"),
        ("--device-mem 10KiB --percent 100 0 100 0 100 0", "device"),
        ("--disk-mem 1KiB --percent 100 0 0 0 100 0", "disk"),
    ],
)
def test_what_does_not_fit(flags: str, tier: str, door: Callable[..., Answer]) -> None:
    answer = door(*flags.split())
    assert answer.code == 3
    assert re.fullmatch(r"flex_opt: .+\n", answer.err)
    assert (
        f"--{tier}-mem" in answer.err
        and len(re.findall(r"\d+(\.\d+)? (B|KiB|MiB)", answer.err)) >= 3
    )
    assert not Path("offload").exists() or not list(Path("offload").iterdir())


def test_a_refused_run_leaves_the_last_output_alone_and_writes_no_weights(
    door: Callable[..., Answer], write_jsonl: Callable[..., Path]
) -> None:
    Path("out.jsonl").write_text("yesterday's work\n")
    prompts = write_jsonl({"prompt_token_ids": [4, 5]})
    assert door("--prompts", prompts, "--output", "out.jsonl", "--host-mem", "1MiB").code == 3
    assert Path("out.jsonl").read_text() == "yesterday's work\n"
    assert door("--path", "_DUMMY_", "--host-mem", "1MiB").code == 3
    assert not list(Path("offload").rglob("*.safetensors")), "it could be 60 GB, for nothing"
