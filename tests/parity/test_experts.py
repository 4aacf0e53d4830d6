"""Mixtures of experts: transformers' tokens in any grouping, placement and block; what nobody chose
stays on disk."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.model import Experts, TensorSpec
from flexgen_h2o.core.units import TOKEN_CHUNK
from flexgen_h2o.engine import memory_plan
from flexgen_h2o.engine.stores import WeightStore
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Hidden, moe
from flexgen_h2o.models.layers import count_choices, mix_experts, sort_choices
from tests.eviction.engine import run_with
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, Configuration, thinned
from tests.parity.conftest import EOS_LENGTHS
from tests.parity.reference import (
    LOGIT_TOLERANCE,
    LogitsByRow,
    Reference,
    assert_equal,
    folder_with_eos,
    greedy,
    random_model,
    random_prompts,
    run,
    teacher_forced,
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
NAMES = list(CONFIGURATIONS)
CASES = [
    (SHAPES[(i + 2 * j) % 5], placement, NAMES[(3 * i + j) % len(NAMES)], GROUPS[(i + 2 * j) % 3])
    for i, placement in enumerate(PLACEMENTS)
    for j in range(2)
]


@pytest.mark.parametrize(("shape", "placement", "configuration", "group"), thinned(CASES, 3))
def test_tokens_and_logits_are_those_of_transformers(
    shape: str,
    placement: str,
    configuration: str,
    group: int,
    reference: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement], expert_group=group)
    assert_equal(reference(shape), policy, chosen.budget, tmp_path)


def drawn_shape(rng: random.Random) -> dict[str, Any]:
    """A mixture of any family, as `random_model` takes it: its sizes, experts, norms, biases and
    windows."""
    kind = rng.choice(("qwen3_moe", "mixtral", "olmoe", "gpt_oss"))
    heads = rng.choice((2, 4, 6))
    width = rng.randint(2, 8)
    layers = rng.randint(1, 3)
    ffn = rng.randint(5, 48)
    window = rng.choice((None, rng.randint(2, 20)))
    has_bias, is_normalised = (rng.random() < 0.5 for _ in range(2))
    own: dict[str, dict[str, Any]] = {
        "qwen3_moe": {
            "moe_intermediate_size": ffn,
            "intermediate_size": rng.randint(5, 80),
            "use_sliding_window": bool(window),
            "sliding_window": window,
            "max_window_layers": 0,
            "decoder_sparse_step": rng.randint(1, min(2, layers)),
            "attention_bias": has_bias,
            "norm_topk_prob": is_normalised,
        },
        "mixtral": {"sliding_window": window},
        "olmoe": {"attention_bias": has_bias, "norm_topk_prob": is_normalised},
        "gpt_oss": {
            "attention_bias": has_bias,
            "sliding_window": window or 64,
            "swiglu_limit": rng.choice((1.5, 7.0)),
        },
    }
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 3, 6) if heads % n == 0]),
        "hidden_size": heads * 2 * width if kind == "olmoe" else 4 * rng.randint(8, 20),
        **({} if kind == "olmoe" else {"head_dim": 2 * width}),
        "intermediate_size": ffn,
        "num_experts" if kind in ("qwen3_moe", "olmoe") else "num_local_experts": rng.randint(
            4, 16
        ),
        "num_experts_per_tok": rng.randint(1, 4),
        "vocab_size": rng.choice((120, 127)),
        "tie_word_embeddings": rng.random() < 0.5,
        **own[kind],
    }


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=[pytest.mark.slow] if i else []) for i in range(60)]
)
def test_any_mixture(seed: int, tmp_path: Path) -> None:
    """Of a random shape, in any grouping and block of 1 to 64 rows: transformers' logits of the
    tokens that came, each of which has the largest, or as good as."""
    rng = random.Random(seed)
    model = random_model(seed, **drawn_shape(rng))
    model.save_pretrained(tmp_path / "model")
    rows = rng.choice((1, 2, 5, 9, 17, 40, 64))
    gbs = rng.randint(1, rows)
    chosen = Configuration(
        gbs,
        rng.randint(1, -(-rows // gbs)),
        rng.random() < 0.5,
        {name: rng.random() < 0.5 for name in ("overlap", "sep_layer", "cpu_cache_compute")},
    )
    placement = PLACEMENTS[rng.choice([*PLACEMENTS])]
    group = rng.choice((0, 1, 3, 5))
    prompts = random_prompts([rng.randint(1, 24) for _ in range(rows)], seed)
    watch = LogitsByRow()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    policy = chosen.policy(placement, expert_group=group)
    done = tokens_of(
        run(tmp_path / "model", prompts, policy, tmp_path, params, chosen.budget, watch)
    )
    for row, (prompt, tokens) in enumerate(zip(prompts, done, strict=True)):
        want = teacher_forced(model, prompt, tokens)
        assert (torch.stack(watch.rows[row]) - want).abs().max() <= LOGIT_TOLERANCE, f"row {row}"
        best = want.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        assert (want.amax(1) - best).max() <= 2 * LOGIT_TOLERANCE and len(tokens) == 4, f"row {row}"


@pytest.mark.parametrize("rows", [7, pytest.param(64, marks=pytest.mark.slow)])
def test_blocks_of_more_rows(
    rows: int, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """As one row at a time, which other tests compare with transformers."""
    known = reference("olmoe")
    prompts = random_prompts([1 + i % 9 for i in range(rows)], seed=3)
    disk = (0, 0, 50, 0, 0, 50)
    params = SamplingParams(max_tokens=4)
    alone = run(known.folder, prompts, Policy(1, 1, disk, expert_group=1), tmp_path, params)
    for policy in (Policy(rows, 1, disk), Policy(4, -(-rows // 4), disk, expert_group=5)):
        assert tokens_of(run(known.folder, prompts, policy, tmp_path, params)) == tokens_of(alone)


@pytest.mark.parametrize(
    ("shape", "policy"),
    thinned(
        [
            ("qwen3_moe", Policy(2, 5)),
            ("qwen3_moe", Policy(2, 5, (0, 0, 50, 0, 0, 0), expert_group=3)),
            ("gpt_oss", Policy(4, 3)),
            ("gpt_oss", Policy(1, 9, (0, 50, 100, 0, 100, 0), expert_group=1)),
        ],
        3,
    ),
)
def test_rows_that_end_while_others_of_their_block_go_on(
    shape: str, policy: Policy, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Among them all rows of a micro-batch, and some of one that others are behind."""
    known = reference(shape)
    prompts = random_prompts(EOS_LENGTHS, seed=2)
    most = 9
    eos = token_that_ends([greedy(known.model, p, most) for p in prompts])
    want = [greedy(known.model, p, most, eos) for p in prompts]
    assert len({len(row) for row in want}) >= 3
    folder = folder_with_eos(known.folder, tmp_path / "model", eos)
    assert (
        tokens_of(run(folder, prompts, policy, tmp_path, SamplingParams(max_tokens=most))) == want
    )
    with LLM(
        str(folder), replace(policy, num_gpu_batches=2), dtype="float32", offload_dir=tmp_path
    ) as llm:
        assert run_with(llm, prompts, SamplingParams(max_tokens=most), refill=True).tokens == want


