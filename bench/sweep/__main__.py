"""Throughput of this package and its peers, each at its own best batch, under the same memory
budget.

    bash bench/throughput_sweep.sh --quick
    bash bench/throughput_sweep.sh --cell facebook/opt-1.3b,64,32,third,8,64 --systems ours-full accelerate-disk
    bash bench/throughput_sweep.sh --grid signed

The best batch of each peer is searched for; then all systems run in rounds, in turn. The grids
`signed...` hold to more (`--signed` asks it of other cells): a clean commit; one memory cgroup for
all with a budget; measurements of the machine's own rates around each round, which is repeated
where these moved; what answers lose beside each setting of ours; and README, docs/results.md and
the pages beside the lines at the end.

Finished measurements are kept, a JSON line each, in bench/results/<machine>/throughput.jsonl
(signed.jsonl), and are not made again on the same processor: a cell's search and its rounds are of
one. The page beside it has the cells that were asked for.

The exit code is 1 where what was tried in a cell gave no figure, and 3 where nothing fits one; that
all systems refuse is an answer.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench import common
from bench.baselines.contract import DTYPES
from bench.sweep import page, quality, tables
from bench.sweep.grid import (
    FP32_SYSTEMS,
    GRIDS,
    SIGNED,
    SYSTEMS,
    Cell,
    System,
    cut_model,
    system_of,
    systems_of,
)
from bench.sweep.rounds import FEWEST, Rates, Rounds, found_of, is_of, key_of, machine_rates
from bench.sweep.runner import Setup, can_limit, describe, measure, measure_profile
from bench.sweep.search import best_line, best_rows, search
from bench.sweep.store import BF16, DOES_NOT_FIT, REFUSED, TIMEOUT, Line, Store, claimed
from flexgen_h2o.cli_common import positive, run_cli
from flexgen_h2o.core.errors import EXIT_DOES_NOT_FIT, EXIT_DONE, EXIT_FAILED, UsageError
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.models.load import Model, find_checkpoint, find_model
from flexgen_h2o.parser import OneLineParser
from flexgen_h2o.planner.measure.run import cpu_name

QUICK = {"repeats": 1, "quiet_wait": 2.0, "limit": 90.0}
FULL = {"repeats": 3, "quiet_wait": 60.0, "limit": 1800.0}
OF_SIGNED = {"repeats": FEWEST, "quiet_wait": 60.0, "limit": 3600.0}
SHARES = "ours-h2o:R, ours-h2o:kv-budget=R, ours-mix:kv-bytes=R"


@dataclass(frozen=True)
class Sweep:
    """signed: are the cells held to all that the signed grid is?"""

    setup: Setup
    store: Store
    repeats: int
    signed: bool

    def cell(self, cell: Cell, systems: tuple[System, ...]) -> int:
        """Find each peer's best batch, then run all in rounds. Returns an exit code."""
        print(f"\n== {cell.name}", flush=True)
        ready = []
        for system in systems:
            why = system.misfit(cell.kind) or self.setup.missing(system)
            if why:
                print(f"{system.name}: skipped, {why}", flush=True)
            else:
                ready.append(system)
        for peer in sorted({system.peer for system in ready}):
            if self.setup.settings(peer) is None:
                print(f"{peer}: not tuned on this CPU, runs with its defaults", flush=True)
        folder = _model_folder(cell.model, self.setup) if ready else Path()
        chosen = []
        for system in ready:
            if system.ours:  # which splits the cell's rows itself
                chosen.append((system, cell.rows[1]))
                continue
            lines = search(lambda rows, s=system: self._searched(s, cell, folder, rows), *cell.rows)
            rows = best_rows(lines)
            if rows is not None:
                chosen.append((system, rows))
        if chosen:
            self._rounds(cell, folder, self._fastest(cell, chosen))
            if self.signed:
                quality.measure(self.store.path.parent, cell, ready, self.setup.offload_dir)
        names = {system.name for system in ready}
        kept = (line for line in self.store.counting() if is_of(cell, line))
        return _without_figure(cell, [line for line in kept if line["system"] in names])

    def _searched(self, system: System, cell: Cell, folder: Path, rows: int) -> Line:
        key = key_of(cell, system, rows, 0)
        line = self.store.find(key)
        if line is not None and not self._has_more_time(line):
            print(f"{system.name} x {rows}: {describe(line)} (kept)", flush=True)
            return line
        return self.store.add(key, self._once(system, cell, folder, rows))

    def _once(self, system: System, cell: Cell, folder: Path, rows: int) -> Line:
        line = measure(self.setup, system, cell, folder, rows)
        print(f"{system.name} x {rows}: {describe(line)}", flush=True)
        return line

    def _fastest(self, cell: Cell, chosen: list[tuple[System, int]]) -> list[tuple[System, int]]:
        """Return the one of a peer's settings that was fastest in the search."""

        def speed(pair: tuple[System, int]) -> float:
            line = self.store.find(key_of(cell, *pair, 0))
            return 0.0 if line is None else float(line["tokens_per_s"])

        best: dict[str, tuple[System, int]] = {}
        for pair in chosen:
            name = system_of(pair[0].name)
            best[name] = max(best.get(name, pair), pair, key=speed)
        return list(best.values())

    def _rounds(self, cell: Cell, folder: Path, chosen: list[tuple[System, int]]) -> None:
        """Rounds; signed ones between looks at the machine on quiet cores."""

        def rates() -> Rates:
            if not self.signed:
                return {}
            common.wait_for_quiet(self.setup.quiet_wait)
            model = _model_of(cell.model, self.setup.offload_dir)
            return machine_rates(cell, model, self.setup.offload_dir)

        def prepare() -> None:
            if self.signed:
                measure_profile(self.setup)

        def once(system: System, rows: int) -> Line:
            return self._once(system, cell, folder, rows)

        rounds = Rounds(self.store, once, rates, common.date, prepare)
        rounds.run(cell, chosen, self.repeats)

    def _has_more_time(self, line: Line) -> bool:
        """Was it ended by a limit that is higher now?"""
        return line["status"] == TIMEOUT and self.setup.limit_s > line.get(
            "limit_s", self.setup.limit_s
        )


