"""Signals at the worst moments: while cleaning up, where Python drops exceptions, and while a lock
is held. test_jobs.py kills jobs."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import flex_opt
from flexgen_h2o.engine.generation import Progress
from tests.forks import SIGNALS, Forks
from tests.parity.reference import Reference

ROWS = 40
SWEEPS = 3
pytestmark = pytest.mark.usefixtures("interruptible")


def words(known: Reference, tmp_path: Path) -> list[str]:
    """Of a run of ten blocks with everything on disk."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [4, 5, 6]}\n' * ROWS)
    paths = ["--model", known.folder, "--prompts", prompts, "--output", tmp_path / "out.jsonl"]
    paths += ["--offload-dir", tmp_path / "offload"]
    flags = (
        "--device cpu --dtype float32 --percent 0 0 0 0 0 0 --gpu-batch-size 2 "
        f"--num-gpu-batches 2 --no-log --gen-len {SWEEPS}"
    )
    return [*map(str, paths), *flags.split()]


@pytest.fixture
def run_until(
    known: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[[Callable[[], None]], tuple[int, str, int]]:
    """A run that calls `act` in the middle of its sixth block: exit code, stderr, rows written."""
    out = tmp_path / "out.jsonl"

    def run(act: Callable[[], None]) -> tuple[int, str, int]:
        calls = 0
        sweep = Progress.sweep

        def watched(self: Progress, tokens: int) -> None:
            nonlocal calls
            sweep(self, tokens)
            calls += tokens
            if calls - tokens <= ROWS * SWEEPS // 2 < calls:
                act()

        monkeypatch.setattr(Progress, "sweep", watched)
        capfd.readouterr()
        code = flex_opt.main(words(known, tmp_path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()  # what an interrupted clean-up left open must not trouble another test
        rows = out.read_text().count("\n") if out.exists() else 0
        return code, capfd.readouterr().err, rows

    return run


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_ends_a_run_after_its_clean_up(
    number: int,
    code: int,
    run_until,
    monkeypatch: pytest.MonkeyPatch,
    assert_clean: Callable[[], None],
) -> None:
    """It is sent once more as each scratch folder is removed."""
    remove = os.rmdir
    folders = []

    def rmdir(path: Path) -> None:
        os.kill(os.getpid(), number)
        remove(path)
        folders.append(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    ended, err, rows = run_until(lambda: os.kill(os.getpid(), number))
    assert (ended, rows) == (code, ROWS // 2) and folders, err
    assert len(err.splitlines()) == 1
    assert_clean()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_inside_a_finaliser(run_until, assert_clean: Callable[[], None]) -> None:
    """About one in a hundred signals falls into some object's `__del__` or a weak reference's
    callback."""

    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    ended, err, rows = run_until(Dying)
    assert ended == 143, err
    assert rows < ROWS
    assert_clean()


def test_under_nohup_a_hang_up_ends_nothing(run_until, assert_clean: Callable[[], None]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ended, err, rows = run_until(lambda: os.kill(os.getpid(), signal.SIGHUP))
    assert (ended, rows, err) == (0, ROWS, "")
    assert_clean()


# SIGTERM arrives as the condition of an event or a future has been locked for the `at`th time, and
# nobody knows it yet.
RUN_LOCKED = """
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
from flexgen_h2o import flex_opt
sys.exit(flex_opt.main(sys.argv[1:]))
"""  # noqa: E501
# The engine's threads start, and the progress bar's; then it waits for transfers.
MOMENTS = range(4, 13)


def test_a_locked_condition_is_let_go(known: Reference, forks: Forks, tmp_path: Path) -> None:
    for at in MOMENTS:
        run = forks.run(tmp_path, RUN_LOCKED, at, *words(known, tmp_path))
        said = run.err.splitlines()[-1:]
        assert (run.code, said) == (143, ["flex_opt: ended by SIGTERM"]), at
        assert not list((tmp_path / "offload").iterdir())
