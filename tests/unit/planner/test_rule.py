"""The simple rule: what it chooses fits, the fastest tiers first, and it says when nothing can."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.errors import DoesNotFitError
from flexgen_h2o.models import spec_from_config
from flexgen_h2o.planner.memory import OVERLAPPED, memory_plan, plan_within
from flexgen_h2o.planner.rule import MICRO_BATCH, MOST_ROWS, SHARE_STEP, AutoPolicy, Need, choose_policy, shape_of
from flexgen_h2o.units import GIB, MIB

CONFIG: dict[str, Any] = {
    "model_type": "opt", "vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 4, "ffn_dim": 512,
    "max_position_embeddings": 100, "num_attention_heads": 4, "word_embed_proj_dim": 128, "activation_function": "relu",
    "enable_bias": True, "layer_norm_elementwise_affine": True, "do_layer_norm_before": True,
}  # fmt: skip
SPEC: ModelSpec = spec_from_config("tiny", CONFIG, "here")
BLOCKS = SPEC.num_blocks
NEED = Need(rows=2, prompt_len=20, slots=(40,) * BLOCKS)
HUGE = {"device": 100 * GIB, "host": 100 * GIB, "disk": 100 * GIB}


def choose(budgets: Mapping[str, int | None], is_host: bool, need: Need = NEED, base: Policy | None = None) -> Policy:
    return choose_policy(SPEC, need, base or Policy(), 4, is_host, dict(budgets))


def least(tier: str, is_host: bool, percent: tuple[int, ...], need: Need = NEED) -> int:
    """Bytes of `tier` for one row at a time with little look-ahead."""
    policy = Policy(1, 1, percent)  # type: ignore[arg-type]
    return memory_plan(SPEC, policy, shape_of(policy, need), 4, is_host, OVERLAPPED[1]).bytes_on(tier)


@pytest.mark.parametrize("is_host", [True, False])
def test_with_room_for_everything_everything_is_resident(is_host: bool) -> None:
    assert choose(HUGE, is_host) == Policy(2, 1, (100, 0, 100, 0, 100, 0))


def test_fewer_slots_leave_room_for_weights() -> None:
    """Each block is counted by its own slots, with what a policy keeps of them."""
    record, everything = ("positions", "scores"), (100, 0, 100, 0, 100, 0)
    full, few = Need(1, 20, (8000,) * BLOCKS), Need(1, 20, (160,) * BLOCKS, record)
    pyramid = Need(1, 20, (220, 180, 140, 100), record)
    room = least("host", True, everything, few) + MIB // 2
    by_need = [choose({**HUGE, "device": 0, "host": room}, True, need).percent for need in (full, few, pyramid)]
    assert by_need[0] != everything and by_need[1:] == [everything, everything]


def test_what_does_not_fit_the_device_goes_to_the_host_before_the_disk() -> None:
    small_device = least("device", False, (0, 0, 0, 0, 0, 0)) + MIB // 2
    policy = choose({**HUGE, "device": small_device}, is_host=False)
    weights, cache = policy.percent[:2], policy.percent[2:4]
    assert sum(weights) == 100 and weights[0] < 100 and sum(cache) == 100


@pytest.mark.parametrize("is_host", [True, False])
def test_weights_go_to_disk_when_ram_is_small(is_host: bool) -> None:
    tier = "host" if is_host else "device"
    percent = (0, 0, 0, 0, 0, 0)
    budgets = {**HUGE, **{t: least(t, is_host, percent) + MIB // 2 for t in ("host", tier)}}
    policy = choose(budgets, is_host)
    assert policy.percent[0] + policy.percent[1] < 100
    more = choose({**budgets, "host": budgets["host"] + MIB, tier: budgets[tier] + MIB}, is_host)
    assert more.percent[0] + more.percent[1] > policy.percent[0] + policy.percent[1]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_chosen_fits(seed: int) -> None:
    """Budgets from what the smallest policy needs up to where everything is resident."""
    draw = random.Random(seed)
    is_host, rows, overlap = seed % 2 == 0, draw.randint(1, 4), draw.random() < 0.7
    need, base = Need(rows, 20, (40,) * BLOCKS), Policy(overlap=overlap)
    least_of = {tier: least(tier, is_host, (0,) * 6, need) for tier in HUGE}
    budgets: dict[str, int | None] = {t: n + draw.randint(0, 5 * MIB) for t, n in least_of.items()}
    policy = choose(budgets, is_host, need, base)
    assert not plan_within(SPEC, policy, shape_of(policy, need), 4, is_host, budgets).overflow(budgets)
    assert policy.overlap is overlap and policy.gpu_batch_size <= MICRO_BATCH
    assert policy.gpu_batch_size <= rows and policy.block_size < 2 * max(rows, policy.gpu_batch_size)


@pytest.mark.parametrize("tier", ["host", "device"])
def test_nothing_fits_next_to_nothing(tier: str) -> None:
    with pytest.raises(DoesNotFitError, match=f"on the {tier} tier.*--{tier}-mem"):
        choose({**HUGE, tier: 1000}, is_host=False)


def test_less_look_ahead_is_tried_before_a_refusal() -> None:
    smallest = Policy(1, 1, (0, 0, 0, 0, 0, 0))
    need = memory_plan(SPEC, smallest, shape_of(smallest, NEED), 4, True, OVERLAPPED[-1]).bytes_on("host")
    choose({**HUGE, "device": 0, "host": need}, is_host=True)


def test_everything_but_batches_and_shares_is_the_base_policys() -> None:
    others: dict[str, Any] = {"cpu_cache_compute": True, "sep_layer": False, "pin_weight": False, "attn_sparsity": 0.5}
    base = Policy(7, 9, (1, 2, 3, 4, 5, 6), **others)
    chosen = choose(HUGE, is_host=False, base=base)
    same: dict[str, Any] = {"gpu_batch_size": 7, "num_gpu_batches": 9, "percent": (1, 2, 3, 4, 5, 6)}
    assert chosen != base and replace(chosen, **same) == base
    assert AutoPolicy().base == Policy()


@pytest.mark.parametrize(
    ("gbs", "batches", "rows", "shape"),
    [(4, 2, 8, (4, 2)), (4, 2, 100, (4, 2)), (4, 2, 3, (3, 1)), (4, 3, 5, (4, 2)), (1, 9, 4, (1, 4))],
)
def test_the_shape_is_of_the_rows_there_are(gbs: int, batches: int, rows: int, shape: tuple[int, int]) -> None:
    record = ("positions", "scores")
    found = shape_of(Policy(gbs, batches), Need(rows, 10, (30, 29, 28, 30), record))
    assert (found.rows, found.micro_batches, found.tokens) == (*shape, 10 * shape[0])
    assert (found.slots, found.record) == ((30, 29, 28, 30), record)


def test_a_long_pile_is_cut_into_blocks_of_bounded_size() -> None:
    policy = choose(HUGE, is_host=True, need=Need(10_000, 2, (3,) * BLOCKS))
    assert (policy.gpu_batch_size, policy.block_size) == (MICRO_BATCH, MOST_ROWS)
    assert policy.percent[0] % SHARE_STEP == 0
