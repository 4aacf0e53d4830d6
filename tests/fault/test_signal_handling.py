"""Signals at the worst moments, in process: while cleaning up, and where Python drops exceptions."""

from __future__ import annotations

import gc
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexgen_h2o import flex_opt
from flexgen_h2o.engine.generation import Progress
from tests.parity.reference import Reference

ROWS, SWEEPS = 40, 3
SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell that runs the tests in the background has SIGINT ignored, nohup has SIGHUP."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def run_until(
    known: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[Callable[[], None]], tuple[int, str, int]]:
    """A run of ten blocks on disk that calls `act` in the middle of the sixth: exit code, stderr, rows written."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt_token_ids": [4, 5, 6]}\n' * ROWS)

    def run(act: Callable[[], None]) -> tuple[int, str, int]:
        calls, sweep = 0, Progress.sweep

        def watched(self: Progress, tokens: int) -> None:
            nonlocal calls
            sweep(self, tokens)
            calls += tokens
            if calls - tokens <= ROWS * SWEEPS // 2 < calls:
                act()

        monkeypatch.setattr(Progress, "sweep", watched)
        flags = ["--percent", *"000000", "--gpu-batch-size", "2", "--num-gpu-batches", "2", "--no-log"]
        argv = ["--model", str(known.folder), "--prompts", str(prompts), "--output", str(out), *flags]
        capfd.readouterr()
        code = flex_opt.main([*argv, "--gen-len", str(SWEEPS), "--offload-dir", str(tmp_path / "offload")])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()  # what an interrupted clean-up left open must not trouble another test
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return code, capfd.readouterr().err, len(rows)

    return run


@pytest.mark.parametrize(("number", "code"), SIGNALS, ids=["SIGTERM", "SIGINT", "SIGHUP"])
def test_one_signal(number: int, code: int, run_until, assert_clean: Callable[[], None]) -> None:
    ended, err, rows = run_until(lambda: os.kill(os.getpid(), number))
    assert (ended, rows) == (code, ROWS // 2), err
    assert len(err.splitlines()) == 1
    assert_clean()


@pytest.mark.parametrize(("number", "code"), SIGNALS[1:2])
def test_an_impatient_user(
    number: int, code: int, run_until, monkeypatch: pytest.MonkeyPatch, assert_clean: Callable[[], None]
) -> None:
    remove, removed, kill = os.rmdir, [], lambda: os.kill(os.getpid(), number)

    def rmdir(path: Path) -> None:
        kill()
        remove(path)
        removed.append(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    ended, err, rows = run_until(kill)
    assert (ended, rows) == (code, ROWS // 2) and removed, err
    assert len(err.splitlines()) == 1
    assert_clean()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("number", "code"), SIGNALS[0:1])
def test_a_signal_inside_a_finaliser(number: int, code: int, run_until, assert_clean: Callable[[], None]) -> None:
    """About one in a hundred signals falls into some object's `__del__` or a weak reference's callback."""

    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    ended, err, rows = run_until(Dying)
    assert ended == code, err
    assert rows < ROWS
    assert_clean()


@pytest.mark.parametrize(("number", "code"), SIGNALS[2:3])
def test_a_signal_that_comes_out_as_another_error(
    number: int, code: int, run_until, assert_clean: Callable[[], None]
) -> None:
    """As when it falls into `threading`'s own bookkeeping: RuntimeError, release unlocked lock."""

    def turned() -> None:
        try:
            os.kill(os.getpid(), number)
        except BaseException as error:
            raise RuntimeError("release unlocked lock") from error

    ended, err, rows = run_until(turned)
    assert (ended, rows) == (code, ROWS // 2), err
    assert len(err.splitlines()) == 1
    assert_clean()


@pytest.mark.parametrize(("number", "code"), SIGNALS[:2])
def test_a_signal_while_a_finished_run_cleans_up(
    number: int, code: int, run_until, monkeypatch: pytest.MonkeyPatch, assert_clean: Callable[[], None]
) -> None:
    remove, removed = os.rmdir, []

    def rmdir(path: Path) -> None:
        os.kill(os.getpid(), number)
        remove(path)
        removed.append(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    ended, err, rows = run_until(lambda: None)
    assert ended in (0, code) and rows == ROWS and removed, err
    assert_clean()


def test_under_nohup_a_hang_up_ends_nothing(run_until, assert_clean: Callable[[], None]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ended, err, rows = run_until(lambda: os.kill(os.getpid(), signal.SIGHUP))
    assert (ended, rows, err) == (0, ROWS, "")
    assert_clean()
