"""The JSON Schemas of docs/reference/files.md: valid for what the code writes, and of one mind with
what it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from flexgen_h2o.core.config import (
    ABOUT,
    POLICY_SCHEMA,
    Policy,
    SavedPolicy,
    read_policy,
    write_policy,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.input import Line
from flexgen_h2o.jobs.requests import (
    FIELDS,
    IGNORED_IF_NONE,
    TEMPLATE_FIELDS,
    URLS,
    RequestReader,
    RowError,
)
from flexgen_h2o.jobs.sidecar import Status
from flexgen_h2o.models.load import find_model
from flexgen_h2o.planner.profile import (
    ComputeRates,
    HardwareProfile,
    nominal_profile,
    profile_from_json,
)
from tests.doors.conftest import Answer

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "docs" / "reference" / "schemas"
POLICIES = [p for p in sorted((ROOT / "policies").glob("*/*.json")) if p.parent.name != "profiles"]
PROFILES = sorted((ROOT / "policies" / "profiles").glob("*.json"))
INPUT = (  # lines, and does the engine take them?
    (
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x", "max_tokens": 3},
        },
        True,
    ),
    (
        {
            "custom_id": "b",
            "url": "/v1/completions",
            "body": {"prompt_token_ids": [5, 6], "stop": ["a"], "n": 1},
        },
        True,
    ),
    ({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", "tools": []}}, True),
    ({"prompt": "x", "note": {"anything": 1}}, True),
    (
        {
            "custom_id": "n",
            "url": "/v1/completions",
            "method": None,
            "body": {"prompt": "x", "audio": None},
        },
        True,
    ),
    (
        {
            "custom_id": "t",
            "url": "/v1/completions",
            "body": {"prompt": "x", "tools": [{}], "tool_choice": "none"},
        },
        True,
    ),
    (
        {
            "custom_id": "s",
            "url": "/v1/completions",
            "body": {"prompt": "x", "seed": -1, "stop_token_ids": [3]},
        },
        True,
    ),
    ({"prompt": [5, 9], "temperature": 0.5, "top_k": -1, "seed": None}, True),
    ({"scenario": {}, "request": {"prompt": "x", "max_tokens": 2, "more": 1}}, True),
    ({"article": "x", "max_tokens": 2, "summary_gt": "y"}, True),
    ({"custom_id": "l", "url": "/v1/completions", "body": {"prompt": ["x"]}}, True),
    ({"prompt": [[5, 6]], "stream_options": {"include_usage": True}}, True),
    ({"text": "x", "max_tokens": 2}, True),
    ({"text": 3}, False),
    ({"messages": []}, False),
    ({"custom_id": "m", "url": "/v1/completions", "body": {"prompt": ["x", "y"]}}, False),
    (
        {"custom_id": "o", "url": "/v1/completions", "body": {"prompt": "x", "stream_options": 3}},
        False,
    ),
    (
        {
            "custom_id": "p",
            "url": "/v1/completions",
            "body": {"prompt": "x", "add_special_tokens": False},
        },
        False,
    ),
    ({"custom_id": "u", "url": "/v1/completions", "body": {"prompt": "x", "tools": [{}]}}, False),
    (
        {
            "custom_id": "v",
            "url": "/v1/completions",
            "body": {"prompt": "x", "stop_token_ids": [-3]},
        },
        False,
    ),
    (
        {
            "custom_id": "w",
            "url": "/v1/completions",
            "body": {"prompt": "x", "reasoning_effort": "low"},
        },
        False,
    ),
    ({"custom_id": "", "prompt": "x"}, False),
    ({"custom_id": "d", "url": "/v1/embeddings", "body": {"prompt": "x"}}, False),
    ({"custom_id": "e", "url": "/v1/completions", "body": {"prompt": "x", "whatever": 1}}, False),
    ({"custom_id": "f", "url": "/v1/completions", "body": {"prompt": "x", "n": 2}}, False),
    ({"url": "/v1/completions", "body": {"prompt": "x"}}, False),
    ({"custom_id": "g", "url": "/v1/completions", "body": {}}, False),
    ({"prompt": "x", "temperature": -1}, False),
    ({"prompt": 7}, False),
    ({}, False),
)


def problems(name: str, value: Any) -> list[str]:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    return [
        f"{error.json_path}: {error.message:.200}"
        for error in Draft202012Validator(schema).iter_errors(value)
    ]


def names(name: str, *where: str) -> set[str]:
    part = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    for key in where:
        part = part[key]
    return set(part["properties"])


def test_fields_are_those_of_the_code() -> None:
    assert names("policy") == {"schema", *ABOUT, *(f.name for f in fields(Policy))}
    assert names("profile") == {"schema", *(f.name for f in fields(HardwareProfile))}
    assert names("profile", "properties", "compute", "additionalProperties") == {
        f.name for f in fields(ComputeRates)
    }
    assert names("batch-status") == {f.name for f in fields(Status)}


def test_fields_of_a_line_are_those_of_the_reader() -> None:
    """And so are their only values."""
    for url in URLS:
        schema = json.loads((SCHEMAS / "batch-input.schema.json").read_text())
        [body] = [
            one["properties"]["body"]["properties"]
            for one in schema["anyOf"]
            if one.get("properties", {}).get("url") == {"const": url}
        ]
        shown = schema["$defs"]["common"]["properties"] | body
        is_chat = URLS[url] == "chat"
        others = (
            {"prompt", "prompt_token_ids", "echo"}
            if is_chat
            else {"messages", "top_logprobs", *TEMPLATE_FIELDS}
        )
        assert shown.keys() == FIELDS.keys() - others
        for name in shown:
            only = FIELDS[name].values(is_chat)
            if only is not None and name not in IGNORED_IF_NONE:
                assert shown[name] == {"enum": [*only, None]}, name


def test_policies_and_profiles_are_valid(tmp_path: Path) -> None:
    write_policy(
        tmp_path / "p.json", SavedPolicy(Policy(compress_cache=True, cache_bits=3), model="m")
    )
    for path in [tmp_path / "p.json", *POLICIES]:
        body = json.loads(path.read_text())
        later = {"cache_rotation": False}  # which older files lack
        assert problems("policy", later | body | {"schema": POLICY_SCHEMA}) == []
    for path in PROFILES:
        assert problems("profile", profile_from_json(json.loads(path.read_text())).to_json()) == []
    assert problems("profile", nominal_profile(True).to_json()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_batch_size": 0},
        {"percent": [1, 2]},
        {"percent": [1, 2, 3, 4, 5, 101]},
        {"cache_bits": 5},
        {"schema": 9},
        {"cache_window": 3},
        {"cache_rotation": 1},
        {"attn_sparsity": 0},
        {"overlap": 1},
        {"unknown": 1},
        {"workload": "text"},
    ],
)
def test_a_bad_policy_is_refused_by_both(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_policy(path, SavedPolicy(Policy()))
    bad = json.loads(path.read_text()) | change
    path.write_text(json.dumps(bad))
    assert problems("policy", bad)
    with pytest.raises(UsageError, match=next(iter(change))):
        read_policy(path)


@pytest.mark.parametrize(
    ("key", "value"), [("step_s", -1), ("h2d_bytes_per_s", 0), ("compute", {}), ("more", 1)]
)
def test_a_bad_profile_is_refused_by_both(key: str, value: Any) -> None:
    bad = nominal_profile(True).to_json() | {key: value}
    assert problems("profile", bad)
    with pytest.raises(UsageError, match=key):
        profile_from_json(bad)


def test_lines_are_taken_by_both_or_by_none(words_model: Path) -> None:
    reader = RequestReader(find_model(str(words_model), None, None), SamplingParams())
    for value, is_good in INPUT:
        line = Line(1, json.dumps(value).encode())
        assert (problems("batch-input", value) == []) is is_good, value
        if is_good:
            reader.read(line)
        else:
            with pytest.raises(RowError):
                reader.read(line)


def test_a_job_writes_what_the_schemas_say(
    job: Callable[..., Answer], tmp_path: Path, words_model: Path
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(value) + "\n" for value, _ in INPUT))
    ended = job("--gen-len", 4, model=words_model)
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == len(INPUT) and sum(row["error"] is None for row in rows) == sum(
        good for _, good in INPUT
    )
    assert [problem for row in rows for problem in problems("batch-output", row)] == []
    assert (
        problems("batch-sidecar", json.loads((tmp_path / "out.jsonl.job.json").read_text())) == []
    )
    assert (
        problems("batch-status", json.loads((tmp_path / "out.jsonl.status.json").read_text())) == []
    )
    half = rows[0] | {"error": None, "response": None}
    assert problems("batch-output", half)
