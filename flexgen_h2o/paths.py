"""Paths: as users write them (`~` expanded, impossible names refused), and of the data that comes with the package."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from flexgen_h2o.errors import UsageError

DEFAULT_OFFLOAD_DIR = Path("~/flexgen_h2o_offload_dir")


def policies_folder() -> Path:
    """The shipped policies and, in `profiles/`, hardware profiles: inside an installed package, beside a checkout's."""
    package = Path(__file__).resolve().parent
    installed = package / "policies"  # where setup.py maps the folder at the top of the repository
    return installed if installed.is_dir() else package.parent / "policies"


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


def user_cache_dir() -> Path:
    """The package's own folder in the XDG base folder for caches; a relative one is to be ignored."""
    for base in (os.environ.get("XDG_CACHE_HOME", ""), "~/.cache"):
        folder = os.path.expanduser(base)  # as it was, and so relative, where there is no such home
        if os.path.isabs(folder):
            return Path(folder) / "flexgen_h2o"
    return Path(os.devnull) / "flexgen_h2o"  # nobody's home: nothing is kept there, nothing can be
