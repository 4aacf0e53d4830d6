"""Paths as users write them: `~` expanded, and refused at the door when no file could ever have that name."""

from __future__ import annotations

import contextlib
from pathlib import Path

from flexgen_h2o.errors import UsageError

DEFAULT_OFFLOAD_DIR = Path("~/flexgen_h2o_offload_dir")


def usable_path(text: str | Path, what: str) -> Path:
    """`text` with `~` expanded. `what` names the flag in the error.

    Raises UsageError for an empty one (it would be the current folder), an unknown user, a name that is too long or
    holds a NUL byte, and for what is no path at all.
    """
    if text == "":
        raise UsageError(f"{what} '': is empty; name a file or folder, or leave {what} out")
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{what} {str(text)[:60]!r}: not a usable path ({reason})") from error
    return path
