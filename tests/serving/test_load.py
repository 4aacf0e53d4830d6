"""Many clients beside a batch, and kills: nothing is lost or doubled, and memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 30
VOCABULARY = 2048
FLAGS = (
    *(
        "--model",
        "opt-tiny",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--percent",
        "0",
        "100",
        "0",
        "100",
        "0",
        "100",
    ),
    *("--port", "0", "--max-len", "128", "--offload-dir", "offload", "--state-dir", "state"),
    *("--gpu-batch-size", "8", "--num-gpu-batches", "2"),
)
Row = dict[str, Any]


@pytest.mark.slow
def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """Answers beside a batch, and those of a batch whose server is killed three times, are the
    answers alone."""
    asked = make_rows(150, seed=1)
    rows = make_rows(300, seed=2)
    server = Server(tmp_path)
    try:
        alone = asyncio.run(complete(server.url, asked))
        rss_first = server.rss()
        batch = run_batch(server, rows)
        together = list[list[list[int]]]()
        side = threading.Thread(
            target=lambda: together.append(asyncio.run(complete(server.url, asked)))
        )
        side.start()
        assert run_batch(server, rows) == batch
        side.join()
        assert together == [alone]
        assert run_batch(server, rows, kills=3) == batch
        assert server.most < 1.25 * rss_first
    finally:
        server.end()


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

    def __init__(self, work: Path) -> None:
        self._work = work
        self.most = 0
        self.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self) -> None:
        with (self._work / "out").open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flexgen_h2o.serve", *FLAGS],
                cwd=self._work,
                stdout=out,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        while not (found := re.search(r"http://\S+/v1\n", (self._work / "out").read_text())):
            if self._process.poll() is not None:
                raise RuntimeError(f"serve: exit code {self._process.returncode}")
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


async def complete(url: str, asked: list[Row]) -> list[list[int]]:
    """Return the token ids of all completions, asked for by CLIENTS clients at once."""
    waiting = list(enumerate(asked))
    done = dict[int, list[int]]()

    async def client(web: httpx2.AsyncClient) -> None:
        while waiting:
            i, row = waiting.pop()
            answer = await web.post("/completions", json=row)
            assert answer.status_code == 200, answer.text[:200]
            done[i] = answer.json()["choices"][0]["token_ids"]

    limits = httpx2.Limits(max_connections=CLIENTS)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as web:
        await asyncio.gather(*(client(web) for _ in range(CLIENTS)))
    return [done[i] for i in range(len(asked))]


def run_batch(server: Server, rows: list[Row], kills: int = 0) -> dict[str, list[int]]:
    """Run a batch to its end while the server is killed `kills` times. Return token ids by custom
    id."""
    draw = random.Random(3)
    lines = [
        {"custom_id": f"r{i}", "url": "/v1/completions", "method": "POST", "body": r}
        for i, r in enumerate(rows)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    with httpx2.Client(base_url=server.url, timeout=None) as web:
        file = web.post(
            "/files", files={"file": ("rows.jsonl", data)}, data={"purpose": "batch"}
        ).json()
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
    assert found["status"] == "completed" and found["request_counts"]["completed"] == len(rows), (
        found["errors"]
    )
    assert not moments, "the batch was done before all kills; give more rows"
    with httpx2.Client(base_url=server.url, timeout=None) as web:
        text = web.get(f"/files/{found['output_file_id']}/content").text
    answers = [json.loads(line) for line in text.splitlines()]
    ids = {one["custom_id"]: one["response"]["body"]["choices"][0]["token_ids"] for one in answers}
    assert len(answers) == len(ids) == len(rows)
    return ids
