"""`python -m flexgen_h2o.batch`: a durable job. One JSON line a request in, one a row out; killed, it goes on."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import (
    OneLineParser,
    check_separate,
    count,
    file_name,
    note,
    positive,
    results_are_in,
    run_cli,
    say,
)
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import EXIT_ALL_ROWS_FAILED, EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import usable_path
from flexgen_h2o.core.interrupts import Interrupted
from flexgen_h2o.core.units import format_bytes, format_seconds
from flexgen_h2o.flags import (
    PLACEMENT,
    add_engine_flags,
    add_eviction_flags,
    add_sampling_flags,
    budget_of,
    eviction_of,
    open_llm,
    place_of,
    policy_of,
    sampling_of,
    say_idle_flags,
)
from flexgen_h2o.kvcache.prefixes import SHARINGS

if TYPE_CHECKING:
    from flexgen_h2o.engine.sampling import SamplingParams
    from flexgen_h2o.jobs.on_ray import Opening, RayJob
    from flexgen_h2o.jobs.output import OutputFile
    from flexgen_h2o.jobs.runner import Before, Job, JobWriter
    from flexgen_h2o.llm import LLM


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (DESIGN 3.1), 4 where every row is an error."""
    return run_cli("batch", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="batch", description=__doc__)
    add = parser.add_argument
    add("--input", type=file_name, help="a JSON line a request: OpenAI's batch lines, plain prompts, HELM requests")
    add("--output", type=file_name, help=".jsonl, a line a row as it is done; what is in it is not done again")
    add("--force", action="store_true", help="go on with an output that was begun with other settings")
    add("--max-errors", type=count, metavar="N", help="end when more than N rows are errors (no limit)")
    add("--window", type=positive, metavar="ROWS", help="rows that are read ahead and sorted (1024, at least 4 blocks)")
    add(
        "--refill", action=argparse.BooleanOptionalAction, default=True,
        help="rows that finish give their places to the next ones while the others go on (on)",
    )  # fmt: skip
    add(
        "--ray", nargs="?", const="", metavar="ADDRESS",
        help="run on the Ray at ADDRESS (a cluster, or auto), an engine an actor; without one on a Ray of its own here",
    )  # fmt: skip
    add(
        "--ray-actors", type=positive, metavar="N", help="engines on Ray, each with the budgets (one a card, or a node)"
    )
    add("--status", action="store_true", help="say how the job that writes --output stands, and do nothing else")
    add("--gen-len", type=positive, default=32, help="most new tokens of a row that does not say (32)")
    add("--share-prefix", choices=tuple(SHARINGS), default="auto", help="compute once what rows begin with (auto)")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    add_eviction_flags(parser)
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    if args.output is None:
        raise UsageError("--output: is missing; name the .jsonl file that the job writes")
    args.output = usable_path(args.output, "--output")
    if args.status:
        return _show_status(args)
    results_are_in(args.output)
    _check_paths(args)
    if args.ray_actors and args.ray is None:
        raise UsageError("--ray-actors: goes with --ray; give both")
    if args.ray is not None and (find_spec("ray") is None or find_spec("pyarrow") is None):
        raise UsageError("--ray: needs Ray Data; pip install -e '.[ray]' in a clone")
    policy, is_auto = policy_of(args)
    from flexgen_h2o.jobs.output import OutputFile

    defaults, eviction = sampling_of(args), eviction_of(args, policy)
    with contextlib.closing(OutputFile(args.output)) as output, open_llm(args, policy, is_auto, eviction) as llm:
        llm.share_prefix = args.share_prefix
        llm.check_plan()
        if llm.precision_note:
            note("batch", llm.precision_note)
        settings = _settings(llm, policy, is_auto, defaults)
        before = _settle(args, output, settings)
        say_idle_flags("batch", args, place_of(args, llm))
        if output.cut_bytes:
            note("batch", f"--output {args.output}: cut off a torn row of {output.cut_bytes} bytes")
        if args.ray is None:
            return _run_here(args, output, llm, before, defaults)
        from flexgen_h2o.jobs.on_ray import Opening

        digests = {what: settings["model"][what] for what in ("weights", "tokenizer")}
        opening = Opening(_with_whole_paths(args), policy, is_auto, eviction, digests)
        return _run_on_ray(args, output, llm.model.name, before, opening)