@pytest.mark.parametrize(
    ("most", "stand_in", "prefill", "decode"),
    [
        (None, False, [36], [5]),
        (35, False, [35, 1], [5]),
        (4, False, [21, 14, 1], [4, 1]),
        (None, True, [21, 14, 1], [2, 2, 1]),
    ],
)
def test_the_micro_batches_of_a_block_are_computed_together(
    most: int | None,
    stand_in: bool,
    prefill: list[int],
    decode: list[int],
    reference: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for each group of experts, in decode sweeps too; each alone where hidden states are
    brought to a device."""
    known = reference("qwen3_moe")
    rows = list[int]()
    experts = moe.experts
    if most is not None:
        monkeypatch.setattr(memory_plan, "JOINED_TOKENS", most)
    monkeypatch.setattr(
        moe,
        "experts",
        lambda spec, w, group, hidden, ws: (
            rows.append(len(hidden.x)),
            experts(spec, w, group, hidden, ws),
        ),
    )
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
    reference: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = reference("olmoe")
    loaded = list[str]()
    load = WeightStore.load
    monkeypatch.setattr(
        WeightStore,
        "load",
        lambda self, unit, *more: (
            loaded.append(self.plan.units[unit].name),
            load(self, unit, *more),
        )[1],
    )
    policy = Policy(1, rows, (0, 0, 100, 0, 100, 0), expert_group=group)
    params = SamplingParams(max_tokens=1)
    run(known.folder, known.prompts[:rows], policy, tmp_path, params)
    size = group or 1
    groups = {
        f"block {block} experts {first} to {first + size - 1}"
        for block, chosen in chosen_experts(known, known.prompts[:rows]).items()
        for first in {expert // size * size for expert in chosen}
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


def test_products_in_int8(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    """Of matrices that are stored transposed: as near as int8 is, and the same from every tier."""
    known = reference("gpt_oss")
    params = SamplingParams(max_tokens=4)
    policies = [
        Policy(2, 2, (*place, 100, 0, 100, 0), int8_compute=True) for place in ((100, 0), (30, 0))
    ]
    first, other = (
        tokens_of(run(known.folder, known.prompts, policy, tmp_path, params)) for policy in policies
    )
    assert first == other
    assert (torch.tensor(first) == torch.tensor(known.tokens)[:, :4]).float().mean() > 0.5


@pytest.mark.parametrize("tokens", [1, 5, TOKEN_CHUNK + 3])
def test_chunks_of_inputs_are_mixed_as_one(tokens: int) -> None:
    """Whatever the expert, and where a chunk ends between its inputs."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 4, generator=generator)
    chosen = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, 2, generator=generator)
    (counts,) = count_choices(chosen, [tokens], 6)
    assert counts == torch.bincount(chosen.flatten(), minlength=6).tolist()
    mixed = torch.zeros(tokens, 4)
    sizes = {"routed": TOKEN_CHUNK * 16}
    ws = Workspace(torch.empty(TOKEN_CHUNK * 16, dtype=torch.uint8), sizes, torch.float32)

    hidden = Hidden(x, mixed, chosen.clone(), weights.clone(), counts)
    sort_choices(hidden)
    for group in (range(4), range(4, 6)):
        factors = torch.tensor(group) + 1

        def compute(
            counts: Sequence[int], inputs: torch.Tensor, out: torch.Tensor, factors: Any = factors
        ) -> None:
            out.copy_(inputs * factors.repeat_interleave(torch.tensor(counts)).unsqueeze(1))

        mix_experts(group, hidden, ws, torch.Tensor.clone, compute)
    want = torch.zeros(tokens, 4)
    for expert in range(6):
        here = chosen == expert
        want += x * (expert + 1) * (weights * here).sum(1, keepdim=True)
    assert torch.allclose(mixed, want, atol=1e-6)


def test_shares_of_groups() -> None:
    """Against counting every choice of a token: 2 of 4 experts."""
    experts = Experts(4, 2, 8, ((((TensorSpec("a", "a", (8, 8)),),) * 4),), ((),))
    assert experts.share_used(1) == pytest.approx(0.5) and experts.share_used(2) == pytest.approx(
        0.75
    )
    assert experts.share_used(1, 2) == pytest.approx(5 / 6) and experts.share_used(1, 4) == 1.0
    sizes: dict[str, Any] = {
        "none chosen": experts.group_size(0, 1),
        "all": experts.group_size(0, 64),
    }
    assert sizes == {"none chosen": 1, "all": 4} and experts.group_size(9, 1) == 4
    assert (
        experts.of_blocks([]).group_size(0, 64) == experts.count
    )  # a stage of a pipeline with MLP layers only
