"""Files of lm-eval's requests and answers, as in h2o_hf, and the results of tasks from them.

The formats are those of h2o_hf's `generate_task_data.py` and `evaluate_task_result.py`. A request
is known by its prompt, which is context and continuation as one text.
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from flexgen_h2o.cli_common import check_files, note, results_are_in
from flexgen_h2o.core.errors import EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import replacing, usable_path, write_result
from flexgen_h2o.engine.prompts import check_output_path
from flexgen_h2o.evaluation.lm_eval_errors import lm_eval_here
from flexgen_h2o.evaluation.rows import check_given, check_tokenizer, objects_of
from flexgen_h2o.flags import find_model_of
from flexgen_h2o.models import check_family

# Fields of a request in h2o_hf's order; `prompt` comes between `n` and `request_type`.
BEFORE_PROMPT = {"best_of": 1, "echo": True, "logprobs": 1, "max_tokens": 0, "model": "x", "n": 1}
BEHIND_PROMPT = {
    "request_type": "language-model-inference",
    "stop": None,
    "temperature": 0,
    "top_p": 1,
}
RESAMPLES = 100_000  # bootstrap resamples of lm-eval's own command line
# Takes context and continuation; returns (log-likelihood, is each token the likeliest one?).
Loglikelihood = Callable[[str, str], tuple[float, bool]]


def request_of(prompt: str) -> dict[str, Any]:
    """Return the request of a prompt as h2o_hf writes it."""
    return {**BEFORE_PROMPT, "prompt": prompt, **BEHIND_PROMPT}


def mended(text: str) -> str:
    """Return a text as h2o_hf mends it before it tokenises it: in Unicode's NFKC.

    ftfy also mends other flaws if it is installed.
    """
    if find_spec("ftfy") is None:
        return unicodedata.normalize("NFKC", text)
    from ftfy import fix_text

    return str(fix_text(text, normalization="NFKC"))


class FileLM(LM):
    """A model of lm-eval whose log-likelihoods come from a function, as in h2o_hf's adaptor."""

    def __init__(self, answer: Loglikelihood) -> None:
        super().__init__()
        self._answer = answer

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return [
            self._answer(mended(context), mended(more))
            for context, more in (r.args for r in requests)
        ]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise UsageError(
            "--tasks: a task scores whole texts, and h2o_hf's files hold choices only; leave that "
            "task out"
        )

    def generate_until(self, requests: list[Instance]) -> list[str]:
        raise UsageError(
            "--tasks: a task generates text; h2o_hf's files hold choices only; run it without a "
            "step"
        )


def task_manager(args: argparse.Namespace, names: list[str]) -> TaskManager:
    """Read lm-eval's task files and those of --include-path. This takes seconds."""
    with lm_eval_here(args, names):
        folder = args.include_path and str(args.include_path)
        return TaskManager(include_path=folder, metadata=_metadata(args.metadata))


def results_of(
    args: argparse.Namespace,
    names: list[str],
    answer: Loglikelihood,
    resamples: int,
    manager: TaskManager | None = None,
) -> dict[str, Any]:
    """Return lm-eval's results of tasks whose log-likelihoods come from `answer`."""
    metadata = _metadata(args.metadata)
    manager = manager or task_manager(args, names)
    with lm_eval_here(args, names):
        found = simple_evaluate(
            FileLM(answer),
            tasks=names,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            task_manager=manager,
            bootstrap_iters=resamples,
            log_samples=False,
            metadata=metadata,
        )
    return dict(found or {})


def _metadata(words: list[str] | None) -> dict[str, Any]:
    from lm_eval._cli.utils import key_val_to_dict

    try:
        whole = json.loads(" ".join(words or ["{}"]))
    except ValueError:
        whole = {}
        for word in words or ():
            try:
                whole |= key_val_to_dict(word)
            except ValueError as error:
                raise UsageError(f"--metadata {word}: {error}") from error
    if not isinstance(whole, dict):
        raise UsageError(f"--metadata {whole!r:.40}: is neither key=value nor a JSON object")
    return whole


def generate(args: argparse.Namespace, names: list[str]) -> int:
    """Write the requests of tasks to --output and return the exit code."""
    check_given(args, "output", "name the .jsonl file that gets the requests")
    args.output = usable_path(args.output, "--output")
    check_output_path(args.output)
    results_are_in(args.output)
    prompts = prompts_of_tasks(args, names)
    try:
        with replacing(args.output) as file:
            file.writelines(json.dumps(request_of(prompt)) + "\n" for prompt in prompts)
    except OSError as error:
        raise FlexgenError(f"--output {args.output}: {error.strerror or error}") from error
    print(f"{len(prompts)} requests in {args.output}, {len(set(prompts))} of them different")
    return EXIT_DONE


def prompts_of_tasks(
    args: argparse.Namespace, names: list[str], manager: TaskManager | None = None
) -> list[str]:
    """Return context and continuation of each of the tasks' requests, as one text."""
    prompts: list[str] = []

    def write(context: str, continuation: str) -> tuple[float, bool]:
        prompts.append(context + continuation)
        return -1.0, True

    results_of(args, names, write, 0, manager)
    if find_spec("ftfy") is None and not all(map(str.isascii, prompts)):
        note(
            "evaluate",
            "ftfy is not installed: texts are normalised to NFKC, where h2o_hf also mends quotes",
        )
    return prompts


