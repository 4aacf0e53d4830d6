"""Define the flags that describe an engine, read their values, and write a policy back as flags.

These are the flags of model, placement, budgets, eviction and sampling. Flags that fill a dataclass
are made from its fields. This module imports nothing heavy, so that `--help` and errors in flags
appear at once.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from flexgen_h2o.checkpoint.resolve import DUMMY, find_folder
from flexgen_h2o.cli_common import (
    boolean,
    file_name,
    flag_of,
    not_empty,
    note,
    number,
    positive,
    share,
)
from flexgen_h2o.core.config import COMPRESSION_OF, DTYPE_BYTES, MemoryBudget, Policy, read_policy
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import usable_path
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.settings import (
    GREEDY_BELOW,
    ORIGINAL,
    SIZES,
    EvictionSettings,
    SamplingParams,
)
from flexgen_h2o.core.units import format_bytes
from flexgen_h2o.engine.prompts import (
    Encode,
    object_of_json,
    prompts_from_python,
    read_prompts,
)
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.engine.workload import AutoPolicy
from flexgen_h2o.kvcache.eviction import POLICIES, Eviction, Full, check_name, make_eviction
from flexgen_h2o.kvcache.eviction.mixes import WHOLE, table_for
from flexgen_h2o.parser import (
    EVICTION,
    FILES,
    KV,
    MEMORY,
    MODEL,
    PLACEMENT_FLAGS,
    SAMPLING,
    OneLineParser,
)
from flexgen_h2o.synonyms import shown_name

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.models.load import Model
    from flexgen_h2o.planner.report import SearchResult


EVICTION_FLAGS = {f.name: f.metadata.get("flag", flag_of(f.name)) for f in fields(EvictionSettings)}
PLACEMENT = ("gpu_batch_size", "num_gpu_batches", "percent")
_FLAGS = {
    f.name: f.metadata.get("flag", flag_of(f.name))
    for kind in (Policy, EvictionSettings)
    for f in fields(kind)
}
_FIELDS = re.compile("|".join(name for name in _FLAGS if "_" in name))
# Arguments of a flag that help does not show.
HIDDEN: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
THINKING = "enable_thinking"  # variable of chat templates, as Qwen3 and others name it
SCRIPTS_RATIO = 0.1  # share of heavy and of recent KV entries in h2o_hf's scripts
# Sections of help for settings that are not in the section of their dataclass.
SECTION_OF = {
    "weight_bits": MEMORY,
    "cache_bits": KV,
    "cache_window": KV,
    "cache_rotation": KV,
    "kv_bytes": KV,
}
# Flags of the engine and of sampling that `--help` shows. `--help-all` shows the others too.
SHOWN_OF_ENGINE = (
    "--model",
    "--ram",
    "--gpu-mem",
    "--weight-bits",
    "--plan",
    "--kv-size",
    "--kv-bits",
)
SHOWN_OF_SAMPLING = ("--max-tokens", "--temperature", "--top-p", "--seed", "--stop")


@contextlib.contextmanager
def naming_flags(**flags: str) -> Iterator[None]:
    """Replace a field's name at the start of a UsageError by its flag.

    `top_p: ...` becomes `--top-p: ...`. Fields of the policy and of eviction become flags in the
    rest of the message too.
    """
    try:
        yield
    except UsageError as error:
        field, _, rest = str(error).partition(":")
        # The message begins with a flag or is a sentence.
        if field.startswith("--") or field.count(" ") > 2:
            raise
        rest = _FIELDS.sub(lambda found: _FLAGS[found[0]], rest)
        raise UsageError(f"{flags.get(field, flag_of(field))}:{rest}") from error


def add_flag(parser: OneLineParser, section: str, flag: str, **arguments: Any) -> argparse.Action:
    """Add a flag under the name that help shows. Its field has its own: `--host-mem` sets
    `host_mem`.
    """
    field = flag.removeprefix("--").replace("-", "_")
    return parser.section(section).add_argument(shown_name(flag), dest=field, **arguments)


def add_flags_of(
    parser: OneLineParser,
    section: str,
    settings: type,
    only_given: bool = True,
    without: abc.Sequence[str] = (),
) -> None:
    """Add a flag for each `setting` of a dataclass that has a help text.

    only_given: every default is None, so that a flag that was given can be told from one that was
    not.
    without: fields that have no flag.
    """
    for f in fields(settings):
        if f.metadata.get("help") and f.name not in without:
            default = (
                None
                if only_given
                else list(f.default)
                if isinstance(f.default, tuple)
                else f.default
            )
            flag = f.metadata.get("flag", flag_of(f.name))
            where = SECTION_OF.get(f.name, section)
            add_flag(parser, where, flag, default=default, help=_help_of(f), **_arguments_of(f))


def _arguments_of(f: Field[Any]) -> dict[str, Any]:
    """Return what argparse must know of a field, by its type."""
    kind = re.findall("bool|int|float|str", str(f.type))[0]
    if kind == "bool" and not f.default:
        return {"action": "store_true"}
    more = {
        name: f.metadata[name]
        for name in ("action", "choices", "metavar", "nargs")
        if name in f.metadata
    }
    if kind == "bool":
        return {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
    if kind == "int":
        is_count = f.metadata.get("low") == 1 and f.default is not None
        return {"type": positive if is_count else int, "metavar": "N", **more}
    if kind == "float":
        return {"type": share if f.metadata.get("share") else number, "metavar": "SHARE", **more}
    return {"type": str, **more}


def _help_of(f: Field[Any]) -> str:
    """Return the help of a setting's flag, with its default if that is to be shown."""
    text: str = f.metadata["help"]
    if "usual" in f.metadata:
        text += f" ({f.metadata['usual']})"
    elif f.default not in (None, False) and not isinstance(f.default, tuple):
        text += f" ({_as_text(f.default)})"
    return text.replace("%", "%%")


