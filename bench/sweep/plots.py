"""PNG pictures of a sweep: throughput by batch, by budget, by KV share; memory. matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.sweep.runner import OVER_BUDGET, ram_of
from bench.sweep.store import MEASURED, Line
from bench.sweep.summary import Row, cells_of, rows_of
from flexgen_h2o.evaluation.figures import MARKS

Points = dict[str, list[tuple[float, float]]]  # by system


def draw_all(lines: list[Line], folder: Path, prefix: str) -> list[Path]:
    """Draw what the lines have data for, as `prefix`_*.png. Returns the files written."""
    written = []
    for (model, prompt_len, gen_len, budget), mine in cells_of(lines).items():
        name = f"{str(model).split('/')[-1]}_{prompt_len}+{gen_len}_{budget}"
        title = f"{model}, {prompt_len} + {gen_len} tokens, budget {budget}"
        rows = [row for row in rows_of(mine) if row.lines]
        if rows:
            written.append(_lines_plot(_by_batch(mine), folder / f"{prefix}_batch_{name}.png", title, "rows", log=True))
            written.append(_memory(rows, folder / f"{prefix}_memory_{name}.png", title))
        share = _by_kv_share(rows)
        if max(map(len, share.values())) > 1:
            below = "share of the KV columns kept (1: full cache)"
            written.append(_lines_plot(share, folder / f"{prefix}_kv_{name}.png", title, below))
    for (model, prompt_len, gen_len), points in _by_budget(lines).items():
        if max(map(len, points.values())) > 1:
            name = f"{str(model).split('/')[-1]}_{prompt_len}+{gen_len}"
            title = f"{model}, {prompt_len} + {gen_len} tokens"
            written.append(_lines_plot(points, folder / f"{prefix}_budget_{name}.png", title, "budget of RAM, GB"))
    return written


def _by_batch(lines: list[Line]) -> Points:
    """The search, and of repeats the newest at the same rows."""
    found: dict[str, dict[float, float]] = {}
    for line in lines:
        if line["status"] in MEASURED:
            found.setdefault(line["system"], {})[line["rows"]] = line["tokens_per_s"]
    return {system: sorted(points.items()) for system, points in found.items()}


def _by_kv_share(rows: list[Row]) -> Points:
    """Ours, uncompressed, by what the share is of. H2O keeps its ratio twice, heavy and recent columns; the full cache
    is the share 1."""
    full = [(1.0, row.tokens_per_s) for row in rows if row.system == "ours-full"]
    found: Points = {}
    for row in rows:
        if row.system.startswith("ours-h2o:"):
            of_prompt, _, of_sequence = row.system.partition(":")[2].partition("kv-budget=")
            kind, share = ("prompt", 2 * float(of_prompt)) if of_prompt else ("prompt + output", float(of_sequence))
            found.setdefault(f"ours h2o, of the {kind}", [*full]).append((share, row.tokens_per_s))
    return {kind: sorted(points) for kind, points in found.items()} or {"ours h2o": full}


def _by_budget(lines: list[Line]) -> dict[tuple[object, ...], Points]:
    found: dict[tuple[object, ...], Points] = {}
    for (model, prompt_len, gen_len, _), mine in cells_of(lines).items():
        size = next((x["budget_bytes"] for x in mine if x.get("budget_bytes")), None)
        if size is None:
            continue
        for row in rows_of(mine):
            if row.lines:
                points = found.setdefault((model, prompt_len, gen_len), {}).setdefault(row.system, [])
                points.append((size / 1e9, row.tokens_per_s))
    return {key: {system: sorted(p) for system, p in points.items()} for key, points in found.items()}


def _lines_plot(points: Points, path: Path, title: str, below: str, log: bool = False) -> Path:
    def draw(ax: Any) -> None:
        for i, (system, xy) in enumerate(points.items()):
            x, y = zip(*xy, strict=True)
            ax.plot(x, y, label=system, color=f"C{i % 10}", marker=MARKS[i % len(MARKS)], markersize=5)
        if log:
            ax.set_xscale("log", base=2)
        ax.set(title=title, xlabel=below, ylabel="generated tokens/s, prefill + decode")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)

    return _save(draw, path, (7.5, 5))


def _memory(rows: list[Row], path: Path, title: str) -> Path:
    def draw(ax: Any) -> None:
        names = [f"{row.system}, {row.rows} rows" for row in rows][::-1]
        peaks = [row.median("peak_rss_bytes") for row in rows][::-1]
        bars = ax.barh(names, [peak / 1e9 for peak in peaks], color="#3b6fb6")
        ax.bar_label(bars, [f"{peak / 1e9:.2f}" for peak in peaks], fontsize=8, padding=3)
        allowed = _allowed_bytes(rows[0].lines[0])
        if allowed is not None:
            label = f"allowed: budget + {OVER_BUDGET / 1e6:.0f} MB"
            ax.axvline(allowed / 1e9, color="#b5541c", label=label)
            ax.legend(fontsize=8)
        ax.set(title=title, xlabel="peak memory over an empty process, GB")
        ax.margins(x=0.15)

    return _save(draw, path, (8, 1.5 + 0.35 * len(rows)))


def _allowed_bytes(line: Line) -> int | None:
    """What a run may take of RAM; more is over the budget."""
    ram = ram_of(line["budget_bytes"], line.get("device", "cpu"), line.get("device_mem_bytes"))
    return None if ram is None else ram + OVER_BUDGET


def _save(draw: Callable[[Any], None], path: Path, size: tuple[float, float]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, dpi=110)
    return path
