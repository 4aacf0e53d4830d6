"""`evaluate lm-eval`: lm-eval's own command line with the engine as its model, and h2o_hf's three
steps.

Without a step it runs tasks and prints their table. `generate` writes the requests of a task, `run`
answers them as a durable batch job, and `score` computes results from the answers (formats:
docs/reference/lm-eval.md). `grid` does the three steps for each of many policies and KV budgets.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import random
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from flexgen_h2o.cli_common import (
    add_result_flags,
    check_files,
    count,
    file_name,
    flag_of,
    not_empty,
    positive,
    results_are_in,
)
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import check_folder, usable_path
from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.engine.prompts import check_output_path
from flexgen_h2o.evaluation.kvpress import add_press_flag, check_press_folder
from flexgen_h2o.evaluation.lm_eval_errors import (
    H2O_PAPER,
    INSTALL,
    kept_results,
    lm_eval_here,
    writing_is_checked,
)
from flexgen_h2o.evaluation.rows import check_given
from flexgen_h2o.evaluation.summarize import add_grid_flags
from flexgen_h2o.flags import (
    add_engine_flags,
    add_eviction_flags,
    add_h2o_hf_flags,
    compression_flags,
    eviction_of,
    open_llm,
    policy_of,
    say_notes,
)
from flexgen_h2o.parser import OneLineParser

TASK_LISTS = {"h2o-paper": H2O_PAPER}
# Tokens of ruler_cwe's answer, and of ruler_fwe's shortest text, which has 4 coded words.
_CWE_ANSWER = 120
_FWE_LEAST = 200
# Limits of lm-eval's ruler_vt: tokens of the solved example and of the answer. The margin is for
# names and numbers, whose numbers of tokens vary.
_VT_SOLVED = 500
_VT_ANSWER = 30
_MARGIN = 16


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be > 0: a question count, or a fraction below 1"
        )
    return value


def _seeds(text: str) -> str:
    words = [word.strip() for word in text.split(",")]
    if len(words) not in (1, 3, 4) or not all(
        word.isdecimal() or word.lower() == "none" for word in words
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor four with commas, None among them"
        )
    return text


def _no_batch(text: str) -> str:
    raise argparse.ArgumentTypeError(
        "is not a flag here, the engine plans batches; --micro-batch sets one"
    )


def _of_grid(text: str) -> str:
    raise argparse.ArgumentTypeError("is a flag of `evaluate lm-eval grid`")


_MANY: dict[str, Any] = {"nargs": "+", "metavar": "KEY=VALUE"}
_SWITCH: dict[str, Any] = {"action": "store_true", "default": None}
# lm-eval's own flags, which are passed on to it. Each may be spelled with `_` too, as lm-eval does.
# Flag: (arguments of `add_argument`, help).
OF_TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "num_fewshot": (
        {"type": count, "metavar": "N"},
        "examples in front of each question (the task's own number)",
    ),
    "limit": (
        {"type": _limit, "metavar": "N"},
        "only the first N questions of each task, or a share below 1",
    ),
    "include_path": (
        {"type": file_name, "metavar": "DIR"},
        "folder with task files of your own (.yaml)",
    ),
    "metadata": (_MANY, "for tasks that make their data: max_seq_lengths=[1024]; or a JSON object"),
}
OF_RUN: dict[str, tuple[dict[str, Any], str]] = {
    "output_path": (
        {"type": file_name, "metavar": "DIR"},
        "write the results as JSON: a folder, or a .json file",
    ),
    "log_samples": (_SWITCH, "write each question with its answer too"),
    "gen_kwargs": (_MANY, "of tasks that generate: max_gen_toks=64 temperature=0.7 do_sample=true"),
    "apply_chat_template": (
        {"nargs": "?", "const": True, "metavar": "NAME"},
        "questions are messages in the model's chat template",
    ),
    "fewshot_as_multiturn": (
        {"nargs": "?", "const": True, "metavar": "BOOL"},
        "few-shot examples become turns of a multi-turn chat",
    ),
    "system_instruction": ({"metavar": "TEXT"}, "in front of each question"),
    "samples": (
        {"metavar": "JSON"},
        'which questions of each task: {"piqa": [0, 3]}; or a file with that',
    ),
    "predict_only": (_SWITCH, "write the answers, work out no score"),
    "write_out": (_SWITCH, "print the first questions of each task"),
    "show_config": (_SWITCH, "print the results as JSON too"),
    "seed": (
        {"type": _seeds, "metavar": "N[,N,N,N]"},
        "of Python, numpy, torch and examples (0,1234,1234,1234)",
    ),
    "trust_remote_code": (_SWITCH, "let data sets run code of their own"),
    "confirm_run_unsafe_code": (_SWITCH, "let tasks run code that the model has written"),
}


def add_flags(parser: OneLineParser) -> None:
    """Add the flags of a run over tasks, and the three steps as commands below this one."""
    parser.set_defaults(run=_evaluate)
    parser.allow_abbrev = False  # else a step's --output would mean --output-path
    add_engine_flags(parser)
    add_eviction_flags(parser)
    _add_task_flags(parser, OF_TASKS | OF_RUN)
    parser.add_argument(
        "--use-cache",
        "--use_cache",
        "--resume",
        type=file_name,
        metavar="PREFIX",
        help="keep each answer in PREFIX-*.db as it is done: after a kill the same command goes on "
        "from there",
    )
    add_press_flag(parser)
    parser.add_argument("--batch-size", "--batch_size", type=_no_batch, help=argparse.SUPPRESS)
    parser.add_argument("--policies", nargs="+", type=_of_grid, help=argparse.SUPPRESS)
    steps = parser.add_subparsers(dest="step", metavar="STEP", help="of h2o_hf's way, over files:")
    generate = steps.add_parser("generate", help="write the requests of tasks, a JSON line each")
    generate.set_defaults(run=_generate)
    _add_task_flags(generate, OF_TASKS)
    _file(generate, "--output", "--output-file", help="the .jsonl file with the requests")
    answer = steps.add_parser("run", help="answer them: a durable batch job")
    answer.set_defaults(run=_answer)
    _file(answer, "--input", "--input-path", help="the requests that `generate` wrote")
    _file(
        answer,
        "--output",
        "--output-path",
        help=".jsonl, a line an answer as it is done; killed, it goes on",
    )
    answer.add_argument(
        "--force",
        action="store_true",
        help="go on with an output that was begun with other settings",
    )
    answer.add_argument(
        "--max-errors",
        type=count,
        metavar="N",
        help="end when more than N rows are errors (no limit)",
    )
    answer.add_argument(
        "--window", type=positive, metavar="ROWS", help="rows that are read ahead and sorted (1024)"
    )
    add_engine_flags(answer)
    add_eviction_flags(answer)
    add_h2o_hf_flags(answer)
    score = steps.add_parser("score", help="results of the answers")
    score.set_defaults(run=_results)
    _add_task_flags(score, OF_TASKS)
    _file(score, "--input", "--result-file", help="what `run`, or h2o_hf, wrote")
    whose = "whose tokenizer finds the continuation's tokens (the model that the answers name)"
    score.add_argument("-m", "--model", metavar="MODEL", help=whose)
    score.take_positional_model()
    score.add_argument("--path", type=not_empty, help="folder with checkpoints")
    score.add_argument("--revision", type=not_empty, help="branch, tag or commit of a hub id")
    where = "where named models are, as of `run` (~/flexgen_h2o_offload_dir)"
    score.add_argument("--offload-dir", type=not_empty, metavar="DIR", help=where)
    score.add_argument("--model-type", dest="model_family", help=argparse.SUPPRESS)
    _add_loglikelihood_flag(score)
    score.add_argument("--json", type=file_name, help="write the results too")
    _add_grid(
        steps.add_parser(
            "grid", help="the three steps for each policy and KV budget: a table and a picture"
        )
    )


def _add_grid(grid: OneLineParser) -> None:
    grid.set_defaults(run=_grid)
    add_engine_flags(grid)
    _add_task_flags(grid, OF_TASKS)
    folder = "folder of the jobs: the requests, one output per setting, and summary.json"
    grid.add_argument("--output-dir", type=file_name, metavar="DIR", help=folder)
    add_grid_flags(grid, "full local:sinks=0 h2o", "context and choice (0.5 0.2 0.1)")
    _add_loglikelihood_flag(grid)
    add_result_flags(grid)


def _add_loglikelihood_flag(parser: OneLineParser) -> None:
    which = (
        "sum over a continuation's tokens, as lm-eval has it, or their mean, as h2o_hf has it (sum)"
    )
    parser.add_argument("--loglikelihood", choices=("sum", "mean"), default="sum", help=which)


def _add_task_flags(parser: OneLineParser, flags: dict[str, tuple[dict[str, Any], str]]) -> None:
    lists = f"; {', '.join(TASK_LISTS)} is the paper's six"
    parser.add_argument(
        "--tasks",
        "--task-name",
        nargs="+",
        metavar="TASK",
        help=f"lm-eval's names, with spaces or commas{lists}",
    )
    for name, (rules, text) in flags.items():
        spellings = dict.fromkeys((flag_of(name), f"--{name}"))
        parser.add_argument(*spellings, dest=name, help=text, **rules)
    parser.add_argument(
        "--download", action="store_true", help="fetch data sets that are missing (never otherwise)"
    )


def _file(parser: OneLineParser, flag: str, alias: str, help: str) -> None:
    parser.add_argument(
        flag, alias, alias.replace("-", "_").replace("__", "--", 1), type=file_name, help=help
    )


# ---- Checks before torch is imported


def check_tasks(args: argparse.Namespace) -> list[str]:
    """Return the names of the tasks that are asked for, with lists written out.

    Raise UsageError if there is none, or lm-eval is not installed.
    """
    if find_spec("lm_eval") is None:
        raise UsageError(f"evaluate lm-eval: needs lm-eval, which is not installed; {INSTALL}")
    names = [name for word in args.tasks or () for name in word.split(",") if name]
    if not names:
        raise UsageError(
            "--tasks: is missing; name some, such as piqa,winogrande (`lm-eval ls tasks` lists "
            "them)"
        )
    if args.include_path is not None:
        args.include_path = usable_path(args.include_path, "--include-path")
        if not args.include_path.is_dir():
            raise UsageError(
                f"--include-path {args.include_path}: is no folder; name the one with your task "
                "files"
            )
    return list(dict.fromkeys(task for name in names for task in TASK_LISTS.get(name, (name,))))


# ---- lm-eval's own command line


def _evaluate(args: argparse.Namespace) -> int:
    """Run tasks and return the exit code."""
    names = check_tasks(args)
    check_press_folder(args)
    for name in ("output_path", "use_cache"):
        if getattr(args, name) is not None:
            setattr(args, name, check_folder(getattr(args, name), flag_of(name)))
    policy, is_auto = policy_of(args)
    eviction = eviction_of(args, policy)
    with lm_eval_here(args, names):
        parsed = _parse_own([*_own_flags(args, names)])
        results_are_in(args.output_path)
        from flexgen_h2o.evaluation.lm_eval_model import EngineLM

        with open_llm(args, policy, is_auto, eviction) as llm:
            llm.check_plan()
            say_notes("evaluate lm-eval", args, llm)
            harness, own = parsed
            check_ruler(llm.model, names, own.metadata or {})
            EngineLM.opened = engine = EngineLM(llm, _first_seed(args.seed))
            own.model_args = {
                "model": llm.model.name,
                "tokenizer": str(llm.model.folder),
                "dtype": llm.dtype,
            }
            own.model_args |= {"eviction": eviction.name} if eviction.needs.record else {}
            if args.use_cache is not None:
                own.use_cache = (
                    f"{args.use_cache}-{_settings_digest(llm, policy, _first_seed(args.seed))}"
                )
            try:
                with kept_results() as results, writing_is_checked(args.output_path):
                    harness.execute(own)
            finally:
                EngineLM.opened = None
            if args.kvpress_dir is not None:
                engine.write_press(args.kvpress_dir, results, compression_flags(policy))
    return EXIT_DONE


def _own_flags(args: argparse.Namespace, names: list[str]) -> Iterator[str]:
    """Yield the words of lm-eval's command line.

    What depends on the model is added once the model is open.
    """
    yield from ("run", "--model", "flexgen-h2o", "--tasks", *names)
    for name in OF_TASKS | OF_RUN:
        value = getattr(args, name)
        if value is not None:
            words = [] if value is True else value if isinstance(value, list) else [value]
            yield from (f"--{name}", *map(str, words))


def _parse_own(words: list[str]) -> tuple[Any, argparse.Namespace]:
    """Return lm-eval's command line object and the arguments that it parsed.

    Raise UsageError with lm-eval's own message.
    """
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig

    harness = HarnessCLI()
    before = sys.argv
    sys.argv = ["lm-eval", *words]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            parsed = harness.parse_args()
        logging.disable(logging.WARNING)  # the same warnings come again in the run
        EvaluatorConfig.from_cli(argparse.Namespace(**vars(parsed)))
    except SystemExit as error:
        raise UsageError(
            said.getvalue().strip().rpartition("\n")[2] or "lm-eval does not take these flags"
        ) from error
    except ValueError as error:
        raise UsageError(f"lm-eval: {error}") from error
    finally:
        logging.disable(logging.NOTSET)
        sys.argv = before
    return harness, parsed


def check_ruler(model: Any, names: list[str], metadata: dict[str, Any]) -> None:
    """Raise UsageError if a length is too short for the shortest example of a RULER task.

    lm-eval would search without end for an example that fits. names: names of tasks. metadata:
    value of --metadata.
    """
    import numpy

    asked = [
        (name, least)
        for name, least in _SHORTEST.items()
        if any(
            fnmatchcase(given, pattern) for given in (name, "ruler", "longcxt") for pattern in names
        )
    ]
    given = metadata.get("max_seq_lengths", [4096])
    for length in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(length, int) or length < 1:
            raise UsageError(
                f"--metadata max_seq_lengths={given}: {length!r} is not a number of tokens"
            )
    for name, shortest in asked:
        before = random.getstate(), numpy.random.get_state()
        least = shortest(model)
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        if least is None:
            raise UsageError(
                f"--tasks {name}: its solved example takes more than {_VT_SOLVED} tokens with the "
                "tokenizer of "
                f"{model.name}; leave the task out"
            )
        for length in given if isinstance(given, list | tuple) else [given]:
            if length < least:
                raise UsageError(
                    f"--metadata max_seq_lengths={given}: {name} takes {least} tokens or more with "
                    "the tokenizer of "
                    f"{model.name}; leave it out or give more"
                )


def _shortest_vt(model: Any) -> int | None:
    """Return the tokens of the shortest example of ruler_vt; None if no solved example fits.

    An example has 10 or more sentences of noise. It follows a solved one, which has 5 or more such
    sentences and at most 500 tokens.
    """
    from lm_eval.tasks.ruler.vt_utils import generate_input_output

    def tokens(noises: int, solved: bool) -> int:
        text, names = generate_input_output(noises, 1, 4, is_icl=solved)
        return len(model.encode_plain(f"{text} {names}")) + _VT_ANSWER

    solved = [n for n in (tokens(noises, True) for noises in range(5, 60, 5)) if n <= _VT_SOLVED]
    return tokens(10, False) + max(solved) + _MARGIN if solved else None


def _shortest_cwe(model: Any) -> int:
    """Return the tokens of the shortest example of ruler_cwe.

    An example asks for 10 or more words and follows a solved one. The number of tokens per word
    varies, so the longest of 20 examples counts.
    """
    from lm_eval.tasks.ruler import cwe_utils

    def tokens() -> int:
        solved, text, names = cwe_utils.generate_input_output(10, 1024)
        answer = " ".join(f"{i + 1}. {name}" for i, name in enumerate(names))
        return len(model.encode_plain(f"{solved}\n{text} {answer}"))

    before = cwe_utils.RNG.getstate()
    most = max(tokens() for _ in range(20))
    cwe_utils.RNG.setstate(before)
    return most + _CWE_ANSWER + _MARGIN


def _shortest_fwe(model: Any) -> int:
    """Return the tokens of the shortest example of ruler_fwe.

    It must hold the template's words, and as many different coded words as are asked for.
    """
    from lm_eval.tasks.ruler.fwe_utils import TEMPLATE

    return max(_FWE_LEAST, len(model.encode_plain(TEMPLATE.format(context="", query=""))) + _MARGIN)


_SHORTEST = {"ruler_vt": _shortest_vt, "ruler_cwe": _shortest_cwe, "ruler_fwe": _shortest_fwe}


def _first_seed(text: str | None) -> int:
    first = (text or "0").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _settings_digest(llm: Any, policy: Policy, seed: int) -> str:
    """Return a digest of the settings that answers depend on.

    It is part of the name of lm-eval's cache, which knows an answer by its request alone.
    """
    from flexgen_h2o.models.load import shape_fingerprint

    facts = [
        llm.model.name,
        shape_fingerprint(llm.model.config),
        llm.digests(),
        llm.dtype,
        llm.eviction.to_json(),
        compression_flags(policy),
        policy.attn_sparsity,
        seed,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


# ---- h2o_hf's three steps


def _generate(args: argparse.Namespace) -> int:
    names = check_tasks(args)
    from flexgen_h2o.evaluation.lm_eval_records import generate

    return generate(args, names)


def _answer(args: argparse.Namespace) -> int:
    """Run the requests of --input as a batch job and return the exit code."""
    for name in ("input", "output"):
        check_given(args, name, "name a .jsonl file")
    check_files(args, ("input",), (), rows="output")
    if not args.input.is_file():
        raise UsageError(
            f"--input {args.input}: is no file; `evaluate lm-eval generate --output FILE` writes "
            "one"
        )
    check_output_path(args.output)
    results_are_in(args.output)
    policy, is_auto = policy_of(args)
    eviction = eviction_of(args, policy)
    from flexgen_h2o.jobs.job import run_job

    return run_job(args, args.input, args.output, policy, is_auto, eviction, SamplingParams())


def _grid(args: argparse.Namespace) -> int:
    names = check_tasks(args)
    from flexgen_h2o.evaluation.lm_eval_grid import run

    return run(args, names)


def _results(args: argparse.Namespace) -> int:
    names = check_tasks(args)
    from flexgen_h2o.evaluation.lm_eval_records import score

    return score(args, names)
