"""Claims of the papers that any model can be asked: what the paper reports, and how to read our
figures of a row.

`Row.real` measures them. A check gets the row's figures by file (`FILE` of `$WORK/ROW-FILE.json`,
or "").
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.reproduce.rows import ROWS, Row
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import markdown_table

Figures = dict[str, Any]
WIDTH = 120  # of a line of the page
DOCUMENTATION = "documentation"  # the texts of a run without --articles
YES = "yes"
PART = "in part"
NO = "**no**"
SPARSE = 0.95  # of the entries, in the paper's "almost all layers"
ALMOST_ALL = 0.9
LOCAL = "local:sinks=0"  # the papers' Local: the newest entries alone
# the KV size that a claim is about
SHARE = 0.2
WINDOW = 128


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper."""

    row: str  # a name of rows.py
    source: str  # paper and section
    says: str
    paper: str  # the figure that the paper reports, and its model
    check: Callable[[Figures], tuple[str, str]]  # our figure in words, and YES, PART or NO


def verdict(agrees: bool, in_part: bool = False) -> str:
    return YES if agrees else PART if in_part else NO


# ---- attention


def sparse(found: Figures) -> tuple[str, str]:
    shares = [block["near_zero"]["value"] for block in found[""]["blocks"]]
    above = sum(share >= SPARSE for share in shares)
    mean = statistics.fmean(shares)
    words = (
        f"{mean:.0%} on average, {min(shares):.0%} to {max(shares):.0%}; {above} of "
        f"{len(shares)} layers"
    )
    return words, verdict(above >= ALMOST_ALL * len(shares), mean >= ALMOST_ALL)


def power_law(found: Figures) -> tuple[str, str]:
    blocks = found[""]["blocks"]
    fits = [block["r2"] for block in blocks]
    better = sum(block["r2"] > block["exponential_r2"] for block in blocks)
    middle = statistics.median(fits)
    words = (
        f"r2 {middle:.2f} (median); better than an exponential in {better} of {len(blocks)} layers"
    )
    return words, verdict(
        better >= ALMOST_ALL * len(blocks) and middle >= 0.9, 2 * better > len(blocks)
    )


def frequent(found: Figures) -> tuple[str, str]:
    ranks = found[""]["tokens"]["spearman"]
    whole = ranks["neighbours of score"]
    place = ranks["neighbours of per_query"]
    words = (
        f"rank correlation {whole:.2f} for the sum over all places of a token, {place:.2f} for "
        "one place"
    )
    return words, verdict(whole >= 0.5 and place >= 0.5, whole >= 0.5)


def removed(found: Figures) -> tuple[str, str]:
    cells = {
        (cell["policy"], cell["budget"]): cell["nll_less_full"]
        for cell in found[""]["removal"]["cells"]
    }
    kept = max(budget for _, budget in cells)
    heavy = cells["heavy hitters", kept]
    drawn = cells["random columns", kept]
    later = next(
        nats for (policy, budget), nats in cells.items() if budget == kept and "first" in policy
    )
    words = (
        f"without {1 - kept:.0%}: {heavy['value']:+.2f} nats per token; if the first 4 entries "
        "stay: "
        f"{later['value']:+.2f}; random entries: {drawn['value']:+.2f}"
    )
    return words, verdict(heavy["low"] > drawn["high"], heavy["value"] > drawn["value"])


# ---- budgets


def cell_of(found: Figures, policy: str, budget: float = SHARE) -> Figures:
    cells: list[Figures] = found[""]["cells"]
    return next(cell for cell in cells if cell["policy"] == policy and cell["budget"] == budget)


def harder(cell: Figures) -> float:
    """Return the factor on perplexity of a cell, less 1."""
    return math.expm1(cell["nll_less_full"]["value"])


def as_full(found: Figures) -> tuple[str, str]:
    cell = cell_of(found, "h2o")
    words = f"{cell['flips']['value']:.0%} of the tokens change; perplexity {harder(cell):+.1%}"
    return words, verdict(harder(cell) <= 0.02, harder(cell) <= 0.1)


def beats_local(found: Figures) -> tuple[str, str]:
    ours = cell_of(found, "h2o")["kl"]
    local = cell_of(found, LOCAL)["kl"]
    sinks = cell_of(found, "local")["kl"]
    words = (
        f"KL {ours['value']:.2f}; Local {local['value']:.2f}, Local with 4 sinks "
        f"{sinks['value']:.2f}"
    )
    return words, verdict(ours["high"] < local["low"], ours["value"] < local["value"])


