"""Plans for mixtures of experts: what sweeps are expected to read, and when experts move one by
one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.workload import MicroBatchShape, Workload
from flexgen_h2o.models import built_in_spec, spec_from_config
from flexgen_h2o.planner.cost_model import CostModel, Machine
from flexgen_h2o.planner.lp import MAX_MICRO_BATCH, SearchSpace
from flexgen_h2o.planner.profile import find_profile, read_profile
from flexgen_h2o.planner.report import SearchResult, balanced_rows, to_text
from flexgen_h2o.planner.search import disk_reads, evaluate
from tests.unit.planner.made_up import DTYPE, HUGE, machine

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
ON_DISK = (0, 0, 100, 0, 100, 0)
DOCS = Path(__file__).resolve().parents[3] / "docs"


def space(spec: ModelSpec, rows: int, prompt_len: int = 1, gen_len: int = 3) -> SearchSpace:
    need = Workload.full(rows, prompt_len, gen_len, spec.num_blocks)
    return SearchSpace(spec, need, Policy(), machine(True), HUGE)


def public(name: str) -> ModelSpec:
    found = built_in_spec(name)
    assert found is not None
    return found[0]


def memory_of(spec: ModelSpec, policy: Policy) -> MemoryPlanner:
    return MemoryPlanner(spec, policy, 4, True)


def test_more_rows_of_a_block_read_no_less() -> None:
    """One by one up to LOAD_AFTER_ROUTER_BELOW, then all together: no step down between them."""
    reads = [disk_reads(space(SPEC, rows), Policy(rows, 1, ON_DISK)) for rows in range(1, 40)]
    assert reads == sorted(reads) and reads[0] < reads[4] < reads[-1]
    groups = [memory_of(SPEC, Policy(rows, 1, ON_DISK)).expert_group for rows in range(1, 40)]
    assert groups == sorted(groups) and {groups[0], groups[-1]} == {1, 8}


def test_experts_that_stay_are_one_group() -> None:
    """Whatever the rows; but not where some are read, where all would be decoded at a time, or
    where asked."""
    spec = public("Qwen/Qwen3-30B-A3B")
    assert [memory_of(spec, Policy(rows)).expert_group for rows in (1, 64)] == [128, 128]
    assert memory_of(spec, Policy(64, int8_compute=True, compress_weight=True)).expert_group == 128
    assert not memory_of(spec, Policy(1)).waits_for_router
    others = {
        "some on disk": (spec, Policy(64, 1, (99, 0, 100, 0, 100, 0))),
        "of a card, on the host": (spec, Policy(64, 1, (0, 100, 100, 0, 100, 0))),
        "in 4 bits": (spec, Policy(64, compress_weight=True)),
        "stored in 4 bits": (replace(spec, quantization={"quant_method": "mxfp4"}), Policy(64)),
    }
    assert {
        name: memory_of(*other).expert_group for name, other in others.items()
    } == dict.fromkeys(others, 8)
    assert memory_of(spec, Policy(64, expert_group=16)).expert_group == 16


@pytest.mark.parametrize(("is_host", "bits", "factor"), [(True, 4, 5), (True, 8, 1), (False, 4, 1)])
def test_a_cpu_decodes_experts_as_it_multiplies(is_host: bool, bits: int, factor: int) -> None:
    """At the rate that the profile has; without one, and what is no expert's, at that of a whole
    matrix."""
    need = Workload.full(8, 1, 3, SPEC.num_blocks)
    policy = Policy(8, compress_weight=True, weight_bits=bits)
    where = machine(is_host)
    seconds = list[tuple[float, float]]()
    rates = replace(where.profile.rates(DTYPE), decode_speedup={"4bit_in_products": 5.0})
    known = replace(where, profile=replace(where.profile, compute={DTYPE: rates}))
    for one in (where, known):
        costs = CostModel(SPEC, policy, need, one)
        kinds = [layer.kind for layer in costs.layers.layers]
        layers = (kinds.index(kind) for kind in ("experts", "mlp"))
        seconds.append(
            tuple(costs.decoding(i, [(MicroBatchShape.even(8, 1), 1)], 1).device_s for i in layers)
        )
    (experts, mlp), faster = seconds
    assert (
        faster == pytest.approx((experts / factor, mlp)) and (min(experts, mlp) > 0) == is_host
    )  # cards take codes


@pytest.mark.parametrize(
    ("name", "weights", "active"),
    [
        ("Qwen/Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen/Qwen3-235B-A22B", 235, 22),
        ("allenai/OLMoE-1B-7B-0924", 6.9, 1.3),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7, 12.9),
        ("facebook/opt-125m", 0.125, 0.125),
    ],
)
def test_weights_of_a_token(name: str, weights: float, active: float) -> None:
    """Billions, as their makers count them."""
    spec = public(name)
    assert spec.num_weights / 1e9 == pytest.approx(weights, rel=0.01)
    assert spec.num_active / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("rows", [1, 16, 32])
def test_experts_move_one_by_one_where_that_is_faster(rows: int) -> None:
    """Simulated, with all weights on disk; the table of docs/developers/planner.md."""
    spec = public("Qwen/Qwen3-30B-A3B")
    known = Machine(read_profile(find_profile("build-2core")), "bfloat16", device_is_host=True)
    at = replace(space(spec, rows, 512, 8), machine=known, budgets=dict.fromkeys(HUGE, 2**42))
    policy = Policy(rows, 1, ON_DISK)
    by_one, by_eight = (
        evaluate(at, replace(policy, expert_group=n)).prediction.decode_s for n in (1, 8)
    )
    assert by_one < by_eight
    assert (
        memory_of(spec, policy).expert_group == 1
        and memory_of(spec, Policy(64, 1, ON_DISK)).expert_group == 8
    )


def test_micro_batches_are_larger_where_each_expert_sees_few_rows() -> None:
    spec = public("mistralai/Mixtral-8x7B-v0.1")
    asked = space(spec, 10_000)
    sizes = {gbs for gbs, _ in asked.block_sizes()}
    assert asked.most_micro_batch == 4 * MAX_MICRO_BATCH and max(sizes) == 10_000 // 8


@pytest.mark.parametrize("hidden", [(100, 0), (0, 100), (0, 0)])
def test_experts_are_priced_for_the_rows_of_a_block(hidden: tuple[int, int]) -> None:
    """On a host: experts compute for as long as if the block were one micro-batch. Where hidden
    states are brought to a card each micro-batch is computed alone."""
    for is_host in (True, False):
        at = replace(space(SPEC, 24), machine=machine(is_host))
        policies = [
            Policy(gbs, 24 // gbs, (0, 0, 0, 100, *hidden), expert_group=4) for gbs in (24, 8)
        ]
        whole, parts = (CostModel(SPEC, policy, at.need, at.machine) for policy in policies)
        index = next(i for i, layer in enumerate(parts.layers.layers) if layer.kind == "experts")
        batches = at.need.block((8, 8, 8))
        steps = parts.steps_of("experts", batches, 1).values()
        seconds = [parts.step(index, batch, 1, tokens).device_s for batch, tokens in steps]
        in_place = hidden == (100, 0) or (is_host and hidden == (0, 100))
        if in_place:
            assert seconds == [whole.step(index, at.need.block((24,))[0], 1).device_s]
        else:
            assert seconds == [parts.step(index, batches[0], 1).device_s] * 3


def test_rows_that_compute_for_as_long_as_weights_load() -> None:
    """With twice the rows as balanced compute takes longer, with half of them loading does."""
    spec = public("allenai/OLMoE-1B-7B-0924")
    known = Machine(read_profile(find_profile("build-2core")), "bfloat16", device_is_host=True)
    at = replace(space(spec, 4096, 64, 8), machine=known, budgets=dict.fromkeys(HUGE, 2**42))
    rows = balanced_rows(at, Policy(512, 1, ON_DISK))
    assert rows is not None
    for factor, binds in ((0.5, "disk_read"), (2, "device_compute")):
        assert (
            evaluate(at, Policy(round(factor * rows), 1, ON_DISK)).prediction.binds("decode")
            == binds
        )


def test_the_tables_say_what_a_token_uses_and_how_many_rows_would_do() -> None:
    known = Machine(read_profile(find_profile("build-2core")), "bfloat16", device_is_host=True)
    at = replace(
        space(public("Qwen/Qwen3-30B-A3B"), 16, 64, 8),
        machine=known,
        budgets=dict.fromkeys(HUGE, 2**42),
    )
    plan = evaluate(at, Policy(16, 1, ON_DISK))
    lines = to_text(
        SearchResult(at, {"name": "full"}, False, plan), "--percent ...", "run ...", "bench ..."
    )
    assert "a token uses 8 of 128 experts of a layer, 3.35 of 30.5 billion weights\n" in lines
    found = re.search(
        r"have 16 prompts, each ([\d.]+) MiB of KV and .* for prefill; with ([\d,]+) prompts "
        r"computing",
        lines,
    )
    assert found is not None and float(found[1]) == pytest.approx(
        48 * 4 * 2 * 71 * 128 * 2 / 2**20, rel=0.25
    )
    assert int(found[2].replace(",", "")) > 100
