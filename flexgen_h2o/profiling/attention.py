"""Rates of attention: over whole prompts, over the slots of a KV cache, and what scoring adds to both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate

import torch

from flexgen_h2o.kernels.causal import causal_attention, causal_attention_lse
from flexgen_h2o.kernels.slots import ScoreBook, attend, attend_scored
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.kvcache.hook import Hook, keep_prompt_columns
from flexgen_h2o.kvcache.slots import SlotTable
from flexgen_h2o.profile import Curve
from flexgen_h2o.profiling.bench import Bench, Call

HEAD_WIDTH = 64  # of prompts
LEAST_SHARE = 0.05  # of attention's seconds that scoring takes at least: a difference of two timings may be anything
PROBE = 16  # a cache smaller by this factor is tried first, and kept where it is slow


def prefill_rates(bench: Bench, dtype: torch.dtype) -> tuple[Curve, Curve]:
    """FLOPs a second of causal attention, and of what h2o adds to it, by the tokens of a prompt.

    Added are the log-sum-exp that attention gives out, the column sums, and choosing the columns that stay.
    """
    lengths = bench.sizes.prompt_lengths
    timings = bench.rounds(*(call for length in lengths for call in _prefill_calls(bench, dtype, length)))
    attention, scoring, one_prompt = [], [], []
    for length, plain, scored in zip(lengths, timings[::2], timings[1::2], strict=True):
        pairs = _prompts(bench, length) * length**2 * bench.sizes.prompt_width
        seconds = statistics.median(plain)
        # Both took their turns together, so each round has a difference of its own.
        added = statistics.median(b - a for a, b in zip(plain, scored, strict=False))
        attention.append((float(length), 2 * pairs / seconds))
        one_prompt.append(max(added, LEAST_SHARE * seconds) / _prompts(bench, length))
    for length, added in zip(lengths, no_longer_than_next(one_prompt), strict=True):
        scoring.append((float(length), length**2 * bench.sizes.prompt_width / added))
    return Curve(tuple(attention)), Curve(tuple(scoring))


def no_longer_than_next(seconds: Sequence[float]) -> list[float]:
    """Seconds of ever more work, of which none takes longer than what is more: such a figure was disturbed."""
    return list(accumulate(reversed(seconds), min))[::-1]


def _prompts(bench: Bench, length: int) -> int:
    return max(1, bench.sizes.prompt_tokens // length)


def _prefill_calls(bench: Bench, dtype: torch.dtype, length: int) -> tuple[Call, Call]:
    """Attention without and with scores over a micro-batch of prompts of one length, packed as the engine has them."""
    prompts, heads = _prompts(bench, length), bench.sizes.prompt_width // HEAD_WIDTH
    q, k, v = (bench.normal(dtype, prompts, length, heads, HEAD_WIDTH).transpose(1, 2) for _ in range(3))
    policy, scale = H2O(), HEAD_WIDTH**-0.5
    hook = Hook(policy, 0, SlotTable(policy, [(length, 1)] * prompts, 1).at(0, range(prompts)), heads)

    def scored() -> None:
        _, lse = causal_attention_lse(q, k, v, scale)
        keep_prompt_columns(hook, 0, (q, k, v), lse, scale)

    return lambda: causal_attention(q, k, v, scale), scored


def decode_rates(bench: Bench, dtype: torch.dtype) -> tuple[Curve, Curve]:
    """Bytes a second of keys and values that one query a head reads, without and with scores, by head width."""
    cache = bench.normal(dtype, 2, bench.sizes.cache_bytes // dtype.itemsize // 2)
    widths, sizes = bench.sizes.head_widths, []
    calls: list[Call] = []
    for width in widths:
        rows = max(1, cache.shape[1] // (bench.sizes.slots * width))
        few = max(1, rows // PROBE)
        tried = bench.once(_decode_calls(bench, cache, width, few)[1])
        rows = rows if tried * rows / few < bench.sizes.longest_s else few
        calls += _decode_calls(bench, cache, width, rows)
        sizes += [2 * rows * bench.sizes.slots * width * dtype.itemsize] * 2
    rates = [nbytes / seconds for nbytes, seconds in zip(sizes, bench.seconds_of(*calls), strict=True)]
    plain, scored = (Curve(tuple(zip(map(float, widths), rates[i::2], strict=True))) for i in range(2))
    return plain, scored


def _decode_calls(bench: Bench, cache: torch.Tensor, width: int, rows: int) -> tuple[Call, Call]:
    """cache: (2, values), of which the rows take what they need for keys and for values."""
    slots, scale, where = bench.sizes.slots, width**-0.5, cache.device
    keys, values = (part[: rows * slots * width].view(1, rows, slots, width) for part in cache)
    q = bench.normal(cache.dtype, rows, 1, width)

    def ints(value: int) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=where)

    positions = torch.arange(slots, dtype=torch.int32, device=where).repeat(rows, 1)
    scores, gains = torch.zeros(rows, slots, device=where), torch.ones(rows, device=where)
    book = ScoreBook(scores, positions, ints(0), ints(slots // 2), 1.0, gains, ints(0))
    filled = ints(slots)
    return (
        lambda: attend(q, keys, values, filled, scale),
        lambda: attend_scored(q, keys, values, filled, scale, book),
    )
