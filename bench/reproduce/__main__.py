"""One command for each figure and table of H2O, MiniKV and FlexGen, from the one list of them.

    bash scripts/reproduce.sh --quick                         every command, small, on the test model; writes one page
    bash scripts/reproduce.sh --quick --only attention fidelity
    python -m bench.reproduce --page bench/reproduce/README.md        writes that page, with the planner's predictions

`--quick` shows that a command works. It continues when one fails; then the exit code is 1, and the last line names it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench import common
from bench.reproduce.rows import ROWS, Row, write_inputs
from flexgen_h2o import policy_search
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import check_writable, usable_path, write_result
from flexgen_h2o.core.units import markdown_table
from flexgen_h2o.parser import OneLineParser

MACHINES = ("t4", "a100-80", "build-2core")
LIMIT_S, MOST_LINES = 300.0, 24


# ---- the quick run


@dataclass(frozen=True)
class Ran:
    """code: the exit code, None where the limit ended it. lines: main figures, or what was said at last."""

    row: Row
    code: int | None
    seconds: float
    lines: list[str]


def run_row(row: Row, work: Path, limit_s: float) -> Ran:
    """In a shell whose `python` is this interpreter, from the repository's root."""
    script = f'set -o pipefail; cd "$ROOT"; python() {{ "$PYTHON" "$@"; }}; {row.quick}'
    environment = common.environment() | {"PYTHON": sys.executable, "ROOT": str(common.ROOT), "WORK": str(work)}
    began = time.perf_counter()
    code, out, said = common.run_limited(["bash", "-c", script], environment, limit_s)
    seconds = time.perf_counter() - began
    if code:
        return Ran(row, code, seconds, said.strip().splitlines()[-1:])
    lines = [line for line in out.splitlines() if re.search(row.keep, line)]
    return Ran(row, code, seconds, lines[:MOST_LINES] if code == 0 else [f"not done after {limit_s:.0f} s"])


