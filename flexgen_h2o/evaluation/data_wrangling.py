"""`evaluate data-wrangling`: entity matching, error detection and imputation.

The data are folders in the layout of fm_data_tasks. Flags and folders of results are those of
fm_data_tasks' run_inference.py and of FlexGen's data_wrangle_run.py. The rows of all trials are one
batch job (jobs/), so a run that was killed resumes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import (
    check_files,
    count,
    file_name,
    not_empty,
    positive,
    results_are_in,
)
from flexgen_h2o.core.errors import EXIT_DONE, UsageError, json_reason
from flexgen_h2o.core.files import json_line, read_bounded, usable_path, write_result
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.core.units import counted, markdown_table
from flexgen_h2o.evaluation.rows import check_given, check_tokenizer, objects_of, write_requests
from flexgen_h2o.flags import (
    add_engine_flags,
    add_eviction_flags,
    eviction_of,
    find_model_of,
    naming_flags,
    policy_of,
)
from flexgen_h2o.parser import OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.evaluation.wrangling_data import Item, Task
    from flexgen_h2o.models.load import Model

METHODS = ("random", "manual")
MAX_TRIALS = 1000  # the prompts of all trials are in memory
RULE = "-" * 70
# Metrics that have a mean over trials.
MEANS = ("prec", "rec", "acc", "f1")
Counts = dict[str, float | int | None]  # metrics of one trial, as `metrics` returns them


def add_flags(parser: OneLineParser) -> None:
    """Add the flags of the workflow.

    fm_data_tasks writes them with underscores, which are accepted for hyphens.
    """
    parser.set_defaults(run=run)
    add_engine_flags(parser, dry_run=False)  # fm_data_tasks' own --dry-run is added below
    add_eviction_flags(parser)
    add = parser.add_argument
    add(
        "--data-dir",
        type=file_name,
        help="folder of a data set: train.csv, valid.csv, test.csv, tables",
    )
    add(
        "--output-dir",
        type=file_name,
        default=Path("outputs"),
        help="predictions and metrics (outputs)",
    )
    add(
        "--run-tag",
        type=not_empty,
        default="default",
        help="a name of the run, in the path of its folder (default)",
    )
    add("--k", type=count, default=1, help="examples before each row (1)")
    add(
        "--sample-method",
        choices=METHODS,
        default="random",
        help="how the examples are chosen (random)",
    )
    add(
        "--examples",
        type=file_name,
        help="of manual: .txt, or .json with a text for each value of a column",
    )
    add(
        "--class-balanced", action="store_true", help="draw examples of as many rows of each answer"
    )
    add("--seed", type=count, default=1234, help="of examples, and of what is drawn (1234)")
    add("--sep-tok", default=".", help="between the columns of a row (.)")
    add("--nan-tok", default="nan", help="stands for a value that is missing (nan)")
    add("--num-run", type=int, default=-1, help="only the first so many rows (all)")
    add("--num-trials", type=positive, default=1, help="times that examples are drawn anew (1)")
    add("--num-print", type=count, default=10, help="prompts that --dry-run shows (10)")
    add("--add-task-instruction", action="store_true", help="begin each prompt with an instruction")
    add("--do-test", action="store_true", help="test.csv, not valid.csv")
    add(
        "--dry-run",
        action="store_true",
        help="show prompts and count their tokens; no weights are loaded",
    )
    add(
        "--column",
        type=not_empty,
        metavar="NAME",
        help="to be imputed, in a folder that is not one of fm_data_tasks'",
    )
    add("--gen-len", "--max-tokens", type=positive, default=3, help="most tokens of an answer (3)")
    add(
        "--stop",
        "--stop-token",
        metavar="TEXT",
        default=r"\n",
        help=r"ends an answer (\n, a newline)",
    )
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add(
        "--batch-run", action="store_true", help=argparse.SUPPRESS
    )  # all rows are one run in any case
    add("--force", action="store_true", help="go on with a run that was begun with other settings")
    add("--json", type=file_name, help="write the metrics here too")


def run(args: argparse.Namespace) -> int:
    """Make the prompts, run and score them, and return the exit code."""
    from flexgen_h2o.evaluation.wrangling_data import WHERE, find_task

    check_given(args, "data_dir", WHERE)
    policy, is_auto = policy_of(args)
    with naming_flags(max_tokens="--gen-len"):
        stop = args.stop.replace(r"\n", "\n")
        params = SamplingParams(
            args.gen_len, args.temperature, seed=args.seed, stop=(stop,) if stop else ()
        )
    eviction = eviction_of(args, policy)
    check_files(args, ("examples",), ("json",))
    _check(args)
    task = find_task(usable_path(args.data_dir, "--data-dir"), args.column)
    items, trials = _trials(args, task)
    if args.dry_run:
        return _show_prompts(args, [prompt for prompts in trials for prompt in prompts], items)
    folder = _folder(args, task)
    answers = folder / "answers.jsonl"
    requests = folder / "requests.jsonl"
    lines = [
        json.dumps({"custom_id": _id(trial, row), "prompt": prompt}) + "\n"
        for trial, prompts in enumerate(trials)
        for row, prompt in enumerate(prompts)
    ]
    write_requests(requests, lines, "prompts", "give another --run-tag, or remove the folder")
    results_are_in(folder / "metrics.json")
    from flexgen_h2o.jobs.job import run_job

    try:
        code = run_job(args, requests, answers, policy, is_auto, eviction, params)
    except UsageError as error:
        raise UsageError(
            str(error).replace("give another name", "give another --run-tag")
        ) from error
    model = find_model_of(args)
    longer = too_long_labels(model, items, args.gen_len)
    _score(
        args,
        task,
        folder,
        items,
        trials,
        {"eviction": eviction.to_json(), "too_long_labels": longer},
    )
    labels = _labels_line(args, model, items)
    if labels:
        print(labels)
    return code


def _check(args: argparse.Namespace) -> None:
    """Check the flags and expand paths of folders. Raise UsageError naming a flag."""
    if args.num_run < -1 or args.num_run == 0:
        raise UsageError(f"--num-run {args.num_run}: must be at least 1, or -1 for all rows")
    if (args.examples is None) == (args.sample_method == "manual"):
        raise UsageError("--examples: goes with --sample-method manual; give both")
    if args.num_trials > MAX_TRIALS:
        raise UsageError(f"--num-trials {args.num_trials}: at most {MAX_TRIALS}")
    if args.seed + args.num_trials > 2**32:
        raise UsageError(f"--seed {args.seed}: must be below 2**32, with --num-trials")
    args.output_dir = usable_path(args.output_dir, "--output-dir")
    if "/" in args.run_tag or args.run_tag in (".", ".."):
        raise UsageError(f"--run-tag {args.run_tag}: is the name of a folder, without /")


# ---- Prompts


def _trials(args: argparse.Namespace, task: Task) -> tuple[list[Item], list[list[str]]]:
    """Return the rows that are asked, and for each trial their prompts."""
    from flexgen_h2o.evaluation.wrangling_data import read_items

    split = "test" if args.do_test else "validation"
    items = read_items(task, split, args.sep_tok, args.nan_tok)
    items = items if args.num_run == -1 else items[: args.num_run]
    head = f"{task.instruction} " if args.add_task_instruction else ""
    trials = [
        [
            head + f"{prefix}\n{item.text}".strip()
            for prefix, item in zip(of_rows, items, strict=True)
        ]
        for of_rows in _prefixes(args, task, items)
    ]
    return items, trials


def _prefixes(args: argparse.Namespace, task: Task, items: Sequence[Item]) -> list[list[str]]:
    """Return for each trial the examples that precede each row, as text."""
    from flexgen_h2o.evaluation.wrangling_data import drawn, read_items, shuffled

    trials = range(args.num_trials)
    if args.sample_method == "manual":
        return [_manual(args.examples, task, items) for _ in trials]
    train = shuffled(
        read_items(task, "train", args.sep_tok, args.nan_tok), task.kind, args.class_balanced
    )
    if args.k > len(train):
        raise UsageError(f"--k {args.k}: there are {len(train)} rows to draw from; ask for fewer")
    chosen = [drawn(train, args.k, args.seed + trial) for trial in trials]
    return [
        ["\n\n".join(item.example for item in examples) + "\n"] * len(items) for examples in chosen
    ]


def _manual(path: Path, task: Task, items: Sequence[Item]) -> list[str]:
    """Return the hand-written examples that precede each row.

    The file has one text for all rows, or it is a JSON object with one text for each value of the
    data set's key. Raise UsageError naming --examples.
    """
    try:
        text = read_bounded(path).decode("utf-8-sig")
        texts = json.loads(text) if path.suffix == ".json" else {item.key: text for item in items}
    except OSError as error:
        raise UsageError(f"--examples {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        reason = (
            "not UTF-8 text"
            if isinstance(error, UnicodeDecodeError)
            else f"not valid JSON ({json_reason(error)})"
        )
        raise UsageError(f"--examples {path}: {reason}") from error
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise UsageError(
            f"--examples {path}: an object with a text for each value of {task.key} is expected"
        )
    missing = next((item.key for item in items if item.key not in texts), None)
    if missing is not None:
        raise UsageError(
            f"--examples {path}: has no text for {task.key or 'a row without a key'} {missing!r}"
        )
    return [texts[item.key].rstrip("\n") + "\n" for item in items]


def too_long_labels(model: Model, items: Sequence[Item], most: int) -> int:
    """Return how many labels have more than `most` tokens after a space, as an answer begins."""
    if model.tokenizer is None:
        return 0
    return sum(len(model.encode_plain(f" {item.label.strip()}")) > most for item in items)


def _labels_line(args: argparse.Namespace, model: Model, items: Sequence[Item]) -> str:
    """Return a line on how many labels are too long for an answer to be right; "" if none is."""
    longer = too_long_labels(model, items, args.gen_len)
    if not longer:
        return ""
    verb = "have" if longer > 1 else "has"
    which = f"{longer} of {len(items)} labels {verb} more than the {counted(args.gen_len, 'token')}"
    return f"{which} of an answer, which cannot be right then; raise --gen-len"


def _show_prompts(args: argparse.Namespace, prompts: Sequence[str], items: Sequence[Item]) -> int:
    """Print prompts with their numbers of tokens, and a summary of all, for --dry-run."""
    model = find_model_of(args)
    check_tokenizer(model, " to count tokens with; give a folder with one")
    sizes = [len(model.encode(prompt)) for prompt in prompts]
    for prompt, size in list(zip(prompts, sizes, strict=True))[: args.num_print]:
        print(f"{RULE}\n{size} tokens\n{RULE}\n{prompt}")
    most = model.spec.max_positions
    too_long = sum(size > most for size in sizes)
    print(
        f"{RULE}\n{len(sizes)} prompts of {min(sizes)} to {max(sizes)} tokens, {sum(sizes)} in "
        f"all; {model.name} has "
        f"{most} positions, "
        + (f"too few for {too_long} of them" if too_long else "enough for all")
    )
    labels = _labels_line(args, model, items)
    if labels:
        print(labels)
    return EXIT_DONE


# ---- Files


def _folder(args: argparse.Namespace, task: Task) -> Path:
    """Make the folder of the run and return it. Its path is that of fm_data_tasks' results."""
    split = "test" if args.do_test else "validation"
    model = Path(args.model).name
    settings = (
        f"{args.k}k_{int(args.add_task_instruction)}inst_{int(args.class_balanced)}cb_{args.sample_method}_{model}_"
        f"{args.num_run}run_0dry"
    )
    folder: Path = args.output_dir / task.name / split / args.run_tag / settings
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror or error}") from error
    return folder


