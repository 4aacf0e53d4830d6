"""Prompts, matrices and KV units larger than the pieces that they are computed and moved in."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o import MemoryBudget, Policy
from flexgen_h2o.core.units import TOKEN_CHUNK, TRANSFER_CHUNK
from flexgen_h2o.engine import workload
from flexgen_h2o.engine.scheduler import SweepInput
from flexgen_h2o.models import layers
from tests.parity.cases import PLACEMENTS
from tests.parity.conftest import Check
from tests.parity.reference import (
    Reference,
    assert_equal,
    make_reference,
    random_model,
    random_prompts,
)

WIDE = {
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 4999,
    "max_position_embeddings": 1100,
}
LENGTHS = (1050, 1050, 990, 1051, 3)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    assert LENGTHS[0] > TOKEN_CHUNK
    assert WIDE["vocab_size"] * WIDE["hidden_size"] * 4 > TRANSFER_CHUNK
    assert len(LENGTHS) * max(LENGTHS) * WIDE["hidden_size"] * 4 > TRANSFER_CHUNK
    model = random_model(std=0.1, **WIDE)
    return make_reference(
        model, tmp_path_factory.mktemp("model"), random_prompts(LENGTHS, seed=8), 3
    )


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        (Policy(5, 1, PLACEMENTS["all on disk"]), MemoryBudget()),
        (Policy(2, 3, PLACEMENTS["everything split 30/30"]), MemoryBudget("256MiB", "256MiB")),
    ],
    ids=["one batch", "split, device"],
)
def test_larger_than_a_chunk(
    policy: Policy, budget: MemoryBudget, large: Reference, tmp_path: Path
) -> None:
    assert_equal(large, policy, budget, tmp_path)


@pytest.mark.parametrize(
    ("shape", "configuration", "placement"),
    [
        ("normal", "device, 2x3, attends on host", "everything split 30/30"),
        ("post-norm, narrow embedding (350m)", "device, 4x1, joined", "kv on disk"),
        ("gpt_oss", "device, 2x2", "kv split three ways"),
    ],
)
def test_prompts_attend_in_parts(
    shape: str,
    configuration: str,
    placement: str,
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And layers compute a few tokens at a time, experts a few of their inputs."""
    parts = split_parts(monkeypatch)
    monkeypatch.setattr(layers, "TOKEN_CHUNK", 4)
    check(shape, placement, configuration, expert_group=2 if shape == "gpt_oss" else 0)
    assert max(parts) > 1


def split_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts have 8 tokens or a longer prompt from now on. Returns how many there were of each
    micro-batch in turn."""
    found = []
    parts = SweepInput.parts

    def counted(fed: SweepInput, most: int) -> list[SweepInput]:
        of_sweep = parts(fed, most)
        found.append(len(of_sweep))
        return of_sweep

    monkeypatch.setattr(workload, "TOKEN_CHUNK", 8)
    monkeypatch.setattr(SweepInput, "parts", counted)
    return found
