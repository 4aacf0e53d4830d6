"""Every stored figure of the benchmarks as Markdown tables, for the pages that lie beside the
data."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Sequence

from bench import common
from bench.sweep import quality
from bench.sweep.grid import SHORT, SIGNED, Cell, systems_of
from bench.sweep.rounds import DISK, FEWEST, MEMORY, MOVED, PRODUCTS, Found
from bench.sweep.store import OVER, Line
from flexgen_h2o.core.units import counted, markdown_table

NAME = "signed"  # of the file of lines
ALL_SIGNED = (*SIGNED[NAME], *SIGNED[SHORT])
# Settings of flexgen_h2o, as lines name them.
FULL = "ours-full"  # bf16, the full KV cache
INT8 = "ours-full-int8"  # int8 weights and matrix multiplications, the full KV cache
MIX = "ours-mix:kv-bytes=0.2"  # the KV cache in 20% of its bytes
H2O = "ours-h2o:kv-budget=0.2"  # 20% of the KV entries, chosen by H2O
# the same, with 4-bit weights and KV and int8 matrix multiplications
SMALL = "ours-h2o-4bit-int8:kv-budget=0.2"
HEAD = (
    "benchmark",
    "system",
    "prompts",
    "tokens/s",
    "over the fastest other system",
    "over the others",
    "KL, nats; changed tokens",
    "KV entries; KV bytes",
    "read, GB",
    "peak, GB",
)
PHASES = ("prefill_s", "decode_s")
RATES = (
    ("matrix multiplication, TFLOP/s", PRODUCTS, 1e12),
    ("memory, GB/s", MEMORY, common.GB),
    ("disk, GB/s", DISK, common.GB),
)
HOW_TO_READ = (
    "A ratio is of two runs of one round; a table has the median and, in parentheses, the range "
    "over the rounds. "
    "`ours-...` is flexgen_h2o. Other systems compute in bf16 and keep the whole KV cache unless "
    "their name says "
    "something else (`-4bit`, `-int8`, `-q4_0`, `-fp32`). A KL of 0 is the reference, not a "
    "measurement. "
    "read: bytes from storage in a whole run; peak: RAM beyond an empty process."
)
RATED = (
    "The machine's own rates, measured before and after each round: large matrix multiplications "
    "in bf16, reading "
    "memory, reading the disk."
)
PREDICTED = (
    "Seconds that the planner predicted before the run, by a profile of the machine, over seconds "
    "measured. Below 1 "
    "the run took longer than predicted."
)


def details(
    cells: Sequence[Found], losses: Sequence[quality.Line], name: str, chosen: str = ""
) -> str:
    """The page of a grid. chosen: when and how its benchmarks were chosen, a sentence."""
    run = [found for found in cells if found.entries]
    parts = [
        f"*Made by `python -m bench.sweep.page` from the lines beside it ({name}). docs/results.md "
        "is the summary.*",
        f"# Every figure of the benchmarks: {name}",
        wrapped(f"{state(cells)} {chosen}"),
    ]
    if run:
        parts += [
            wrapped(runs(run)),
            wrapped(HOW_TO_READ),
            "## Where flexgen_h2o is slower",
            slower(run),
        ]
    parts += ["## Every figure", table(cells, losses)]
    if run:
        parts += ["## The machines", wrapped(RATED), machines(run)]
        parts += ["## Predicted and measured", wrapped(PREDICTED), predictions(run)]
    return "\n\n".join(parts) + "\n"


def spread(values: Sequence[float]) -> str:
    """Median and range; empty without values."""
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


def three_figures(value: float) -> str:
    """1440 where Python has 1.44e+03."""
    return f"{float(f'{value:.3g}'):g}"


def wrapped(text: str) -> str:
    """In lines, none of which begins with a plus: that would be a list."""
    return textwrap.fill(
        text.strip().replace(" + ", "\u00a0+\u00a0"),
        120,
        subsequent_indent="  " * text.startswith("- "),
        break_on_hyphens=False,
    )


def state(cells: Sequence[Found]) -> str:
    """How many of the benchmarks have been run, in a sentence."""
    done = sum(bool(found.entries) for found in cells)
    if done == len(cells):
        return f"All {done} benchmarks have been run."
    return f"{done} of {len(cells)} benchmarks have been run."


def runs(cells: Sequence[Found]) -> str:
    """When and how the lines of benchmarks were made, in sentences."""
    used = [
        line for found in cells for entry in found.entries.values() for line in entry.lines.values()
    ]
    days = sorted({line["date"][:10] for line in used})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    commits = ", ".join(f"`{name}`" for name in dict.fromkeys(line["commit"] for line in used))
    said = [f"Runs of {when}, commits {commits}."]
    limited = [line for line in used if line["budget_bytes"]]
    if limited and all(line["cgroup"] for line in limited):
        said.append(
            "Every system with a budget ran in a memory cgroup of it and 768 MiB, page cache "
            "counted."
        )
    elif limited:
        said.append(
            "**No memory cgroup could be made for some runs**: there each system held itself to "
            "its budget, and the "
            "page cache was emptied of the weights before each run."
        )
    unsteady = {line["round"]["began"] for line in used if not line["round"]["steady"]}
    if unsteady:
        said.append(
            f"†: {counted(len(unsteady), 'round')} in which a rate of the machine itself moved by "
            "more than "
            f"{MOVED:.0%}, and no steady round took their place."
        )
    if any(found.is_short_of_rounds for found in cells):
        said.append(f"‡: fewer than {FEWEST} rounds.")
    return " ".join(said)


def slower(cells: Sequence[Found]) -> str:
    """A line for each setting of flexgen_h2o that is slower than another system of its
    benchmark."""
    made = []
    for found in cells:
        for name in (name for name in found.entries if name.startswith("ours-")):
            over = [(peer.system, found.entries[name].over(peer)) for peer in found.peers]
            less = [
                f"{spread(values)} of `{peer}`"
                for peer, values in over
                if values and statistics.median(values) < 1
            ]
            if less:
                made.append(wrapped(f"- {found.title}: `{name}` {', '.join(less)}"))
    return "\n".join(made) or "In no benchmark that has been run."


def table(cells: Sequence[Found], losses: Sequence[quality.Line]) -> str:
    """A line for each system of a benchmark; then the benchmarks that have none, in a sentence."""
    rows = [row for found in cells if found.entries for row in _rows(found, losses)]
    waiting = "; ".join(found.title for found in cells if not found.entries)
    parts = ["\n".join(markdown_table(HEAD, rows))] if rows else []
    return "\n\n".join([*parts, wrapped(f"Not run yet: {waiting}.")] if waiting else parts)


def _rows(found: Found, losses: Sequence[quality.Line]) -> Iterator[list[str]]:
    """A line for each system of a benchmark, ours first; then what has no figure, and what was not
    run."""
    asked = systems_of(NAME, found.cell, found.cpu) if found.cell in ALL_SIGNED else ()
    names = [system.name for system in asked] or list(found.entries)
    ours = [
        found.entries[name] for name in names if name in found.entries and name.startswith("ours-")
    ]
    best = found.best()
    title = found.title
    blank = [""] * (len(HEAD) - 2)
    for entry in (*ours, *found.peers):
        lines = list(entry.lines.values())
        is_internal = entry in ours
        mark = found.mark(entry)
        mark += ", over the budget" if any(line["status"] == OVER for line in lines) else ""
        prompts = "/".join(map(str, sorted({line["rows"] for line in lines})))
        if len(found.tried[entry.system]) == 1 and not is_internal:
            prompts += ", no others tried"
        others = [(peer.system, entry.over(peer)) for peer in found.peers[1:]]
        yield [
            title,
            f"`{entry.system}`" + (" (fastest other)" if entry is best else ""),
            prompts,
            spread([line["tokens_per_s"] for line in lines]) + mark,
            spread(entry.over(best)) if is_internal and best else "",
            "; ".join(f"{name} {statistics.median(x):.3g}" for name, x in others if x)
            if is_internal
            else "",
            lost(entry.system, found.cell, losses),
            kept(found.cell, lines[-1]),
            three_figures(entry.median("read_bytes") / common.GB),
            three_figures(entry.median("peak_rss_bytes") / common.GB),
        ]
        title = ""
    whys = found.whys(names)
    for why in dict.fromkeys(whys.values()):
        alike = [f"`{name}`" for name, other in whys.items() if other == why]
        yield [title, ", ".join(alike), "", why, *blank[2:]]
        title = ""
    waiting = [f"`{name}`" for name in names if name not in found.entries and name not in whys]
    if waiting:
        yield [title, f"not run yet: {', '.join(waiting)}", *blank]


def lost(system: str, cell: Cell, losses: Sequence[quality.Line]) -> str:
    """KL and changed tokens of a system at the lengths of a benchmark, and the model if it is not
    the usual one."""
    line = loss_of(system, cell, losses)
    if line is None:
        return "not measured yet"
    another = "" if line["model"] == quality.MODEL else f" ({line['model']})"
    return f"{line['kl']['value']:.3g}; {line['flips']['value']:.0%}{another}"


def loss_of(system: str, cell: Cell, losses: Sequence[quality.Line]) -> quality.Line | None:
    """The stored loss of a system at the lengths of a benchmark; of one that is exact a loss of
    nothing."""
    peer, _, variant = system.partition("-")
    is_exact = variant == quality.EXACT if peer == "ours" else not quality.LOSSY.search(system)
    if is_exact:
        return {"kl": {"value": 0.0}, "flips": {"value": 0.0}, "model": quality.MODEL}
    # Mapped or loaded, llama.cpp's file has the same bits.
    names = (variant,) if peer == "ours" else (system, system.removesuffix("-mmap"))
    wanted = [
        quality.of_cell(cell, name, model) for model in (quality.MODEL, None) for name in names
    ]
    return next((line for each in wanted if (line := quality.find(losses, **each))), None)


def kept(cell: Cell, line: Line) -> str:
    """KV entries of the whole sequence that a finished prompt of ours holds, and their bytes over
    the full cache's."""
    kv = line.get("setting", {}).get("kv")
    if not kv:
        return ""
    entries = min(1.0, kv["slots"] / (cell.prompt_len + cell.gen_len - 1))
    return f"{entries:.0%}; {kv['bytes'] / kv['full_bytes']:.0%}"


