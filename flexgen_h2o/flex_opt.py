"""Run FlexGen's benchmark: prompts and answers of fixed lengths; with --prompts, answer the prompts
of a file."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, abc
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from flexgen_h2o.cli_common import (
    check_files,
    count,
    file_name,
    note,
    own_name,
    positive,
    results_are_in,
    run_cli,
)
from flexgen_h2o.core.config import DTYPE_BYTES, Policy, read_policy
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import usable_path, write_result
from flexgen_h2o.engine.loop import Step, zigzag
from flexgen_h2o.engine.prompts import (
    benchmark_prompts,
    check_output_path,
    write_outputs,
)
from flexgen_h2o.engine.report import (
    PhaseReport,
    RunReport,
    append_log,
    eviction_line,
    log_block,
    log_file_name,
    prediction_line,
    project_decode_seconds,
    ranks_line,
    sizes_line,
    sizes_of,
)
from flexgen_h2o.engine.sequence import Sequence, with_params
from flexgen_h2o.flags import (
    SHOWN_OF_ENGINE,
    add_engine_flags,
    add_eviction_flags,
    add_sampling_flags,
    as_flags,
    check_positions,
    eviction_of,
    naming_flags,
    open_llm,
    policy_of,
    prompts_of,
    sampling_of,
    say_notes,
)
from flexgen_h2o.kvcache.prefixes import SHARINGS
from flexgen_h2o.parser import BENCHMARK, FILES, JOB, OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.engine.distributed import Pipeline
    from flexgen_h2o.engine.executor import Order
    from flexgen_h2o.llm import LLM


RULE = "-" * 70
SHOWN = (
    *SHOWN_OF_ENGINE,
    "--random-weights",
    "--prompt-len",
    "--gen-len",
    "--cut-gen-len",
    "--percent",
    "--micro-batch",
    "--micro-batches",
    "--report",
)
EXAMPLES = (
    "flexgen-h2o bench facebook/opt-1.3b --random-weights --ram 1GiB --prompt-len 64 --gen-len 4",
    "flexgen-h2o bench smollm2-135m --percent 50 0 50 0 100 0 --micro-batch 8 --micro-batches 2",
    "flexgen-h2o bench facebook/opt-6.7b --random-weights --hh-ratio 0.1 --hh-all --gen-len 8",
)
DEBUG_LAYER_STEPS = 20  # FlexGen's --debug-mode measures this many decode layers
# Number of prompts with --policy auto and without a prompt file: nothing else sets it.
AUTO_BENCHMARK_ROWS = 32


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    rank = os.environ.get("RANK")  # set by torchrun
    code = run_cli("flex_opt" if rank is None else f"flex_opt, rank {rank}", _run, argv)
    if rank is None:
        return code
    from flexgen_h2o.engine.distributed import leave

    return leave(code)


def _parser() -> OneLineParser:
    prog = f"flexgen-h2o {own_name('bench')}"
    parser = OneLineParser(
        prog=prog, synopsis="MODEL [flags]", description=__doc__, shown=SHOWN, examples=EXAMPLES
    )
    add_engine_flags(parser)
    add_eviction_flags(parser)
    files = parser.section(FILES).add_argument
    files(
        "--prompts",
        type=file_name,
        metavar="FILE",
        help="answer these instead: .txt (one prompt per line) or .jsonl (prompt or "
        "prompt_token_ids)",
    )
    files(
        "--chat",
        action="store_true",
        help="each text of --prompts is a user's message in the chat template",
    )
    output = "with --prompts: .jsonl in input order: index, prompt, text, token_ids, finish_reason"
    files("--output", type=file_name, metavar="FILE", help=output)
    files(
        "--report", dest="json", type=file_name, metavar="FILE", help="write the run report (JSON)"
    )
    files(
        "--trace", type=file_name, metavar="FILE", help="write a Chrome trace (opens in Perfetto)"
    )
    files(
        "--log-file",
        metavar="FILE",
        help="append FlexGen's log lines here; auto: FlexGen's name (no log)",
    )
    files("--no-log", action="store_true", help="write no log, whatever --log-file says")
    files(
        "--verbose",
        type=count,
        default=2,
        help="0: nothing, 1: log lines, 2: also the first and last text (2)",
    )
    bench = parser.section(BENCHMARK).add_argument
    bench(
        "--prompt-len", type=positive, default=512, metavar="N", help="tokens of every prompt (512)"
    )
    bench(
        "--gen-len", type=positive, default=32, metavar="N", help="new tokens of every prompt (32)"
    )
    bench(
        "--cut-gen-len",
        type=positive,
        metavar="N",
        help="run only N of the new tokens, and project the decode time",
    )
    bench(
        "--debug-mode",
        choices=("fewer_batch", "breakdown"),
        help="fewer_batch: 20 decode layers, projected; breakdown: without overlap, seconds by "
        "kind of step",
    )
    job = parser.section(JOB).add_argument
    job(
        "--pipeline",
        action="store_true",
        help="one of several processes, started by torchrun, that share the layers; budgets are of "
        "each process",
    )
    job(
        "--num-inner-iterations",
        type=positive,
        metavar="N",
        help="with --pipeline: batches that are on their way at a time (as many as processes)",
    )
    share = "compute a common beginning once (auto; benchmark: off)"
    job("--share-prefix", choices=tuple(SHARINGS), help=share)
    add_sampling_flags(parser)
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    _check(args)
    results_are_in(args.output, args.json)
    policy, is_auto = policy_of(args)
    if args.debug_mode == "breakdown":
        policy = replace(policy, overlap=False)
    params = sampling_of(args)
    if args.prompts is None:  # all sequences of the benchmark have equal lengths
        params = replace(params, ignore_eos=True)
    from flexgen_h2o.engine.scheduler import begin

    pipeline = _join_pipeline(args)
    done: list[Sequence] = []
    with open_llm(args, policy, is_auto, eviction_of(args, policy), may_stand_in=True) as llm:
        if pipeline is not None:
            llm.join(pipeline)
        # The benchmark's prompts are all equal, and FlexGen computes each.
        llm.share_prefix = args.share_prefix or ("off" if args.prompts is None else "auto")
        llm.timeline.keep_spans = args.trace is not None
        llm.check_plan()
        if args.chat:
            params = llm.model.for_chat(params)
        prompts = with_params(
            _prompts(args, llm, AUTO_BENCHMARK_ROWS if is_auto else policy.block_size), params
        )
        with naming_flags():  # a prompt longer than the model's positions
            for one in prompts:
                begin(one, llm.model, llm.eviction)
        sizes = Counter(one.size for one in prompts)
        if pipeline is None:  # refusals come before anything is printed
            llm.prepare(prompts)
        if args.verbose >= 1:
            _say_notes(args, llm)
            print(f"<run_flexgen_h2o>: args.model: {args.model}")
            print(sizes_line(*sizes_of(llm.model.spec, sizes, DTYPE_BYTES[llm.dtype])))
            print("benchmark - generate" if args.prompts is None else "generate", flush=True)
        report = _generate(args, llm, prompts, done)
    _show(args, llm, report, done)
    return EXIT_DONE


def _join_pipeline(args: argparse.Namespace) -> Pipeline | None:
    """Join the other processes. Only the first one prints and writes files."""
    if not args.pipeline:
        return None
    from flexgen_h2o.engine.distributed import join_pipeline

    pipeline = join_pipeline(args.num_inner_iterations)
    if not pipeline.is_first:
        args.verbose = 0
        args.no_log = True
        args.output = None
        args.json = None
        args.trace = None
    return pipeline


def _say_notes(args: argparse.Namespace, llm: LLM) -> None:
    """Print notes on what may surprise about this run.

    These are a policy found for another model or eviction policy, and another precision.
    """
    if args.policy not in (None, "auto"):
        saved = read_policy(usable_path(args.policy, "--policy"))
        planned = (saved.workload or {}).get("eviction")
        eviction = planned.get("name") if isinstance(planned, dict) else None
        if saved.model not in (None, llm.model.name):
            note(
                "flex_opt",
                f"--policy {args.policy} was found for {saved.model}, and this is {llm.model.name}",
            )
        if eviction not in (None, llm.eviction.name):
            note(
                "flex_opt",
                f"--policy {args.policy} was found with {eviction}, "
                f"and this is {llm.eviction.name}",
            )
    say_notes("flex_opt", args, llm)


def _check(args: argparse.Namespace) -> None:
    """Check everything that can be wrong with files and combinations, before anything is loaded."""
    if args.chat and args.prompts is None:
        raise UsageError("--chat: is for the prompts of a file; give one with --prompts")
    if args.output is not None:
        check_output_path(usable_path(args.output, "--output"))
    written = (
        ("json", "trace")
        if args.no_log or args.log_file in (None, "auto")
        else ("json", "trace", "log_file")
    )
    check_files(args, ("prompts",), written, rows="output")
    cut_short = "--cut-gen-len" if args.cut_gen_len else "--debug-mode" if args.debug_mode else None
    if cut_short and args.pipeline:
        raise UsageError(
            f"{cut_short}: does not work with --pipeline, whose processes run to the end together; "
            "leave it out"
        )
    if args.dry_run and args.pipeline:
        raise UsageError(
            "--dry-run: does not work with --pipeline, whose processes plan their own layers; "
            "leave one of them out"
        )
    if args.num_inner_iterations and not args.pipeline:
        raise UsageError("--num-inner-iterations: goes with --pipeline; give both")
    if cut_short and args.prompts is not None:
        raise UsageError(f"{cut_short}: works in the benchmark only; leave --prompts out")
    if args.cut_gen_len and args.debug_mode:
        raise UsageError("--cut-gen-len and --debug-mode: give one of them")
    if args.cut_gen_len and (args.cut_gen_len < 2 or args.cut_gen_len > args.gen_len):
        raise UsageError(
            f"--cut-gen-len: {args.cut_gen_len} must be between 2 and --gen-len {args.gen_len}"
        )
    if args.debug_mode and args.gen_len < 2:
        raise UsageError(
            f"--debug-mode {args.debug_mode}: measures decoding; --gen-len must be at least 2"
        )


def _prompts(args: argparse.Namespace, llm: LLM, rows: int) -> list[Sequence]:
    spec = llm.model.spec
    if args.prompts is not None:
        return prompts_of(args, llm.model, ())
    encode = llm.model.encode if llm.model.tokenizer is not None else None
    check_positions(args, llm.model.name, spec.max_positions)
    return benchmark_prompts(rows, args.prompt_len, encode, spec.vocab_size)


def _generate(
    args: argparse.Namespace,
    llm: LLM,
    sequences: abc.Sequence[Sequence],
    done: list[Sequence],
) -> RunReport:
    """Run, and project what was cut short. Finished answers are also written if the run fails."""
    from flexgen_h2o.engine.channels import keep_content

    def keep(found: list[Sequence]) -> None:
        if args.chat:
            for one in found:
                keep_content(one, llm.model.tokenizer)
        done.extend(found)

    try:
        report = llm.run(sequences, keep, order=_order(args))
    finally:
        if args.output is not None and done:  # a run that is refused leaves an older file as it is
            write_outputs(args.output, done)
    if not args.cut_gen_len and not args.debug_mode:
        return report
    tokens = args.gen_len - 1
    if args.cut_gen_len:
        seconds = sum(
            project_decode_seconds(block.sweep_seconds[1:], args.gen_len) for block in llm.times
        )
    else:
        # As FlexGen's fewer_batch: the mean decode layer of the second half that was measured
        # represents all layers.
        num_layers = llm.planner.num_layers(report.policy)
        decoded = [block.layer_seconds[num_layers:] for block in llm.times]
        seconds = sum(fmean(layers[len(layers) // 2 :]) * num_layers * tokens for layers in decoded)
    return replace(report, decode=PhaseReport(seconds, report.num_prompts * tokens), projected=True)


def _order(args: argparse.Namespace) -> Order | None:
    """Return the steps of a run that is cut short; None for a whole run."""

    def some_sweeps(layers: int, batches: int) -> Iterator[Step]:
        return zigzag(args.cut_gen_len, layers, batches)

    def some_layers(layers: int, batches: int) -> Iterator[Step]:
        return islice(zigzag(args.gen_len, layers, batches), (layers + DEBUG_LAYER_STEPS) * batches)

    return some_sweeps if args.cut_gen_len else some_layers if args.debug_mode else None


def _show(args: argparse.Namespace, llm: LLM, report: RunReport, done: list[Sequence]) -> None:
    if args.verbose >= 2:
        _show_texts(done)
    if args.debug_mode == "breakdown":
        _show_breakdown(llm, report.policy)
    if args.verbose >= 1:
        print(f"policy: {as_flags(report.policy)}")
        print(eviction_line(report))
        print(ranks_line(report) if args.pipeline else prediction_line(report))
        print(log_block(report))
    if args.json is not None:
        write_result(args.json, report.to_json(), "--json")
    if args.trace is not None:
        llm.timeline.write_chrome_trace(args.trace)
    if args.log_file is not None and not args.no_log:
        name = log_file_name(args.model, report.policy, report.prompt_len, report.gen_len)
        append_log(Path(name if args.log_file == "auto" else args.log_file), report)


def _show_texts(done: list[Sequence]) -> None:
    """Print the first and the last text, as FlexGen does, or token ids without a tokenizer."""
    ordered = sorted(done, key=lambda c: c.index)
    print(f"Outputs:\n{RULE}")
    for found in {one.index: one for one in (ordered[0], ordered[-1])}.values():
        text = found.token_ids if found.text is None else f"{found.prompt or ''}{found.text}"
        print(f"{found.index}: {text}\n{RULE}")
    sys.stdout.flush()


def _show_breakdown(llm: LLM, policy: Policy) -> None:
    """Print the mean seconds of each kind of step.

    The run was serial, so waiting is the transfer itself.
    """
    prefill_steps, decode_steps = (
        llm.timeline.count("compute", f"compute_layer {p}") for p in ("prefill", "decode")
    )
    print(f"#layers: {llm.planner.num_layers(policy)}")
    print(f"#batches prefill: {prefill_steps}\n#batches decoding: {decode_steps}")
    mean = llm.timeline.mean_seconds
    print(f"load_weight (per-layer): {mean('wait', 'load_weight'):.6f} s")
    if policy.compress_weight:
        print(f"unpack_weights (per-layer): {mean('compute', 'unpack_weights'):.6f} s")
    for phase in ("prefill", "decode"):
        print(
            f"compute_layer_{phase} (per-batch): {mean('compute', f'compute_layer {phase}'):.6f} s"
        )
        for kind in ("load_cache", "store_cache", "load_hidden", "store_hidden"):
            print(f"{kind}_{phase} (per-batch): {mean('wait', f'{kind} {phase}'):.6f} s")


if __name__ == "__main__":
    sys.exit(main())
