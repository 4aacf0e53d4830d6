"""How a command ends: signals that were swallowed, a standard output that takes nothing, memory
that runs out."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from flexgen_h2o import cli
from flexgen_h2o.cli_common import run_cli, say
from flexgen_h2o.core.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED, DoesNotFitError
from flexgen_h2o.planner import lp
from flexgen_h2o.planner.lp import Candidate, solve
from tests.forks import SIGNALS

PLAN = "plan --model facebook/opt-125m --num-prompts 16 --prompt-len 32 --gen-len 8 --hardware t4"
pytestmark = pytest.mark.usefixtures("interruptible")


def swallow(number: int) -> None:
    """As a finaliser does, or somebody's bare `except:`."""
    try:
        os.kill(os.getpid(), number)
    except BaseException:
        pass


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_swallowed_signal_counts(
    number: int, code: int, fails: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(argv: list[str] | None) -> int:
        swallow(number)
        if fails:
            raise DoesNotFitError("what the signal broke")
        return 0

    assert run_cli("plan", body, []) == code
    assert capfd.readouterr().err == f"plan: ended by {signal.Signals(number).name}\n"


def test_a_search_ends_with_the_candidate_it_is_at(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def interrupted(*asked: Any) -> Candidate | None:
        nonlocal calls
        calls += 1
        swallow(signal.SIGINT)
        return solve(*asked)

    monkeypatch.setattr(lp, "solve", interrupted)
    assert cli.main(PLAN.split()) == 130
    assert calls == 1
    assert capfd.readouterr() == ("", "plan: ended by SIGINT\n")


def test_a_signal_while_a_verb_is_imported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        importlib, "import_module", lambda name: os.kill(os.getpid(), signal.SIGINT)
    )
    assert cli.main(["plan"]) == 130
    assert capfd.readouterr().err == "flexgen-h2o plan: ended by SIGINT\n"


def test_a_terminal_that_goes_away(tmp_path: Path) -> None:
    """It takes nothing any more, and the kernel sends SIGHUP: the body's clean-up runs, and the
    exit code says it."""
    script = f"""
import fcntl, sys, termios, time
from pathlib import Path
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from flexgen_h2o.cli_common import run_cli, say
def body(argv):
    try:
        print("running")
        for _ in range(600):  # a signal just before a system call does not end it
            time.sleep(0.1)
    finally:
        Path({str(tmp_path / "tidy")!r}).touch()
        print("not to be read by anybody")
sys.exit(run_cli("plan", body, []))
"""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        cwd=Path(cli.__file__).parents[1],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    os.close(theirs)
    try:
        assert os.read(ours, 100).startswith(b"running")
        os.close(ours)
        assert process.wait(30) == 129
    finally:
        process.kill()
    assert (tmp_path / "tidy").exists()


@pytest.mark.parametrize("size", [1, 100_000])
def test_standard_output_that_is_full(size: int) -> None:
    """At the flush after the body, and within the body's print."""
    body = f"lambda argv: print('x' * {size}) or 0"
    script = (
        "import sys; from flexgen_h2o.cli_common import run_cli; sys.exit(run_cli('plan', "
        f"{body}, []))"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=Path(cli.__file__).parents[1],
        )
    assert done.returncode == 1
    assert done.stderr == "plan: cannot write to standard output (No space left on device)\n"


@pytest.mark.parametrize(
    ("error", "code", "flag"),
    [
        (MemoryError(), EXIT_FAILED, "--host-mem"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            EXIT_DOES_NOT_FIT,
            "--device-mem",
        ),
    ],
)
def test_it_names_the_flag(
    error: BaseException, code: int, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(argv: list[str] | None) -> int:
        raise error

    assert run_cli("door", body, None) == code
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("door: ") and flag in said[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_text_shares_a_line_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever prints it, and on whichever stream."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)

    def body(argv: list[str] | None) -> int:
        for draw in (
            lambda: say("x", "said"),
            lambda: print("a result"),
            lambda: print("# a hint", file=sys.stderr),
        ):
            with tqdm(total=3, file=sys.stderr, mininterval=0, ncols=60) as bar:
                bar.update()
                draw()
                bar.update()
        return 0

    assert run_cli("x", body, []) == 0
    found = [line.split("\x1b[K")[-1] for line in terminal.getvalue().split("\n")]
    assert {"x: said", "a result", "# a hint"} <= set(found)
