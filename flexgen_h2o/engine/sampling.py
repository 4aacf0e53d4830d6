"""The choice of tokens, and their log-probabilities. It sees logits and token ids only."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.settings import SamplingParams as SamplingParams
from flexgen_h2o.core.units import SAMPLING_CHUNK
from flexgen_h2o.kernels.workspace import is_queued, upload

NOT_FINITE = -1  # stands for the token of a sequence whose logits are not finite
_NUCLEUS_GUESS = 1024  # tokens that are sorted first for top-p; if they are too few, all are sorted


def check_params(params: object) -> SamplingParams | Sequence[SamplingParams]:
    """Return one SamplingParams, or a list with one for each prompt. None gives the defaults.

    Raise UsageError that names the wrong entry.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise UsageError(
            f"params: {params!r:.60} is neither a SamplingParams nor a list with one for each "
            "prompt"
        )
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise UsageError(f"params[{i}]: {one!r:.60} is not a SamplingParams")
    return params


def sample_tokens(
    logits: Tensor,
    params: Sequence[SamplingParams],
    streams: Sequence[int],
    steps: Sequence[int],
) -> list[int]:
    """Return the next token of each sequence, and wait for it.

    Raise NotFiniteError if a row of logits holds NaN, +inf or nothing finite.

    logits: [b, V], any float dtype and device; -inf forbids a token.
    params: b entries, what each sequence asks for.
    streams: b non-negative numbers, the random stream of each sequence. Sequences of one stream
        with equal params get the same tokens.
    steps: b entries, the tokens that each sequence has generated already. With the seed, stream and
        step fix the random number.
    """
    if not len(params):
        return []
    return check_finite(choose_tokens(logits, params, streams, steps).tolist(), streams, steps)


def choose_tokens(
    logits: Tensor,
    params: Sequence[SamplingParams],
    streams: Sequence[int],
    steps: Sequence[int],
) -> Tensor:
    """Return the next tokens without waiting: (b,) int64 on the device of the logits.

    A token is NOT_FINITE if `sample_tokens` would raise. b must be above 0.
    """
    best, chosen = logits.max(dim=-1)
    drawing = _drawing(params)
    if drawing:
        order = [place for places in drawing.values() for place in places]
        drawn = [_uniform(params[i].seed, streams[i], steps[i]) for i in order]
        pairs = torch.tensor([order, drawn], dtype=torch.float64, device="cpu")  # places fit
        numbers = upload(pairs, logits.device)
        sizes = [len(places) for places in drawing.values()]
        for own, part in zip(drawing, numbers.split(sizes, dim=1), strict=True):
            if len(order) == len(params) and len(sizes) == 1:
                chosen = _draw(logits, own, part[1])
            else:
                places = part[0].long()
                chosen[places] = _draw(logits, own, part[1], places)
    return chosen.masked_fill(best - best != 0, NOT_FINITE)  # infinity minus infinity is NaN


def _drawing(params: Sequence[SamplingParams]) -> dict[SamplingParams, list[int]]:
    """Return the places of sequences that are not greedy, by temperature, top-k and top-p."""
    alike: dict[tuple[float, int | None, float | None], list[int]] = {}
    for place, own in enumerate(params):
        if not own.greedy:
            alike.setdefault((own.temperature, own.top_k, own.top_p), []).append(place)
    return {params[places[0]]: places for places in alike.values()}


class NotFiniteError(FlexgenError):
    """The logits of a sequence are not finite.

    reason: the message without the sequence's index.
    places: the places of all such sequences among those that were sampled.
    """

    def __init__(self, row: int, where: str, places: Sequence[int] = ()) -> None:
        why = "a damaged checkpoint, or a dtype that overflows (try --dtype bfloat16 or float32)"
        self.reason = f"logits {where} are not finite: {why}"
        self.places = tuple(places)
        self._given = row, where, self.places
        super().__init__(f"logits of row {row} {where} are not finite: {why}")

    def __reduce__(self) -> tuple[type[NotFiniteError], tuple[int, str, tuple[int, ...]]]:
        """Return how to pickle the error, for an actor's driver.

        The default of exceptions would call __init__ with the message alone.
        """
        return NotFiniteError, self._given


