"""TriAttention's scores, term by term; tests/eviction/cases.py has its kept columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kvcache.eviction import TriAttention
from flexgen_h2o.kvcache.eviction.policy import record_of


@pytest.mark.parametrize("rotary", [4, 3, 0])
def test_scores_are_the_formula(rotary: int) -> None:
    """In float64, the norm term and the series term by term; rotary: pairs that turn of a head of 8
    numbers."""
    rng = np.random.default_rng(rotary)
    group = 3
    n = 11
    count = 17
    newest = 30
    sinks = 2
    recent = 4
    frequencies = tuple(float(10 ** (-i / 3)) for i in range(rotary))
    score = TriAttention(farthest=20, interval=1, group=group, width=8, frequencies=frequencies)
    queries = rng.normal(size=(group, count, 8)) + 1
    keys = rng.normal(size=(n, 8))
    positions = rng.choice(newest, n, replace=False)

    def turned(x: np.ndarray, places: np.ndarray) -> torch.Tensor:
        out = x.copy()
        for i, frequency in enumerate(frequencies):
            angle = places * frequency
            out[..., i] = x[..., i] * np.cos(angle) - x[..., i + rotary] * np.sin(angle)
            out[..., i + rotary] = x[..., i] * np.sin(angle) + x[..., i + rotary] * np.cos(angle)
        return torch.tensor(out, dtype=torch.float32)

    sums = score.query_sums(turned(queries, np.arange(5, 5 + count))[None], 5)
    may_leave = (positions >= sinks) & (positions <= newest - recent)
    found = score.scores(
        turned(keys, positions)[None],
        score.of_prompt(sums, count, 1)[0],
        torch.tensor([newest]),
        torch.tensor(may_leave)[None],
    )[0]

    of_heads = []
    for q in queries:
        of_keys = np.zeros(n)
        for j, k in enumerate(keys):
            for f in range(8 - rotary):
                alone = f >= rotary
                first = f if not alone else rotary + f
                zq = q[:, first] if alone else q[:, f] + 1j * q[:, f + rotary]
                zk = k[first] if alone else k[f] + 1j * k[f + rotary]
                w = 0.0 if alone else frequencies[f]
                mean = zq.mean()
                phase = np.angle(mean) - np.angle(zk)
                for step in (1, 2, 4, 8, 16):
                    of_keys[j] += (
                        abs(mean) * abs(zk) * np.cos(w * (newest + step - positions[j]) + phase) / 5
                    )
                of_keys[j] += (np.abs(zq).mean() - abs(mean)) * abs(zk)
        some = of_keys[may_leave]
        of_heads.append((of_keys - some.mean()) / some.std())
    np.testing.assert_allclose(found.numpy(), np.max(of_heads, axis=0), atol=2e-5)


def test_without_a_model_there_are_no_heads() -> None:
    with pytest.raises(UsageError, match=r"^eviction: triattention"):
        record_of(TriAttention())
