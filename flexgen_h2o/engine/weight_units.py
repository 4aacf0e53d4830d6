"""Weight units of a model: of what kinds they are, and how many bytes they take.

The module also decides how the head is cut. It imports no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from flexgen_h2o.checkpoint.formats import Codec, TensorLayout, layout_of, layouts_of
from flexgen_h2o.core.config import TIERS
from flexgen_h2o.core.model import LayerPlan, ModelSpec, WeightUnit
from flexgen_h2o.core.units import ALIGN, PAGE, round_up
from flexgen_h2o.tiers.stream import Shares

# The rows of a part of the head are a multiple of this. It is a multiple of the rows by which
# matrices are blocked, and of the rows that share a scale.
HEAD_ROWS = 128
MAX_HEAD_PARTS = 16  # each part is one step per micro-batch


# A mixture of experts has thousands of units, and a search asks for them often.
@lru_cache(maxsize=64)
def layer_plan(spec: ModelSpec, sep_layer: bool, expert_group: int) -> LayerPlan:
    return spec.layers(sep_layer, expert_group)


def streamed_part_bytes(nbytes: int) -> int:
    """Return the ring bytes of stored rows that are streamed.

    They have room for the page-aligned file range, wherever in a page it begins.
    """
    return round_up(nbytes + PAGE, PAGE)


def streamed_bytes(unit: WeightUnit, shares: Shares, form: Codec, device_is_host: bool) -> int:
    """Return the ring bytes that one load of the unit takes."""
    return unit_bytes(layouts_of(form, unit.tensors), shares, device_is_host).ring


class WeightBytes(NamedTuple):
    """Bytes of one weight unit, or of all together."""

    # Resident on the device.
    device: int
    # Resident on the host.
    host: int
    # In the ring of streamed units.
    ring: int
    # In the buffer of decoded matrices.
    unpacked: int


class UnitKinds(NamedTuple):
    """The weight units of a model, grouped by what they hold. `unit_kinds` makes it.

    There may be thousands of units, but they are of about four kinds. Every tuple except `cycle`
    has one entry for each kind.
    """

    # The tensors of a unit.
    layouts: tuple[tuple[TensorLayout, ...], ...]
    # The number of experts of a unit.
    experts: tuple[int, ...]
    # The number of units.
    counts: tuple[int, ...]
    # The kinds of the units that a sweep loads, in order. A unit that two layers share (tied head
    # and next embedding) is loaded once.
    cycle: tuple[int, ...]


# A search plans thousands of policies for one model.
@lru_cache(maxsize=16)
def unit_kinds(plan: LayerPlan, form: Codec) -> UnitKinds:
    experts = {layer.unit: len(layer.experts) for layer in plan.layers}
    units = [(layouts_of(form, unit.tensors), experts[i]) for i, unit in enumerate(plan.units)]
    kinds = {key: kind for kind, key in enumerate(dict.fromkeys(units))}
    counts = Counter(units)
    used = [layer.unit for layer in plan.layers]
    loaded = [
        unit for unit, before in zip(used, [used[-1], *used], strict=False) if unit != before
    ] or used[:1]
    layouts, experts_of = zip(*kinds, strict=True)
    return UnitKinds(
        layouts,
        experts_of,
        tuple(counts[key] for key in kinds),
        tuple(kinds[units[i]] for i in loaded),
    )


@lru_cache(maxsize=64)
def loaded_kinds(plan: LayerPlan, kinds: tuple[int, ...]) -> Counter[int]:
    """Return how often a sweep loads the weights of each kind of layer (`layer_kinds`)."""
    before = (plan.layers[-1], *plan.layers)
    return Counter(
        kind
        for kind, layer, last in zip(kinds, plan.layers, before, strict=False)
        if layer.unit != last.unit
    )


@lru_cache(maxsize=64)
def layer_kinds(
    plan: LayerPlan, kv_kinds: tuple[tuple[int, int, int | None], ...]
) -> tuple[int, ...]:
    """Return for each layer the index of the first layer that computes the same.

    kv_kinds: for each transformer block, (slots, kept, window), which distinguish its KV from that
        of others.
    """
    first: dict[tuple[object, ...], int] = {}
    found = []
    for i, layer in enumerate(plan.layers):
        shapes = tuple(t.shape for t in plan.units[layer.unit].tensors)
        kv = kv_kinds[layer.block] if layer.block >= 0 else ()
        found.append(first.setdefault((layer.kind, shapes, kv), i))
    return tuple(found)


@lru_cache(maxsize=64)
def ring_contents(plan: LayerPlan, form: Codec, depth: int) -> frozenset[tuple[int, ...]]:
    """Return the sets of kinds of `depth` consecutive loads, which a ring holds at once.

    A load at each place of the cycle may be the first one.
    """
    cycle = unit_kinds(plan, form).cycle
    if depth >= len(cycle):
        return frozenset([cycle])
    twice = cycle + cycle
    return frozenset(twice[i : i + depth] for i in range(len(cycle)))


@lru_cache(maxsize=4096)
def unit_bytes(
    layouts: tuple[TensorLayout, ...], shares: Shares, device_is_host: bool
) -> WeightBytes:
    resident = dict.fromkeys(TIERS, 0)
    ring = 0
    for layout in layouts:
        for part, streamed in layout.homes(shares, device_is_host):
            pieces = [stored.part_bytes(part) for stored in layout.stored]
            resident[part.tier] += sum(round_up(nbytes, ALIGN) for nbytes in pieces)
            if streamed:
                ring += sum(map(streamed_part_bytes, pieces))
    decoded = sum(round_up(layout.shape[0] * layout.decoded_row_bytes, ALIGN) for layout in layouts)
    return WeightBytes(resident["device"], resident["host"], ring, decoded)


@lru_cache(maxsize=64)
def even_head_rows(spec: ModelSpec, plan: LayerPlan, form: Codec, device_is_host: bool) -> int:
    """Return the rows of the head's table in a unit of even size; 0: do not cut it.

    The unit is about as large as the average one of the transformer blocks. Return 0 if another
    unit is as large as the head (an embedding of its own, on a GPU), or if the head cannot be cut.
    """
    if not spec.head:
        return 0
    table = spec.head[-1]
    all_on_disk = (0.0, 0.0, 1.0)
    looked_up = form.layout(replace(table, looked_up=True))
    # The embedding needs a shared table whole.
    if spec.shares_table and not (device_is_host and looked_up.looked_up):
        return 0
    others = {x: plan.units[x.unit] for x in plan.layers if x.unit != plan.layers[-1].unit}
    sizes = {
        x: streamed_bytes(unit, all_on_disk, form, device_is_host) for x, unit in others.items()
    }
    whole = streamed_bytes(WeightUnit("", (table,)), all_on_disk, form, device_is_host)
    if whole <= max(sizes.values()):
        return 0
    of_blocks = [nbytes for layer, nbytes in sizes.items() if layer.block >= 0]
    parts = min(MAX_HEAD_PARTS, -(-whole * len(of_blocks) // sum(of_blocks)))
    rows = round_up(-(-table.shape[0] // parts), HEAD_ROWS)
    return rows if rows < table.shape[0] and layout_of(form, table).cuts_at(rows) else 0
