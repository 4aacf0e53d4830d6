"""Whole runs of the shipped model: nothing evicted is nothing lost, and what is lost is what
masking says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import OPTForCausalLM

from flexgen_h2o import LLM, Policy
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.evaluation.fidelity import FidelityRunner, FullWatch, Probe, divergence
from flexgen_h2o.evaluation.rows import Case, TextRow
from flexgen_h2o.kvcache.eviction import EVICTING, H2O, Full, Local
from tests.parity.cases import BASES
from tests.parity.reference import random_model

PROMPT = 24
STEPS = 9


@pytest.fixture
def llm(tmp_path: Path, plain_cpu: None) -> Iterator[LLM]:
    """The shipped model in float32."""
    with LLM("opt-tiny", Policy(4, 2), dtype="float32", offload_dir=tmp_path / "offload") as opened:
        yield opened


@pytest.fixture
def rows() -> list[TextRow]:
    """Five rows of random tokens, so that chunks and micro-batches are uneven."""
    ids = torch.randint(4, 2000, (5, PROMPT + STEPS)).tolist()
    return [TextRow(tuple(row[:PROMPT]), tuple(row[PROMPT:])) for row in ids]


def test_a_budget_for_everything_changes_nothing_at_all(llm: LLM, rows: list[TextRow]) -> None:
    cell = Case("h2o", H2O(heavy_size=64, recent_size=64))
    full_nll, (found,) = FidelityRunner(llm, 2**30, 4).texts(rows, [cell])
    assert (found.kl == 0).all() and not found.flipped.any()
    assert (found.nll == full_nll).all()
    assert found.mass.max() < 1e-6
    assert found.columns == PROMPT


def test_local_is_what_masking_in_transformers_gives(llm: LLM, rows: list[TextRow]) -> None:
    """Prompts are computed in full; a decode step sees the sinks, the window and itself."""
    sinks = 2
    window = 5
    cell = Case("local", Local(heavy_size=0, recent_size=sinks + window, sinks=sinks), 0.3)
    _, (found,) = FidelityRunner(llm, 2**30, 3).texts(rows, [cell])
    ids = torch.tensor([[*row.prompt, *row.continuation] for row in rows])
    place = torch.arange(PROMPT + STEPS)
    query = place.unsqueeze(1)
    column = place.unsqueeze(0)
    seen = (column <= query) & ((query < PROMPT) | (column < sinks) | (column >= query - window))
    model = OPTForCausalLM.from_pretrained(
        PACKAGED["opt-tiny"], dtype=torch.float32, attn_implementation="eager"
    )
    masks = [
        torch.where(m, 0.0, torch.finfo(torch.float32).min).expand(5, 1, -1, -1)
        for m in (column <= query, seen)
    ]
    with torch.no_grad():
        full, local = (
            model.eval()(
                input_ids=ids, attention_mask=mask, position_ids=place.expand(5, -1)
            ).logits[:, PROMPT:-1]
            for mask in masks
        )
    want = divergence(full.flatten(0, 1), local.flatten(0, 1)).view(5, -1)
    assert want.mean() > 0.01, "the masked model differs"
    assert np.allclose(found.kl, want.numpy(), atol=1e-4)


def test_greedy_continuations_are_the_full_cache_s_and_never_diverge_from_it(
    llm: LLM, rows: list[TextRow]
) -> None:
    runner = FidelityRunner(llm, 2**30, 0)
    rows = runner.greedy([replace(row, prompt=row.prompt[i:]) for i, row in enumerate(rows)], STEPS)
    everything = Case("h2o", EVICTING["h2o"](heavy_size=64, recent_size=64), 1.0)
    little = Case("local", EVICTING["local"](heavy_size=1, recent_size=1), 0.1)
    _, (found,) = runner.texts(rows, [everything])
    assert found.mass is None and (found.kl == 0).all()
    same, other = runner.first_divergence(rows, [everything, little], STEPS)
    assert (same == STEPS).all()
    assert (other >= 1).all(), "the first token comes from the exact prefill"
    assert (other < STEPS).any()


# ---- the probe drops nothing and sees the attention probabilities of each decode step

LENGTHS = (7, 3, 3, 5)
WATCHED = 6


def test_weights_of_each_step_sum_to_the_query_heads_of_a_kv_head(
    tmp_path: Path, plain_cpu: None
) -> None:
    """A random model with 3 query heads a kv-head; micro-batches of 3, so that rows are compacted
    and split."""
    random_model(model_type="llama").save_pretrained(tmp_path / "m")
    group = BASES["llama"]["num_attention_heads"] // BASES["llama"]["num_key_value_heads"]
    found = FullWatch(LENGTHS, WATCHED, frozenset(range(WATCHED - 1)))
    full = FullWatch(LENGTHS, WATCHED, frozenset())
    prompts = [[10 + i] * n for i, n in enumerate(LENGTHS)]
    continuations = torch.randint(0, 120, (4, WATCHED)).tolist()
    with LLM(
        str(tmp_path / "m"), Policy(3, 2), Probe(), dtype="float32", offload_dir=tmp_path / "o"
    ) as llm:
        llm.follow(prompts, continuations, found.see_logits, found.see_slots)
        llm.eviction = Full()
        llm.follow(prompts, continuations, full.see_logits)
    assert (found.logits - full.logits).abs().max() < 1e-4, (
        "the probe computes what the full cache does"
    )
    blocks = BASES["llama"]["num_hidden_layers"]
    assert sorted(found.weights) == [
        (step, block) for step in range(WATCHED - 1) for block in range(blocks)
    ]
    for (step, _), weights in found.weights.items():
        assert weights.shape == (4, BASES["llama"]["num_key_value_heads"], max(LENGTHS) + WATCHED)
        assert torch.allclose(weights.sum(dim=-1), torch.tensor(float(group)), atol=1e-5)
        for row, length in enumerate(LENGTHS):
            assert (weights[row, :, : length + step + 1] > 0).all(), "every column is attended to"
            assert (weights[row, :, length + step + 1 :] == 0).all(), (
                "a column that is not there yet"
            )
