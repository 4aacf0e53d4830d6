"""What all command lines share: one-line errors, exit codes, signals, and the kinds of values that flags take.

Imports nothing heavy, so that `--help` and wrong flags answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from flexgen_h2o import interrupts
from flexgen_h2o.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_USAGE, SIGNAL_BASE, FlexgenError, UsageError

PICTURES = (".png", ".svg", ".pdf")


_SHARES_OF_LAYERS = "torchrun and --pipeline do that here (docs/parallel.md)"
# Flags of FlexGen's and H2O's scripts that are not taken here, with hyphens: what to do instead.
REPLACED = {
    "--hh-long-seq": "prompts of any length are taken without it; leave it out",
    "--sample-num": "give a file with as many prompts",
    "--input-path": "give --prompts FILE to flex_opt, or --input FILE to batch",
    "--output-path": "give --output FILE",
    "--model-name": "give --model",
    "--model-name-or-path": "give --model",
    "--model-arch": "the model's config says it; leave it out",
    "--model-type": "the model's config says it; leave it out",
    "--cache-dir": "give --path",
    "--enable-small-cache": "give --hh-ratio R, or --eviction h2o",
    "--enable-h2o-cache": "give --hh-ratio R, or --eviction h2o",
    "--enable-h2o-generation": "give --hh-ratio R, or --eviction h2o",
    "--enable-position-rolling": "give --positions rolling",
    "--heavy-ratio": "give --hh-ratio",
    "--heavy-hitter-size": "give --hh-size",
    "--num-heavy-hitter-tokens": "give --hh-size",
    "--num-window-length": "give --recent-size, which the heavy columns are not in",
    "--start-size": "give --eviction local:sinks=N",
    "--length": "give --gen-len",
    "--no-cuda": "give --device cpu",
    "--fp16": "give --dtype float16",
    "--gbs": "give --gpu-batch-size",
    "--num-gb": "give --num-gpu-batches",
    "--gpu-mem": "give --device-mem",
    "--cpu-mem": "give --host-mem",
    "--nvme-mem": "give --disk-mem",
    "--pad-to-seq-len": "nothing is padded; leave it out",
    **dict.fromkeys(
        ("--head-ip", "--port", "--rank", "--local-rank", "--world-size", "--use-mpi", "--comm-device", "--async-comm"),
        _SHARES_OF_LAYERS,
    ),
}


class OneLineParser(argparse.ArgumentParser):
    """Wrong flags end with one line on stderr and exit code 2.

    The namespace also has `given`: which flags were on the command line, by field.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # of a sub-command's parser too
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._advice(next((word for word in unknown if word.startswith("-")), unknown[0])))
        found.given = {**getattr(found, "given", {}), **self._given}
        return found, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Some Pythons take the `--` of `--flag=--` for the end of the flags, and the flag gets an empty list."""
        if not action.option_strings:
            return super()._get_values(action, arg_strings)
        self._given[action.dest] = action.option_strings[0]
        if arg_strings == [""] and action.const == "":  # a shell variable that is not set, not a flag without a value
            raise argparse.ArgumentError(action, "'' is empty; leave it out")
        if arg_strings != ["--"]:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value if action.nargs in (None, argparse.OPTIONAL) else [value]

    def _advice(self, word: str) -> str:
        """What to do about a word that is no flag of this command."""
        flag = word.partition("=")[0].replace("_", "-")
        if flag in REPLACED:
            return f"{word}: is not a flag here; {REPLACED[flag]}"
        known = [o for a in self._actions if a.help != argparse.SUPPRESS for o in a.option_strings]
        near = difflib.get_close_matches(flag, known, n=1)
        return f"unrecognized arguments: {word}; {f'did you mean {near[0]}?' if near else 'see --help'}"


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
    except BrokenPipeError:  # nobody reads what is printed: `| head`
        _silence_stdout()
        return EXIT_FAILED
    except OSError as error:
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
    """In one piece, so that the lines of several processes do not run into each other."""
    print(line + "\n", end="", file=sys.stderr)


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


def not_empty(text: str) -> str:
    """A text with something in it: an empty one is a shell variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("'' is empty; leave it out")
    return text


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
