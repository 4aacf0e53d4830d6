"""Graphs of a card (CUDA graphs): steps of decode sweeps that launch the same each time are launched as one.

Of a sweep of as many rows as the last one, with weights, KV cache and hidden states all on the card, only tokens and
the numbers of its step are new. These are copied to where the graphs read them; all else has its address.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from flexgen_h2o.engine.memory_plan import makes_graphs
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.kernels import triton
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.tiers.device import Device

PLAIN_SWEEPS = 2  # of rows before their steps become graphs: what is launched is compiled and allocated then
WORTH_MAKING = 4  # sweeps: a graph takes about as long to be made as it saves in two
MOST_PLAIN_SWEEPS = 64
StepKey = tuple[int, int]  # layer, micro-batch


class StepGraphs:
    """The graphs of the steps of an executor. Where they were not used for long enough, the next ones come later."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rows: Hashable = None
        self._sweeps, self._plain = 0, PLAIN_SWEEPS  # of these rows, of which the first so many are plain
        self._is_used = False  # in this sweep
        self._graphs: dict[StepKey, Callable[[], None]] = {}
        self._pool: object = None
        self._held: list[object] = []  # that graphs read and write, and nobody else holds
        self._inputs: list[torch.Tensor] = []  # that graphs read

    def begin_sweep(self, rows: Hashable, inputs: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Once all rows of a sweep are known, before the first of its steps. rows: equal where the steps of two sweeps
        launch the same; None: they launch what no other does, and graphs wait for the next sweep. inputs: makes what
        the card is told of the sweep, in tensors that steps read."""
        self._is_used = False
        if rows is None:
            return
        if rows != self._rows:
            self._begin(rows)
        self._sweeps += 1
        if self._sweeps <= self._plain:
            return
        self._is_used, new = True, list(inputs())
        if not self._inputs:
            self._inputs, self._pool = new, self._device.graph_pool()
        for ours, theirs in zip(self._inputs, new, strict=True):
            if ours is not theirs:
                ours.copy_(theirs)

    def _begin(self, rows: Hashable) -> None:
        used = self._sweeps - self._plain
        if used > 0:
            self._plain = PLAIN_SWEEPS if used >= WORTH_MAKING else min(2 * self._plain, MOST_PLAIN_SWEEPS)
        self._rows, self._sweeps = rows, 0
        self._graphs, self._held, self._inputs = {}, [], []

    def run(self, key: StepKey, issue: Callable[[], None], held: object) -> None:
        """Carry out a step: `issue` launches it. held: what has tensors for it that were made in this sweep."""
        if not self._is_used:
            issue()
            return
        if key not in self._graphs:
            self._graphs[key] = self._device.graph(issue, self._pool)
            self._held.append(held)
        self._graphs[key]()


def graphs_of(engine: Engine, eviction: Eviction) -> StepGraphs | None:
    """None where steps are no graphs. In a pipeline each micro-batch is computed alone."""
    are_alike = makes_graphs(engine.spec, engine.policy, eviction.needs.in_one_launch) and engine.wire is None
    return StepGraphs(engine.device) if are_alike and engine.device.has_graphs and triton.is_installed() else None
