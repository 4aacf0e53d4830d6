"""`evaluate text`: what the model writes after one's own prompts, with the full cache and with eviction, side by side.

The flags of h2o_hf's run_text_generation are taken as aliases.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import check_separate, file_name, flag_of, note, positive, results_are_in
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import EXIT_DONE, FlexgenError, UsageError
from flexgen_h2o.core.files import usable_path, write_whole
from flexgen_h2o.core.units import format_bytes
from flexgen_h2o.flags import (
    add_engine_flags,
    add_eviction_flags,
    add_sampling_flags,
    compression_flags,
    eviction_of,
    naming_flags,
    open_llm,
    place_of,
    policy_of,
    sampling_of,
    say_idle_flags,
)

if TYPE_CHECKING:
    from flexgen_h2o.engine.prompts import Prompt
    from flexgen_h2o.engine.sampling import SamplingParams
    from flexgen_h2o.kvcache.eviction import Eviction
    from flexgen_h2o.llm import LLM


GEN_LEN = 64
RULE = "-" * 70
# Without --prompt and --prompts, as run_text_generation has one of its own.
PROMPT = '''import os


class Reader:
    """Reads the lines of a text file, one after the other."""

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding

    def lines(self):
        with open(self.path, encoding=self.encoding) as file:
            for line in file:
                yield line.rstrip("\\n")

    def count('''


@dataclass(frozen=True)
class Written:
    """What one run wrote after a prompt. text: None without a tokenizer.

    columns: KV columns that the row held at its end, mean over the transformer blocks; bytes: theirs, of all blocks.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    columns: float
    bytes: int


