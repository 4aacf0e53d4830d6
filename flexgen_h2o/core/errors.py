"""The errors that a command turns into an exit code and one line on stderr."""

from __future__ import annotations

import json

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DOES_NOT_FIT = 3
EXIT_ALL_ROWS_FAILED = 4  # of a batch job
SIGNAL_BASE = 128  # a run ended by a signal exits with this plus its number: SIGHUP 129, SIGINT 130, SIGTERM 143


class FlexgenError(Exception):
    """Base of the package's own errors; `exit_code` is what a command exits with."""

    exit_code = EXIT_FAILED


class UsageError(FlexgenError, ValueError):
    """Wrong use or unusable input. The message names the flag or file and what to do."""

    exit_code = EXIT_USAGE


class DoesNotFitError(FlexgenError):
    """A tier's budget is too small. The message says by how much and which flag would help."""

    exit_code = EXIT_DOES_NOT_FIT


class CheckpointChangedError(FlexgenError):
    """A file of the checkpoint was written to, replaced or removed while it was in use. The message names it."""


class TransferError(FlexgenError):
    """Moving bytes failed during the run (a disk error, a truncated file, a worker that raised)."""


class TooLongError(UsageError):
    """A prompt that the model's positions cannot hold."""


class TokenizerError(FlexgenError):
    """The tokenizer, which is other people's code, raised for a text. The message says what."""


def first_line(error: BaseException) -> str:
    """Of what an error says; its kind where it says nothing."""
    return str(error).partition("\n")[0] or type(error).__name__


def internal_reason(error: BaseException) -> str:
    """What a row says of an exception that nobody foresaw."""
    reason = str(error) if isinstance(error, FlexgenError) else f"{type(error).__name__}: {first_line(error)}"
    return f"internal error: {reason}"


def json_reason(error: ValueError | RecursionError) -> str:
    """What is wrong with a JSON text, in words for a user: Python would say "line 1" of one line of many, and name a
    setting of its own where a whole number has more digits than it reads."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return "a whole number has too many digits" if "int_max_str_digits" in str(error) else str(error)
