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
        "--percent was [1, 2] and is [1, 3]",
        "eviction.recent was null and is 4",
    ]
    source.write_text("{}\n[]\n")
    assert differences(one, SETTINGS, source) == [f"the input does not begin as {source} did"]


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
        'eviction.layer_schedule was "pyramid", which this version does not have'
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


def check_damaged(
    path: Path,
    changes: list[dict[str, Any] | str],
    read: Callable[[Path], object],
    output: Path,
    says: str,
) -> None:
    """Each change of a good file, of some fields or of the whole text, is a UsageError. 1e999 is
    not finite."""
    good = path.read_text()
    read(output)
    for change in changes:
        text = change if isinstance(change, str) else json.dumps({**json.loads(good), **change})
        path.write_text(text.replace("Infinity", "1e999"))
        with pytest.raises(UsageError) as error:
            read(output)
        assert str(path) in str(error.value) and (
            says in str(error.value) or "schema is" in str(error.value)
        ), change
        assert "\n" not in str(error.value)


def test_a_damaged_sidecar_is_refused(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    sidecar_of(source).write(output)
    check_damaged(
        sidecar_path(output), SIDECARS, read_sidecar, output, "is not the sidecar of a job"
    )


def test_a_damaged_status_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    Status(rows=3).write(output)
    check_damaged(status_path(output), STATUSES, read_status, output, "is not the status of a job")
    status_path(output).unlink()
    with pytest.raises(UsageError, match="--status: no job has written"):
        read_status(output)
