"""`evaluate helm export|import`: HELM's requests as batch jobs, and the answers for HELM's cache.

HELM itself is not needed. The workflow is that of h2o_hf: `helm-run --dry-run` writes runs without
answers, export_requests.py writes their requests, and run_helm.py answers them. import_results.py
puts the answers into HELM's cache, where `helm-run` finds them. `batch` replaces run_helm.py and
reads the file of export_requests.py. `export` writes the same lines from the runs themselves.
`import` reduces the output of a batch job to the lines that import_results.py reads. This module
imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flexgen_h2o.cli_common import check_separate, file_name, results_are_in
from flexgen_h2o.core.errors import EXIT_ALL_ROWS_FAILED, EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import check_writable, read_json, replacing, usable_path
from flexgen_h2o.evaluation.rows import check_given, objects_of
from flexgen_h2o.parser import OneLineParser

MAX_STATE_BYTES = 2**30  # largest scenario_state.json that is read
TOGETHER = "together"
_DIGEST_BYTES = 16
_TABLE = "unnamed"  # sqlitedict's table, which holds HELM's cache
# HELM's name of a model -> the name that the client of h2o_hf's HELM sends.
_ENGINES = {
    "flan-t5-xxl": "flan-t5-xxl-hf",
    "h3-2.7b": "h3-2.7b-h3",
    "opt-1.3b": "opt-1.3b-ft-tp1",
    "opt-6.7b": "opt-6.7b-ft-tp1",
}
# Models for which the client of today's HELM adds a stop string (_ENDS) or `details`.
_ENDS = {"alpaca-7b", "vicuna-7b-v1.3", "vicuna-13b-v1.3"}
_DETAILED = {"llama-65b", "llama-2-70b"}


def add_flags(parser: OneLineParser) -> None:
    """Add the flags of both directions."""
    parts = parser.add_subparsers(dest="direction", required=True, metavar="export|import")
    export = parts.add_parser("export", help="requests of dry runs, as batch reads them")
    export.set_defaults(run=run_export)
    add = export.add_argument
    add(
        "--runs",
        type=file_name,
        metavar="DIR",
        help="a suite: benchmark_output/runs/SUITE after helm-run --dry-run",
    )
    add(
        "--output",
        type=file_name,
        metavar="FILE",
        help='.jsonl, one request per line: {"scenario", "request"}',
    )
    add(
        "--organization",
        default=TOGETHER,
        help="of the models whose runs count: what stands before the / (together)",
    )
    add(
        "--client",
        choices=tuple(_CLIENTS),
        default="h2o_hf",
        help="whose requests: those of h2o_hf's HELM (0.2), or of today's (h2o_hf)",
    )
    add("--request-model", metavar="NAME", help="the model that requests name (as the client does)")
    add(
        "--cache-dir",
        type=file_name,
        metavar="DIR",
        help="what its ORGANIZATION.sqlite has is left out",
    )
    back = parts.add_parser(
        "import", help="answers of a batch job, as import_results.py takes them"
    )
    back.set_defaults(run=run_import)
    add = back.add_argument
    add(
        "--input",
        type=file_name,
        metavar="FILE",
        help="the output of batch, or of h2o_hf's run_helm.py",
    )
    add(
        "--output",
        type=file_name,
        metavar="FILE",
        help='.jsonl, one answer per line: {"request", "result"}',
    )
    add(
        "--requests",
        type=file_name,
        metavar="FILE",
        help="what was exported, to count what has no answer",
    )


# ---- export


def run_export(args: argparse.Namespace) -> int:
    """Write the requests of all runs, each once, and return the exit code."""
    check_given(
        args,
        "runs",
        "name the folder that `helm-run --dry-run --suite SUITE` has written, "
        "benchmark_output/runs/SUITE",
    )
    args.runs = usable_path(args.runs, "--runs")
    _check_output(args)
    if not args.runs.is_dir():
        raise UsageError(
            f"--runs {args.runs}: no such folder; helm-run --dry-run writes "
            "benchmark_output/runs/SUITE"
        )
    states = sorted(args.runs.glob("*/scenario_state.json"))
    if not states:
        raise UsageError(
            f"--runs {args.runs}: no */scenario_state.json in it; name a suite, "
            "benchmark_output/runs/SUITE"
        )
    counts: Counter[str] = Counter()
    with _cached(args) as is_cached, _replaced(args.output) as write:
        seen: set[bytes] = set()
        for state in states:
            for line, key in _exported(state, args, counts):
                digest = _digest(key)
                if digest in seen:
                    counts["repeated"] += 1
                elif is_cached(key):
                    counts["in the cache"] += 1
                else:
                    write(line)
                    counts["written"] += 1
                seen.add(digest)
        if not counts["written"] + counts["in the cache"]:
            raise UsageError(
                f"--organization {args.organization}: no request in {args.runs} is for its models "
                f"({_counted(counts)}); name another"
            )
    print(f"{counts['written']} requests in {args.output}{_left_out(counts)}")
    return EXIT_DONE


def _exported(
    state_path: Path, args: argparse.Namespace, counts: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield (line, key) of each request of a run.

    counts: gets the numbers of requests that a batch job cannot answer.
    """
    state, scenario = (
        _json_of(path) for path in (state_path, state_path.with_name("scenario.json"))
    )
    try:
        spec = state["adapter_spec"]
        name = scenario["name"]
        if str(spec["model"]).partition("/")[0] != args.organization:
            counts["of other organizations"] += len(state["request_states"])
            return
        requests = [one["request"] for one in state["request_states"]]
        for request in requests:
            if (
                request.get("messages")
                or request.get("multimodal_prompt")
                or request.get("embedding")
            ):
                counts["not of text alone"] += 1
                continue
            raw = _CLIENTS[args.client](request)
            if args.request_model is not None:
                raw["model"] = args.request_model
            if request.get("random") is not None:  # a part of the cache's key; batch ignores it
                raw["random"] = request["random"]
            yield key_of({"scenario": name, "request": raw}) + "\n", key_of(raw)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(
            f"--runs {state_path}: is no run of helm-run ({type(error).__name__}: {error}); do it "
            "again with --dry-run"
        ) from error