def machines(cells: Sequence[Found]) -> str:
    """Return what each benchmark ran on: the processor, and the rates before and after its
    rounds."""
    rows = []
    for found in cells:
        lines = [line for entry in found.entries.values() for line in entry.lines.values()]
        rounds = {line["round"]["began"]: line["round"] for line in lines}
        seen = [rates for facts in rounds.values() for rates in (facts["before"], facts["after"])]
        shown = [
            spread([rates[name] / unit for rates in seen if name in rates])
            for _, name, unit in RATES
        ]
        rows.append([found.title, found.cpu, *shown])
    return "\n".join(
        markdown_table(("benchmark", "processor", *(words for words, _, _ in RATES)), rows)
    )


def predictions(cells: Sequence[Found]) -> str:
    """Return what the planner said before each run of ours, over what was measured: a line for each
    setting."""
    head = ("predicted over measured", "system", "prefill", "decode", "both")
    rows = []
    for found in cells:
        title = found.title
        for entry in (entry for name, entry in found.entries.items() if name.startswith("ours-")):
            said = [
                (line, plan)
                for line in entry.lines.values()
                if (plan := line.get("setting", {}).get("predicted"))
            ]
            if said:
                parts = [
                    [
                        sum(plan[x] for x in phases) / sum(line[x] for x in phases)
                        for line, plan in said
                    ]
                    for phases in (PHASES[:1], PHASES[1:], PHASES)
                ]
                rows.append([title, f"`{entry.system}`", *map(spread, parts)])
                title = ""
    return "\n".join(markdown_table(head, rows))
