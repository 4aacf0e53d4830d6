"""Work and its seconds: which figures of a profile count for which run, and what is never slower.

That the bytes are those that the engine moves is shown in tests/parity/test_planned_bytes.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.units import FEW_ROWS
from flexgen_h2o.engine.workload import Workload
from flexgen_h2o.kvcache.eviction import Tova
from flexgen_h2o.planner.cost_model import CostModel, Machine
from flexgen_h2o.planner.profile import nominal_profile
from tests.unit.planner.made_up import (
    BLOCKS,
    SPEC,
    WEIGHTS_ON_DISK,
    costs_of,
    evicting,
    faster,
    machine,
    multiplying,
    policies,
)

NEED = Workload.full(6, 10, 4, BLOCKS)
LONG = Workload.full(6, 10, 80, BLOCKS)
SCORED = evicting(6, 40, 8, 20)
KV_ON_HOST = (100, 0, 0, 100, 100, 0)
KV_ON_DISK = (100, 0, 0, 0, 100, 0)
IN_4_BITS = {"compress_weight": True}
INT8 = {"int8_compute": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def seconds_of(costs: CostModel, sweep: int) -> float:
    """Return seconds in which everything of a sweep counts, some of it twice."""
    need = costs.need
    block = need.block((need.rows,))
    steps = [costs.step(i, block[0], sweep) for i in range(len(costs.layers.layers))]
    busy = costs.busy(block, sweep)
    return sum(busy.values()) + sum(step.device_s + step.issue_s for step in steps)


# What a slower figure of the profile makes slower: on a CPU (host) or a card; in prefill, decode or
# both (pd); by which policy and workload.
ON_HOST = Policy(6, percent=KV_ON_HOST)
ATTENDS_ON_HOST = replace(ON_HOST, cpu_cache_compute=True)
KV_READ = Policy(6, percent=KV_ON_DISK)
WEIGHTS_READ = Policy(6, percent=WEIGHTS_ON_DISK)
PACKED = Policy(6, **IN_4_BITS)
UNPACKED = Policy(6, compress_cache=True, attn_sparsity=0.5)
PACKED_INT8 = Policy(6, **IN_4_BITS, **INT8)
COUNTS: list[tuple[bool, Policy, Workload, dict[str, str]]] = [
    (
        True,
        Policy(6),
        NEED,
        {
            "matmul_flops_per_s": "pd",
            "blocked_speedup": "pd",  # of matrices in RAM
            "prefill_attention_flops_per_s": "p",
            "column_sums_flops_per_s": "",
            "device_attention_bytes_per_s": "d",
            "elementwise_bytes_per_s": "pd",
            "logits_per_s": "pd",
            "kernel_s": "pd",
            "attention_step_s": "pd",
            "eviction_step_s": "",
            "row_s": "pd",
        },
    ),
    (
        True,
        Policy(6),
        SCORED,
        {
            "column_sums_flops_per_s": "p",
            "device_scored_attention_bytes_per_s": "d",
            "eviction_step_s": "pd",
        },
    ),
    (True, Policy(6, percent=(0, 100, 100, 0, 100, 0)), NEED, {"blocked_speedup": "pd"}),
    (
        True,
        WEIGHTS_READ,
        NEED,
        {
            "disk_read_bytes_per_s": "pd",
            "disk_request_s": "pd",
            "short_read_compute_s": "pd",
            "blocked_speedup": "",
        },
    ),
    (True, replace(WEIGHTS_READ, overlap=False), NEED, {"short_read_compute_s": ""}),
    (
        True,
        KV_READ,
        NEED,
        {"disk_write_bytes_per_s": "p", "overlay_bytes_per_s": "d", "cache_load_step_s": "d"},
    ),
    (True, KV_READ, LONG, {"disk_write_bytes_per_s": "pd"}),
    (True, PACKED, NEED, {"device_dequantise_bytes_per_s": "pd", "blocked_speedup": ""}),
    (True, PACKED_INT8, NEED, {"device_dequantise_bytes_per_s": "", "int4_speedup": "pd"}),
    (
        True,
        Policy(6, **INT8),
        NEED,
        {"int8_speedup": "pd", "int4_speedup": "", "blocked_speedup": ""},
    ),
    (False, PACKED, NEED, {"device_memory_bytes_per_s": "pd"}),
    (False, UNPACKED, NEED, {"device_dequantise_bytes_per_s": "d"}),
    (
        False,
        ON_HOST,
        NEED,
        {
            "host_attention_bytes_per_s": "",
            "h2d_bytes_per_s": "d",
            "d2h_bytes_per_s": "pd",
            "transfer_s": "pd",
            "graph_step_s": "",
        },
    ),
    (False, replace(ON_HOST, pin_weight=False), NEED, {"h2d_unpinned_bytes_per_s": "d"}),
    (False, ATTENDS_ON_HOST, NEED, {"host_attention_bytes_per_s": "d"}),
    (False, ATTENDS_ON_HOST, SCORED, {"host_scored_attention_bytes_per_s": "d", "row_s": "d"}),
    # Decode steps that are alike are graphs, which are issued as one.
    (False, Policy(6), NEED, {"graph_step_s": "d", "blocked_speedup": ""}),
    (False, Policy(6), SCORED, {"graph_step_s": "d", "row_s": ""}),
    (False, Policy(6), replace(SCORED, needs=Tova().needs), {"graph_step_s": ""}),
    (False, Policy(6, percent=(99, 1, 100, 0, 100, 0)), NEED, {"graph_step_s": ""}),
    (False, Policy(6, overlap=False), NEED, {"graph_step_s": ""}),
    (False, Policy(6, cpu_cache_compute=True), NEED, {"graph_step_s": ""}),
]


@pytest.mark.parametrize(("is_host", "policy", "need", "figures"), COUNTS)
def test_a_figure_counts_where_it_is_used(
    is_host: bool, policy: Policy, need: Workload, figures: dict[str, str]
) -> None:
    where = Machine(nominal_profile(is_host), "bfloat16", is_host)
    for name, phases in figures.items():
        slow = replace(where, profile=faster(where.profile, name, 0.5))
        for phase, sweep in (("p", 0), ("d", 1)):
            before, after = (
                seconds_of(costs_of(policy, need, one), sweep) for one in (where, slow)
            )
            assert (after > before * (1 + 1e-9)) is (phase in phases), (name, phase)
            assert after >= before * (1 - 1e-9)


@pytest.mark.parametrize(("int8", "name"), [(False, "gptq"), (True, "gptq_int8")])
def test_a_quantised_checkpoint_is_decoded_at_its_own_rate(int8: bool, name: str) -> None:
    spec = replace(SPEC, quantization=GPTQ)
    where = machine(True)
    rates = replace(where.profile.rates("float32"), decode_speedup={name: 0.2})
    known = replace(where, profile=replace(where.profile, compute={"float32": rates}))
    policy = Policy(6, int8_compute=int8)
    steps = [(NEED.block((6,))[0], 6)]
    own, others = (
        costs_of(policy, NEED, one, spec).decoding(1, steps, 1).device_s for one in (known, where)
    )
    assert own == pytest.approx(others / 0.2) and others > 0
    table = costs_of(policy, NEED, known, spec).decoding(0, steps, 1)
    assert table.device_s == 0, "the embedding is not quantised"


@settings(max_examples=25)
@given(policies, st.booleans(), st.sampled_from([1, 6, 60, 3000]))
def test_products_multiply_each_row_by_every_matrix_once(
    policy: Policy, is_host: bool, rows: int
) -> None:
    """However matrices are split over tiers."""
    at = costs_of(policy, NEED, multiplying(is_host))
    for unit in at.layers.units:
        numbers = sum(t.numel for t in unit.tensors if len(t.shape) == 2)
        assert at.products_s(unit.tensors, rows) == pytest.approx(2 * rows * numbers)


@pytest.mark.parametrize("is_host", [False, True])
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_fewer_kv_entries_are_never_slower(is_host: bool, compress: bool, on_host: bool) -> None:
    policy = Policy(6, 1, KV_ON_HOST, compress_cache=compress, cpu_cache_compute=on_host)
    seconds = [
        seconds_of(costs_of(policy, evicting(6, 100, 8, kept), machine(is_host)), 1)
        for kept in range(1, 100, 7)
    ]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def test_products_of_few_rows_on_a_card_read_codes_as_they_are() -> None:
    """Prompts, streamed matrices and a table that is looked up in are decoded."""
    policy = Policy(6, **IN_4_BITS)
    batch = NEED.block((6,))[0]
    split = replace(policy, percent=(50, 50, 100, 0, 100, 0))

    def decoding_s(policy: Policy, is_host: bool, layer: int, sweep: int) -> float:
        costs = costs_of(policy, NEED, machine(is_host))
        return costs.decoding(layer, [(batch, 60 if sweep == 0 else 6)], sweep).device_s

    assert FEW_ROWS < 60 and decoding_s(policy, False, 1, 1) == 0.0
    for more in ((policy, False, 1, 0), (policy, False, 0, 1), (split, False, 1, 1)):
        assert decoding_s(*more) > 0.0
    assert decoding_s(policy, True, 1, 1) > 0.0


def test_only_a_card_has_a_thread_that_issues_launches() -> None:
    """Prompts take more launches than decode steps; each matrix is unpacked in a launch."""
    policy = Policy(6, percent=(0, 100, 100, 0, 100, 0), **IN_4_BITS)
    batch = NEED.block((6,))[0]
    for is_host in (False, True):
        costs = costs_of(policy, NEED, machine(is_host, kernel_s=1e-3))
        prefill, decode = (costs.step(1, batch, sweep).issue_s for sweep in (0, 1))
        assert (prefill > decode) is not is_host and decode == 0
        assert (costs.decoding(1, [(batch, 6)], 1).issue_s > 0) is not is_host
