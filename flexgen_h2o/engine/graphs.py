"""CUDA graphs: steps of decode sweeps that launch the same kernels each time are launched as one.

In a sweep of as many sequences as the last one, only the tokens and the numbers of the step are
new. This holds if weights, KV cache and hidden states are all on the GPU. The new values are copied
to where the graphs read them. Everything else keeps its address.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.kernels import triton
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.tiers.device import Device

# Sweeps of a set of sequences before their steps become graphs. They compile and allocate what is
# launched.
PLAIN_SWEEPS = 2
# Sweeps after which graphs were worth making. Making one takes about as long as it saves in two
# sweeps.
WORTH_MAKING = 4
MAX_PLAIN_SWEEPS = 64
StepKey = tuple[int, int]  # layer, micro-batch


class StepGraphs:
    """The graphs of the steps of an executor.

    If the last graphs were not used for long enough, the next ones are made later.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rows: Hashable = None
        # Sweeps of these sequences, and how many of them run without graphs at first.
        self._num_sweeps = 0
        self._num_plain_sweeps = PLAIN_SWEEPS
        self._is_used = False  # whether this sweep uses graphs
        self._graphs: dict[StepKey, Callable[[], None]] = {}
        self._pool: object = None
        self._held: list[object] = []  # objects that graphs read and write, and nobody else holds
        self._inputs: list[torch.Tensor] = []  # tensors that graphs read

    def begin_sweep(self, rows: Hashable, inputs: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Decide whether this sweep uses graphs, and copy its inputs to them.

        Call this once all sequences of a sweep are known, before its first step.

        rows: a key that is equal for two sweeps whose steps launch the same kernels. None: the
            sweep launches what no other does, and graphs wait for the next one.
        inputs: makes the tensors that tell the GPU about the sweep. Steps read them.
        """
        self._is_used = False
        if rows is None:
            return
        if rows != self._rows:
            self._begin(rows)
        self._num_sweeps += 1
        if self._num_sweeps <= self._num_plain_sweeps:
            return
        self._is_used = True
        new = list(inputs())
        if not self._inputs:
            self._pool = self._device.graph_pool()
            self._inputs = new
        for ours, theirs in zip(self._inputs, new, strict=True):
            if ours is not theirs:
                ours.copy_(theirs)

    def _begin(self, rows: Hashable) -> None:
        used = self._num_sweeps - self._num_plain_sweeps
        if used > 0:
            self._num_plain_sweeps = (
                PLAIN_SWEEPS
                if used >= WORTH_MAKING
                else min(2 * self._num_plain_sweeps, MAX_PLAIN_SWEEPS)
            )
        self._rows = rows
        self._num_sweeps = 0
        self._graphs = {}
        self._held = []
        self._inputs = []

    def run(self, key: StepKey, issue: Callable[[], None], held: object) -> None:
        """Run a step, which `issue` launches.

        held: the objects with tensors for the step that were made in this sweep.
        """
        if not self._is_used:
            issue()
            return
        if key not in self._graphs:
            self._graphs[key] = self._device.graph(issue, self._pool)
            self._held.append(held)
        self._graphs[key]()


def graphs_of(engine: Engine, eviction: Eviction) -> StepGraphs | None:
    """Return the graphs of an engine, or None if its steps cannot become graphs.

    In a pipeline they cannot, because each micro-batch is computed alone.
    """
    are_alike = engine.memory.makes_graphs(eviction.needs.in_one_launch) and engine.wire is None
    return (
        StepGraphs(engine.device)
        if are_alike and engine.device.has_graphs and triton.is_installed()
        else None
    )
