"""What is taken from the engine while it follows given continuations: `LLM.follow` calls these at every step.

Rows are known by their index among the prompts of one call of `follow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flexgen_h2o.evaluation.metrics import divergence, evicted_mass, flips, surprise
from flexgen_h2o.kvcache.eviction.policy import Columns


class StepCounter:
    """How often each row has been seen."""

    def __init__(self, rows: int) -> None:
        self._seen = [0] * rows

    def next(self, rows: Sequence[int]) -> list[int]:
        """The step that each of `rows` is at, which is then over."""
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
