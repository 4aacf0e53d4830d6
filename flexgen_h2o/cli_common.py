"""Provide what all command lines share: one-line errors, exit codes, signals, and types of flags'
values.

This module imports nothing heavy, so that `--help` and errors in flags appear at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, cast

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import (
    EXIT_ALL_ROWS_FAILED,
    EXIT_DOES_NOT_FIT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USAGE,
    SIGNAL_BASE,
    FlexgenError,
    UsageError,
)
from flexgen_h2o.core.files import check_working_folder, check_writable, usable_path, write_result
from flexgen_h2o.core.units import is_text
from flexgen_h2o.parser import OneLineParser, as_typed, forget_spellings

PICTURES = (".png", ".svg", ".pdf")
_CLEAR_LINE = "\r\x1b[K"
_PERCENTAGE = re.compile(r"\d+(\.\d+)?%")


_verb = ""  # the verb of `flexgen-h2o VERB`, while it runs
_results: list[str] = []  # files that hold the results of the run
_notes: list[str] = []  # notes that wait to be printed


@contextlib.contextmanager
def called_as(verb: str) -> Iterator[None]:
    """Let a command call itself by this name, not by its module's, in the `with` block."""
    global _verb
    before = _verb
    _verb = verb
    try:
        yield
    finally:
        _verb = before


def own_name(name: str) -> str:
    """Return the name by which the command was called, or `name`, its module's."""
    return _verb or name


def results_are_in(*paths: str | Path | None) -> None:
    """Declare that these files get the results; None is a file that was not asked for.

    What is printed is a summary then, and losing it is not a failure.
    """
    _results.extend(str(path) for path in paths if path is not None)


def say(name: str, line: str) -> None:
    """Print a line of progress on stderr, now."""
    print(f"{own_name(name)}: {line}", file=sys.stderr, flush=True)


def note(name: str, line: str) -> None:
    """Keep a note, which is printed on stderr before anything else is.

    A run that is refused until then prints its one line and no notes.
    """
    _notes.append(f"{own_name(name)}: {line}")


class _PatientStream:
    """A standard stream that remembers a failed write and raises nothing.

    stops: raise if nobody reads the pipe any more (`| head`) and no file gets the results.

    A run must not end because its summary cannot be printed. Other text than a progress bar begins
    on a line of its own: the bar's line is cleared first, and the bar's next update draws it again.
    """

    _with_bar: _PatientStream | None = None  # the terminal whose last line is a progress bar

    def __init__(self, stream: TextIO, stops: bool) -> None:
        self._stream = stream
        self._stops = stops
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        _print_notes()
        # The encoding may lack a character of a prompt or of a file's name.
        encoding = self._stream.encoding or "utf-8"
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        bar = _PatientStream._with_bar
        if text.startswith("\r"):  # tqdm draws every bar so
            _PatientStream._with_bar = self if self._stream.isatty() else None
        elif text and bar is not None:
            _PatientStream._with_bar = None
            if text != "\n":  # else the bar is closed
                bar._try(lambda: bar._stream.write(_CLEAR_LINE))
                bar.flush()
        self._try(lambda: self._stream.write(shown))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            self.error = self.error or error
            if self._stops and not _results and isinstance(error, BrokenPipeError):
                raise

    def close_up(self) -> None:
        """Flush for the last time.

        If that fails, let Python's own flush at exit write to /dev/null.
        """
        self._stops = False
        self.flush()
        if self.error is not None:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _print_notes() -> None:
    lines = _notes[:]
    _notes[:] = []
    _print_on_stderr(lines)


