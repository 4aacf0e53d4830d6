"""In bf16 and in int8, resident matrices are blocked and streamed ones are not: the same logits, in
bf16 as near fp32's as bf16 is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, Policy
from flexgen_h2o.core.config import MemoryBudget
from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.kernels import int8 as int8_rows
from flexgen_h2o.kernels import linear, products
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import LogitsByRow

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [300, 301, 302]]
CONTINUATIONS = [[20, 21, 22], [23, 24, 25], [26, 27, 28]]
NEAR_FP32 = 0.08  # of the logits' standard deviation
# What a run multiplies once before it begins, also where nothing else is blocked.
WARM_UP = (BLOCK_ROWS, BLOCK_ROWS)
INT8 = {"int8_compute": True}
PACKED_INT8 = {**INT8, "compress_weight": True}


def logits(
    offload_dir: Path,
    placement: str,
    device_mem: str | None = None,
    switches: dict[str, bool] | None = None,
    dtype: str = "bfloat16",
) -> torch.Tensor:
    """Of all rows and steps, with given tokens. The shipped model's width can be blocked."""
    watch = LogitsByRow()
    policy = Policy(2, 2, PLACEMENTS[placement], **(switches or {}))
    budget = MemoryBudget(device_mem)
    with LLM("opt-tiny", policy, None, "cpu", dtype, budget, offload_dir) as llm:
        llm.follow(PROMPTS, CONTINUATIONS, watch)
    return torch.stack(watch.of_rows)


def test_bf16_is_near_fp32(tmp_path: Path) -> None:
    """Nothing is blocked: everything comes from disk."""
    exact = logits(tmp_path, "all on device", dtype="float32")
    found = logits(tmp_path, "weights on disk")
    assert (found - exact).abs().max() < NEAR_FP32 * exact.std()


@pytest.mark.parametrize(
    ("placement", "device_mem", "switches"),
    [
        ("all on device", None, {}),
        ("weights on host", None, {}),
        ("weights split three ways", "1GiB", {}),
        ("all on device", None, INT8),
        ("weights split three ways", "1GiB", INT8),
        ("weights split three ways", "1GiB", PACKED_INT8),
    ],
)
def test_blocked_or_not_is_no_difference(
    placement: str,
    device_mem: str | None,
    switches: dict[str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bit. In int8 sums are whole numbers, however a matrix is split."""
    want = logits(tmp_path, "weights on disk", None, switches)
    module: Any = int8_rows if switches else linear
    inputs = torch.uint8 if switches else torch.bfloat16
    blocked: list[int] = []
    block = module.block_words

    def counted(words: torch.Tensor, memory: torch.Tensor) -> None:
        columns = words.shape[1] * words.itemsize // inputs.itemsize
        if (len(words), columns) != WARM_UP:
            blocked.append(len(words))
        block(words, memory)

    monkeypatch.setattr(module, "block_words", counted)
    assert torch.equal(logits(tmp_path, placement, device_mem, switches), want)
    assert bool(blocked) == (products.has_loop(inputs) and device_mem is None)