def key_of(request: Mapping[str, Any]) -> str:
    """Return the text by which HELM knows a request."""
    return json.dumps(request, sort_keys=True)


def _of_h2o_hf(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as the together client of h2o_hf's HELM sends it.

    Missing fields get HELM's defaults.
    """
    engine = request["model"].split("/")[1]
    return _raw(request, _ENGINES.get(engine, engine)) | {
        "logprobs": request.get("top_k_per_token", 1)
    }


def _of_today(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as the together client of HELM 0.5 sends it."""
    raw = _raw(request, request["model"])
    engine = request["model"].split("/")[1]
    if engine in _ENDS:
        raw["stop"] = [*(raw["stop"] or []), "</s>"]
    return raw | ({"details": True} if engine in _DETAILED else {})


def _raw(request: Mapping[str, Any], model: str) -> dict[str, Any]:
    return {
        "request_type": "language-model-inference",
        "model": model,
        "prompt": request["prompt"],
        "temperature": request.get("temperature", 1.0),
        "n": request.get("num_completions", 1),
        "max_tokens": request.get("max_tokens", 100),
        "best_of": request.get("top_k_per_token", 1),
        "stop": request.get("stop_sequences") or None,
        "echo": request.get("echo_prompt", False),
        "top_p": request.get("top_p", 1),
    }


_CLIENTS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "h2o_hf": _of_h2o_hf,
    "helm": _of_today,
}


@contextlib.contextmanager
def _cached(args: argparse.Namespace) -> Iterator[Callable[[str], bool]]:
    """Yield a function that tells whether a key is in HELM's cache.

    The answers there are pickled; only keys are read.
    """
    if args.cache_dir is None:
        yield lambda key: False
        return
    path = usable_path(args.cache_dir, "--cache-dir") / f"{args.organization}.sqlite"
    if not path.is_file():
        raise UsageError(
            f"--cache-dir {args.cache_dir}: no {path.name} in it; leave --cache-dir out for a "
            "first run"
        )
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        ) as base:
            found = base.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (_TABLE,)).fetchone()
            query = f"SELECT 1 FROM {_TABLE} WHERE key = ?"
            yield (
                lambda key: found is not None and base.execute(query, (key,)).fetchone() is not None
            )
    except sqlite3.Error as error:
        raise UsageError(f"--cache-dir {path}: is no cache of HELM's ({error})") from error


