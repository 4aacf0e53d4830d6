"""`evaluate helm`: requests out of dry runs, through a batch job, into a cache that is asked as
HELM asks its own."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doors.conftest import Answer

Door = Callable[..., Answer]
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
    cache = {}
    for line in path.read_text().splitlines():
        if line.strip():
            both = json.loads(line)
            request = both["request"]
            result = both["result"]
            cache[json.dumps(request, sort_keys=True)] = result
    return cache


def tokens_of(result: dict[str, Any]) -> list[tuple[str, float]]:
    """What HELM's client makes of an answer."""
    (choice,) = result["choices"]
    assert (
        choice["finish_reason"] in ("stop", "length") and result["request_time"]["batch_size"] == 1
    )
    logprobs = choice["logprobs"]
    sides = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=False
    )
    return [(token, logprob or 0) for token, logprob, top in sides if dict(top or {}) is not None]


@pytest.fixture
def helm(command: Door) -> Door:
    def run(flags: str, code: int = 0) -> Answer:
        out = command(f"evaluate helm {flags}")
        assert out.code == code, out.err
        return out

    return run


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    exported = lines_of(tmp_path / "req.jsonl")
    assert exported == [
        {"scenario": "summarization_xsum", "request": raw_of_client(one)} for one in asked
    ]

    assert job("--input", "req.jsonl", model=words_model).code == 0
    rows = (tmp_path / "out.jsonl").read_text()
    error = {
        "id": "x",
        "custom_id": "line-9",
        "response": None,
        "error": {"code": "invalid_json", "message": "m"},
    }
    plain = {"id": "y", "custom_id": "line-8", "response": {"body": {}}, "error": None}
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
        assert len(tokens_of(result)) == len(result["choices"][0]["logprobs"]["tokens"]) == 4


def test_todays_client(helm: Door, tmp_path: Path) -> None:
    write_run(tmp_path / "s", "a", requests("one", model="together/vicuna-7b-v1.3", random="r1"))
    write_run(tmp_path / "s", "b", requests("two", model="together/llama-2-70b", stop_sequences=[]))
    write_run(
        tmp_path / "s",
        "c",
        [{"model": "together/m", "messages": [{"role": "user", "content": "x"}]}],
    )
    said = helm("export --runs s --output req.jsonl --client helm").out
    assert "left out: 1 not of text alone" in said
    one, two = (line["request"] for line in lines_of(tmp_path / "req.jsonl"))
    assert (one["model"], one["stop"], one["random"]) == (
        "together/vicuna-7b-v1.3",
        ["###", "</s>"],
        "r1",
    )
    assert (two["model"], two["stop"], two["details"], "logprobs" in two) == (
        "together/llama-2-70b",
        None,
        True,
        False,
    )
    helm("export --runs s --output req.jsonl --client helm --request-model meta/llama")
    assert {line["request"]["model"] for line in lines_of(tmp_path / "req.jsonl")} == {"meta/llama"}


def test_what_is_in_the_cache_is_left_out(helm: Door, tmp_path: Path) -> None:
    asked = requests("one", "two")
    write_run(tmp_path / "suite", "a", asked)
    (tmp_path / "cache").mkdir()
    key = json.dumps(raw_of_client(asked[1]), sort_keys=True)
    with sqlite3.connect(tmp_path / "cache" / "together.sqlite") as base:  # as sqlitedict makes it
        base.execute('CREATE TABLE "unnamed" (key TEXT PRIMARY KEY, value BLOB)')
        base.execute('INSERT INTO "unnamed" VALUES (?, ?)', (key, pickle.dumps({"choices": []})))
    base.close()
    assert "1 in the cache" in helm("export --runs suite --output req.jsonl --cache-dir cache").out
    assert [line["request"]["prompt"] for line in lines_of(tmp_path / "req.jsonl")] == ["one"]


def test_lines_without_an_answer_are_counted(helm: Door, tmp_path: Path) -> None:
    write_run(tmp_path / "suite", "a", requests("one", "two"))
    helm("export --runs suite --output req.jsonl")
    request = lines_of(tmp_path / "req.jsonl")[0]["request"]
    choice = {
        "text": "t",
        "finish_reason": "stop",
        "logprobs": {"tokens": ["t"], "token_logprobs": [-1]},
    }
    result = {"choices": [choice]}
    turned = dict(reversed(request.items()))  # another order of keys is the same request
    (tmp_path / "out.jsonl").write_text(json.dumps({"request": turned, "result": result}) + "\n")
    said = helm("import --input out.jsonl --output results.jsonl --requests req.jsonl").out
    assert "1 answers in results.jsonl" in said and "1 requests of req.jsonl have no answer" in said
    (tmp_path / "out.jsonl").write_text(
        json.dumps({"error": {"code": "x"}, "response": None}) + "\n"
    )
    written = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(
        json.dumps({"error": {"code": "x"}, "response": None}) + "\n"
    )
    said = helm("import --input out.jsonl --output results.jsonl", code=4).err
    assert "--input out.jsonl: has no answer to write; left out: 1 errors" in said
    assert (tmp_path / "results.jsonl").read_text() == written != ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("export --output o.jsonl", "--runs: is missing"),
        ("export --runs suite", "--output: is missing"),
        ("export --runs nowhere --output o.jsonl", "--runs nowhere: no such folder"),
        ("export --runs empty --output o.jsonl", "no */scenario_state.json"),
        (
            "export --runs suite --output o.jsonl --organization openai",
            "--organization openai: no request",
        ),
        (
            "export --runs suite --output o.jsonl --cache-dir empty",
            "--cache-dir empty: no together.sqlite",
        ),
        ("export --runs suite --output o.jsonl --cache-dir broken", "is no cache of HELM's"),
        ("export --runs bad --output o.jsonl", "is no run of helm-run (KeyError"),
        ("export --runs worse --output o.jsonl", "not a JSON file"),
        ("import --output o.jsonl", "--input: is missing"),
        ("import --input nowhere.jsonl --output o.jsonl", "--input nowhere.jsonl: No such file"),
        ("import --input torn.jsonl --output o.jsonl", "--input torn.jsonl:1: not valid JSON"),
        ("import --input odd.jsonl --output o.jsonl", "--input odd.jsonl:1: result has no choices"),
        ("import --input odd.jsonl --output odd.jsonl", "is the file of --input too"),
        (
            "import --input empty.jsonl --output o.jsonl --requests torn.jsonl",
            "--requests torn.jsonl:1: is no",
        ),
        (
            "import --input empty.jsonl --output nowhere/o.jsonl",
            "--output nowhere/o.jsonl: the folder",
        ),
    ],
)
def test_refusals(helm: Door, tmp_path: Path, flags: str, said: str) -> None:
    write_run(tmp_path / "suite", "a", requests("one"))
    write_run(tmp_path / "worse", "a", [])
    (tmp_path / "worse" / "a" / "scenario.json").write_text("{")
    for name in ("empty", "broken", "bad/a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "broken" / "together.sqlite").write_text(
        "no database, though it has as many bytes as one would have"
    )
    (tmp_path / "bad" / "a" / "scenario_state.json").write_text("{}")
    (tmp_path / "bad" / "a" / "scenario.json").write_text('{"name": "n"}')
    (tmp_path / "torn.jsonl").write_text('{"request')
    (tmp_path / "odd.jsonl").write_text('{"request": {"prompt": "p"}, "result": {}}')
    (tmp_path / "empty.jsonl").write_text("")
    out = helm(flags, code=2)
    assert said in out.err and len(out.err.splitlines()) == 1
    assert not (tmp_path / "o.jsonl").exists()
