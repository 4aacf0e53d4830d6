"""Rounds: each system once, directly one after the other; of the signed grid between two looks at
the machine itself.

A round is stored whole, each of its lines with the rates before and after it: what a kill ends is
done again. A round in which a rate that the cell uses moved by more than MOVED is repeated,
MAX_EXTRA times at most; the last one then counts and is marked as unsteady. Ratios are of systems
of one round. `found_of` reads a cell's lines back for the page.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.common import GB, ON_DISK
from bench.engine.reader import Reader
from bench.engine.roofline import PeakProbe
from bench.sweep.grid import IN_RAM, WITHDRAWN, Cell, System, system_of
from bench.sweep.search import best_line
from bench.sweep.store import MEASURED, REFUSED, Key, Line, Store, cpu_of
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.units import GIB, counted
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.models.load import Model

MOVED = 0.15
MAX_EXTRA = 1
FEWEST = 3  # rounds that a figure is of; of fewer it is marked
PRODUCTS = "bf16_flops_per_s"
MEMORY = "memory_bytes_per_s"
DISK = "disk_bytes_per_s"
PROBES = 5
# of the weights file, whichever ends first
READ_BYTES = 2 * GIB
READ_SWEEPS = 64
Rates = dict[str, float]
Chosen = list[tuple[System, int]]  # with the rows of its best batch


def machine_rates(cell: Cell, model: Model, offload_dir: Path, dtype: str = "bfloat16") -> Rates:
    """The machine's own rates that a cell uses, in seconds: large products in bf16 and reading
    memory, as the roofline has them; with a budget also reading the model's files around the page
    cache, as the engine reads them."""
    probe = PeakProbe(torch.bfloat16)
    peaks = [probe.now() for _ in range(1 + PROBES)][1:]
    found = {
        PRODUCTS: statistics.median(peak.flops_per_s for peak in peaks),
        MEMORY: statistics.median(peak.memory_bytes_per_s for peak in peaks),
    }
    del probe
    if cell.kind != IN_RAM:
        with Reader(model, Policy(percent=ON_DISK), dtype, offload_dir) as reader:
            nbytes, seconds = reader.read(READ_SWEEPS, READ_BYTES)
        found[DISK] = nbytes / seconds
    return found


def moved(before: Rates, after: Rates) -> float:
    """How much the rate moved that moved most: 0.2 where one is 1.2 times the other."""
    pairs = [(before[name], after[name]) for name in before]
    return max(
        (max(pair) / min(pair) - 1 if min(pair) > 0 else float(max(pair) > 0) for pair in pairs),
        default=0.0,
    )


def rounds_of(lines: list[Line]) -> dict[int, list[list[Line]]]:
    """The whole rounds of one cell's lines: by number, the attempts at it, oldest first."""
    found: dict[int, dict[str, list[Line]]] = {}
    for line in lines:
        if "round" in line:
            found.setdefault(line["repeat"], {}).setdefault(line["round"]["began"], []).append(line)
    return {
        number: whole
        for number, attempts in sorted(found.items())
        if (
            whole := [
                some for some in attempts.values() if len(some) == some[0]["round"]["systems"]
            ]
        )
    }


def valid_rounds(lines: list[Line]) -> list[list[Line]]:
    """Return for each round of a cell the attempt that counts: of those with most systems the
    last."""
    attempts = rounds_of(lines).values()
    return [max(enumerate(some), key=lambda pair: (len(pair[1]), pair[0]))[1] for some in attempts]


def of_one_machine(lines: list[Line]) -> list[Line]:
    """Return those of one cell's lines that are of the processor with the most whole rounds, of
    several the one used last: neither a search nor a ratio is of two machines."""
    cpus = dict.fromkeys(cpu_of(line) for line in reversed(lines))
    machines = ([line for line in lines if cpu_of(line) == cpu] for cpu in cpus)
    return max(machines, key=lambda some: len(rounds_of(some)), default=[])


