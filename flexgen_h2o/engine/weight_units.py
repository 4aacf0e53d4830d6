"""Weight units of a model under a policy: which there are, what they take, and how the head is cut. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from flexgen_h2o.checkpoint.formats import TensorLayout, WeightFormat, layout_of, layouts_of
from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.model import WAITS_BELOW, LayerPlan, ModelSpec, WeightUnit, with_head_rows
from flexgen_h2o.core.units import ALIGN, PAGE, round_up
from flexgen_h2o.tiers.stream import Shares, tier_shares

# A part of the head has a multiple of it: of the rows that products are blocked by, and of those that share a scale.
HEAD_ROWS = 128
MOST_HEAD_PARTS = 16  # each is a step of each micro-batch


def expert_group(spec: ModelSpec, policy: Policy) -> int:
    """Experts of a unit; 0 where the model has none. One pass over all of a block is fastest where they stay on the
    device; but those of a unit are decoded at a time, where they are."""
    if spec.experts is None:
        return 0
    decoded = spec.quantization or (policy.compress_weight and not policy.int8_compute)
    stay = policy.percent[0] == 100 and not decoded
    asked = policy.expert_group or (spec.experts.count if stay else 0)
    return spec.experts.group_size(asked, policy.block_size)


def waits_for_router(spec: ModelSpec, policy: Policy) -> bool:
    """Are groups of experts loaded once their block's router has chosen, so that those that nobody chose are not? Else
    they are loaded ahead of it, as all other weights."""
    if spec.experts is None:
        return False
    return spec.experts.share_used(policy.block_size, expert_group(spec, policy)) < WAITS_BELOW


def layer_steps(spec: ModelSpec, policy: Policy) -> tuple[bool, int]:
    """What decides on the layers of a sweep."""
    return policy.sep_layer, expert_group(spec, policy)


def layers_of(spec: ModelSpec, policy: Policy, head_rows: int | None = None) -> LayerPlan:
    """The layers of a sweep under a policy. head_rows: of the memory plan, where the model does not have them."""
    spec = spec if head_rows is None else with_head_rows(spec, head_rows)
    return layer_plan(spec, layer_steps(spec, policy))


@lru_cache(maxsize=64)  # a mixture of experts has thousands of units, and a search asks for them often
def layer_plan(spec: ModelSpec, steps: tuple[bool, int]) -> LayerPlan:
    return spec.layers(*steps)


def streamed_part_bytes(nbytes: int) -> int:
    """Ring bytes of stored rows that are streamed: room for their page-aligned file range, wherever in a page it
    begins."""
    return round_up(nbytes + PAGE, PAGE)


def streamed_bytes(unit: WeightUnit, shares: Shares, form: WeightFormat, device_is_host: bool) -> int:
    """Ring bytes that one load of the unit takes."""
    return _unit_bytes(layouts_of(form, unit.tensors), shares, device_is_host).ring


class WeightBytes(NamedTuple):
    """Bytes of a weight unit, or of all together: resident on device and host, in the ring, and unpacked."""

    device: int
    host: int
    ring: int
    unpacked: int


class UnitKinds(NamedTuple):
    """The weight units of a model, of which there may be thousands, by what they hold: they are of four kinds or so.

    layouts, experts, counts: of each kind the tensors, how many experts, and how many units. cycle: the kinds of what a
    sweep loads, in order; a unit that two layers share (tied head and next embedding) is loaded once.
    """

    layouts: tuple[tuple[TensorLayout, ...], ...]
    experts: tuple[int, ...]
    counts: tuple[int, ...]
    cycle: tuple[int, ...]


def unit_kinds(spec: ModelSpec, policy: Policy, form: WeightFormat) -> UnitKinds:
    return _unit_kinds(spec, layer_steps(spec, policy), form)


# A search plans thousands of policies for one model.
@lru_cache(maxsize=16)
def _unit_kinds(spec: ModelSpec, steps: tuple[bool, int], form: WeightFormat) -> UnitKinds:
    plan = layer_plan(spec, steps)
    experts = {layer.unit: len(layer.experts) for layer in plan.layers}
    units = [(layouts_of(form, unit.tensors), experts[i]) for i, unit in enumerate(plan.units)]
    kinds, counts = {key: kind for kind, key in enumerate(dict.fromkeys(units))}, Counter(units)
    used = [layer.unit for layer in plan.layers]
    loaded = [unit for unit, before in zip(used, [used[-1], *used], strict=False) if unit != before] or used[:1]
    layouts, experts_of = zip(*kinds, strict=True)
    return UnitKinds(layouts, experts_of, tuple(counts[key] for key in kinds), tuple(kinds[units[i]] for i in loaded))


@lru_cache(maxsize=64)
def loaded_kinds(spec: ModelSpec, steps: tuple[bool, int], kinds: tuple[int, ...]) -> Counter[int]:
    """How often a sweep loads the weights of each kind of layer (`layer_kinds`)."""
    layers = layer_plan(spec, steps).layers
    before = (layers[-1], *layers)
    return Counter(k for k, layer, last in zip(kinds, layers, before, strict=False) if layer.unit != last.unit)


@lru_cache(maxsize=64)
def layer_kinds(
    spec: ModelSpec, steps: tuple[bool, int], kv_kinds: tuple[tuple[int, int, int | None], ...]
) -> tuple[int, ...]:
    """For each layer the first that computes the same. kv_kinds: of each block, what tells its KV from others'."""
    first: dict[tuple[object, ...], int] = {}
    plan, found = layer_plan(spec, steps), []
    for i, layer in enumerate(plan.layers):
        shapes = tuple(t.shape for t in plan.units[layer.unit].tensors)
        kv = kv_kinds[layer.block] if layer.block >= 0 else ()
        found.append(first.setdefault((layer.kind, shapes, kv), i))
    return tuple(found)


