"""The zig-zag order as plain data: which (sweep, layer, micro-batch) comes after which. No tensors, no time.

FlexGen's block schedule (Sheng et al. 2023, section 4.1): all micro-batches of a block go through a layer before
the next layer is touched, so each weight load serves the whole block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True)
class Step:
    """One unit of compute: `sweep` 0 fills the KV cache of rows that enter with it, later sweeps decode.

    What a micro-batch's rows do in a sweep (prefill or decode) belongs to the rows, not to the order, so one
    sweep may mix both.
    """

    sweep: int
    layer: int
    micro_batch: int


def zigzag(
    num_sweeps: int | None, num_layers: int, num_micro_batches: int, together: int | None = None
) -> Iterator[Step]:
    """Steps of one block in compute order; every consumer (loads, compute, stores) walks the same order.

    num_sweeps: None where nobody knows how many there will be: for ever. together: micro-batches that share each weight
    load; all of them by default. Where a block has more (that of a pipeline), they go through all layers in groups of
    so many, one group after the other.
    """
    size = max(1, together or num_micro_batches)
    for sweep in _sweeps(num_sweeps):
        for first in range(0, num_micro_batches, size):
            for layer in range(num_layers):
                for micro_batch in range(first, min(first + size, num_micro_batches)):
                    yield Step(sweep, layer, micro_batch)


def weight_sequence(num_sweeps: int | None, unit_of_layer: tuple[int, ...]) -> Iterator[int]:
    """Weight units in the order they are needed, a unit that stays in place between two layers named once.

    With tied embeddings the head of a sweep and the embedding of the next share one load. num_sweeps: as of `zigzag`.
    """
    last = None
    for _ in _sweeps(num_sweeps):
        for unit in unit_of_layer:
            if unit != last:
                yield unit
                last = unit


def _sweeps(number: int | None) -> Iterable[int]:
    return count() if number is None else range(number)
