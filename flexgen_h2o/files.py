"""Files in and out. What is read is a regular file of bounded size, so that no device or pipe fills the memory.
Results appear whole or not at all: a full disk or a signal leaves an older file as it was."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO

# Of a settings file: policy, profile, config, index, sidecar. Parsed, it takes at most some twenty times as much.
MOST_JSON_BYTES = 8 * 2**20
# Of a line of prompts or requests. A million token ids of six digits, each with a comma and a space, fit in.
MOST_LINE_BYTES = 8 * 2**20
_LONG_LINE_PIECE = 2**20


def open_regular(path: Path) -> BufferedReader:
    """A file to read from, if it is a regular one, by links or not. OSError: a device, a pipe, a folder; not there."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe must not be waited for
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is no regular file; save what it gives in a file, and name that", str(path))
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_bounded(path: Path, most: int = MOST_JSON_BYTES) -> bytes:
    """A regular file's bytes. OSError as of `open_regular`, and where there are more than `most`."""
    with open_regular(path) as file:
        # The size is asked first, so that nothing is read of a large file, and not believed: that of /proc's is 0.
        is_large = os.fstat(file.fileno()).st_size > most
        data = b"" if is_large else file.read(most + 1)
        if is_large or len(data) > most:
            raise OSError(errno.EFBIG, f"is larger than {most // 2**20} MiB", str(path))
    return data


def read_json(path: Path, most: int = MOST_JSON_BYTES) -> Any:
    """The value of a JSON file. OSError as of `read_bounded`, ValueError where it is not JSON."""
    try:
        return json.loads(read_bounded(path, most))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, bool]]:
    """The lines of a regular file from a byte on, each with its newline; OSError as of `open_regular`.

    A line of more than MOST_LINE_BYTES comes in pieces. The flag says of each piece: does its line go on?
    """
    with open_regular(path) as file:
        file.seek(offset)
        goes_on = False
        while raw := file.readline(min(_LONG_LINE_PIECE, MOST_LINE_BYTES) if goes_on else MOST_LINE_BYTES):
            goes_on = not raw.endswith(b"\n") and bool(file.peek(1))
            yield raw, goes_on


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
