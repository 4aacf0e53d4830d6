"""In bf16 and in int8, resident matrices are blocked and streamed ones are not: the same logits, in
bf16 as near fp32's as bf16 is."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

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
WARM_UP = (
    BLOCK_ROWS,
    BLOCK_ROWS,
)  # what a run multiplies once before it begins, also where nothing else is blocked


def logits(
    dtype: str, placement: str, offload_dir: Path, device_mem: str | None = None, int8: bool = False
) -> torch.Tensor:
    """Of all rows and steps, with given tokens. The shipped model's width can be blocked."""
    watch = LogitsByRow()
    policy = Policy(2, 2, PLACEMENTS[placement], int8_compute=int8)
    budget = MemoryBudget(device=device_mem)
    with LLM(
        "opt-tiny", policy, dtype=dtype, device="cpu", budget=budget, offload_dir=offload_dir
    ) as llm:
        llm.follow(PROMPTS, CONTINUATIONS, watch)
    return torch.stack(watch.of_rows)


def count_blocks(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[int]:
    """The rows of each part that a module is about to block, but for the warm-up's."""
    blocked: list[int] = []
    block = module.block_words

    def counted(words: torch.Tensor, memory: torch.Tensor) -> None:
        if (
            len(words),
            words.shape[1] * words.itemsize // (2 if module is linear else 1),
        ) != WARM_UP:
            blocked.append(len(words))
        block(words, memory)

    monkeypatch.setattr(module, "block_words", counted)
    return blocked


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return logits("float32", "all on device", tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Nothing is blocked: everything comes from disk."""
    return logits("bfloat16", "weights on disk", tmp_path_factory.mktemp("plain"))


def test_bf16_is_near_fp32(exact: torch.Tensor, plain: torch.Tensor) -> None:
    assert (plain - exact).abs().max() < NEAR_FP32 * exact.std()


@pytest.mark.parametrize(
    ("placement", "device_mem", "int8"),
    [
        ("all on device", None, False),
        ("weights on host", None, False),
        ("weights split three ways", "1GiB", False),
        ("all on device", None, True),
        ("weights split three ways", "1GiB", True),
    ],
)
def test_blocked_or_not_is_no_difference(
    placement: str,
    device_mem: str | None,
    int8: bool,
    plain: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = logits("bfloat16", "weights on disk", tmp_path, int8=True) if int8 else plain
    blocked = count_blocks(monkeypatch, int8_rows if int8 else linear)
    assert torch.equal(logits("bfloat16", placement, tmp_path, device_mem, int8), want)
    inputs = torch.uint8 if int8 else torch.bfloat16
    assert bool(blocked) == (products.has_loop(inputs) and device_mem is None)