def packed(found: Figures) -> tuple[str, str]:
    cell = cell_of(found, "h2o")
    full = cell_of(found, "full", 1.0)
    words = (
        f"4 bits alone: KL {full['kl']['value']:.3f}; with H2O at {SHARE:.0%}: "
        f"{cell['kl']['value']:.2f}"
    )
    return words, verdict(
        full["kl"]["value"] <= 0.1 * cell["kl"]["value"], full["kl"]["value"] <= cell["kl"]["value"]
    )


def four_bits(found: Figures) -> tuple[str, str]:
    cell = cell_of(found, "full", 1.0)
    words = f"perplexity {harder(cell):+.1%}, {cell['flips']['value']:.0%} of the tokens change"
    return words, verdict(harder(cell) <= 0.03, harder(cell) <= 0.1)


# ---- summaries, streams, tasks, speed


def by_size(found: Figures) -> dict[tuple[str, int], Figures]:
    """Cells of `evaluate summarize` by policy and KV entries, 0 for the full cache."""
    cells = [cell for cell in found[""]["cells"] if cell["scores"] is not None]
    return {
        (cell["policy"], sum(map(int, filter(None, cell["size"].split("+"))))): cell
        for cell in cells
    }


def rouge(cell: Figures) -> Figures:
    score: Figures = cell["scores"]["rouge2"]
    return score


def summaries_as_full(found: Figures) -> tuple[str, str]:
    cells = by_size(found)
    full = rouge(cells["full", 0])["value"]
    sizes = sorted(size for policy, size in cells if policy == "h2o")
    shown = [f"{size}: {100 * rouge(cells['h2o', size])['value']:.2f}" for size in sizes]
    large = [cells["h2o", size]["less_first"]["rouge2"] for size in sizes if size >= WINDOW]
    held = [gap["high"] >= 0 for gap in large]
    return f"{', '.join(shown)}; full: {100 * full:.2f}", verdict(all(held), any(held))


def summaries_beat_local(found: Figures) -> tuple[str, str]:
    cells = by_size(found)
    ours = rouge(cells["h2o", WINDOW])
    local = rouge(cells[LOCAL, WINDOW])
    words = f"{WINDOW} entries: {100 * ours['value']:.2f}; Local {100 * local['value']:.2f}"
    return words, verdict(ours["low"] > local["high"], ours["value"] > local["value"])


def streams(found: Figures) -> dict[str, Figures]:
    return {policy["policy"]: policy for one in found.values() for policy in one["policies"]}


def should_continue(found: Figures) -> tuple[str, str]:
    windows = [window["nll"]["value"] for window in streams(found)["h2o"]["windows"]]
    tokens = found["h2o"]["settings"]["stream_len"]
    words = f"{tokens:,} tokens; NLL per quarter {', '.join(f'{nats:.2f}' for nats in windows)}"
    worst = max(windows[1:]) - windows[0]
    return words, verdict(worst <= 0.1, worst <= 0.5)


def streams_better(found: Figures) -> tuple[str, str]:
    both = streams(found)
    ours = both["h2o"]["perplexity"]
    local = both["local"]["perplexity"]
    return f"perplexity {ours:.2f}; sinks and a window {local:.2f}", verdict(
        ours < local, ours < 1.02 * local
    )


def tasks_as_full(found: Figures) -> tuple[str, str]:
    cells = found[""]["cells"]
    scores = {
        one["name"]: statistics.fmean(task["value"] for task in one["tasks"].values())
        for one in cells
    }
    h2o = scores[f"h2o, {SHARE:.3g} of the entries"]
    gap = scores["full"] - h2o
    return f"{h2o:.0%} of the answers are right; full cache {scores['full']:.0%}", verdict(
        gap <= 0.02, gap <= 0.1
    )


def speeds(found: Figures, phase: str = "tokens_per_s") -> dict[str, float]:
    """Return the median tokens/s by system; a file is `SYSTEM-ROUND`."""
    systems = list(dict.fromkeys(name.rpartition("-")[0] for name in found))
    return {
        system: statistics.median(
            run[phase] for name, run in found.items() if name.rpartition("-")[0] == system
        )
        for system in systems
    }


def faster(found: Figures) -> tuple[str, str]:
    both = speeds(found)
    ratio = both["ours-h2o:0.1"] / both["ours-full"]
    peer = both["ours-h2o:0.1"] / both["hf-sdpa"]
    decode = speeds(found, "decode_tokens_per_s")
    only = decode["ours-h2o:0.1"] / decode["ours-full"]
    words = (
        f"{ratio:.1f} times the full cache, {peer:.1f} times Hugging Face; decode alone "
        f"{only:.1f} times"
    )
    return words, verdict(min(ratio, peer) >= 3, min(ratio, peer) > 1.05)


