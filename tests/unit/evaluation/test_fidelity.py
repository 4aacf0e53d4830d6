"""Whole runs of the shipped model: what is lost is what masking says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import OPTForCausalLM

from flexgen_h2o import LLM, Policy
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.evaluation.fidelity import FidelityRunner, divergence
from flexgen_h2o.evaluation.rows import Case, TextRow
from flexgen_h2o.kvcache.eviction import Local

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


def test_local_is_what_masking_in_transformers_gives(llm: LLM, rows: list[TextRow]) -> None:
    """Prompts are computed in full; a decode step sees the sinks, the window and itself."""
    sinks = 2
    window = 5
    cell = Case("local", Local(heavy_size=0, recent_size=sinks + window, sinks=sinks), 0.3)
    _, (found,) = FidelityRunner(llm, 2**30).texts(rows, [cell])
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
    assert np.allclose(found[:, 0], want.mean(dim=1).numpy(), atol=1e-4)
