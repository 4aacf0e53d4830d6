"""What a compressed KV cache makes of columns, slow and obvious: they are rounded as they are written."""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.eviction.reference import hadamard_matrix
from tests.parity.reference import LOGIT_TOLERANCE

GROUP = 64
# How far the engine's columns may be from the reference's, in parts of the largest number: in the
# first layer, and more in each further one. Of all models here the standard deviation is at most a
# 2.6th of that, mostly a 4th (if both are off from fp64 on their own, as much as the reference is).
FIRST_OFF = 2e-7
MORE_OFF = 4.5e-7
OWN_OFF = 2.0**-23  # of the arithmetic of rounding itself, in parts of each number
HARMLESS = LOGIT_TOLERANCE / 2  # that numbers move by


class Rounded:
    """Columns as a cache of `bits` bits ("4/3": keys in 4, values in 3) gives them back, by the
    format's words: in groups along the width, each with its least and its step in bf16, rounded
    outwards; keys less the middle of their channel in the prompt and over its range, both in bf16.
    The newest are whole: `most` of them, or as many fours as half of the slots has.

    is_near: what differs by no more than products of matrices do elsewhere may be rounded
    otherwise, and move a column that is read. edges: how many times as far.
    """

    def __init__(self, bits: int | str, most: int = 16, edges: float = 1.0) -> None:
        keys, _, values = str(bits).partition("/")
        self.key_bits = int(keys)
        self.value_bits = int(values or keys)
        self.most = most
        self.is_near = False
        self.edges = edges

    def window(self, slots: int) -> int:
        """Newest columns, the query's own among them, that a row with so many slots finds whole."""
        return min(self.most, slots // 2) // 4 * 4

    def columns(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, prompt_len: int, read: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v (kv, n, d) as they are found. read: (kv, n) bool, whether a query finds them
        so."""
        off = self.edges * (FIRST_OFF + layer * MORE_OFF)
        of_keys = float(k.abs().max()) * off
        of_values = float(v.abs().max()) * off
        read = read[..., None]
        values = self._groups(
            v, torch.full_like(v, of_values), torch.ones_like(v), self.value_bits, read
        )
        return self._keys(k, of_keys, prompt_len, read), values

    def _keys(
        self, k: torch.Tensor, off: float, prompt_len: int, read: torch.Tensor
    ) -> torch.Tensor:
        most = k[:, :prompt_len].amax(1, keepdim=True)
        least = k[:, :prompt_len].amin(1, keepdim=True)
        sizes = most - least
        sizes = torch.maximum(sizes, sizes.mean(-1, keepdim=True) / 16)
        sizes = torch.where(sizes > 0, sizes, 1.0)
        # of two numbers, each off on its own
        of_heads = read.any(1, keepdim=True)
        of_two = off * 2**0.5
        middle, moves = self._rounded(nearest, (most + least) / 2, of_two / 2, of_heads)
        sizes, _ = self._rounded(nearest, sizes, of_two * (prompt_len > 1), of_heads)
        every = sizes.expand_as(k)
        return (
            self._groups((k - middle) / sizes, (off + moves) / every, every, self.key_bits, read)
            * sizes
            + middle
        )

    def _groups(
        self, x: torch.Tensor, off: torch.Tensor, sizes: torch.Tensor, bits: int, read: torch.Tensor
    ) -> torch.Tensor:
        count = -(-x.shape[-1] // GROUP)
        parts = zip(
            x.chunk(count, dim=-1),
            off.chunk(count, dim=-1),
            sizes.chunk(count, dim=-1),
            strict=True,
        )
        return torch.cat([self._group(a, b, c, bits, read) for a, b, c in parts], dim=-1)

    def _group(
        self, x: torch.Tensor, off: torch.Tensor, sizes: torch.Tensor, bits: int, read: torch.Tensor
    ) -> torch.Tensor:
        levels = 2**bits - 1
        largest = sizes.amax(-1, keepdim=True)

        def least_of(y: torch.Tensor) -> torch.Tensor:
            return outwards(y.amin(-1, keepdim=True), down=True)

        def step_of(y: torch.Tensor) -> torch.Tensor:
            return outwards((y.amax(-1, keepdim=True) - least) / levels, down=False)

        least, moves = self._rounded(least_of, x, off, read, largest)
        off = off + moves
        step, moves = self._rounded(step_of, x, off, read, levels * largest)
        off = off + levels * moves
        codes, _ = self._rounded(
            lambda y: ((y - least) / step + 0.5).floor(), x, off, read, step * sizes
        )
        return least + step * codes

    def _rounded(
        self,
        how: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        off: torch.Tensor | float,
        read: torch.Tensor,
        size: torch.Tensor | float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What x is rounded to, and how much higher that is for the highest than for the lowest
        that x may be; by `how`, which never falls where numbers rise. size: of one, in a column."""
        off = off + x.abs() * OWN_OFF
        moves = how(x + off) - how(x - off)
        self.is_near |= bool(((moves * size > HARMLESS) & read).any())
        return how(x), moves


class Rotated(Rounded):
    """Columns that are multiplied by the Hadamard matrix, rounded as they are then, and multiplied
    back."""

    def columns(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, prompt_len: int, read: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        matrix = hadamard_matrix(k.shape[-1])
        rotated = ((x.double() @ matrix).float() for x in (k, v))
        keys, values = super().columns(layer, *rotated, prompt_len, read)
        return tuple((x.double() @ matrix.T).float() for x in (keys, values))  # type: ignore[return-value]

    def _keys(
        self, k: torch.Tensor, off: float, prompt_len: int, read: torch.Tensor
    ) -> torch.Tensor:
        return self._groups(k, torch.full_like(k, off), torch.ones_like(k), self.key_bits, read)


def nearest(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def outwards(x: torch.Tensor, down: bool) -> torch.Tensor:
    """The next bf16 number that is not above x, or not below it."""
    near = x.bfloat16().float()
    bits = near.view(torch.int32)
    away = (near < 0) == down  # one bf16 number further that way
    beyond = (near > x) if down else (near < x)
    return torch.where(beyond, bits + torch.where(away, 65536, -65536).int(), bits).view(
        torch.float32
    )
