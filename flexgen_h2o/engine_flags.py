"""The flags that describe an engine: model, placement, budgets, eviction, sampling; read, and written back as flags.

Imports nothing heavy, so that `--help` and wrong flags answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from flexgen_h2o.config import BITS, BITS_OF, DTYPE_BYTES, MemoryBudget, Policy, read_policy, without_unused_bits
from flexgen_h2o.doors import boolean, flag_of, not_empty, positive
from flexgen_h2o.errors import UsageError
from flexgen_h2o.paths import usable_path

if TYPE_CHECKING:
    from flexgen_h2o.kvcache.eviction import Eviction
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.sampling import SamplingParams

# The rows of kvcache.eviction.POLICIES, here as well so that --help need not import torch; a test compares them.
EVICTIONS = ("full", "local", "h2o", "h2o-norm", "tova", "snapkv", "h2o-v", "random")


@contextlib.contextmanager
def naming_flags(**flags: str) -> Iterator[None]:
    """A UsageError that begins with a field's name (`top_p: ...`) names the flag instead (`--top-p: ...`).

    So it does where it speaks of a switch of the policy further on.
    """
    try:
        yield
    except UsageError as error:
        field, _, rest = str(error).partition(":")
        rest = re.sub("|".join((*COMPRESSION, *BITS_OF)), lambda found: flag_of(found[0]), rest)
        if field.startswith("--") or field.count(" ") > 2:  # a flag or a sentence already
            raise
        raise UsageError(f"{flags.get(field, flag_of(field))}:{rest}") from error


def add_engine_flags(parser: argparse.ArgumentParser, compression: str = "") -> None:
    """Model, tiers and policy: the flags that every command which runs the engine takes. FlexGen's keep their names.

    compression: more help on its two flags.
    """
    add = parser.add_argument
    add("--model", default="opt-tiny", help="hub id, local Hugging Face folder, or opt-tiny (shipped)")
    add("--path", type=not_empty, help="folder with checkpoints; _DUMMY_: random weights at the model's true shape")
    add("--revision", type=not_empty, help="branch, tag or commit of a hub id")
    add(
        "--offload-dir",
        type=not_empty,
        help="disk tier, imported and random weights (default ~/flexgen_h2o_offload_dir)",
    )
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help=f"auto, {', '.join(DTYPE_BYTES)}")
    add("--device-mem", help="budget of the device tier, for example 15GiB; on a CPU it makes a device tier of RAM")
    add("--host-mem", help="budget of RAM, for example 12GiB (default: what is free, less a margin)")
    add("--disk-mem", help="budget of the offload dir (default: what is free, less a margin)")
    add("--policy", help="a policy file, or auto (the default when no placement flag is given)")
    add(
        "--hardware",
        metavar="FILE",
        help="the profile that plans are made with, or a shipped one by its name (default: this machine, measured)",
    )
    add("--gpu-batch-size", type=positive, help="rows of a micro-batch (4)")
    add("--num-gpu-batches", type=positive, help="micro-batches of a block (1)")
    names = ("WG", "WC", "CG", "CC", "HG", "HC")
    add(
        "--percent",
        nargs=6,
        type=int,
        metavar=names,
        help="weights, KV cache, hidden states on device and host; the rest is on disk",
    )
    add("--sep-layer", type=boolean, nargs="?", const=True, help="attention and MLP are two schedule steps (true)")
    add("--pin-weight", type=boolean, nargs="?", const=True, help="pin what the host holds, with a card (true)")
    add("--cpu-cache-compute", action="store_true", default=None, help="attend on the host to KV that lives there")
    add(
        "--attn-sparsity",
        type=float,
        help="share of past values that decode attention adds up (1.0); KV moves whole all the same",
    )
    add("--overlap", type=boolean, nargs="?", const=True, help="move and compute at the same time (true)")
    add("--compress-weight", action="store_true", default=None, help=f"weights in --weight-bits{compression}")
    add("--compress-cache", action="store_true", default=None, help=f"KV cache in --cache-bits{compression}")
    add("--weight-bits", type=int, choices=BITS, help="of a compressed weight (4)")
    add("--cache-bits", type=int, choices=BITS, help="of a compressed KV value (4)")
    add(
        "--int8-compute",
        action="store_true",
        default=None,
        help="products in int8, of weights held in int8 or, with --compress-weight, in 4 bits",
    )


def add_eviction_flags(parser: argparse.ArgumentParser) -> None:
    """Which KV columns are kept."""
    add = parser.add_argument
    add("--hh-ratio", type=float, metavar="R", help="heavy-hitter KV columns a row: int(R x prompt), R in (0, 1] (0.1)")
    add(
        "--recent-ratio", type=float, metavar="R", help="recent columns a row, as a share of its prompt (as --hh-ratio)"
    )
    add("--hh-size", type=int, metavar="N", help="heavy-hitter columns a row, a count; 0 keeps recent ones only")
    add("--recent-size", type=int, metavar="N", help="recent columns a row, a count (as --hh-size)")
    add("--hh-all", type=boolean, nargs="?", const=True, help="false: drop columns of the prompt only (true)")
    names = ", ".join(EVICTIONS)
    add("--eviction", metavar="NAME", help=f"which columns stay: {names}; h2o with a flag above, else full")
    add("--kv-layer-schedule", metavar="NAME", help="uniform, or pyramid: lower layers keep more (uniform)")
    add(
        "--positions", choices=("original", "rolling"),
        help="rolling: while decoding a column's position is its rank among those kept; rotary models (original)",
    )  # fmt: skip


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0, help="0 is off")
    add("--seed", type=int, default=0)
    add("--stop", action="append", default=[], metavar="TEXT", help="end a row at this text; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")


def budget_of(args: argparse.Namespace) -> MemoryBudget:
    return MemoryBudget(args.device_mem, args.host_mem, args.disk_mem)


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """How the flags want tokens chosen; UsageError names the flag."""
    from flexgen_h2o.sampling import SamplingParams

    with naming_flags(max_tokens="--gen-len"):
        return SamplingParams(
            args.gen_len, args.temperature, args.top_p, args.top_k, args.seed, tuple(args.stop), args.ignore_eos
        )


def open_llm(args: argparse.Namespace, policy: Policy, is_auto: bool, eviction: Eviction) -> LLM:
    """The model and tiers that the flags ask for. policy, is_auto: of `policy_of`."""
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.planner.need import AutoPolicy

    return LLM(
        args.model, AutoPolicy(policy) if is_auto else policy, eviction, device=args.device,
        dtype=args.dtype, budget=budget_of(args), offload_dir=args.offload_dir, path=args.path, revision=args.revision,
        hardware=args.hardware,
    )  # fmt: skip


def check_positions(args: argparse.Namespace, model: str, positions: int) -> None:
    """UsageError where --prompt-len and --gen-len go beyond the model's positions.

    The newest token needs none, and with --positions rolling no new one does.
    """
    new = 0 if vars(args).get("positions") == "rolling" else args.gen_len - 1
    if args.prompt_len + new > positions:
        raise UsageError(
            f"--prompt-len {args.prompt_len} and --gen-len {args.gen_len}: {model} has {positions} positions; "
            "lower one of them"
        )


EVICTION_FLAGS = {
    "heavy_ratio": "--hh-ratio", "recent_ratio": "--recent-ratio", "heavy_size": "--hh-size",
    "recent_size": "--recent-size", "while_decoding": "--hh-all", "layer_schedule": "--kv-layer-schedule",
    "positions": "--positions",
}  # fmt: skip


def eviction_of(args: argparse.Namespace, policy: Policy) -> Eviction:
    """The eviction policy that the flags ask for: h2o where they say how much is kept, else the full cache."""
    from flexgen_h2o.kvcache.eviction import Full, make_eviction

    attributes = {field: flag.removeprefix("--").replace("-", "_") for field, flag in EVICTION_FLAGS.items()}
    given = {field: getattr(args, a) for field, a in attributes.items() if getattr(args, a) not in (None, "original")}
    name = ("h2o" if given else "full") if args.eviction is None else args.eviction
    if name.partition(":")[0] not in EVICTIONS:
        raise UsageError(f"--eviction {name}: not one of {', '.join(EVICTIONS)}")
    if name == "full":
        if given:
            raise UsageError(f"{EVICTION_FLAGS[next(iter(given))]} and --eviction full: give one of them")
        return Full()
    if policy.attn_sparsity != 1:
        where = "--attn-sparsity" if args.attn_sparsity is not None else f"--policy {args.policy}: attn_sparsity"
        raise UsageError(f"{where}: is for the full cache, not for {name}; leave one of them out")
    own = (item.partition("=")[0] for item in name.partition(":")[2].split(","))
    with naming_flags(**{**{key: f"--eviction {name}: {key}" for key in own}, **EVICTION_FLAGS}):
        return make_eviction(name, **given)


def policy_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The policy fields that were given as flags."""
    names = ("gpu_batch_size", "num_gpu_batches", "percent", "sep_layer", "pin_weight", "cpu_cache_compute",
             "attn_sparsity", "overlap", "compress_weight", "compress_cache", "weight_bits", "cache_bits",
             "int8_compute")  # fmt: skip
    found = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "percent" in found:
        found["percent"] = tuple(found["percent"])
    return found


