"""Files: bounded reads, atomic writes, locks (flock), marks of the package's folders, and paths.

Only regular files of bounded size are read, so that no device or pipe fills the memory. Results
appear whole or not at all. A draft's name is random, and an existing file or link with that name is
never opened. The package removes only folders with its mark.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO

from flexgen_h2o.core.errors import FlexgenError, UsageError, json_reason
from flexgen_h2o.core.units import is_text

# Largest settings file (policy, profile, config, index, sidecar). Parsed, it needs up to twenty
# times the memory.
MAX_JSON_BYTES = 8 * 2**20
# Longest line of prompts or requests: a million token ids of six digits, each with a comma and a
# space, fit.
MAX_LINE_BYTES = 8 * 2**20
_LONG_LINE_PIECE = 2**20


# how long, and how often, a free descriptor is waited for
_PATIENCE_S = 10.0
_WAIT_S = 0.05


def is_scarce(error: BaseException | None) -> bool:
    """Return whether an error was caused by a lack of descriptors.

    That is no fault of the file, and passes.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


def open_patiently(path: Path, flags: int, mode: int = 0o666) -> int:
    """Call `os.open`.

    If no descriptor is left, try again for some seconds: others close theirs meanwhile.
    """
    ends = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return os.open(path, flags, mode)
        except OSError as error:
            if not is_scarce(error) or time.monotonic() > ends:
                raise
        time.sleep(_WAIT_S)


