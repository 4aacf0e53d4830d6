"""What is compared (policies at budgets), what is measured at a decode step, and the intervals of its means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import ORIGINAL, ROLLING
from flexgen_h2o.engine.report import column_bytes
from flexgen_h2o.kvcache.eviction import EVICTING, Eviction, Full, make_eviction
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, Columns, Needs, is_rolling
from flexgen_h2o.llm import LLM


@dataclass(frozen=True)
class Cell:
    """One policy at one budget. budget: columns kept, as a share of the prompt, half heavy and half recent."""

    label: str
    budget: float
    eviction: Eviction


def make_cells(policies: Sequence[str], budgets: Sequence[float], whole: bool = False) -> list[Cell]:
    """All policies at all budgets, a budget at a time. whole: the full cache is one of them, first.

    A policy is a name, or a name with settings of its own: `h2o-norm:decay=0.98,sinks=0`. Raises UsageError naming
    --policies or --budgets.
    """
    for name, given in (("--policies", policies), ("--budgets", budgets)):
        check_distinct(name, given)
    for budget in budgets:
        if not 0 < budget <= 1:
            raise UsageError(f"--budgets: {budget} is not in (0, 1]; 0.2 keeps a fifth of the prompt's columns")
    full = [Cell(Full.name, 1.0, Full())] if whole else []
    shares = {budget: {"heavy_ratio": budget / 2, "recent_ratio": budget / 2} for budget in budgets}
    return full + [Cell(policy, budget, _eviction(policy, shares[budget])) for budget in budgets for policy in policies]


@dataclass(frozen=True)
class Case:
    """One policy of a given size."""

    label: str
    eviction: Eviction

    @property
    def positions(self) -> str:
        return ROLLING if is_rolling(self.eviction) else ORIGINAL


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


Array = NDArray[np.float64]
Figures = dict[str, Any]  # as the JSON result has them
LEVEL = 0.95


class Bootstrap:
    """Percentile intervals (Efron and Tibshirani 1993, chapter 13) from `count` resamples of `n` prompts.

    A prompt is drawn with all its steps or questions, since what belongs to one prompt is not independent. Equal seeds
    draw equal prompts, so differences between policies are paired. An interval is {value, low, high, n}: the estimate,
    the ends of its 95% interval, and the number of prompts.
    """

    def __init__(self, n: int, count: int, seed: int) -> None:
        self._drawn = np.random.default_rng(seed).integers(0, n, size=(count, n))

    def mean(self, values: Array) -> Figures:
        """Of one value a prompt, (n,)."""
        return self._interval(float(values.mean()), values[self._drawn].mean(axis=1))

    def percentile(self, values: Array, percent: float) -> Figures:
        """Of all values (n, steps) together."""
        found = [np.percentile(values[rows], percent) for rows in self._drawn]
        return self._interval(float(np.percentile(values, percent)), np.array(found))

    def ratio(self, above: Array, below: Array) -> Figures:
        """Of two sums over prompts, (n,) each; a resample whose lower sum is 0 does not count."""
        drawn = below[self._drawn].sum(axis=1)
        found = above[self._drawn].sum(axis=1)[drawn > 0] / drawn[drawn > 0]
        return self._interval(float(above.sum() / below.sum()), found)

    def _interval(self, value: float, resampled: Array) -> Figures:
        low, high = np.percentile(resampled, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
        return {"value": value, "low": float(low), "high": float(high), "n": self._drawn.shape[1]}


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


class StepCounter:
    """Counts the steps of each row."""

    def __init__(self, rows: int) -> None:
        self._seen = [0] * rows

    def next(self, rows: Sequence[int]) -> list[int]:
        """The step of each of `rows`; their counts go up by one."""
        steps = [self._seen[row] for row in rows]
        for row in rows:
            self._seen[row] += 1
        return steps


@dataclass
class FullWatch:
    """Keeps what the full cache gives along the continuations of `n` rows, all of `steps` tokens.

    prompt_lens: of the rows. mass_steps: decode steps (0 is the first after the prefill) whose attention is kept.
    logits: (n, steps, vocab) in the compute dtype. weights: for each (decode step, transformer block) the attention
    probability of each column, (n, kv_heads, columns) fp32, summed over the query heads of a kv-head. All on the host.
    """

    prompt_lens: Sequence[int]
    steps: int
    mass_steps: frozenset[int]
    logits: torch.Tensor = field(init=False)
    weights: dict[tuple[int, int], torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._counter = StepCounter(len(self.prompt_lens))

    def see_logits(self, rows: list[int], logits: torch.Tensor) -> None:
        if not hasattr(self, "logits"):
            self.logits = torch.empty(len(self.prompt_lens), self.steps, logits.shape[-1], dtype=logits.dtype)
        self.logits[rows, self._counter.next(rows)] = logits.cpu()

    def see_slots(self, rows: list[int], filled: torch.Tensor, columns: Columns) -> None:
        """Of a run with the probe policy."""
        step = decode_step(rows, columns, self.prompt_lens)
        if step not in self.mass_steps:
            return
        assert columns.scores is not None
        positions, scores = columns.positions.cpu().long(), columns.scores.cpu()
        place = (step, columns.block)
        if place not in self.weights:
            shape = (len(self.prompt_lens), positions.shape[1], max(self.prompt_lens) + self.steps)
            self.weights[place] = torch.zeros(shape)
        unused = torch.arange(positions.shape[-1]) >= filled.cpu().view(-1, 1, 1)
        found = torch.zeros(len(rows), *self.weights[place].shape[1:])
        found.scatter_add_(-1, positions.masked_fill(unused, 0), scores.masked_fill(unused, 0.0))
        self.weights[place][rows] = found


@dataclass
class PolicyWatch:
    """Compares a policy, step by step, with the full cache along the same continuations.

    continuations: (n, steps) int64. kl, nll: (n, steps - 1) float64, nats, and flipped: bool, of the decode steps: the
    first token comes from the prefill, which is exact. mass: (n, blocks) float64, means over heads and watched steps.
    """

    full: FullWatch
    continuations: torch.Tensor
    blocks: int
    kl: torch.Tensor = field(init=False)
    nll: torch.Tensor = field(init=False)
    flipped: torch.Tensor = field(init=False)
    mass: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        n, steps = self.continuations.shape
        self._counter = StepCounter(n)
        self.kl, self.nll = (torch.zeros(n, steps - 1, dtype=torch.float64) for _ in range(2))
        self.flipped = torch.zeros(n, steps - 1, dtype=torch.bool)
        self.mass = torch.zeros(n, self.blocks, dtype=torch.float64)

    def see_logits(self, rows: list[int], logits: torch.Tensor) -> None:
        steps = self._counter.next(rows)
        decoding = [i for i, step in enumerate(steps) if step > 0]
        if not decoding:
            return
        at = ([rows[i] for i in decoding], [steps[i] for i in decoding])
        to = (at[0], [step - 1 for step in at[1]])
        seen, wanted = logits.cpu()[decoding], self.full.logits[at]
        self.kl[to] = divergence(wanted, seen)
        self.flipped[to] = flips(wanted, seen)
        self.nll[to] = surprise(seen, self.continuations[at])

    def see_slots(self, rows: list[int], filled: torch.Tensor, columns: Columns) -> None:
        weights = self.full.weights.get((decode_step(rows, columns, self.full.prompt_lens), columns.block))
        if weights is not None:
            lost = evicted_mass(weights[rows], columns.positions.cpu(), filled.cpu())
            self.mass[rows, columns.block] += lost.double().mean(dim=1) / len(self.full.mass_steps)


@dataclass
class NatsWatch:
    """The surprise of given tokens: `nats`, (n, steps) float64. tokens: (n, steps) int64."""

    tokens: torch.Tensor
    nats: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._counter = StepCounter(len(self.tokens))
        self.nats = torch.zeros(self.tokens.shape, dtype=torch.float64)

    def __call__(self, rows: list[int], logits: torch.Tensor) -> None:
        at = (rows, self._counter.next(rows))
        self.nats[at] = surprise(logits.cpu(), self.tokens[at])


class TokenWatch:
    """Keeps the likeliest token at each step: `tokens`, (n, steps) int64, -1 where a row has ended."""

    def __init__(self, n: int, steps: int) -> None:
        self._counter = StepCounter(n)
        self.tokens = torch.full((n, steps), -1)

    def see_logits(self, rows: list[int], logits: torch.Tensor) -> None:
        self.tokens[rows, self._counter.next(rows)] = logits.argmax(dim=-1).cpu()


def decode_step(rows: Sequence[int], columns: Columns, prompt_lens: Sequence[int]) -> int:
    """0 is the first after the prefill; the rows of a micro-batch are all at the same."""
    return int(columns.newest[0]) - prompt_lens[rows[0]]
