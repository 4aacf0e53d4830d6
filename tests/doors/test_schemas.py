"""The JSON Schemas of docs/reference/files.md: valid for what the code writes, and of one mind with
what it reads."""

from __future__ import annotations

import json
from contextlib import nullcontext
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
    write_policy,
)
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.input import Line
from flexgen_h2o.jobs.requests import (
    FIELDS,
    IGNORED_IF_NONE,
    ONLY,
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
from tests.doors.conftest import Door, read_json, read_lines

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "docs" / "reference" / "schemas"
POLICIES = [p for p in sorted((ROOT / "policies").glob("*/*.json")) if p.parent.name != "profiles"]
PROFILES = sorted((ROOT / "policies" / "profiles").glob("*.json"))
# Lines that the engine takes, and lines that it does not.
GOOD = r"""
{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 3}}
{"custom_id": "b", "url": "/v1/completions", "body": {"prompt_token_ids": [5, 6], "stop": ["a"], "n": 1}}
{"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", "tools": []}}
{"prompt": "x", "note": {"anything": 1}}
{"custom_id": "n", "url": "/v1/completions", "method": null, "body": {"prompt": "x", "audio": null}}
{"custom_id": "t", "url": "/v1/completions", "body": {"prompt": "x", "tools": [{}], "tool_choice": "none"}}
{"custom_id": "s", "url": "/v1/completions", "body": {"prompt": "x", "seed": -1, "stop_token_ids": [3]}}
{"prompt": [5, 9], "temperature": 0.5, "top_k": -1, "seed": null}
{"scenario": {}, "request": {"prompt": "x", "max_tokens": 2, "more": 1}}
{"article": "x", "max_tokens": 2, "summary_gt": "y"}
{"custom_id": "l", "url": "/v1/completions", "body": {"prompt": ["x"]}}
{"prompt": [[5, 6]], "stream_options": {"include_usage": true}}
{"text": "x", "max_tokens": 2}
{"prompt": "x", "max_new_tokens": 2, "label": 3, "add_special_tokens": false}
{"custom_id": "q", "url": "/v1/completions", "body": {"prompt": "x", "truncate_prompt_tokens": -1}}
"""  # noqa: E501
BAD = r"""
{"text": 3}
{"messages": []}
{"custom_id": "m", "url": "/v1/completions", "body": {"prompt": ["x", "y"]}}
{"custom_id": "o", "url": "/v1/completions", "body": {"prompt": "x", "stream_options": 3}}
{"custom_id": "p", "url": "/v1/completions", "body": {"prompt": "x", "documents": [{}]}}
{"custom_id": "p2", "url": "/v1/completions", "body": {"prompt": "x", "truncate_prompt_tokens": 0}}
{"custom_id": "u", "url": "/v1/completions", "body": {"prompt": "x", "tools": [{}]}}
{"custom_id": "v", "url": "/v1/completions", "body": {"prompt": "x", "stop_token_ids": [-3]}}
{"custom_id": "w", "url": "/v1/completions", "body": {"prompt": "x", "reasoning_effort": "low"}}
{"custom_id": "", "prompt": "x"}
{"custom_id": "d", "url": "/v1/embeddings", "body": {"prompt": "x"}}
{"custom_id": "e", "url": "/v1/completions", "body": {"prompt": "x", "whatever": 1}}
{"custom_id": "f", "url": "/v1/completions", "body": {"prompt": "x", "n": 2}}
{"url": "/v1/completions", "body": {"prompt": "x"}}
{"custom_id": "g", "url": "/v1/completions", "body": {}}
{"prompt": "x", "temperature": -1}
{"prompt": "x", "temperature": 2.5}
{"prompt": 7}
{}
"""
INPUT = [(line, lines is GOOD) for lines in (GOOD, BAD) for line in lines.split("\n") if line]


def problems(name: str, value: Any) -> list[str]:
    schema = read_json(SCHEMAS / f"{name}.schema.json")
    Draft202012Validator.check_schema(schema)
    return [
        f"{error.json_path}: {error.message:.200}"
        for error in Draft202012Validator(schema).iter_errors(value)
    ]


def names(name: str, *where: str) -> set[str]:
    part = read_json(SCHEMAS / f"{name}.schema.json")
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
        schema = read_json(SCHEMAS / "batch-input.schema.json")
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
        assert shown.keys() == FIELDS - others
        for name in shown:
            only = ONLY.get(name)
            if only is not None and name not in IGNORED_IF_NONE:
                assert shown[name] == {"enum": [*only, None]}, name


def test_policies_and_profiles_are_valid(tmp_path: Path) -> None:
    write_policy(
        tmp_path / "p.json", SavedPolicy(Policy(compress_cache=True, cache_bits=3), model="m")
    )
    for path in [tmp_path / "p.json", *POLICIES]:
        body = read_json(path)
        later = {"cache_rotation": False}  # which older files lack
        assert problems("policy", later | body | {"schema": POLICY_SCHEMA}) == []
    for path in PROFILES:
        assert problems("profile", profile_from_json(read_json(path)).to_json()) == []
    assert problems("profile", nominal_profile(True).to_json()) == []


def test_lines_are_taken_by_both_or_by_none(words_model: Path) -> None:
    reader = RequestReader(find_model(str(words_model), None, None), SamplingParams())
    for text, is_good in INPUT:
        assert (problems("batch-input", json.loads(text)) == []) is is_good, text
        with nullcontext() if is_good else pytest.raises(RowError):
            reader.read(Line(1, text.encode()))


def test_a_job_writes_what_the_schemas_say(job: Door, tmp_path: Path, words_model: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(text + "\n" for text, _ in INPUT))
    ended = job("--gen-len 4", model=words_model)
    assert ended.code == 0, ended.err
    rows = read_lines(tmp_path / "out.jsonl")
    assert len(rows) == len(INPUT) and sum(row["error"] is None for row in rows) == sum(
        good for _, good in INPUT
    )
    assert [problem for row in rows for problem in problems("batch-output", row)] == []
    assert problems("batch-sidecar", read_json(tmp_path / "out.jsonl.job.json")) == []
    assert problems("batch-status", read_json(tmp_path / "out.jsonl.status.json")) == []
    half = rows[0] | {"error": None, "response": None}
    assert problems("batch-output", half)
