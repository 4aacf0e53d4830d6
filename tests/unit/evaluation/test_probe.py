"""The probe drops nothing and sees the attention probabilities of each decode step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, Policy
from flexgen_h2o.evaluation.metrics import FullWatch, Probe
from flexgen_h2o.kvcache.eviction import Full
from flexgen_h2o.kvcache.eviction.policy import Columns
from tests.parity.cases import BASES
from tests.parity.reference import random_model

LENGTHS, STEPS = (7, 3, 3, 5), 6


def watched(llm: LLM, eviction: object, continuations: torch.Tensor) -> FullWatch:
    watch = FullWatch(LENGTHS, STEPS, frozenset(range(STEPS - 1)))
    prompts = [[10 + i] * n for i, n in enumerate(LENGTHS)]
    llm.eviction = eviction
    slots = watch.see_slots if isinstance(eviction, Probe) else None
    llm.follow(prompts, continuations.tolist(), watch.see_logits, slots)
    return watch


@pytest.fixture
def grouped(tmp_path: Path, plain_cpu: None) -> LLM:
    """A random model with 3 query heads a kv-head; micro-batches of 3, so that rows are compacted and split."""
    random_model(model_type="llama").save_pretrained(tmp_path / "m")
    return LLM(str(tmp_path / "m"), Policy(3, 2), dtype="float32", offload_dir=tmp_path / "o")


def test_weights_of_each_step_sum_to_the_query_heads_of_a_kv_head(grouped: LLM) -> None:
    group = BASES["llama"]["num_attention_heads"] // BASES["llama"]["num_key_value_heads"]
    with grouped:
        found = watched(grouped, Probe(), torch.randint(0, 120, (4, STEPS)))
    blocks = BASES["llama"]["num_hidden_layers"]
    assert sorted(found.weights) == [(step, block) for step in range(STEPS - 1) for block in range(blocks)]
    for (step, _), weights in found.weights.items():
        assert weights.shape == (4, BASES["llama"]["num_key_value_heads"], max(LENGTHS) + STEPS)
        assert torch.allclose(weights.sum(dim=-1), torch.tensor(float(group)), atol=1e-5)
        for row, length in enumerate(LENGTHS):
            assert (weights[row, :, : length + step + 1] > 0).all(), "every column is attended to"
            assert (weights[row, :, length + step + 1 :] == 0).all(), "a column that is not there yet"


def test_the_probe_computes_what_the_full_cache_does(grouped: LLM) -> None:
    continuations = torch.randint(0, 120, (4, STEPS))
    with grouped:
        probe, full = (watched(grouped, eviction, continuations) for eviction in (Probe(), Full()))
    assert (probe.logits - full.logits).abs().max() < 1e-4


def test_weights_are_put_where_their_columns_are() -> None:
    """Slots in no order, one of two rows of the run, a slot that is not filled."""
    watch = FullWatch([2, 3], 3, frozenset({1}))
    columns = Columns(
        block=4,
        positions=torch.tensor([[[3, 0, 4, 1, 2, 77]]], dtype=torch.int32),
        may_leave=torch.zeros(1, 1, 6, dtype=torch.bool),
        newest=torch.tensor([4]),
        heavy=torch.tensor([0]),
        scores=torch.tensor([[[0.3, 0.1, 0.4, 0.05, 0.15, float("nan")]]]),
    )
    watch.see_slots([1], torch.tensor([5]), columns)
    assert list(watch.weights) == [(1, 4)]
    assert torch.allclose(watch.weights[1, 4][1], torch.tensor([[0.1, 0.05, 0.15, 0.3, 0.4, 0.0]]))
    assert not watch.weights[1, 4][0].any()