def _print_on_stderr(lines: Iterable[str]) -> None:
    """Print each line in one write, so that lines of several processes do not mix.

    Errors are ignored, because the terminal may be gone.
    """
    with contextlib.suppress(OSError):
        for line in lines:
            shown = " ".join(as_typed(line).splitlines())  # a value may have line ends in it
            print(shown + "\n", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _patient_streams() -> Iterator[_PatientStream]:
    """Replace standard output and error by streams that end no run.

    A stream that the shell has closed (`>&-`) becomes /dev/null.
    """
    # A file opened later must not get the number of a closed one: libraries print there.
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr  # either is None if the shell has closed it
    with open(os.devnull, "w") as nowhere:
        out, err = (
            _PatientStream(stream or nowhere, stops=stream is before[0]) for stream in before
        )
        if before[0] is None:
            out.error = OSError(errno.EBADF, "it is closed")
        sys.stdout = cast(TextIO, out)
        sys.stderr = cast(TextIO, err)
        _results.clear()
        _notes.clear()
        try:
            yield out
        finally:
            sys.stdout, sys.stderr = before
            for stream in (out, err):
                stream.close_up()


def run_cli(name: str, body: Callable[[list[str] | None], int], argv: list[str] | None) -> int:
    """Run a command's body. Every failure becomes its exit code and one line on stderr.

    Internal errors print a traceback.
    """
    name = own_name(name)
    forget_spellings()
    with interrupts.as_exceptions(), _patient_streams() as out, called_as(name):
        try:
            code = _exit_code(name, body, argv)
        except Exception:
            # A signal's exception may have become another one on its way.
            signal = interrupts.arrived()
            if signal is None:
                raise
            return _ended_by(name, signal)
        return _code_with_loss(name, code, out)


def _exit_code(name: str, body: Callable[[list[str] | None], int], argv: list[str] | None) -> int:
    try:
        check_working_folder()
        code = body(argv)
        _print_notes()
        sys.stdout.flush()
        interrupts.check()
        return code
    except FlexgenError as error:
        interrupted = interrupts.arrived()  # the error may be a consequence of the signal
        if interrupted is not None:
            return _ended_by(name, interrupted)
        _complain(f"{name}: {error}")
        return error.exit_code
    except interrupts.Interrupted as signal:
        return _ended_by(name, signal)
    except SystemExit as stop:  # argparse: --help
        sys.stdout.flush()
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    except OSError as error:
        interrupted = interrupts.arrived()
        if interrupted is not None:  # writing to a terminal that has gone away
            return _ended_by(name, interrupted)
        if isinstance(error, FileNotFoundError):
            try:
                check_working_folder()
            except UsageError as reason:
                _complain(f"{name}: {reason}")
                return EXIT_FAILED
        if not isinstance(error, BrokenPipeError) or getattr(sys.stdout, "error", None) is None:
            raise
        return EXIT_FAILED  # nobody reads what is printed: `| head`
    except MemoryError:
        _complain(f"{name}: the machine ran out of memory; lower --host-mem")
        return EXIT_FAILED
    except RuntimeError as error:
        # torch's error; importing torch here would slow --help down
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _complain(
            f"{name}: the GPU ran out of memory; lower --device-mem, or end what else uses it"
        )
        return EXIT_DOES_NOT_FIT


def _code_with_loss(name: str, code: int, out: _PatientStream) -> int:
    """Return `code`, or EXIT_FAILED if the output is lost and no file has it. Print a line then."""
    if out.error is None or code not in (EXIT_DONE, EXIT_ALL_ROWS_FAILED):
        return code
    is_meant = isinstance(out.error, BrokenPipeError) or (
        out.error.errno == errno.EBADF and _results
    )
    if not is_meant:
        where = (
            f"; only the summary is lost, the results are in {', '.join(_results)}"
            if _results
            else ""
        )
        _complain(
            f"{name}: cannot write to standard output ({out.error.strerror or out.error}){where}"
        )
    return code if _results else EXIT_FAILED


def _complain(line: str) -> None:
    _notes.clear()
    _print_on_stderr([line])


def _ended_by(name: str, signal: interrupts.Interrupted) -> int:
    _complain(f"{name}: ended by {signal}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return SIGNAL_BASE + signal.number


def flag_of(field: str) -> str:
    """Return the flag that sets a field: `top_p` -> `--top-p`."""
    return "--" + field.replace("_", "-")


def add_result_flags(parser: OneLineParser) -> None:
    """Add the flags of the files that `write_results` writes."""
    add = parser.add_argument
    add("--json", type=file_name, metavar="FILE", help="write all figures")
    add("--markdown", type=file_name, metavar="FILE", help="write the table that is printed")
    plot = "write a picture (.png, .svg; needs matplotlib: the extra `plot`)"
    add("--plot", type=file_name, metavar="FILE", help=plot)


def check_results(
    args: argparse.Namespace, read: Sequence[str] = (), rows: str | None = None
) -> None:
    """Check the paths of --json, --markdown and --plot, and declare that they get the results.

    read, rows: as for `check_files`. Raise UsageError before the run if a file could not be
    written.
    """
    check_files(args, read, ("json", "markdown", "plot"), rows)
    if args.plot is not None:
        check_picture(args.plot)
    results_are_in(args.json, args.markdown)


def write_results(
    args: argparse.Namespace,
    result: Any,
    markdown: str,
    draw: Callable[[Any, Path], None] | None = None,
) -> None:
    """Print the tables, and write the files that --json, --markdown and --plot name.

    draw: draws the result into a picture, if there is something to draw.

    Raise FlexgenError as `write_result` does.
    """
    print(markdown)
    for name, content in (("json", result), ("markdown", markdown)):
        if getattr(args, name) is not None:
            write_result(getattr(args, name), content, flag_of(name))
    if draw is not None and args.plot is not None:
        draw(result, args.plot)


def check_files(
    args: argparse.Namespace, read: Sequence[str], written: Sequence[str], rows: str | None = None
) -> None:
    """Expand the paths in these fields of `args`, and refuse outputs that the run could not write.

    rows: the field of an output whose folder the caller checks.

    Raise UsageError that names the flag. It is also raised if an output is a file that another flag
    reads, including --policy and --hardware.
    """
    outputs = (*(() if rows is None else (rows,)), *written)
    for name in (*read, *outputs):
        if getattr(args, name):
            setattr(args, name, usable_path(getattr(args, name), flag_of(name)))
    for name in written:
        if getattr(args, name) is not None:
            check_writable(getattr(args, name), flag_of(name))
    check_separate(
        args, (*(name for name in read if getattr(args, name)), "policy", "hardware"), outputs
    )


def check_separate(args: argparse.Namespace, read: Iterable[str], written: Iterable[str]) -> None:
    """Raise UsageError if an output is also an input, another output, or a file of the model.

    read, written: fields of `args`.
    """
    given = [(name, getattr(args, name)) for name in (*read, *written)]
    paths = [(name, os.path.expanduser(path)) for name, path in given if path not in (None, "auto")]
    outputs = set(written)
    for i, (name, path) in enumerate(paths):
        for other, there in paths[:i]:
            if (
                name in outputs
                and (other in outputs or os.path.isfile(there))
                and _is_same(path, there)
            ):
                raise UsageError(
                    f"{flag_of(name)} {path}: is the file of {flag_of(other)} too; give another "
                    "name"
                )
    _check_keeps_model(args, [(name, path) for name, path in paths if name in outputs])


def _check_keeps_model(args: argparse.Namespace, written: Iterable[tuple[str, str]]) -> None:
    """Raise UsageError if an output is a file of the model folder, or would be read as one.

    Files in the hub cache are not checked.
    """
    from flexgen_h2o.checkpoint.resolve import find_folder, is_model_file

    if args.model is None:
        return
    try:
        folder = find_folder(args.model, args.path)
        files = (
            []
            if folder is None
            else [str(path) for path in folder.iterdir() if is_model_file(path.name)]
        )
    except (UsageError, OSError):  # reported when the model is opened
        return
    for name, path in written:
        target = os.path.realpath(path)
        is_new = folder is not None and is_model_file(os.path.basename(target))
        if any(_is_same(path, there) for there in files) or (
            is_new and os.path.dirname(target) == os.path.realpath(str(folder))
        ):
            raise UsageError(
                f"{flag_of(name)} {path}: is the name of a file of --model {args.model}; give "
                "another name"
            )


def _is_same(path: str, other: str) -> bool:
    """Return whether two names lead to one file, by links or not.

    Devices like /dev/null are never the same.
    """
    if os.path.exists(path) and os.path.exists(other):
        return os.path.isfile(path) and os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def file_name(text: str) -> Path:
    """Return a path. Refuse an empty one, which would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a file name")
    return Path(text)


def not_empty(text: str) -> str:
    """Return a text. Refuse an empty one, which would be a shell variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("'' is empty; leave it out")
    return text


def check_words(**words: str | None) -> None:
    """Raise UsageError if a text of the command line is not UTF-8.

    words: texts by the field of their flag; None if the flag was not given.
    """
    for field, text in words.items():
        if text is not None and not is_text(text):
            raise UsageError(f"{flag_of(field)}: is not UTF-8 text; write it in UTF-8")


def boolean(text: str) -> bool:
    """Return the value of `true/false`, `yes/no`, `1/0` and so on, as FlexGen's flags do."""
    if text.lower() in ("true", "t", "yes", "y", "1", "on"):
        return True
    if text.lower() in ("false", "f", "no", "n", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not true or false")


def number(text: str) -> float:
    """Return any number. If a percentage is given, the message says how to write it."""
    try:
        return float(text)
    except ValueError as error:
        advice = f"; write {float(text[:-1]) / 100:g}" if _PERCENTAGE.fullmatch(text) else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a number{advice}") from error


def share(text: str) -> float:
    """Return the share that a flag gives: `20%` or `0.2`."""
    try:
        value = float(text[:-1]) / 100 if _PERCENTAGE.fullmatch(text) else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write 20% or 0.2") from error
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is more than all; write 20% or 0.2")
    return value


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def count(text: str) -> int:
    """Return a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def check_picture(path: Path) -> None:
    """Raise UsageError before the run if --plot could not draw `path`.

    Its suffix names no format, or matplotlib is missing.
    """
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"--plot {path}: the file name must end in one of {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot: needs matplotlib; pip install -e '.[plot]' in a clone")
