"""The result as a picture. matplotlib is imported only here, and only where a picture is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexgen_h2o.errors import FlexgenError
from flexgen_h2o.files import replacing

Figures = dict[str, Any]
_MARKS = "osD^vP*X<>h"


def draw(result: Figures, path: Path) -> None:
    """KL, flips and recall over budgets, and KL over steps at the smallest budget. The suffix names the format.

    Raises FlexgenError naming --plot where the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    smallest = min(cell["budget"] for cell in result["cells"])
    for i, policy in enumerate(dict.fromkeys(cell["policy"] for cell in result["cells"])):
        cells = sorted((c for c in result["cells"] if c["policy"] == policy), key=lambda c: c["budget"])
        style = {"label": policy, "color": f"C{i % 10}", "marker": _MARKS[i % len(_MARKS)], "markersize": 5}
        _over_budgets(axes[0], cells, [c["kl"] for c in cells], style)
        _over_budgets(axes[1], cells, [c["flips"] for c in cells], style)
        steps = cells[0]["by_step"]
        if cells[0]["budget"] == smallest:
            middles = [(part["first"] + part["last"]) / 2 for part in steps]
            axes[2].errorbar(middles, [part["kl"]["value"] for part in steps], **style)
        if "recall" in cells[0]:
            _over_budgets(axes[3], cells, [next(iter(reversed(c["recall"].values()))) for c in cells], style)
    budgets, decode = "columns kept, share of the prompt", "decode step"
    titles = (
        ("KL to the full cache, nats a step", budgets), ("top-1 flips, share of steps", budgets),
        (f"KL at {smallest:.0%}, by step", decode), ("exact recall, asked after the prompt", budgets),
    )  # fmt: skip
    for ax, (title, below) in zip(axes, titles, strict=True):
        ax.set(title=title, xlabel=below)
        ax.grid(alpha=0.3)
        ax.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    settings = result["settings"]
    figure.suptitle(
        f"{result['model']}: {settings['prompt_len']} + {settings['gen_len']} tokens, {result['text']['prompts']} "
        "prompts, 95% bootstrap intervals"
    )
    try:
        with replacing(path) as file:
            figure.savefig(file.buffer, format=path.suffix.lower().removeprefix("."), dpi=110)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        raise FlexgenError(f"--plot {path}: {error}") from error


def _over_budgets(ax: Any, cells: list[Figures], intervals: list[Figures], style: Figures) -> None:
    budgets, values = [cell["budget"] for cell in cells], [one["value"] for one in intervals]
    # A percentile interval may leave its estimate out; matplotlib takes no negative lengths.
    below = [max(0.0, one["value"] - one["low"]) for one in intervals]
    above = [max(0.0, one["high"] - one["value"]) for one in intervals]
    ax.errorbar(budgets, values, yerr=[below, above], capsize=2, linewidth=1.2, **style)
