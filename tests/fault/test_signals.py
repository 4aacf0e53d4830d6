"""SIGTERM, SIGINT, SIGHUP and kill -9 in the middle of a run, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import flexgen_h2o
from flexgen_h2o import LLM, Policy, SamplingParams
from tests.parity.reference import Reference, tokens_of

PROMPTS, ROWS, NEW_TOKENS = [[5, 6, 7], [8, 9], [10]], 8_000, 3
FLAGS = (
    "--device cpu --dtype float32 --percent 0 0 0 0 0 0 --gpu-batch-size 2 --num-gpu-batches 2 "
    "--prompts prompts.jsonl --output out.jsonl --offload-dir offload"
)
FINISHED_BLOCKS = 5
EXIT_CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGKILL": -9}
SIGNALS = {name: getattr(signal, name) for name in EXIT_CODES}

# Imports torch once and then forks a run for each folder of argv. Says their process ids, then how each ended.
FORKS = """
import json, os, signal, sys
from transformers import AutoConfig
from flexgen_h2o import flex_opt, llm
folders, flags = json.loads(sys.argv[1]), json.loads(sys.argv[2])
names = {}
for folder in folders:
    pid = os.fork()
    if not pid:
        # A shell that runs the tests in the background has SIGINT ignored, nohup SIGHUP, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(folder)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.exit(flex_opt.main(flags))
    names[pid] = folder
    print(json.dumps([folder, pid]), flush=True)
for _ in folders:
    pid, status = os.wait()
    print(json.dumps([names[pid], os.waitstatus_to_exitcode(status)]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    folder: Path
    code: int
    err: str


def wait_until_midway(folder: Path) -> None:
    """Until some blocks are done: a block writes its KV four times, and as many times at least are seen for each."""
    seen: set[int] = set()
    while len(seen) < 4 * FINISHED_BLOCKS:
        assert not (folder / "stderr").exists() or not (folder / "stderr").read_text()
        seen.update(path.stat().st_mtime_ns for path in folder.glob("offload/run-*/cache.bin"))
        time.sleep(0.01)


@pytest.fixture(scope="module")
def ended(known: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """A run for each signal, sent in the middle of it."""
    folders = {str(tmp_path_factory.mktemp(name)): name for name in SIGNALS}
    for folder in folders:
        lines = [json.dumps({"prompt_token_ids": PROMPTS[i % len(PROMPTS)]}) for i in range(ROWS)]
        (Path(folder) / "prompts.jsonl").write_text("\n".join(lines))
    flags = ["--model", str(known.folder), *FLAGS.split(), "--gen-len", str(NEW_TOKENS)]
    argv = [sys.executable, "-c", FORKS, json.dumps(list(folders)), json.dumps(flags)]
    pids: dict[str, int] = {}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(flexgen_h2o.__file__).parents[1])}
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            pids.update(json.loads(process.stdout.readline()) for _ in folders)
            for folder in folders:
                wait_until_midway(Path(folder))
            found = {}
            for folder, pid in pids.items():
                os.kill(pid, SIGNALS[folders[folder]])
            for _ in folders:
                folder, code = json.loads(process.stdout.readline())
                del pids[folder]
                err = (Path(folder) / "stderr").read_text()
                found[folders[folder]] = Ended(Path(folder), code, err)
            yield found
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_finished_rows_are_kept_and_nothing_else(
    name: str, known: Reference, ended: dict[str, Ended], tmp_path: Path
) -> None:
    run = ended[name]
    assert run.code == EXIT_CODES[name], run.err
    [line] = run.err.splitlines()
    assert line.startswith("flex_opt: ")
    rows = [json.loads(line) for line in (run.folder / "out.jsonl").read_text().splitlines()]
    assert 0 < len(rows) < ROWS, len(rows)
    indices = [row["index"] for row in rows]
    assert indices == sorted(set(indices)) and len(rows) % 2 == 0, "rows of whole micro-batches, in input order"
    with LLM(str(known.folder), Policy(1, 1), dtype="float32", offload_dir=tmp_path) as llm:
        want = tokens_of(llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS)))
    assert all(row["token_ids"] == want[row["index"] % len(PROMPTS)] for row in rows)
    assert not list((run.folder / "offload").iterdir())


def test_the_next_run_cleans_up_after_kill_9(known: Reference, ended: dict[str, Ended]) -> None:
    run = ended["SIGKILL"]
    assert run.code == EXIT_CODES["SIGKILL"]
    offload = run.folder / "offload"
    assert any(path.name.startswith("run-") for path in offload.iterdir())
    with LLM(str(known.folder), Policy(2, 2, (0,) * 6), dtype="float32", offload_dir=offload) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert not list(offload.iterdir())
