"""What quality a share of the KV cache's bytes buys: columns, bits and summaries against the full cache.

Method: teacher forcing in fp32 along the same continuations (evaluation/fidelity.Runner). A cell is
POLICY@COLUMNS[/BITS[/BITS][wWINDOW]][rREAD]: an eviction policy with settings of its own, its share of the columns of
prompt + new tokens (--kv-budget), bits (of keys/of values) and window of a compressed cache, and for the full cache the
share of its columns that a step reads (--attn-sparsity): `h2o@0.2`, `h2o-norm:summaries=32@0.5/3w16`, `full@1/4/2`,
`full@1/4r0.1`. Bytes are those of a row's keys and values when it is complete (scales, centres, summaries, sketches and
whole columns counted; the record of slots, 4 to 12 bytes a slot, is not), over bf16's of all prompt and new tokens; "a
step" has those that the last decode step reads. KL of the next token to the full cache, flips of the likeliest token,
NLL less the full cache's, and recall of stated pairs at the end of the prompt and after it, each a mean over rows with
its 95% bootstrap interval. Cells are chosen before the run.

    python -m bench.sweep.frontier [--model M] [--prompt-len 256 --gen-len 96] [--cells CELL ...] [--plot FILE]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import common
from flexgen_h2o import LLM, Policy
from flexgen_h2o.cli_common import positive, say
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import write_picture, write_result
from flexgen_h2o.core.units import markdown_table
from flexgen_h2o.evaluation.fidelity import Runner
from flexgen_h2o.evaluation.figures import MARKS, Figures, number, summarise_recall, summarise_texts
from flexgen_h2o.evaluation.rows import SEQUENCE, Case, held_out_rows, make_cells, recall_rows, text_of
from flexgen_h2o.kvcache.eviction import Full

NORM, SUMS, FIRST = "h2o-norm", "h2o-norm:summaries=32", "h2o-norm:summaries=128,summary_layers=2"
CELLS = [
    *(f"full@1/{bits}" for bits in (8, 4, 3, 2)), "full@1/4w0", "full@1/3w32",
    *(f"{policy}@{share}" for share in (0.5, 0.2, 0.1, 0.05) for policy in ("h2o", NORM, SUMS)),
    *(f"{SUMS}@{share}/{bits}" for bits in (4, 3, 2) for share in (0.7, 0.5, 0.35, 0.25, 0.15)),
    *(f"{NORM}@{share}/3" for share in (0.5, 0.25)),
    *(f"{FIRST}@{share}/4/3" for share in (0.6, 0.51, 0.42)),
    *(f"{FIRST}@{share}/4/3w0" for share in (0.455, 0.313, 0.137, 0.049)),
    *(f"h2o-norm:summaries=16@{share}/3" for share in (0.5, 0.25)),
    *(f"h2o-norm:summaries=32,layer_schedule=first-full@{share}/3" for share in (0.35, 0.2)),
    *(f"full@1r{read}" for read in (0.2, 0.1, 0.07, 0.05)), "full@1/4r0.1", "full@1/3r0.1",
]  # fmt: skip
KEEP_BYTES = 2**31  # of what is kept of the full cache's run
_CELL = re.compile(
    r"(?P<policy>.+)@(?P<columns>[0-9.]+)(/(?P<bits>[0-9]+(/[0-9]+)?)(w(?P<window>[0-9]+))?)?(r(?P<read>[0-9.]+))?"
)


def main() -> None:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--model", default="opt-tiny")
    add("--prompt-len", type=positive, default=256)
    add("--gen-len", type=positive, default=96)
    add("--num-prompts", type=positive, default=200)
    add("--recall-prompts", type=int, default=100)
    add("--rows", type=positive, default=32, help="rows of a micro-batch")
    add("--seed", type=int, default=0, help="of the rows; choose cells on other seeds")
    add("--resamples", type=positive, default=2000)
    add("--cells", nargs="+", default=CELLS, metavar="CELL")
    add("--markdown", action=common.ResultFile)
    add("--plot", action=common.ResultFile)
    args = parser.parse_args()
    cells = [cell_of(text, args.rows) for text in args.cells]
    with LLM(args.model, Policy(args.rows), device="cpu", dtype="float32") as llm:
        found = measure(args, llm, cells)
    text = markdown(args, found)
    print(text)
    if args.markdown is not None:
        write_result(args.markdown, text, "--markdown")
    if args.plot is not None:
        draw(found, args.plot)
    settings = {name: getattr(args, name) for name in ("model", "prompt_len", "gen_len", "num_prompts", "seed")}
    common.finish(settings | {"cells": found}, args.output)


def cell_of(text: str, rows: int) -> Case:
    """UsageError names --cells."""
    parts = _CELL.fullmatch(text)
    if parts is None:
        raise UsageError(f"--cells {text}: is not POLICY@COLUMNS[/BITS[/BITS][wWINDOW]][rREAD], as h2o-norm@0.5/3w16")
    share, switches = float(parts["columns"]), dict[str, Any]()
    if parts["bits"]:
        window = {} if parts["window"] is None else {"cache_window": int(parts["window"])}
        switches = {"compress_cache": True, "cache_bits": parts["bits"], **window}
    policy = Policy(rows, attn_sparsity=float(parts["read"] or 1), **switches)
    if parts["policy"] == Full.name:
        return Case(text, Full(), budget_of=SEQUENCE, policy=policy)
    (case,) = make_cells([parts["policy"]], [share], budgets_of=SEQUENCE)
    return Case(text, case.eviction, share, SEQUENCE, policy)


def measure(args: argparse.Namespace, llm: LLM, cells: Sequence[Case]) -> list[Figures]:
    """The figures of each cell, the full cache's first."""
    source, lengths = text_of(None, llm.model, ""), (args.prompt_len, args.gen_len)
    texts = held_out_rows(source, args.num_prompts, *lengths, args.seed)
    recalls = recall_rows(source, args.recall_prompts, *lengths, 5, args.seed)
    how, runner = (args.resamples, args.seed), Runner(llm, KEEP_BYTES, 0)
    runner.check(cells)
    full, found = summarise_texts(*runner.texts(texts, cells), *how)
    full |= {"policy": "full, bf16", "kv_share": 1.0, "read_share": 1.0}
    for one, case in ((full, None), *zip(found, cells, strict=True)):
        one["recall"] = summarise_recall(recalls, runner.recall(recalls, case), *how) if recalls else {}
        one.pop("by_step", None)
        inside = one["recall"].get("inside", {"value": 0})["value"]
        say("frontier", f"{one['policy']}: {one['kv_share']:.1%}, recall {inside:.0%}")
    return [full, *found]


