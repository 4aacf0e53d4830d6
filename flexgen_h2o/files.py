"""Results that appear whole or not at all: a full disk or a signal leaves an older file as it was."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file (UTF-8) to write, which takes the place and the mode of `path` at the end.

    A link is followed, so that its target is replaced and not the link. What is no regular file, is under /dev, or lies
    in a folder that cannot be written to, is written in place. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    if _is_written_in_place(path):
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    draft = target.with_name(f".flexgen-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """`text` as the whole of a file; OSError leaves the older one as it was."""
    with replacing(path) as file:
        file.write(text)


def _is_written_in_place(path: Path) -> bool:
    if not path.exists():
        return False
    return not path.is_file() or path.absolute().is_relative_to("/dev") or not os.access(path.resolve().parent, os.W_OK)