def _id(trial: int, row: int) -> str:
    """Return the `custom_id` of a request."""
    return f"trial-{trial}-row-{row}"


def _answers(path: Path) -> dict[str, tuple[str, str | None]]:
    """Return (text, code of the error or None) of each answer, by `custom_id`."""
    found = {}
    for _, row in objects_of(path, "--output-dir"):
        text = "" if row["error"] else row["response"]["body"]["choices"][0]["text"]
        found[row["custom_id"]] = (text, row["error"] and row["error"]["code"])
    return found


# ---- Metrics


def is_right(kind: str, prediction: str, label: str) -> bool:
    """Return whether fm_data_tasks counts a prediction as right.

    The text must be the label's; for error detection it must only begin with the label. Case is
    ignored. kind: a key of FILES in `wrangling_data`.
    """
    said = prediction.strip().lower()
    wanted = label.strip().lower()
    return said.startswith(wanted) if kind == "error_detection" else said == wanted


def metrics(kind: str, pairs: Sequence[tuple[str, str]]) -> Counts:
    """Return the metrics of (prediction, label) pairs.

    Yes is the positive answer. A prediction that is neither Yes nor No is wrong; "others" counts
    these. "prec", "rec", "f1" and "others" are None for imputation, which has no positive answer. A
    metric is 0 if there is nothing to divide by.
    """
    right = [is_right(kind, said, wanted) for said, wanted in pairs]
    found: Counts = {
        "acc": sum(right) / len(right),
        "prec": None,
        "rec": None,
        "f1": None,
        "others": None,
    }
    if kind == "data_imputation":
        return found
    positive = [ok for ok, (_, wanted) in zip(right, pairs, strict=True) if wanted == "Yes"]
    negative = [ok for ok, (_, wanted) in zip(right, pairs, strict=True) if wanted != "Yes"]
    true = sum(positive)
    false = len(negative) - sum(negative)
    precision = true / max(1, true + false)
    recall = true / max(1, len(positive))
    both = precision + recall
    others = sum(
        not any(is_right(kind, said, answer) for answer in ("Yes", "No")) for said, _ in pairs
    )
    return {
        **found,
        "prec": precision,
        "rec": recall,
        "f1": 2 * precision * recall / both if both else 0.0,
        "others": others,
    }