def check_finite(tokens: list[int], rows: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Return the tokens of `choose_tokens`. Raise NotFiniteError if one of them is NOT_FINITE."""
    bad = [place for place, token in enumerate(tokens) if token == NOT_FINITE]
    if bad:
        raise NotFiniteError(rows[bad[0]], f"at step {steps[bad[0]]}", bad)
    return tokens


def _draw(
    logits: Tensor, params: SamplingParams, drawn: Tensor, places: Tensor | None = None
) -> Tensor:
    """Return the drawn tokens, (n,) int64.

    A token is found at `drawn` in the cumulative probabilities of its row of logits.

    drawn: (n,) float64 in [0, 1).
    places: the rows of logits that draw; None: all.
    """
    height = max(1, SAMPLING_CHUNK // logits.shape[1])
    chosen: list[Tensor] = []
    # Rows are independent. With chunks the temporaries stay small, however many rows there are.
    for start in range(0, len(drawn), height):
        part = slice(start, start + height)
        rows = logits[part] if places is None else logits[places[part]]
        cumulative = kept_probabilities(rows, params).double().cumsum(-1)
        total = cumulative[:, -1]
        target = torch.minimum(drawn[part] * total, total.nextafter(torch.zeros_like(total)))
        chosen.append(torch.searchsorted(cumulative, target[:, None], right=True)[:, 0])
    return torch.cat(chosen)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities at one step, before temperature and cuts.

    `token_logprobs` makes it.
    """

    # Of the chosen token.
    logprob: float
    # (token id, log-probability) of the likeliest tokens, the likeliest first.
    top: tuple[tuple[int, float], ...]


class Logprobs(Sequence[Any]):
    """A list of `TokenLogprobs` that grows, in 8 bytes per number.

    As objects, 20 likeliest tokens of one step take 2 KB. The log-probabilities are those of
    `token_logprobs`, which are fp32. An entry may be None.
    """

    def __init__(self, found: Iterable[TokenLogprobs | None] = ()) -> None:
        self._logprobs = array("f")
        self._ends = array("q", [0])  # where the likeliest tokens of each entry end
        self._ids = array("i")
        self._values = array("f")
        self._missing: set[int] = set()  # entries that are None
        for one in found:
            self.append(one)

    def append(self, one: TokenLogprobs | None) -> None:
        if one is None:
            self._missing.add(len(self))
        self._logprobs.append(0.0 if one is None else one.logprob)
        for token, value in () if one is None else one.top:
            self._ids.append(token)
            self._values.append(value)
        self._ends.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._logprobs)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        if place in self._missing:
            return None
        few = slice(self._ends[place], self._ends[place + 1])
        top = zip(self._ids[few], self._values[few], strict=True)
        return TokenLogprobs(self._logprobs[place], tuple(top))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    def __repr__(self) -> str:
        return repr([*self])


def of_likeliest(found: TokenLogprobs, top: int) -> TokenLogprobs:
    """Return `found` with at most `top` of the likeliest tokens."""
    return TokenLogprobs(found.logprob, found.top[:top])


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of each row's chosen token and of its likeliest tokens.

    Forbidden tokens (-inf) are not among the likeliest.

    logits: [b, V].
    tokens: b entries, the chosen tokens.
    top: b entries, how many of the likeliest tokens are wanted.
    """
    height = max(1, SAMPLING_CHUNK // logits.shape[1])
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), height):
        scores = logits[start : start + height].float()
        scores = scores - scores.logsumexp(dim=-1, keepdim=True)
        own = torch.tensor(tokens[start : start + height], device=logits.device)[:, None]
        values, ids = scores.topk(min(max(top), scores.shape[1]), dim=-1)
        rows = zip(
            scores.gather(-1, own)[:, 0].tolist(),
            ids.tolist(),
            values.tolist(),
            top[start:],
            strict=False,
        )
        for logprob, row_ids, row_values, count in rows:
            best = zip(row_ids[:count], row_values[:count], strict=True)
            found.append(TokenLogprobs(logprob, tuple((i, v) for i, v in best if v > -math.inf)))
    return found


def kept_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities after temperature, then top-k, then top-p: fp32 [b, V].

    Tokens that are cut have 0. Each row sums to 1. Of equal logits the lower index is kept first,
    so that neither batch nor device decides.

    logits: [b, V] with a finite maximum in each row. The temperature must be above 0.
    """
    scores = logits.float()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / params.temperature
    vocab = scores.shape[1]
    top_k = params.top_k or 0
    top_p = 1.0 if params.top_p is None else params.top_p
    if 0 < top_k < vocab:
        values = scores.topk(top_k, dim=-1).values
        count = torch.full_like(values[:, :1], top_k, dtype=torch.int64)
        scores = _keep_first(scores, values[:, -1:], count)
    probabilities = scores.softmax(dim=-1)
    if top_p < 1:
        # Sort all if the host would have to wait to learn whether the guess was enough.
        width = min(vocab, top_k or (vocab if is_queued(scores) else _NUCLEUS_GUESS))
        values, order = scores.topk(width, dim=-1)
        cumulative = probabilities.gather(-1, order).double().cumsum(-1)
        if width < vocab and not top_k and bool((cumulative[:, -1] < top_p).any()):
            values, order = scores.sort(dim=-1, descending=True)
            cumulative = probabilities.gather(-1, order).double().cumsum(-1)
        count = (cumulative < top_p).sum(-1, keepdim=True).add(1).clamp(max=values.shape[1])
        probabilities = _keep_first(scores, values.gather(-1, count - 1), count).softmax(dim=-1)
    return probabilities


def _keep_first(scores: Tensor, threshold: Tensor, count: Tensor) -> Tensor:
    """Return `scores` [b, V] with all but the first `count` [b, 1] by (value, lower index) at -inf.

    threshold: [b, 1], the value of the last one kept.
    """
    above = scores > threshold
    tied = scores == threshold
    room = count - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1) <= room))
    return scores.masked_fill(~keep, -math.inf)


def _uniform(seed: int, row: int, step: int) -> float:
    """Return a number in [0, 1) with 53 random bits that depends on its three arguments only."""
    key = np.array([seed, row], dtype=np.uint64)
    # The generator counts up in the first word, so more numbers of a step would not be those of the
    # next step.
    counter = np.array([0, step, 0, 0], dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (bits >> 11) * 2.0**-53
