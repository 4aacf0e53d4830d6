"""What all command lines share: one-line errors, exit codes, signals, and the kinds of values that flags take.

Imports nothing heavy, so that `--help` and wrong flags answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from flexgen_h2o import interrupts
from flexgen_h2o.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_USAGE, SIGNAL_BASE, FlexgenError, UsageError

PICTURES = (".png", ".svg", ".pdf")


class OneLineParser(argparse.ArgumentParser):
    """Wrong flags end with one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def run_door(name: str, body: Callable[[list[str] | None], int], argv: list[str] | None) -> int:
    """Run a door's body; every failure becomes its exit code and one line on stderr (a traceback for our own bugs)."""
    with interrupts.as_exceptions():
        try:
            return _exit_code(name, body, argv)
        except Exception:
            # An exception that a signal turned into on its way is still that signal.
            signal = interrupts.arrived()
            if signal is None:
                raise
            return _ended_by(name, signal)


def _exit_code(name: str, body: Callable[[list[str] | None], int], argv: list[str] | None) -> int:
    try:
        code = body(argv)
        if sys.stdout is not None:  # closed by the shell: `>&-`
            sys.stdout.flush()
        interrupts.check()
        return code
    except FlexgenError as error:
        interrupted = interrupts.arrived()  # and what it broke
        if interrupted is not None:
            return _ended_by(name, interrupted)
        _complain(f"{name}: {error}".replace("\n", " "))
        return error.exit_code
    except interrupts.Interrupted as signal:
        return _ended_by(name, signal)
    except SystemExit as stop:  # argparse: --help
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    except OSError as error:
        interrupted = interrupts.arrived()
        if interrupted is not None:  # a terminal that goes away takes nothing more, which is what SIGHUP says
            return _ended_by(name, interrupted)
        if isinstance(error, BrokenPipeError):  # nobody reads what is printed: `| head`
            _silence_stdout()
            return EXIT_FAILED
        if _can_print():
            raise
        _complain(f"{name}: cannot write to standard output ({error.strerror or error})")
        _silence_stdout()
        return EXIT_FAILED
    except MemoryError:
        _complain(f"{name}: the machine ran out of memory; lower --host-mem")
        return EXIT_FAILED
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; importing it here would slow --help down
            raise
        _complain(f"{name}: the card ran out of memory; lower --device-mem, or end what else uses it")
        return EXIT_DOES_NOT_FIT


def _complain(line: str) -> None:
    """In one piece, so that the lines of several processes do not run into each other. A terminal may be gone."""
    with contextlib.suppress(OSError):
        print(line + "\n", end="", file=sys.stderr, flush=True)


def _can_print() -> bool:
    """False where standard output takes nothing, not even an empty line."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _silence_stdout() -> None:
    """Let Python's own flush at exit go nowhere, so that it does not complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ended_by(name: str, signal: interrupts.Interrupted) -> int:
    _complain(f"{name}: ended by {signal}")
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _silence_stdout()
    return SIGNAL_BASE + signal.number


def flag_of(field: str) -> str:
    """The flag that sets a field: `top_p` -> `--top-p`."""
    return "--" + field.replace("_", "-")


def check_separate(args: argparse.Namespace, read: Iterable[str], written: Iterable[str]) -> None:
    """UsageError where a file would be written that is read, or that another flag writes too. Names of args' fields."""
    given = [(name, getattr(args, name)) for name in (*read, *written)]
    paths = [(name, os.path.expanduser(path)) for name, path in given if path not in (None, "auto")]
    outputs = set(written)
    for i, (name, path) in enumerate(paths):
        for other, there in paths[:i]:
            if name in outputs and (other in outputs or os.path.isfile(there)) and _is_same(path, there):
                raise UsageError(f"{flag_of(name)} {path}: is the file of {flag_of(other)} too; give another name")


def _is_same(path: str, other: str) -> bool:
    """Whether two names lead to one file, by links or not. /dev/null and its like may be written twice."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.isfile(path) and os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def file_name(text: str) -> Path:
    """A path that is not empty: that would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a file name")
    return Path(text)


def boolean(text: str) -> bool:
    """`true/false`, `yes/no`, `1/0` and so on, as FlexGen's flags take them."""
    if text.lower() in ("true", "t", "yes", "y", "1", "on"):
        return True
    if text.lower() in ("false", "f", "no", "n", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not true or false")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def count(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def check_picture(path: Path) -> None:
    """UsageError, before the run, where --plot could not draw `path`: its suffix names no format, or no matplotlib."""
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"--plot {path}: the file name must end in one of {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot: needs matplotlib; pip install 'flexgen-h2o[plot]'")
