"""Find the fastest way to run a file of prompts, and say what it needs and how long it takes.

Only the model's config is needed: no weights, no GPU. The first plan measures this machine for one
to two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import (
    check_picture,
    check_separate,
    file_name,
    flag_of,
    note,
    own_name,
    positive,
    results_are_in,
    run_cli,
    say,
)
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import (
    DTYPE_BYTES,
    TIERS,
    SavedPolicy,
    read_policy,
    without_unused_bits,
    write_policy,
)
from flexgen_h2o.core.errors import EXIT_DONE, DoesNotFitError, UsageError
from flexgen_h2o.core.files import DEFAULT_OFFLOAD_DIR, check_writable, usable_path
from flexgen_h2o.core.settings import NEW_TOKENS, ORIGINAL
from flexgen_h2o.flags import (
    EVICTION_FLAGS,
    PLACEMENT,
    SHOWN_OF_ENGINE,
    RunTarget,
    add_engine_flags,
    add_eviction_flags,
    as_flags,
    budget_of,
    check_gpu,
    check_positions,
    eviction_of,
    given_flags,
    is_folder,
    model_of,
    note_whole_ram,
    policy_of,
    say_idle_flags,
    value_of,
)
from flexgen_h2o.kvcache.eviction.mixes import table_for
from flexgen_h2o.parser import FILES, KV, WORKLOAD, OneLineParser, as_typed
from flexgen_h2o.planner.cost_model import Machine
from flexgen_h2o.planner.lp import SearchProgress
from flexgen_h2o.planner.report import SearchResult, to_json, to_text

if TYPE_CHECKING:
    from flexgen_h2o.core.config import Policy
    from flexgen_h2o.core.model import ModelSpec
    from flexgen_h2o.planner.lp import Budgets, SearchSpace
    from flexgen_h2o.planner.profile import HardwareProfile
    from flexgen_h2o.planner.search import Plan
    from flexgen_h2o.tiers.device import NewFiles

SEARCHED_PROMPTS = 1024
COMPRESSION = ("compress_weight", "compress_cache")
OUTPUTS = ("output", "trace", "plot")
SHOWN = (
    *SHOWN_OF_ENGINE,
    "--num-prompts",
    "--prompt-len",
    "--max-tokens",
    "--hardware",
    "--kv-loss",
    "--save-plan",
    "--json",
)
EXAMPLES = (
    "flexgen-h2o plan smollm2-135m --num-prompts 1000",
    "flexgen-h2o plan Qwen/Qwen3-30B-A3B --ram 12GiB --num-prompts 10000 --prompt-len 512 "
    "--max-tokens 128",
    "flexgen-h2o plan facebook/opt-30b --hardware t4 --num-prompts 1000 --save-plan plan.json",
)
# The dtype of OPT checkpoints, and the one that a CPU computes them in.
USUAL_DTYPES = ("float16", "bfloat16")
# Flags of flex_opt besides the policy. The command that runs the plan repeats those that were
# given.
REPEATED = (
    "--path",
    "--revision",
    "--max-model-len",
    "--offload-dir",
    "--device-mem",
    "--host-mem",
    "--disk-mem",
    "--eviction",
    *EVICTION_FLAGS.values(),
)
MAX_PROMPTS = 10**9
THIS_MACHINE = "this machine"  # name of this machine's profile
# Share of a plan's time: a flag that changes precision is named if it saves a tenth.
WORTH_A_FLAG = 0.9
OF_EVICTION = ("--eviction", *EVICTION_FLAGS.values())


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    return run_cli("policy_search", _run, argv)


def _parser() -> OneLineParser:
    prog = f"flexgen-h2o {own_name('plan')}"
    parser = OneLineParser(
        prog=prog, synopsis="MODEL [flags]", description=__doc__, shown=SHOWN, examples=EXAMPLES
    )
    add_engine_flags(parser, dry_run=False)
    add_eviction_flags(parser)
    add = parser.section(WORKLOAD).add_argument
    add(
        "--num-prompts",
        type=positive,
        metavar="N",
        help=f"prompts in all ({SEARCHED_PROMPTS}; with a given plan one batch)",
    )
    add("--prompt-len", type=positive, default=512, metavar="N", help="tokens of a prompt (512)")
    add(
        "--max-tokens",
        dest="gen_len",
        type=positive,
        default=NEW_TOKENS,
        metavar="N",
        help=f"new tokens of a prompt ({NEW_TOKENS}, or what the model's positions leave)",
    )
    parser.section(KV).add_argument(
        "--kv-loss",
        choices=("none", "small"),
        help="small: keep all KV entries, and take the fastest compression that was measured to "
        "lose little",
    )
    files = parser.section(FILES).add_argument
    files(
        "--save-plan",
        dest="output",
        type=file_name,
        metavar="FILE",
        help="write the plan, for --plan FILE",
    )
    files("--json", action="store_true", help="print one JSON object instead of the tables")
    files(
        "--trace",
        type=file_name,
        metavar="FILE",
        help="write a Chrome trace of the first batch as it is simulated",
    )
    picture = "write a picture of the same (.png, .svg; needs matplotlib: the extra `plot`)"
    files("--plot", type=file_name, metavar="FILE", help=picture)
    parser.set_defaults(profile=None, check=interrupts.check, spec=None)  # set by `ask`
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    _check(args)
    _take_workload(args)
    if not args.json:
        results_are_in(args.output)
    args.check = SearchProgress(_say)
    answer = _fastest(args)
    if args.json:
        print(json.dumps(to_json(answer), indent=1, allow_nan=False))
    if answer.plan is None:
        raise DoesNotFitError(answer.problem or "nothing fits")
    spec = answer.space.spec
    machine = answer.space.machine
    target = RunTarget(spec, machine.device_is_host, machine.has_card)
    say_idle_flags("policy_search", args, target)
    if not args.json:
        print(_text(args, answer))
    words = sys.argv[1:] if argv is None else argv
    _write(args, answer, f"python -m flexgen_h2o.policy_search {shlex.join(words)}")
    return EXIT_DONE


def _take_workload(args: argparse.Namespace) -> None:
    """Use the prompts of --plan FILE if no flag gives another number or length, and note it."""
    if args.policy in (None, "auto"):
        return
    saved = read_policy(usable_path(args.policy, "--policy")).workload or {}
    taken = []
    for field in ("num_prompts", "prompt_len", "gen_len"):
        value = saved.get(field)
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(
                f"--policy {args.policy}: workload: {field} is {value!r:.60}, and must be a count; "
                "mend it"
            )
        if field not in args.given and value is not None:
            setattr(args, field, value)
            taken.append(f"{'--max-tokens' if field == 'gen_len' else flag_of(field)} {value}")
    if taken:
        note(
            "policy_search",
            f"--policy {args.policy}: {', '.join(taken)} are those that it was found for",
        )
    eviction = saved.get("eviction")
    name = eviction.get("name") if isinstance(eviction, dict) else None
    if name not in (None, "full") and all(value_of(args, flag) is None for flag in OF_EVICTION):
        note(
            "policy_search",
            f"--policy {args.policy}: was found with {name}, and this is the full cache",
        )


def ask(
    words: Sequence[str],
    profile: HardwareProfile,
    check: Callable[[], None],
    spec: ModelSpec | None = None,
) -> dict[str, Any]:
    """Answer a question of a page: return what --json prints for a machine of this profile.

    words: of the command line.
    check: called between candidates; an error that it raises ends the search.
    spec: of the model; None if the words say where the model is.

    If there is a plan, add `text`, the tables, and `command`, which runs a file of requests with
    it. Nothing is measured, and no file is written. A UsageError names the flag.
    """
    args = _parser().parse_args(words)
    args.profile = profile
    args.check = check
    args.spec = spec
    _check(args)
    answer = _fastest(args)
    if answer.plan is None:
        return to_json(answer)
    more = f"-i requests.jsonl -o answers.jsonl --max-tokens {args.gen_len}"
    command = _with_policy("generate", more, args, answer)
    return {**to_json(answer), "text": _text(args, answer), "command": command}


def nearest_machine(found: Mapping[str, HardwareProfile]) -> str:
    """Return the name of the profile that is most like this machine.

    It is this machine's own if there is one. Otherwise it is one with a GPU if this machine has
    one, and of these the one with the most similar memory.
    """
    from flexgen_h2o.planner.profile import NOMINAL
    from flexgen_h2o.tiers.device import open_device, whole_host_bytes

    if THIS_MACHINE in found:
        return THIS_MACHINE
    device = open_device("auto", separate_budget=False)
    here = {"host": whole_host_bytes(), "device": 0 if device.is_host else device.free_bytes() or 0}

    def distance(name: str) -> tuple[bool, bool, float]:
        one = found[name]
        there = {"host": one.host_mem_bytes, "device": one.device_mem_bytes}
        apart = (abs(math.log(max(1, there[tier]) / here[tier])) for tier in here if here[tier])
        return one.device_is_host is not device.is_host, one.machine == NOMINAL, sum(apart)

    return min(found, key=distance)


def machines(offload_dir: str | None) -> dict[str, HardwareProfile]:
    """Return profiles by name: this machine's if measured, shipped ones, and round figures."""
    from flexgen_h2o.planner.measure.run import cached_profile
    from flexgen_h2o.planner.profile import SHIPPED, nominal_profile, read_profile

    found: dict[str, HardwareProfile] = {}
    with contextlib.suppress(UsageError):  # no such folder: it was never measured
        kept = cached_profile(
            "auto", Path(usable_path(offload_dir or DEFAULT_OFFLOAD_DIR, "--offload-dir"))
        )
        found |= {} if kept is None else {THIS_MACHINE: kept}
    found |= {path.stem: read_profile(path) for path in sorted(SHIPPED.glob("*.json"))}
    return found | {f"some {kind}": nominal_profile(kind == "CPU") for kind in ("card", "CPU")}


