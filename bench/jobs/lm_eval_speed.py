"""Claim: multiple choice through `evaluate lm-eval` is at least 3 times as fast as lm-eval's own Hugging Face backend.

Method: a model of OPT-125m's shape (random weights, the shipped tokenizer, fp32) answers questions with four choices,
each behind so many answered examples, drawn anew for each question as lm-eval does. Questions are lines of Python's own
sources: which line follows? Both systems run lm-eval's evaluator on the same task, each in a process of its own; what
is timed is the answering of the log-likelihood requests, from the first to the last, planning included, loading and
lm-eval's own preparations not. Before the rounds the backend answers some questions at each of --hf-batches and keeps
its best. Rounds are interleaved. Accuracies, and each question's four log-likelihoods, are compared.

    python -m bench.jobs.lm_eval_speed [--questions 2000] [--shots 5] [--rounds 3] [--output FILE]
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import common
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.cli_common import count, positive
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.evaluation.rows import read_text, stdlib_files

CHOICES, CONTEXT_LINES = 4, 1
EXAMPLES = 500  # questions that examples are drawn from
TASK = """
task: lines
dataset_path: json
dataset_kwargs: {{data_files: {{train: {work}/train.jsonl, test: {work}/test.jsonl}}}}
training_split: train
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nNext line:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def main() -> None:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--questions", type=positive, default=2000)
    add("--shots", type=count, default=5)
    add("--rounds", type=positive, default=3)
    add("--hf-batches", type=positive, nargs="+", default=[4, 16, 64])
    add("--hf-questions", type=positive, default=40, help="that the backend's batch size is chosen by (40)")
    add("--one", nargs=3, metavar=("SYSTEM", "BATCH", "FOLDER"), help="one process of a round")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(answer(*args.one, args.questions, args.shots)))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work)
        make_task(work, args.questions)
        common.wait_for_quiet(args.quiet_wait)
        few = min(args.hf_questions, args.questions)
        tried = {batch: run("hf", batch, work, few, args.shots)["seconds"] for batch in args.hf_batches}
        best = min(tried, key=tried.__getitem__)
        print(f"# hf, {few} questions: " + ", ".join(f"{batch}: {s:.1f} s" for batch, s in tried.items()), flush=True)
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(args.rounds):
            common.wait_for_quiet(args.quiet_wait)
            order = ("engine", "hf") if number % 2 == 0 else ("hf", "engine")
            rounds.append({name: run(name, best, work, args.questions, args.shots) for name in order})
            print(
                "# " + "; ".join(f"{name} {found['seconds']:.1f} s" for name, found in rounds[-1].items()), flush=True
            )
    common.finish(summary(rounds, best, tried), args.output)


def make_model(work: Path) -> None:
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig()).save_pretrained(work / "model")  # the default is OPT-125m
    for file in PACKAGED["opt-tiny"].iterdir():
        if file.name.startswith(("tokenizer", "vocab", "merges", "special")):
            shutil.copy(file, work / "model" / file.name)


def make_task(work: Path, questions: int) -> None:
    """Lines of source, the line that follows, and three from elsewhere."""
    rng = random.Random(0)
    lines = [line for path in stdlib_files()[::7] for line in read_text(path).splitlines() if 15 < len(line) < 50]

    def row() -> dict[str, Any]:
        at, right = rng.randrange(len(lines) - CONTEXT_LINES - 1), rng.randrange(CHOICES)
        choices = [lines[rng.randrange(len(lines))].strip() for _ in range(CHOICES)]
        choices[right] = lines[at + CONTEXT_LINES].strip()
        return {"question": "\n".join(lines[at : at + CONTEXT_LINES]), "choices": choices, "answer": right}

    for name, rows in (("train", EXAMPLES), ("test", questions)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(rows)))
    (work / "lines.yaml").write_text(TASK.format(work=work))


def run(system: str, batch: int, work: Path, questions: int, shots: int) -> dict[str, Any]:
    """One process. FlexgenError where it fails."""
    command = [sys.executable, "-m", "bench.jobs.lm_eval_speed", "--one", system, str(batch), str(work)]
    command += ["--questions", str(questions), "--shots", str(shots)]
    variables = common.environment() | (common.peer_malloc()[0] if system == "hf" else {})
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=variables, check=False)
    if done.returncode:
        raise FlexgenError(f"{system} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(system: str, batch: str, folder: str, questions: int, shots: int) -> dict[str, Any]:
    """lm-eval's evaluator with one of the systems, in this process."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    work, seconds = Path(folder), list[float]()
    model: Any
    if system == "hf":
        from lm_eval.models.huggingface import HFLM

        model = HFLM(str(work / "model"), device="cpu", dtype="float32", batch_size=int(batch))
    else:
        from flexgen_h2o import LLM
        from flexgen_h2o.evaluation.lm_eval_model import EngineLM

        model = EngineLM(LLM(str(work / "model"), device="cpu", dtype="float32", offload_dir=work / "offload"))
    loglikelihood = model.loglikelihood

    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = loglikelihood(*given, **named)
        seconds.append(time.perf_counter() - began)
        return found

    model.loglikelihood = timed
    tasks = TaskManager(include_path=str(work), include_defaults=False)
    out = simple_evaluate(model, tasks=["lines"], num_fewshot=shots, limit=questions, task_manager=tasks)
    samples = sorted(out["samples"]["lines"], key=lambda one: one["doc_id"])
    lengths = [len(model.tok_encode(one["arguments"][0][0])) for one in samples]
    return {
        "seconds": sum(seconds), "context_tokens": statistics.median(lengths),
        "acc": out["results"]["lines"]["acc,none"],
        "logprobs": [[float(choice[0]) for choice in one["filtered_resps"]] for one in samples],
        "batches": str(model.llm.policy) if system == "engine" else batch,
    }  # fmt: skip


def summary(rounds: list[dict[str, dict[str, Any]]], batch: int, tried: dict[int, float]) -> dict[str, Any]:
    """Prints the table, returns the JSON object."""
    seconds = {name: common.Spread([one[name]["seconds"] for one in rounds]) for name in ("engine", "hf")}
    ratio = common.ratio_of(seconds["hf"].values, seconds["engine"].values)
    ours, theirs = (rounds[-1][name]["logprobs"] for name in ("engine", "hf"))
    apart = max(abs(a - b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True))
    same = sum(
        max(range(CHOICES), key=a.__getitem__) == max(range(CHOICES), key=b.__getitem__)
        for a, b in zip(ours, theirs, strict=True)
    )
    acc = {name: rounds[-1][name]["acc"] for name in seconds}
    shown = [(name, f"{spread.show('s', 1)}, accuracy {acc[name]:.4f}") for name, spread in seconds.items()]
    shown.append(
        ("engine over hf", f"{ratio.show('times')}; {same} of {len(ours)} answers the same, {apart:.1e} apart")
    )
    tokens = rounds[-1]["engine"]["context_tokens"]
    asked = f"{len(ours)} questions of {CHOICES} choices behind {tokens:.0f} tokens"
    common.table(f"{asked}, hf at its best batch of {batch}", shown)
    return {
        "questions": len(ours), "context_tokens": tokens, "hf_batch_size": batch, "hf_tried": tried,
        "seconds": seconds, "speedup": ratio,
        "accuracy": acc, "same_answers": same, "largest_difference": apart, "policy": rounds[-1]["engine"]["batches"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.door(main))
