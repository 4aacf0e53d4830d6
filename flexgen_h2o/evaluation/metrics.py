"""What is compared (policies of given sizes), and what is measured at a decode step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import ORIGINAL, ROLLING
from flexgen_h2o.engine.generation import LogitsWatch
from flexgen_h2o.engine.report import column_bytes
from flexgen_h2o.kvcache.eviction import EVICTING, Eviction, Full, make_eviction
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, Columns, Needs, is_rolling
from flexgen_h2o.llm import LLM


@dataclass(frozen=True)
class Case:
    """One policy of a given size. budget: columns kept as a share of the prompt, where the size was given so."""

    label: str
    eviction: Eviction
    budget: float = 1.0

    @property
    def positions(self) -> str:
        return ROLLING if is_rolling(self.eviction) else ORIGINAL


def make_cells(policies: Sequence[str], budgets: Sequence[float], whole: bool = False) -> list[Case]:
    """All policies at all budgets, a budget at a time. whole: the full cache is one of them, first.

    A policy is a name, or a name with settings of its own: `h2o-norm:decay=0.98,sinks=0`. Raises UsageError naming
    --policies or --budgets.
    """
    for name, given in (("--policies", policies), ("--budgets", budgets)):
        check_distinct(name, given)
    for budget in budgets:
        if not 0 < budget <= 1:
            raise UsageError(f"--budgets: {budget} is not in (0, 1]; 0.2 keeps a fifth of the prompt's columns")
    full = [Case(Full.name, Full())] if whole else []
    shares = {budget: {"heavy_ratio": budget / 2, "recent_ratio": budget / 2} for budget in budgets}
    return full + [Case(policy, _eviction(policy, shares[budget]), budget) for budget in budgets for policy in policies]


def make_cases(policies: Sequence[str], settings: Mapping[str, Any], sinks: int | None) -> list[Case]:
    """The full cache and policies by name, settings of their own included (`h2o:positions=rolling`).

    settings: of all policies but the full cache; sinks: of those that have some. Raises UsageError naming --policies.
    """
    check_distinct("--policies", policies)
    cases = []
    for policy in policies:
        own = dict(settings)
        kind = EVICTING.get(policy.partition(":")[0])
        if sinks is not None and kind is not None and "sinks" in {field.name for field in fields(kind)}:
            own["sinks"] = sinks
        cases.append(Case(policy, Full() if policy == Full.name else _eviction(policy, own)))
    return cases


def check_distinct(flag: str, given: Sequence[object]) -> None:
    twice = next((one for i, one in enumerate(given) if one in given[:i]), None)
    if twice is not None:
        raise UsageError(f"{flag}: {twice} is given twice")


def _eviction(policy: str, settings: Mapping[str, Any]) -> Eviction:
    try:
        return make_eviction(policy, **settings)
    except UsageError as error:
        raise UsageError(f"--policies {policy}: {str(error).removeprefix('eviction: ')}") from error


def divergence(full: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
    """KL(full || policy) in nats, (rows,) float64, of logits (rows, vocab) of any float dtype.

    Computed in float64, so that it is exactly 0 where the logits are the same and differences of 1e-9 mean something.
    """
    p, q = full.double().log_softmax(dim=-1), policy.double().log_softmax(dim=-1)
    return (p.exp() * (p - q)).sum(dim=-1)


def flips(full: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
    """(rows,) bool: is the likeliest token another one? Of equal logits the lower index counts as likeliest."""
    return full.argmax(dim=-1) != policy.argmax(dim=-1)


def surprise(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Negative log likelihood of `tokens` ((rows,) int64) in nats: (rows,) float64. logits: (rows, vocab)."""
    return -logits.double().log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def perplexity(nats: float) -> float:
    """Of a mean surprise; a finite number however large that is."""
    return math.exp(min(700.0, nats))


def evicted_mass(weights: torch.Tensor, positions: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Share of the attention probability that the columns which a policy has dropped get: (rows, kv_heads) float32.

    weights: (rows, kv_heads, columns), what the full model gives to each column of the sequence. positions: (rows,
    kv_heads, slots) int, the columns that the policy holds; slot j counts if j < filled[row], else it is arbitrary.
    The measure is the "attention loss" of cold-compress.
    """
    counts = torch.arange(positions.shape[-1], device=positions.device) < filled.view(-1, 1, 1)
    index = positions.long().clamp(0, weights.shape[-1] - 1)
    held = weights.gather(-1, index).masked_fill(~counts, 0.0).sum(dim=-1)
    return (1 - held / weights.sum(dim=-1)).clamp_min(0)


@dataclass(frozen=True)
class Probe(Full):
    """The full cache whose scores are one step's attention probabilities, summed over the query heads of a kv-head.

    They sum to the number of these query heads. Prompts are scored by one row, which the first decode step forgets: so
    that no score is ever undefined, and that prompts are computed exactly as they are for policies that score.
    """

    name: ClassVar[str] = "probe"

    @property
    def needs(self) -> Needs:
        return Needs(record=(POSITIONS, SCORES), query_rows=1, decay=0.0, gain=1.0)

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return sums

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None
        return columns.scores


def held_columns(eviction: Eviction, prompt_len: int, new_tokens: int, blocks: int) -> int:
    """Of all transformer blocks together, once a row has got so many new tokens; the newest has no column yet."""
    return sum(eviction.slots(prompt_len, new_tokens, block, blocks) for block in range(blocks))


def bytes_of_column(llm: LLM) -> int:
    """Of the keys and values of all kv-heads in one block, as the LLM's last run held them."""
    assert llm.policy is not None
    return column_bytes(llm.model.spec, llm.policy, DTYPE_BYTES[llm.dtype])[0]


def by_step(rows: int, see: Callable[[list[int], list[int], torch.Tensor], None]) -> LogitsWatch:
    """A watch of the logits of `rows` rows that tells `see` also at which step, from 0, each of them is."""
    seen = [0] * rows

    def watch(at: list[int], logits: torch.Tensor) -> None:
        steps = [seen[row] for row in at]
        for row in at:
            seen[row] += 1
        see(at, steps, logits)

    return watch
