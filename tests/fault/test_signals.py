"""SIGTERM and kill -9 in the middle of a run, in processes of their own.

test_signal_handling.py and test_jobs.py have other signals.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from flexgen_h2o import LLM, Policy, SamplingParams
from tests.forks import Forks
from tests.parity.reference import Reference

PROMPTS = [[5, 6, 7], [8, 9], [10]]
FLAGS = (
    "--device cpu --dtype float32 --percent 0 0 0 0 0 0 --gpu-batch-size 2 --num-gpu-batches 2 "
    "--prompts prompts.jsonl --output out.jsonl --offload-dir offload --gen-len 3 --model"
)

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
# The engine's threads start, and the progress bar's; then it waits for transfers.
MOMENTS = range(4, 13)


def write_prompts(folder: Path, rows: int) -> None:
    lines = [json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(lines) * (rows // len(lines)))


def test_a_locked_condition_is_let_go(known: Reference, forks: Forks, tmp_path: Path) -> None:
    write_prompts(tmp_path, 120)
    for at in MOMENTS:
        run = forks.run(tmp_path, RUN_LOCKED, at, *FLAGS.split(), known.folder)
        said = run.err.splitlines()[-1:]
        assert (run.code, said) == (143, ["flex_opt: ended by SIGTERM"]), at
        assert not list((tmp_path / "offload").iterdir())


def test_the_next_run_cleans_up_after_kill_9(
    known: Reference, forks: Forks, tmp_path: Path
) -> None:
    offload = tmp_path / "offload"
    write_prompts(tmp_path, 6000)
    run = forks.start(tmp_path, RUN, *FLAGS.split(), str(known.folder))
    written: set[int] = set()
    while len(written) < 20:
        assert not run.has_ended(), run.err
        written.update(path.stat().st_mtime_ns for path in offload.glob("run-*/cache.bin"))
        time.sleep(0.01)
    run.send(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert any(path.name.startswith("run-") for path in offload.iterdir())
    with LLM(
        str(known.folder), Policy(2, 2, (0,) * 6), dtype="float32", offload_dir=offload
    ) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert not list(offload.iterdir())