def _check(args: argparse.Namespace) -> None:
    """Check everything that can be wrong with flags and files, before anything is loaded."""
    if args.dtype != "auto" and args.dtype not in DTYPE_BYTES:
        raise UsageError(f"--dtype {args.dtype}: not one of auto, {', '.join(DTYPE_BYTES)}")
    if args.hardware is not None and args.device != "auto":
        raise UsageError(
            f"--device {args.device} and --hardware: the profile says which device; leave --device "
            "out"
        )
    if args.hardware is None and args.profile is None:
        check_gpu(args)
    for name in OUTPUTS:
        if getattr(args, name) is not None:
            setattr(args, name, usable_path(getattr(args, name), flag_of(name)))
            check_writable(getattr(args, name), flag_of(name))
    check_separate(args, ("policy", "hardware"), OUTPUTS)
    if args.num_prompts is not None and args.num_prompts > MAX_PROMPTS:
        raise UsageError(f"--num-prompts {args.num_prompts}: must be at most {MAX_PROMPTS}")
    if args.plot is not None:
        check_picture(args.plot)
    if args.kv_loss is not None:
        _check_kv_loss(args)


def _check_kv_loss(args: argparse.Namespace) -> None:
    for flag in (
        "--policy",
        "--compress-cache",
        "--attn-sparsity",
        "--eviction",
        *EVICTION_FLAGS.values(),
    ):
        if value_of(args, flag) not in (None, "auto", ORIGINAL):
            raise UsageError(
                f"--kv-loss {args.kv_loss}: says how KV is held and read, and so does {flag}; "
                "leave one of them out"
            )
    if args.kv_loss == "small" and any(getattr(args, name) is not None for name in PLACEMENT):
        raise UsageError("--kv-loss small: is for a search; leave the placement out")