def markdown(args: argparse.Namespace, found: Sequence[Figures]) -> str:
    head = (
        f"Model `{args.model}` in float32, {args.num_prompts} rows of {args.prompt_len} + {args.gen_len} tokens of "
        f"text and {args.recall_prompts} of recall, seed {args.seed}; 95% bootstrap intervals over rows in brackets."
    )
    rows = []
    for one in sorted(found, key=lambda cell: -cell["kv_share"]):
        recall = [f"{one['recall'][at]['value']:.0%}" if at in one["recall"] else "" for at in ("inside", "after")]
        quality = [number(one[name], 4) if name in one else "0" for name in ("kl", "nll_less_full")]
        flips = f"{one['flips']['value']:.1%}" if "flips" in one else "0"
        bytes_of = [f"{one[share]:.1%}" for share in ("kv_share", "read_share")]
        rows.append([f"`{one['policy']}`", *bytes_of, quality[0], flips, quality[1], *recall])
    heads = ["cell", "of the bytes", "a step", "KL, nats", "flips", "NLL - full", "recall, inside", "recall, after"]
    return head + "\n\n" + "\n".join(markdown_table(heads, rows)) + "\n"


def best_line(found: Sequence[Figures]) -> list[tuple[float, float]]:
    """(share, KL) of the cells that no smaller one is better than, ascending. share: read in a step."""
    line: list[tuple[float, float]] = []
    for one in sorted((f for f in found if "kl" in f), key=lambda f: (f["read_share"], f["kl"]["value"])):
        if not line or one["kl"]["value"] < line[-1][1]:
            line.append((one["read_share"], one["kl"]["value"]))
    return line


def draw(found: Sequence[Figures], path: Path) -> None:
    """Every cell as a point by its policy, and the best as a line; both axes in logarithms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    ax: Any = figure.subplots()
    kinds: dict[str, list[Figures]] = {}
    for one in found:
        if "kl" in one:
            policy, _, rest = re.sub(r"layer_schedule=[\d./]+", "by layer", one["policy"]).partition("@")
            bits = rest.partition("/")[2].partition("r")[0].partition("w")[0] or "16"
            read = ", some read" if "r" in rest else ""
            kinds.setdefault(f"{policy}, {bits} bits{read}", []).append(one)
    for i, (kind, cells) in enumerate(sorted(kinds.items())):
        x, y = [c["read_share"] for c in cells], [max(c["kl"]["value"], 1e-5) for c in cells]
        ax.plot(x, y, linestyle="", marker=MARKS[i % len(MARKS)], color=f"C{i % 10}", label=kind)
    ax.plot(*zip(*best_line(found), strict=True), color="black", linewidth=1, label="best")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="bytes that a step reads, as a share of the bf16 cache",
        ylabel="KL to the full cache, nats",
    )
    ax.grid(alpha=0.3, which="both")
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    write_picture(path, figure)


if __name__ == "__main__":
    sys.exit(common.door(main))
