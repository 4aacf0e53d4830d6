"""SIGTERM, SIGINT, SIGHUP and kill -9 in the middle of a run, in processes of their own."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from tests.forks import Forks, Process
from tests.parity.reference import Reference, tokens_of

PROMPTS = [[5, 6, 7], [8, 9], [10]]
ROWS = 8_000
NEW_TOKENS = 3
FLAGS = (
    "--device cpu --dtype float32 --percent 0 0 0 0 0 0 --gpu-batch-size 2 --num-gpu-batches 2 "
    "--prompts prompts.jsonl --output out.jsonl --offload-dir offload"
)
FINISHED_BLOCKS = 5
EXIT_CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGKILL": -9}
SIGNALS = {name: getattr(signal, name) for name in EXIT_CODES}

RUN = "import sys; from flexgen_h2o import flex_opt; sys.exit(flex_opt.main(sys.argv[1:]))"

# SIGTERM arrives as the condition of an event or a future has been locked for the `at`th time, and
# nobody knows it yet.
RUN_LOCKED = (
    """
import os, signal, sys, threading
at, seen = int(sys.argv.pop(1)), 0
def trace(frame, event, arg, enter=threading.Condition.__enter__.__code__):  # also while modules are taken down
    return count if frame.f_code is enter else None
def count(frame, event, arg):
    global seen
    seen += event == "return"
    if event == "return" and seen == at:
        os.kill(os.getpid(), signal.SIGTERM)
    return count
sys.settrace(trace)
"""  # noqa: E501
    + RUN
)
MOMENTS = range(
    4, 13
)  # the engine's threads start, and the progress bar's; then it waits for transfers


def wait_until_midway(folder: Path) -> None:
    """Until some blocks are done: a block writes its KV four times, and as many times at least are
    seen for each."""
    seen: set[int] = set()
    while len(seen) < 4 * FINISHED_BLOCKS:
        assert not (folder / "stderr").exists() or not (folder / "stderr").read_text()
        seen.update(path.stat().st_mtime_ns for path in folder.glob("offload/run-*/cache.bin"))
        time.sleep(0.01)


@pytest.fixture(scope="module")
def ended(
    known: Reference, forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Process]:
    """A run for each signal, sent in the middle of it."""
    lines = "\n".join(
        json.dumps({"prompt_token_ids": PROMPTS[i % len(PROMPTS)]}) for i in range(ROWS)
    )
    flags = ["--model", str(known.folder), *FLAGS.split(), "--gen-len", str(NEW_TOKENS)]
    runs = {}
    for name in SIGNALS:
        folder = tmp_path_factory.mktemp(name)
        (folder / "prompts.jsonl").write_text(lines)
        runs[name] = forks.start(folder, RUN, *flags)
    for run in runs.values():
        wait_until_midway(run.folder)
    for name, run in runs.items():
        run.send(SIGNALS[name])
    for run in runs.values():
        run.wait()
    return runs


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_finished_rows_are_kept_and_nothing_else(
    name: str, known: Reference, ended: dict[str, Process], tmp_path: Path
) -> None:
    run = ended[name]
    assert run.code == EXIT_CODES[name], run.err
    [line] = run.err.splitlines()
    assert line.startswith("flex_opt: ")
    rows = [json.loads(line) for line in (run.folder / "out.jsonl").read_text().splitlines()]
    assert 0 < len(rows) < ROWS, len(rows)
    indices = [row["index"] for row in rows]
    assert indices == sorted(set(indices)) and len(rows) % 2 == 0, (
        "rows of whole micro-batches, in input order"
    )
    with LLM(str(known.folder), Policy(1, 1), dtype="float32", offload_dir=tmp_path) as llm:
        want = tokens_of(llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS)))
    assert all(row["token_ids"] == want[row["index"] % len(PROMPTS)] for row in rows)
    assert not list((run.folder / "offload").iterdir())


def test_a_locked_condition_is_let_go(known: Reference, forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt_token_ids": p}) for p in PROMPTS * 40)
    )
    flags = ["--model", str(known.folder), *FLAGS.split(), "--gen-len", str(NEW_TOKENS)]
    for at in MOMENTS:
        run = forks.run(tmp_path, RUN_LOCKED, at, *flags)
        assert (run.code, run.err.splitlines()[-1:]) == (
            EXIT_CODES["SIGTERM"],
            ["flex_opt: ended by SIGTERM"],
        ), at
        assert not list((tmp_path / "offload").iterdir())


def test_the_next_run_cleans_up_after_kill_9(known: Reference, ended: dict[str, Process]) -> None:
    run = ended["SIGKILL"]
    assert run.code == EXIT_CODES["SIGKILL"]
    offload = run.folder / "offload"
    assert any(path.name.startswith("run-") for path in offload.iterdir())
    with LLM(
        str(known.folder), Policy(2, 2, (0,) * 6), dtype="float32", offload_dir=offload
    ) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert not list(offload.iterdir())
