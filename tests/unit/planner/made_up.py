"""Small models, made-up machines, and strategies of policies, needs and machines for properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, MemoryPlan
from flexgen_h2o.engine.workload import Workload, shape_of
from flexgen_h2o.kvcache.eviction.policy import RowRecord
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.cost_model import CostModel, Machine
from flexgen_h2o.planner.profile import ComputeRates, Curve, HardwareProfile, nominal_profile

SCORED = RowRecord(("positions", "scores"))
BLOCKS = 4
CONFIG: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 500,
    "hidden_size": 128,
    "num_hidden_layers": BLOCKS,
    "ffn_dim": 512,
    "max_position_embeddings": 300,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 128,
    "activation_function": "relu",
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "do_layer_norm_before": True,
}
DTYPE = "float32"
HUGE: dict[str, int | None] = dict.fromkeys(TIERS, 100 * GIB)
RATES = [f.name for f in fields(HardwareProfile) if f.name.endswith("per_s")]
COMPUTE_RATES = [f.name for f in fields(ComputeRates)]
FIXED = [
    "kernel_s",
    "transfer_s",
    "disk_request_s",
    "step_s",
    "attention_step_s",
    "eviction_step_s",
    "row_s",
    "short_read_compute_s",
    "cache_load_step_s",
    "graph_step_s",
]


def make_spec(**changes: Any) -> ModelSpec:
    return spec_from_config("tiny", {**CONFIG, **changes}, "here")


SPEC = make_spec()
SMALL = {
    "vocab_size": 90,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "ffn_dim": 96,
    "max_position_embeddings": 30,
    "word_embed_proj_dim": 48,
}


def small_spec(**changes: Any) -> ModelSpec:
    """Two transformer blocks, and few of everything."""
    return make_spec(**{**SMALL, **changes})


def machine(is_host: bool, **changes: Any) -> Machine:
    """Nominal speeds without fixed costs and contention, but for the changes."""
    free: dict[str, Any] = {
        **dict.fromkeys(FIXED, 0.0),
        "disk_read_beside_compute": 1.0,
        "compute_beside_disk_read": 1.0,
        "link_both_ways": 1.0,
        "graph_step_s": 1.0,
    }
    return Machine(replace(nominal_profile(is_host), **{**free, **changes}), DTYPE, is_host)


def faster(profile: HardwareProfile, name: str, factor: float) -> HardwareProfile:
    """One rate higher, or one fixed cost lower."""
    if name in COMPUTE_RATES:
        return replace(
            profile,
            compute={
                dtype: _scaled(rates, name, factor) for dtype, rates in profile.compute.items()
            },
        )
    value = getattr(profile, name)
    return replace(profile, **{name: value / factor if name in FIXED else value * factor})


def _scaled(rates: ComputeRates, name: str, factor: float) -> ComputeRates:
    value: Any = getattr(rates, name)
    if isinstance(value, Curve):
        return replace(rates, **{name: value.scaled(factor)})
    if isinstance(value, Mapping):
        return replace(rates, **{name: {key: rate * factor for key, rate in value.items()}})
    if isinstance(value, tuple):
        scaled = tuple(
            (shape, tuple((i, c.scaled(factor)) for i, c in by_inner)) for shape, by_inner in value
        )
        return replace(rates, **{name: scaled})
    return replace(rates, **{name: value * factor})


def plan_of(
    policy: Policy, need: Workload, is_host: bool, spec: ModelSpec = SPEC, depth: int = 0
) -> MemoryPlan:
    """depth: which of the look-aheads, where there is a choice."""
    ahead = OVERLAPPED[depth] if policy.overlap else SEQUENTIAL
    return MemoryPlanner(spec, policy, 4, is_host).plan(shape_of(policy, need), ahead)


def costs_of(policy: Policy, need: Workload, where: Machine, spec: ModelSpec = SPEC) -> CostModel:
    return CostModel(spec, policy, need, where)


def fitted(policy: Policy, need: Workload) -> Policy:
    """The policy with batch sizes no larger than the pile."""
    shape = shape_of(policy, need)
    return replace(policy, gpu_batch_size=shape.rows, num_gpu_batches=shape.micro_batches)


def evicting(rows: int, prompt_len: int, gen_len: int, kept: int, blocks: int = BLOCKS) -> Workload:
    """H2O that keeps `kept` columns of each prompt."""
    slots = min(kept + 1, kept + gen_len - 1)
    return Workload(rows, prompt_len, gen_len, (slots,) * blocks, (kept,) * blocks, SCORED, True)


# ---- strategies

pairs = st.one_of(
    st.sampled_from([(100, 0), (0, 100), (0, 0)]),
    st.integers(0, 100).flatmap(lambda a: st.tuples(st.just(a), st.integers(0, 100 - a))),
)
percents = st.tuples(pairs, pairs, pairs).map(lambda three: sum(three, ()))
policies = st.builds(
    Policy,
    gpu_batch_size=st.integers(1, 40),
    num_gpu_batches=st.integers(1, 4),
    percent=percents,
    cpu_cache_compute=st.booleans(),
    overlap=st.sampled_from([True, True, False]),
    sep_layer=st.booleans(),
)


@st.composite
def needs(draw: st.DrawFn, most_new: int = 7) -> Workload:
    rows = draw(st.integers(1, 100))
    prompt_len = draw(st.integers(1, 200))
    gen_len = draw(st.integers(1, most_new))
    if draw(st.booleans()):
        return Workload.full(rows, prompt_len, gen_len, BLOCKS)
    return evicting(rows, prompt_len, gen_len, draw(st.integers(1, prompt_len)))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Rates and fixed costs far from those of real machines, so that anything may bind."""
    is_host = draw(st.booleans())
    profile = nominal_profile(draw(st.booleans()))
    for name in draw(st.lists(st.sampled_from(RATES + FIXED), max_size=8, unique=True)):
        profile = faster(profile, name, 10 ** draw(st.sampled_from([-3, -2, -1, 1, 2])))
    slower = faster(profile, "matmul_flops_per_s", draw(st.sampled_from([1, 1e-1, 1e-2, 1e-3])))
    shares = dict.fromkeys(
        ("disk_read_beside_compute", "compute_beside_disk_read", "link_both_ways"), 1.0
    )
    alone = replace(slower, **shares, short_read_compute_s=0.0)
    return Machine(alone, DTYPE, is_host)


@st.composite
def cases(draw: st.DrawFn, most_new: int = 7) -> tuple[Policy, Workload, Machine, MemoryPlan]:
    """Something to run, and buffers for it."""
    need = draw(needs(most_new))
    where = draw(machines())
    policy = fitted(draw(policies), need)
    return (
        policy,
        need,
        where,
        plan_of(policy, need, where.device_is_host, depth=draw(st.integers(0, 4))),
    )
