"""What a policy will cost: seconds of both phases, bytes on each tier, and what binds. Decided by the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from flexgen_h2o.core.config import DTYPE_BYTES, TIERS, ModelSpec, Policy
from flexgen_h2o.engine.memory_plan import MemoryPlan
from flexgen_h2o.engine.workload import Block, WorkloadShape
from flexgen_h2o.planner.costs import RESOURCES, Costs
from flexgen_h2o.planner.profile import HardwareProfile
from flexgen_h2o.planner.simulate import OnSpan, simulate
from flexgen_h2o.planner.work import CostContext

_Any = TypeVar("_Any")
PHASES = ("prefill", "decode")
CUT_BLOCKS = 6  # transformer blocks that are simulated of a deep model, and twice as many
MOST_WALKED = 8  # sweeps of a block that are simulated; the others are interpolated


@dataclass(frozen=True)
class Prediction:
    """Of a whole pile. Seconds, and bytes by tier.

    busy: by phase, the seconds that each resource works (planner.costs.RESOURCES).
    """

    prefill_s: float
    decode_s: float
    new_tokens: int
    peak_bytes: Mapping[str, int]
    busy: Mapping[str, Mapping[str, float]]

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over both phases, as FlexGen counts."""
        return self.new_tokens / self.total_s

    def binds(self, phase: str) -> str:
        """The resource that works longest in a phase."""
        return max(RESOURCES, key=lambda name: self.busy[phase][name])

    @property
    def bound_by(self) -> str:
        """The resource that binds the longer phase."""
        return self.binds("decode" if self.decode_s > self.prefill_s else "prefill")

    def to_json(self) -> dict[str, Any]:
        return {
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "tokens_per_s": self.tokens_per_s,
            "peak_bytes": dict(self.peak_bytes),
        }


@dataclass(frozen=True)
class Machine:
    """Where a run takes place: measured speeds, and the dtype that is computed in.

    device_is_host may differ from the profile's: on a CPU a device tier with a budget of its own stands in for a card.
    """

    profile: HardwareProfile
    dtype: str
    device_is_host: bool

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def setting(self, spec: ModelSpec, policy: Policy, need: WorkloadShape) -> CostContext:
        return CostContext(spec, policy, need, self.itemsize, self.device_is_host)


def predict(
    spec: ModelSpec, policy: Policy, need: WorkloadShape, machine: Machine, plan: MemoryPlan,
    blocks: Sequence[tuple[Block, int]], on_span: OnSpan | None = None,
) -> Prediction:  # fmt: skip
    """The cost of running `blocks`, each as often as it says, with the buffers of `plan`.

    on_span hears what the first block does.
    """
    costs = Costs(machine.setting(spec, policy, need), machine.profile, machine.dtype)
    seconds = dict.fromkeys(PHASES, 0.0)
    busy = {phase: dict.fromkeys(RESOURCES, 0.0) for phase in PHASES}
    for i, (block, count) in enumerate(blocks):
        found, worked = _block_seconds(costs, plan, block, on_span if i == 0 else None)
        for phase in PHASES:
            seconds[phase] += count * found[phase]
            for name, value in worked[phase].items():
                busy[phase][name] += count * value
    peak = {tier: plan.bytes_on(tier) for tier in TIERS}
    return Prediction(seconds["prefill"], seconds["decode"], need.rows * need.gen_len, peak, busy)


def walked_sweeps(gen_len: int) -> tuple[int, ...]:
    """The sweeps of a block that are simulated: all of a short generation, else its beginning, middle and end, two of
    each."""
    if gen_len <= MOST_WALKED:
        return tuple(range(gen_len))
    middle = (gen_len + 1) // 2
    return (0, 1, 2, 3, middle, middle + 1, gen_len - 2, gen_len - 1)


def _block_seconds(
    costs: Costs, plan: MemoryPlan, block: Block, on_span: OnSpan | None
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Seconds by phase, and busy seconds by phase and resource. Of a deep model a few transformer blocks are walked,
    and twice as many: what the others add is the difference, for each as much."""
    depth = costs.at.spec.num_blocks
    if depth <= 2 * CUT_BLOCKS or on_span is not None:
        return _walk(costs, plan, block, on_span)
    few, more = (_walk(replace(costs, at=_cut(costs.at, n)), plan, block, None) for n in (CUT_BLOCKS, 2 * CUT_BLOCKS))
    times = depth / CUT_BLOCKS - 2

    def extended(less: Mapping[str, float], full: Mapping[str, float]) -> dict[str, float]:
        return {name: full[name] + max(0.0, full[name] - less[name]) * times for name in full}

    busy = {phase: extended(few[1][phase], more[1][phase]) for phase in PHASES}
    return extended(few[0], more[0]), busy


def _cut(at: CostContext, depth: int) -> CostContext:
    """The same with `depth` transformer blocks, evenly taken from all."""
    spec, need = at.spec, at.need
    chosen = [round(i * (spec.num_blocks - 1) / (depth - 1)) for i in range(depth)]

    def some(values: Sequence[_Any]) -> tuple[_Any, ...]:
        return tuple(values[i] for i in chosen)

    cut = replace(spec, num_blocks=depth, attention=some(spec.attention), mlp=some(spec.mlp))
    return replace(at, spec=cut, need=replace(need, slots=some(need.slots), kept=some(need.kept)))


def _walk(
    costs: Costs, plan: MemoryPlan, block: Block, on_span: OnSpan | None
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    need = costs.at.need
    walked = walked_sweeps(need.gen_len)
    middle = need.gen_len // 2
    both = costs.with_contention(block, 0), costs.with_contention(block, middle or 1)
    result = simulate(both, plan, block, walked, on_span)
    seconds = [end - start for start, end in zip((0.0, *result.ends), result.ends, strict=False)]
    nothing = dict.fromkeys(RESOURCES, 0.0)
    busy = [
        {name: now[name] - before[name] for name in RESOURCES}
        for before, now in zip((nothing, *result.busy), result.busy, strict=False)
    ]
    decode = {name: _sum_of_sweeps(walked[1:], [b[name] for b in busy[1:]]) for name in RESOURCES}
    times = {"prefill": seconds[0], "decode": _sum_of_sweeps(walked[1:], seconds[1:])}
    times["decode" if need.gen_len > 1 else "prefill"] += result.settle_s
    return times, {"prefill": busy[0], "decode": decode}


def _sum_of_sweeps(walked: Sequence[int], values: Sequence[float]) -> float:
    """The sum over decode sweeps 1, 2, ... up to the last of `walked`, of which only these were walked.

    The first counts as it is; what is between pairs of neighbours is interpolated between their means, since a sweep
    may have loaded for the next one.
    """
    if not walked or walked[-1] == len(walked):
        return sum(values)
    total = values[0]
    pairs = [((walked[i] + walked[i + 1]) / 2, (values[i] + values[i + 1]) / 2) for i in range(1, len(walked), 2)]
    for sweep in range(2, walked[-1] + 1):
        total += _between(pairs, sweep)
    return total


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    for (a, low), (b, high) in pairwise(points):
        if at <= b or b == points[-1][0]:
            return low + (high - low) * (at - a) / (b - a)
    return points[-1][1]
