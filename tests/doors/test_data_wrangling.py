"""`evaluate data-wrangling` run to its end: predictions, metrics, a run that goes on, a dry run,
and refusals."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import H2O, LLM, Policy, SamplingParams
from tests.doors.conftest import Answer
from tests.unit.evaluation.wrangling import BEER, HOSPITAL, RESTAURANT, write_folder

Door = Callable[..., Answer]


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
        json.loads((folder / "metrics.json").read_text()),
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
    assert found == json.loads((tmp_path / "m.json").read_text())
    assert found["rows"] == 2 and found["task"] == "error_detection" and found["errors"] == 0
    assert (
        "| `Hospital` | error detection | test | 2 |" in answer.out
        and str(folder.name) in answer.out
    )


def test_labels_that_are_longer_than_answers_are_counted(wrangle: Door, tmp_path: Path) -> None:
    """They can never be right; underscores in flags are taken for hyphens."""
    flags = "--data_dir Restaurant --k 0 --max_tokens 1 --sep_tok ."
    answer = wrangle(f"{flags} --dry-run")
    assert answer.code == 0, answer.err
    line = answer.out.splitlines()[-1]
    assert wrangle(flags).out.splitlines()[-1] == line
    _, found, rows = results(tmp_path, "Restaurant", "validation", "default")
    with LLM("opt-tiny", offload_dir="o", dtype="float32") as llm:
        longer = sum(len(llm.model.encode_plain(f" {row['label']}")) > 1 for row in rows)
    assert longer and found["too_long_labels"] == longer
    verb = "have" if longer > 1 else "has"
    said = (
        f"{longer} of {len(rows)} labels {verb} more than the 1 token of an answer, which "
        "cannot be right then"
    )
    assert line == f"{said}; raise --gen-len"
    assert (
        "labels"
        not in wrangle(flags.replace("--max_tokens 1", "--max-tokens 60") + " --dry-run").out
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
    for other, says in (
        ("--sep-tok=|", "give another --run-tag"),
        ("--hh-size 9", "--eviction was"),
    ):
        refused = wrangle(f"{flags} {other}")
        assert refused.code == 2 and says in refused.err and refused.err.count("\n") == 1, (
            refused.err
        )
        assert answers.read_bytes() == kept
    assert wrangle(f"{flags} --sep-tok=| --run-tag other").code == 0


def test_hand_written_examples_and_near_misses(wrangle: Door, tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("Q: x? No\n\nQ: y? Yes\n\n\n")
    assert wrangle("--data-dir Restaurant --sample-method manual --examples all.txt").code == 0
    _, found, [row] = results(tmp_path, "Restaurant", "validation", "default")
    assert row["prompt"] == (
        "Q: x? No\n\nQ: y? Yes\n\nname: ritz. addr: 160 e. 64th st.. type: nan. What is the city?"
    )
    assert found["f1_avg"] is None and found["acc"] == [0.0]
    (tmp_path / "by.json").write_text(json.dumps({"City": "C", "Phone": "P"}))
    flags = (
        "--data-dir Hospital --do_test --sample_method manual --examples by.json "
        "--add_task_instruction"
    )
    assert wrangle(flags).code == 0
    folder, _, rows = results(tmp_path, "Hospital", "test", "default")
    for row, letter in zip(rows, "CP", strict=True):
        assert str(row["prompt"]).startswith(
            f"Is there a x spelling error? Yes or No?  {letter}\n\nIs there a x "
        )
    flags = (
        "--data-dir Hospital --sample-method validation_clusters --validation-path "
        f"{folder}/trial_0.jsonl --k 2"
    )
    assert wrangle(flags).code == 0
    _, _, [row] = results(tmp_path, "Hospital", "validation", "default")
    assert str(row["prompt"]).count("? Yes\n") == 1 and str(row["prompt"]).count("? No\n") == 1


def test_a_dry_run_loads_no_weights(wrangle: Door, words_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(words_model, tmp_path / "no-weights")
    (folder / "model.safetensors").unlink()
    answer = wrangle(f"--data-dir Beer --dry_run --k 3 --num_print 1 --num_run 2 --model {folder}")
    assert answer.code == 0, answer.err
    assert answer.out.count("Are Product A and Product B the same?") == 4
    assert (
        answer.out.splitlines()[-1].startswith("2 prompts of ")
        and "has 64 positions, too few for 2" in answer.out
    )
    assert not (tmp_path / "outputs").exists()


def test_prompts_that_are_too_long_are_error_rows(
    wrangle: Door, words_model: Path, tmp_path: Path
) -> None:
    answer = wrangle(f"--data-dir Beer --k 3 --model {words_model}")
    assert answer.code == 4, answer
    _, found, rows = results(tmp_path, "Beer", "validation", "default")
    assert found["errors"] == 2 and {row["error"] for row in rows} == {"context_length_exceeded"}


REFUSED = [
    (
        "--data-dir none",
        "--data-dir none: there is no such folder; the data is in https://fm-data-tasks",
    ),
    ("--data-dir .", "--data-dir .: there is no train.csv in it; the data is in https://"),
    ("", "--data-dir"),
    ("--data-dir Beer --k 5", "--k 5: there are 4 rows to draw from"),
    (
        "--data-dir Beer --column x",
        "--column x: Beer is of entity matching, where nothing is imputed",
    ),
    ("--data-dir Beer --num-run 0", "--num-run 0: must be at least 1"),
    (
        "--data-dir Beer --sample-method manual",
        "--sample-method manual: goes with --examples FILE; give both",
    ),
    ("--data-dir Beer --examples x.txt", "--examples: goes with --sample-method manual; give both"),
    ("--data-dir Beer --sample-method manual --examples x.txt", "--examples x.txt: No such file"),
    (
        "--data-dir Beer --sample-method validation_clusters --validation-path Beer/test.csv",
        ":1: not valid JSON",
    ),
    (
        "--data-dir Hospital --sample-method manual --examples empty.json",
        "has no text for col_name 'City'",
    ),
    ("--data-dir Beer --run-tag a/b", "--run-tag a/b: is the name of a folder"),
    ("--data-dir Beer --output-dir Beer/test.csv --k 0", "--output-dir Beer/test.csv"),
    ("--data-dir Beer --temperature -1", "--temperature"),
    ("--data-dir Beer --seed 4294967296", "--seed 4294967296: must be below 2**32"),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_one_line_says_what_is_wrong(flags: str, says: str, wrangle: Door, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    answer = wrangle(flags)
    assert answer.code == 2 and answer.out == "", answer
    [line] = answer.err.splitlines()
    assert says in line
    assert not (tmp_path / "outputs").exists()


def test_kvpress_folder(wrangle: Door, tmp_path: Path) -> None:
    flags = (
        "--data-dir Hospital --do-test --num-run 1 --num-trials 2 --kv-budget 0.5 "
        "--kvpress-dir press"
    )
    answer = wrangle(flags)
    assert answer.code == 0, answer.err
    [folder] = (tmp_path / "press").iterdir()
    assert folder.name.startswith("Hospital__test__opt-tiny__h2o__0.") and folder.name.endswith(
        "__fraction0.500"
    )
    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    _, found, [row] = results(tmp_path, "Hospital", "test", "default")
    assert [one["trial"] for one in rows] == ["0", "1"] and rows[0]["predicted_answer"] == row[
        "prediction"
    ]
    assert (
        rows[0]["question"] == row["text"]
        and rows[0]["answer"] == "Yes"
        and rows[0]["max_new_tokens"] == "3"
    )
    assert json.loads((folder / "metrics.json").read_text()) == found
    assert (
        wrangle(flags).code == 0 and len(list(folder.iterdir())) == 3
    )  # the same run, written again
    by_bytes = wrangle(flags.replace("--kv-budget", "--eviction h2o --run-tag bytes --kv-bytes"))
    assert by_bytes.code == 0, by_bytes.err
    (tmp_path / "file").write_text("")
    refused = wrangle(f"{flags} --kvpress-dir file/x")
    assert refused.code == 2 and "--kvpress-dir" in refused.err
