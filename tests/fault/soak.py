"""Real jobs, killed with -9 at random moments: every row once, the tokens of a job that nobody
disturbs, nothing left.

FLEXGEN_SOAK_KILLS: how many kills, over all kinds of jobs (100). FLEXGEN_SOAK_SEED: of the moments
and of the input (a new one; it is printed when a job fails).
"""

from __future__ import annotations

import json
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fault.jobs import kill_until_done, launch, rows_of, tokens_of

ROWS = 100
MAX_NEW = 12
KILLS = int(os.environ.get("FLEXGEN_SOAK_KILLS", "100"))
SEED = int(os.environ.get("FLEXGEN_SOAK_SEED") or random.SystemRandom().randrange(2**32))

RAM = "--percent 100 0 100 0 100 0"
DISK = "--percent 0 0 0 0 0 0"
THREE_TIERS = "--device-mem 32MiB --percent 30 30 30 30 30 30"
H2O = "--hh-ratio 0.2"
PACKED = "--compress-weight --compress-cache"
KINDS = {
    "ram": f"{RAM} --refill --share-prefix on",
    "ram-h2o": f"{RAM} {H2O} --no-refill --share-prefix auto",
    "disk": f"{DISK} --no-refill --share-prefix on",
    "disk-h2o": f"{DISK} {H2O} --refill --share-prefix on",
    "three-tiers": f"{THREE_TIERS} --refill --share-prefix on",
    "three-tiers-h2o": f"{THREE_TIERS} {H2O} --refill --share-prefix on --cpu-cache-compute",
    "three-tiers-packed": f"{THREE_TIERS} {PACKED} --refill --share-prefix on",
}


def write_requests(folder: Path, generator: random.Random) -> None:
    """Rows that begin alike and rows that do not, greedy and drawn, with seeds and without; some
    that cannot be run."""
    begins = [
        "\n".join(f"def {word}_{i}(x):\n    return x" for i in range(n))
        for word, n in (("f", 4), ("read", 7))
    ]
    lines: list[str] = []
    for i in range(ROWS):
        body: dict[str, Any] = {"max_tokens": generator.randint(1, MAX_NEW)}
        own = f"\ndef g{i}(y):\n" + "    y += 1\n" * generator.randint(0, 6)
        body["prompt"] = (begins[i % 3] if i % 3 < 2 else "") + own
        if i % 2:
            body |= {
                "temperature": generator.uniform(0.3, 1.5),
                "top_p": generator.choice([1.0, 0.9]),
            }
        if i % 4 == 1:
            body |= {"seed": generator.randrange(2**31), "top_k": generator.choice([0, 20])}
        lines.append(json.dumps({"custom_id": f"row-{i}", "url": "/v1/completions", "body": body}))
    bad = ["{bad", json.dumps({"custom_id": "unknown", "url": "/v1/embeddings", "body": {}})]
    for line in bad:
        lines.insert(generator.randrange(ROWS), line)
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def folder_of(parent: Path) -> Path:
    """With the input, which is the same for all jobs."""
    (parent / "offload").mkdir(parents=True)
    write_requests(parent, random.Random(SEED))
    return parent


def answer(kind: str, parent: Path) -> tuple[dict[str, list[int]], float]:
    """The tokens of an undisturbed job by custom id, and the seconds to its first row."""
    folder = folder_of(parent / "undisturbed")
    began = time.monotonic()
    job = launch(folder, *KINDS[kind].split())
    job.wait_for_moment(lambda: job.lines() > 0, random.Random(0))
    first_row_s = time.monotonic() - began
    assert job.wait() == 0, job.err
    tokens = tokens_of(rows_of(job.output))
    assert len(tokens) == ROWS + 2 and sum(map(len, tokens.values())) > ROWS * MAX_NEW / 4
    assert len({tuple(found) for found in tokens.values()}) > ROWS / 3, (
        "rows that are alike tell nothing"
    )
    assert_nothing_left(folder)
    return tokens, first_row_s


def assert_nothing_left(folder: Path) -> None:
    """Check that no run has left a file. Packed weights stay."""
    left = [path.name for path in (folder / "offload").iterdir()]
    assert not [name for name in left if name.startswith(("run-", "."))]


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_jobs_lose_nothing(kind: str, tmp_path: Path) -> None:
    print(f"FLEXGEN_SOAK_SEED={SEED}")
    generator = random.Random(f"{SEED} {kind}")
    names = list(KINDS)
    wanted = len(range(names.index(kind), KILLS, len(names)))
    tokens, first_row_s = answer(kind, tmp_path)
    hit = 0
    jobs = 0
    while hit < wanted:
        folder = folder_of(tmp_path / f"job{jobs}")
        jobs += 1
        hit += kill_until_done(
            partial(launch, folder, *KINDS[kind].split()),
            tokens,
            wanted - hit,
            lambda job, left: job.wait_for_any_moment(ROWS, first_row_s, left, generator),
            generator,
        )
        assert_nothing_left(folder)
    print(f"{kind}: {hit} kills, {jobs} jobs")