def check_working_folder() -> None:
    """Raise UsageError if the working folder has been removed.

    A library of torch would end the process for that.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError(
            "the working folder has been removed; change to another one (cd), and run again"
        ) from error


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises OSError for a device, a pipe, a folder, or no file.
    """
    # O_NONBLOCK: a pipe must not be waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = open_patiently(path, flags)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(
                errno.EINVAL,
                "is no regular file; save what it gives in a file, and name that",
                str(path),
            )
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_bounded(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """Return a regular file's bytes.

    Raises OSError like `open_regular`, and if there are more than `most` bytes.
    """
    with open_regular(path) as file:
        # A file whose size is too large is not read at all. Files in /proc have size 0.
        is_large = os.fstat(file.fileno()).st_size > most
        data = b"" if is_large else file.read(most + 1)
        if is_large or len(data) > most:
            raise OSError(errno.EFBIG, f"is larger than {most // 2**20} MiB", str(path))
    return data


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> Any:
    """Return the value of a JSON file.

    Raises OSError like `read_bounded`, and ValueError if it is not JSON.
    """
    try:
        return json.loads(read_bounded(path, most))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise
        raise ValueError(json_reason(error)) from error


def read_object(path: Path, where: str) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises UsageError, which begins with `where`, if the file cannot be read or contains something
    else.
    """
    try:
        body = read_json(path)
    except OSError as error:
        raise UsageError(
            f"{where}: {error.strerror or error}; name a JSON file that can be read"
        ) from error
    except ValueError as error:
        raise UsageError(f"{where}: not a JSON file ({error})") from error
    if not isinstance(body, dict):
        raise UsageError(f"{where}: a JSON object is expected")
    return body


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines of a regular file from a byte on, each with its newline.

    A line of more than MAX_LINE_BYTES comes in pieces. Each piece has a flag: True if its line
    continues. Raises OSError like `open_regular`.
    """
    with open_regular(path) as file:
        file.seek(offset)
        should_continue = False
        while raw := file.readline(
            min(_LONG_LINE_PIECE, MAX_LINE_BYTES) if should_continue else MAX_LINE_BYTES
        ):
            is_line = raw.endswith(b"\n")
            should_continue = not is_line and bool(file.peek(1))
            yield raw, should_continue
            if not is_line and not should_continue:
                return  # bytes that are appended meanwhile would begin within a line


def is_being_written(path: Path) -> bool:
    """Return whether a process has the file open for writing.

    Only processes that /proc shows to this user are looked at. Without /proc, return False.
    """
    with contextlib.suppress(OSError):
        wanted = os.stat(path)
        for fd in _open_files():
            with contextlib.suppress(OSError, ValueError):
                if os.path.samestat(os.stat(fd), wanted):
                    info = Path(fd.replace("/fd/", "/fdinfo/")).read_text().split()
                    if int(info[info.index("flags:") + 1], 8) & os.O_ACCMODE != os.O_RDONLY:
                        return True
    return False


def _open_files() -> Iterator[str]:
    """Yield the paths in /proc of all open files of processes that may be looked into."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{process}/fd"):
                yield f"/proc/{process}/fd/{fd}"


# JSON leaves these characters as they are, but readers that split lines by Unicode rules split at
# them.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def json_line(value: object) -> str:
    """Return a value as a line of JSON, without its newline.

    The line has no character at which a reader of lines could split. Half surrogates, which UTF-8
    cannot encode, are escaped.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if text.isascii():
        return text
    if not is_text(text):
        return json.dumps(value, allow_nan=False)
    for end, escape in _LINE_ENDS.items():
        text = text.replace(end, escape)
    return text


# Errors of open with O_TMPFILE if the file system, or the kernel, does not support files without a
# name.
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


def open_new(path: Path) -> int:
    """Return a descriptor of a new file for writing.

    Raises OSError. A link counts as an existing file (FileExistsError), wherever it leads.
    """
    return open_patiently(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC)


def write_new(path: Path, text: str) -> None:
    """Write a small new file in a folder that nobody else reads yet.

    Raises OSError like `open_new`.
    """
    with open(open_new(path), "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def sync_path(path: Path) -> None:
    """Force a file, or a folder with the names in it, to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(
    path: Path, follow: bool = True, sync: bool = True, in_place: bool = True
) -> Iterator[TextIO]:
    """Yield a text file (UTF-8) that replaces `path` at the end and gets its mode.

    Its `buffer` accepts bytes.

    follow: a link stays and its target is replaced. A file that is not regular, is under /dev, or
    lies in a folder without write permission is written in place. False: the name is replaced, even
    if it is a link. sync: after a power cut either the new file or the older one is whole.
    in_place: False: never write in place, as for a file that is read meanwhile. Raises OSError.

    If the file system allows it, the draft has no name until its end, so a killed process leaves
    nothing.
    """
    if follow and in_place and _is_written_in_place(path):
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
        with contextlib.suppress(OSError):  # file system or permissions may not allow it
            sync_path(target.parent)


def write_whole(path: Path, text: str, follow: bool = True, sync: bool = True) -> None:
    """Write `text` as the whole of a file, by `replacing`.

    After an OSError the older file is unchanged.
    """
    with replacing(path, follow, sync) as file:
        file.write(text)


def write_result(path: Path, content: object, flag: str) -> None:
    """Write a text, or any other value as JSON, as the whole of the file that a flag names.

    Raises FlexgenError that names flag and file.
    """
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise FlexgenError(f"{flag} {path}: {error.strerror or error}") from error


def write_picture(path: Path, figure: Any) -> None:
    """Write a matplotlib figure as a whole file. The suffix names the format.

    Raises FlexgenError that names --plot and the file.
    """
    try:
        with replacing(path) as file:
            figure.savefig(file.buffer, format=path.suffix.lower().removeprefix("."), dpi=110)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        raise FlexgenError(f"--plot {path}: {error}") from error


def check_writable(path: Path, flag: str) -> None:
    """Raise UsageError that names `flag` if a file could not be written after the run.

    Creates nothing.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{flag} {path}: is a folder; name a file in it")
    # Opening a pipe would wait for a reader. Standard output may be a pipe: /dev/stdout is in
    # /proc.
    if path.exists() and not (
        path.is_file() or path.is_char_device() or os.path.realpath(path).startswith("/proc/")
    ):
        raise UsageError(f"{flag} {path}: is no regular file; name one")
    if not folder.is_dir():
        raise UsageError(f"{flag} {path}: the folder {folder} does not exist; create it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{flag} {path}: no permission to write there")


def check_folder(path: Path, flag: str) -> Path:
    """Return `path` as a usable path. Folders on the way to it may be missing.

    Raises UsageError if nothing could be written below it.
    """
    path = usable_path(path, flag)
    there = next(
        folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
    )
    if there != path.absolute() and not there.is_dir():
        raise UsageError(f"{flag} {path}: {there} is no folder; name another")
    if not os.access(there, os.W_OK):
        raise UsageError(f"{flag} {path}: no permission to write in {there}")
    return path


def _open_draft(draft: Path) -> tuple[int, bool]:
    """Return a descriptor for writing, and whether the draft already has its name."""
    if os.path.isdir("/proc/self/fd"):  # a file without a name gets one through this folder
        try:
            return open_patiently(draft.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC), False
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
    return open_new(draft), True


def _name_draft(fd: int, draft: Path) -> None:
    folder = open_patiently(draft.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # Python follows the link in /proc only if a folder is passed
        os.link(f"/proc/self/fd/{fd}", draft.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _is_written_in_place(path: Path) -> bool:
    if not path.exists():
        return False
    return (
        not path.is_file()
        or path.absolute().is_relative_to("/dev")
        or not os.access(path.resolve().parent, os.W_OK)
    )


MARK = ".flexgen_h2o"  # name of a file in each folder that the package has made
_MADE_BY = {"made_by": "flexgen_h2o"}
_MARK_BYTES = 2**20


# Errors of flock on a file system without locks: Lustre without its mount option, NFS without
# lockd, some FUSE.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_guards: dict[int, Path] = {}  # guard files of this process's locks, by descriptor
_EMPTY_GUARD_S = 10.0  # age from which a guard file without content is no longer being written
_GUARD_TRIES = 3


def try_lock(fd: int, shared: bool = False) -> bool:
    """Lock an open file or folder without waiting. Returns False if another process holds the lock.

    On a file system without locks a guard file stands in for one (`guard_of`). It holds until the
    descriptor is closed or the process has ended. A shared lock is then only tested.

    shared: others may share it. Raises OSError if there can be no guard file either.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return _try_guard(fd, shared)
    return True


def wait_for_lock(fd: int, shared: bool = False) -> None:
    """Lock an open file or folder like `try_lock`, and wait for whoever holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        while not _try_guard(fd, shared):
            time.sleep(_WAIT_S)


def close_locked(fd: int) -> None:
    """Close a descriptor that holds a lock, and remove the lock's guard file if it has one."""
    guard = _guards.pop(fd, None)
    if guard is not None:
        with contextlib.suppress(OSError):
            if guard.read_text() == _guard_text(fd):
                guard.unlink()
    os.close(fd)


def has_guard(fd: int) -> bool:
    """Return whether the lock of a descriptor is a guard file."""
    return fd in _guards


def guard_of(path: Path) -> Path:
    """Return the guard file of a file or folder.

    It is beside a file, in a folder, and for a marked folder's mark beside the folder.
    """
    if path.is_dir():
        return path / f".{MARK.strip('.')}.guard"
    held = path.parent if path.name == MARK else path
    return held.with_name(f".{held.name}.guard")


def _guard_text(fd: int) -> str:
    """Return what a guard file says of its holder: machine, start of the machine, process, fd."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return json.dumps([os.uname().nodename, boot, os.getpid(), fd]) + "\n"


def _try_guard(fd: int, shared: bool) -> bool:
    """Take the guard file in place of a lock. Return False if its holder is alive."""
    guard = guard_of(Path(os.readlink(f"/proc/self/fd/{fd}")))
    for _ in range(_GUARD_TRIES):
        try:
            before = guard.read_text()
            if before == _guard_text(fd):
                return True
            if _is_alive(guard, before, fd):
                return False
            _remove_guard(guard, before)
        except FileNotFoundError:
            pass
        if shared:
            return True
        with contextlib.suppress(FileExistsError):
            write_new(guard, _guard_text(fd))
            _guards[fd] = guard
            return True
    return False


def _is_alive(guard: Path, text: str, fd: int) -> bool:
    """Return whether the holder that a guard file names still has the file open.

    Nobody can tell for a process on another machine, so it counts as alive.
    """
    if not text:
        return time.time() - guard.stat().st_mtime < _EMPTY_GUARD_S
    try:
        host, boot, process, holding = json.loads(text)
        here, now, _, _ = json.loads(_guard_text(fd))
        if host != here:
            return True
        found = os.stat(f"/proc/{int(process)}/fd/{int(holding)}")
        return bool(boot == now) and os.path.samestat(found, os.fstat(fd))
    except PermissionError:
        return True  # another user's process
    except (OSError, ValueError, TypeError):
        return False


def _remove_guard(guard: Path, text: str) -> None:
    """Remove a guard file whose holder is dead, unless another process has just done so."""
    away = guard.with_name(f"{guard.name}.{secrets.token_hex(8)}")
    os.rename(guard, away)
    if away.read_text() != text:  # a new holder's
        with contextlib.suppress(FileExistsError):
            os.link(away, guard)
    away.unlink()


def is_still(path: Path, fd: int) -> bool:
    """Return whether the open file is still the one at `path`.

    It may have been removed or replaced, also while its lock was waited for.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def lock_folder(folder: Path, shared: bool = False, waits: bool = False) -> int | None:
    """Return a descriptor that holds the lock of a marked folder until it is closed.

    None: another process holds the lock, or has removed the folder. waits: wait for whoever holds
    it. The lock is on the mark; the folder's own lock belongs to processes that make folders in it.
    Raises OSError if there is no mark or the file system has no locks.
    """
    fd = os.open(folder / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if waits:
            wait_for_lock(fd, shared)
        if try_lock(fd, shared) and is_still(folder / MARK, fd):
            return fd
    except BaseException:
        close_locked(fd)
        raise
    close_locked(fd)
    return None


def mark(folder: Path, **facts: object) -> None:
    """Mark a folder as made by the package, with facts about it. Raises OSError."""
    write_whole(folder / MARK, json.dumps({**_MADE_BY, **facts}) + "\n", follow=False, sync=False)


def read_mark(folder: Path) -> dict[str, Any] | None:
    """Return the facts of `mark`; None for a folder without a mark, and for a link."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return None
        fd = os.open(folder / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:  # open() refuses a folder, but leaves its descriptor open
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            with open(fd, "rb", closefd=False) as file:
                found = json.loads(file.read(_MARK_BYTES))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _MADE_BY.items() <= found.items() else None


DEFAULT_OFFLOAD_DIR = Path("~/flexgen_h2o_offload_dir")


def expanded(text: str | Path) -> Path:
    """Return a path with `~` expanded.

    Without a home that can be written to, as for a container's bare uid, a folder of this user in
    the temporary folder takes its place. Raises RuntimeError for an unknown user, or if that folder
    cannot be made or is another user's.
    """
    path = Path(text)
    if path.parts[:1] != ("~",):
        return path.expanduser()
    home = os.path.expanduser("~") if os.environ.get("HOME") != "" else "~"
    if os.path.isabs(home) and (
        os.access(home, os.W_OK) or (Path(home, *path.parts[1:2]).is_dir() and path.parts[1:])
    ):
        return path.expanduser()
    base = Path(tempfile.gettempdir()) / f"flexgen_h2o-{os.getuid()}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(base)
    except OSError as error:
        raise RuntimeError(f"there is no home, and {base}: {error.strerror}; set HOME") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RuntimeError(f"there is no home, and {base} is another user's; set HOME")
    return base.joinpath(*path.parts[1:])


def policies_folder() -> Path:
    """Return the folder of shipped policies, with hardware profiles in `profiles/`.

    It is inside an installed package, or beside the package in a checkout.
    """
    package = Path(__file__).resolve().parent.parent
    # setup.py maps the folder at the top of the repository to this one.
    installed = package / "policies"
    return installed if installed.is_dir() else package.parent / "policies"


def existing_folder(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def usable_path(text: str | Path, what: str) -> Path:
    """Return `text` as a path, with `~` expanded. `what` names the flag in the error.

    Raises UsageError for:
    - an empty text, which would mean the current folder
    - an unknown user
    - a name that is too long or has a NUL byte
    - a path below a folder that may not be looked into
    - anything that is not a path
    """
    if text == "":
        raise UsageError(f"{what} '': is empty; name a file or folder, or leave {what} out")
    try:
        path = expanded(text)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{what} {str(text)[:60]!r}: not a usable path ({reason})") from error
    return path


def user_cache_dir() -> Path:
    """Return the package's folder in XDG_CACHE_HOME.

    If that is not an absolute path, the folder is in ~/.cache.
    """
    for base in (os.environ.get("XDG_CACHE_HOME", ""), "~/.cache"):
        with contextlib.suppress(RuntimeError):
            folder = expanded(base)
            if folder.is_absolute():
                return folder / "flexgen_h2o"
    return Path(os.devnull) / "flexgen_h2o"  # there is no folder, so nothing can be kept
