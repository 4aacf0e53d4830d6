"""What a server's engine is opened for: all rows within its limits have room, whatever is kept of
them. No server."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.kvcache.eviction import H2ONorm
from flexgen_h2o.llm import LLM
from flexgen_h2o.serving.block import Service


@pytest.mark.parametrize(("rows", "length"), [(1, 512), (2, 511), (4, 600)])
def test_rows_have_room(rows: int, length: int, tmp_path: Path) -> None:
    policy = Policy(2, 2, compress_cache=True, cache_bits="4/3", cache_window=16)
    eviction = H2ONorm(kv_bytes=0.2)
    with LLM("opt-tiny", policy, eviction, "cpu", "float32", offload_dir=tmp_path) as llm:
        llm.share_prefix = "off"
        service = Service(llm, rows, length, 20, 0.25)
        service.open()
        for total in (length + 1, 513, 512, 511, 480):
            for new in (2, 32, total - 128, total - 1):
                asked = Sequence(0, (5,) * (total - new), params=SamplingParams(max_tokens=new))
                assert total > length + 1 or llm.has_room([asked]), (total, new)