def _score(
    args: argparse.Namespace,
    task: Task,
    folder: Path,
    items: Sequence[Item],
    trials: Sequence[Sequence[str]],
    facts: dict[str, Any],
) -> None:
    """Write predictions and metrics, and print the table."""
    answers = _answers(folder / "answers.jsonl")
    scores = list[Counts]()
    errors = 0
    for trial, prompts in enumerate(trials):
        told = [answers[_id(trial, row)] for row in range(len(items))]
        errors += sum(error is not None for _, error in told)
        lines = [
            {
                "row": i,
                "text": item.text,
                "label": item.label,
                "prediction": text,
                "prompt": prompt,
                "error": error,
            }
            for i, (item, (text, error), prompt) in enumerate(
                zip(items, told, prompts, strict=True)
            )
        ]
        text = "".join(json_line(line) + "\n" for line in lines)
        write_result(folder / f"trial_{trial}.jsonl", text, "--output-dir")
        scores.append(
            metrics(
                task.kind, [(said, one.label) for (said, _), one in zip(told, items, strict=True)]
            )
        )
    whole: dict[str, Any] = {
        **facts,
        "model": args.model,
        "task": task.kind,
        "data": task.name,
        "split": folder.parts[-3],
        "rows": len(items),
        "trials": len(trials),
        "errors": errors,
    }
    for name in (*MEANS, "others"):
        values = [score[name] for score in scores]
        given = [value for value in values if value is not None]
        whole[name] = values
        whole[f"{name}_avg"] = fmean(given) if given else None
        whole[f"{name}_std"] = pstdev(given) if given else None
    for path, flag in ((folder / "metrics.json", "--output-dir"), (args.json, "--json")):
        if path is not None:
            write_result(path, whole, flag)
    print("\n".join(_table(whole)))
    print(f"predictions and metrics are in {folder}")


def _table(whole: dict[str, Any]) -> list[str]:
    def shown(name: str) -> str:
        mean = whole[f"{name}_avg"]
        deviation = whole[f"{name}_std"]
        if mean is None:
            return ""
        return f"{mean:.3f}" if whole["trials"] == 1 else f"{mean:.3f} ± {deviation:.3f}"

    names = [
        "data",
        "task",
        "split",
        "rows",
        "F1",
        "precision",
        "recall",
        "accuracy",
        "neither Yes nor No",
        "errors",
    ]
    others = "" if whole["others_avg"] is None else f"{whole['others_avg']:g}"
    row = [
        f"`{whole['data']}`",
        whole["task"].replace("_", " "),
        whole["split"],
        f"{whole['rows']}",
        shown("f1"),
        shown("prec"),
        shown("rec"),
        shown("acc"),
        others,
        f"{whole['errors']}",
    ]
    return markdown_table(names, [row])