PLACEMENT = ("gpu_batch_size", "num_gpu_batches", "percent")


def policy_of(args: argparse.Namespace) -> tuple[Policy, bool]:
    """The policy to run with, and whether its placement is still to be chosen (`auto`).

    `--policy FILE` stands alone; `--policy auto` goes with all flags but the placement's; without `--policy`, a
    placement flag means FlexGen's defaults for the others. UsageError for a mixture.
    """
    given = policy_settings(args)
    placed = [name for name in PLACEMENT if name in given]
    if args.policy not in (None, "auto"):
        if given:
            raise UsageError(f"--policy {args.policy} and {flag_of(next(iter(given)))}: give one of them")
        return read_policy(usable_path(args.policy, "--policy")).policy, False
    for bits, switch in BITS_OF.items():
        if bits in given and switch not in given:
            raise UsageError(f"{flag_of(bits)} {given[bits]}: goes with {flag_of(switch)}; give both")
    if args.policy == "auto" and placed:
        raise UsageError(f"--policy auto and {flag_of(placed[0])}: give one of them")
    with naming_flags():
        return Policy(**given), not placed


def as_flags(policy: Policy) -> str:
    """A policy as flags that can be pasted: its placement, and the switches that are not at their defaults."""
    found = [f"--percent {' '.join(map(str, policy.percent))}"]
    usual = {f.name: f.default for f in fields(Policy) if f.name not in PLACEMENT}
    found += [f"{flag_of(name)} {getattr(policy, name)}" for name in ("gpu_batch_size", "num_gpu_batches")]
    for name, default in usual.items():
        value = getattr(policy, name)
        is_used = getattr(policy, BITS_OF[name]) if name in BITS_OF else True
        if value != default and is_used:
            found.append(flag_of(name) if value is True else f"{flag_of(name)} {_as_text(value)}")
    return " ".join(found)


COMPRESSION = ("compress_weight", "compress_cache", "int8_compute")


def uncompressed(policy: Policy) -> Policy:
    """The policy with weights and KV in the compute dtype."""
    return without_unused_bits(replace(policy, compress_weight=False, compress_cache=False, int8_compute=False))


def compression_flags(policy: Policy) -> str:
    """Those flags of a policy that change what is computed, to be shown; empty where none does."""
    bits = {switch: field for field, switch in BITS_OF.items()}
    found = []
    for name in (name for name in COMPRESSION if getattr(policy, name)):
        found.append(flag_of(name))
        if name in bits:
            found.append(f"{flag_of(bits[name])} {getattr(policy, bits[name])}")
    return " ".join(found)


def given_flags(args: argparse.Namespace, flags: Iterable[str]) -> str:
    """Those of the flags that were given, to be pasted. A flag's value must be one word, a number or a boolean."""
    found = ((flag, getattr(args, flag.removeprefix("--").replace("-", "_"))) for flag in flags)
    return " ".join(f"{flag} {_as_text(value)}" for flag, value in found if value is not None)


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))
