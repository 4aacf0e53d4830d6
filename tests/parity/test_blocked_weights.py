"""In bf16, resident matrices are blocked and streamed ones are not: both give fp32's logits, as near as bf16 is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexgen_h2o import LLM, Policy
from flexgen_h2o.config import MemoryBudget
from flexgen_h2o.kernels import blocked_rows
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import LogitsByRow

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [300, 301, 302]]
CONTINUATIONS = [[20, 21, 22], [23, 24, 25], [26, 27, 28]]
NEAR_FP32, SAME = 0.05, 0.02  # shares of the logits' spread


def logits(dtype: str, placement: str, offload_dir: Path, device_mem: str | None = None) -> torch.Tensor:
    """Of all rows and steps, with given tokens. The shipped model's width can be blocked."""
    watch, policy = LogitsByRow(), Policy(2, 2, PLACEMENTS[placement])
    budget = MemoryBudget(device=device_mem)
    with LLM("opt-tiny", policy, dtype=dtype, device="cpu", budget=budget, offload_dir=offload_dir) as llm:
        llm.follow(PROMPTS, CONTINUATIONS, watch)
    return torch.stack([torch.stack(watch.rows[row]) for row in range(len(PROMPTS))]).float()


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return logits("float32", "all on device", tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("device_mem", [None, "1GiB"])
@pytest.mark.parametrize("placement", ["all on device", "weights split three ways", "weights on disk"])
def test_bf16_is_near_fp32(placement: str, device_mem: str | None, exact: torch.Tensor, tmp_path: Path) -> None:
    found = logits("bfloat16", placement, tmp_path, device_mem)
    assert (found - exact).abs().max() < NEAR_FP32 * exact.std()


def test_blocked_or_not_is_no_difference_in_what_a_model_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = logits("bfloat16", "all on device", tmp_path)
    monkeypatch.setattr(blocked_rows, "_works", lambda: False)
    plain = logits("bfloat16", "all on device", tmp_path)
    assert (blocked - plain).abs().max() < SAME * plain.std()
