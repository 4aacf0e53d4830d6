"""Small JSON files beside an output: replaced whole, so that a reader never sees half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def replace_json(path: Path, body: dict[str, Any], durable: bool) -> None:
    """Write `body`: the file is the old one or the new one, with `durable` also after a power cut.

    One process at a time, which holds the output's lock; what a killed one left is overwritten. OSError if it fails.
    """
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(json.dumps(body, indent=1) + "\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if durable:
        sync_folder(path)


def sync_folder(path: Path) -> None:
    """Make the name of a file safe on disk."""
    folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