def _without_figure(cell: Cell, tried: list[Line]) -> int:
    """The exit code of a cell by what was tried in it: that all is refused is an answer, that
    nothing fits has a code of its own. A line says why there is no figure."""
    broken = [line for line in tried if line["status"] != REFUSED]
    if not broken or best_line(tried) is not None:
        return EXIT_DONE
    worst = next((line for line in broken if line["status"] != DOES_NOT_FIT), broken[-1])
    print(
        f"{cell.name}: no figure; {worst['system']}: {describe(worst)}", file=sys.stderr, flush=True
    )
    return EXIT_DOES_NOT_FIT if worst["status"] == DOES_NOT_FIT else EXIT_FAILED


def main() -> int:
    return run_cli("throughput_sweep", _run, None)


def _run(argv: list[str] | None) -> int:
    args = _parse(argv)
    cells = _cells(args)
    defaults = OF_SIGNED if args.signed else QUICK if args.quick else FULL
    values = {
        name: value if getattr(args, name) is None else getattr(args, name)
        for name, value in defaults.items()
    }
    results = args.results or common.ROOT / "bench" / "results" / args.machine
    setup = Setup(
        args.peers,
        args.offload_dir,
        os.cpu_count() or 1,
        values["limit"],
        values["quiet_wait"],
        args.cgroup or (args.signed and can_limit()),
    )
    path = results / f"{args.name}.jsonl"
    with claimed(path):
        store = Store(path, cpu_name())
        sweep = Sweep(setup, store, int(values["repeats"]), args.signed)
        try:
            codes = [sweep.cell(cell, systems) for cell, systems in cells]
        finally:
            _show(store, results, args, [cell for cell, _ in cells])
    return next((code for code in (EXIT_FAILED, EXIT_DOES_NOT_FIT) if code in codes), EXIT_DONE)


