"""`evaluate text`: answers to your prompts with the full cache and with eviction, side by side."""

from __future__ import annotations

import argparse
from collections import abc
from itertools import takewhile
from typing import Any

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import EXIT_DONE
from flexgen_h2o.core.files import write_result
from flexgen_h2o.core.units import format_bytes
from flexgen_h2o.engine.channels import ChatText
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import Sequence, with_params
from flexgen_h2o.evaluation.figures import held_kv
from flexgen_h2o.flags import (
    compression_flags,
    eviction_of,
    naming_flags,
    open_llm,
    prompts_of,
    sampling_of,
    say_notes,
)
from flexgen_h2o.kvcache.eviction import Eviction, Full
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens
from flexgen_h2o.llm import LLM

RULE = "-" * 70
# Prompt if neither --prompt nor --prompts is given; h2o_hf's run_text_generation has a default too.
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


def run(args: argparse.Namespace, policy: Policy, is_auto: bool) -> int:
    """Run the prompts with both caches, print the texts, and return the exit code."""
    eviction = eviction_of(args, policy)
    params = sampling_of(args)
    with open_llm(args, policy, is_auto, Full()) as llm:
        prompts = prompts_of(args, llm.model, args.prompt or [PROMPT])
        if args.chat:
            params = llm.model.for_chat(params)
        say_notes("evaluate text", args, llm)
        with naming_flags():  # for a prompt that is longer than the model's positions
            full, evicted = (
                _written(llm, kept, prompts, params, args.chat) for kept in (Full(), eviction)
            )
        compression = compression_flags(policy)
        facts: dict[str, Any] = {
            "measure": "text",
            "model": llm.model.name,
            "dtype": llm.dtype,
            "eviction": eviction.to_json(),
            "compression": compression,
            "chat": args.chat,
        }
    rows = [
        {
            "index": prompt.index,
            "prompt": prompt.prompt,
            "prompt_len": len(prompt.prompt_ids),
            "full": one,
            "evicted": other,
            "same_tokens": _same_tokens(one["token_ids"], other["token_ids"]),
        }
        for prompt, one, other in zip(prompts, full, evicted, strict=True)
    ]
    texts = "\n\n".join(_as_blocks(row, eviction.name) for row in rows)
    print(f"{texts}\n\n{_summary(full, evicted, eviction.name, compression)}")
    if args.json is not None:
        write_result(args.json, {**facts, "rows": rows}, "--json")
    return EXIT_DONE


def _written(
    llm: LLM,
    eviction: Eviction,
    prompts: abc.Sequence[Sequence],
    params: SamplingParams,
    is_chat: bool,
) -> list[dict[str, Any]]:
    """Run the prompts with `eviction`, and return the answers for the JSON.

    The answers are in the order of the prompts. In a chat a text is as a terminal shows it.
    "columns" are the KV entries that a row held at its end, a mean over the transformer blocks.
    "bytes" are their bytes in all blocks.
    """
    llm.eviction = eviction
    eviction = llm.eviction  # now fitted to this model
    llm.run(with_params(prompts, params), lambda done: None)
    blocks = llm.model.spec.num_blocks
    found = []
    for out in prompts:
        length = len(out.prompt_ids)
        row = length, most_new_tokens(eviction, llm.model.spec, length, params.max_tokens)
        columns, nbytes = held_kv(llm, row, len(out.token_ids))
        text = out.text
        if is_chat:
            text = ChatText(llm.model.tokenizer, params, out.prompt_ids).shown(out.token_ids, True)
        found.append(
            {
                "text": text,
                "token_ids": out.token_ids,
                "finish_reason": out.finish_reason,
                "columns": columns / blocks,
                "bytes": nbytes,
            }
        )
    return found


def _same_tokens(one: list[int], other: list[int]) -> int:
    """Return how many first tokens are the same."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _as_blocks(row: dict[str, Any], name: str) -> str:
    """Return a prompt and its two answers as text, one below the other.

    Token ids stand in for texts if the model has no tokenizer. name: of the eviction policy.
    """
    prompt_len = row["prompt_len"]
    full = row["full"]
    evicted = row["evicted"]
    heads = (
        f"prompt {row['index']}, {prompt_len} token{'s' if prompt_len != 1 else ''}",
        f"full cache: {full['columns']:.4g} KV entries, {format_bytes(full['bytes'])}",
        f"{name}: {evicted['columns']:.4g} KV entries, {format_bytes(evicted['bytes'])}; "
        f"first {row['same_tokens']} of {len(full['token_ids'])} tokens as the full cache's",
    )
    prompt = "(token ids)" if row["prompt"] is None else row["prompt"]
    texts = (
        prompt,
        *(str(one["token_ids"]) if one["text"] is None else one["text"] for one in (full, evicted)),
    )
    return "\n".join(
        f"{RULE}\n{head}\n{RULE}\n{text}" for head, text in zip(heads, texts, strict=True)
    )


def _summary(
    full: abc.Sequence[dict[str, Any]],
    evicted: abc.Sequence[dict[str, Any]],
    name: str,
    compression: str,
) -> str:
    """Return one line about all prompts. compression: flags of both runs."""
    whole, kept = (sum(one["bytes"] for one in side) for side in (full, evicted))
    same = sum(
        one["token_ids"] == other["token_ids"] for one, other in zip(full, evicted, strict=True)
    )
    return (
        f"{name}: {kept / whole:.1%} of the full cache's {format_bytes(whole)}; {same} of "
        f"{len(full)} texts the same" + (f"; both with {compression}" if compression else "")
    )
