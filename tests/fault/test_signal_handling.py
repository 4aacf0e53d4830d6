"""Signals at the worst moments, in process: while cleaning up, and where Python drops
exceptions."""

from __future__ import annotations

import gc
import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import flex_opt
from flexgen_h2o.engine.generation import Progress
from tests.forks import SIGNALS
from tests.parity.reference import Reference

ROWS = 40
SWEEPS = 3
pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture
def run_until(
    known: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[[Callable[[], None]], tuple[int, str, int]]:
    """A run of ten blocks on disk that calls `act` in the middle of the sixth: exit code, stderr,
    rows written."""
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    prompts.write_text('{"prompt_token_ids": [4, 5, 6]}\n' * ROWS)

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
        flags = ["--percent", *"000000", "--gpu-batch-size", "2", "--num-gpu-batches", "2"]
        argv = ["--model", known.folder, "--prompts", prompts, "--output", out, *flags]
        argv += ["--no-log", "--gen-len", SWEEPS, "--offload-dir", tmp_path / "offload"]
        capfd.readouterr()
        code = flex_opt.main([str(word) for word in argv])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()  # what an interrupted clean-up left open must not trouble another test
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return code, capfd.readouterr().err, len(rows)

    return run


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Path]]:
    """The signals to send as each scratch folder is removed, and the folders that were removed
    since."""
    remove = os.rmdir
    numbers = []
    folders = []

    def rmdir(path: Path) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
        remove(path)
        folders.append(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    return numbers, folders


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize("impatient", [False, True])
def test_a_signal_ends_a_run_after_its_clean_up(
    number: int, code: int, impatient: bool, run_until, removed, assert_clean: Callable[[], None]
) -> None:
    """Also where it is sent once more while the run cleans up."""
    numbers, folders = removed
    numbers += [number] * impatient
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
