"""A job's memory does not grow with its rows, though one block runs them all: real jobs, engine and
files."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.llm import LLM
from tests.unit.jobs.stub import run_job, write_lines

EARLY = 1_000
LATE = 4_000
# bytes; a float that stays of each row would be 72,000, and a list of each sweep twice that
MAX_GROWTH = 24_000


class Watched(LLM):
    """Notes what Python holds after EARLY rows and after LATE ones. reports: of the job's runs."""

    rows = 0

    def run(self, requests: Any, on_finished: Any, *args: Any, **how: Any) -> Any:
        def finish(done: Any) -> None:
            on_finished(done)
            before = self.rows
            self.rows = self.rows + len(done)
            for mark in (EARLY, LATE):
                if before < mark <= self.rows:
                    gc.collect()
                    self.held[mark] = tracemalloc.get_traced_memory()[0]

        self.held: dict[int, int] = {}
        return super().run(requests, finish, *args, **how)


@pytest.fixture
def tracing() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.slow
def test_memory_is_flat_in_rows(ids_model: Path, tmp_path: Path, tracing: None) -> None:
    """Rows differ in length, seed and end; some are errors."""
    generator = random.Random(0)
    lines: list[Any] = []
    for i in range(LATE + 100):
        ids = [generator.randrange(4, 120) for _ in range(generator.randint(4, 8))]
        lines.append(
            {
                "prompt_token_ids": ids,
                "max_tokens": generator.randint(1, 4),
                "temperature": i % 2,
                "seed": i,
            }
        )
    lines[10::100] = ["{bad"] * len(lines[10::100])
    source = write_lines(tmp_path / "in.jsonl", *lines)
    del lines
    llm = Watched(str(ids_model), Policy(16, 2), dtype="float32", offload_dir=tmp_path / "offload")
    with llm:
        job = run_job(llm, source, tmp_path / "out.jsonl", window=64, refill=True)  # type: ignore[arg-type]
        assert llm.report is not None and llm.report.extra["blocks"] == 1
        assert llm.report.extra["refilled"] > LATE - 200
        assert (job.status.done, job.status.errors) == (LATE + 100, (LATE + 100) // 100)
        assert llm.report.num_prompts == LATE + 100 - job.status.errors
    growth = llm.held[LATE] - llm.held[EARLY]
    assert growth < MAX_GROWTH, f"{growth} bytes for {LATE - EARLY} rows"
