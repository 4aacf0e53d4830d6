"""TriAttention: the columns whose keys the prompt's mean query will attend to, over the distances to come."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import ROLLING, setting
from flexgen_h2o.kvcache.eviction.policy import EVERYTHING, POSITIONS, SCORES, Evicting, Needs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Heads:
    """What a model's queries and keys are like. group: query heads of a kv-head; width: numbers of a head; frequencies:
    of its rotary embeddings (`core.model.Rotary`), () without them."""

    group: int
    width: int
    frequencies: tuple[float, ...]

    @property
    def lengths(self) -> int:
        """Numbers of a head that turn together count as one, which has a length; the others are one each."""
        return self.width - len(self.frequencies)


@dataclass(frozen=True)
class TriAttention(Evicting):
    """Mao et al. 2026, "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression" (arXiv 2604.04921).

    Before rotary embeddings the queries of a head lie close to their mean. So the attention that a later query gives a
    key is about that of the mean query at its position: a sum of cosines of the distance. A column's score is the mean
    of this over the queries 1, 2, 4, ..., `farthest` steps later, plus sum_f (E|q_f| - |E q_f|) |k_f| for what the mean
    does not say; f are the pairs of numbers that turn together. Each query head's scores are normalised over the
    columns that may leave (mean 0, deviation 1), and a kv-head takes the largest of its query heads'.

    No attention probabilities are needed. Columns are scored every `interval` steps, if as many recent ones are
    protected.

    Differences from the paper: it measures the mean queries once per model on some text; here they are those of each
    sequence's own prompt, so that nothing has to be prepared. It lets 128 columns come and then drops as many; here one
    column leaves in each step, by the newest scores. It always keeps the prompt; set `protect` for that. A model
    without rotary embeddings has no distances: the score is the product with the mean query, plus the second term.
    """

    name: ClassVar[str] = "triattention"

    farthest: int = setting(2**16, low=1, high=EVERYTHING)
    interval: int = setting(16, low=1, high=EVERYTHING)

    heads: Heads | None = None  # of the model, once the policy is fitted to one

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == ROLLING:
            raise UsageError(
                "positions: rolling does not work with triattention, which scores keys by the positions of their "
                "tokens; leave it at original"
            )

    @property
    def measures(self) -> Needs:
        return Needs((POSITIONS, SCORES), gain=0.0, by_keys=Trigonometric(self.heads, self.farthest, self.interval))


@dataclass(frozen=True)
class Trigonometric:
    """The scores of `TriAttention`: a `KeyScores`.

    What is kept of a prompt's queries, for each kv-head: the mean query of each query head (group, width), and
    E|q_f| - |E q_f| (group, lengths).
    """

    model: Heads | None
    farthest: int
    interval: int

    @property
    def heads(self) -> Heads:
        if self.model is None:
            raise UsageError("eviction: triattention depends on a model's heads; give the policy to an LLM")
        return self.model

    @property
    def numbers(self) -> int:
        return self.heads.group * (self.heads.width + self.heads.lengths)

    def query_sums(self, queries: torch.Tensor, first: int) -> torch.Tensor:
        import torch

        positions = torch.arange(first, first + queries.shape[2], device=queries.device)
        turned = _turned(queries.float(), *_angles(self.heads, -positions))
        return torch.cat([turned.sum(dim=2), _lengths(self.heads, turned).sum(dim=2)], dim=-1)

    def of_prompt(self, sums: torch.Tensor, count: int, kv_heads: int) -> torch.Tensor:
        import torch

        b, heads = sums.shape[0], self.heads
        centres, lengths = (sums / count).split([heads.width, heads.lengths], dim=-1)
        spreads = (lengths - _lengths(heads, centres)).clamp(min=0)
        return torch.cat([centres.reshape(b, kv_heads, -1), spreads.reshape(b, kv_heads, -1)], dim=-1)

    def scores(
        self, keys: torch.Tensor, queries: torch.Tensor, newest: torch.Tensor, may_leave: torch.Tensor
    ) -> torch.Tensor:
        import torch

        heads = self.heads
        rows, group = len(keys), heads.group
        centres, spreads = queries.split([group * heads.width, group * heads.lengths], dim=-1)
        centres = centres.view(rows, group, heads.width)
        spreads = spreads.view(rows, group, heads.lengths)
        # Keys are held as their positions turned them, so turning the mean query to each position to come gives the
        # cosines of the distances.
        cos, sin = _mean_angles(heads, newest, self.farthest)
        to_come = _turned(centres, cos[:, None], sin[:, None])
        keys = keys.float()
        found = torch.bmm(to_come, keys.transpose(1, 2))
        found += torch.bmm(spreads, _lengths(heads, keys).transpose(1, 2))
        # (rows, group, n) from here on
        leaves = may_leave[:, None]
        count = leaves.sum(dim=2, keepdim=True).clamp(min=1)
        mean = found.where(leaves, 0.0).sum(dim=2, keepdim=True) / count
        found -= mean
        deviation = (found.where(leaves, 0.0).square().sum(dim=2, keepdim=True) / count).sqrt()
        return (found / deviation.clamp(min=1e-6)).amax(dim=1)


def _lengths(heads: Heads, x: torch.Tensor) -> torch.Tensor:
    """Return (..., lengths) of x (..., width): of each pair of numbers that turn together, then of each other one."""
    import torch

    pairs = len(heads.frequencies)
    of_pairs = torch.hypot(x[..., :pairs], x[..., pairs : 2 * pairs])
    return torch.cat([of_pairs, x[..., 2 * pairs :].abs()], dim=-1)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x (..., width) with its pairs (i, i + pairs) multiplied by cos + i sin (..., pairs)."""
    import torch

    pairs = cos.shape[-1]
    first = x[..., :pairs]
    second = x[..., pairs : 2 * pairs]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * pairs :]], dim=-1)


def _angles(heads: Heads, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (..., pairs) fp32 at positions (...) ints. Angles of far positions need fp64."""
    import torch

    frequencies = torch.tensor(heads.frequencies, dtype=torch.float64, device=positions.device)
    angles = positions.double().unsqueeze(-1) * frequencies
    return angles.cos().float(), angles.sin().float()


def _mean_angles(heads: Heads, newest: torch.Tensor, farthest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of `_angles` at the positions 1, 2, 4, ..., `farthest` behind `newest` (rows,)."""
    cos, sin = _angles(heads, newest.long())
    mean_cos, mean_sin = _ahead(heads, farthest)
    mean_cos = mean_cos.to(cos.device)
    mean_sin = mean_sin.to(cos.device)
    return cos * mean_cos - sin * mean_sin, sin * mean_cos + cos * mean_sin


@lru_cache(maxsize=16)
def _ahead(heads: Heads, farthest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means over 1, 2, 4, ..., up to `farthest` steps, (pairs,) fp32 on the host."""
    import torch

    steps = 2 ** torch.arange(farthest.bit_length(), dtype=torch.int64, device="cpu")
    cos, sin = _angles(heads, steps)
    return cos.mean(dim=0), sin.mean(dim=0)
