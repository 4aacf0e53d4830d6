"""Measurements put together: a row for each system of a cell, at its best batch, and the markdown
table of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from bench.common import GB
from bench.sweep.search import best_rows
from bench.sweep.store import MEASURED, OVER, Line
from flexgen_h2o.core.units import markdown_table

CELL = ("model", "prompt_len", "gen_len", "budget")
HEAD = (
    "system",
    "rows",
    "tok/s (least - most)",
    "decode tok/s",
    "prefill s",
    "of ours-full",
    "peak GB",
    "device GB",
    "read GB",
    "GB/s",
    "runs",
    "others",
    "note",
)


@dataclass(frozen=True)
class Row:
    """A system in a cell. lines: repeats at its best batch, or what the search saw of it; reason:
    why there is none."""

    system: str
    rows: int
    lines: tuple[Line, ...]
    reason: str = ""

    def median(self, name: str) -> float:
        return statistics.median(line[name] for line in self.lines)

    @property
    def tokens_per_s(self) -> float:
        return self.median("tokens_per_s") if self.lines else 0.0


def cells_of(lines: Iterable[Line]) -> dict[tuple[object, ...], list[Line]]:
    """Lines by (model, prompt_len, gen_len, budget), in order of appearance."""
    found: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(line[name] for name in CELL), []).append(line)
    return found


def rows_of(lines: list[Line]) -> list[Row]:
    """A row for each system of one cell, the fastest first, those without a figure last."""
    rows = []
    for system in dict.fromkeys(line["system"] for line in lines):
        mine = [line for line in lines if line["system"] == system]
        best = best_rows(mine)
        if best is None:
            rows.append(
                Row(
                    system,
                    mine[-1]["rows"],
                    (),
                    f"{mine[-1]['status']}: {mine[-1].get('reason', '')}",
                )
            )
            continue
        at_best = [x for x in mine if x["rows"] == best and x["status"] in MEASURED]
        repeats = [x for x in at_best if x["repeat"] > 0]
        rows.append(Row(system, best, tuple(repeats or at_best)))
    return sorted(rows, key=lambda row: -row.tokens_per_s)


def device_bytes(line: Line) -> int:
    """Most bytes of the device tier: what torch's allocator took of a card, or what ours planned on
    a device of RAM."""
    planned = line.get("setting", {}).get("peak_bytes", {}).get("device", 0)
    return int(line.get("peak_card_bytes") or planned)


def markdown(lines: list[Line]) -> str:
    """All cells as tables. tok/s: generated tokens over prefill + decode; medians."""
    parts = [
        "# Throughput",
        "",
        "Made by `bench/throughput_sweep.sh` from the JSON lines beside it; `docs/lab/method.md` "
        "says how to read it.",
        "tok/s counts generated tokens over prefill + decode, each system at its own best batch, "
        "or at rows that were "
        "given; medians of the runs.",
        "Peak memory is that of generating, over an empty process that has imported torch; device "
        "GB: of the card.",
    ]
    for (model, prompt_len, gen_len, budget), mine in cells_of(lines).items():
        size = next((x["budget_bytes"] for x in mine if x.get("budget_bytes")), None)
        shown = "all of RAM" if size is None else f"budget {budget} ({size / GB:.2f} GB)"
        if mine[0].get("device_mem_bytes"):
            shown += f", {mine[0]['device']} device of {mine[0]['device_mem_bytes'] / GB:.2f} GB"
        rows = rows_of(mine)
        base = next((row.tokens_per_s for row in rows if row.system == "ours-full"), 0.0)
        table = markdown_table(HEAD, [_texts(row, base) for row in rows])
        parts += ["", f"## {model}, {prompt_len} + {gen_len} tokens, {shown}", "", *table]
    return "\n".join(parts) + "\n"


def _texts(row: Row, base: float) -> list[str]:
    if not row.lines:
        return [row.system, str(row.rows), *[""] * (len(HEAD) - 3), row.reason.replace("|", "/")]
    values = [line["tokens_per_s"] for line in row.lines]
    read = row.median("read_bytes")
    seconds = row.median("total_s")
    over = any(line["status"] == OVER for line in row.lines)
    return [
        row.system,
        str(row.rows),
        f"**{row.tokens_per_s:.2f}** ({min(values):.2f} - {max(values):.2f})",
        f"{row.median('decode_tokens_per_s'):.2f}",
        f"{row.median('prefill_s'):.1f}",
        f"{row.tokens_per_s / base:.2f}" if base else "",
        f"{row.median('peak_rss_bytes') / GB:.2f}",
        f"{max(map(device_bytes, row.lines)) / GB:.2f}",
        f"{read / GB:.2f}",
        f"{read / GB / seconds:.2f}",
        str(len(row.lines)),
        f"{max(line['others'] for line in row.lines):.0%}",
        "over the budget" if over else "",
    ]