def _show_status(args: argparse.Namespace) -> int:
    from flexgen_h2o.jobs.sidecar import read_status, status_lines

    print("\n".join(status_lines(read_status(args.output))))
    say_idle_flags("batch --status", args)
    return EXIT_DONE


def _check_paths(args: argparse.Namespace) -> None:
    from flexgen_h2o.engine.prompts import check_output_path
    from flexgen_h2o.jobs.sidecar import sidecar_path, status_path

    if args.input is None:
        raise UsageError("--input: is missing; name the .jsonl file with the requests")
    args.input = usable_path(args.input, "--input")
    if not args.input.exists():
        raise UsageError(f"--input {args.input}: does not exist")
    if not args.input.is_file():
        raise UsageError(f"--input {args.input}: is not a file; it is read more than once")
    check_output_path(args.output)
    check_separate(args, ("input", "policy", "hardware"), ("output",))
    if args.input.resolve() in (path(args.output).resolve() for path in (sidecar_path, status_path)):
        raise UsageError(f"--input {args.input}: is a file that the job writes beside --output; give another name")


def _settings(llm: LLM, policy: Policy, is_auto: bool, defaults: SamplingParams) -> dict[str, Any]:
    """What answers depend on, for the sidecar. Budgets and devices may change from run to run."""
    from flexgen_h2o.models.load import shape_fingerprint

    placement = dict.fromkeys(PLACEMENT, "auto") if is_auto else {}
    shape = {"name": llm.model.name, "config": shape_fingerprint(llm.model.config), "random": llm.model.random}
    return {
        "model": {**shape, **llm.digests()},
        "dtype": llm.dtype,
        "policy": {**policy.to_json(), **placement},
        "eviction": llm.eviction.to_json(),
        "sampling": {**asdict(defaults), "stop": list(defaults.stop)},
    }


def _settle(args: argparse.Namespace, output: OutputFile, settings: dict[str, Any]) -> Before:
    """Read input and output, and refuse an output that was begun with other settings; then write the sidecar."""
    from flexgen_h2o.jobs.input import scan_input
    from flexgen_h2o.jobs.runner import rows_before
    from flexgen_h2o.jobs.sidecar import Sidecar, differences, read_sidecar, sidecar_path

    before = read_sidecar(args.output)
    scan = scan_input(args.input, before.input_bytes if before else 0)
    if not len(scan.ids):
        raise UsageError(f"--input {args.input}: no request in it, only blank lines or nothing")
    earlier: list[dict[str, Any]] = []
    if not output.is_empty and before is None and not args.force:
        raise UsageError(
            f"--output {args.output}: has rows, and no {sidecar_path(args.output).name} beside it says what they were "
            "made with; give another name, or --force"
        )
    if not output.is_empty and before is not None:
        found, earlier = differences(before, settings, scan), before.earlier
        if found and not args.force:
            raise UsageError(
                f"--output {args.output}: {'; '.join(found)}; give another name, the flags that it was begun with, or "
                "--force"
            )
        if found:
            earlier = [*earlier, before.settings]
    found_rows = rows_before(output, scan.ids)
    now = Sidecar(settings, str(args.input), scan.nbytes, scan.digest, earlier)
    if now != before:
        now.write(args.output)
    return found_rows


def _run_here(args: argparse.Namespace, output: OutputFile, llm: LLM, before: Before, defaults: SamplingParams) -> int:
    from flexgen_h2o.jobs.input import Cut, read_cut
    from flexgen_h2o.jobs.requests import RequestReader
    from flexgen_h2o.jobs.runner import Job, JobWriter

    _say_rows(before)
    writer = JobWriter(output, before, lambda: llm.peak_bytes, args.max_errors)
    lines = read_cut(args.input, Cut(0, 1, 0, ~before.done))
    job = Job(llm, RequestReader(llm.model, defaults), lines, writer, args.window, args.refill)
    with _writing(args, output, writer):
        job.run(len(before.done) - before.rows)
    return _show(args, writer, before, job, llm.model.name)