@dataclass(frozen=True)
class Rounds:
    """measure: a line of one run of a system with so many rows. rates: the machine's own, now.
    date: now, which names an attempt. prepare: before the first of the rounds that are missing."""

    store: Store
    measure: Callable[[System, int], Line]
    rates: Callable[[], Rates]
    date: Callable[[], str]
    prepare: Callable[[], None] = lambda: None

    def run(self, cell: Cell, chosen: Chosen, count: int) -> None:
        """Do what is missing of `count` rounds."""
        missing = [number for number in range(1, count + 1) if not self._done(cell, chosen, number)]
        if missing:
            self.prepare()
        for number in missing:
            while not self._done(cell, chosen, number):
                self._round(cell, chosen, number)

    def _done(self, cell: Cell, chosen: Chosen, number: int) -> bool:
        """Has a steady attempt with all systems at these rows been made, or as many as may be?"""
        wanted = {(system.name, rows) for system, rows in chosen}
        mine = [line for line in self.store.counting() if is_of(cell, line)]
        attempts = [
            some
            for some in rounds_of(mine).get(number, [])
            if wanted <= {(line["system"], line["rows"]) for line in some}
        ]
        return len(attempts) > MAX_EXTRA or any(some[0]["round"]["steady"] for some in attempts)

    def _round(self, cell: Cell, chosen: Chosen, number: int) -> None:
        began = self.date()
        before = self.rates()
        order = chosen if number % 2 else chosen[::-1]
        found = [(system, rows, self.measure(system, rows)) for system, rows in order]
        after = self.rates()
        by = moved(before, after)
        facts = {
            "began": began,
            "systems": len(order),
            "before": before,
            "after": after,
            "moved": by,
            "steady": by <= MOVED,
        }
        self.store.add_all(
            [
                vars(key_of(cell, system, rows, number)) | line | {"round": facts}
                for system, rows, line in found
            ]
        )
        if not before:
            return
        shown = ", ".join(
            f"{name} {before[name] / GB:.1f} to {after[name] / GB:.1f} G" for name in before
        )
        word = "steady" if by <= MOVED else "NOT STEADY"
        print(
            f"round {number}: {word}, the machine's rates moved by {by:.0%} ({shown})", flush=True
        )


def key_of(cell: Cell, system: System, rows: int, repeat: int) -> Key:
    return Key(system.name, cell.model, cell.prompt_len, cell.gen_len, cell.budget, rows, repeat)


def is_of(cell: Cell, line: Line) -> bool:
    return all(
        line[name] == getattr(cell, name) for name in ("model", "prompt_len", "gen_len", "budget")
    )


@dataclass(frozen=True)
class Entry:
    """A system of a cell: its lines that have a figure, by round."""

    system: str
    lines: dict[int, Line]

    def median(self, name: str) -> float:
        return statistics.median(line[name] for line in self.lines.values())

    def over(self, other: Entry) -> list[float]:
        """Ratios of tokens/s, of the rounds that both have."""
        both = [(self.lines[i], other.lines[i]) for i in self.lines if i in other.lines]
        return [one["tokens_per_s"] / two["tokens_per_s"] for one, two in both]


@dataclass(frozen=True)
class Found:
    """Figures of a cell that are there. reasons: of systems that were tried and have no figure.
    refusals: of peers that refuse the model's family. tried: rows, also of the search, of systems
    that have a figure."""

    cell: Cell
    entries: dict[str, Entry]
    reasons: dict[str, str]
    refusals: dict[str, str]
    tried: dict[str, set[int]]

    @property
    def peers(self) -> list[Entry]:
        """The fastest first."""
        peers = [entry for name, entry in self.entries.items() if not name.startswith("ours-")]
        return sorted(peers, key=lambda entry: -entry.median("tokens_per_s"))

    def best(self, begins: str = "") -> Entry | None:
        return next((peer for peer in self.peers if peer.system.startswith(begins)), None)

    def ratios(self, ours: str, begins: str = "") -> list[float]:
        """Return the ratios of one of ours over the best of such peers, by round; empty where one
        of them has no figure."""
        peer = self.best(begins)
        return self.entries[ours].over(peer) if peer is not None and ours in self.entries else []

    @property
    def cpu(self) -> str:
        """The processor that it was run on; empty where it was not."""
        return next(
            (cpu_of(line) for entry in self.entries.values() for line in entry.lines.values()), ""
        )

    def whys(self, systems: Sequence[str]) -> dict[str, str]:
        """Why systems have no figure: those that were tried, and of `systems` those whose peer
        refuses the family."""
        named = {name: self.refusals.get(name.partition("-")[0], "") for name in systems}
        return {
            name: why for name, why in named.items() if why and name not in self.entries
        } | self.reasons

    @property
    def model(self) -> str:
        """Return the model's name as people write it: `OPT-6.7B, 8 of 32 layers`."""
        name, _, layers = self.cell.model.partition(":")
        shown = re.sub(r"^opt-([0-9.]+)b$", r"OPT-\1B", name.rpartition("/")[2])
        shown = re.sub(r"^Meta-|-v0\.1$|-0924$|-Chat-v1\.0$", "", shown)
        built_in = built_in_spec(name)
        return (
            f"{shown}, {layers} of {built_in[0].num_blocks} layers"
            if layers and built_in
            else shown
        )

    @property
    def title(self) -> str:
        sizes = {"none": "in RAM", "third": "a third of the weights"}
        size = sizes.get(self.cell.budget, self.cell.budget)
        return f"{self.model}, {self.cell.prompt_len} + {self.cell.gen_len}, {size}"

    @property
    def is_short_of_rounds(self) -> bool:
        return any(len(entry.lines) < FEWEST for entry in self.entries.values())

    def mark(self, entry: Entry) -> str:
        """A dagger if the machine's own rates moved in a round, a double one if rounds are
        missing."""
        steady = all(line["round"]["steady"] for line in entry.lines.values())
        return " †" * (not steady) + " ‡" * (len(entry.lines) < FEWEST)