CLAIMS = (
    Claim(
        "attention",
        "H2O 3.1",
        "Attention is sparse: in almost all layers over 95% of the entries are below 1% of their "
        "query's largest",
        "over 95% (OPT)",
        sparse,
    ),
    Claim(
        "attention",
        "H2O 3.2",
        "Accumulated scores follow a power law",
        "a picture (OPT)",
        power_law,
    ),
    Claim(
        "attention",
        "H2O 3.2",
        "Tokens that occur with many others are the heavy hitters",
        "a picture (OPT-6.7B)",
        frequent,
    ),
    Claim(
        "attention",
        "H2O 3.2",
        "A model without its heavy hitters fails",
        "a picture (OPT)",
        removed,
    ),
    Claim(
        "fidelity",
        "H2O 5.1, Figure 4",
        "H2O with 20% of the KV cache answers as the full cache does",
        "equal accuracy on six tasks (OPT-30B and others)",
        as_full,
    ),
    Claim(
        "fidelity",
        "H2O 5.1, Figure 4",
        "Local loses much more than H2O at 20%",
        "Local fails on most tasks (OPT-30B and others)",
        beats_local,
    ),
    Claim(
        "summaries",
        "llama-recipes, XSUM",
        "From 128 KV entries on, ROUGE-2 of H2O is that of the full cache",
        "64: 4.39, 128: 11.27, 256: 11.48, 512: 11.82; full: 11.64 (Llama-2-7B)",
        summaries_as_full,
    ),
    Claim(
        "summaries",
        "H2O 5.1, Figure 4",
        "Summaries of Local are far worse than those of H2O",
        "Local fails at 20% (OPT-30B and others)",
        summaries_beat_local,
    ),
    Claim(
        "streaming",
        "H2O 5.3",
        "Texts may be much longer than the trained length",
        "up to 4 million tokens (LLaMA-2, Vicuna)",
        should_continue,
    ),
    Claim(
        "streaming",
        "H2O 5.3",
        "Long texts are more predictable with H2O than with sinks and a window of the same size",
        "lower perplexity at every cache size",
        streams_better,
    ),
    Claim(
        "ruler",
        "H2O 5.1",
        "H2O with 20% of the KV cache solves tasks as the full cache does",
        "equal accuracy on six tasks; a needle in a text was not among them",
        tasks_as_full,
    ),
    Claim(
        "h2o-4bit",
        "H2O 5.3",
        "H2O and 4-bit KV work together: 4 bits cost almost nothing more",
        "equal accuracy on three tasks (OPT-30B)",
        packed,
    ),
    Claim(
        "compression",
        "FlexGen, Table 5",
        "Weights and KV in 4 bits cost almost nothing",
        "perplexity 12.72 -> 12.90, +1.4% (OPT-30B, WikiText)",
        four_bits,
    ),
    Claim(
        "peers",
        "H2O 5.2",
        "H2O generates several times as many tokens per second",
        "3 times FlexGen, up to 29 times Accelerate (OPT-6.7B and 30B, a T4)",
        faster,
    ),
)


# ---- tables below the claims


def pivot(
    corner: str,
    rows: Iterable[str],
    heads: Sequence[str],
    cell: Callable[[str, str], Figures | None],
    scale: float,
) -> list[str]:
    """A table of intervals, those of `cell` times `scale`."""

    def shown(interval: Figures | None) -> str:
        if interval is None:
            return ""
        value, low, high = (scale * interval[name] for name in ("value", "low", "high"))
        return f"{value:.2f}" if interval.get("n") == 1 else f"{value:.2f} [{low:.2f}, {high:.2f}]"

    return markdown_table(
        [corner, *heads], [[row, *(shown(cell(row, head)) for head in heads)] for row in rows]
    )


def budget_table(found: Figures) -> list[str]:
    cells = {
        (f"`{cell['policy']}`", f"{cell['budget']:.0%}"): cell["kl"] for cell in found[""]["cells"]
    }
    rows = dict.fromkeys(row for row, _ in cells)
    heads = list(dict.fromkeys(head for _, head in cells))
    return pivot("KL, nats", rows, heads, lambda row, head: cells.get((row, head)), 1)


def summary_table(found: Figures) -> list[str]:
    cells = {
        (f"`{policy}`", str(size or "all")): cell for (policy, size), cell in by_size(found).items()
    }
    rows = dict.fromkeys(row for row, _ in cells)
    heads = list(dict.fromkeys(head for _, head in cells))

    def score(row: str, head: str) -> Figures | None:
        return rouge(cells[row, head]) if (row, head) in cells else None

    return pivot("ROUGE-2 by KV entries", rows, heads, score, 100)


