"""The one writer of files: results that appear whole or not at all, and drafts that lead nowhere else.

No name of a draft can be known beforehand, and none is opened that is there already, as a link too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# What open says of O_TMPFILE where the file system, or the kernel, has no files without a name.
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


def open_new(path: Path, flags: int = os.O_WRONLY, mode: int = 0o666) -> int:
    """A descriptor of a new file. Raises OSError; FileExistsError also for a link, wherever it leads."""
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write_new(path: Path, text: str) -> None:
    """A small new file in a folder that nobody else reads yet. Raises OSError as above."""
    with open(open_new(path), "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


@contextlib.contextmanager
def replacing(path: Path, follow: bool = True, sync: bool = True) -> Iterator[TextIO]:
    """A text file (UTF-8) to write, which takes the place and the mode of `path` at the end; its `buffer` takes bytes.

    follow: a link stays and its target is replaced, and what is no regular file, is under /dev, or lies in a folder
    that cannot be written to, is written in place; False: what has the name is replaced, a link too. sync: the new file
    is there after a power cut, or the older one is whole. Raises OSError.

    Until its end the draft has no name where the file system can do that, so that a killed process leaves nothing.
    """
    if follow and _is_written_in_place(path):
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    target = Path(os.path.realpath(path)) if follow else path.absolute()
    draft = target.with_name(f".flexgen-{secrets.token_hex(8)}.tmp")
    fd, has_name = _open_draft(draft)
    try:
        with open(fd, "w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                older = os.lstat(target)
                if stat.S_ISREG(older.st_mode):
                    os.fchmod(fd, stat.S_IMODE(older.st_mode))
            if sync:
                os.fsync(fd)
            if not has_name:
                has_name = True
                _name_draft(fd, draft)
            os.replace(draft, target)
            has_name = False
    finally:
        if has_name:
            draft.unlink(missing_ok=True)
    if sync:
        _sync_folder(target.parent)


def write_whole(path: Path, text: str, follow: bool = True, sync: bool = True) -> None:
    """`text` as the whole of a file, as `replacing` does it; OSError leaves the older one as it was."""
    with replacing(path, follow, sync) as file:
        file.write(text)


def _open_draft(draft: Path) -> tuple[int, bool]:
    """A descriptor to write to, and whether the draft has its name yet."""
    if os.path.isdir("/proc/self/fd"):  # where a file without a name gets one
        try:
            return os.open(draft.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666), False
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
    return open_new(draft), True


def _name_draft(fd: int, draft: Path) -> None:
    folder = os.open(draft.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # Python follows the link in /proc only where it is given a folder
        os.link(f"/proc/self/fd/{fd}", draft.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _sync_folder(folder: Path) -> None:
    """Put a file's new name on disk. Some file systems cannot, and some folders may be written to and not read."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _is_written_in_place(path: Path) -> bool:
    if not path.exists():
        return False
    return not path.is_file() or path.absolute().is_relative_to("/dev") or not os.access(path.resolve().parent, os.W_OK)