def score(args: argparse.Namespace, names: list[str]) -> int:
    """Print the results of tasks from the answers in --input and return the exit code."""
    check_given(args, "input", "name the file that `evaluate lm-eval run` wrote")
    check_files(args, ("input",), ("json",))
    results_are_in(args.json)
    if args.model is None:
        args.model = model_in(args.input)
    model = find_model_of(args)
    if args.model_family is not None:
        check_family(model.spec, args.model_family, args.given["model_family"])
    check_tokenizer(model, "; name the model that answered")
    answers = read_answers(args.input)
    print(f"{len(answers)} items in the cache", flush=True)
    is_mean = args.loglikelihood == "mean"
    answer = likelihoods_of(args.input, answers, model.encode_plain, is_mean)
    all_found = results_of(args, names, answer, RESAMPLES)
    results = {"results": all_found.get("results", {}), "versions": all_found.get("versions", {})}
    if args.json is not None:
        write_result(args.json, results, "--json")
    print(json.dumps(results, indent=2, default=str))
    return EXIT_DONE


def model_in(path: Path) -> str | None:
    """Return the model that a job's answers name; None for answers of h2o_hf, which name none."""
    try:
        name = next(row for _, row in objects_of(path, "--input"))["response"]["body"]["model"]
    except (UsageError, KeyError, TypeError, StopIteration):  # `read_answers` reports the error
        return None
    return name if isinstance(name, str) else None


def read_answers(path: Path, flag: str = "--input") -> dict[str, dict[str, Any]]:
    """Return the log-probabilities in a file of answers, by prompt.

    They are objects of `tokens`, `token_logprobs` and `top_logprobs`. The rows are those of
    h2o_hf's script or of `batch`. flag: the flag that names the file. Raise UsageError for a row of
    another kind, or one that is an error.
    """
    answers: dict[str, dict[str, Any]] = {}
    for place, row in objects_of(path, flag):
        if failure := row.get("error"):
            said = failure.get("message") if isinstance(failure, dict) else failure
            raise UsageError(f"{place}: is an error ({said!s:.200}); run it again")
        try:
            choice = (row["result"] if "result" in row else row["response"]["body"])["choices"][0]
            prompt = row["request"]["prompt"] if "request" in row else choice["text"]
            if not isinstance(prompt, str):
                raise TypeError
            logprobs = choice["logprobs"]
            is_echo = _is_echo(logprobs["token_logprobs"], logprobs["top_logprobs"])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise UsageError(
                f"{place}: has no request with its result and logprobs, as h2o_hf writes them"
            ) from error
        if not is_echo:
            raise UsageError(
                f"{place}: the logprobs are not those of an echoed prompt (echo, logprobs of 1 or "
                "more)"
            )
        answers[prompt] = logprobs
    if not answers:
        raise UsageError(f"{flag} {path}: no answer in it, only blank lines or nothing")
    return answers


def _is_echo(values: list[Any], tops: list[Any]) -> bool:
    """Return whether these are the log-probabilities of an echoed prompt.

    Every token has one, except the first, and the likeliest tokens (`tops`) are beside each.
    """
    if values[0] is not None or not 1 < len(values) <= len(tops):
        return False
    pairs = zip(values[1:], tops[1 : len(values)], strict=True)
    return all(
        top and all(isinstance(one, int | float) for one in (value, *top.values()))
        for value, top in pairs
    )


def likelihoods_of(
    path: Path, answers: dict[str, dict[str, Any]], encode: Callable[[str], list[int]], mean: bool
) -> Loglikelihood:
    """Return the function that gives log-likelihoods of continuations from the answers of a file.

    answers: as `read_answers` returns them. encode: returns the token ids of a text, without
    special tokens. mean: return the mean over tokens, as h2o_hf's adaptor does, so that `acc` is
    length-normalised. Otherwise return the sum, as lm-eval does. The function raises UsageError if
    the file has no answer to a prompt.
    """

    def loglikelihood(context: str, continuation: str) -> tuple[float, bool]:
        prompt = context + continuation
        if prompt not in answers:
            raise UsageError(
                f"--input {path}: has no answer to {prompt[-60:]!r}; generate and run the "
                "same tasks, with the same --num-fewshot and --limit"
            )
        values = answers[prompt]["token_logprobs"]
        tops = answers[prompt]["top_logprobs"][: len(values)]
        # The last tokens belong to the continuation, at least one, cut as lm-eval cuts the text.
        own = len(encode(prompt)) - len(encode(context.rstrip()))
        count = max(1, min(own, len(values) - 1))
        pairs = zip(values[-count:], tops[-count:], strict=True)
        greedy = all(value >= max(top.values()) - 1e-6 for value, top in pairs)
        return sum(values[-count:]) / (count if mean else 1), greedy

    return loglikelihood
