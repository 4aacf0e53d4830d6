"""Random columns, for comparison: what any policy must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.core.settings import setting
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, Columns, Evicting, Needs

if TYPE_CHECKING:
    import torch

_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # xxHash's 32-bit primes: large, odd, of mixed bits
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Random(Evicting):
    """The recent columns and others drawn at random: a hash of seed, layer, kv-head and position ranks them."""

    name: ClassVar[str] = "random"

    seed: int = setting(0, low=0, high=2**31)

    @property
    def measures(self) -> Needs:
        return Needs((POSITIONS,), ranks_by_score=False)

    def rank(self, columns: Columns) -> torch.Tensor:
        import torch

        positions = columns.positions.long()
        heads = torch.arange(positions.shape[1], device=positions.device).view(1, -1, 1)
        layer = (columns.block + self.seed * 65537 + 1) * _ODD[2] & _MASK
        mixed = (positions + 1) * _ODD[0] + (heads + 1) * _ODD[1] + layer
        for shift in (15, 13, 16):
            mixed = mixed & _MASK
            mixed = (mixed ^ (mixed >> shift)) * _ODD[1]
        return ((mixed & _MASK) >> 8).float()