def _json_of(path: Path) -> Any:
    try:
        return read_json(path, MAX_STATE_BYTES)
    except OSError as error:
        raise UsageError(f"--runs {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--runs {path}: not a JSON file ({error})") from error


# ---- import


class NoAnswerError(FlexgenError):
    """An output of batch without an answer for HELM. An older output file stays as it is."""

    exit_code = EXIT_ALL_ROWS_FAILED


def run_import(args: argparse.Namespace) -> int:
    """Write the answers as import_results.py reads them, and return the exit code.

    Raise NoAnswerError if there is none.
    """
    for name in ("input", "requests"):
        if (path := getattr(args, name)) is not None:
            setattr(args, name, usable_path(path, f"--{name}"))
    check_given(args, "input", "name the output of batch")
    _check_output(args)
    counts: Counter[str] = Counter()
    answered: set[bytes] = set()
    with _replaced(args.output) as write:
        for request, result in _answers(args.input, counts):
            write(json.dumps({"request": request, "result": result}, allow_nan=False) + "\n")
            answered.add(_digest(key_of(request)))
            counts["written"] += 1
        missing = None if args.requests is None else _missing(args.requests, answered)
        if not counts["written"]:
            raise NoAnswerError(
                f"--input {args.input}: has no answer to write; left out: {_counted(counts)}"
            )
    print(f"{counts['written']} answers in {args.output}{_left_out(counts)}")
    if missing:
        print(
            f"{missing} requests of {args.requests} have no answer; helm-run will ask for them in "
            "vain"
        )
    return EXIT_DONE


def _answers(path: Path, counts: Counter[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (request, result) of each answered request of a batch output.

    counts: gets the numbers of other rows.
    """
    for place, row in objects_of(path, "--input", "; run the job again, which mends its output"):
        request = row.get("request")
        result = row.get("result")
        if row.get("error") is not None:
            counts["errors"] += 1
        elif (
            not isinstance(request, dict) or not isinstance(result, dict) or "prompt" not in request
        ):
            counts["not of HELM"] += 1
        else:
            try:
                yield request, _with_top_logprobs(result)
            except (KeyError, TypeError) as error:
                raise UsageError(
                    f"{place}: result has no choices with logprobs; name the output of batch"
                ) from error


def _with_top_logprobs(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result with a `top_logprobs` for each token.

    HELM reads tokens, token_logprobs and top_logprobs side by side, and drops the tokens that lack
    one.
    """
    choices = []
    for choice in result["choices"]:
        logprobs = choice["logprobs"]
        top = list(logprobs.get("top_logprobs") or [])
        top += [{}] * (len(logprobs["tokens"]) - len(top))
        choices.append({**choice, "logprobs": {**logprobs, "top_logprobs": top}})
    return {**result, "choices": choices}


def _missing(path: Path, answered: set[bytes]) -> int:
    """Return how many of the exported requests have no answer. answered: digests of keys."""
    missing = 0
    for place, line in objects_of(path, "--requests"):
        try:
            request = line["request"]
        except KeyError as error:
            raise UsageError(
                f'{place}: is no {{"scenario", "request"}} line; name the file that was exported'
            ) from error
        missing += _digest(key_of(request)) not in answered
    return missing


# ---- both


def _check_output(args: argparse.Namespace) -> None:
    check_given(args, "output", "name the .jsonl file that is written")
    args.output = usable_path(args.output, "--output")
    check_writable(args.output, "--output")
    # `check_separate` reads them; no model takes part here
    args.model = ""
    args.path = None
    check_separate(
        args,
        [name for name in ("input", "requests") if vars(args).get(name) is not None],
        ("output",),
    )
    results_are_in(args.output)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes lines of the output, which appears whole or not at all."""
    try:
        with replacing(path) as file:
            yield file.write
    except OSError as error:
        raise FlexgenError(f"--output {path}: {error.strerror or error}") from error


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES).digest()


def _left_out(counts: Mapping[str, int]) -> str:
    left = {name: n for name, n in counts.items() if name != "written"}
    return f"; left out: {_counted(left)}" if left else ""


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "there is none"
