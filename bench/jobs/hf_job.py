"""A plain loop over Hugging Face `generate`, the peer of bench/jobs/xsum_job.py, in a process of its own.

Reads article lines and writes {"index", "token_ids"} a line as each batch ends. The longest rows come first, side by
side with their likes, which is the order that pads least; on the left.
"""

from __future__ import annotations

import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="a Hugging Face folder with its tokenizer")
    add("--input", type=Path, required=True)
    add("--output", type=Path, required=True)
    add("--dtype", required=True)
    add("--batch-size", type=int, required=True)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype)).eval()
    records = [json.loads(line) for line in args.input.read_text().splitlines()]
    lengths = [len(ids) for ids in tokenizer([r["article"] for r in records]).input_ids]
    order = sorted(range(len(records)), key=lengths.__getitem__, reverse=True)
    with args.output.open("w") as out, torch.inference_mode():
        for start in range(0, len(order), args.batch_size):
            batch = order[start : start + args.batch_size]
            for i, ids in zip(batch, _generate(model, tokenizer, [records[i] for i in batch]), strict=True):
                out.write(json.dumps({"index": i, "token_ids": ids}) + "\n")
            out.flush()


def _generate(model: Any, tokenizer: Any, records: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The new tokens of each record, with the token that ended it; all ask for the same number of tokens."""
    inputs = tokenizer([r["article"] for r in records], return_tensors="pt", padding=True)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = GenerationConfig(
        max_new_tokens=records[0]["max_tokens"], do_sample=False, eos_token_id=end, pad_token_id=pad,
        stop_strings=records[0]["stop"],
    )  # fmt: skip
    out = model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
    new = out[:, inputs.input_ids.shape[1] :].tolist()
    return [ids[: ids.index(pad)] if pad in ids else ids for ids in new]


if __name__ == "__main__":
    main()
