"""What is measured of a block's sweeps. Knows nothing of layers, tiers or rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexgen_h2o.prefixes import FedPrompts


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
class BlockSums:
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
class BlockLists(BlockSums):
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
