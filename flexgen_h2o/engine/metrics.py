"""What is measured of a block's sweeps. Knows nothing of layers, tiers or rows.

The run report, from what a run's rows and blocks counted.

The progress bar of a run: tokens, tokens per second and time left, on a terminal only.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Protocol

from tqdm import tqdm

from flexgen_h2o.core.config import ModelSpec, Policy
from flexgen_h2o.core.timeline import LANES
from flexgen_h2o.engine.generation import Row, need_of
from flexgen_h2o.engine.memory_plan import packing_of
from flexgen_h2o.engine.report import IO_LINKS, PhaseReport, RunReport, run_work
from flexgen_h2o.engine.resources import Engine
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.prefixes import FedPrompts
from flexgen_h2o.planner.predict import Prediction


@dataclass(frozen=True)
class Sweep:
    """What a sweep of a block was.

    prompts: the share of its tokens that came from prompts. held: KV columns of all rows and layers (a column is one
    key and one value of every kv-head); full: those that the full cache would have held; read: held by rows that
    decoded.
    """

    seconds: float
    prompts: float
    held: int
    full: int
    read: int


@dataclass
class BlockStats:
    """Sums over a block's sweeps: they take the same memory however many there are.

    held, full: columns of the sweeps behind the first one (of the first one where there is no other), of which there
    are `later`. read: of all sweeps. fed: the prompts that were.
    """

    sweeps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    held: int = 0
    full: int = 0
    read: int = 0
    fed: FedPrompts = field(default_factory=FedPrompts)
    _prompts: float = 0.0  # of the newest sweep

    @property
    def later(self) -> int:
        return max(0, self.sweeps - 1)

    def end_layer(self, seconds: float) -> None:
        """A layer of a sweep took so long, for all micro-batches."""

    def end_sweep(self, sweep: Sweep) -> None:
        if self.sweeps == 1:  # the second one takes the place of the first
            self.held = self.full = 0
        self.held += sweep.held
        self.full += sweep.full
        self.read += sweep.read
        self.sweeps += 1
        self._prompts = sweep.prompts
        self._take(sweep.seconds)

    def add_seconds(self, seconds: float) -> None:
        """The newest sweep took so much longer."""
        self._take(seconds)

    def _take(self, seconds: float) -> None:
        """Mixed sweeps are shared out between prefill and decode by their tokens."""
        self.prefill_s += seconds * self._prompts
        self.decode_s += seconds * (1 - self._prompts)


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of each sweep of a block, and of each layer of each sweep (all its micro-batches)."""

    sweeps: list[float] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class KvUse:
    """KV columns of each sweep of a block, as of `Sweep`."""

    held: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)


@dataclass
class BlockLists(BlockStats):
    """The sums with a list of each sweep and layer: for a block that has an end, as no further rows enter it."""

    times: BlockTimes = field(default_factory=BlockTimes)
    kv_use: KvUse = field(default_factory=KvUse)

    def end_layer(self, seconds: float) -> None:
        self.times.layers.append(seconds)

    def end_sweep(self, sweep: Sweep) -> None:
        super().end_sweep(sweep)
        self.times.sweeps.append(sweep.seconds)
        self.kv_use.held.append(sweep.held)
        self.kv_use.read.append(sweep.read)

    def add_seconds(self, seconds: float) -> None:
        super().add_seconds(seconds)
        self.times.sweeps[-1] += seconds


class RunStats:
    """What a run's rows were: `sizes` (prompt tokens, most new tokens) of all, `decoded` tokens besides their first.

    blocks: what was measured of each. Rows themselves are not kept: a run may be
    fed as many as a job has.
    """

    def __init__(self) -> None:
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.decoded = 0
        self.blocks: list[BlockStats] = []

    def begin(self, rows: Sequence[Row]) -> None:
        self.sizes.update((len(r.prompt.token_ids), r.max_new) for r in rows)

    def finish(self, rows: Sequence[Row]) -> None:
        self.decoded += sum(max(0, len(r.token_ids) - 1) for r in rows)

    @property
    def prompt_tokens(self) -> int:
        """Of all rows."""
        return sum(prompt * number for (prompt, _), number in self.sizes.items())


