"""SIGTERM, SIGINT and kill -9 in the middle of a run, in real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from tests.parity.reference import Reference, tokens_of

PROMPTS, ROWS, NEW_TOKENS = [[5, 6, 7], [8, 9], [10]], 30_000, 3
FINISHED_BLOCKS = 5
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL}
EXIT_CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": -9}


def wait_until_midway(process: subprocess.Popen[str], folder: Path) -> None:
    """Until some blocks are done: a block writes its KV four times, and as many times at least are seen for each."""
    seen: set[int] = set()
    end = time.monotonic() + 60
    while len(seen) < 4 * FINISHED_BLOCKS:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the run did not begin"
        seen.update(path.stat().st_mtime_ns for path in folder.glob("offload/run-*/cache.bin"))
        time.sleep(0.01)


@pytest.fixture(scope="module")
def running(
    known: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path]]]:
    """A run for each signal, all started at once: importing torch is most of their time."""
    started = {}
    for name in SIGNALS:
        folder = tmp_path_factory.mktemp(name)
        lines = [json.dumps({"prompt_token_ids": PROMPTS[i % len(PROMPTS)]}) for i in range(ROWS)]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        argv = [sys.executable, "-m", "flexgen_h2o.flex_opt", "--model", str(known.folder), "--dtype", "float32"]
        argv += [
            "--percent",
            *"000000",
            "--gpu-batch-size",
            "2",
            "--num-gpu-batches",
            "2",
            "--gen-len",
            str(NEW_TOKENS),
        ]
        argv += ["--prompts", "prompts.jsonl", "--output", "out.jsonl", "--offload-dir", "offload"]
        process = subprocess.Popen(
            argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A shell that runs the tests in the background has SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        started[name] = (process, folder)
    yield started
    for process, _ in started.values():
        process.kill()
        process.communicate()


def stop_midway(process: subprocess.Popen[str], folder: Path, number: int) -> tuple[int, str]:
    """Send the signal in the middle of the run. Returns the exit code and stderr."""
    wait_until_midway(process, folder)
    process.send_signal(number)
    _, err = process.communicate(timeout=15)
    return process.returncode, err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_finished_rows_are_kept_and_nothing_else(name: str, known: Reference, running, tmp_path: Path) -> None:
    process, folder = running[name]
    code, err = stop_midway(process, folder, SIGNALS[name])
    assert code == EXIT_CODES[name], err
    [line] = err.splitlines()
    assert line.startswith("flex_opt: ")
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert 0 < len(rows) < ROWS, len(rows)
    indices = [row["index"] for row in rows]
    assert indices == sorted(set(indices)) and len(rows) % 4 == 0, "rows of whole blocks, in input order"
    with LLM(str(known.folder), Policy(1, 1), dtype="float32", offload_dir=tmp_path) as llm:
        want = tokens_of(llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS)))
    assert all(row["token_ids"] == want[row["index"] % len(PROMPTS)] for row in rows)
    assert not list((folder / "offload").iterdir())


def test_the_next_run_cleans_up_after_kill_9(known: Reference, running) -> None:
    process, folder = running["SIGKILL"]
    code, _ = stop_midway(process, folder, SIGNALS["SIGKILL"])
    assert code == EXIT_CODES["SIGKILL"]
    left = [p.name for p in (folder / "offload").iterdir()]
    assert any(name.startswith("run-") for name in left)
    policy = Policy(2, 2, (0, 0, 0, 0, 0, 0))
    with LLM(str(known.folder), policy, dtype="float32", offload_dir=folder / "offload") as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert not list((folder / "offload").iterdir())
