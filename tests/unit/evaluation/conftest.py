"""The shipped model, opened in float32 on the plain CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flexgen_h2o import LLM, Policy


@pytest.fixture
def llm(tmp_path: Path, plain_cpu: None) -> Iterator[LLM]:
    with LLM("opt-tiny", Policy(4, 2), dtype="float32", offload_dir=tmp_path / "offload") as opened:
        yield opened
