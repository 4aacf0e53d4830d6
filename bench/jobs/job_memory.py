"""Claim: a batch job takes the same memory for 1,000 rows and for 100,000.

Method: `python -m flexgen_h2o.batch` in a process of its own, a random OPT of one block (fp32, written by
transformers) on short rows: 4 to 8 token ids, 1 to 4 new tokens, so that what Python does for a row is most of the
work. Peak RSS is the kernel's figure of the ended process (wait4). With refill all rows of a job run in one block.
A job of 100 rows goes before, which compiles the kernels.
Figures: peak RSS by rows, its growth a row from the fewest rows to the most, rows a second of the whole process.

    python -m bench.jobs.job_memory [--rows 1000 10000 100000] [--output FILE] [-- more flags of batch, as --no-refill]
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.errors import FlexgenError

VOCABULARY = 512


def main() -> None:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=positive, nargs="+", default=[1000, 10_000, 100_000])
    add("--hidden", type=positive, default=32, help="hidden size of the model (32)")
    add("--gpu-batch-size", type=positive, default=128)
    add("batch_flags", nargs="*", help="after --: more flags of flexgen_h2o.batch")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_model(work / "model", args.hidden)
        run_job(work, 100, args.gpu_batch_size, args.batch_flags)  # compiles the kernels, which takes memory of its own
        busy = common.wait_for_quiet(args.quiet_wait)
        runs = [run_job(work, rows, args.gpu_batch_size, args.batch_flags) for rows in sorted(args.rows)]
    fewest, most = runs[0], runs[-1]
    growth = (most["peak_rss_bytes"] - fewest["peak_rss_bytes"]) / max(1, most["rows"] - fewest["rows"])
    lines = [
        (f"{run['rows']:,} rows", f"{run['peak_rss_bytes'] / common.MB:.1f} MB, {run['rows_per_s']:.0f} rows/s")
        for run in runs
    ]
    common.table("peak RSS of a batch job", [*lines, ("growth", f"{growth:.1f} bytes a row")])
    result = {
        "benchmark": "job_memory", "hidden": args.hidden, "gpu_batch_size": args.gpu_batch_size,
        "batch_flags": args.batch_flags, "busy_before": busy, "runs": runs, "growth_bytes_per_row": growth,
    }  # fmt: skip
    common.finish(result, args.output)


def write_model(folder: Path, hidden: int) -> None:
    """A random OPT of one block in fp32, without a tokenizer or an end token."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, word_embed_proj_dim=hidden, num_hidden_layers=1, ffn_dim=2 * hidden,
        num_attention_heads=2, max_position_embeddings=64, eos_token_id=None, bos_token_id=2,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)


def write_rows(path: Path, rows: int) -> None:
    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            ids = [generator.randrange(4, VOCABULARY) for _ in range(generator.randint(4, 8))]
            file.write(json.dumps({"prompt_token_ids": ids, "max_tokens": generator.randint(1, 4)}) + "\n")


def run_job(work: Path, rows: int, gpu_batch_size: int, flags: list[str]) -> dict[str, Any]:
    """Run it, check that every row is there, and return its figures."""
    source, output = work / f"{rows}.jsonl", work / f"{rows}.out.jsonl"
    write_rows(source, rows)
    command = [
        sys.executable, "-m", "flexgen_h2o.batch", "--model", work / "model", "--input", source, "--output", output,
        "--offload-dir", work / "offload", "--device", "cpu", "--percent", "100", "0", "100", "0", "100", "0",
        "--gpu-batch-size", gpu_batch_size, *flags,
    ]  # fmt: skip
    began = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, cwd=common.ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if code := os.waitstatus_to_exitcode(status):
        raise FlexgenError(f"batch on {rows} rows: exit code {code}")
    with output.open("rb") as file:
        done = sum(1 for line in file if b'"error": null' in line or b'"error":null' in line)
    if done != rows:
        raise FlexgenError(f"{done} of {rows} rows were answered")
    state = json.loads(output.with_name(output.name + ".status.json").read_text())
    return {
        "rows": rows, "peak_rss_bytes": usage.ru_maxrss * 1024, "seconds": seconds, "job_seconds": state["seconds"],
        "rows_per_s": rows / state["seconds"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.door(main))