def add_engine_flags(
    parser: OneLineParser,
    dry_run: bool = True,
    positional: bool = True,
    without: abc.Sequence[str] = (),
) -> None:
    """Add the flags of every command that runs the engine: model, tiers and plan.

    dry_run: also add --dry-run, which `open_llm` handles.
    positional: accept MODEL without a flag as well.
    without: fields of `Policy` that the command sets by itself.

    FlexGen's flags keep their names.
    """
    model = parser.section(MODEL).add_argument
    what = "model folder, hub id, or smollm2-135m"
    model("-m", "--model", metavar="MODEL", help=f"{what}; also without -m" if positional else what)
    if positional:
        parser.take_positional_model()
    model("--path", type=not_empty, help="folder with checkpoints")
    random_weights = "random weights at the model's true shape, to measure speed"
    model("--random-weights", dest="path", action="store_const", const=DUMMY, help=random_weights)
    model("--revision", type=not_empty, help="branch, tag or commit of a hub id")
    length = "most tokens of a prompt and its answer (the model's)"
    model("--max-model-len", type=positive, metavar="N", help=length)
    model("--device", default="auto", help="auto, cpu or cuda (auto)")
    model(
        "--dtype", default="auto", help=f"auto, {', '.join(DTYPE_BYTES)} (auto: the checkpoint's)"
    )
    for f in fields(MemoryBudget):
        add_flag(parser, MEMORY, f"--{f.name}-mem", metavar="SIZE", help=f.metadata["help"])
    where = (
        "folder for what does not fit in memory, and for converted weights "
        "(~/flexgen_h2o_offload_dir)"
    )
    add_flag(parser, MEMORY, "--offload-dir", type=not_empty, metavar="DIR", help=where)
    plan = "a file that `plan --save-plan` wrote, or auto (auto)"
    add_flag(parser, MEMORY, "--policy", metavar="FILE", help=plan)
    if dry_run:
        dry = "print the plan and end; no weights are read"
        add_flag(parser, MEMORY, "--dry-run", action="store_true", help=dry)
    profile = (
        "machine of the plan: a profile file, a shipped one's name, or parts such as "
        "gpu=rtx-4090,cores=16,ram=64GiB,disk-gbps=7 (this one)"
    )
    add_flag(parser, PLACEMENT_FLAGS, "--hardware", metavar="MACHINE", help=profile)
    add_flags_of(parser, PLACEMENT_FLAGS, Policy, without=without)


