"""Claim: a server under load loses no row and doubles none, its memory stays bounded, and a kill costs rows in flight.

Method: `flexgen_h2o.serve` with opt-tiny (fp32, all in RAM) in a process of its own. Completions of token ids (4 to
64, 4 to 32 new ones, greedy) by many clients at once, alone; a batch of such rows, alone; both together, whose answers
must be those from before, token by token. Then the batch again, with the server killed (SIGKILL) some times at moments
drawn by chance, and started again. RSS is read from /proc twice a second.
Figures: seconds of a completion (p50, p99) and rows a second of the batch, alone and together; RSS after the first
phase, and at most.

    python -m bench.jobs.server_load [--clients 200 --completions 5000 --rows 10000 --kills 3] [--output FILE]
        [-- more flags of serve]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx2

from bench import common
from flexgen_h2o.cli_common import count, positive
from flexgen_h2o.core.errors import FlexgenError

VOCABULARY = 2048
FLAGS = (
    *("--model", "opt-tiny", "--device", "cpu", "--dtype", "float32", "--percent", "0", "100", "0", "100", "0", "100"),
    *("--port", "0", "--max-len", "128"),
)
Row = dict[str, Any]


def main() -> None:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--clients", type=positive, default=200)
    add("--completions", type=positive, default=5000)
    add("--rows", type=positive, default=10_000, help="of the batch (10000)")
    add("--kills", type=count, default=3)
    add("--gpu-batch-size", type=positive, default=32)
    add("serve_flags", nargs="*", help="after --: more flags of flexgen_h2o.serve")
    args = parser.parse_args()
    busy = common.wait_for_quiet(args.quiet_wait)
    with tempfile.TemporaryDirectory() as folder:
        result = {"benchmark": "server_load", "busy_before": busy, **vars(args), **run(Path(folder), args)}
    result.pop("output")
    seconds = [f"{result[f'completions_{name}']['p50_s']:.2f} s, p99 {result[f'completions_{name}']['p99_s']:.2f} s"
               for name in ("alone", "together")]  # fmt: skip
    rows = [f"{result[f'batch_{name}']['rows_per_s']:.1f} rows/s" for name in ("alone", "together", "killed")]
    sizes = f"{result['rss_first'] / common.MB:.0f} MB, at most {result['rss_most'] / common.MB:.0f} MB"
    lines = [
        ("completions alone, p50", seconds[0]), ("together, p50", seconds[1]), ("batch alone", rows[0]),
        ("together", rows[1]), (f"with {args.kills} kills", rows[2]), ("RSS after the first phase", sizes),
    ]  # fmt: skip
    common.table("a server under load", lines)
    common.finish(result, args.output)


def run(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    asked, rows = make_rows(args.completions, 1), make_rows(args.rows, 2)
    server, found = Server(work, args), dict[str, Any]()
    try:
        found["completions_alone"], alone = asyncio.run(complete(server.url, asked, args.clients))
        found["rss_first"] = server.rss()
        found["batch_alone"], batch = run_batch(server, rows)
        answers: dict[str, Any] = {}
        side = threading.Thread(
            target=lambda: answers.update(done=asyncio.run(complete(server.url, asked, args.clients)))
        )
        side.start()
        found["batch_together"], together = run_batch(server, rows)
        side.join()
        if "done" not in answers:
            raise FlexgenError("the clients beside the batch have failed")
        found["completions_together"] = answers["done"][0]
        if answers["done"][1] != alone or together != batch:
            raise FlexgenError("answers together are not those alone")
        found["batch_killed"], killed = run_batch(server, rows, args.kills)
        if killed != batch:
            raise FlexgenError("answers of the batch that was killed are not those of the other")
        found["rss_most"] = server.most
    finally:
        server.end()
    return found


def make_rows(size: int, seed: int) -> list[Row]:
    draw = random.Random(seed)
    return [
        {
            "prompt": [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(4, 64))],
            "max_tokens": draw.randint(4, 32),
        }
        for _ in range(size)
    ]


class Server:
    """A server that can be killed and started again. most: of its RSS up to now."""

    def __init__(self, work: Path, args: argparse.Namespace) -> None:
        self._work, self._args, self.most = work, args, 0
        self.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self) -> None:
        flags = [
            *FLAGS, "--offload-dir", "offload", "--state-dir", "state", "--gpu-batch-size", self._args.gpu_batch_size,
            "--num-gpu-batches", 2, *self._args.serve_flags,
        ]  # fmt: skip
        with (self._work / "out").open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flexgen_h2o.serve", *map(str, flags)], cwd=self._work, stdout=out,
                env={**os.environ, "PYTHONPATH": str(common.ROOT)},
            )  # fmt: skip
        while not (found := re.search(r"http://\S+/v1\n", (self._work / "out").read_text())):
            if self._process.poll() is not None:
                raise FlexgenError(f"serve: exit code {self._process.returncode}")
            time.sleep(0.05)
        self.url = found[0].strip()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()

    def rss(self) -> int:
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]

    def _watch(self) -> None:
        while True:
            try:
                self.most = max(self.most, self.rss())
            except (OSError, TypeError):
                pass  # it is being started again
            time.sleep(0.5)


async def complete(url: str, asked: list[Row], clients: int) -> tuple[dict[str, float], list[list[int]]]:
    """All completions by so many clients at once: their seconds, and token ids in their order."""
    waiting, seconds, done = list(enumerate(asked)), list[float](), dict[int, list[int]]()
    waiting.reverse()

    async def client(web: httpx2.AsyncClient) -> None:
        while waiting:
            i, row = waiting.pop()
            began = time.perf_counter()
            answer = await web.post("/completions", json=row)
            if answer.status_code != 200:
                raise FlexgenError(f"a completion: {answer.status_code} {answer.text[:200]}")
            seconds.append(time.perf_counter() - began)
            if i in done:
                raise FlexgenError(f"completion {i} came twice")
            done[i] = answer.json()["choices"][0]["token_ids"]

    began, limits = time.perf_counter(), httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as web:
        await asyncio.gather(*(client(web) for _ in range(clients)))
    cuts = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
    whole = time.perf_counter() - began
    figures = {"p50_s": cuts[49], "p99_s": cuts[98], "seconds": whole, "rows_per_s": len(asked) / whole}
    return figures, [done[i] for i in range(len(asked))]


def run_batch(server: Server, rows: list[Row], kills: int = 0) -> tuple[dict[str, float], dict[str, list[int]]]:
    """A batch to its end, the server killed so often meanwhile: its figures, and token ids by custom id."""
    draw, began = random.Random(3), time.perf_counter()
    lines = [{"custom_id": f"r{i}", "url": "/v1/completions", "method": "POST", "body": r} for i, r in enumerate(rows)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    with httpx2.Client(base_url=server.url, timeout=None) as web:
        file = web.post("/files", files={"file": ("rows.jsonl", data)}, data={"purpose": "batch"}).json()
        batch = web.post("/batches", json={**body, "input_file_id": file["id"]}).json()
    moments = sorted(draw.uniform(0.02, 0.9) * len(rows) for _ in range(kills))
    while True:
        with httpx2.Client(base_url=server.url, timeout=None) as web:
            found = web.get(f"/batches/{batch['id']}").json()
            if found["status"] in ("completed", "failed", "cancelled"):
                break
        if moments and found["request_counts"]["completed"] >= moments[0]:
            moments.pop(0)
            server.kill()
            server.start()
        time.sleep(0.05)
    seconds = time.perf_counter() - began
    if found["status"] != "completed" or found["request_counts"]["completed"] != len(rows):
        raise FlexgenError(f"the batch: {found['status']}, {found['request_counts']}, {found['errors']}")
    if moments:
        raise FlexgenError(f"the batch was done before {len(moments)} of the kills; give more rows")
    with httpx2.Client(base_url=server.url, timeout=None) as web:
        text = web.get(f"/files/{found['output_file_id']}/content").text
    answers = [json.loads(line) for line in text.splitlines()]
    ids = {one["custom_id"]: one["response"]["body"]["choices"][0]["token_ids"] for one in answers}
    if len(answers) != len(ids) or len(ids) != len(rows):
        raise FlexgenError(f"the batch's file has {len(answers)} rows of {len(ids)} ids, for {len(rows)}")
    return {"seconds": seconds, "rows_per_s": len(rows) / seconds}, ids


if __name__ == "__main__":
    sys.exit(common.door(main))