def make_report(
    model: str, engine: Engine, eviction: Eviction, stats: RunStats, moved: Mapping[str, Mapping[str, int]],
    predicted: Prediction | None, facts: Mapping[str, str | bool | int], common: int = 0,
) -> RunReport:  # fmt: skip
    """The report of a finished run. moved: bytes by kind and lane; facts: more, of the profile; common: columns that
    all rows had in one copy."""
    blocks, fed = stats.blocks, FedPrompts()
    for block in blocks:
        fed += block.fed
    spec, itemsize = engine.spec, engine.dtype.itemsize
    need = need_of(eviction, stats.sizes.total(), set(stats.sizes), spec.num_blocks)
    held, column = column_bytes(spec, engine.policy, itemsize)
    copied = common * spec.kv_bytes_per_token(itemsize)
    model_bytes, cache_bytes, hidden_bytes = sizes_of(spec, stats.sizes, itemsize)
    return RunReport(
        model=model,
        policy=engine.policy,
        eviction=eviction.to_json(),
        prompt_len=need.prompt_len,
        gen_len=need.gen_len,
        num_prompts=need.rows,
        prefill=PhaseReport(sum(b.prefill_s for b in blocks), stats.prompt_tokens),
        decode=PhaseReport(sum(b.decode_s for b in blocks), stats.decoded),
        peak_bytes=engine.peak_bytes,
        io_bytes={link: sum(lanes[link] for lanes in moved.values()) for link in IO_LINKS},
        peak_bytes_by_kind=engine.peak_bytes_by_kind,
        io_bytes_by_kind=moved,
        kv=kv_facts(held, column, max(need.slots) - common, blocks, copied),
        predicted=predicted_seconds(predicted),
        model_bytes=model_bytes,
        cache_bytes=cache_bytes,
        hidden_bytes=hidden_bytes,
        extra={
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.device.torch_device),
            "blocks": len(blocks),
            "sweeps": sum(b.sweeps for b in blocks),
            "kv_reserved_bytes": engine.plan.size("cache"),
            "look_ahead_units": asdict(engine.plan.depth),
            **facts,
            "prefill_fed_tokens": fed.tokens,
            "common_prefix": {"tokens": common, "kv_bytes": copied},
            "work": asdict(run_work(spec, fed, stats.decoded, held * sum(b.read for b in blocks))),
            **({"attn_sparsity_saves": "arithmetic, no traffic"} if engine.policy.attn_sparsity < 1 else {}),
            "busy_s": {lane: engine.timeline.seconds(lane) for lane in LANES},
        },
    )


def sizes_of(spec: ModelSpec, sizes: Mapping[tuple[int, int], int], itemsize: int) -> tuple[int, int, int]:
    """Bytes of weights, of the full KV cache and of the hidden states of all rows at their longest.

    sizes: how many rows there are of each (prompt tokens, most new tokens).
    """
    tokens = sum((prompt + new) * number for (prompt, new), number in sizes.items())
    return spec.num_weights * itemsize, tokens * spec.kv_bytes_per_token(itemsize), tokens * spec.hidden_size * itemsize


def column_bytes(spec: ModelSpec, policy: Policy, itemsize: int) -> tuple[int, int]:
    """Bytes of one key and value of all kv-heads in one layer: as they lie in their slots, and uncompressed."""
    column, packing = spec.kv_bytes_per_token(itemsize) // spec.num_blocks, packing_of(spec, policy)
    return (2 * spec.num_kv_heads * packing.slot_bytes if packing else column), column


def kv_facts(held: int, column: int, slots: int, blocks: Sequence[BlockStats], copied: int = 0) -> dict[str, int]:
    """Slots of the neediest row; mean bytes of KV held in a decode sweep, and of what the full cache would hold.

    held, column: of `column_bytes`. copied: bytes of KV outside of slots, the whole time.
    """
    decoding = [b for b in blocks if b.later]
    counted = decoding or [b for b in blocks if b.sweeps]
    sweeps = max(1, sum(max(1, b.later) for b in counted))
    return {
        "slots": slots,
        "bytes": copied + held * sum(b.held for b in counted) // sweeps,
        "full_bytes": column * sum(b.full for b in counted) // sweeps,
    }


def predicted_seconds(predicted: Prediction | None) -> dict[str, float | None]:
    """The report's `predicted`."""
    if predicted is None:
        return {"prefill_s": None, "decode_s": None}
    return {"prefill_s": predicted.prefill_s, "decode_s": predicted.decode_s}


class Listener(Protocol):
    """Who hears of a run while it goes on, on its thread."""

    def sweep(self, tokens: int) -> None:
        """A micro-batch has got `tokens` new ones."""

    def finish(self, rows: Sequence[Row]) -> None:
        """These rows are done; they are handed out next."""


class Silent:
    """Hears of a run and shows nothing."""

    def sweep(self, tokens: int) -> None:
        pass

    def finish(self, rows: Sequence[Row]) -> None:
        pass


class Progress:
    """Counts generated tokens. A row that stops early takes the tokens it will not need off the total."""

    def __init__(self, total_tokens: int) -> None:
        self._bar = tqdm(
            total=total_tokens, unit="token", desc="generate", disable=not self.on_terminal(), file=sys.stderr
        )

    @staticmethod
    def on_terminal() -> bool:
        return sys.stderr is not None and sys.stderr.isatty()

    def sweep(self, tokens: int) -> None:
        """A micro-batch has got `tokens` new ones."""
        self._bar.update(tokens)

    def finish(self, rows: Sequence[Row]) -> None:
        spared = sum(r.max_new - len(r.token_ids) for r in rows)
        if spared and self._bar.total is not None:
            self._bar.total -= spared

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
