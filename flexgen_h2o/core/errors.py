"""Errors that a command turns into an exit code and one line on stderr."""

from __future__ import annotations

import json

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DOES_NOT_FIT = 3
EXIT_ALL_ROWS_FAILED = 4  # every line of a batch job is an error
# A run that a signal ends exits with this plus its number: SIGHUP 129, SIGINT 130, SIGTERM 143.
SIGNAL_BASE = 128


class FlexgenError(Exception):
    """Base of the package's own errors.

    `exit_code` is the exit code of a command that raises it.
    """

    exit_code = EXIT_FAILED


class UsageError(FlexgenError, ValueError):
    """Wrong use or unusable input. The message names the flag or file and the remedy."""

    exit_code = EXIT_USAGE


class DoesNotFitError(FlexgenError):
    """A tier's budget is too small.

    The message shows how much is missing and which flag would help.
    """

    exit_code = EXIT_DOES_NOT_FIT


class TransferError(FlexgenError):
    """Moving bytes failed during the run (a disk error, a truncated file, a worker that raised)."""


class TooLongError(UsageError):
    """A prompt has more tokens than the model has positions."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return str(error).partition("\n")[0] or type(error).__name__


def internal_reason(error: BaseException) -> str:
    """Return the error message of a prompt for an exception that nobody foresaw."""
    reason = (
        str(error)
        if isinstance(error, FlexgenError)
        else f"{type(error).__name__}: {first_line(error)}"
    )
    return f"internal error: {reason}"


def json_reason(error: ValueError | RecursionError) -> str:
    """Return what is wrong with a JSON text, in words for a user.

    Python would write "line 1" for one line of many. For a whole number with more digits than it
    reads, it would name a setting of its own.
    """
    if isinstance(error, json.JSONDecodeError):
        if error.doc[error.pos : error.pos + 1] == "\ufeff":
            return (
                f"a byte order mark at character {error.pos + 1}, as of two files that were joined "
                "within a line; begin a new line there"
            )
        return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    return (
        "a whole number has too many digits" if "int_max_str_digits" in str(error) else str(error)
    )