def _question(args: argparse.Namespace) -> SearchResult:
    """Return the question, without an answer yet."""
    asked_policy, searched = policy_of(args)
    policy = asked_policy
    eviction = eviction_of(args, policy)
    from flexgen_h2o.engine.memory_plan import checkpoint_bytes, kv_sizes_of, packed_bytes
    from flexgen_h2o.engine.workload import workload_of
    from flexgen_h2o.kvcache.eviction.of_model import check_for_model, fitted
    from flexgen_h2o.models.load import find_spec
    from flexgen_h2o.planner.lp import SearchSpace

    spec = args.spec or find_spec(
        model_of(args), args.path, args.revision, args.offload_dir, args.max_model_len
    )
    if "gen_len" not in args.given:
        room = spec.max_positions - args.prompt_len + 1
        args.gen_len = min(args.gen_len, max(1, room))
    check_positions(args, spec.name, spec.max_positions)
    check_for_model(eviction, spec, policy.compress_cache)
    # Its KV entries are counted in those bits.
    by_bytes = getattr(eviction, "kv_bytes", None) is not None
    eviction = fitted(eviction, spec, kv_sizes_of(spec, policy))
    compress = [
        name
        for name in COMPRESSION
        if searched and getattr(args, name) and not (by_bytes and "cache" in name)
    ]
    # Bits alone are required, as in a run. With its switch the search may also leave them out.
    if searched:
        weight = policy.compress_weight and "compress_weight" not in compress
        cache = policy.compress_cache and "compress_cache" not in compress
        policy = replace(policy, compress_weight=weight, compress_cache=cache)
    rows = args.num_prompts or (SEARCHED_PROMPTS if searched else policy.block_size)
    need = workload_of(
        eviction, rows, {(args.prompt_len, args.gen_len)}, spec.num_blocks, spec.windows
    )
    # What does not fit the disk is said before the machine is measured.
    is_elsewhere = args.profile is not None or args.hardware is not None
    download = 0 if is_elsewhere else _download_bytes(args, spec)
    files = [] if is_elsewhere else _new_files(args, spec, asked_policy, download)
    itemsize = _itemsize(args)
    stored = checkpoint_bytes(spec, itemsize) + packed_bytes(spec, asked_policy, itemsize)
    machine, budgets = _machine(args, files, stored)
    space = SearchSpace(spec, need, policy, machine, budgets, compress, args.check)
    return SearchResult(
        space,
        eviction.to_json(),
        searched,
        download_bytes=download,
        is_elsewhere=is_elsewhere,
    )