def add_eviction_flags(parser: OneLineParser) -> None:
    """Add the flags for which KV entries are kept."""
    add_flags_of(parser, EVICTION, EvictionSettings)
    which = (
        f"which KV entries stay: {', '.join(POLICIES)} (full; h2o if a flag of this section is "
        "given)"
    )
    add_flag(parser, EVICTION, "--eviction", metavar="NAME", help=which)


def add_sampling_flags(parser: OneLineParser) -> None:
    """Add the flags for how tokens are chosen and where an answer ends."""
    add_flags_of(parser, SAMPLING, SamplingParams, only_given=False)


def add_template_flags(parser: OneLineParser) -> None:
    """Add the flags for the variables of the chat template."""
    add = parser.section(FILES).add_argument
    add(
        "--no-thinking",
        action="store_true",
        help="answer without thinking first, as Qwen3 can (enable_thinking of the chat template)",
    )
    add(
        "--chat-template-kwargs",
        type=_json_object,
        metavar="JSON",
        help="variables of the chat template; those of a request come first",
    )


def _json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a flag gives."""
    try:
        return object_of_json(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a JSON object; write for example '{{\"{THINKING}\": false}}'"
        ) from error


def template_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the variables of the chat template that the flags set."""
    given: dict[str, Any] = vars(args).get("chat_template_kwargs") or {}
    if not vars(args).get("no_thinking"):
        return given
    if given.get(THINKING):
        raise UsageError(f"--no-thinking and --chat-template-kwargs {THINKING}: give one of them")
    return {**given, THINKING: False}


def add_max_tokens_flag(parser: OneLineParser, default: int | None, help: str) -> None:
    """Add --max-tokens.

    help: what the number limits.
    """
    shown = "" if default is None else f" ({default})"
    add_flag(
        parser,
        SAMPLING,
        "--gen-len",
        type=positive,
        default=default,
        metavar="N",
        help=f"{help}{shown}",
    )


def model_of(args: argparse.Namespace) -> str:
    """Return the name of the model. Raise UsageError if there is none."""
    if args.model is None:
        raise UsageError(
            "MODEL: is missing; name a model folder, a hub id, or smollm2-135m, which "
            "scripts/quickstart.sh fetches"
        )
    model: str = args.model
    return model


def find_model_of(args: argparse.Namespace) -> Model:
    """Return the model that the flags name, with its tokenizer and without weights."""
    from flexgen_h2o.models.load import find_model

    return find_model(
        model_of(args),
        args.path,
        args.revision,
        offload_dir=args.offload_dir,
        max_model_len=args.max_model_len,
    )


def budget_of(args: argparse.Namespace) -> MemoryBudget:
    return MemoryBudget(args.device_mem, args.host_mem, args.disk_mem)


def note_whole_ram(args: argparse.Namespace) -> None:
    """Print a note, once, if the limit for RAM is above what this machine has."""
    from flexgen_h2o.tiers.device import whole_host_bytes

    asked = budget_of(args).host
    if asked is None or vars(args).get("has_noted_ram"):
        return
    args.has_noted_ram = True
    whole = whole_host_bytes()
    if asked > whole:
        note(
            "flexgen-h2o",
            f"--host-mem {args.host_mem}: this machine has {format_bytes(whole)}, which is the "
            "limit",
        )


