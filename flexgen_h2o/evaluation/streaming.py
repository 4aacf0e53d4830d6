"""`evaluate streaming`: conversations and texts longer than the cache, by eviction policy.

The NLL of long texts is measured token by token. If it grows with the length of the text, the cache
is the cause.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from flexgen_h2o.cli_common import say
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import write_result
from flexgen_h2o.core.units import counted, format_bytes, markdown_table
from flexgen_h2o.evaluation.conversation import converse, encoded, read_turns
from flexgen_h2o.evaluation.figures import (
    Bootstrap,
    Figures,
    by_step,
    held_kv,
    number,
    perplexity,
    surprise,
)
from flexgen_h2o.evaluation.rows import Case, check_cases, make_cases, streams_of, text_of
from flexgen_h2o.flags import compression_flags, naming_flags, open_llm, sampling_of, say_notes
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens
from flexgen_h2o.llm import LLM

SCHEMA = 1
RULE = "-" * 70
RESAMPLES = 1000
AT_ONCE = 16  # tokens per stream in one sweep


def run(args: argparse.Namespace, policy: Policy, is_auto: bool) -> int:
    """Measure all policies, one after the other, and return the exit code."""
    settings: dict[str, Any] = {"heavy_size": args.hh_size, "recent_size": args.recent_size}
    if args.positions is not None:
        settings["positions"] = args.positions
    cases = make_cases(args.policies, settings, vars(args).get("sinks"))
    with open_llm(args, policy, is_auto, Full()) as llm:
        check_cases(llm, cases)
        say_notes("evaluate streaming", args, llm)
        compression = compression_flags(policy)
        facts = {
            "measure": "streaming",
            "schema": SCHEMA,
            "model": llm.model.name,
            "dtype": llm.dtype,
            "compression": compression,
        }
        facts |= (_turns if args.text is None else _texts)(args, llm, cases, compression)
    if args.json is not None:
        write_result(args.json, facts, "--json")
    return EXIT_DONE


def _turns(args: argparse.Namespace, llm: LLM, cases: Sequence[Case], compression: str) -> Figures:
    params = sampling_of(args)
    turns = read_turns(args.turns)[: args.num_turns]
    spec = llm.model.spec
    ids = encoded(turns, llm.model, args.turn_format, args.chat)
    if args.chat:
        params = llm.model.for_chat(params)
    if len(ids[0]) > spec.max_positions:
        raise UsageError(
            f"{turns[0].place}: {len(ids[0])} tokens, but {spec.name} has {spec.max_positions} "
            "positions; shorten it"
        )
    found = []
    for case in cases:
        _show(f"{RULE}\n{title(case, compression)}\n{RULE}\n")
        with naming_flags():
            found.append(_result(llm, case, *converse(llm, case, turns, ids, params, _show)))
        _show("\n")
    compared = min(one["answered"] for one in found)
    for one in found:
        one["compared"] = of_turns(one["turns"][:compared])
    print(conversation_table(found, len(turns), compared, compression))
    settings = {
        "turns": None if args.turns is None else str(args.turns),
        "gen_len": args.gen_len,
        "chat": args.chat,
    }
    return {
        "settings": {**settings, "num_turns": len(turns), "compared_turns": compared},
        "policies": found,
    }


def of_turns(turns: Sequence[Figures]) -> Figures:
    """Return the figures of a conversation up to the last of these turns.

    The first turn of a conversation has no perplexity.
    """
    nats = [
        (turn["nll"] * turn["tokens"], turn["tokens"]) for turn in turns if turn["nll"] is not None
    ]
    measured = sum(tokens for _, tokens in nats)
    return {
        "tokens": sum(turn["tokens"] + len(turn["token_ids"]) for turn in turns),
        "perplexity": perplexity(sum(total for total, _ in nats) / measured) if measured else None,
        "kv_bytes": max((turn["kv_bytes"] for turn in turns), default=0),
        "seconds": sum(turn["seconds"] for turn in turns),
    }


def _texts(args: argparse.Namespace, llm: LLM, cases: Sequence[Case], compression: str) -> Figures:
    path = args.text or None
    windows = args.windows
    spec = llm.model.spec
    text = text_of(path, llm.model, ", and --text needs one")
    streams = streams_of(text, args.streams or 1, args.stream_len)
    size = len(streams[0])
    if 2 * windows > size:  # the first token has no prediction
        raise UsageError(
            f"--windows {windows}: a stream has {size} tokens; ask for {size // 2} or fewer"
        )
    for case in cases:
        llm.eviction = case.eviction
        if most_new_tokens(llm.eviction, spec, 1, size - 1) < size - 1:
            raise UsageError(
                f"--stream-len {size}: {spec.name} has {spec.max_positions} positions; lower it, "
                f"or leave {case.label} "
                "out: only rolling positions go past them"
            )
    found = []
    for case in cases:
        found.append(_measure_streams(llm, case, streams, windows, args.seed))
        run_with = title(replace(case, eviction=llm.eviction), compression, (1, size - 1))
        say("evaluate", f"{run_with}: NLL {found[-1]['nll']['value']:.3f}")
    print(text_tables(found, llm.model.name, llm.dtype, compression))
    settings = {
        "text": path and str(path),
        "streams": len(streams),
        "stream_len": size,
        "windows": windows,
    }
    return {"settings": {**settings, "seed": args.seed}, "policies": found}


def _measure_streams(
    llm: LLM, case: Case, streams: Sequence[Sequence[int]], windows: int, seed: int
) -> Figures:
    """Measure NLL and KV cache by window, following each stream token by token with a policy.

    Every token is a decode step: the policy decides after each one, and no prompt is attended to as
    a whole. Windows count tokens from 1; token 1 has no prediction.
    """
    llm.eviction = case.eviction
    tokens = torch.tensor([list(s) for s in streams], device="cpu")
    blocks = llm.model.spec.num_blocks
    n, length = tokens.shape
    wanted = tokens[:, 1:]
    nats = torch.zeros(wanted.shape, dtype=torch.float64, device="cpu")
    bootstrap = Bootstrap(n, RESAMPLES, seed)

    def see(rows: list[int], steps: list[int], logits: torch.Tensor) -> None:
        nats[rows, steps] = surprise(logits.cpu(), wanted[rows, steps])

    report = llm.follow(
        tokens[:, :1].tolist(), wanted.tolist(), by_step(n, see), max_tokens_per_sweep=AT_ONCE
    )
    edges = [length * i // windows for i in range(windows + 1)]
    found = []
    for first, last in pairwise(edges):
        columns, nbytes = held_kv(llm, (1, length - 1), last - 1)
        found.append(
            {
                "first": first + 1,
                "last": last,
                "nll": bootstrap.mean(nats[:, max(0, first - 1) : last - 1].mean(dim=1).numpy()),
                "kv_columns": columns / blocks,
                "kv_bytes": nbytes,
            }
        )
    whole = bootstrap.mean(nats.mean(dim=1).numpy())
    figures = {"windows": found, "nll": whole, "perplexity": perplexity(whole["value"])}
    return _result(llm, case, figures, n * length, report.prefill.seconds + report.decode.seconds)


def _result(llm: LLM, case: Case, figures: Figures, tokens: int, seconds: float) -> Figures:
    """Return one policy's part of the JSON.

    figures: those of the conversation or the text. tokens: all tokens that were run in `seconds`.
    """
    assert llm.report is not None
    return {
        "policy": case.label,
        "positions": case.positions,
        "eviction": case.eviction.to_json(),
        **figures,
        "kv_reserved_bytes": llm.report.extra["kv_reserved_bytes"],
        "peak_bytes": llm.report.peak_bytes,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
    }


def title(case: Case, compression: str, row: tuple[int, int] = (0, 0)) -> str:
    """Return a policy with its sizes, as text. The sizes are those of layers without a window.

    compression: flags of compression. row: (prompt tokens, new tokens), if the sizes depend on
    them.
    """
    said = f", {compression}" if compression else ""
    if not case.eviction.needs.record:
        return f"{case.label}: every KV entry{said}"
    policy: Any = getattr(case.eviction, "policy", case.eviction)  # without windows
    budget = policy.budget(*row, 0)
    counts = [(name, getattr(budget, name)) for name in ("sinks", "heavy", "recent")]
    columns = " + ".join(f"{n} {name}" for name, n in counts if n)
    return f"{case.label}: {columns} KV entries per sequence, {case.positions} positions{said}"


def _show(text: str) -> None:
    print(text, end="", flush=True)


def conversation_table(
    policies: Sequence[Figures], turns: int, compared: int, compression: str
) -> str:
    """Return a table of conversations (streaming JSON), one row per policy.

    turns: number of turns asked. compared: number of the first turns, which all policies answered;
    the figures are over these. compression: flags of all policies.
    """
    names = [
        "policy",
        "positions",
        "turns answered",
        "tokens",
        "perplexity",
        "KV held at most",
        "seconds",
    ]
    rows = [
        [
            f"`{found['policy']}`",
            found["positions"],
            f"{found['answered']} of {turns}",
            f"{one['tokens']}",
            "" if one["perplexity"] is None else f"{one['perplexity']:.2f}",
            format_bytes(one["kv_bytes"]),
            f"{one['seconds']:.1f}",
        ]
        for found in policies
        for one in [found["compared"]]
    ]
    note = "Perplexity: of the tokens of all turns but the first, as they came."
    if compared < turns:
        which = (
            f"the first {counted(compared, 'turn')}, which all policies"
            if compared
            else "no turn, as none was"
        )
        note += (
            f" All columns but `turns answered` are over {which} "
            f"answered{'' if compared else ' by all policies'}."
        )
    if compression:
        note += f" All with {compression}."
    return "\n".join([*markdown_table(names, rows), "", note])


def text_tables(policies: Sequence[Figures], model: str, dtype: str, compression: str) -> str:
    """Return tables of the NLL of long texts and of the KV cache held, by window (streaming JSON).

    There is one row per policy. compression: flags of all policies.
    """
    windows = policies[0]["windows"]
    streams = policies[0]["nll"]["n"]
    spans = [f"{w['first']} - {w['last']}" for w in windows]

    def nats(interval: Figures) -> str:
        return number(interval, 3) if interval["n"] > 1 else f"{interval['value']:.3f}"

    rows = [
        [
            f"`{found['policy']}`",
            found["positions"],
            *(nats(w["nll"]) for w in found["windows"]),
            nats(found["nll"]),
            f"{found['perplexity']:.2f}",
        ]
        for found in policies
    ]
    held = [
        [
            f"`{found['policy']}`",
            found["positions"],
            *(format_bytes(w["kv_bytes"]) for w in found["windows"]),
            f"{found['seconds']:.1f}",
        ]
        for found in policies
    ]
    intervals = f"{streams} streams; NLL in nats a token, 95% bootstrap intervals over streams"
    setting = f"{dtype}, all with {compression}" if compression else dtype
    head = f"Model `{model}` in {setting}; {intervals if streams > 1 else 'NLL in nats a token'}."
    parts = [
        [head],
        markdown_table(["policy", "positions", *spans, "all", "perplexity"], rows),
        ["KV held by one stream at the end of each window:"],
        markdown_table(["policy", "positions", *spans, "seconds"], held),
    ]
    return "\n\n".join("\n".join(part) for part in parts)
