"""`evaluate summarize` run to its end on articles of its own: the grid, its files, and a
restart."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import H2O, LLM, Full, Policy, SamplingParams
from flexgen_h2o.evaluation import articles, summarize
from tests.doors.conftest import POSITIONS, Answer, Door, read_json, read_lines

INSTRUCTION = "Sum up:\n"
NEW = 5
GRID = "--output-dir d --hh-size 3 6 --recent-size 4 --greedy"


def unigrams(text: str, reference: str) -> list[float]:
    """In place of ROUGE, which is an extra: the share of a summary's letters that the reference
    has, six times."""
    return [len(set(text) & set(reference)) / max(1, len(set(text)))] * len(articles.METRICS)


@pytest.fixture(autouse=True)
def _scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summarize, "rouge_of", unigrams)
    monkeypatch.setattr(summarize, "NEEDED", {})


@pytest.fixture
def records(write_jsonl: Callable[..., Path]) -> list[dict[str, Any]]:
    """Three articles of h2o_hf's form in in.jsonl; the last is too long for the model's
    positions."""
    sampling = {
        "temperature": 0.3,
        "stop": ["###"],
        "max_tokens": NEW,
        "top_p": 1.0,
        "n": 1,
        "logprobs": 1,
    }
    texts = ["def read(path):", "import os", "x = 1\n" * POSITIONS]
    made = [
        {"article": f"{text}\n\n{INSTRUCTION}", "summary_gt": f"the reference {i}", **sampling}
        for i, text in enumerate(texts)
    ]
    write_jsonl(*made, name="in.jsonl")
    return made


@pytest.fixture
def run(command: Door, words_model: Path, records: object) -> Door:
    def run(flags: str, code: int = 0) -> Answer:
        named = "" if "--model" in flags else f"--model {shlex.quote(str(words_model))}"
        engine = f"{named} --dtype float32 --offload-dir o --gpu-batch-size 2"
        source = "" if "--input" in flags else "--input in.jsonl"
        out = command(f"evaluate summarize {source} {engine} --resamples 20 {flags}")
        assert out.code == code, out.err
        return out

    return run


def rows_of(path: Path) -> list[dict[str, Any]]:
    return sorted(read_lines(path), key=lambda row: int(row["custom_id"].removeprefix("line-")))


def test_a_grid(
    run: Door, records: list[dict[str, Any]], words_model: Path, tmp_path: Path
) -> None:
    """The summaries are those that each policy writes; scores, KV and the layout say the same."""
    run(f"{GRID} --policies full h2o --json r.json --kvpress-dir kp")
    result = read_json(tmp_path / "r.json")
    assert (result["articles"], result["cut"], result["skipped"]) == (3, 1, 0)
    evictions = {"full": Full(), "h2o-3+4": H2O(None, None, 3, 4), "h2o-6+4": H2O(None, None, 6, 4)}
    for cell, (name, eviction) in zip(result["cells"], evictions.items(), strict=True):
        rows = rows_of(tmp_path / "d" / f"{name}.jsonl")
        requests = [row["request"] for row in rows]
        assert requests[:2] == [{**one, "temperature": 0.0} for one in records[:2]]
        prompts = [one["article"] for one in requests]
        with LLM(words_model, Policy(2, 2), eviction, dtype="float32", offload_dir="o") as llm:
            texts = [one.text for one in llm.generate(prompts, SamplingParams(NEW, stop="###"))]
            lengths = [len(llm.model.encode(prompt)) for prompt in prompts]
        # Cut by no more than a word, or a few.
        assert max(lengths) <= POSITIONS - NEW < max(lengths) + 8
        assert [row["result"]["choices"][0]["text"] for row in rows] == texts
        scores = [unigrams(t, one["summary_gt"])[0] for t, one in zip(texts, requests, strict=True)]
        assert cell["scores"]["rouge2"]["value"] == pytest.approx(sum(scores) / 3)
        most = 10**9 if name == "full" else eviction.heavy_size + eviction.recent_size + 1
        columns = sum(min(most, n + NEW - 1) for n in lengths)
        assert cell["kv_share"] == pytest.approx(columns / sum(n + NEW - 1 for n in lengths))
        # keys and values; layers; width; fp32
        assert cell["kv_bytes"] == pytest.approx(columns / 3 * 2 * 2 * 32 * 4)
        [path] = tmp_path.glob(f"kp/in__*__{cell['policy']}__{1 - cell['kv_share']:.2f}/*.csv")
        with path.open(newline="") as file:
            assert [one["predicted_answer"] for one in csv.DictReader(file)] == texts
    first, second = (cell["scores"]["rouge1"]["value"] for cell in result["cells"][:2])
    assert result["cells"][1]["less_first"]["rouge1"]["value"] == pytest.approx(second - first)


def test_a_restart_does_what_is_missing(run: Door, tmp_path: Path) -> None:
    run(f"{GRID} --policies local h2o --json whole.json")
    torn = tmp_path / "d" / "h2o-3+4.jsonl"
    before = {path: path.read_text() for path in (tmp_path / "d").glob("*+*.jsonl")}
    torn.write_text(before[torn][: len(before[torn]) // 2])  # as a kill leaves it
    out = run(f"{GRID} --policies local h2o --json again.json")
    assert out.out.count("nothing was left to do") == 3
    whole, again = (read_json(tmp_path / f"{name}.json")["cells"] for name in ("whole", "again"))
    for one, other in zip(whole, again, strict=True):
        if one["title"] != "h2o 3+4":
            assert (
                one == other and one["tokens_per_s"] > 0
            )  # the speed is of the run that did the rows
        assert one["scores"] == other["scores"]
    assert {path: sorted(map(_tokens, rows_of(path))) for path in before} == {
        path: sorted(_tokens(json.loads(line)) for line in text.split("\n") if line)
        for path, text in before.items()
    }
    run(f"{GRID} --policies h2o-norm --json more.json")  # another policy goes into the same folder
    assert len(read_json(tmp_path / "d" / "summary.json")["cells"]) == 6
    out = run(f"{GRID} --policies h2o --gen-len 3", code=2)
    assert "requests.jsonl: has requests of other articles, or was made with other flags" in out.err


def _tokens(row: dict[str, Any]) -> tuple[str, list[int]]:
    return row["custom_id"], row["response"]["body"]["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("flags", "name", "newcomer"),
    [("h2o --kv-budget 0.5", "h2o-0.5", 1), ("h2o:kv_bytes=0.5", "h2o-kv_bytes=0.5", 0)],
)
def test_a_share_of_the_whole_sequence_is_kept(
    flags: str, name: str, newcomer: int, run: Door, tmp_path: Path
) -> None:
    """newcomer: columns beside the share; bytes count the newest one's too."""
    run(f"--output-dir d --policies {flags} --json r.json")
    (cell,) = read_json(tmp_path / "r.json")["cells"]
    usage = [
        row["response"]["body"]["usage"]["prompt_tokens"]
        for row in rows_of(tmp_path / "d" / f"{name}.jsonl")
    ]
    assert cell["kv_columns"] == pytest.approx(
        sum(int(0.5 * (n + NEW)) + newcomer for n in usage) / 3
    )


def test_a_dry_run_plans_the_largest_cell(run: Door) -> None:
    assert (
        "h2o, 25 KV slots per prompt"
        in run("--output-dir d --policies h2o --hh-size 3 20 --recent-size 4 --dry-run").out
    )