def _download_bytes(args: argparse.Namespace, spec: ModelSpec) -> int:
    """Return the bytes of a checkpoint that a run on this machine would download first."""
    from flexgen_h2o.checkpoint.resolve import asks_random, is_downloaded
    from flexgen_h2o.engine.memory_plan import checkpoint_bytes

    if asks_random(args.path) or is_folder(args) or is_downloaded(args.model, args.revision):
        return 0
    return checkpoint_bytes(spec, _itemsize(args))


def _new_files(
    args: argparse.Namespace, spec: ModelSpec, policy: Policy, download: int
) -> list[NewFiles]:
    """Return what a run on this machine writes to disks before it begins.

    Random weights are not counted: who asks for them measures speed, and plans for the model.
    """
    from flexgen_h2o.checkpoint.resolve import asks_random
    from flexgen_h2o.planner.plans import new_files

    folder = usable_path(args.offload_dir or DEFAULT_OFFLOAD_DIR, "--offload-dir")
    if asks_random(args.path):
        return []
    return new_files(args.model, spec, policy, _itemsize(args), folder, download)


def _itemsize(args: argparse.Namespace) -> int:
    """Return the likely bytes of a number, before it is known what the machine computes in."""
    return DTYPE_BYTES.get(args.dtype, DTYPE_BYTES[USUAL_DTYPES[0]])


def _machine(
    args: argparse.Namespace, files: Sequence[NewFiles], stored: int
) -> tuple[Machine, Budgets]:
    """Return the machine of the run, and the bytes that it may hold there.

    files: written on this machine before a run. stored: bytes of the model on another machine.
    """
    is_named = args.profile is not None or args.hardware is not None
    profile, device_is_host, budgets = (
        _named_machine(args, stored) if is_named else _this_machine(args, files)
    )
    return Machine(profile, _dtype(args, profile), device_is_host), budgets


def _named_machine(args: argparse.Namespace, stored: int) -> tuple[HardwareProfile, bool, Budgets]:
    """Return the profile and the budgets of the machine that --hardware names.

    stored: bytes of the model on its disk. They count if the user said how large that is.
    """
    from flexgen_h2o.core.units import DiskBudget, format_bytes, format_free, less_margin
    from flexgen_h2o.planner.measure.run import cached_profile
    from flexgen_h2o.planner.parts import STATED, find_hardware

    folder = usable_path(args.offload_dir or DEFAULT_OFFLOAD_DIR, "--offload-dir")
    profile = args.profile or find_hardware(args.hardware, partial(cached_profile, "auto", folder))
    asked = budget_of(args)
    if profile.device_is_host and asked.device is not None:
        raise UsageError(
            f"--device-mem {args.device_mem}: {profile.machine} has no GPU; leave it out, or "
            "name a machine that has one, such as --hardware t4"
        )
    there = {tier: less_margin(getattr(profile, f"{tier}_mem_bytes")) for tier in TIERS}
    if profile.notes.get("disk_mem_bytes") == STATED:
        free = profile.disk_mem_bytes - stored
        if free < 0:
            raise DoesNotFitError(
                f"--hardware {args.hardware}: the model needs {format_bytes(stored)} of the disk, "
                f"{format_free(profile.disk_mem_bytes, stored)}; name a larger disk=SIZE"
            )
        there["disk"] = DiskBudget(less_margin(free), free)
    budgets = {
        tier: free if (given := getattr(asked, tier)) is None else given
        for tier, free in there.items()
    }
    if isinstance(there["disk"], DiskBudget):  # no flag makes the disk larger
        budgets["disk"] = DiskBudget(min(budgets["disk"], there["disk"].free), there["disk"].free)
    is_host = profile.device_is_host
    return profile, is_host, {**budgets, "device": 0} if is_host else budgets


