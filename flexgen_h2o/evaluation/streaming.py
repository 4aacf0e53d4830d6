"""`evaluate streaming`: conversations and texts longer than the cache, with the full cache and with policies.

The NLL of long texts is measured token by token: where it grows with their length, the cache is at fault. The flags of
llama-recipes' H2O example (run_streaming.py) and of h2o_hf's streaming script are taken as aliases.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import check_files, count, file_name, flag_of, note, positive, results_are_in, say
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import write_result
from flexgen_h2o.flags import (
    add_engine_flags,
    add_sampling_flags,
    compression_flags,
    naming_flags,
    open_llm,
    place_of,
    policy_of,
    sampling_of,
    say_idle_flags,
)
from flexgen_h2o.kvcache.eviction import POLICIES as EVICTIONS
from flexgen_h2o.llm import LLM

if TYPE_CHECKING:
    from flexgen_h2o.evaluation.metrics import Case
    from flexgen_h2o.llm import LLM

SCHEMA = 1
POLICIES = ("full", "h2o")
SIZE = 128  # heavy columns, and as many recent ones: llama-recipes' defaults
GEN_LEN, OWN_STREAMS, OWN_STREAM_LEN, WINDOWS = 64, 8, 1024, 4
RULE = "-" * 70
# Flags of one of the two; a text has its own tokens, none are drawn.
OF_TURNS = (
    "turns", "num_turns", "chat", "turn_format", "gen_len", "temperature", "top_p", "top_k", "stop", "ignore_eos",
)  # fmt: skip
OF_TEXT = ("stream_len", "streams", "windows")
MT_BENCH = "mt_bench.jsonl"  # in the folder that h2o_hf's --data_root names


def add_streaming_flags(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    add_sampling_flags(parser)
    add = parser.add_argument
    names = ", ".join(EVICTIONS)
    add(
        "--policies", nargs="+", default=POLICIES, metavar="NAME",
        help=f"{names} (full h2o); also h2o:positions=rolling",
    )  # fmt: skip
    add("--hh-size", type=count, metavar="N", help=f"heavy-hitter columns a row ({SIZE})")
    add("--recent-size", type=positive, metavar="N", help=f"recent columns a row ({SIZE})")
    add("--positions", choices=("original", "rolling"), help="of all policies but full (original)")
    add("--turns", type=file_name, help=".jsonl with MT-bench's questions, or prompts as flex_opt takes them")
    add("--num-turns", type=positive, help="only so many of them")
    add("--chat", action="store_true", help="turns are messages in the model's chat template")
    add("--turn-format", metavar="TEXT", help=r"what a turn becomes, at {turn} ('\n{turn}\n'); \n is a newline")
    add("--gen-len", type=positive, help=f"most tokens of an answer ({GEN_LEN})")
    add(
        "--text", nargs="?", const="", metavar="FILE",
        help="instead of turns: how surprising a long text is, by window (without FILE: Python's own sources)",
    )  # fmt: skip
    add("--stream-len", type=positive, metavar="N", help=f"tokens of a stretch of it ({OWN_STREAM_LEN}; of a file all)")
    add("--streams", type=positive, metavar="N", help=f"stretches of it ({OWN_STREAMS}; of a file 1)")
    add("--windows", type=positive, metavar="N", help=f"parts of a stretch that are told apart ({WINDOWS})")
    add("--json", "--output", type=file_name, metavar="FILE", help="write all figures, and turns with their answers")
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    add("--input-path", "--input_path", dest="turns", type=file_name, **hidden)
    add("--data_root", dest="turns", type=lambda folder: Path(folder) / MT_BENCH, **hidden)
    add("--model-name", "--model_name", "--model_name_or_path", dest="model", **hidden)
    h2o = ("--enable_h2o_generation", "--enable_streaming_with_H2O")
    add(*h2o, dest="policies", action="store_const", const=("h2o",), **hidden)
    add("--enable_position_rolling", dest="positions", action="store_const", const="rolling", **hidden)
    add("--num_heavy_hitter_tokens", dest="heavy_of_window", type=int, **hidden)
    add("--num_window_length", dest="window", type=positive, **hidden)
    add("--heavy_hitter_size", dest="hh_size", type=count, **hidden)
    add("--recent_size", dest="recent_size", type=positive, **hidden)
    add("--start_size", dest="sinks", type=count, **hidden)
    parser.set_defaults(run=run_streaming)


def run_streaming(args: argparse.Namespace) -> int:
    """All policies, one after the other; returns the exit code."""
    _check(args)
    results_are_in(args.json)
    policy, is_auto = policy_of(args)
    if policy.attn_sparsity != 1:
        raise UsageError("--attn-sparsity: is for the full cache, not beside others; leave it out")
    cases = _cases(args)
    from flexgen_h2o.kvcache.eviction import Full

    with open_llm(args, policy, is_auto, Full()) as llm:
        for case in cases:  # what is refused, a dtype too, is refused before anything is shown
            llm.eviction = case.eviction
            llm.check_plan()
        if llm.precision_note:
            note("evaluate", llm.precision_note)
        say_idle_flags("evaluate streaming", args, place_of(args, llm))
        compression = compression_flags(policy)
        found = (_turns if args.text is None else _texts)(args, llm, cases, compression)
        facts = {
            "measure": "streaming", "schema": SCHEMA, "model": llm.model.name, "dtype": llm.dtype,
            "compression": compression,
        }  # fmt: skip
    if args.json is not None:
        write_result(args.json, {**facts, **found}, "--json")
    return EXIT_DONE


def _check(args: argparse.Namespace) -> None:
    """What can be wrong with flags and files, before anything is loaded."""
    is_text = args.text is not None
    for name in OF_TURNS if is_text else OF_TEXT:
        if getattr(args, name) and (name, getattr(args, name)) != ("top_p", 1):
            flag = flag_of(name)
            raise UsageError(
                f"{flag} and --text: give one of them" if is_text else f"{flag}: goes with --text; give it"
            )
    if args.chat and args.turn_format is not None:
        raise UsageError("--turn-format and --chat: give one of them")
    if args.turn_format is not None and "{turn}" not in args.turn_format:
        raise UsageError(f"--turn-format {args.turn_format!r}: has no {{turn}} in it, where the turn would go")
    if args.turn_format is not None:
        args.turn_format = args.turn_format.replace(r"\n", "\n")
    check_files(args, ("turns", "text"), ("json",))


def _cases(args: argparse.Namespace) -> list[Case]:
    from flexgen_h2o.evaluation.metrics import make_cases

    if set(args.policies) == {"full"}:
        for name in ("hh_size", "recent_size", "positions"):
            if getattr(args, name) not in (None, "original"):
                raise UsageError(f"{flag_of(name)}: says nothing of the full cache; name another in --policies too")
    settings: dict[str, Any] = dict(zip(("heavy_size", "recent_size"), _sizes(args), strict=True))
    if args.positions is not None:
        settings["positions"] = args.positions
    return make_cases(args.policies, settings, vars(args).get("sinks"))


def _sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Heavy and recent columns. llama-recipes says them as the heavy ones, -1 being half, of a window of all."""
    window, heavy = vars(args).get("window"), vars(args).get("heavy_of_window")
    if window is None and heavy is None:
        return SIZE if args.hh_size is None else args.hh_size, args.recent_size or SIZE
    if args.hh_size is not None or args.recent_size is not None:
        given = "--hh-size" if args.hh_size is not None else "--recent-size"
        raise UsageError(f"{given}: is said by --num_window_length and --num_heavy_hitter_tokens too; give one of them")
    window, heavy = window or 2 * SIZE, SIZE if heavy is None else heavy
    heavy = window // 2 if heavy == -1 else heavy
    if not 0 <= heavy < window:
        raise UsageError(
            f"--num_heavy_hitter_tokens {heavy}: must be from 0 to less than --num_window_length {window}, which the "
            "recent columns are in too; or -1, half of it"
        )
    return heavy, window - heavy


