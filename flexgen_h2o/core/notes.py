"""Notes on stderr from inside the package. Each is written once per process."""

from __future__ import annotations

import sys
from functools import lru_cache


@lru_cache(maxsize=1024)
def say_once(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)