def found_of(cell: Cell, lines: Sequence[Line]) -> Found:
    """Return what the page shows of a cell: of one machine, and what was refused on any."""
    of_cell = [line for line in lines if is_of(cell, line)]
    mine = of_one_machine(of_cell)
    by_name = dict[str, list[Line]]()
    entries = dict[str, Entry]()
    for line in mine:
        by_name.setdefault(line["system"], []).append(line)
    for name, line in {line["system"]: line for line in of_cell}.items():  # the newest of each
        if line["status"] == REFUSED:
            by_name.setdefault(name, [line])
    for some in valid_rounds(mine):
        for line in some:
            if line["status"] in MEASURED and not _withdrawn(cell, line):
                entries.setdefault(line["system"], Entry(line["system"], {})).lines[
                    line["repeat"]
                ] = line
    reasons = {
        name: why
        for name in sorted(by_name, key=lambda name: (best_line(by_name[name]) is not None, name))
        if name not in entries
        and (why := _withdrawn(cell, by_name[name][-1]) or _reason(name, by_name, entries))
    }
    tried = {name: {line["rows"] for line in by_name[name]} for name in entries}
    return Found(cell, entries, reasons, _refusals(cell, lines), tried)


def _refusals(cell: Cell, lines: Sequence[Line]) -> dict[str, str]:
    """By peer why it refuses the model's family, as it said last; not of peers that ran any of it,
    nor what their own 4 bits alone refuse."""
    of_peers: dict[str, list[Line]] = {}
    for line in lines:
        if _family(line["model"]) == _family(cell.model) and "-4bit" not in line["system"]:
            of_peers.setdefault(line["system"].partition("-")[0], []).append(line)
    never_ran = {
        peer: some
        for peer, some in of_peers.items()
        if all(x["status"] not in MEASURED for x in some)
    }
    return {
        peer: _reason_of(some[-1])
        for peer, some in never_ran.items()
        if some[-1]["status"] == REFUSED
    }


@functools.cache
def _family(model: str) -> str:
    """Return the family of a built-in shape, cut or whole; another model is its own."""
    built_in = built_in_spec(model.partition(":")[0])
    return built_in[0].family if built_in else model


def _reason_of(line: Line) -> str:
    return f"{line['status']}: {line.get('reason', '')}".replace("|", "/")


def _withdrawn(cell: Cell, line: Line) -> str:
    """Why the page leaves this run out; empty where it does not."""
    why = WITHDRAWN.get((cell.name, line["system"], cpu_of(line), line["rows"]))
    return f"withdrawn: {why}" if why else ""


def _reason(name: str, by_name: dict[str, list[Line]], entries: dict[str, Entry]) -> str:
    """Why a system that was tried has no figure; empty where its rounds have still to come."""
    last = by_name[name][-1]
    best = best_line(by_name[name])
    of_search = _searched(by_name[name])
    if best is None:
        return _reason_of(last)
    alone = (
        f"in the search only: {_speed(of_search)}"
        if of_search
        else f"in replaced rounds: {_speed(best)}"
    )
    in_rounds = [line for line in by_name[name] if "round" in line]
    if in_rounds and in_rounds[-1]["status"] not in MEASURED:
        return f"{in_rounds[-1]['status']} in the rounds; {alone}"
    faster = next((other for other in entries if system_of(other) == system_of(name)), None)
    if faster is None:
        return ""
    of_faster = _searched(by_name[faster])
    return (
        f"{alone}; `{faster}` made {_speed(of_faster)} there"
        if of_faster
        else f"{alone}; `{faster}` is faster"
    )


def _searched(lines: list[Line]) -> Line | None:
    return best_line([line for line in lines if not line["repeat"]])


def _speed(line: Line) -> str:
    return f"{line['tokens_per_s']:.3g} with {counted(line['rows'], 'prompt')}"