def _turns(args: argparse.Namespace, llm: LLM, cases: Sequence[Case], compression: str) -> dict[str, Any]:
    from flexgen_h2o.evaluation.streams import converse, encoded, read_turns
    from flexgen_h2o.evaluation.tables import conversation_table

    args.gen_len = args.gen_len or GEN_LEN
    params = sampling_of(args)
    turns = read_turns(args.turns)[: args.num_turns]
    ids, spec = encoded(turns, llm.model, args.turn_format, args.chat), llm.model.spec
    if len(ids[0]) > spec.max_positions:
        raise UsageError(
            f"{turns[0].place}: {len(ids[0])} tokens, but {spec.name} has {spec.max_positions} positions; shorten it"
        )
    found = []
    for case in cases:
        _show(f"{RULE}\n{_title(case, compression)}\n{RULE}\n")
        with naming_flags():
            found.append(converse(llm, case, turns, ids, params, _show))
        _show("\n")
    print(conversation_table(found, len(turns), compression))
    settings = {"turns": None if args.turns is None else str(args.turns), "gen_len": args.gen_len, "chat": args.chat}
    return {"settings": {**settings, "num_turns": len(turns)}, "policies": found}


def _texts(args: argparse.Namespace, llm: LLM, cases: Sequence[Case], compression: str) -> dict[str, Any]:
    from flexgen_h2o.evaluation.rows import streams_of, text_of
    from flexgen_h2o.evaluation.streams import measure_streams
    from flexgen_h2o.evaluation.tables import text_tables
    from flexgen_h2o.kvcache.eviction.policy import most_new_tokens

    own, windows = args.text == "", args.windows or WINDOWS
    stretches = args.streams or (OWN_STREAMS if own else 1)
    length = args.stream_len or (OWN_STREAM_LEN if own else None)
    streams = streams_of(text_of(None if own else args.text, llm.model), stretches, length)
    size, spec = len(streams[0]), llm.model.spec
    if windows >= size:
        raise UsageError(f"--windows {windows}: a stream has {size} tokens; ask for fewer")
    for case in cases:
        if most_new_tokens(case.eviction, spec, 1, size - 1) < size - 1:
            raise UsageError(
                f"--stream-len {size}: {spec.name} has {spec.max_positions} positions; lower it, or leave {case.label} "
                "out: only rolling positions go on"
            )
    found = []
    for case in cases:
        found.append(measure_streams(llm, case, streams, windows, args.seed))
        say("evaluate", f"{_title(case, compression)}: NLL {found[-1]['nll']['value']:.3f}")
    print(text_tables(found, llm.model.name, llm.dtype, compression))
    settings = {"text": None if own else str(args.text), "streams": stretches, "stream_len": size, "windows": windows}
    return {"settings": {**settings, "seed": args.seed}, "policies": found}


def _title(case: Case, compression: str) -> str:
    said = f", {compression}" if compression else ""
    if not case.eviction.needs.record:
        return f"{case.label}: every KV column{said}"
    budget = case.eviction.budget(0, 0, 1)
    counts = [(name, getattr(budget, name)) for name in ("sinks", "heavy", "recent")]
    columns = " + ".join(f"{n} {name}" for name, n in counts if n)
    return f"{case.label}: {columns} KV columns a row, {case.positions} positions{said}"


def _show(text: str) -> None:
    print(text, end="", flush=True)