def check_gpu(args: argparse.Namespace) -> None:
    """Raise UsageError if --gpu-mem is given for a run that has no GPU."""
    from flexgen_h2o.tiers.device import may_use_card, open_device

    if args.device_mem is None or not open_device(args.device, separate_budget=False).is_host:
        return
    why = "there is none here" if may_use_card(args.device) else f"--device {args.device} uses none"
    raise UsageError(
        f"--device-mem {args.device_mem}: is for a GPU, and {why}; --host-mem limits the memory of "
        "this run. To plan for a machine with a GPU, name it: flexgen-h2o plan --hardware t4"
    )


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling that the flags ask for. A UsageError names the flag."""
    given = {f.name: getattr(args, f.name) for f in fields(SamplingParams) if f.metadata["help"]}
    with naming_flags(max_tokens="--gen-len"):
        return SamplingParams(args.gen_len, **given)


def open_llm(
    args: argparse.Namespace,
    policy: Policy,
    is_auto: bool,
    eviction: Eviction,
    may_stand_in: bool = False,
) -> LLM:
    """Return an LLM with the model and tiers that the flags ask for.

    policy, is_auto: as `policy_of` returns them.
    may_stand_in: without a GPU, --device-mem is the budget of a tier of ordinary memory, as in
    FlexGen. Otherwise it is refused.

    With --dry-run the command ends when the engine would be opened for the first time.
    """
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.models import check_family

    if not may_stand_in:
        check_gpu(args)
    note_whole_ram(args)
    llm = LLM(
        model_of(args),
        AutoPolicy(policy) if is_auto else policy,
        eviction,
        device=args.device,
        dtype=args.dtype,
        budget=budget_of(args),
        offload_dir=args.offload_dir,
        path=args.path,
        revision=args.revision,
        hardware=args.hardware,
        on_plan=_end_with if vars(args).get("dry_run") else None,
        max_model_len=args.max_model_len,
        chat_template_kwargs=template_options_of(args),
    )
    llm.tests_bits = False  # commands that measure or answer at once do not test the bits
    if vars(args).get("model_family") is not None:
        try:
            check_family(llm.model.spec, args.model_family, args.given["model_family"])
        except UsageError:
            llm.close()
            raise
    return llm


def _end_with(answer: SearchResult) -> NoReturn:
    """Print the plan and end the command, for --dry-run."""
    from flexgen_h2o.planner.report import to_text

    assert answer.plan is not None
    print(to_text(answer, as_flags(answer.plan.policy)))
    raise SystemExit(EXIT_DONE)


def add_prompt_flags(parser: OneLineParser, without: str) -> None:
    """Add the flags for the user's own prompts.

    without: what the command uses if none is given.
    """
    add = parser.section(FILES).add_argument
    add(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help=f"a prompt; may be repeated ({without})",
    )
    add(
        "--prompts",
        type=file_name,
        metavar="FILE",
        help=".txt (one prompt per line) or .jsonl (prompt or prompt_token_ids)",
    )


def turn_format(text: str) -> str:
    """Return what a turn of a conversation becomes, with newlines for its `\\n`."""
    if "{turn}" not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no {{turn}} in it; write {{turn}} where the message goes"
        )
    return text.replace(r"\n", "\n")


def prompts_of(args: argparse.Namespace, model: Model, texts: abc.Sequence[str]) -> list[Sequence]:
    """Return the prompts of --prompts FILE, or of `texts` without it. A UsageError names the flag.

    With --chat each text is a user's message.
    """
    encode: Encode | None = model.encode if model.tokenizer is not None else None
    if vars(args).get("chat"):
        model.check_chat()
        encode = model.encode_message
    if args.prompts is not None:
        return read_prompts(args.prompts, encode, model.spec.vocab_size)
    if encode is None:
        raise UsageError(
            f"--model {model.name}: has no tokenizer; give --prompts FILE.jsonl with "
            "prompt_token_ids"
        )
    with naming_flags(**{f"prompts[{i}]": "--prompt" for i in range(len(texts))}):
        return prompts_from_python(texts, encode, model.spec.vocab_size)


def is_folder(args: argparse.Namespace) -> bool:
    """Return whether --model, or --path, names a local folder or a model that is kept in one."""
    from flexgen_h2o.models.named import NAMED

    return args.model in NAMED or find_folder(args.model, args.path) is not None


def _is_rolling(args: argparse.Namespace) -> bool:
    """Return whether the flags ask for rolling positions, in either of the two ways to write it."""
    given = vars(args)
    return given.get("positions") == "rolling" or "positions=rolling" in (
        given.get("eviction") or ""
    )


def check_positions(args: argparse.Namespace, model: str, positions: int) -> None:
    """Raise UsageError if --prompt-len and --gen-len exceed the model's positions.

    The newest token needs no position. With --positions rolling no new token does.
    """
    new = 0 if _is_rolling(args) else args.gen_len - 1
    if args.prompt_len + new > positions:
        raise UsageError(
            f"--prompt-len {args.prompt_len} and --gen-len {args.gen_len}: {model} has {positions} "
            "positions; "
            "lower one of them"
        )


def eviction_of(args: argparse.Namespace, policy: Policy) -> Eviction:
    """Return the flags' eviction policy: h2o if they limit the KV cache, else the full cache."""
    _choose_small_cache(args)
    given = {field: value_of(args, flag) for field, flag in EVICTION_FLAGS.items()}
    given = {field: value for field, value in given.items() if value not in (None, ORIGINAL)}
    asked_for = [
        field for field, value in given.items() if value != "none"
    ]  # no default, typed out
    name = ("h2o" if asked_for else "full") if args.eviction is None else args.eviction
    check_name(name, f"--eviction {name}")
    if name == "full":
        if asked_for:
            raise UsageError(
                f"{EVICTION_FLAGS[asked_for[0]]} and --eviction full: give one of them"
            )
        return Full()
    if policy.attn_sparsity != 1:
        where = (
            "--attn-sparsity"
            if args.attn_sparsity is not None
            else f"--policy {args.policy}: attn_sparsity"
        )
        asked = "--eviction" if args.eviction is not None else EVICTION_FLAGS[asked_for[0]]
        if "kv_bytes" in given:  # it may have chosen the eviction policy
            asked = EVICTION_FLAGS["kv_bytes"]
        raise UsageError(
            f"{where}: reads a share of the full cache, and {asked} asks for {name}; leave one of "
            "them out"
        )
    own = (item.partition("=")[0] for item in name.partition(":")[2].split(","))
    with naming_flags(**EVICTION_FLAGS | {key: f"--eviction {name}: {key}" for key in own}):
        return make_eviction(name, **given)


