"""Hidden states between layers, on their home tiers.

One unit a micro-batch: (tokens, width). In place where the home is the device, else brought into a ring for each layer
and stored after it.
"""

from __future__ import annotations

import torch

from flexgen_h2o.core.units import PAGE, round_up
from flexgen_h2o.engine.memory_plan import hidden_home_bytes, hidden_is_streamed
from flexgen_h2o.tiers.disk import DirectFile, FileRange
from flexgen_h2o.tiers.placement import Shares, split_rows
from flexgen_h2o.tiers.stream import Done, Region, Waitable, wait_all
from flexgen_h2o.tiers.transfers import Mover

HiddenKey = tuple[int, int, int]  # sweep, layer, micro-batch


class HiddenStore:
    """Hidden states of the current block. `memory`: uint8 arenas by tier; `file`: the disk arena."""

    def __init__(
        self, mover: Mover, dtype: torch.dtype, width: int, shares: Shares, num_layers: int,
        memory: dict[str, torch.Tensor], file: DirectFile | None,
    ) -> None:  # fmt: skip
        self._mover, self._dtype, self._width, self._shares = mover, dtype, width, shares
        self._last_layer = num_layers - 1
        self._memory, self._file = memory, file
        self._row = width * dtype.itemsize
        self._streamed = hidden_is_streamed(shares, mover.device.is_host)

    def begin_block(self, most: list[int]) -> None:
        """most: of each micro-batch, the tokens of its largest sweep."""
        self._now = [0] * len(most)
        self._closed: list[tuple[int, int] | None] = [None] * len(most)
        self._stores: list[list[Waitable]] = [[] for _ in most]
        self._offsets: list[dict[str, int]] = []
        used = dict.fromkeys(("device", "host", "disk"), 0)
        for tokens in most:
            self._offsets.append(dict(used))
            for tier, nbytes in hidden_home_bytes(tokens, self._shares, self._row).items():
                used[tier] += nbytes

    def begin_sweep(self, micro_batch: int, tokens: int) -> None:
        """`tokens` of the micro-batch from its next embedding on, 0 when it has no rows any more.

        Call it before the head of the sweep before closes.
        """
        self._now[micro_batch] = tokens

    # Source of a Stream[HiddenKey]

    def nbytes(self, key: HiddenKey) -> int:
        return round_up(self._now[key[2]] * self._row, PAGE) if self._streamed else 0

    def is_needed(self, key: HiddenKey) -> bool:
        return self._now[key[2]] > 0

    def is_ready(self, key: HiddenKey) -> bool:
        sweep, layer, k = key
        before = (sweep, layer - 1) if layer else ((sweep - 1, self._last_layer) if sweep else None)
        return self._closed[k] == before

    def load(self, key: HiddenKey, region: Region) -> list[Done]:
        if key[1] == 0:
            return []
        loads = []
        after = [*region.after, *self._stores[key[2]]]
        for data, home in self._parts(key[2], region):
            if home is not None:
                loads.append(self._mover.copy("h2d", "load_hidden", data, home, after))
            else:
                assert self._file is not None
                offset = self._offsets[key[2]]["disk"]
                loads.append(
                    self._mover.read("load_hidden", data, "device", FileRange(self._file, offset, data.numel()), after)
                )
        return loads

    # Compute side

    def open(self, key: HiddenKey, region: Region | None) -> torch.Tensor:
        """The hidden states of a micro-batch, (tokens, width), to be changed in place."""
        tokens = self._now[key[2]]
        if region is None:
            (part,) = split_rows(tokens, self._shares)
            data = self._memory[part.tier][self._offsets[key[2]][part.tier] :]
        else:
            wait_all(region.after)
            data = region.data
        return data[: tokens * self._row].view(self._dtype).view(tokens, self._width)

    def close(self, key: HiddenKey, region: Region | None, fence: Waitable) -> list[Waitable]:
        """Store what the layer left (the head leaves nothing). Returns what the region's next writer waits for."""
        sweep, layer, k = key
        stores: list[Waitable] = []
        if region is not None and layer != self._last_layer:
            for data, home in self._parts(k, region):
                if home is not None:
                    stores.append(self._mover.copy("d2h", "store_hidden", home, data, [fence]))
                else:
                    assert self._file is not None
                    offset = self._offsets[k]["disk"]
                    stores.append(self._mover.write("store_hidden", self._file, offset, data, "device", [fence]))
        self._closed[k], self._stores[k] = (sweep, layer), stores
        return [fence, *stores]

    def settle(self) -> None:
        """Wait for stores under way, so that the next block may use the homes anew."""
        for stores in self._stores:
            wait_all(stores)

    def _parts(self, k: int, region: Region) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The region's bytes of each part of a micro-batch, and its home in memory; None on disk."""
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for part in split_rows(self._now[k], self._shares):
            data, start = region.data[part.start * self._row : part.end * self._row], self._offsets[k][part.tier]
            in_memory = part.tier != "disk"
            found.append((data, self._memory[part.tier][start : start + data.numel()] if in_memory else None))
        return found
