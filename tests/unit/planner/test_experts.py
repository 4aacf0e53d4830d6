"""Plans for mixtures of experts: what sweeps are expected to read, and when experts move one by
one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.workload import Workload
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.cost_model import Machine
from flexgen_h2o.planner.lp import SearchSpace
from flexgen_h2o.planner.report import SearchResult, balanced_rows, to_text
from flexgen_h2o.planner.search import disk_reads, evaluate
from tests.unit.planner.made_up import (
    DTYPE,
    HUGE,
    WEIGHTS_ON_DISK,
    costs_of,
    machine,
    multiplying,
    public,
    shipped,
)

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "max_position_embeddings": 99,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
SPEC = spec_from_config("tiny", CONFIG, "here")
QWEN = "Qwen/Qwen3-30B-A3B"


def space(spec: ModelSpec, rows: int, where: Machine, prompt_len: int = 1) -> SearchSpace:
    need = Workload.full(rows, prompt_len, 3, spec.num_blocks)
    return SearchSpace(spec, need, Policy(), where, dict.fromkeys(HUGE, 2**42))


def memory_of(spec: ModelSpec, policy: Policy) -> MemoryPlanner:
    return MemoryPlanner(spec, policy, 4, True)


def test_more_rows_of_a_block_read_no_less() -> None:
    """Experts move one by one for few rows, then all together: no step down between them."""
    rows = range(1, 40)
    policies = [Policy(n, 1, WEIGHTS_ON_DISK) for n in rows]
    reads = [
        disk_reads(space(SPEC, n, machine(True)), p) for n, p in zip(rows, policies, strict=True)
    ]
    assert reads == sorted(reads) and reads[0] < reads[4] < reads[-1]
    groups = [memory_of(SPEC, policy).expert_group for policy in policies]
    assert groups == sorted(groups) and {groups[0], groups[-1]} == {1, 8}


@pytest.mark.parametrize(
    ("policy", "quantization", "group"),
    [
        (Policy(1), None, 128),
        (Policy(64), None, 128),
        (Policy(64, int8_compute=True, compress_weight=True), None, 128),
        (Policy(64, 1, (0, 100, 100, 0, 100, 0)), None, 8),
        (Policy(64, compress_weight=True), None, 8),
        (Policy(64), {"quant_method": "mxfp4"}, 8),
        (Policy(64, expert_group=16), None, 16),
        (Policy(1, 1, WEIGHTS_ON_DISK), None, 1),
    ],
)
def test_experts_that_stay_on_the_device_are_one_group(
    policy: Policy, quantization: dict[str, str] | None, group: int
) -> None:
    """They are not if they are read or decoded, or if a user asks."""
    memory = memory_of(replace(public(QWEN), quantization=quantization), policy)
    assert memory.expert_group == group
    assert not memory_of(public(QWEN), Policy(1)).waits_for_router


@pytest.mark.parametrize(("is_host", "bits", "factor"), [(True, 4, 5), (True, 8, 1), (False, 4, 1)])
def test_a_cpu_decodes_experts_as_it_multiplies(is_host: bool, bits: int, factor: int) -> None:
    """It does so at the profile's rate; other layers are decoded at that of a whole matrix."""
    need = Workload.full(8, 1, 3, SPEC.num_blocks)
    where = machine(is_host)
    rates = replace(where.profile.rates(DTYPE), decode_speedup={"4bit_in_products": 5.0})
    known = replace(where, profile=replace(where.profile, compute={DTYPE: rates}))
    policy = Policy(8, compress_weight=True, weight_bits=bits)
    steps = [(need.block((8,))[0], 1)]
    costs = [costs_of(policy, need, one, SPEC) for one in (where, known)]
    kinds = [layer.kind for layer in costs[0].layers.layers]
    for kind, faster in (("experts", factor), ("mlp", 1)):
        before, after = (c.decoding(kinds.index(kind), steps, 1).device_s for c in costs)
        assert after == pytest.approx(before / faster)
        assert (before > 0) is is_host, "cards take codes"


@pytest.mark.parametrize(
    ("name", "active"),
    [("Qwen/Qwen3-30B-A3B", 3.3), ("mistralai/Mixtral-8x7B-v0.1", 12.9)],
)
def test_weights_of_a_token(name: str, active: float) -> None:
    """In billions, as their makers count them."""
    assert public(name).num_active / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("hidden", [(100, 0), (0, 100), (0, 0)])
def test_experts_are_priced_for_the_rows_of_a_block(hidden: tuple[int, int], is_host: bool) -> None:
    """Micro-batches are computed as one, unless their hidden states are brought to a card."""
    need = Workload.full(24, 1, 3, SPEC.num_blocks)
    policy = Policy(percent=(0, 0, 0, 100, *hidden), expert_group=4)
    whole, parts = (
        costs_of(
            replace(policy, gpu_batch_size=24 // count, num_gpu_batches=count),
            need,
            machine(is_host),
            SPEC,
        )
        for count in (1, 3)
    )
    index = next(i for i, layer in enumerate(parts.layers.layers) if layer.kind == "experts")
    batches = need.block((8, 8, 8))
    steps = parts.steps_of("experts", batches, 1).values()
    seconds = [parts.step(index, batch, 1, tokens).device_s for batch, tokens in steps]
    if hidden == (100, 0) or (is_host and hidden == (0, 100)):
        assert seconds == [whole.step(index, need.block((24,))[0], 1).device_s]
    else:
        assert seconds == [parts.step(index, batches[0], 1).device_s] * 3


def test_experts_multiply_the_tokens_that_choose_them() -> None:
    need = Workload.full(64, 1, 3, SPEC.num_blocks)
    at = costs_of(Policy(64), need, multiplying(True), SPEC)
    index = next(i for i, layer in enumerate(at.layers.layers) if layer.kind == "experts")
    layer = at.layers.layers[index]
    numbers = sum(t.numel for t in at.layers.units[layer.unit].tensors if len(t.shape) == 2)
    chosen = 64 * CONFIG["num_experts_per_tok"] / CONFIG["num_experts"]
    seconds = at.step(index, need.block((64,))[0], 1).device_s
    assert seconds == pytest.approx(2 * chosen * numbers, rel=0.01)


def test_balanced_sequences_compute_for_as_long_as_weights_load() -> None:
    """With twice as many compute binds, with half of them loading does."""
    at = space(public("allenai/OLMoE-1B-7B-0924"), 4096, shipped("build-2core"), 64)
    rows = balanced_rows(at, Policy(512, 1, WEIGHTS_ON_DISK))
    assert rows is not None
    for factor, binds in ((0.5, "disk_read"), (2, "device_compute")):
        plan = evaluate(at, Policy(round(factor * rows), 1, WEIGHTS_ON_DISK))
        assert plan.prediction.binds("decode") == binds


def test_the_table_says_what_a_token_uses_and_how_many_rows_would_do() -> None:
    at = space(public(QWEN), 16, shipped("build-2core"), 64)
    plan = evaluate(at, Policy(16, 1, WEIGHTS_ON_DISK))
    lines = to_text(SearchResult(at, {"name": "full"}, False, plan), "--percent ...")
    assert "8 of 128 experts" in lines and "3.35 of 30.5 billion weights" in lines
    assert "prompts computing takes as long" in lines
