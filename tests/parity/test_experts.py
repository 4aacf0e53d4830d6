"""Mixtures of experts: transformers' tokens in any grouping, placement and block; what nobody chose
stays on disk."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.model import Experts, TensorSpec
from flexgen_h2o.engine.stores import WeightStore
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Hidden, moe
from tests.eviction.engine import run_with
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, thinned
from tests.parity.conftest import EOS_LENGTHS, Check
from tests.parity.reference import (
    ByShape,
    Reference,
    folder_with_eos,
    greedy,
    opened,
    random_prompts,
    run,
    token_that_ends,
    tokens_of,
)

SHAPES = (
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "olmoe",
    "qwen3_moe, the first layer an MLP, odd sizes",
)
GROUPS = (1, 3, 0)
SPLIT = Policy(2, 5, (0, 0, 50, 0, 0, 0), expert_group=3)
NAMES = list(CONFIGURATIONS)
CASES = [
    (SHAPES[(i + 2 * j) % 5], placement, NAMES[(3 * i + j) % len(NAMES)], GROUPS[(i + 2 * j) % 3])
    for i, placement in enumerate(PLACEMENTS)
    for j in range(2)
]


@pytest.mark.parametrize(("shape", "placement", "configuration", "group"), thinned(CASES, 3))
def test_tokens_and_logits_are_those_of_transformers(
    shape: str, placement: str, configuration: str, group: int, check: Check
) -> None:
    check(shape, placement, configuration, expert_group=group)


@pytest.mark.parametrize(
    ("shape", "policy"),
    thinned([("qwen3_moe", SPLIT), ("gpt_oss", Policy(4, 3)), ("qwen3_moe", Policy(2, 5))], 2),
)
def test_rows_that_end_while_others_of_their_block_go_on(
    shape: str, policy: Policy, reference: ByShape, tmp_path: Path
) -> None:
    """Among them all rows of a micro-batch, and some of one that others are behind."""
    known = reference(shape)
    prompts = random_prompts(EOS_LENGTHS, seed=2)
    params = SamplingParams(max_tokens=9)
    eos = token_that_ends([greedy(known.model, p, params.max_tokens) for p in prompts])
    want = [greedy(known.model, p, params.max_tokens, eos) for p in prompts]
    assert len({len(row) for row in want}) >= 3
    folder = folder_with_eos(known.folder, tmp_path / "model", eos)
    assert tokens_of(run(folder, prompts, policy, tmp_path, params)) == want
    with opened(folder, replace(policy, num_gpu_batches=2), tmp_path) as llm:
        assert run_with(llm, prompts, params, refill=True).tokens == want


@pytest.mark.parametrize(
    ("stand_in", "prefill", "decode"),
    [(False, [36], [5]), (True, [21, 14, 1], [2, 2, 1])],
)
def test_the_micro_batches_of_a_block_are_computed_together(
    stand_in: bool,
    prefill: list[int],
    decode: list[int],
    reference: ByShape,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for each group of experts, in decode sweeps too; each alone where hidden states are
    brought to a device."""
    known = reference("qwen3_moe")
    rows = list[int]()
    experts = moe.experts

    def counted(spec: Any, w: Any, group: range, hidden: Hidden, ws: Workspace) -> None:
        rows.append(len(hidden.x))
        experts(spec, w, group, hidden, ws)

    monkeypatch.setattr(moe, "experts", counted)
    policy = Policy(2, 3, (0, 100, 0, 100, 0, 100), expert_group=8)
    budget = MemoryBudget("64MiB" if stand_in else None)
    out = run(known.folder, known.prompts, policy, tmp_path, SamplingParams(max_tokens=3), budget)
    assert tokens_of(out) == [row[:3] for row in known.tokens]
    blocks = known.model.config.num_hidden_layers
    assert rows == prefill * blocks + decode * blocks * 2


@pytest.mark.parametrize(("rows", "group"), [(1, 0), (2, 2)])
def test_groups_that_nobody_chose_are_not_read(
    rows: int,
    group: int,
    reference: ByShape,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = reference("olmoe")
    loaded = set[str]()
    load = WeightStore.load

    def noted(self: WeightStore, unit: int, *more: Any) -> Any:
        loaded.add(self.plan.units[unit].name)
        return load(self, unit, *more)

    monkeypatch.setattr(WeightStore, "load", noted)
    policy = Policy(1, rows, (0, 0, 100, 0, 100, 0), expert_group=group)
    run(known.folder, known.prompts[:rows], policy, tmp_path, SamplingParams(max_tokens=1))
    size = group or 1
    groups = {
        f"block {block} experts {expert // size * size} to {expert // size * size + size - 1}"
        for block, chosen in chosen_experts(known, known.prompts[:rows]).items()
        for expert in chosen
    }
    assert {name for name in loaded if "experts" in name} == groups


def chosen_experts(known: Reference, prompts: list[list[int]]) -> dict[int, set[int]]:
    """Of each block, the experts that tokens of the prompts go to in transformers."""
    found = defaultdict(set)
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _, __, out, i=i: found[i].update(out[2].flatten().tolist())
        )
        for i, layer in enumerate(known.model.model.layers)
    ]
    with torch.no_grad():
        for prompt in prompts:
            known.model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return found


def test_shares_of_groups() -> None:
    """Against counting every choice of a token: 2 of 4 experts."""
    experts = Experts(4, 2, 8, ((((TensorSpec("a", "a", (8, 8)),),) * 4),), ((),))
    asked = ((1, 1), (2, 1), (1, 2), (1, 4))
    shares = [experts.share_used(tokens, group) for tokens, group in asked]
    assert shares == pytest.approx([1 / 2, 3 / 4, 5 / 6, 1])
    assert [experts.group_size(*one) for one in ((0, 1), (0, 64), (9, 1))] == [1, 4, 4]
    # A stage of a pipeline with MLP layers only.
    assert experts.of_blocks([]).group_size(0, 64) == experts.count