def add_script_flags(parser: OneLineParser) -> None:
    """Add the flags that all scripts of h2o_hf and llama-recipes have. Help does not show them.

    Names like `--model_name` are read without this (synonyms.py).
    """
    # The scripts create this folder, which is a hub cache. `say_idle_flags` notes that it does not
    # exist.
    parser.add_argument(
        "--cache-dir",
        dest="path",
        type=lambda name: name if usable_path(name, "--cache-dir").is_dir() else None,
        **HIDDEN,
    )
    parser.add_argument("--no-cuda", dest="device", action="store_const", const="cpu", **HIDDEN)
    parser.add_argument("--fp16", dest="dtype", action="store_const", const="float16", **HIDDEN)


def add_h2o_hf_flags(parser: OneLineParser) -> None:
    """Add the flags of h2o_hf's scripts to a command that has the engine's flags.

    The scripts are run_lm_eval_harness.py, run_helm.py and run_text_generation.py. Help does not
    show their flags.
    """
    parser.add_argument("--enable-small-cache", action="store_true", **HIDDEN)
    parser.add_argument("--model-type", dest="model_family", **HIDDEN)
    add_script_flags(parser)


def _choose_small_cache(args: argparse.Namespace) -> None:
    """Fill in what h2o_hf's flags mean.

    `--enable_small_cache` is H2O, and a heavy ratio of 0 is "local". The scripts' ratios are 0.1
    each if they are not given.
    """
    sizes = [value_of(args, EVICTION_FLAGS[name]) for name in (*SIZES, "kv_budget", "kv_bytes")]
    if vars(args).get("enable_small_cache") and sizes[2:] == [None] * 4:
        args.hh_ratio = SCRIPTS_RATIO if args.hh_ratio is None else args.hh_ratio
        args.recent_ratio = SCRIPTS_RATIO if args.recent_ratio is None else args.recent_ratio
    if args.hh_ratio == 0 and (args.recent_ratio or args.recent_size):
        args.hh_ratio = None
        if args.eviction is None:
            args.eviction = "local:sinks=0"
        else:
            args.hh_size = 0