def _run_on_ray(args: argparse.Namespace, output: OutputFile, model: str, before: Before, opening: Opening) -> int:
    from flexgen_h2o.jobs.on_ray import RayJob, find_pool, ray_at
    from flexgen_h2o.jobs.runner import JobWriter

    # Ray ends last: while it does, a second SIGTERM kills the process, and by then rows and status are on disk.
    with ray_at(args.ray or None):
        _say_rows(before)
        writer = JobWriter(output, before, dict, args.max_errors)
        with _writing(args, output, writer):
            pool = find_pool(args.ray_actors, budget_of(args).host, args.device)
            cores = f"{pool.cpus} core{'s' if pool.cpus != 1 else ''}"
            _say(f"{pool.actors} engines on Ray, each with {cores} and {format_bytes(pool.host_bytes)} of RAM")
            job = RayJob(args.input, before.done, writer, pool, opening)
            job.run()
    return _show(args, writer, before, job, model)


def _with_whole_paths(args: argparse.Namespace) -> argparse.Namespace:
    """The flags as another process understands them, wherever it stands."""
    names = ("model", "path", "offload_dir", "hardware")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    paths = {name: Path(value).expanduser().absolute() for name, value in given.items()}
    whole = {name: str(path) for name, path in paths.items() if path.exists()}
    return argparse.Namespace(**{**vars(args), **whole})


def _say_rows(before: Before) -> None:
    print(f"{len(before.done)} rows, {before.rows} of them done before", flush=True)


@contextlib.contextmanager
def _writing(args: argparse.Namespace, output: OutputFile, writer: JobWriter) -> Iterator[None]:
    """Around the run of a job: its end in the status file, and finished rows on disk before the engine is closed."""
    from flexgen_h2o.jobs.sidecar import DONE

    state = DONE
    try:
        writer.check_errors()
        yield
        output.sync()
        _check_files(args, writer, output)
    except Interrupted as signal:
        state = f"ended by {signal}"
        raise
    except BaseException as error:
        state = f"failed: {error}"
        raise
    finally:
        writer.end(state)
        output.sync()


def _check_files(args: argparse.Namespace, writer: JobWriter, output: OutputFile) -> None:
    """FlexgenError where input or output was changed under the job: the input is read again while it runs."""
    from flexgen_h2o.jobs.input import begins_as
    from flexgen_h2o.jobs.sidecar import read_sidecar

    begun = read_sidecar(args.output)
    status = writer.status
    missing = status.rows - status.done
    if missing or (begun is not None and not begins_as(args.input, begun.input_bytes, begun.input_digest)):
        raise FlexgenError(
            f"--input {args.input}: was changed while the job ran ({missing} rows are missing); rows of {args.output} "
            "may be of either state: leave the input alone, and give another --output"
        )
    output.check_rows(status.done + status.other_rows)


def _show(args: argparse.Namespace, writer: JobWriter, before: Before, job: Job | RayJob, model: str) -> int:
    """The summary; returns the exit code."""
    from flexgen_h2o.jobs.sidecar import spared_text

    status = writer.status
    did = f"{status.tokens} new tokens in {format_seconds(status.seconds)} ({status.tokens_per_s:.1f} token/s)"
    if before.rows == status.rows:
        did = "nothing was left to do"
    if status.spared_tokens:
        did += f"; {spared_text(status)}"
    print(f"{status.done} rows in {args.output}, {status.errors} of them errors; {did}")
    if status.errors:
        print("errors: " + ", ".join(f"{n} {code}" for code, n in writer.errors.most_common() if n))
    if job.other_models:
        _say(f"{job.other_models} requests name another model (the first: {job.first_other}); {model} answered them")
    return EXIT_ALL_ROWS_FAILED if status.errors == status.rows else EXIT_DONE


def _say(line: str) -> None:
    say("batch", line)


if __name__ == "__main__":
    sys.exit(main())
