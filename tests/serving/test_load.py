"""Many clients beside a batch, and kills: what bench/jobs/server_load.py shows, with fewer rows."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.jobs import server_load


@pytest.mark.slow
def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """`run` raises where it is, and where answers are others than those alone."""
    args = argparse.Namespace(clients=30, completions=150, rows=300, kills=3, gpu_batch_size=8, serve_flags=[])
    found = server_load.run(tmp_path, args)
    assert found["rss_most"] < 1.25 * found["rss_first"]
