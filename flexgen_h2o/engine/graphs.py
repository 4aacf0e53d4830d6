"""Graphs of a card (CUDA graphs): steps of decode sweeps that launch the same each time are launched as one.

Of a sweep of as many rows as the last one, with weights, KV cache and hidden states all on the card, only tokens and
the numbers of its step are new. These are copied to where the graphs read them; all else has its address.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from flexgen_h2o.engine.memory_plan import attends_on_host
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.kernels import triton
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
        self._sweeps = self._used = 0  # of these rows: plain ones, and those with graphs
        self._plain = PLAIN_SWEEPS
        self._is_used = False  # in this sweep
        self._graphs: dict[StepKey, Callable[[], None]] = {}
        self._pool: object = None
        self._held: list[object] = []  # that graphs read and write, and nobody else holds
        self._inputs: list[torch.Tensor] = []  # that graphs read

    def begin_sweep(self, rows: Hashable, inputs: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Once all rows of a sweep are known, before the first of its steps. rows: equal where the steps of two sweeps
        launch the same; None: they launch what no other does, and graphs wait for the next sweep. inputs: makes what
        the card is told of the sweep, in tensors that steps read."""
        if rows is not None and rows != self._rows:
            if self._used:
                self._plain = PLAIN_SWEEPS if self._used >= WORTH_MAKING else min(2 * self._plain, MOST_PLAIN_SWEEPS)
            self._graphs, self._held, self._inputs = {}, [], []
            self._sweeps, self._used, self._rows = 0, 0, rows
        self._is_used = rows is not None and self._sweeps >= self._plain
        if rows is None or not self._is_used:
            self._sweeps += rows is not None
            return
        new = list(inputs())
        if not self._used:
            self._inputs, self._pool = new, self._device.graph_pool()
        self._used += 1
        for ours, theirs in zip(self._inputs, new, strict=True):
            if ours is not theirs:
                ours.copy_(theirs)

    def run(self, key: StepKey, issue: Callable[[], None], held: object) -> None:
        """Carry out a step: `issue` launches it. held: what has tensors for it that were made in this sweep."""
        if not self._is_used:
            issue()
            return
        if key not in self._graphs:
            self._graphs[key] = self._device.graph(issue, self._pool)
            self._held.append(held)
        self._graphs[key]()


def graphs_of(engine: Engine, alike: bool) -> StepGraphs | None:
    """Where decode steps of the same rows launch the same, with all that they read and write where it was. alike: does
    attention, and is a layer one step? Routers are asked in the middle of a step. Without overlap each step is waited
    for, and none is a graph."""
    rings = map(engine.ring, ("weight ring", "cache ring", "hidden ring"))
    on_card = engine.device.has_graphs and not attends_on_host(engine.policy, engine.device.is_host)
    is_static = (
        on_card
        and alike
        and engine.policy.overlap
        and triton.is_installed()
        and not engine.spec.experts
        and not any(rings)
    )
    return StepGraphs(engine.device) if is_static else None