def policy_of(args: argparse.Namespace) -> tuple[Policy, bool]:
    """Return the policy to run with, and whether a search chooses its placement (`auto`).

    `--policy FILE` excludes all other policy flags. `--policy auto` goes with all but placement
    flags. Without `--policy`, a placement flag means FlexGen's defaults for the other placement
    flags. Raise UsageError for other mixtures. `--kv-bytes` without an eviction policy has chosen
    that policy and the compression of KV before.
    """
    _choose_mix(args)
    given = {
        f.name: getattr(args, f.name) for f in fields(Policy) if getattr(args, f.name) is not None
    }
    if "percent" in given:
        given["percent"] = tuple(given["percent"])
    placed = [name for name in PLACEMENT if name in given]
    if args.policy not in (None, "auto"):
        if given:
            raise UsageError(
                f"--policy {args.policy} and {flag_of(next(iter(given)))}: give one of them"
            )
        return read_policy(usable_path(args.policy, "--policy")).policy, False
    for bits in ("weight_bits", "cache_bits"):
        if bits in given:
            given[COMPRESSION_OF[bits]] = True
    for name in ("cache_window", "cache_rotation"):
        if name in given and "compress_cache" not in given:
            raise UsageError(
                f"{flag_of(name)} {_as_text(given[name])}: goes with --kv-bits; give both"
            )
    if args.policy == "auto" and placed:
        raise UsageError(f"--policy auto and {flag_of(placed[0])}: give one of them")
    with naming_flags():
        return Policy(**given), not placed


def _choose_mix(args: argparse.Namespace) -> None:
    """Fill in the eviction policy and the bits that --kv-bytes chooses, unless they are given."""
    share = vars(args).get("kv_bytes")
    if share is None or args.eviction is not None or not 0 < share <= 1:
        return
    mix = table_for(args.model, args.offload_dir).mix_of(share)
    args.eviction = mix.eviction
    if mix.cache_bits != WHOLE and args.compress_cache is None and args.policy in (None, "auto"):
        args.compress_cache = True
        if args.cache_bits is None:
            args.cache_bits = mix.cache_bits
            args.cache_window = mix.cache_window if args.cache_window is None else args.cache_window


def as_flags(policy: Policy) -> str:
    """Return a policy as flags that can be pasted: its placement, and switches that are not at
    default.
    """
    found = [f"--percent {' '.join(map(str, policy.percent))}"]
    usual = {f.name: f.default for f in fields(Policy) if f.name not in PLACEMENT}
    found += [
        f"{shown_name(flag_of(name))} {getattr(policy, name)}"
        for name in ("gpu_batch_size", "num_gpu_batches")
    ]
    for name, default in usual.items():
        value = getattr(policy, name)
        is_used = getattr(policy, COMPRESSION_OF[name]) if name in COMPRESSION_OF else True
        if value != default and is_used:
            found.append(flag_of(name) if value is True else f"{flag_of(name)} {_as_text(value)}")
    return " ".join(found)


def compression_flags(policy: Policy) -> str:
    """Return the flags of a policy that change what is computed, as text, or an empty text."""
    found: list[str] = (
        [f"--attn-sparsity {policy.attn_sparsity}"] if policy.attn_sparsity < 1 else []
    )
    for field, switch in COMPRESSION_OF.items():
        if getattr(policy, switch):
            found += [flag_of(switch)] * (flag_of(switch) not in found)
            value = getattr(policy, field)
            if value is not False:
                found.append(flag_of(field) if value is True else f"{flag_of(field)} {value}")
    return " ".join([*found, "--int8-compute"] if policy.int8_compute else found)