@dataclass(frozen=True)
class Beside:
    """One prompt with both runs. same_tokens: the first so many new tokens of both are the same."""

    index: int
    prompt: str | None
    prompt_len: int
    full: Written
    evicted: Written

    @property
    def same_tokens(self) -> int:
        pairs = zip(self.full.token_ids, self.evicted.token_ids, strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    add_eviction_flags(parser)
    add_sampling_flags(parser)
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated (default: a few lines of Python)")
    add("--prompts", type=file_name, help=".txt or .jsonl as flex_opt takes them")
    add("--gen-len", type=positive, default=GEN_LEN, help=f"most new tokens ({GEN_LEN})")
    add("--json", type=file_name, help="write prompts, texts, tokens and KV bytes")
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    add("--model_name", dest="model", **hidden)
    add("--cache_dir", dest="path", type=lambda name: name if Path(name).expanduser().is_dir() else None, **hidden)
    add("--heavy_ratio", dest="hh_ratio", type=float, **hidden)
    add("--recent_ratio", dest="recent_ratio", type=float, **hidden)
    add("--length", dest="gen_len", type=positive, **hidden)
    add("--no_cuda", dest="device", action="store_const", const="cpu", **hidden)
    add("--fp16", dest="dtype", action="store_const", const="float16", **hidden)
    add("--model_arch", **hidden)
    parser.set_defaults(run=run_text)


def run_text(args: argparse.Namespace) -> int:
    """Both runs, printed; returns the exit code."""
    _check(args)
    results_are_in(args.json)
    policy, is_auto = policy_of(args)
    eviction = _eviction(args, policy)
    from flexgen_h2o.kvcache.eviction import Full
    from flexgen_h2o.models import check_family

    params = sampling_of(args)
    with open_llm(args, policy, is_auto, Full()) as llm:
        if "model_arch" in args:
            check_family(llm.model.spec, args.model_arch, "--model_arch")
        if llm.precision_note:
            note(f"evaluate: {llm.precision_note}")
        prompts = _prompts(args, llm)
        say_idle_flags("evaluate text", args, place_of(args, llm))
        with naming_flags():  # a prompt longer than the model's positions
            sides = [_written(llm, kept, prompts, params) for kept in (Full(), eviction)]
        rows = [
            Beside(prompt.index, prompt.text, len(prompt.token_ids), *both)
            for prompt, *both in zip(prompts, *sides, strict=True)
        ]
        compression = compression_flags(policy)
        facts = {
            "measure": "text", "model": llm.model.name, "dtype": llm.dtype, "eviction": eviction.to_json(),
            "compression": compression,
        }  # fmt: skip
    texts = "\n\n".join(as_blocks(row, eviction.name) for row in rows)
    print(f"{texts}\n\n{summary(rows, eviction.name, compression)}")
    if args.json is not None:
        _write(args.json, {**facts, "rows": [{**asdict(row), "same_tokens": row.same_tokens} for row in rows]})
    return EXIT_DONE


def as_blocks(row: Beside, name: str) -> str:
    """A prompt and the two texts that follow on it, one below the other; token ids where there is no tokenizer."""
    same = f"first {row.same_tokens} of {len(row.full.token_ids)} tokens as the full cache's"
    parts = (
        (f"prompt {row.index}, {row.prompt_len} token{'s' if row.prompt_len != 1 else ''}", row.prompt),
        (f"full cache: {_held(row.full)}", _shown(row.full)),
        (f"{name}: {_held(row.evicted)}; {same}", _shown(row.evicted)),
    )
    return "\n".join(f"{RULE}\n{head}\n{RULE}\n{'(token ids)' if text is None else text}" for head, text in parts)


def summary(rows: Sequence[Beside], name: str, compression: str = "") -> str:
    """One line over all prompts. compression: flags of both runs."""
    full, evicted = (sum(getattr(row, side).bytes for row in rows) for side in ("full", "evicted"))
    same = sum(row.full.token_ids == row.evicted.token_ids for row in rows)
    return (
        f"{name}: {evicted / full:.1%} of the full cache's {format_bytes(full)}; "
        f"{same} of {len(rows)} texts the same" + (f"; both with {compression}" if compression else "")
    )  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    """What can be wrong with files and combinations, before anything is loaded."""
    from flexgen_h2o.engine.report import check_writable

    if args.prompt is not None and args.prompts is not None:
        raise UsageError("--prompt and --prompts: give one of them")
    for name in ("prompts", "json"):
        if getattr(args, name) is not None:
            setattr(args, name, usable_path(getattr(args, name), flag_of(name)))
    check_separate(args, ("prompts", "policy", "hardware"), ("json",))
    if args.json is not None:
        check_writable(args.json, "--json")


def _eviction(args: argparse.Namespace, policy: Policy) -> Eviction:
    """h2o where no other is named, with run_text_generation's shares where none are given: the defaults of all."""
    if args.eviction == "full":
        raise UsageError("--eviction full: is what the other is set beside; name another")
    asked = argparse.Namespace(**{**vars(args), "eviction": args.eviction or "h2o"})
    return eviction_of(asked, policy)


def _prompts(args: argparse.Namespace, llm: LLM) -> list[Prompt]:
    from flexgen_h2o.engine.prompts import prompts_from_python, read_prompts

    model = llm.model
    encode = model.encode if model.tokenizer is not None else None
    if args.prompts is not None:
        return read_prompts(args.prompts, encode, model.spec.vocab_size)
    if encode is None:
        raise UsageError(f"--model {model.name}: has no tokenizer; give --prompts FILE.jsonl with prompt_token_ids")
    texts = args.prompt or [PROMPT]
    with naming_flags(**{f"prompts[{i}]": "--prompt" for i in range(len(texts))}):
        return prompts_from_python(texts, encode, model.spec.vocab_size)


def _written(llm: LLM, eviction: Eviction, prompts: Sequence[Prompt], params: SamplingParams) -> list[Written]:
    """A run with `eviction`, in the order of the prompts."""
    from flexgen_h2o.engine.prompts import Completion
    from flexgen_h2o.evaluation.metrics import bytes_of_column, held_columns

    done: list[Completion] = []
    llm.eviction = eviction
    llm.run(prompts, params, done.extend)
    blocks, size = llm.model.spec.num_blocks, bytes_of_column(llm)
    found = []
    for prompt, out in zip(prompts, sorted(done, key=lambda c: c.index), strict=True):
        held = held_columns(eviction, len(prompt.token_ids), len(out.token_ids), blocks)
        found.append(Written(out.text, out.token_ids, out.finish_reason, held / blocks, held * size))
    return found


def _held(side: Written) -> str:
    return f"{side.columns:.4g} KV columns, {format_bytes(side.bytes)}"


def _shown(side: Written) -> str:
    return str(side.token_ids) if side.text is None else side.text


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise FlexgenError(f"--json {path}: {error.strerror or error}") from error
