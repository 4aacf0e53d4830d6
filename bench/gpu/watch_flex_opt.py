"""Runs flex_opt in this process and writes its report with what the process really took: RSS and
the card's memory.

python -m bench.gpu.watch_flex_opt FILE --model facebook/opt-6.7b --path _DUMMY_ ...
(flex_opt's own flags)
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o import flex_opt


def main() -> int:
    target = Path(sys.argv[1])
    flags = sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        start = time.perf_counter()
        code = flex_opt.main([*flags, "--no-log", "--verbose", "1", "--json", str(report)])
        found = {
            "exit_code": code,
            "seconds": time.perf_counter() - start,
            "report": json.loads(report.read_text()) if report.exists() else None,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "card": _card(),
            "flags": flags,
        }
    target.write_text(json.dumps(found) + "\n")
    return code


def _card() -> dict[str, Any] | None:
    """Most bytes of card memory that tensors held, and that torch's allocator took for them; None
    without a card."""
    if not torch.cuda.is_available():
        return None
    return {
        "name": torch.cuda.get_device_name(),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


if __name__ == "__main__":
    sys.exit(main())
