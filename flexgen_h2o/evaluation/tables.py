"""Results as markdown tables, and as a picture. Imports matplotlib only where a picture is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexgen_h2o.core.files import write_picture
from flexgen_h2o.core.units import format_bytes, markdown_table

Figures = dict[str, Any]


def markdown(result: Figures) -> str:
    """Tables of a fidelity result (fidelity JSON): a budget at a time, the worst policy first, the full cache last."""
    settings = result["settings"]
    text, recall = result["text"], result["recall"]
    head = [
        f"Model `{result['model']}` in {settings['dtype']}; prompts of {settings['prompt_len']} tokens, "
        f"{settings['gen_len']} tokens followed ({settings['continuation']}), {text['prompts']} of text"
        + (f", {recall['prompts']} of recall" if recall else "")
        + (f"; all rows but the last of a table with {settings['compression']}" if settings["compression"] else "")
        + f"; 95% bootstrap intervals over prompts in brackets; seed {settings['seed']}."
    ]
    parts = [head]
    for budget in settings["budgets"]:
        cells = [cell for cell in result["cells"] if cell["budget"] == budget]
        cells.sort(key=lambda cell: -cell["kl"]["value"])
        parts.append([f"### {budget:.0%} of the prompt's columns", "", *_main(cells, result)])
    parts.append(["### NLL by step: nats over the full cache's", "", *_by_step(result)])
    if recall:
        for name, title in (("inside", "at the end of the prompt"), ("after", "after the prompt")):
            if name in result["full"]["recall"]:
                parts.append([f"### Recall by depth, question {title}", "", *_by_depth(result, name)])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _names(result: Figures) -> tuple[str, Callable[[Figures], str]]:
    """The first column of the reference, and of a cell: where the compared runs are compressed, the full cache is one
    of them."""
    compression = result["settings"]["compression"]
    if not compression:
        return "full", lambda cell: f"`{cell['policy']}`"
    return (
        "full, uncompressed",
        lambda cell: f"`{cell['policy']}`" + (f", {compression}" if cell["policy"] == "full" else ""),
    )


def _main(cells: Sequence[Figures], result: Figures) -> list[str]:
    full, text, recall = result["full"], result["text"], result["recall"]
    watched, diverged = "evicted_mass" in cells[0], "greedy" in cells[0]
    reference, name_of = _names(result)
    optional = [
        (watched, "evicted mass"),
        (recall, "recall, question inside"), (recall and "after" in full["recall"], "recall, question after"),
        (diverged, "equal greedy tokens"),
    ]  # fmt: skip
    names = ["policy", "columns", "KL, nats", "KL p95", "flips", "NLL - full", "KL - h2o's"]
    names += [name for given, name in optional if given]
    rows = []
    for cell in cells:
        columns = [
            name_of(cell), f"{cell['columns']:.0f}", number(cell["kl"], 3), number(cell["kl_p95"], 2),
            _percent(cell["flips"]), number(cell["nll_less_full"], 3), number(cell["kl_less_baseline"], 3),
        ]  # fmt: skip
        columns += [_percent(cell["evicted_mass"])] if watched else []
        columns += [_percent(part) for part in cell.get("recall", {}).values()]
        rows.append([*columns, number(cell["greedy"]["first"], 1)] if diverged else columns)
    columns = [reference, f"{text['mean_prompt_len']:.0f}", "0", "0", "0", f"0 (NLL {number(full['nll'], 3)})", ""]
    columns += ["0"] if watched else []
    columns += [_percent(part) for part in full.get("recall", {}).values()]
    rows.append([*columns, f"{text['steps']}"] if diverged else columns)
    return markdown_table(names, rows)


def _by_step(result: Figures) -> list[str]:
    bins, (reference, name_of) = result["full"]["by_step"], _names(result)
    rows = [
        [name_of(cell), f"{cell['budget']:.0%}", *(number(part["nll_less_full"], 3) for part in cell["by_step"])]
        for cell in result["cells"]
    ]
    rows.append([f"{reference}: NLL", "", *(number(part["nll"], 3) for part in bins)])
    return markdown_table(["policy", "budget", *(f"{part['first']} - {part['last']}" for part in bins)], rows)


def _by_depth(result: Figures, name: str) -> list[str]:
    full, (reference, name_of) = result["full"]["recall"][name]["by_depth"], _names(result)
    rows = [
        [name_of(cell), f"{cell['budget']:.0%}", *map(_percent, cell["recall"][name]["by_depth"])]
        for cell in result["cells"]
    ]
    rows.append([reference, "", *map(_percent, full)])
    return markdown_table(["policy", "budget", *(f"stated at {part['at']:.0%}" for part in full)], rows)


def number(interval: Figures | None, digits: int) -> str:
    if interval is None:
        return ""
    return f"{interval['value']:.{digits}f} [{interval['low']:.{digits}f}, {interval['high']:.{digits}f}]"


def _percent(interval: Figures) -> str:
    value, low, high = (100 * interval[key] for key in ("value", "low", "high"))
    return f"{value:.1f}% [{low:.1f}, {high:.1f}]"


def conversation_table(policies: Sequence[Figures], turns: int, compression: str) -> str:
    """What conversations took (streaming JSON), a policy a row. compression: flags of all of them."""
    names = ["policy", "positions", "turns answered", "tokens", "perplexity", "KV held at most", "seconds"]
    rows = [
        [
            f"`{found['policy']}`", found["positions"], f"{found['answered']} of {turns}", f"{found['tokens']}",
            "" if found["perplexity"] is None else f"{found['perplexity']:.2f}", format_bytes(found["kv_bytes"]),
            f"{found['seconds']:.1f}",
        ]
        for found in policies
    ]  # fmt: skip
    note = "Perplexity: of the tokens of all turns but the first, as they came." + (
        f" All with {compression}." if compression else ""
    )
    return "\n".join([*markdown_table(names, rows), "", note])


def text_tables(policies: Sequence[Figures], model: str, dtype: str, compression: str) -> str:
    """The surprise of long texts and the KV held (streaming JSON), a policy a row, by window. compression: flags of all
    of them."""
    windows, streams = policies[0]["windows"], policies[0]["nll"]["n"]
    spans = [f"{w['first']} - {w['last']}" for w in windows]

    def nats(interval: Figures) -> str:
        return number(interval, 3) if interval["n"] > 1 else f"{interval['value']:.3f}"

    rows = [
        [
            f"`{found['policy']}`", found["positions"], *(nats(w["nll"]) for w in found["windows"]),
            nats(found["nll"]), f"{found['perplexity']:.2f}",
        ]
        for found in policies
    ]  # fmt: skip
    held = [
        [
            f"`{found['policy']}`", found["positions"], *(format_bytes(w["kv_bytes"]) for w in found["windows"]),
            f"{found['seconds']:.1f}",
        ]
        for found in policies
    ]  # fmt: skip
    intervals = f"{streams} streams; NLL in nats a token, 95% bootstrap intervals over streams"
    setting = f"{dtype}, all with {compression}" if compression else dtype
    head = f"Model `{model}` in {setting}; {intervals if streams > 1 else 'NLL in nats a token'}."
    parts = [
        [head], markdown_table(["policy", "positions", *spans, "all", "perplexity"], rows),
        ["KV held by one stream at the end of each window:"],
        markdown_table(["policy", "positions", *spans, "seconds"], held),
    ]  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts)


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
    write_picture(path, figure)


def _over_budgets(ax: Any, cells: list[Figures], intervals: list[Figures], style: Figures) -> None:
    budgets, values = [cell["budget"] for cell in cells], [one["value"] for one in intervals]
    # A percentile interval may leave its estimate out; matplotlib takes no negative lengths.
    below = [max(0.0, one["value"] - one["low"]) for one in intervals]
    above = [max(0.0, one["high"] - one["value"]) for one in intervals]
    ax.errorbar(budgets, values, yerr=[below, above], capsize=2, linewidth=1.2, **style)
