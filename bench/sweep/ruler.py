"""Which policies keep what RULER-type tasks ask for, at shares of each row's KV columns.

Method: lm-eval answers its own RULER tasks (--tasks, of --length tokens) through the engine, and two tasks of the same
kind in words that the shipped model was trained on: `recall_single` states one pair (`let qf = 37`) in held-out code
and asks for it at the end, `recall_multikey` states ten together and asks for one; each at --recall-lengths tokens. The
full cache is first, then each policy at each --budgets (`--kv-budget`: of prompt and new tokens), greedy, fp32. A score
is the mean of an example's, which are from 0 to 1; its interval is Wilson's of 95% (Wilson 1927), which is wide enough
for scores between 0 and 1. A task whose full cache scores under 20% ranks nothing: its policies are not run. --cells
has those of bench.sweep.frontier, which also say in which bits KV is held, in place of policies and budgets.

    python -m bench.sweep.ruler [--tasks NAME ...] [--limit N] [--budgets R ...] [--markdown FILE] [--output FILE]
    python -m bench.sweep.ruler --model M --length 2048 --recall-lengths 512 1024 1984 --cells full@1/4 h2o@0.2
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import common
from bench.sweep.frontier import cell_of
from flexgen_h2o import LLM
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import write_result
from flexgen_h2o.core.units import markdown_table
from flexgen_h2o.evaluation.lm_eval import check_ruler
from flexgen_h2o.evaluation.rows import Case, HeldOutText, draw_pairs, make_cells, statement, stretch, text_of
from flexgen_h2o.kvcache.eviction import EVICTING, Full

RANKS_FROM = 0.2  # score of the full cache
Z = 1.959964  # of a normal distribution's 95%
ROWS = 8  # of a micro-batch, with --cells
RECALL = {"recall_single": 1, "recall_multikey": 10}  # pairs that are stated
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6}}
filter_list: [{{name: digits, filter: [{{function: regex, regex_pattern: "(\\\\d+)"}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""

Scores = dict[str, list[float]]  # of a task's examples


def main() -> None:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--model", default="opt-tiny")
    add("--tasks", nargs="*", default=["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_fwe"])
    add("--length", type=positive, default=1024, help="tokens of RULER's own (1024)")
    add("--recall-lengths", type=positive, nargs="*", default=[256, 512, 960])
    add("--limit", type=positive, default=100, help="examples of a task (100)")
    add("--budgets", type=float, nargs="+", default=[0.5, 0.2, 0.1])
    add("--policies", nargs="+", default=list(EVICTING))
    add("--cells", nargs="+", metavar="CELL", help="as of bench.sweep.frontier, for --policies and --budgets")
    add("--markdown", action=common.ResultFile, help="also write the table here")
    args = parser.parse_args()
    cells = cells_of(args)
    found: dict[str, Scores] = {}
    with tempfile.TemporaryDirectory() as folder:
        tasks = load_tasks(args, Path(folder))
        for label, cell in cells.items():
            found[label] = score(args.model, cell, tasks, args.limit, Path(folder))
            print(f"# {label}: " + ", ".join(f"{name} {mean(s):.0%}" for name, s in found[label].items()), flush=True)
            if len(found) == 1:
                tasks = {name: task for name, task in tasks.items() if mean(found[label][name]) >= RANKS_FROM}
    text = markdown(found)
    print(text)
    if args.markdown is not None:
        write_result(args.markdown, text, "--markdown")
    scores = {
        label: {name: {"score": mean(s), "interval": interval(s), "examples": len(s)} for name, s in of.items()}
        for label, of in found.items()
    }
    common.finish({"limit": args.limit, "length": args.length, "scores": scores}, args.output)


def cells_of(args: Any) -> dict[str, Case]:
    """What is compared by name, the full cache first."""
    if args.cells:
        return {Full.name: Case(Full.name, Full()), **{text: cell_of(text, ROWS) for text in args.cells}}
    first, *others = make_cells(args.policies, args.budgets, whole=True, budgets_of="sequence")
    return {first.label: first, **{f"{cell.label} {cell.budget:.0%}": cell for cell in others}}


def load_tasks(args: Any, work: Path) -> dict[str, Any]:
    """lm-eval's task objects by name; their examples are made once for all cells."""
    from lm_eval.tasks import TaskManager

    with LLM(args.model, device="cpu", dtype="float32", offload_dir=work / "offload") as llm:
        text, tokenizer = text_of(None, llm.model, ""), llm.model.tokenizer
        own = [
            write_recall(work, f"{name}_{length}", text, tokenizer, (pairs, length, args.limit))
            for name, pairs in RECALL.items()
            for length in args.recall_lengths
        ]
        metadata = {"pretrained": tokenizer.name_or_path, "max_seq_lengths": [args.length]}
        check_ruler(llm.model, args.tasks, metadata)
    manager = TaskManager(include_path=str(work), metadata=metadata)
    return dict(manager.load([*args.tasks, *own])["tasks"])


