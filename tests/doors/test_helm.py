"""`evaluate helm`: requests out of dry runs, through a batch job, into a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doors.conftest import Answer, Door, read_lines

# Fields of HELM's Request as scenario_state.json has them: those that are None are left out.
REQUEST = {
    "model": "together/opt-6.7b",
    "embedding": False,
    "prompt": "###\nArticle: a b\n\nSum:\n",
    "temperature": 0.3,
    "num_completions": 1,
    "top_k_per_token": 1,
    "max_tokens": 4,
    "stop_sequences": ["###"],
    "echo_prompt": False,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


def requests(*prompts: str, **fields: Any) -> list[dict[str, Any]]:
    return [{**REQUEST, "prompt": prompt, **fields} for prompt in prompts]


def write_run(
    suite: Path, name: str, asked: list[dict[str, Any]], model: str = "together/opt-6.7b"
) -> None:
    """What `helm-run --dry-run` leaves of a run."""
    folder = suite / name
    folder.mkdir(parents=True)
    (folder / "scenario.json").write_text(
        json.dumps({"name": "summarization_xsum", "description": "d", "tags": []})
    )
    states = [
        {"instance": {"id": f"id{i}"}, "train_trial_index": 0, "request": one}
        for i, one in enumerate(asked)
    ]
    state = {"adapter_spec": {"method": "generation", "model": model}, "request_states": states}
    (folder / "scenario_state.json").write_text(json.dumps(state))


def raw_of_client(request: dict[str, Any]) -> dict[str, Any]:
    """The together client of h2o_hf's HELM, convert_to_raw_request; the order of its keys."""
    return {
        "request_type": "language-model-inference",
        "model": "opt-6.7b-ft-tp1",
        "prompt": request["prompt"],
        "temperature": request["temperature"],
        "n": 1,
        "max_tokens": request["max_tokens"],
        "best_of": 1,
        "logprobs": 1,
        "stop": request["stop_sequences"] or None,
        "echo": False,
        "top_p": 1,
    }


def imported(path: Path) -> dict[str, dict[str, Any]]:
    """HELM's import_results: its cache, by request_to_key."""
    return {json.dumps(r["request"], sort_keys=True): r["result"] for r in read_lines(path)}


@pytest.fixture
def helm(command: Door) -> Door:
    def run(flags: str, code: int = 0) -> Answer:
        out = command(f"evaluate helm {flags}")
        assert out.code == code, out.err
        return out

    return run


def test_out_through_a_job_and_back(
    helm: Door, job: Door, words_model: Path, tmp_path: Path
) -> None:
    asked = requests("one", "two\n", "é\u2028 three")
    write_run(tmp_path / "suite", "xsum:model=together_opt-6.7b", [*asked, asked[0]])
    write_run(
        tmp_path / "suite", "other", requests("four", model="openai/davinci"), "openai/davinci"
    )
    said = helm("export --runs suite --output req.jsonl").out
    assert (
        "3 requests in req.jsonl; left out: " in said
        and "1 repeated" in said
        and "1 of other organ" in said
    )
    exported = read_lines(tmp_path / "req.jsonl")
    assert exported == [
        {"scenario": "summarization_xsum", "request": raw_of_client(one)} for one in asked
    ]

    assert job("--input req.jsonl", model=words_model).code == 0
    rows = (tmp_path / "out.jsonl").read_text()
    error = {"custom_id": "line-9", "response": None, "error": {"code": "x", "message": "m"}}
    plain = {"custom_id": "line-8", "response": {"body": {}}, "error": None}
    (tmp_path / "out.jsonl").write_text(f"{rows}{json.dumps(error)}\n{json.dumps(plain)}\n")
    said = helm("import --input out.jsonl --output results.jsonl --requests req.jsonl").out
    assert (
        "3 answers in results.jsonl; left out: 1 errors, 1 not of HELM" in said
        and "no answer" not in said
    )
    cache = imported(tmp_path / "results.jsonl")
    answers = [json.loads(line) for line in rows.split("\n") if line]  # U+2028 is within a line
    texts = {row["request"]["prompt"]: row["result"]["choices"][0]["text"] for row in answers}
    assert len(cache) == 3
    for one in asked:
        result = cache[json.dumps(raw_of_client(one), sort_keys=True)]  # as helm-run looks it up
        assert result["choices"][0]["text"] == texts[one["prompt"]]
        assert len(result["choices"][0]["logprobs"]["tokens"]) == 4
        assert result["request_time"]["batch_size"] == 1