def stream_table(found: Figures) -> list[str]:
    both = streams(found)
    windows = {f"{one['first']} - {one['last']}": i for i, one in enumerate(both["h2o"]["windows"])}
    return pivot(
        "NLL, nats",
        both,
        list(windows),
        lambda row, head: dict(both[row]["windows"][windows[head]]["nll"], n=1),
        1,
    )


def task_table(found: Figures) -> list[str]:
    cells = {f"`{one['name']}`": one["tasks"] for one in found[""]["cells"]}
    tasks = list(next(iter(cells.values())))
    return pivot("right answers, %", cells, tasks, lambda row, head: cells[row][head], 100)


def speed_table(found: Figures) -> list[str]:
    names = {
        "prefill_s": "prefill, s",
        "decode_tokens_per_s": "decode, tokens/s",
        "tokens_per_s": "all, tokens/s",
    }
    of = {phase: speeds(found, phase) for phase in names}
    return markdown_table(
        ["system (median)", *names.values()],
        [
            [f"`{system}`", *(f"{of[phase][system]:.1f}" for phase in names)]
            for system in of["tokens_per_s"]
        ],
    )


TABLES: dict[str, Callable[[Figures], list[str]]] = {
    "fidelity": budget_table,
    "summaries": summary_table,
    "streaming": stream_table,
    "ruler": task_table,
    "h2o-4bit": budget_table,
    "compression": budget_table,
    "peers": speed_table,
}


# ---- the page


def claims_page(results: Path) -> str:
    """Each claim with the paper's figure and that of the results, and their tables."""
    kept: dict[str, Figures] = {}
    for row in ROWS:
        path = results / f"{row.name}.json"
        if path.exists():
            kept[row.name] = json.loads(path.read_text())
    if not kept:
        raise UsageError(f"--results {results}: has no result; run bash scripts/reproduce.sh first")
    models = " and ".join(sorted({f"`{one['model']}`" for one in kept.values()}))
    minutes = sum(one["seconds"] for one in kept.values()) / 60
    checked = [
        (claim, *claim.check(kept[claim.row]["figures"])) for claim in CLAIMS if claim.row in kept
    ]
    counts = Counter(agrees.strip("*") for _, _, agrees in checked)
    table = [
        [f"[{claim.row}](#{claim.row})", claim.source, claim.says, claim.paper, ours, agrees]
        for claim, ours, agrees in checked
    ]
    parts = [
        "# The papers' claims on a real model",
        _wrapped(
            f"Do the claims of the H2O and FlexGen papers hold for {models}? Of {len(checked)} "
            "claims: "
            + ", ".join(f"{word} {n}" for word, n in counts.items())
            + ". The papers used models of 6 to 175 billion parameters. A claim that fails here "
            "may hold there."
        ),
        "\n".join(
            markdown_table(
                ["measured by", "paper", "claim", "the paper's figure", "here", "agrees"], table
            )
        ),
        _wrapped(
            f"Made by `bash scripts/reproduce.sh`, in {minutes:.0f} minutes. Brackets are 95% "
            "intervals over prompts. "
            f"`local` keeps the first 4 and the newest KV entries. `{LOCAL}` is the papers' Local: "
            "the newest entries alone. Shares are of the prompt's entries, "
            "and prompts have 384 tokens, so figures differ from those of [Quality](quality.md). "
            "`bench/reproduce/claims.py` has the bound for each answer. The figures are in "
            "`bench/results/papers/`."
        ),
    ]
    missing = sorted({claim.row for claim in CLAIMS} - kept.keys())
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    for row in ROWS:
        if row.name in kept:
            parts += _section(row, kept[row.name])
    return "\n\n".join(parts) + "\n"


def _section(row: Row, result: Figures) -> list[str]:
    machine = result["machine"]
    articles = "" if result["texts"] == DOCUMENTATION else f" --articles {result['texts']}"
    section = [
        f"## {row.name}",
        _wrapped(
            f"Model `{result['model']}`, {machine['date'][:10]}, {machine['cpu']}, "
            f"{machine['cores']} cores, commit "
            f"`{machine['commit'][:8]}`, {result['seconds']} seconds."
        ),
        f"```bash\nbash scripts/reproduce.sh{articles} --only {row.name}\n```",
    ]
    return (
        [*section, "\n".join(TABLES[row.name](result["figures"]))]
        if row.name in TABLES
        else section
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