def write_recall(work: Path, name: str, text: HeldOutText, tokenizer: Any, size: tuple[int, int, int]) -> str:
    """A task's two files. size: pairs that are stated, tokens of a prompt, examples."""
    pairs, length, examples = size
    rng, rows = random.Random(name), []
    while len(rows) < examples:
        stated = draw_pairs(rng, pairs)
        if len(stated) < pairs:
            continue  # a name was drawn twice
        lines, (key, value) = "".join(map(statement, stated)), rng.choice(stated)
        taken = len(text.start) + len(text.encode(f"\n{lines}\nask {key} ="))
        if taken >= length:
            raise UsageError(f"--recall-lengths {length}: too short for {pairs} pairs, which take {taken} tokens")
        before = rng.randrange(length - taken)
        noise = [tokenizer.decode(stretch(rng, text.tokens, n)) for n in (before, length - taken - before)]
        rows.append({"prompt": f"{noise[0]}\n{lines}{noise[1]}\nask {key} =", "answer": value})
    file = work / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / f"{name}.yaml").write_text(TASK.format(name=name, file=file))
    return name


def score(model: str, cell: Case, tasks: dict[str, Any], limit: int, work: Path) -> Scores:
    """Each task's scores, an example at a time; every cell has the same examples."""
    from lm_eval.evaluator import evaluate

    from flexgen_h2o.evaluation.lm_eval_model import EngineLM

    how = cell.policy or "auto", cell.eviction
    with LLM(model, *how, device="cpu", dtype="float32", offload_dir=work / "offload") as llm:
        out = evaluate(EngineLM(llm), {"tasks": tasks}, limit=limit, bootstrap_iters=0) if tasks else {"samples": {}}
    return {name: [score_of(sample) for sample in samples] for name, samples in out["samples"].items()}


def score_of(sample: dict[str, Any]) -> float:
    """RULER's tasks name their metric by its length, and have -1 at the others."""
    return max(float(sample[metric]) for metric in sample["metrics"])


def mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Wilson's, of the mean."""
    n, p = len(scores), mean(scores)
    middle, half = p + Z * Z / (2 * n), Z * (p * (1 - p) / n + Z * Z / (4 * n * n)) ** 0.5
    return max(0.0, (middle - half) / (1 + Z * Z / n)), min(1.0, (middle + half) / (1 + Z * Z / n))


def markdown(found: dict[str, Scores]) -> str:
    """A row a cell, a column a task; the first cell is the full cache."""
    first = next(iter(found.values()))

    def shown(scores: list[float] | None) -> str:
        if scores is None:
            return "not ranked"
        low, high = interval(scores)
        return f"{mean(scores):.0%} [{100 * low:.0f}, {100 * high:.0f}]"

    rows = [[label, *(shown(of.get(name)) for name in first)] for label, of in found.items()]
    return "\n".join(markdown_table(["policy", *first], rows)) + "\n"


if __name__ == "__main__":
    sys.exit(common.door(main))
