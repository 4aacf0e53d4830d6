"""Flags that have no effect beside others, or in the place where a run takes place: one table for all commands.

Imports nothing heavy by itself; the reasons are asked for when the model is open.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexgen_h2o.doors import note

if TYPE_CHECKING:
    from flexgen_h2o.config import ModelSpec
    from flexgen_h2o.llm import LLM


@dataclass(frozen=True)
class Place:
    """Where a run takes place. spec: None where no model is opened."""

    spec: ModelSpec | None = None
    device_is_host: bool = False
    has_card: bool = True


# Why a flag has no effect; empty where it has one.
Reason = Callable[[argparse.Namespace, Place], str]


def say_idle_flags(command: str, args: argparse.Namespace, at: Place | None = None) -> None:
    """A note for the flags that were given and that have no effect, with the reason."""
    prog = command.partition(" ")[0]
    for reason, flags in idle_flags(command, args, at or Place()).items():
        has = "have" if len(flags) > 1 else "has"
        note(f"{prog}: {', '.join(flags)} {has} no effect: {reason}")


def idle_flags(command: str, args: argparse.Namespace, at: Place) -> dict[str, list[str]]:
    """The flags of the command line that have no effect, by the reason."""
    found: dict[str, list[str]] = {}
    reasons = WITHOUT_EFFECT[command]
    for field, flag in args.given.items():
        reason_of = reasons.get(field, reasons.get("*"))
        reason = reason_of(args, at) if reason_of is not None else ""
        if reason:
            found.setdefault(reason, []).append(flag)
    return found


def place_of(args: argparse.Namespace, llm: LLM) -> Place:
    """Of the flags that `engine_flags.open_llm` opened this model with."""
    from flexgen_h2o.tiers.device import open_device

    device = open_device(args.device, separate_budget=args.device_mem is not None)
    return Place(llm.model.spec, device.is_host, device.card() is not None)


def _not_of_hub(args: argparse.Namespace, at: Place) -> str:
    from flexgen_h2o.checkpoint.resolve import DUMMY, find_folder

    if args.path is not None and DUMMY in args.path:
        return f"nothing is fetched with --path {args.path}"
    return "" if find_folder(args.model, args.path) is None else f"{args.model} is a folder here, not of the hub"


def _built_in(args: argparse.Namespace, at: Place) -> str:
    from flexgen_h2o.models import built_in_spec

    known = built_in_spec(args.model) is not None
    return _not_of_hub(args, at) or (f"the shape of {args.model} is built in" if known else "")


def _not_in_path(args: argparse.Namespace, at: Place) -> str:
    from flexgen_h2o.checkpoint.resolve import DUMMY, find_folder

    if args.path is None:  # of --cache_dir, which the script that it comes from would have made
        return "there is no such folder yet"
    if DUMMY in args.path:
        return ""
    if find_folder(args.model, None) is not None:
        return f"--model {args.model} is a folder of its own"
    return f"{args.model} is not in it" if find_folder(args.model, args.path) is None else ""


def _one_step(args: argparse.Namespace, at: Place) -> str:
    parallel = at.spec is not None and not any(at.spec.mlp)
    return "attention and MLP of this model read the same hidden states" if parallel else ""


def _greedy(args: argparse.Namespace, at: Place) -> str:
    from flexgen_h2o.sampling import GREEDY_BELOW

    return f"nothing is drawn at --temperature {args.temperature:g}" if args.temperature < GREEDY_BELOW else ""


def _if(text: str, holds: Callable[[argparse.Namespace], object]) -> Reason:
    return lambda args, at: text if holds(args) else ""


_ENGINE: dict[str, Reason] = {
    "revision": _not_of_hub,
    "path": _not_in_path,
    "cpu_cache_compute": lambda args, at: "device and host are one tier here" if at.device_is_host else "",
    "pin_weight": lambda args, at: "" if at.has_card else "there is no card here",
    "sep_layer": _one_step,
}
_SAMPLING: dict[str, Reason] = {
    "top_p": lambda args, at: _greedy(args, at) if args.top_p != 1 else "",  # 1 and 0 switch them off
    "top_k": lambda args, at: _greedy(args, at) if args.top_k else "",
    "seed": _greedy,
}
_SHOWN = _if("--show NAME says which profile", lambda args: args.show)

# By command, then by the field of a flag; *: of all others. Sampling flags of batch are for rows that do not say.
WITHOUT_EFFECT: Mapping[str, Mapping[str, Reason]] = {
    "flex_opt": {
        **_ENGINE,
        **_SAMPLING,
        "prompt_len": _if("each prompt of --prompts keeps its own length", lambda args: args.prompts),
        "ignore_eos": _if("no row of the benchmark ends early", lambda args: not args.prompts),
        "log_file": _if("--no-log writes none", lambda args: args.no_log and args.log_file != "auto"),
        "overlap": _if(
            "--debug-mode breakdown is serial", lambda args: args.overlap and args.debug_mode == "breakdown"
        ),
    },
    "batch": _ENGINE,
    "batch --status": {
        **dict.fromkeys(("output", "status"), lambda args, at: ""),
        "*": lambda args, at: "--status reads what --output says, and does nothing else",
    },
    "policy_search": {**_ENGINE, "revision": _built_in},
    "evaluate fidelity": {
        **_ENGINE,
        "depths": _if(
            "there are no recall rows",
            lambda args: args.recall_prompts == 0 or (args.recall_prompts is None and args.prompts),
        ),
    },
    "evaluate text": {**_ENGINE, **_SAMPLING},
    # With --text the seed is the bootstrap's, and the others are refused.
    "evaluate streaming": {**_ENGINE, **_SAMPLING, "seed": lambda a, at: _greedy(a, at) if a.text is None else ""},
    "hardware": {"device": _SHOWN, "offload_dir": _SHOWN},
}
