"""Run a job of `batch` or `generate`: do what the output lacks, here or on Ray.

A sidecar is written before the run, and a summary is printed after it.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_h2o.cli_common import note
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import EXIT_ALL_ROWS_FAILED, EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import guard_of
from flexgen_h2o.core.interrupts import Interrupted
from flexgen_h2o.core.units import counted, format_bytes, format_seconds
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.flags import PLACEMENT, say_notes
from flexgen_h2o.jobs.causes import RowChecker, causes_text
from flexgen_h2o.jobs.input import (
    Check,
    InputPart,
    InputScan,
    Line,
    begins_as,
    is_growing,
    read_part,
    scan_input,
)
from flexgen_h2o.jobs.on_ray import EngineArguments, ray_at, run_on_ray
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.runner import (
    JobRun,
    JobWriter,
    OutputState,
    rows_before,
    sample_of,
)
from flexgen_h2o.jobs.sidecar import (
    DONE,
    Sidecar,
    differences,
    read_sidecar,
    sidecar_path,
    spared_text,
    status_path,
    tiers_text,
)
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.llm import LLM
from flexgen_h2o.models.load import shape_fingerprint
from flexgen_h2o.opening import opening_line
from flexgen_h2o.parser import as_typed

# Largest input whose prompts are tokenized before the job, to find those that are too long.
WHOLLY_CHECKED_BYTES = 2**20
# Sampling parameters that are never defaults of a job.
OF_REQUESTS = (
    "prompt_logprobs",
    "score",
    "score_mode",
    "stop_token_ids",
    "is_chat",
    "repetition_penalty",
)
# What sampling fields without a value mean.
_OFF = {"top_p": 1.0, "top_k": 0}
# Defaults of batch's flags, for commands that run a job but lack some of the flags.
BATCH_DEFAULTS: dict[str, Any] = {
    "force": None,
    "max_errors": None,
    "window": None,
    "refill": True,
    "ray": None,
    "ray_actors": None,
    "share_prefix": "auto",
    "chat": None,
    "system": None,
}


def run_job(
    args: argparse.Namespace,
    source: Path,
    target: Path,
    policy: Policy,
    is_auto: bool,
    eviction: Eviction,
    defaults: SamplingParams,
    tests_bits: bool = False,
) -> int:
    """Run the requests in `source` into the output `target`, here or on Ray.

    tests_bits: as in `LLM`, if the job runs here.

    Return the exit code. With --dry-run only the plan is printed.
    """
    of_job = argparse.Namespace(
        **{**BATCH_DEFAULTS, **vars(args), "input": source, "output": target}
    )
    opening = EngineArguments(of_job, policy, is_auto, eviction)
    if vars(args).get("dry_run"):
        return _plan(opening, defaults)
    with contextlib.closing(OutputFile(target)) as output:
        if output.has_guard:
            note(
                "batch",
                f"--output {target}: its file system has no locks; {guard_of(target.resolve())} is "
                "in the place of one. Do not begin the job on another machine meanwhile",
            )
        return _run(opening, output, defaults, tests_bits)


def _plan(opening: EngineArguments, defaults: SamplingParams) -> int:
    """Print the plan for all requests of the input, for --dry-run, whatever an output has of them.

    Write nothing.
    """
    args = opening.args
    scan = _scan(args.input, may_grow=True)  # refuses the inputs that the job would refuse
    left = np.ones(len(scan.ids), bool)
    with opening.open() as llm:
        llm.check_plan()
        checker = RowChecker(reader_of(args, llm, defaults), encodes=True)
        lines = read_part(args.input, InputPart(left))
        readable = (one for one in map(checker.see, lines) if one is not None)
        requests, count = sample_of(readable, llm)
        failing = checker.text(left, names_all=True)
        _say_lines(checker)
        if not requests:
            raise UsageError(
                f"--input {args.input}: no request in it that can be run ({checker.first})"
            )
        if failing:
            note("batch", failing)
        llm.planner.job_rows = count
        llm.prepare(requests)
    return EXIT_DONE


def _scan(
    source: Path,
    check: Check = lambda: None,
    nbytes_before: int = 0,
    may_grow: bool = False,
    see: Callable[[Line], object] = lambda line: None,
) -> InputScan:
    """Read the input once (`scan_input`).

    may_grow: a last line without a newline is left out, with a note, if somebody is writing it.
    """
    scan = scan_input(source, None, check, nbytes_before, see)
    if may_grow and scan.is_open and is_growing(source, scan.nbytes):
        if len(scan.ids) == 1:
            raise UsageError(
                f"--input {source}: its only line has no newline, and another process is still "
                "writing to the file; wait for its end, and run again"
            )
        _say_growing(source)
        scan = replace(scan, ids=scan.ids[:-1], is_open=False)
    return scan


def _say_growing(source: Path) -> None:
    note(
        "batch",
        f"--input {source}: its last line has no newline, and the file is still being written; the "
        "line is not answered. The same command answers it when it is whole",
    )


def reader_of(args: argparse.Namespace, llm: LLM, defaults: SamplingParams) -> RequestReader:
    """Return the reader of a job's lines, with the flags for texts and chat.

    Raise UsageError for a --system that would not be used.
    """
    if args.system is not None and not (
        llm.model.has_chat_template if args.chat is None else args.chat
    ):
        why = (
            "--no-chat sends texts as they are"
            if args.chat is False
            else f"{llm.model.name} has no chat template"
        )
        raise UsageError(f"--system: is a message of a chat, and {why}; leave it out")
    return RequestReader(llm.model, defaults, llm.eviction, args.chat, args.system)


def _run(
    opening: EngineArguments, output: OutputFile, defaults: SamplingParams, tests_bits: bool
) -> int:
    """Do what the output lacks, for `run_job`."""
    args = opening.args
    with opening.open() as llm:
        llm.tests_bits = tests_bits
        llm.check_plan()
        reader = reader_of(args, llm, defaults)
        settings = settings_of(llm, opening.policy, opening.is_auto, defaults)
        settings |= reader.texts_settings()
        size = args.input.stat().st_size
        checker = RowChecker(reader, encodes=size <= WHOLLY_CHECKED_BYTES)
        before = settle(args.input, [output], settings, args.force, may_grow=True, see=checker.see)
        left = ~before.done
        failing = checker.text(left)
        say_notes("batch", args, llm)
        _say_lines(checker)
        if output.cut_bytes:
            note(
                "batch",
                f"--output {args.output}: cut off an incomplete last line of {output.cut_bytes} "
                "bytes",
            )
        before = replace(before, failing=checker.fail(left))
        runnable = max(1, int(left.sum()) - before.failing)
        if args.ray is None:
            _say_rows(before, failing)
            writer = JobWriter([output], llm.model, before, lambda: llm.peak_bytes, args.max_errors)
            lines = read_part(args.input, InputPart(left))

            def announce(requests: Sequence[Request]) -> None:
                print(opening_line(llm, requests, runnable), flush=True)

            job = JobRun(llm, reader, lines, writer, args.window, args.refill, on_open=announce)
            with _writing(args, output, writer):
                job.run(runnable)
        else:
            opening = replace(opening, digests=llm.digests())
            # Ray ends last: while it does, a second SIGTERM kills the process, and by then rows and
            # status are on disk.
            with ray_at(args.ray or None):
                _say_rows(before, failing)
                writer = JobWriter([output], llm.model, before, dict, args.max_errors)
                with _writing(args, output, writer):
                    run_on_ray(before.done, writer, opening)
    return _show(args, writer)


def _say_lines(checker: RowChecker) -> None:
    """Tell the user what the lines have that is not read: columns, and names of other models."""
    for text in (checker.reader.columns_text(), checker.models_text()):
        if text:
            note("batch", text)


def settings_of(
    llm: LLM, policy: Policy, is_auto: bool, defaults: SamplingParams
) -> dict[str, Any]:
    """Return all settings that answers depend on, for the sidecar.

    Budgets and devices are not among them: they may change between runs.
    """
    model = llm.model
    shape = {"name": model.name, "config": shape_fingerprint(model.config), "random": model.random}
    return {
        "model": shape | llm.digests(),
        "dtype": llm.dtype,
        "policy": _answering(policy) | (dict.fromkeys(PLACEMENT, "auto") if is_auto else {}),
        "eviction": llm.eviction.to_json(),
        "sampling": {
            name: _OFF.get(name) if value is None else value
            for name, value in asdict(model.generation.for_drawing(defaults)).items()
            if name not in OF_REQUESTS
        }
        | {"stop": list(defaults.stop)},
        **({"template": dict(model.template_options)} if model.template_options else {}),
    }


def _answering(policy: Policy) -> dict[str, Any]:
    """Return a policy's fields, except newer ones that have no effect in it.

    Older versions lack the newer fields, and jobs that they began can still be resumed.
    """
    unused = set() if policy.compress_cache else {"cache_window"}
    if not (policy.compress_cache and policy.cache_rotation):
        unused.add("cache_rotation")
    found = {name: value for name, value in policy.to_json().items() if name not in unused}
    if policy.attn_sparsity < 1:  # jobs of older versions that read other entries do not resume
        found["sparse_attention"] = "values"
    return found


def settle(
    source: Path,
    outputs: Sequence[OutputFile],
    settings: dict[str, Any],
    force: bool | None = None,
    check: Check = lambda: None,
    may_grow: bool = False,
    see: Callable[[Line], object] = lambda line: None,
) -> OutputState:
    """Read input and output, refuse an output that was begun with other settings, and write the
    sidecar.

    An answer belongs to the bytes that it answered: if the last line had no newline when it was
    answered, and has grown since, its row is removed.

    outputs: as in `JobWriter`. The sidecar is beside the first.
    force: the value of --force; None if the command does not have it.
    may_grow: somebody may still be writing the input.
    see: as in `scan_input`.
    """
    output = outputs[0].path
    before = read_sidecar(output)
    nbytes_before = 0 if before is None else before.input_bytes
    scan = _scan(source, check, nbytes_before, may_grow, see)
    is_empty = all(one.is_empty for one in outputs)
    earlier: list[dict[str, Any]] = []
    or_force = "" if force is None else ", or --force"
    if before is not None and not is_empty:
        found = differences(before, settings, source)
        earlier = before.earlier
        if found and not force:
            raise UsageError(
                f"--output {output}: {'; '.join(found)}; give another name, or the flags that it "
                f"was begun with{or_force}"
            )
        if found:
            earlier = [*earlier, before.settings]
    elif not is_empty and not force:
        raise UsageError(
            f"--output {output}: has rows, and no {sidecar_path(output).name} beside it says what "
            f"they were made with; give another name{or_force}"
        )
    rows = chain.from_iterable(one.rows() for one in outputs)
    found_rows = rows_before(rows, scan.ids, check)
    if scan.stale_id is not None:
        for one in outputs:
            one.drop(scan.stale_id)
        rows = chain.from_iterable(one.rows() for one in outputs)
        found_rows = rows_before(rows, scan.ids, check)
    if may_grow and scan.is_open and not found_rows.done[-1]:
        found_rows = replace(found_rows, open_row=len(scan.ids) - 1)
    now = Sidecar(settings, str(source), scan.nbytes, scan.digest, earlier)
    if now != before:
        now.write(output)
    return found_rows


def _say_rows(before: OutputState, failing: str) -> None:
    """Print how many rows there are. failing: which will be error rows (`RowChecker.text`)."""
    status = before.status
    done = f", {status.done} of them done before" if status.done else ""
    print(f"{counted(status.rows, 'prompt')}{done}", flush=True)
    if failing:
        print(failing, flush=True)


@contextlib.contextmanager
def _writing(args: argparse.Namespace, output: OutputFile, writer: JobWriter) -> Iterator[None]:
    """Wrap the run of a job: sync finished rows before the engine is closed, and write the final
    status.
    """
    state = DONE
    try:
        writer.check_errors()
        with writer.ticking():
            yield
        _end_rows(args, writer)
        output.sync()
        _check_files(args, writer, output)
    except Interrupted as signal:
        state = f"ended by {signal}"
        raise
    except BaseException as error:
        state = f"failed: {as_typed(str(error))}"
        raise
    finally:
        writer.end(state)
        output.sync()
    if not status_path(args.output).is_file():
        raise FlexgenError(
            f"{status_path(args.output)}: cannot be written; the answers in {args.output} are "
            "complete"
        )


def _end_rows(args: argparse.Namespace, writer: JobWriter) -> None:
    """Write the answer to a last line without a newline, unless the line has grown since."""
    begun = read_sidecar(args.output)
    nbytes = -1 if begun is None else begun.input_bytes
    if not writer.end_rows(lambda: not is_growing(args.input, nbytes)):
        _say_growing(args.input)
    elif begun is not None and args.input.stat().st_size > nbytes:
        note("batch", f"--input {args.input}: has grown; the same command answers its new lines")


def _check_files(args: argparse.Namespace, writer: JobWriter, output: OutputFile) -> None:
    """Raise FlexgenError if input or output was changed during the job, which reads the input
    twice.
    """
    status = writer.status
    begun = read_sidecar(args.output)
    missing = status.rows - status.done
    if missing or (
        begun is not None and not begins_as(args.input, begun.input_bytes, begun.input_digest)
    ):
        raise FlexgenError(
            f"--input {args.input}: was changed while the job ran ({missing} rows are missing); "
            f"rows of {args.output} "
            "may be of either state: leave the input alone, and give another --output"
        )
    output.check_rows(status.done + status.other_rows)


def _show(args: argparse.Namespace, writer: JobWriter) -> int:
    """Print the summary and return the exit code."""
    status = writer.status
    did = (
        f"{status.tokens} new tokens in {format_seconds(status.seconds)} "
        f"({status.tokens_per_s:.1f} tokens/s)"
    )
    if writer.done_before == status.rows:
        did = "nothing was left to do"
    if status.spared_tokens:
        did += f"; {spared_text(status)}"
    print(
        f"{counted(status.done, 'answer')} in {args.output}, {status.errors} of them errors; {did}"
    )
    if status.peak_bytes:
        process = format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        print(
            f"memory: weights, KV cache and buffers at most {tiers_text(status.peak_bytes)}; whole "
            f"process {process}"
        )
    if status.errors:
        print(f"errors: {causes_text(writer.errors)}")
    return EXIT_ALL_ROWS_FAILED if status.errors == status.rows else EXIT_DONE
