"""Many clients beside a batch, and kills: nothing is lost or doubled, and memory stays bounded."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serving.conftest import Running, Start
from tests.serving.test_many_batches import batch_of, is_over, send

CLIENTS = 30
VOCABULARY = 2048
Row = dict[str, Any]


@pytest.mark.slow
def test_nothing_is_lost_or_doubled(start: Start, tmp_path: Path) -> None:
    """Answers beside a batch, and those of a batch whose server is killed three times, are the
    answers alone."""
    asked = make_rows(150, seed=1)
    rows = make_rows(300, seed=2)
    server = start(tmp_path)
    alone = complete(server, asked)
    memory = psutil.Process(server.pid).memory_info().rss
    batch = run_batch(start, tmp_path, server, rows)
    together = list[list[list[int]]]()
    side = threading.Thread(target=lambda: together.append(complete(server, asked)))
    side.start()
    assert run_batch(start, tmp_path, server, rows) == batch
    side.join()
    assert together == [alone]
    assert psutil.Process(server.pid).memory_info().rss < 1.25 * memory
    assert run_batch(start, tmp_path, server, rows, kills=3) == batch


def make_rows(count: int, seed: int) -> list[Row]:
    draw = random.Random(seed)
    return [
        {
            "prompt": [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(1, 60))],
            "max_tokens": draw.randint(1, 24),
            "temperature": draw.choice([0.0, 0.8]),
            "seed": i,
        }
        for i in range(count)
    ]


def complete(server: Running, asked: list[Row]) -> list[list[int]]:
    """Return the token ids of all completions, asked for by CLIENTS clients at once."""
    with server.web as web, ThreadPoolExecutor(CLIENTS) as pool:
        found = pool.map(lambda row: web.post("/v1/completions", json=row).json(), asked)
        return [one["choices"][0]["token_ids"] for one in found]


def run_batch(
    start: Start, folder: Path, server: Running, rows: list[Row], kills: int = 0
) -> dict[str, list[int]]:
    """Run a batch to its end while the server is killed `kills` times. Return token ids by custom
    id."""
    lines = [
        {"custom_id": f"r{i}", "url": "/v1/completions", "method": "POST", "body": row}
        for i, row in enumerate(rows)
    ]
    with server.web as web:
        batch_id = send(web, "".join(json.dumps(line) + "\n" for line in lines).encode())
    draw = random.Random(3)
    for moment in sorted(draw.uniform(0.02, 0.9) * len(rows) for _ in range(kills)):
        with server.web as web:
            while batch_of(web, batch_id)["request_counts"]["completed"] < moment:
                assert not is_over(web, batch_id), "give more rows"
                time.sleep(0.05)
            server.send(signal.SIGKILL)
        server.wait()
        server = start(folder)
    with server.web as web:
        while not is_over(web, batch_id):
            time.sleep(0.05)
        found = batch_of(web, batch_id)
        assert found["status"] == "completed", found["errors"]
        text = web.get(f"/v1/files/{found['output_file_id']}/content").text
    answers = [json.loads(line) for line in text.splitlines()]
    ids = {one["custom_id"]: one["response"]["body"]["choices"][0]["token_ids"] for one in answers}
    assert len(answers) == len(ids) == len(rows)
    return ids