def _this_machine(
    args: argparse.Namespace, files: Sequence[NewFiles]
) -> tuple[HardwareProfile, bool, Budgets]:
    from flexgen_h2o.planner.measure.run import profile_of_this_machine
    from flexgen_h2o.tiers.device import less_new_files, open_device, resolve_budgets

    folder = usable_path(args.offload_dir or DEFAULT_OFFLOAD_DIR, "--offload-dir")
    device = open_device(args.device, separate_budget=False)
    note_whole_ram(args)
    budgets = resolve_budgets(budget_of(args), device, folder)
    disk = less_new_files(budgets["disk"], folder, files, args.disk_mem is not None)
    budgets = {**budgets, "disk": disk}
    return (
        profile_of_this_machine(args.device, folder, _say, measure_missing=True),
        device.is_host,
        budgets,
    )


def _dtype(args: argparse.Namespace, profile: HardwareProfile) -> str:
    """Return the dtype of the run: that of the flags or of the model, if the machine has it."""
    from flexgen_h2o.models.load import find_dtype

    if args.dtype == "auto":
        known = [*USUAL_DTYPES, *profile.compute]
        if args.spec is None:
            own = find_dtype(model_of(args), args.path, args.revision, args.offload_dir)
            known = [own or known[0], *known]
        return next(name for name in known if name in profile.compute)
    profile.rates(args.dtype)
    return str(args.dtype)


def _fastest(args: argparse.Namespace) -> SearchResult:
    """Return the answer to what was asked.

    With --kv-loss small it is the fastest way to keep all KV entries whose loss is small by the
    model's table, if any fits.
    """
    question = _question(args)
    if args.kv_loss != "small":
        return _with_details(_answered(question))
    answers = []
    table = table_for(args.model, args.offload_dir)
    for kept in table.small_losses:
        space = question.space
        tried = replace(
            question, space=replace(space, base=replace(space.base, **kept.settings)), kv_loss=kept
        )
        answers.append(_answered(tried))
    fitting = [answer for answer in answers if answer.plan is not None]
    found = min(
        fitting,
        key=lambda answer: answer.plan.prediction.total_s if answer.plan else 0.0,
        default=answers[-1],
    )
    return _with_details(replace(found, seconds=sum(answer.seconds for answer in answers)))


def _answered(question: SearchResult) -> SearchResult:
    """Return the question with the fastest plan, or with the reason why there is none."""
    from flexgen_h2o.planner.search import evaluate, search

    space = question.space
    searched = question.searched
    began = time.perf_counter()
    try:
        plan = search(space) if searched else evaluate(space, space.base)
    except DoesNotFitError as error:
        return replace(question, seconds=time.perf_counter() - began, problem=as_typed(str(error)))
    seconds = time.perf_counter() - began
    # A search need not use the bits that it may use.
    plan = replace(plan, policy=without_unused_bits(plan.policy))
    return replace(question, plan=plan, seconds=seconds)


def _with_details(answer: SearchResult) -> SearchResult:
    """Return the answer with details of the plan besides its speed.

    They take longer than the search, so they are computed only for the plan that is shown.
    """
    from flexgen_h2o.planner.search import disk_reads, sensitivity, worth_more

    if answer.plan is None:
        return answer
    space = answer.space
    policy = answer.plan.policy
    reads = disk_reads(space, policy)
    return replace(
        answer,
        s_per_gib=sensitivity(space, answer.plan),
        disk_read_bytes=reads,
        more=worth_more(space, reads, answer.plan.seconds) if answer.searched else None,
        faster=_faster(answer) if answer.searched else None,
    )


