"""`batch`: what restarts may mix, what it keeps beside its output, how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OPTForCausalLM

from flexgen_h2o.jobs.runner import JobRun
from tests.doors.conftest import Door, read_json, read_lines
from tests.parity.reference import greedy


def lines(path: Path, *values: Any) -> None:
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))


def rows(path: Path) -> dict[str, dict[str, Any]]:
    found = read_lines(path)
    assert len({row["custom_id"] for row in found}) == len(found)
    return {row["custom_id"]: row for row in found}


def choices(path: Path) -> dict[str, Any]:
    return {name: row["response"]["body"]["choices"] for name, row in rows(path).items()}


def test_rows_of_all_lengths_equal_transformers(job: Door, tmp_path: Path, ids_model: Path) -> None:
    prompts = {f"r{i}": [5 + i, 9, 4][: 1 + i % 3] for i in range(9)}
    body = {
        name: {"prompt": ids, "max_tokens": 1 + i * 5 % 7}
        for i, (name, ids) in enumerate(prompts.items())
    }
    lines(
        tmp_path / "in.jsonl",
        *({"custom_id": n, "url": "/v1/completions", "body": b} for n, b in body.items()),
        "{",
    )
    ended = job("--gpu-batch-size 2 --num-gpu-batches 2 --refill --window 4")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[0] == "10 prompts"
    assert "10 answers in out.jsonl, 1 of them errors" in ended.out
    assert ended.out.splitlines()[-1] == "errors: 1 invalid_json"
    found = rows(tmp_path / "out.jsonl")
    model = OPTForCausalLM.from_pretrained(ids_model).eval()
    for name, ids in prompts.items():
        choice = found[name]["response"]["body"]["choices"][0]
        assert choice["token_ids"] == greedy(model, ids, body[name]["max_tokens"])
    assert found["line-10"]["error"]["code"] == "invalid_json"


# ---- restarts


MIXING = [
    (("--temperature", 0.5), "--temperature was 0.0 and is 0.5"),
    (("--kv-budget", 0.5), "--eviction was full and is h2o (of --kv-budget 0.5)"),
    (("--dtype", "bfloat16"), "--dtype was float32 and is bfloat16"),
    (("--gpu-batch-size", 3), "--gpu-batch-size was auto and is 3"),
]


def test_a_restart_that_would_mix_is_refused(job: Door, tmp_path: Path) -> None:
    lines(tmp_path / "in.jsonl", {"prompt": [5, 6]})
    assert job("--gen-len 4").code == 0
    files = tmp_path / "out.jsonl", tmp_path / "out.jsonl.job.json"
    before = [path.read_bytes() for path in files]
    for flags, says in MIXING:
        ended = job("--gen-len 4", *flags)
        assert (
            ended.code == 2
            and says in ended.err
            and "--force" in ended.err
            and len(ended.err.splitlines()) == 1
        )
        assert before == [path.read_bytes() for path in files]


def test_a_model_that_was_trained_on_in_its_folder_is_another(
    job: Door, tmp_path: Path, words_model: Path
) -> None:
    """A copy in its place is the same."""
    folder = tmp_path / "model"
    copy = tmp_path / "copy"
    shutil.copytree(words_model, folder)
    lines(tmp_path / "in.jsonl", {"prompt": [5, 6]})
    assert job(model=folder).code == 0
    shutil.copytree(folder, copy)
    for name, change, what in (
        ("model.safetensors", lambda data: data[:-4] + bytes(4), "weights"),
        ("tokenizer.json", lambda data: data + b" ", "tokenizer"),
    ):
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        assert job(model=folder).code == 0
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        ended = job(model=folder)
        assert ended.code == 2 and f"model.{what} was " in ended.err


def test_force_goes_on_and_says_so_in_the_sidecar(job: Door, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines(source, {"prompt": [5, 6]})
    assert job("--gen-len 4").code == 0
    lines(source, {"prompt": [5, 6]}, {"prompt": [7]})
    assert job("--gen-len 5 --force").code == 0
    found = rows(tmp_path / "out.jsonl").values()
    assert [len(row["response"]["body"]["choices"][0]["token_ids"]) for row in found] == [4, 5]
    sidecar = read_json(tmp_path / "out.jsonl.job.json")
    assert sidecar["settings"]["sampling"]["max_tokens"] == 5
    assert [old["sampling"]["max_tokens"] for old in sidecar["earlier"]] == [4]
    lines(source, {"prompt": [9, 9]}, {"prompt": [7]}, {"prompt": [8]})
    ended = job("--gen-len 5")
    assert ended.code == 2 and "the input does not begin as in.jsonl did" in ended.err


@pytest.mark.parametrize("spelled", ["model", "link", "elsewhere/../model"])
def test_a_model_may_be_spelled_otherwise(
    job: Door, tmp_path: Path, ids_model: Path, words_model: Path, spelled: str
) -> None:
    """And another model may not, whatever it is called."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").symlink_to(ids_model)
    (tmp_path / "link").symlink_to("model")
    lines(tmp_path / "in.jsonl", {"prompt": [5, 6]})
    assert job().code == 0
    ended = job(model=Path(spelled))
    assert ended.code == 0 and "nothing was left to do" in ended.out, ended.err
    (tmp_path / "model").unlink()
    (tmp_path / "model").symlink_to(words_model)
    assert job(model=Path(spelled)).code == 2