def quick_page(done: Sequence[Ran], machine: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {machine[name]}" for name in ("date", "commit", "cpu", "cores", "torch"))
    failed = [ran.row.name for ran in done if ran.code != 0]
    heads = ["row", "of", "exit code", "seconds"]
    table = [[f"[{r.row.name}](#{r.row.name})", r.row.paper, _code(r), f"{r.seconds:.0f}"] for r in done]
    parts = [
        "# Every command, small, on the test model",
        f"Made by `bash scripts/reproduce.sh --quick`: {facts}. "
        f"{len(done)} commands in {sum(r.seconds for r in done):.0f} s, "
        + (f"failed: {', '.join(failed)}." if failed else "none failed."),
        "This shows that each command works. It shows nothing about the papers' figures: the model and the inputs are "
        "far too small.",
        "\n".join(markdown_table(heads, table)),
    ]
    for r in done:
        parts += [f"## {r.row.name}", f"{r.row.paper}: {r.row.shows}.", f"```bash\n{r.row.quick}\n```"]
        parts.append(f"Exit code {_code(r)}, {r.seconds:.1f} s.")
        is_table = r.lines and all(line.startswith("|") for line in r.lines)
        parts.append("\n".join(r.lines) if is_table else "```\n" + "\n".join(r.lines) + "\n```")
    return "\n\n".join(parts) + "\n"


def _code(ran: Ran) -> str:
    return "none: too long" if ran.code is None else str(ran.code)


# ---- the page of all rows


def page() -> str:
    """All rows with what the planner says; several seconds a row."""
    parts = [
        "*Made by `python -m bench.reproduce --page bench/reproduce/README.md` from the list in `rows.py`.*",
        "# One command for each figure and table",
        "Each row is a figure or a table of H2O (arXiv 2306.14048), MiniKV (2411.18077) or FlexGen (2303.06865), and "
        "the command of this package that makes its like.",
        "```bash\nbash scripts/reproduce.sh --quick            # every command on the test model: reproduce-quick.md\n"
        "bash scripts/reproduce.sh --quick --only attention fidelity\nbash scripts/reproduce.sh --list\n```",
        "A quick command shows that the command works. Its model, `opt-tiny`, and its inputs, which the script writes "
        "to `$WORK`, are far too small for the figure of a paper. A full command has the settings of the paper. **No "
        "full command has been run with the paper's model here.** Its cost is the planner's prediction for the machine "
        "of the paper and for two CPU cores: time, and bytes on each tier. H2O at 20% of the *prompt* is planned as "
        "`--hh-ratio 0.1`.",
        "\n".join(
            markdown_table(
                ["row", "of", "what it shows", "measured with other models"], [_summary(row) for row in ROWS]
            )
        ),
    ]
    for row in ROWS:
        parts += [
            f"## {row.name}",
            f"{row.paper}: {row.shows}. Needs: {row.needs}.",
            f"```bash\n# quick\n{row.quick}\n# full\n{row.full}\n```",
        ]
        if row.plan:
            places = dict.fromkeys((row.machine, MACHINES[-1]))
            parts.append("\n".join(["Cost of the full row (`policy_search " + row.plan + "`):", ""]
                                   + [f"- `{machine}`: {cost(row.plan, machine)}" for machine in places]))  # fmt: skip
        parts.append(f"Measured with other models: {row.measured}.")
    return "\n\n".join(parts) + "\n"


def _summary(row: Row) -> list[str]:
    return [f"[{row.name}](#{row.name})", row.paper, row.shows, row.measured]


@cache
def cost(plan: str, machine: str) -> str:
    """What policy_search predicts, in words."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = policy_search.main([*plan.split(), "--hardware", machine, "--json"])
    if code:
        return said.getvalue().strip().splitlines()[-1].removeprefix("policy_search: ")
    found = json.loads(out.getvalue())["predicted"]
    seconds, tiers = found["prefill_s"] + found["decode_s"], found["peak_bytes"]
    held = ", ".join(f"{tier} {size / common.GB:.1f} GB" for tier, size in tiers.items() if size)
    return f"{_time(seconds)}, {found['tokens_per_s']:.3g} tokens/s; {held}"


def _time(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


# ---- the command


def main() -> int:
    args = _parse()
    if args.list:
        print("\n".join(f"{row.name:20} {row.paper}: {row.shows}" for row in ROWS))
        return 0
    if args.page is not None:
        write_result(args.page, page(), "--page")
        return 0
    chosen, done = [row for row in ROWS if args.only is None or row.name in args.only], list[Ran]()
    machine = common.machine_facts()
    with tempfile.TemporaryDirectory(prefix="reproduce-") as folder:
        write_inputs(Path(folder))
        for row in chosen:
            done.append(run_row(row, Path(folder), args.limit))
            print(f"{row.name}: exit code {_code(done[-1])}, {done[-1].seconds:.1f} s", flush=True)
            write_result(args.output, quick_page(done, machine), "--output")
    failed = [ran.row.name for ran in done if ran.code != 0]
    print(f"written: {args.output}; " + (f"failed: {', '.join(failed)}" if failed else "none failed"))
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="run every command on the test model")
    add("--only", nargs="+", metavar="NAME", help="only these rows")
    add("--limit", type=common.seconds, default=LIMIT_S, metavar="S", help=f"most seconds of a row ({LIMIT_S:.0f})")
    add("--output", default="reproduce-quick.md", metavar="FILE", help="the page of the quick run (reproduce-quick.md)")
    add("--list", action="store_true", help="the rows")
    add("--page", metavar="FILE", help="write the page of all rows, with what the planner says of each")
    args = parser.parse_args()
    if sum((args.quick, args.list, args.page is not None)) != 1:
        raise UsageError("--quick: give one of --quick, --list and --page FILE")
    unknown = set(args.only or ()) - {row.name for row in ROWS}
    if unknown:
        raise UsageError(f"--only {min(unknown)}: not one of {', '.join(row.name for row in ROWS)}")
    if args.limit == 0:
        raise UsageError("--limit 0: nothing ends in no time; give seconds")
    for name in ("output", "page"):
        if getattr(args, name) is not None:
            path = usable_path(getattr(args, name), f"--{name}")
            check_writable(path, f"--{name}")
            setattr(args, name, Path(os.path.abspath(path)))
    return args


if __name__ == "__main__":
    sys.exit(common.door(main))