def _show(store: Store, results: Path, args: argparse.Namespace, cells: list[Cell]) -> None:
    """Write the pages: of the whole signed grid, or the one beside other lines."""
    if not store.lines:
        return
    if args.results is None and args.name == tables.NAME:
        page.write(results)
        print(f"\nwritten: {results}, docs/results.md, README.md", flush=True)
        return
    found = [found_of(cell, store.lines) for cell in cells]
    text = tables.details(found, quality.read(results), args.name)
    (results / f"{args.name}.md").write_text(text)
    print(f"\n{tables.table(found, [])}\n\nwritten: {results}", flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="throughput_sweep.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="the grid `quick`, one repeat: at most 10 minutes")
    add(
        "--grid",
        nargs="+",
        choices=sorted(GRIDS),
        default=[],
        metavar="NAME",
        help=f"of {', '.join(GRIDS)}",
    )
    add(
        "--cell",
        nargs="+",
        default=[],
        metavar="MODEL,S,N,BUDGET,FIRST,LAST",
        help="cells of your own",
    )
    some = f"only these of {', '.join(s.name for s in SYSTEMS)}, {SHARES}"
    add("--systems", nargs="+", metavar="NAME", help=some)
    add("--repeats", type=positive, help="rounds of all systems (3)")
    add("--limit", type=common.seconds, metavar="S", help="most seconds of one measurement (1800)")
    add(
        "--quiet-wait",
        type=common.seconds,
        metavar="S",
        help="most seconds to wait for quiet cores each time (60)",
    )
    add(
        "--offload-dir",
        type=Path,
        default=Path("~/flexgen_h2o_offload_dir").expanduser(),
        help="weights, disk tiers",
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    peers = os.environ.get("FLEXGEN_PEERS") or cache / "flexgen_h2o" / "peers"
    add(
        "--peers",
        type=Path,
        default=Path(peers),
        help="environments of the peers (as setup.sh makes them; FLEXGEN_PEERS)",
    )
    add(
        "--machine",
        default=platform.node() or "here",
        help="name of the folder in bench/results (the host's name)",
    )
    add("--results", type=Path, help="another folder for the results")
    add(
        "--cgroup",
        action="store_true",
        help="hold systems to a budget by a memory cgroup, page cache counted",
    )
    add("--name", help="of the files of lines and table (throughput, signed)")
    add(
        "--signed",
        action="store_true",
        help="hold the cells to all that the signed grids are held to",
    )
    args = parser.parse_args(argv)
    args.signed = args.signed or any(grid in SIGNED for grid in args.grid)
    if args.signed:
        _check_signed(args)
    if args.limit == 0:
        raise UsageError("--limit 0: nothing ends in no time; give seconds")
    args.name = args.name or (tables.NAME if args.signed else "throughput")
    if Path(args.name).name != args.name:
        raise UsageError(
            f"--name {args.name}: names files in --results; give a name without folders"
        )
    args.grid = [*args.grid, *(["quick"] if args.quick else [])]
    if not args.grid and not args.cell:
        raise UsageError(f"nothing to measure: give --quick, --grid ({', '.join(GRIDS)}) or --cell")
    return args


def _check_signed(args: argparse.Namespace) -> None:
    """UsageError where what is asked for could not be signed."""
    if args.quick:
        raise UsageError("--quick: the signed grid is of whole measurements; leave it out")
    if args.repeats and args.repeats < OF_SIGNED["repeats"]:
        raise UsageError(
            f"--repeats {args.repeats}: the signed grid has at least {OF_SIGNED['repeats']} rounds"
        )
    commit = common.commit()
    if commit is None or commit.endswith(common.DIRTY):
        what = (
            "is no git checkout"
            if commit is None
            else "has changes that are not committed (git status)"
        )
        raise UsageError(
            f"--grid signed: {common.ROOT} {what}; figures are signed with a clean commit"
        )


def _cells(args: argparse.Namespace) -> list[tuple[Cell, tuple[System, ...]]]:
    cpu = cpu_name()
    cells = [(cell, systems_of(grid, cell, cpu)) for grid in args.grid for cell in GRIDS[grid]]
    grid = tables.NAME if args.signed else ""
    cells += [(cell, systems_of(grid, cell, cpu)) for cell in map(_read_cell, args.cell)]
    if args.systems is None:
        return cells
    chosen = tuple(_read_system(name) for name in args.systems)
    whys = {(system.name, system.misfit(cell.kind)): None for cell, _ in cells for system in chosen}
    if all(why for _, why in whys):
        raise UsageError("--systems: " + "; ".join(f"{name}: {why}" for name, why in whys))
    return [(cell, chosen) for cell, _ in cells]


def _read_cell(text: str) -> Cell:
    parts = text.split(",")
    try:
        model, prompt_len, gen_len, budget, first, last = parts
        cell = Cell(model, int(prompt_len), int(gen_len), budget, (int(first), int(last)))
    except ValueError as error:
        raise UsageError(
            f"--cell {text}: is MODEL,PROMPT,NEW,BUDGET,FIRST,LAST, such as "
            "opt-1.3b,64,32,third,8,64"
        ) from error
    if cell.prompt_len < 1 or cell.gen_len < 2:
        raise UsageError(
            f"--cell {text}: PROMPT is at least 1, and NEW at least 2, since decoding is measured"
        )
    if not 1 <= cell.rows[0] <= cell.rows[1]:
        raise UsageError(
            f"--cell {text}: rows are tried from FIRST, at least 1, to LAST, at least FIRST"
        )
    more, rest = divmod(cell.rows[1], cell.rows[0])
    if rest or more.bit_count() != 1:  # ours may run LAST rows: peers must be able to
        raise UsageError(
            f"--cell {text}: rows double from FIRST on; give a LAST that is reached: "
            f"{8 * cell.rows[0]}"
        )
    name, blocks = _cut(cell.model)
    try:
        cell.budget_bytes(1)
        spec = _model(name).spec
    except UsageError as error:
        raise UsageError(f"--cell {text}: {str(error).removeprefix('--model ')}") from error
    if blocks is not None and (built_in_spec(name) is None or not 1 <= blocks <= spec.num_blocks):
        raise UsageError(
            f"--cell {text}: :N is the first 1 to {spec.num_blocks} blocks, of a built-in shape "
            "only"
        )
    if cell.prompt_len + cell.gen_len - 1 > spec.max_positions:
        raise UsageError(
            f"--cell {text}: {cell.model} has {spec.max_positions} positions; give fewer tokens"
        )
    return cell


# Of ours, beside those of the grid: H2O with any share, and what --kv-bytes chooses.
_SHARED = re.compile(r"(?:h2o(?:-4bit|-int8|-4bit-int8)?:(?:kv-budget=)?|mix:kv-bytes=)([0-9.]+)")


def _read_system(name: str) -> System:
    known = {system.name: system for system in (*SYSTEMS, *FP32_SYSTEMS)}
    if name in known:
        return known[name]
    peer, _, variant = name.partition("-")
    ours = known["ours-full"]
    found = _SHARED.fullmatch(variant)
    if peer == ours.peer and found is not None and _is_share(found[1]):
        return System(peer, variant, ours.kinds)
    raise UsageError(
        f"--systems {name}: not one of {', '.join(known)}; nor {SHARES} with R in (0, 1]"
    )


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _model_folder(model: str, setup: Setup) -> Path:
    """Random weights at the model's true shape, written once: every system reads this folder."""
    found = _model_of(model, setup.offload_dir)
    return find_checkpoint(found, DTYPES[BF16], setup.offload_dir, 0, progress=False).folder


def _cut(model: str) -> tuple[str, int | None]:
    """`facebook/opt-30b:12` is the first 12 blocks of that shape."""
    name, _, layers = model.rpartition(":")
    return (
        (name, int(layers))
        if layers.isdecimal() and name and not Path(model).exists()
        else (model, None)
    )


def _model_of(model: str, offload_dir: Path) -> Model:
    """A cut one's config is written below `offload_dir`."""
    name, layers = _cut(model)
    return _model(model if layers is None else str(cut_model(name, layers, offload_dir)))


@cache
def _model(name: str) -> Model:
    """Read once: many cells have the same."""
    return find_model(name, "_DUMMY_")


if __name__ == "__main__":
    sys.exit(main())
