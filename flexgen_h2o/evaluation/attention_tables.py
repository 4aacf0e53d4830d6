"""Tables and a picture of a result of `evaluate attention`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexgen_h2o.core.files import write_picture
from flexgen_h2o.core.units import markdown_table
from flexgen_h2o.evaluation.figures import Figures, number, percent, perplexity

# Shares of the KV entries whose part of the accumulated scores is reported.
TOP_SHARES = (0.01, 0.05, 0.2)
MAX_NAMED = 20  # transformer blocks that a picture's legend names


def markdown(result: Figures) -> str:
    """Return the tables of an attention result (attention JSON)."""
    settings = result["settings"]
    fitted = result["fit"]
    compression = f", {settings['compression']}" if settings["compression"] else ""
    parts = [
        f"Model `{result['model']}` in {settings['dtype']}{compression}; {result['rows']} prompts "
        "of "
        f"{settings['prompt_len']} tokens; 95% bootstrap intervals over prompts in brackets; seed "
        f"{settings['seed']}.",
        "### Sparsity and accumulated scores, by transformer block",
        f"Columns for {settings['mass']:.0%}: share of the columns seen by a query that hold so "
        "much of its attention. "
        f"Below {settings['near_zero']:.0%}: share of entries below that of their query's largest "
        "(the paper's "
        f"sparsity). Both are means over heads and over the queries from {settings['first_query']} "
        "on. Exponent: the "
        f"score of rank r falls as r^-exponent, by {fitted['method']}, ranks "
        f"{fitted['first_rank']} to "
        f"{fitted['last_rank']}; beside it the r2 of an exponential law over the same ranks.",
        "\n".join(_block_table(result)),
        "### Co-occurrence and accumulated score",
        f"Spearman's rank correlation over the {result['tokens']['distinct']} distinct tokens of "
        "the prompts. "
        f"Neighbours: distinct other tokens within {settings['window']} of a place of the token.",
        "\n".join(_token_table(result["tokens"])),
    ]
    if "removal" in result:
        parts += [
            "### Columns removed",
            _removal_words(settings),
            "\n".join(_removal_table(result["removal"])),
        ]
    return "\n\n".join(parts) + "\n"


def _block_table(result: Figures) -> list[str]:
    settings = result["settings"]
    heads = (
        "block",
        f"columns for {settings['mass']:.0%}",
        f"below {settings['near_zero']:.0%}",
        "exponent",
        "r2",
        "exponential r2",
        *(f"held by the top {s:.0%}" for s in TOP_SHARES),
    )
    rows = [
        [
            str(found.get("block", "mean")),
            percent(found["columns_needed"]),
            percent(found["near_zero"]),
            f"{found['exponent']:.2f}",
            f"{found['r2']:.3f}",
            f"{found['exponential_r2']:.3f}",
            *(f"{share:.1%}" for share in found["held_by_top"].values()),
        ]
        for found in (*result["blocks"], result["mean"])
    ]
    return markdown_table(heads, rows)


def _token_table(tokens: Figures) -> list[str]:
    found = tokens["spearman"]
    names = {
        "score": "accumulated score, all places",
        "per_query": "score a query, mean over places",
    }
    return markdown_table(
        ["", "occurrences", "neighbours"],
        [
            [text, *(f"{found[f'{of} of {what}']:.2f}" for of in ("occurrences", "neighbours"))]
            for what, text in names.items()
        ],
    )


def _removal_words(settings: Figures) -> str:
    return (
        f"Columns of the prompt that no later query sees, chosen for each row, block and kv-head; "
        f"{settings['gen_len']} tokens of the text are followed. Flips: steps whose likeliest "
        "token is another one "
        "than with the full cache."
    )


def _removal_table(removal: Figures) -> list[str]:
    full = removal["full"]["nll"]
    rows = [
        [
            cell["policy"],
            f"{1 - cell['budget']:.0%}",
            number(cell["nll"], 3),
            f"{perplexity(cell['nll']['value']):.2f}",
            number(cell["nll_less_full"], 3),
            percent(cell["flips"]),
        ]
        for cell in removal["cells"]
    ]
    rows.append(
        ["none (full cache)", "", number(full, 3), f"{perplexity(full['value']):.2f}", "0", "0"]
    )
    return markdown_table(
        ["removed", "share", "NLL, nats", "perplexity", "NLL - full", "flips"], rows
    )


def draw(result: Figures, path: Path) -> None:
    """Draw sparsity by block, scores by rank, tokens by score, and removals.

    Raise FlexgenError naming --plot if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    (sparse, ranks), (tokens, removed) = figure.subplots(2, 2)
    blocks = result["blocks"]
    settings = result["settings"]
    for name, label in (
        ("columns_needed", f"columns for {settings['mass']:.0%} of the attention"),
        ("near_zero", f"entries below {settings['near_zero']:.0%} of the largest"),
    ):
        sparse.plot(
            [b["block"] for b in blocks],
            [b[name]["value"] for b in blocks],
            marker="o",
            label=label,
        )
    sparse.set(title="sparsity", xlabel="transformer block", ylabel="share", ylim=(0, 1))
    for found in blocks:
        curve = found["score_by_rank"]
        ranks.loglog(range(1, len(curve) + 1), curve, label=f"block {found['block']}", alpha=0.8)
    ranks.set(title="accumulated scores, largest first", xlabel="rank", ylabel="share of the sum")
    points = result["tokens"]["points"]
    tokens.loglog(points["neighbours"], points["score"], ".", markersize=4, alpha=0.5)
    tokens.set(
        title=f"tokens; Spearman {result['tokens']['spearman']['neighbours of score']:.2f}",
        xlabel=f"distinct tokens within {settings['window']}",
        ylabel="share of all scores",
    )
    _draw_removals(removed, result.get("removal"))
    for ax in (sparse, ranks, tokens, removed):
        ax.grid(alpha=0.3)
    for ax in (sparse, ranks) if len(blocks) <= MAX_NAMED else (sparse,):
        ax.legend(fontsize=8)
    figure.suptitle(
        f"{result['model']}: {result['rows']} prompts of {settings['prompt_len']} tokens"
    )
    write_picture(path, figure)


def _draw_removals(ax: Any, removal: Figures | None) -> None:
    if removal is None:
        ax.set_axis_off()
        return
    for policy in dict.fromkeys(cell["policy"] for cell in removal["cells"]):
        cells = sorted(
            (c for c in removal["cells"] if c["policy"] == policy),
            key=lambda c: -float(c["budget"]),
        )
        shares = [1 - cell["budget"] for cell in cells]
        ax.plot(
            shares, [cell["nll_less_full"]["value"] for cell in cells], marker="o", label=policy
        )
    ax.set(
        title="NLL over the full cache's, nats",
        xlabel="columns of the prompt removed",
        ylim=(0, None),
    )
    ax.legend(fontsize=8)
