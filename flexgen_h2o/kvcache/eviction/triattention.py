"""TriAttention: the columns that the prompt's mean query would attend to most later."""

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
class TriAttention(Evicting):
    """The policy that keeps the columns that the prompt's mean query would attend to later.

    Before rotary embeddings, the queries of a head are close to their mean. So the attention of a
    later query to a key is about that of the mean query at the later position. This is a sum of
    cosines of the distance. A column's score has two terms, where f are the pairs of numbers that
    turn together:

    1. The mean of this attention over the queries 1, 2, 4, ..., `farthest` steps later.
    2. sum_f (E|q_f| - |E q_f|) |k_f|, for the deviation of queries from their mean.

    Each query head's scores are normalised over the columns that may leave (mean 0, deviation 1). A
    kv-head uses the largest score of its query heads.

    No attention probabilities are needed. Columns are scored every `interval` steps, if at least as
    many recent ones are protected; otherwise they are scored in every step.

    Differences from the paper:

    - It measures the mean queries once per model on some text. Here each sequence uses the mean
      queries of its own prompt, so that nothing has to be prepared.
    - It lets 128 columns come and then drops as many. Here one column leaves in each step, by the
      newest scores.
    - It always keeps the prompt. Here the setting `protect` does that.

    A model without rotary embeddings has no distances. The first term is then the product of the
    key with the mean query.

    Paper: Mao et al. 2026, "TriAttention: Efficient Long Reasoning with Trigonometric KV
    Compression" (arXiv 2604.04921).
    """

    name: ClassVar[str] = "triattention"

    farthest: int = setting(2**16, low=1, high=EVERYTHING)
    interval: int = setting(16, low=1, high=EVERYTHING)

    # The geometry of the model's queries and keys, which `of_model.fitted` sets.
    group: int = 0  # query heads per kv-head; 0: not set
    width: int = 0  # numbers of a head
    # Frequencies of its rotary embeddings (`core.model.Rotary`), one per pair of numbers; () if the
    # model has none.
    frequencies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == ROLLING:
            raise UsageError(
                "positions: rolling does not work with triattention, which scores keys by the "
                "positions of their "
                "tokens; leave it at original"
            )

    @property
    def measures(self) -> Needs:
        return Needs(
            (POSITIONS, SCORES),
            gain=0.0,
            by_keys=self,
        )

    # ---- the scores, by keys and by the queries of the row's prompt, both with rotary embeddings
    #
    # The summary of a prompt's queries has two parts for each kv-head: the mean query of each query
    # head (group, width), and E|q_f| - |E q_f| (group, lengths).

    @property
    def num_lengths(self) -> int:
        """Lengths of a head: one per pair of numbers that turn together, one per other number."""
        return self.width - len(self.frequencies)

    @property
    def numbers(self) -> int:
        """Number of fp32 numbers in the summary of a prompt's queries, per sequence and kv-head.

        Raise UsageError if the policy is not fitted to a model.
        """
        if not self.group:
            raise UsageError(
                "eviction: triattention depends on a model's heads; give the policy to an LLM"
            )
        return self.group * (self.width + self.num_lengths)

    def query_sums(self, queries: torch.Tensor, first: int) -> torch.Tensor:
        """Return sums over m of queries (b, heads, m, d), as (b, heads, any) fp32.

        The queries are at the positions first, first + 1, ...
        """
        import torch

        positions = torch.arange(first, first + queries.shape[2], device=queries.device)
        turned = _turned(queries.float(), *_angles(self.frequencies, -positions))
        return torch.cat([turned.sum(dim=2), self._lengths(turned).sum(dim=2)], dim=-1)

    def of_prompt(self, sums: torch.Tensor, count: int, kv_heads: int) -> torch.Tensor:
        """Return the summary of `count` queries, (b, kv_heads, numbers) fp32.

        sums: the sum of the results of `query_sums` for these queries.
        """
        import torch

        b = sums.shape[0]
        centres, lengths = (sums / count).split([self.width, self.num_lengths], dim=-1)
        spreads = (lengths - self._lengths(centres)).clamp(min=0)
        return torch.cat(
            [centres.reshape(b, kv_heads, -1), spreads.reshape(b, kv_heads, -1)], dim=-1
        )

    def scores(
        self,
        keys: torch.Tensor,
        queries: torch.Tensor,
        newest: torch.Tensor,
        may_leave: torch.Tensor,
    ) -> torch.Tensor:
        """Return scores (rows, n) fp32. The columns with the lowest scores leave first.

        keys: (rows, n, d) of any dtype, in any order.
        queries: (rows, numbers), from `of_prompt`.
        newest: (rows,) ints, the positions of the newest columns.
        may_leave: (rows, n) bool; scores of other columns are not read.
        """
        import torch

        rows = len(keys)
        sizes = [self.group * self.width, self.group * self.num_lengths]
        centres, spreads = (t.view(rows, self.group, -1) for t in queries.split(sizes, dim=-1))
        # Keys are stored with their rotary embeddings. So rotating the mean query to each later
        # position gives the cosines of the distances.
        cos, sin = _mean_angles(self.frequencies, newest, self.farthest)
        to_come = _turned(centres, cos[:, None], sin[:, None])
        keys = keys.float()
        found = torch.bmm(to_come, keys.transpose(1, 2))
        found += torch.bmm(spreads, self._lengths(keys).transpose(1, 2))
        # Tensors are (rows, group, n) from here on.
        leaves = may_leave[:, None]
        count = leaves.sum(dim=2, keepdim=True).clamp(min=1)
        mean = found.where(leaves, 0.0).sum(dim=2, keepdim=True) / count
        found -= mean
        deviation = (found.where(leaves, 0.0).square().sum(dim=2, keepdim=True) / count).sqrt()
        return (found / deviation.clamp(min=1e-6)).amax(dim=1)

    def _lengths(self, x: torch.Tensor) -> torch.Tensor:
        """Return the lengths (..., num_lengths) of heads x (..., width).

        Lengths of the pairs of numbers that turn together come first, then the absolute other
        numbers.
        """
        import torch

        pairs = len(self.frequencies)
        of_pairs = torch.hypot(x[..., :pairs], x[..., pairs : 2 * pairs])
        return torch.cat([of_pairs, x[..., 2 * pairs :].abs()], dim=-1)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x (..., width) with its pairs of numbers (j, j + pairs) rotated.

    A pair is multiplied, as a complex number, by cos + i sin. cos, sin: (..., pairs).
    """
    import torch

    pairs = cos.shape[-1]
    first = x[..., :pairs]
    second = x[..., pairs : 2 * pairs]
    return torch.cat(
        [first * cos - second * sin, second * cos + first * sin, x[..., 2 * pairs :]], dim=-1
    )


def _angles(
    frequencies: tuple[float, ...], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (..., pairs) fp32 at positions (...) ints.

    They are computed in fp64, which the angles of far positions need.
    """
    import torch

    turns = torch.tensor(frequencies, dtype=torch.float64, device=positions.device)
    angles = positions.double().unsqueeze(-1) * turns
    return angles.cos().float(), angles.sin().float()


def _mean_angles(
    frequencies: tuple[float, ...], newest: torch.Tensor, farthest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of `_angles` at the positions 1, 2, ..., `farthest` after `newest` (rows,).

    The distances are powers of two.
    """
    cos, sin = _angles(frequencies, newest.long())
    mean_cos, mean_sin = _ahead(frequencies, farthest)
    mean_cos = mean_cos.to(cos.device)
    mean_sin = mean_sin.to(cos.device)
    return cos * mean_cos - sin * mean_sin, sin * mean_cos + cos * mean_sin


@lru_cache(maxsize=16)
def _ahead(frequencies: tuple[float, ...], farthest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of `_angles` at 1, 2, 4, ..., `farthest`, (pairs,) fp32 on the host."""
    import torch

    steps = 2 ** torch.arange(farthest.bit_length(), dtype=torch.int64, device="cpu")
    cos, sin = _angles(frequencies, steps)
    return cos.mean(dim=0), sin.mean(dim=0)
