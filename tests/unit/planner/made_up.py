"""Small models, made-up machines, and strategies of policies, workloads and machines."""

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
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.models import built_in_spec, spec_from_config
from flexgen_h2o.planner.cost_model import CostModel, Machine
from flexgen_h2o.planner.profile import (
    AS_FAST,
    ComputeRates,
    Curve,
    HardwareProfile,
    find_profile,
    nominal_profile,
    read_profile,
)

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
RESIDENT = (100, 0, 100, 0, 100, 0)
WEIGHTS_ON_DISK = (0, 0, 100, 0, 100, 0)
NOTHING = (0, 0, 0, 0, 0, 0)
CONTENTION = ("disk_read_beside_compute", "compute_beside_disk_read", "link_both_ways")
RATES = [f.name for f in fields(HardwareProfile) if f.name.endswith("per_s")]
COMPUTE_RATES = [f.name for f in fields(ComputeRates)]
FIXED = [f.name for f in fields(HardwareProfile) if f.name.endswith("_s") and f.name not in RATES]


def make_spec(**changes: Any) -> ModelSpec:
    return spec_from_config("tiny", {**CONFIG, **changes}, "here")


SPEC = make_spec()


def small_spec(**changes: Any) -> ModelSpec:
    """Return a model of two transformer blocks, and few of everything."""
    small = {"vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 2, "ffn_dim": 96}
    return make_spec(**{**small, "word_embed_proj_dim": 48, **changes})


def public(name: str) -> ModelSpec:
    found = built_in_spec(name)
    assert found is not None
    return found[0]


def shipped(name: str) -> Machine:
    """Return a machine whose profile comes with the project."""
    profile = read_profile(find_profile(name))
    is_host = profile.device_is_host
    return Machine(profile, "bfloat16" if is_host else "float16", is_host)


def machine(is_host: bool, **changes: Any) -> Machine:
    """Return nominal speeds without fixed costs and contention, except for the changes."""
    free = dict.fromkeys(FIXED, 0.0) | dict.fromkeys(CONTENTION, 1.0) | {"graph_step_s": 1.0}
    return Machine(replace(nominal_profile(is_host), **{**free, **changes}), DTYPE, is_host)


def multiplying(is_host: bool) -> Machine:
    """Return a machine on which a FLOP of a product takes a second, and all else hardly any."""
    where = machine(is_host)
    even = replace(where.profile.rates(DTYPE), matmul_flops_per_s=((1.0, ((1.0, AS_FAST),)),))
    return replace(where, profile=replace(where.profile, compute={DTYPE: even}))


def faster(profile: HardwareProfile, name: str, factor: float) -> HardwareProfile:
    """Return the profile with one rate that is higher, or one fixed cost that is lower."""
    if name in COMPUTE_RATES:
        compute = {
            dtype: replace(rates, **{name: _scaled(getattr(rates, name), factor)})
            for dtype, rates in profile.compute.items()
        }
        return replace(profile, compute=compute)
    value = getattr(profile, name)
    return replace(profile, **{name: value / factor if name in FIXED else value * factor})


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Curve):
        return value.scaled(factor)
    if isinstance(value, Mapping):
        return {key: rate * factor for key, rate in value.items()}
    if isinstance(value, tuple):
        return tuple((size, _scaled(entry, factor)) for size, entry in value)
    return value * factor


def plan_of(
    policy: Policy, need: Workload, is_host: bool, spec: ModelSpec = SPEC, depth: int = 0
) -> MemoryPlan:
    """Return a memory plan. depth: which of the look-aheads, if there is a choice."""
    ahead = OVERLAPPED[depth] if policy.overlap else SEQUENTIAL
    return MemoryPlanner(spec, policy, 4, is_host).plan(shape_of(policy, need), ahead)


def costs_of(policy: Policy, need: Workload, where: Machine, spec: ModelSpec = SPEC) -> CostModel:
    return CostModel(spec, policy, need, where)


def fitted(policy: Policy, need: Workload) -> Policy:
    """Return the policy with batches no larger than the workload."""
    shape = shape_of(policy, need)
    return replace(policy, gpu_batch_size=shape.rows, num_gpu_batches=shape.micro_batches)


def evicting(rows: int, prompt_len: int, gen_len: int, kept: int, blocks: int = BLOCKS) -> Workload:
    """Return the workload of H2O that keeps `kept` KV entries of each prompt."""
    slots = min(kept + 1, kept + gen_len - 1)
    return Workload(rows, prompt_len, gen_len, (slots,) * blocks, (kept,) * blocks, H2O().needs)


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
def cases(draw: st.DrawFn) -> tuple[Policy, Workload, Machine, MemoryPlan]:
    """Draw something to run, a machine on which anything may bind, and buffers."""
    rows, prompt_len, gen_len = draw(
        st.tuples(st.integers(1, 100), st.integers(1, 200), st.integers(1, 7))
    )
    need = Workload.full(rows, prompt_len, gen_len, BLOCKS)
    if draw(st.booleans()):
        need = evicting(rows, prompt_len, gen_len, draw(st.integers(1, prompt_len)))
    profile = nominal_profile(draw(st.booleans()))
    for name in draw(st.lists(st.sampled_from(RATES + FIXED), max_size=8, unique=True)):
        profile = faster(profile, name, 10 ** draw(st.sampled_from([-3, -2, -1, 1, 2])))
    profile = faster(profile, "matmul_flops_per_s", draw(st.sampled_from([1, 1e-1, 1e-2, 1e-3])))
    alone = replace(profile, **dict.fromkeys(CONTENTION, 1.0), short_read_compute_s=0.0)
    where = Machine(alone, DTYPE, draw(st.booleans()))
    policy = fitted(draw(policies), need)
    plan = plan_of(policy, need, where.device_is_host, depth=draw(st.integers(0, 4)))
    return policy, need, where, plan
