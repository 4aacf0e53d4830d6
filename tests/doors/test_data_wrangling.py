"""`evaluate data-wrangling` run to its end: predictions, metrics, and a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexgen_h2o import H2O, LLM, Policy, SamplingParams
from tests.doors.conftest import Answer, Door, read_json
from tests.unit.evaluation.wrangling import BEER, HOSPITAL, RESTAURANT, write_folder


@pytest.fixture
def wrangle(command: Door, tmp_path: Path) -> Door:
    for name, files in (("Beer", BEER), ("Hospital", HOSPITAL), ("Restaurant", RESTAURANT)):
        write_folder(tmp_path / name, files)
    usual = "--offload-dir o --gpu-batch-size 4 --dtype float32"

    def run(flags: str) -> Answer:
        model = "" if "--model" in flags else "--model opt-tiny"
        return command(f"evaluate data-wrangling {model} {usual} {flags}")

    return run


def results(tmp_path: Path, *parts: str) -> tuple[Path, dict[str, object], list[dict[str, object]]]:
    [folder] = tmp_path.joinpath("outputs", *parts).iterdir()
    lines = (folder / "trial_0.jsonl").read_text().splitlines()
    return (
        folder,
        read_json(folder / "metrics.json"),
        [json.loads(line) for line in lines],
    )


def test_predictions_are_what_the_model_writes(wrangle: Door, tmp_path: Path) -> None:
    answer = wrangle("--data-dir Hospital --do-test --k 1 --json m.json --eviction h2o --hh-size 4")
    assert answer.code == 0, answer.err
    folder, found, rows = results(tmp_path, "Hospital", "test", "default")
    assert [row["label"] for row in rows] == ["Yes", "No"]
    first, second = (str(row["prompt"]) for row in rows)
    example, _, question = first.partition("\n\n")
    assert example in {
        "Is there a x spelling error in City: boaz? No",
        "Is there a x spelling error in Phone: 2053258100? No",
        "Is there a x spelling error in City: birmxngham? Yes",
    }
    assert question == "Is there a x spelling error in City: birmxngham?" and second.startswith(
        example
    )
    with LLM("opt-tiny", Policy(), H2O(heavy_size=4), dtype="float32", offload_dir="o") as llm:
        outs = llm.generate([first, second], SamplingParams(max_tokens=3, stop="\n"))
    assert [row["prediction"] for row in rows] == [one.text for one in outs]
    assert found == read_json(tmp_path / "m.json")
    assert found["rows"] == 2 and found["task"] == "error_detection" and found["errors"] == 0
    assert (
        "| `Hospital` | error detection | test | 2 |" in answer.out
        and str(folder.name) in answer.out
    )


def test_a_run_goes_on(wrangle: Door, tmp_path: Path) -> None:
    """What is answered is not done again; other prompts or settings are refused, and nothing is
    lost."""
    flags = "--data-dir Beer --k 0 --num-trials 2"
    whole = wrangle(flags)
    assert whole.code == 0 and "4 prompts" in whole.out, whole.err
    folder, found, rows = results(tmp_path, "Beer", "validation", "default")
    answers = folder / "answers.jsonl"
    lines = answers.read_bytes().splitlines(keepends=True)
    answers.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    again = wrangle(flags)
    assert "4 prompts, 3 of them done before" in again.out
    assert results(tmp_path, "Beer", "validation", "default")[1:] == (found, rows)
    kept = answers.read_bytes()
    for other in ("--sep-tok=|", "--hh-size 9"):
        refused = wrangle(f"{flags} {other}")
        assert refused.code == 2 and "--run-tag" in refused.err and answers.read_bytes() == kept
    assert wrangle(f"{flags} --sep-tok=| --run-tag other").code == 0
