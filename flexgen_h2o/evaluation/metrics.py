"""What is measured at one decode step: plain functions of logits and attention probabilities."""

from __future__ import annotations

import math

import torch


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
