"""The roofline against products that are counted one by one."""

from __future__ import annotations

import pytest

from flexgen_h2o.engine.report import Peak, RunWork, roofline, run_work
from flexgen_h2o.kvcache.prefixes import FedPrompts, PromptGroup
from flexgen_h2o.models import built_in_spec


def fed(group: PromptGroup) -> FedPrompts:
    found = FedPrompts()
    found.add([group])
    return found


@pytest.mark.parametrize("model", ["facebook/opt-125m", "facebook/opt-350m"])
def test_flops_are_those_of_every_product(model: str) -> None:
    found = built_in_spec(model)
    assert found is not None
    spec, _ = found
    d, ffn, narrow = spec.hidden_size, spec.ffn_size, spec.option("narrow")
    token = 2 * spec.num_blocks * (4 * d * d + 2 * d * ffn)
    head = 2 * spec.vocab_size * narrow + (2 * d * narrow if narrow != d else 0)
    work = run_work(spec, fed(PromptGroup(0, (3, 5))), 7, 1000.0)
    attention = spec.num_blocks * 2 * (3 * 3 + 5 * 5) * d
    assert work.prefill_flops == 8 * token + 2 * head + attention
    assert work.decode_flops == 7 * (token + head) and work.decode_kv_bytes == 1000


def test_a_shared_prefix_counts_once() -> None:
    found = built_in_spec("facebook/opt-125m")
    assert found is not None
    alone = run_work(found[0], fed(PromptGroup(0, (5, 5))), 0, 0.0)
    shared, one = (run_work(found[0], fed(group), 0, 0.0) for group in (PromptGroup(4, (1, 1)), PromptGroup(0, (4,))))
    head = 2 * 50272 * 768
    assert alone.prefill_flops - shared.prefill_flops == one.prefill_flops - head


def test_seconds_at_the_peak() -> None:
    assert roofline(RunWork(100.0, 50.0, 30.0), Peak(10.0, 3.0)).prefill_s == 10
    assert roofline(RunWork(100.0, 50.0, 30.0), Peak(10.0, 3.0)).decode_s == 5 + 10
