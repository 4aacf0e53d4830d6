"""`evaluate text`: what the model writes after one's own prompts, with the full cache and with eviction, side by side.

The flags of h2o_hf's run_text_generation are taken as aliases.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli_common import check_files, file_name, note, positive, results_are_in
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import write_result
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

    @property
    def held(self) -> str:
        return f"{self.columns:.4g} KV columns, {format_bytes(self.bytes)}"

    @property
    def shown(self) -> str:
        return str(self.token_ids) if self.text is None else self.text


@dataclass(frozen=True)
class Comparison:
    """One prompt with both runs. same_tokens: how many new tokens both begin with."""

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
    if args.prompt is not None and args.prompts is not None:
        raise UsageError("--prompt and --prompts: give one of them")
    check_files(args, ("prompts",), ("json",))
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
            note("evaluate", llm.precision_note)
        prompts = _prompts(args, llm)
        say_idle_flags("evaluate text", args, place_of(args, llm))
        with naming_flags():  # a prompt longer than the model's positions
            sides = [_written(llm, kept, prompts, params) for kept in (Full(), eviction)]
        rows = [
            Comparison(prompt.index, prompt.text, len(prompt.token_ids), *both)
            for prompt, *both in zip(prompts, *sides, strict=True)
        ]
        compression = compression_flags(policy)
        facts: dict[str, Any] = {
            "measure": "text", "model": llm.model.name, "dtype": llm.dtype, "eviction": eviction.to_json(),
            "compression": compression,
        }  # fmt: skip
    texts = "\n\n".join(as_blocks(row, eviction.name) for row in rows)
    print(f"{texts}\n\n{summary(rows, eviction.name, compression)}")
    if args.json is not None:
        facts["rows"] = [{**asdict(row), "same_tokens": row.same_tokens} for row in rows]
        write_result(args.json, facts, "--json")
    return EXIT_DONE


def as_blocks(row: Comparison, name: str) -> str:
    """A prompt and the two texts that follow on it, one below the other; token ids where there is no tokenizer."""
    same = f"first {row.same_tokens} of {len(row.full.token_ids)} tokens as the full cache's"
    parts = (
        (
            f"prompt {row.index}, {row.prompt_len} token{'s' if row.prompt_len != 1 else ''}",
            "(token ids)" if row.prompt is None else row.prompt,
        ),
        (f"full cache: {row.full.held}", row.full.shown),
        (f"{name}: {row.evicted.held}; {same}", row.evicted.shown),
    )
    return "\n".join(f"{RULE}\n{head}\n{RULE}\n{text}" for head, text in parts)


def summary(rows: Sequence[Comparison], name: str, compression: str = "") -> str:
    """One line over all prompts. compression: flags of both runs."""
    full, evicted = (sum(getattr(row, side).bytes for row in rows) for side in ("full", "evicted"))
    same = sum(row.full.token_ids == row.evicted.token_ids for row in rows)
    return (
        f"{name}: {evicted / full:.1%} of the full cache's {format_bytes(full)}; "
        f"{same} of {len(rows)} texts the same" + (f"; both with {compression}" if compression else "")
    )  # fmt: skip


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