# ---- inputs that are still being written

HALVES = {
    "an object": ('{"prompt": [5, 6]}\n{"prompt": [7', ', 8]}\n{"prompt": [9]}\n', "in.jsonl"),
    "its id": ('{"custom_id": "a", "prompt": [7', '8], "max_tokens": 3}', "in.jsonl"),
    "an object that was whole": ('{"prompt": [5]}\n{"prompt": [6]}', " {}\n", "in.jsonl"),
    "a prompt": ("import os\nimport", " sys\ndef", "in.txt"),
    "a space": ("import os", " ", "in.txt"),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_line_that_has_grown_is_answered_anew(
    job: Door, tmp_path: Path, words_model: Path, name: str
) -> None:
    half, rest, source = HALVES[name]
    path = tmp_path / source
    for text in (half, half + rest):
        path.write_text(text)
        ended = job("--gen-len 4 --input", source, model=words_model)
        assert ended.code in (0, 4), ended.err
    assert job("--gen-len 4 --input", source, "--output whole.jsonl", model=words_model).code == 0
    whole = rows(tmp_path / "whole.jsonl")
    found = rows(tmp_path / "out.jsonl")
    assert found.keys() == whole.keys()
    for one, row in found.items():
        assert row["error"] == whole[one]["error"]
        if row["error"] is None:
            got, wanted = (each["response"]["body"]["choices"] for each in (row, whole[one]))
            assert got == wanted


def test_an_end_of_its_own_stays_as_it_was_answered(job: Door, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    before = b""
    for text in ('{"prompt": [5]}', '{"prompt": [5]}\r\n', '{"prompt": [5]}\r\n\n'):
        source.write_text(text)
        assert job().code == 0
        before = before or (tmp_path / "out.jsonl").read_bytes()
        assert (tmp_path / "out.jsonl").read_bytes() == before != b""


def test_a_last_line_that_is_being_written_waits(job: Door, tmp_path: Path) -> None:
    with (tmp_path / "in.jsonl").open("w") as file:
        file.write('{"prompt": [5')
        file.flush()
        ended = job()
        assert ended.code == 2 and "still being written" not in ended.out
        assert ended.err.count("\n") == 1 and "--input in.jsonl: " in ended.err
        file.write(', 6]}\n{"prompt"')
        file.flush()
        for flags in ("", "--dry-run"):
            ended = job(flags) if flags else job()
            assert ended.code == 0 and "last line has no newline" in ended.err
        assert [*rows(tmp_path / "out.jsonl")] == ["line-1"]
        file.write(": [7]}")
    assert job().code == 0
    assert all(row["error"] is None for row in rows(tmp_path / "out.jsonl").values())


@pytest.mark.parametrize("half", ['{"prompt": [7', '{"prompt": [7]}'])
def test_a_line_that_grows_while_the_job_runs_is_left_for_the_next(
    job: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": [5]}\n' + half)
    run = JobRun.run

    def run_and_grow(self: JobRun, rows: int) -> None:
        run(self, rows)
        with source.open("a") as file:
            file.write("\n" if half.endswith("}") else ", 8]}\n")

    with monkeypatch.context() as growing:
        growing.setattr(JobRun, "run", run_and_grow)
        ended = job()
    assert ended.code == 0 and "last line has no newline" in ended.err
    assert [*rows(tmp_path / "out.jsonl")] == ["line-1"]
    assert "1 of 1 done" in job("--status").out
    assert job().code == 0 and len(rows(tmp_path / "out.jsonl")) == 2
    assert all(row["error"] is None for row in rows(tmp_path / "out.jsonl").values())


# ---- refusals and ends


def test_what_will_fail_is_said_first_and_again_at_the_end(
    job: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By field; --dry-run says the same. The prompts of a large input are not tokenized for it."""
    bad = [{"prompt": [5], "tools": [{}]}] * 3 + [{"prompt": [5], "n": 2}, {"prompt": [5] * 99}]
    model = "2 requests name another model (the first: gpt in line 8)"
    other = {"prompt": [5], "model": "gpt", "max_tokens": 1}
    lines(tmp_path / "in.jsonl", {"prompt": [5, 6]}, "{", *bad, other, other)
    causes = "3 unsupported (tools), 1 invalid_json, 1 unsupported (n)"
    too_long = ", 1 context_length_exceeded (prompt)"
    for flags in ("--dry-run", "--output out.jsonl"):
        ended = job(flags)
        assert ended.code == 0, ended.err
        found = [*ended.out.splitlines(), *ended.err.splitlines()]
        [said] = [line for line in found if "will be error lines" in line]
        assert "6 of 9 prompts" in said and model in ended.err
        assert all(cause in said for cause in (causes + too_long).split(", "))
        assert "; the first: line 2: not valid JSON" in said
    assert "3 prompts" in ended.out, "the plan is of those that can be run"
    for _ in range(2):  # also in a restart that does nothing
        last = ended.out.splitlines()[-1]
        assert last.startswith("errors: 3 unsupported (tools), ")
        assert all(cause in last for cause in (causes + too_long).split(", "))
        ended = job()
        assert "will be error lines" not in ended.out and model in ended.err
    monkeypatch.setattr("flexgen_h2o.jobs.job.WHOLLY_CHECKED_BYTES", 0)
    ended = job("--output other.jsonl")
    assert "at least 5 of 9 prompts" in ended.out or "at least 6 of 9 prompts" in ended.out


def test_every_cause_is_named_before_a_night(job: Door, tmp_path: Path) -> None:
    """A job names as many as fit into a line, and --dry-run all of them."""
    fields = [f"{letter}{'y' * 30}" for letter in "abcdefghijklmnopqrst"]
    url = "/v1/completions"
    bad = [{"custom_id": name, "url": url, "body": {"prompt": [5], name: 1}} for name in fields]
    lines(tmp_path / "in.jsonl", {"prompt": [5, 6], "max_tokens": 1}, *bad)
    ended = job("--dry-run")
    assert ended.code == 0 and all(f"1 unsupported ({name})" in ended.err for name in fields)
    ended = job()
    assert "with other causes (--dry-run names each)" in ended.out, ended.err
    assert ended.out.count("unsupported (") >= 20, "most are named"
    lines(tmp_path / "in.jsonl", "{")
    assert "1 of 1 prompt will be an error line: " in job("--output one.jsonl").out


def test_when_every_row_fails_the_exit_code_is_4(job: Door, tmp_path: Path) -> None:
    lines(tmp_path / "in.jsonl", "{", {"prompt": "text"})
    for done in (0, 2):
        ended = job()
        assert ended.code == 4 and (f"2 prompts, {done} of them done before" in ended.out) is bool(
            done
        )


def broken(model: Path, token: int, folder: Path) -> Path:
    """A copy of `model` whose embedding of `token` is NaN."""
    shutil.copytree(model, folder)
    state = load_file(folder / "model.safetensors")
    state["model.embed_tokens.weight"][token] = torch.nan
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "flags",
    [
        "--gpu-batch-size 2 --num-gpu-batches 2 --refill --percent 0 50 0 50 0 50",
        "--gpu-batch-size 3 --kv-bytes 0.5 --percent 0 0 0 0 0 0",
    ],
)
def test_a_row_that_is_not_finite_fails_alone(
    flags: str, job: Door, tmp_path: Path, rotary: Path
) -> None:
    """Others, of its micro-batch too, get what they get of a whole model."""
    bad = 9
    asked = [
        {"prompt": [20 + i, *range(30, 36 + 5 * i)], "max_tokens": 3 + i % 4} for i in range(7)
    ]
    asked[2] |= {"prompt": [5, bad, 6, 7, 8, 10, 11], "echo": True, "logprobs": 2}
    asked[4]["prompt"] = [*range(40, 60), bad]
    lines(tmp_path / "in.jsonl", *({"ignore_eos": True, **one} for one in asked))
    assert job(*flags.split(), model=rotary).code == 0
    whole = choices(tmp_path / "out.jsonl")
    for path in tmp_path.glob("out.jsonl*"):
        path.unlink()
    ended = job(*flags.split(), model=broken(rotary, bad, tmp_path / "broken"))
    assert ended.code == 0 and ended.out.splitlines()[-1] == "errors: 2 not_finite", ended.err
    found = rows(tmp_path / "out.jsonl")
    for name, row in found.items():
        if name in ("line-3", "line-5"):
            assert row["response"] is None and "logits" in row["error"]["message"], row
        else:
            assert row["response"]["body"]["choices"] == whole[name]
    lines(tmp_path / "in.jsonl", *([{"prompt": [bad, i]} for i in range(5, 8)]))
    ended = job(*flags.split(), "--output bad.jsonl", model=tmp_path / "broken")
    assert ended.code == 1 and "are not finite" in ended.err and len(ended.err.splitlines()) == 1


def test_what_does_not_fit_ends_with_3_and_can_be_tried_again(job: Door, tmp_path: Path) -> None:
    lines(tmp_path / "in.jsonl", {"prompt": [5, 6]})
    ended = job("--host-mem 100KiB --gpu-batch-size 1")
    assert ended.code == 3 and not (tmp_path / "out.jsonl").exists()
    assert "state: failed: " in job("--status").out
    assert job().code == 0, "nothing was written: other settings mix nothing"


@pytest.mark.parametrize(
    ("flags", "bad", "good"),
    [
        (("--hh-size", 2, "--recent-size", 4, "--protect", 6), [5] * 8, [5] * 3),
        (("--kv-bytes", 0.3, "--compress-cache", "--cache-window", 8), [5] * 2, [5, 6] * 12),
    ],
)
def test_a_row_that_eviction_leaves_no_column_is_its_own_error(
    job: Door,
    tmp_path: Path,
    flags: tuple[object, ...],
    bad: list[int],
    good: list[int],
) -> None:
    named = [
        {"custom_id": name, "prompt": ids, "max_tokens": 2}
        for name, ids in (("bad", bad), ("good", good))
    ]
    lines(tmp_path / "in.jsonl", *named)
    ended = job("--eviction h2o", *flags)
    assert ended.code == 0, ended.err
    found = rows(tmp_path / "out.jsonl")
    assert found["bad"]["error"]["code"] == "does_not_fit" and found["good"]["error"] is None
