"""What an output was begun with, and what a restart would mix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.jobs.input import scan_input
from flexgen_h2o.jobs.sidecar import Sidecar, differences, read_sidecar, sidecar_path

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


def test_it_comes_back_as_it_was_written(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert read_sidecar(output) is None
    one = replace(Sidecar.of(SETTINGS, source, scan_input(source)), earlier=[{"dtype": "bfloat16"}])
    one.write(output)
    assert read_sidecar(output) == one
    assert [path.name for path in tmp_path.glob("out*")] == ["out.jsonl.job.json"]


def test_differences_are_named(source: Path) -> None:
    one = Sidecar.of(SETTINGS, source, scan_input(source))
    scan = scan_input(source, one.input_bytes)
    assert differences(one, SETTINGS, scan) == []
    other = {**SETTINGS, "policy": {"percent": [1, 3], "overlap": True}, "eviction": {"name": "h2o", "recent": 4}}
    assert differences(one, other, scan) == [
        "policy.percent was [1, 2] and is [1, 3]",
        "eviction.recent was null and is 4",
    ]
    source.write_text("{}\n[]\n")
    assert differences(one, SETTINGS, scan_input(source, one.input_bytes)) == [
        f"the input does not begin as {source} did"
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not the sidecar"),
        ("[]", "is not the sidecar"),
        ('{"schema": 1}', "is not the sidecar"),
        ('{"schema": 2}', "schema is 2, this version reads 1"),
        (json.dumps({"schema": 1, "settings": 3, "input": {}, "earlier": []}), "is not the sidecar"),
    ],
)
def test_what_is_no_sidecar_is_refused(text: str, says: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    sidecar_path(output).write_text(text)
    with pytest.raises(UsageError, match=says):
        read_sidecar(output)


def test_a_sidecar_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FlexgenError, match=r"job.json: No such file"):
        Sidecar.of(SETTINGS, source, scan_input(source)).write(tmp_path / "no" / "out.jsonl")
