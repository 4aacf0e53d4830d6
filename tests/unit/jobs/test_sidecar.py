"""Settings that an output was begun with, differences of a restart, and damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.jobs.input import scan_input
from flexgen_h2o.jobs.sidecar import (
    Sidecar,
    Status,
    differences,
    read_sidecar,
    read_status,
    sidecar_path,
    status_path,
)

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "policy": {"percent": [1, 2], "overlap": True},
    "eviction": {"name": "h2o"},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n{}\n")
    return path


def sidecar_of(source: Path, *earlier: dict[str, Any]) -> Sidecar:
    scan = scan_input(source)
    return Sidecar(SETTINGS, str(source), scan.nbytes, scan.digest, list(earlier))


def test_it_comes_back_as_it_was_written(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert read_sidecar(output) is None
    one = sidecar_of(source, {"dtype": "bfloat16"})
    one.write(output)
    assert read_sidecar(output) == one
    assert [path.name for path in tmp_path.glob("out*")] == ["out.jsonl.job.json"]
    with pytest.raises(FlexgenError, match=r"job.json: No such file"):
        one.write(tmp_path / "no" / "out.jsonl")


def test_differences_are_named(source: Path) -> None:
    one = sidecar_of(source)
    assert differences(one, SETTINGS, source) == []
    other = {
        **SETTINGS,
        "policy": {"percent": [1, 3], "overlap": True},
        "eviction": {"name": "h2o", "recent": 4},
    }
    assert differences(one, other, source) == [
        "--percent was 1 2 and is 1 3",
        "eviction.recent was not given and is 4",
    ]
    source.write_text("{}\n[]\n")
    assert differences(one, SETTINGS, source) == [f"the input does not begin as {source} did"]


FULL: dict[str, Any] = {"name": "full"}
PLACED: dict[str, Any] = {
    "gpu_batch_size": 3,
    "num_gpu_batches": 1,
    "percent": [100, 0, 100, 0, 100, 0],
}
AUTO = dict.fromkeys(PLACED, "auto")
WHOLE: dict[str, Any] = {"compress_cache": False, "cache_bits": 4, "cache_rotation": False}
PACKED: dict[str, Any] = {**WHOLE, "compress_cache": True, "cache_window": 16}
UNPACKED: dict[str, Any] = {"compress_weight": False, "weight_bits": 4}
WEIGHTS = "--weight-bits was not given and is 4"
H2O: dict[str, Any] = {"name": "h2o", "while_decoding": True}
SIZED: dict[str, Any] = {**H2O, "kv_bytes": 0.2, "protect": 4}
MIXED: dict[str, Any] = {**PACKED, "cache_bits": "4/3", "cache_window": 32}


def tenth(share: float, **more: Any) -> dict[str, Any]:
    return {**H2O, "heavy_ratio": share, "recent_ratio": share, **more}


# Settings before and after, as (policy, eviction), and what is named.
TYPED: tuple[tuple[Any, Any, Any, Any, str], ...] = (
    (WHOLE, FULL, PACKED, FULL, "--cache-bits was 16 and is 4"),
    (PACKED, FULL, WHOLE, FULL, "--cache-bits was 4 and is 16"),
    (PACKED, FULL, {**PACKED, "cache_window": 8}, FULL, "--cache-window was 16 and is 8"),
    (UNPACKED, FULL, {**UNPACKED, "compress_weight": True}, FULL, WEIGHTS),
    (WHOLE, FULL, WHOLE, tenth(0.1), "--eviction was full and is h2o (of --hh-ratio 0.1)"),
    (WHOLE, tenth(0.1), WHOLE, tenth(0.2), "--hh-ratio was 0.1 and is 0.2"),
    (WHOLE, FULL, MIXED, SIZED, "--kv-bytes was not given and is 20%"),
    (MIXED, SIZED, WHOLE, FULL, "--kv-bytes was 20% and is not given"),
    (MIXED, SIZED, PACKED, SIZED, "--cache-bits was 4/3 (of --kv-bytes 20%) and is 4"),
    (MIXED, SIZED, PACKED, {**SIZED, "kv_bytes": 0.3}, "--kv-bytes was 20% and is 30%"),
    (MIXED, {**H2O, "kv_bytes": 0.2}, WHOLE, tenth(0.1), "--kv-bytes was 20% and is not given"),
    (AUTO, FULL, PLACED, FULL, "--gpu-batch-size was auto and is 3"),
    (PLACED, FULL, AUTO, FULL, "--gpu-batch-size was 3 and is auto"),
)


def test_differences_are_named_by_the_flags_that_are_typed(source: Path) -> None:
    """What follows from one flag is not named beside it, and something always is."""
    for policy, eviction, policy_now, eviction_now, says in TYPED:
        one = replace(sidecar_of(source), settings={"policy": policy, "eviction": eviction})
        now = {"policy": policy_now, "eviction": eviction_now}
        found = differences(one, now, source)
        assert found == [says], says
    settings = ({"texts": {"chat": False}}, {"template": {"enable_thinking": False}})
    one = replace(sidecar_of(source), settings=settings[0])
    assert differences(one, settings[1], source) == [
        "--chat was --no-chat and is not given",
        "--no-thinking was not given and is given",
    ]


def test_a_setting_that_is_gone_is_refused_unless_it_changed_nothing(source: Path) -> None:
    """A sidecar of an older version, where layers could keep different shares."""
    one = sidecar_of(source)

    def found(schedule: str) -> list[str]:
        eviction = {**SETTINGS["eviction"], "layer_schedule": schedule}
        return differences(
            replace(one, settings={**SETTINGS, "eviction": eviction}), SETTINGS, source
        )

    assert found("uniform") == []
    assert found("pyramid") == [
        "eviction.layer_schedule was pyramid, which this version does not have"
    ]


INFINITE = float("inf")
NO_JSON = ["", "[]", "[" * 100_000]
INPUT = {"path": "in.jsonl", "bytes": 5, "digest": ""}
SIDECARS: list[dict[str, Any] | str] = [
    *NO_JSON,
    *({"input": INPUT | change} for change in ({"bytes": INFINITE}, {"bytes": -1}, {"path": []})),
    {"input": 3},
    {"settings": [["dtype", "float32"]]},
    {"earlier": [3]},
    {"schema": None},
]
STATUSES: list[dict[str, Any] | str] = [
    *NO_JSON,
    {"done": INFINITE},
    {"seconds": float("nan")},
    {"rows": -1},
    {"done": True},
    {"tokens": 10**300},
    {"eta_s": "x"},
    {"state": None},
    {"unknown": 1},
    {"peak_bytes": {"host": "x"}},
]


@pytest.mark.parametrize(
    ("good", "changes", "path_of", "read", "says"),
    [
        (Sidecar({}, "in.jsonl", 5, ""), SIDECARS, sidecar_path, read_sidecar, "sidecar"),
        (Status(rows=3), STATUSES, status_path, read_status, "status"),
    ],
    ids=["sidecar", "status"],
)
def test_a_damaged_file_is_refused(
    good: Sidecar | Status,
    changes: list[dict[str, Any] | str],
    path_of: Callable[[Path], Path],
    read: Callable[[Path], object],
    says: str,
    tmp_path: Path,
) -> None:
    """Each changes some fields of a good file, or its whole text. 1e999 is not finite."""
    output = tmp_path / "out.jsonl"
    good.write(output)
    path = path_of(output)
    whole = path.read_text()
    read(output)
    for change in changes:
        text = change if isinstance(change, str) else json.dumps({**json.loads(whole), **change})
        path.write_text(text.replace("Infinity", "1e999"))
        with pytest.raises(UsageError, match=rf"{path}.*(is not the {says} of a job|schema is)"):
            read(output)


def test_no_job_has_a_status_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--status: no job has written"):
        read_status(tmp_path / "out.jsonl")