@lru_cache(maxsize=64)
def _windows(spec: ModelSpec, steps: tuple[bool, int], form: WeightFormat, depth: int) -> frozenset[tuple[int, ...]]:
    """The kinds of so many loads, one after another, that a ring holds at once."""
    cycle = _unit_kinds(spec, steps, form).cycle
    if depth >= len(cycle):
        return frozenset([cycle])
    twice = cycle + cycle
    return frozenset(twice[i : i + depth] for i in range(len(cycle)))


@lru_cache(maxsize=4096)
def _unit_bytes(layouts: tuple[TensorLayout, ...], shares: Shares, device_is_host: bool) -> WeightBytes:
    resident, ring = dict.fromkeys(TIERS, 0), 0
    for layout in layouts:
        for part, streamed in layout.homes(shares, device_is_host):
            pieces = [stored.part_bytes(part) for stored in layout.stored]
            resident[part.tier] += sum(round_up(nbytes, ALIGN) for nbytes in pieces)
            if streamed:
                ring += sum(map(streamed_part_bytes, pieces))
    decoded = sum(round_up(layout.shape[0] * layout.decoded_row_bytes, ALIGN) for layout in layouts)
    return WeightBytes(resident["device"], resident["host"], ring, decoded)


def weight_bytes(spec: ModelSpec, policy: Policy, form: WeightFormat, device_is_host: bool, depth: int) -> WeightBytes:
    """Of all weights, with room for `depth` loads in the ring."""
    shares = tier_shares(policy.weight_shares, device_is_host)
    kinds, windows = unit_kinds(spec, policy, form), _windows(spec, layer_steps(spec, policy), form, depth)
    sizes = [_unit_bytes(layouts, shares, device_is_host) for layouts in kinds.layouts]
    device, host = (sum(c * s[i] for s, c in zip(sizes, kinds.counts, strict=True)) for i in (0, 1))
    ring = max(sum(sizes[kind].ring for kind in window) for window in windows)
    return WeightBytes(device, host, ring, max(s.unpacked for s in sizes))


def even_head_rows(spec: ModelSpec, policy: Policy, form: WeightFormat, device_is_host: bool) -> int:
    """Rows of the head's table that make a unit about as large as those of transformer blocks are on average; 0 where
    another unit is as large as the head (an embedding of its own, on a card), and where the head cannot be cut."""
    return _even_head_rows(spec, layer_steps(spec, policy), form, device_is_host) if spec.head else 0


@lru_cache(maxsize=64)
def _even_head_rows(spec: ModelSpec, steps: tuple[bool, int], form: WeightFormat, device_is_host: bool) -> int:
    table, plan, all_on_disk = spec.head[-1], layer_plan(spec, steps), (0.0, 0.0, 1.0)
    looked_up = form.layout(replace(table, looked_up=True))
    if spec.shares_table and not (device_is_host and looked_up.looked_up):  # the embedding needs it whole
        return 0
    others = {x: plan.units[x.unit] for x in plan.layers if x.unit != plan.layers[-1].unit}
    sizes = {x: streamed_bytes(unit, all_on_disk, form, device_is_host) for x, unit in others.items()}
    whole = streamed_bytes(WeightUnit("", (table,)), all_on_disk, form, device_is_host)
    if whole <= max(sizes.values()):
        return 0
    of_blocks = [nbytes for layer, nbytes in sizes.items() if layer.block >= 0]
    parts = min(MOST_HEAD_PARTS, -(-whole * len(of_blocks) // sum(of_blocks)))
    rows = round_up(-(-table.shape[0] // parts), HEAD_ROWS)
    return rows if rows < table.shape[0] and layout_of(form, table).cuts_at(rows) else 0