def _faster(answer: SearchResult) -> tuple[str, float] | None:
    """Return the flag that shortens a run bound by compute, with its predicted seconds.

    None if it does not shorten the run.
    """
    from flexgen_h2o.planner.search import search

    space = answer.space
    plan = answer.plan
    assert plan is not None
    found = plan.prediction
    seconds = {"prefill": found.prefill_s, "decode": found.decode_s}
    longest = max(seconds, key=lambda phase: seconds[phase])
    # No GPU has run products in int8, so what they would save there is not known.
    if (
        space.machine.has_card
        or "compute" not in found.binds(longest)
        or space.base.int8_compute
        or space.base.compress_weight
    ):
        return None
    base = replace(space.base, int8_compute=True)
    compress = [name for name in space.compress if name != "compress_weight"]
    try:
        tried = search(replace(space, base=base, compress=compress))
    except (DoesNotFitError, UsageError):
        return None
    is_faster = tried.prediction.total_s <= WORTH_A_FLAG * found.total_s
    return ("--int8-compute", tried.prediction.total_s) if is_faster else None


def _text(args: argparse.Namespace, answer: SearchResult) -> str:
    """Return the tables, with the benchmark of the plan's block as a command."""
    assert answer.policy is not None
    of_eviction = given_flags(args, ("--eviction", *EVICTION_FLAGS.values()))
    flags = " ".join(filter(None, [as_flags(answer.policy), of_eviction]))
    more = f"-i prompts.jsonl -o answers.jsonl --max-tokens {args.gen_len}"
    command = _with_policy("generate", more, args, answer)
    lengths = f"--prompt-len {args.prompt_len} --gen-len {args.gen_len}"
    benchmark = _with_policy("bench", lengths, args, answer)
    return to_text(answer, flags, command, benchmark)


def _with_policy(verb: str, more: str, args: argparse.Namespace, answer: SearchResult) -> str:
    """Return a command line that runs with the answer's policy.

    more: the verb's own flags.
    """
    assert answer.policy is not None
    words = [f"flexgen-h2o {verb}", shlex.quote(args.model), more, as_flags(answer.policy)]
    words.append(given_flags(args, REPEATED))
    if args.device != "auto":
        words.append(f"--device {args.device}")
    # A folder's own dtype may be another one.
    if args.dtype != "auto" or (args.spec is None and is_folder(args)):
        words.append(f"--dtype {answer.space.machine.dtype}")
    return " ".join(filter(None, words))


def _write(args: argparse.Namespace, answer: SearchResult, command: str) -> None:
    plan = answer.plan
    assert plan is not None
    if args.output is not None:
        model = answer.space.spec.name
        machine = answer.space.machine.profile.machine
        saved = SavedPolicy(
            plan.policy, model, answer.workload, machine, plan.prediction.to_json(), command
        )
        write_policy(args.output, saved)
        if not args.json:
            print(f"plan written to {args.output}; use it with --plan {args.output}")
    if args.trace is not None or args.plot is not None:
        _draw(args, answer.space, plan)


def _draw(args: argparse.Namespace, space: SearchSpace, plan: Plan) -> None:
    """Simulate the first block again, and write all its spans."""
    from flexgen_h2o.core.timeline import Timeline, around_prefill_end, draw_timeline
    from flexgen_h2o.engine.workload import even_blocks
    from flexgen_h2o.planner.predict import predict, walked_sweeps

    timeline = Timeline()
    timeline.keep_spans = True
    blocks = even_blocks(plan.policy, space.need)[:1]
    predict(space.costs(plan.policy), plan.memory, blocks, timeline.record)
    if args.trace is not None:
        timeline.write_chrome_trace(args.trace)
    if args.plot is not None:
        walked = walked_sweeps(space.need.gen_len)
        decoded = sum(span.name == "compute_layer decode" for span in timeline.spans)
        steps = decoded // max(1, len(walked) - 1)
        sweeps = ", ".join(map(str, walked))
        where = f"{space.spec.name} on {space.machine.profile.machine}"
        title = f"{where}, simulated passes {sweeps}\n{as_flags(plan.policy)}"
        draw_timeline(timeline.spans, args.plot, title, around_prefill_end(timeline.spans, steps))


def _say(line: str) -> None:
    say("policy_search", line)


if __name__ == "__main__":
    sys.exit(main())
