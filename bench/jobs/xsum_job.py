"""Claim: a summarisation job through `python -m flexgen_h2o.batch` beats a plain loop over Hugging Face `generate`.

Method: article lines as h2o_hf keeps them ({"article", "max_tokens", "stop", ...}), greedy, through the shipped model.
Articles that are longer than its positions permit lose their beginning, for everyone. Systems: `h2o` (--hh-ratio 0.1
and as many recent columns), `full` (every column) and `hf`, each a process of its own from command line to finished
output; imports, loading, tokenising and planning count. Before the rounds, hf runs a part of the articles at each of
--hf-batches and keeps its best; ours takes what --policy auto gives it. Rounds are interleaved. tokens/s is new tokens
over wall seconds; ratios are within a round. Rows whose tokens are hf's are counted too: all of them for `full` in
float32, save ties; in bfloat16 kernels round differently, and H2O is another function.

    python -m bench.jobs.xsum_job [--articles 1000] [--dtype bfloat16] [--rounds 3] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.prompts import lines_of
from flexgen_h2o.models.load import find_model

ARTICLES = common.ROOT.parent / "shared" / "data" / "xsum_0shot.jsonl"
MARGIN = 16  # tokens that a shortened article may grow by when it is encoded again
OURS = {"h2o": ["--hh-ratio", "0.1"], "full": []}


@dataclass(frozen=True)
class Job:
    """A finished process. tokens: the new tokens of each article."""

    seconds: float
    tokens: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def main() -> None:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--input", type=Path, default=ARTICLES, help="article lines, JSON")
    add("--articles", type=positive, default=1000)
    add("--model", default="opt-tiny", help="opt-tiny, or a Hugging Face folder with a tokenizer")
    add("--dtype", default="bfloat16")
    add("--rounds", type=positive, default=3)
    add("--hf-batches", type=positive, nargs="+", default=[8, 16, 32, 64, 128])
    add("--hf-share", type=float, default=0.15, help="share of the articles that hf's batch size is chosen by")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        records = read_articles(args.input, args.articles, args.model)
        everything, some = work / "all.jsonl", work / "some.jsonl"
        write_lines(everything, records)
        write_lines(some, records[:: max(1, round(1 / args.hf_share))])
        common.wait_for_quiet(args.quiet_wait)
        tried = {batch: run_hf(args, some, work, batch).tokens_per_s for batch in args.hf_batches}
        best = max(tried, key=tried.__getitem__)
        print(f"# hf on {args.hf_share:.0%}: " + ", ".join(f"{b}: {rate:.0f} tokens/s" for b, rate in tried.items()))
        runs = {name: partial(run_ours, args, flags, everything, work) for name, flags in OURS.items()}
        runs["hf"] = partial(run_hf, args, everything, work, best)
        rounds: list[dict[str, Job]] = []
        for number in range(args.rounds):
            busy = common.wait_for_quiet(args.quiet_wait)
            order = list(runs) if number % 2 == 0 else list(runs)[::-1]
            jobs = {name: runs[name]() for name in order}
            rounds.append(jobs)
            print(f"# busy {busy:.0%}; " + "; ".join(f"{name} {job.seconds:.1f} s" for name, job in jobs.items()))
    result = summary(rounds, best, tried)
    common.finish(result, args.output)


def read_articles(path: Path, count: int, model_name: str) -> list[dict[str, Any]]:
    """Greedy records whose articles leave room for their new tokens. UsageError: the file has none, or another line."""
    model = find_model(model_name, None, None)
    assert model.tokenizer is not None
    records = [_record(place, line) for place, line in islice(lines_of(path, "--input"), count)]
    if not records:
        raise UsageError(f"--input {path}: is empty; give a file of article lines")
    for record in records:
        record.update(temperature=0.0, top_p=1.0, logprobs=None)
        room = model.spec.max_positions - record["max_tokens"]
        ids = model.encode(record["article"])
        if len(ids) > room:
            record["article"] = model.tokenizer.decode(ids[MARGIN - room :], skip_special_tokens=True)
    return records


def _record(place: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not record.keys() >= {"article", "max_tokens", "stop"}:
        raise UsageError(f"{place}: is no JSON object with an article, max_tokens and stop")
    return record


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_ours(args: argparse.Namespace, flags: Sequence[str], source: Path, work: Path) -> Job:
    """Tokens in the order of the articles; RuntimeError where a row is an error."""
    output = work / "ours.jsonl"
    for old in work.glob("ours.jsonl*"):
        old.unlink()
    command = [sys.executable, "-m", "flexgen_h2o.batch", "--model", args.model, "--dtype", args.dtype, *flags]
    seconds = _seconds([*command, "--input", str(source), "--output", str(output)])
    tokens: dict[int, list[int]] = {}
    for line in output.read_text().splitlines():
        row = json.loads(line)
        if row["error"] is not None:
            raise RuntimeError(f"{row['custom_id']}: {row['error']['message']}")
        tokens[int(row["custom_id"].removeprefix("line-"))] = row["response"]["body"]["choices"][0]["token_ids"]
    return Job(seconds, [tokens[i] for i in sorted(tokens)])


def run_hf(args: argparse.Namespace, source: Path, work: Path, batch_size: int) -> Job:
    """Tokens in the order of the articles."""
    output = work / "hf.jsonl"
    folder = find_model(args.model, None, None).folder
    command = [sys.executable, str(Path(__file__).with_name("hf_job.py")), "--folder", str(folder)]
    flags = ["--dtype", args.dtype, "--batch-size", str(batch_size)]
    seconds = _seconds([*command, *flags, "--input", str(source), "--output", str(output)], common.peer_malloc()[0])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return Job(seconds, [row["token_ids"] for row in sorted(rows, key=lambda row: row["index"])])


def _seconds(command: Sequence[str], variables: dict[str, str] | None = None) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (variables or {}))
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return time.perf_counter() - start


def summary(rounds: Sequence[dict[str, Job]], batch_size: int, tried: dict[int, float]) -> dict[str, Any]:
    """Prints the table, returns the JSON object."""
    result: dict[str, Any] = {"hf_batch_size": batch_size, "hf_tried": tried, "systems": {}}
    shown = []
    for name in (*OURS, "hf"):
        rate = common.Spread([jobs[name].tokens_per_s for jobs in rounds])
        seconds = common.Spread([jobs[name].seconds for jobs in rounds])
        ratio = common.ratio_of(*([jobs[n].tokens_per_s for jobs in rounds] for n in (name, "hf")))
        tokens = rounds[-1][name].tokens
        same = sum(a == b for a, b in zip(tokens, rounds[-1]["hf"].tokens, strict=True))
        result["systems"][name] = {
            "seconds": seconds, "tokens_per_s": rate, "over_hf": ratio,
            "tokens": sum(map(len, tokens)), "rows": len(tokens), "rows_with_hf_tokens": same,
        }  # fmt: skip
        shown.append(
            (name, f"{seconds.show('s', 1)}, {rate.show('tokens/s', 0)}, {ratio.show('of hf')}, {same} rows as hf")
        )
    common.table(f"{len(tokens)} articles, hf at its best batch of {batch_size}", shown)
    return result


if __name__ == "__main__":
    sys.exit(common.door(main))