def value_of(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def given_flags(args: argparse.Namespace, flags: Iterable[str]) -> str:
    """Return those of `flags` that were given, as a command line. Their values are single words."""
    found = ((flag, value_of(args, flag)) for flag in flags)
    return " ".join(
        f"{shown_name(flag)} {_as_text(value)}" for flag, value in found if value is not None
    )


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))


@dataclass(frozen=True)
class RunTarget:
    """Model and device of a run. `say_notes` makes it of the open ones."""

    spec: ModelSpec | None = None  # None if no model is opened
    device_is_host: bool = False  # whether RAM is the device's memory
    has_card: bool = True  # whether there is a GPU
    model: Model | None = None  # None if no model is opened


# A function that returns why a flag has no effect, or an empty text if it has one.
Reason = Callable[[argparse.Namespace, RunTarget], str]


def say_idle_flags(command: str, args: argparse.Namespace, at: RunTarget | None = None) -> None:
    """Print a note on each given flag that has no effect, with the reason."""
    found: dict[str, list[str]] = {}
    reasons = WITHOUT_EFFECT.get(command, _ENGINE)
    for field, flag in args.given.items():
        reason_of = reasons.get(field, reasons.get("*"))
        reason = reason_of(args, at or RunTarget()) if reason_of is not None else ""
        if reason:
            found.setdefault(reason, []).append(flag)
    for reason, flags in found.items():
        note(
            command,
            f"{', '.join(flags)} {'have' if len(flags) > 1 else 'has'} no effect: {reason}",
        )


def say_notes(command: str, args: argparse.Namespace, llm: LLM) -> None:
    """Print notes on what may surprise about the model that `open_llm` opened with these flags.

    These are the model's notes, and flags that have no effect.
    """
    for line in llm.notes:
        note(command, line)
    device = llm.device
    at = RunTarget(llm.model.spec, device.is_host, device.card() is not None, llm.model)
    say_idle_flags(command, args, at)


def _not_of_hub(args: argparse.Namespace, at: RunTarget) -> str:
    if args.path is not None and DUMMY in args.path:
        return f"nothing is fetched with --path {args.path}"
    return f"{args.model} is a folder here, not of the hub" if is_folder(args) else ""


def _built_in(args: argparse.Namespace, at: RunTarget) -> str:
    from flexgen_h2o.models import built_in_spec

    known = built_in_spec(args.model) is not None
    return _not_of_hub(args, at) or (f"the shape of {args.model} is built in" if known else "")


def _not_in_path(args: argparse.Namespace, at: RunTarget) -> str:
    if args.path is None:  # --cache_dir comes from a script that would have created the folder
        return "there is no such folder yet"
    if DUMMY in args.path:
        return ""
    if find_folder(args.model, None) is not None:
        return f"--model {args.model} is a folder of its own"
    return f"{args.model} is not in it" if find_folder(args.model, args.path) is None else ""


_NO_MLP = "this model has experts in the place of MLPs"


def _one_step(args: argparse.Namespace, at: RunTarget) -> str:
    if at.spec is None or any(at.spec.mlp):
        return ""
    return (
        _NO_MLP
        if at.spec.experts
        else "attention and MLP of this model read the same hidden states"
    )


def _greedy(args: argparse.Namespace, at: RunTarget) -> str:
    return (
        f"nothing is drawn at --temperature {args.temperature:g}"
        if args.temperature < GREEDY_BELOW
        else ""
    )


def _beyond_positions(args: argparse.Namespace, at: RunTarget) -> str:
    if at.spec is None or _is_rolling(args) or args.max_len <= at.spec.max_positions:
        return ""
    return f"{at.spec.name} has {at.spec.max_positions} positions"


