"""The table of scripts/gpu_suite.sh: one line for each file of watch_flex_opt.py, and all of them as one JSON file.

A decode that was cut short is projected, as flex_opt does. `device`: the plan's bytes, and in brackets what the card's
tensors held at most, by torch's own count.

    python bench/gpu_summary.py FOLDER_WITH_RUNS [--output FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import common
from common import GB

COLUMNS = ("run", "rows", "prefill s", "s a decode sweep", "decode tok/s", "total tok/s", "h2d GB", "disk GB",
           "device GB", "RSS GB", "wall s")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))}
    lines = [COLUMNS, *(_line(name, run) for name, run in runs.items())]
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(COLUMNS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip())
    common.finish({"benchmark": "gpu_suite", "runs": runs}, args.output)


def _line(name: str, run: dict[str, Any]) -> tuple[str, ...]:
    report, card = run["report"], run["card"]
    if report is None:
        return (name, f"exit code {run['exit_code']}")
    sweeps, io = max(1, report["gen_len"] - 1), report["io_bytes"]
    really = f" ({card['allocated'] / GB:.2f})" if card and card["allocated"] else ""
    return (
        name,
        str(report["num_prompts"]),
        f"{report['prefill']['seconds']:.2f}",
        f"{report['decode']['seconds'] / sweeps:.3f}" + "*" * report["projected"],
        f"{report['decode']['tokens_per_s']:.1f}",
        f"{report['total']['tokens_per_s']:.1f}",
        f"{io['h2d'] / GB:.1f}",
        f"{io['disk_read'] / GB:.1f}",
        f"{report['peak_bytes']['device'] / GB:.2f}{really}",
        f"{run['memory']['hwm'] / GB:.2f}",
        f"{run['seconds']:.0f}",
    )


if __name__ == "__main__":
    main()