def _no_template(args: argparse.Namespace, at: RunTarget) -> str:
    """Return why nothing is put into the chat template. Empty if something may be."""
    given = vars(args)
    if at.model is None:
        return ""
    if not at.model.has_chat_template:
        return f"{at.model.name} has no chat template"
    if given.get("turn_format") is not None:
        return "--turn-format is used in place of the chat template"
    is_text = given.get("input") is None or given["input"].suffix.lower() == ".txt"
    if given.get("chat") is False and is_text:
        return "prompts are not put into the chat template"
    return ""


def _unread(args: argparse.Namespace, at: RunTarget, names: Iterable[str]) -> str:
    """Return which variables the chat template does not read. Empty if it reads all."""
    if at.model is None or (why := _no_template(args, at)):
        return "" if at.model is None else why
    unread = [name for name in names if not at.model.reads_in_template(name)]
    if not unread:
        return ""
    reason = f"the chat template of {at.model.name} does not read {', '.join(unread)}"
    if THINKING in unread and at.model.reads_in_template("reasoning_effort"):
        reason += "; it reads reasoning_effort, which --chat-template-kwargs can set"
    return reason


def _if(text: str, holds: Callable[[argparse.Namespace], object]) -> Reason:
    return lambda args, at: text if holds(args) else ""


_ENGINE: dict[str, Reason] = {
    "revision": _not_of_hub,
    "path": _not_in_path,
    "cpu_cache_compute": lambda args, at: (
        "device and host are one tier here" if at.device_is_host else ""
    ),
    "pin_weight": lambda args, at: "" if at.has_card else "there is no GPU here",
    "sep_layer": _one_step,
    "no_thinking": lambda args, at: _unread(args, at, [THINKING]),
    "chat_template_kwargs": lambda args, at: _unread(args, at, args.chat_template_kwargs),
    "expert_group": lambda args, at: (
        "this model has no experts" if at.spec is not None and not at.spec.experts else ""
    ),
}
_SAMPLING: dict[str, Reason] = {
    # 1 and 0 switch top-p and top-k off
    "top_p": lambda args, at: _greedy(args, at) if args.top_p not in (None, 1) else "",
    "top_k": lambda args, at: _greedy(args, at) if args.top_k else "",
    "seed": _greedy,
}
_ANSWERS = {**_ENGINE, **_SAMPLING}
_SHOWN = _if("--show NAME says which profile", lambda args: args.show)

# Reasons by command, then by the field of a flag; "*" is for all other fields. Other commands have
# _ENGINE. Sampling flags of batch apply to rows that do not set them: they always have an effect.
WITHOUT_EFFECT: Mapping[str, Mapping[str, Reason]] = {
    "flex_opt": {
        **_ANSWERS,
        "prompt_len": _if(
            "each prompt of --prompts keeps its own length", lambda args: args.prompts
        ),
        "ignore_eos": _if("no prompt of the benchmark ends early", lambda args: not args.prompts),
        "log_file": _if(
            "--no-log writes none", lambda args: args.no_log and args.log_file != "auto"
        ),
        "overlap": _if(
            "--debug-mode breakdown is serial",
            lambda args: args.overlap and args.debug_mode == "breakdown",
        ),
    },
    "chat": {**_ANSWERS, "max_len": _beyond_positions},
    "batch --status": {
        **dict.fromkeys(("output", "status"), lambda args, at: ""),
        "*": lambda args, at: "--status reads what --output says, and does nothing else",
    },
    "policy_search": {**_ENGINE, "revision": _built_in},
    "generate": _ANSWERS,
    "complete": _ANSWERS,
    "evaluate text": _ANSWERS,
    "evaluate attention": {
        **_ENGINE,
        **dict.fromkeys(
            ("sinks", "gen_len"), _if("nothing is removed", lambda args: not args.remove)
        ),
    },
    # With --text the seed is the bootstrap's, and the other sampling flags are refused.
    "evaluate streaming": {
        **_ANSWERS,
        "seed": lambda a, at: _greedy(a, at) if a.text is None else "",
    },
    "hardware": {"device": _SHOWN, "offload_dir": _SHOWN},
}
