"""Generation with evicted KV columns, slow and obvious: full attention matrices under a mask that
grows row by row.

At each new token everything is computed anew from the token ids. Row i of a layer's mask says what
query i attended to; rows, once written, never change. Nothing is ever moved, dropped or updated in
place, so positions cannot slip.

    policy = h2o(Budget(0.2, 0.2))
    want = evicted_greedy(PlainOPT(model), prompt, 8, policy)
    assert want.least_gap > 1e-5 and want.least_token_gap > 1e-3, "a near tie: take another seed"
    assert want.promotions > 0, "a plain window would pass: take a larger budget or a shorter prompt"

Letters: kv = kv-heads, g = query heads of one kv-head, n = columns so far, d = head width.
"""  # noqa: E501

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from tests.eviction.policies import Policy, choose
from tests.eviction.selection import Selection

if TYPE_CHECKING:
    from tests.eviction.rounding import Rounded

Turn = Callable[
    [torch.Tensor, torch.Tensor], torch.Tensor
]  # (heads, n, d) at positions (n,), rotary embeddings
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Kept = list[list[list[int]]]  # positions by layer and kv-head, ascending


@dataclass(frozen=True)
class Cache:
    """stored: what becomes of all but the newest `windows` (by layer) columns. selection: some of
    the values count; all are kept."""

    stored: Rounded | None = None
    windows: Sequence[int] = ()
    selection: Selection | None = None


PLAIN = Cache()


class PlainModel:
    """A transformer in the pieces between which eviction happens, for one sequence without
    padding. tests/eviction/plain_models.py has the families."""

    num_layers: int
    kv_heads: int
    windows: Sequence[
        int | None
    ]  # by layer, of columns that a query sees, its own the last; None: all

    def __init__(self, model: Any) -> None:
        self._model = copy.deepcopy(model).eval()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) ids at positions 0, 1, ... -> (n, hidden)"""
        raise NotImplementedError

    def project(self, layer: int, x: torch.Tensor) -> QKV:
        """(n, hidden) -> q: (heads, n, d), k and v: (kv, n, d)"""
        raise NotImplementedError

    def sinks(self, layer: int) -> torch.Tensor | None:
        """(kv, g): logits that join the softmax of each query and have no values; None: there are
        none"""
        return None

    def finish(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """x: (n, hidden), mixed: (n, heads x d) values -> (n, hidden), after attention's sum and
        the MLP"""
        raise NotImplementedError

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) -> (rows, vocab)"""
        raise NotImplementedError


@dataclass(frozen=True)
class Attention:
    """What one layer computed. q: (kv, g, n, d); k, v: (kv, n, d), keys as the newest query finds
    them; probabilities: (kv, g, n, n), 0 where masked."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    probabilities: torch.Tensor


@torch.no_grad()
def forward(
    model: PlainModel,
    ids: Sequence[int],
    masks: Sequence[torch.Tensor],
    prompt_len: int = 0,
    cache: Cache = PLAIN,
    turn: Turn | None = None,
) -> tuple[torch.Tensor, list[Attention]]:
    """Logits of the newest token (vocab,), and every layer's attention. masks: (kv, n, n) bool by
    layer.

    cache: what queries behind the prompt see; the prompt's own see the columns as they are. turn:
    the model projects queries and keys without their positions, and a query sees the columns of its
    mask's row at positions 0, 1, ..., itself last.
    """
    stored = cache.stored
    x = model.embed(torch.tensor(ids))
    seen = []
    for layer, mask in enumerate(masks):
        q, k, v = model.project(layer, x)
        old = k
        new = v
        q = q.reshape(model.kv_heads, -1, *q.shape[1:])
        scores = torch.einsum("kgid,kjd->kgij", q, k) * q.shape[-1] ** -0.5
        if turn is not None:
            scores = rolled_scores(q, k, mask, turn)
        if stored is not None:
            place = torch.arange(len(ids))
            is_whole = (place[:, None] < prompt_len) | (
                place > place[:, None] - cache.windows[layer]
            )
            old, new = stored.columns(layer, k, v, prompt_len, (mask & ~is_whole).any(1))
            later = torch.einsum("kgid,kjd->kgij", q, old) * q.shape[-1] ** -0.5
            scores = torch.where(is_whole, scores, later)
        scores = scores.masked_fill(~mask[:, None], -math.inf)
        sinks = model.sinks(layer)
        none = torch.full(q.shape[:2], -math.inf) if sinks is None else sinks
        every = torch.cat(
            [scores, none[..., None, None].expand(-1, -1, len(ids), 1)], dim=-1
        ).softmax(-1)
        probabilities = every[..., :-1]
        mixed = torch.einsum("kgij,kjd->ikgd", probabilities, v)
        if stored is not None:
            mixed = torch.einsum("kgij,kjd->ikgd", probabilities * is_whole, v)
            mixed += torch.einsum("kgij,kjd->ikgd", probabilities * ~is_whole, new)
        if cache.selection is not None and model.windows[layer] is None:
            found = v[:, None].expand(-1, len(ids), -1, -1)
            found = (
                found if stored is None else torch.where(is_whole[..., None], found, new[:, None])
            )
            chosen = cache.selection.mixed(scores, none, found, prompt_len or len(ids))
            mixed[prompt_len or len(ids) :] = chosen.permute(2, 0, 1, 3)
        x = model.finish(layer, x, mixed.reshape(len(ids), -1))
        held = k if stored is None else torch.where(is_whole[-1, :, None], k, old)
        seen.append(Attention(q, held, v, probabilities))
    return model.logits(x[-1:])[0], seen


def hadamard_matrix(width: int) -> torch.Tensor:
    """(width, width) fp64, orthogonal and symmetric: blocks of the largest power of two that
    divides the width, whose entries are 1 or, for places with an odd number of common bits, -1,
    over the root of their width."""
    size = width & -width
    block = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.block_diag(
        *[torch.tensor(block, dtype=torch.float64) / size**0.5] * (width // size)
    )


def rolled_scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, turn: Turn) -> torch.Tensor:
    """(kv, g, n, n) scaled products, each query with the columns of its row of the mask at their
    ranks."""
    everywhere = torch.arange(k.shape[1])  # the ranks of a query that sees all columns before it
    turned = turn(q.flatten(0, 1), everywhere).view_as(q)
    scores = torch.einsum("kgid,kjd->kgij", turned, turn(k, everywhere)) * q.shape[-1] ** -0.5
    for head, i in product(range(len(k)), range(q.shape[2])):
        held = mask[head, i].nonzero().squeeze(1)
        if len(held) == i + 1:
            continue
        keys = turn(k[head, held].unsqueeze(0), torch.arange(len(held)))[0]
        query = turn(q[head, :, i : i + 1], torch.tensor([len(held) - 1]))[:, 0]
        scores[head, :, i, held] = query @ keys.T * q.shape[-1] ** -0.5
    return scores


class LayerState:
    """Which columns one layer holds, by kv-head, and the mask of what its queries attended to."""

    def __init__(
        self, model: PlainModel, layer: int, prompt_len: int, most_new: int, policy: Policy
    ) -> None:
        self.mask = torch.ones(model.kv_heads, prompt_len, prompt_len).tril().bool()
        self.held = [list(range(prompt_len)) for _ in range(model.kv_heads)]
        self.gap = math.inf
        self.promotions = 0
        self._sizes = policy.sizes(prompt_len, most_new)
        self._scorer = policy.scorer(layer, self._sizes)
        self._in_decode = policy.in_decode
        total = self._sizes.total
        grown = min(total, prompt_len) + most_new - 1
        self.slots = max(1, min(total + 1, grown) if self._in_decode else grown)

    def prefilled(self, seen: Attention) -> None:
        self._scorer.see_prompt(seen.probabilities.double())
        self._evict()

    def join(self) -> None:
        """The new column is held from now on; its query attends to all that is held."""
        n = self.mask.shape[-1]
        grown = torch.zeros(len(self.held), n + 1, n + 1, dtype=torch.bool)
        grown[:, :n, :n] = self.mask
        for head, held in enumerate(self.held):
            held.append(n)
            grown[head, n, held] = True
        self.mask = grown

    def decoded(self, seen: Attention) -> None:
        self._scorer.see_token(seen.probabilities[:, :, -1].double())
        if self._in_decode:
            before = [list(held) for held in self.held]
            self._evict()
            for old, held in zip(before, self.held, strict=True):
                # The column that stands just outside the recent ones now: does it stay in place of
                # an older one?
                self.promotions += len(held) < len(old) and old[-1 - self._sizes.recent] in held

    def _evict(self) -> None:
        turns = self._scorer.turns()
        for head, held in enumerate(self.held):
            self.held[head], gap = choose(
                held, self._sizes, [(count, score[head]) for count, score in turns]
            )
            self.gap = min(self.gap, gap)


class WindowState(LayerState):
    """A layer with a window: it holds what its next query sees, and nothing is asked of the
    policy."""

    def __init__(
        self, model: PlainModel, layer: int, prompt_len: int, most_new: int, policy: Policy
    ) -> None:
        super().__init__(model, layer, prompt_len, most_new, policy)
        self._window = model.windows[layer] or 0
        self.mask = self.mask.triu(1 - self._window)
        self.slots = max(1, min(self._window, prompt_len + most_new - 1))
        self._leave()

    def prefilled(self, seen: Attention) -> None:
        pass

    def join(self) -> None:
        super().join()
        self._leave()

    def decoded(self, seen: Attention) -> None:
        pass

    def _leave(self) -> None:
        """Columns that the next query, one position on, does not see."""
        self.held = [held[max(0, len(held) - self._window + 1) :] for held in self.held]


@dataclass(frozen=True)
class Evicted:
    """What was generated, and how sure one can be of it.

    logits: (tokens, vocab), those that each token was chosen from. kept: after the prefill, then
    after each decode step; the last token is never fed back, so there are as many as tokens; no
    heads of layers with windows. least_gap: the smallest distance in score between a column that
    stayed and one that went (infinite when there was never a choice). promotions: how often a
    column that left the recent ones took an older one's place; without any, decode scores decided
    nothing. given: the steps whose tokens were. is_near: rounding may choose other columns, or
    others' codes; what follows the step that showed it is left out.
    """

    tokens: list[int]
    logits: torch.Tensor
    kept: list[Kept]
    least_gap: float
    promotions: int
    given: frozenset[int] = frozenset()
    is_near: bool = False

    def without_kept(self) -> Evicted:
        return replace(self, kept=[])

    @property
    def least_token_gap(self) -> float:
        """The smallest distance between the best and the second best logit, where the token was
        chosen."""
        best = (
            self.logits[[step for step in range(len(self.tokens)) if step not in self.given]]
            .topk(2)
            .values
        )
        return float((best[:, 0] - best[:, 1]).min())


def evicted_greedy(
    model: PlainModel,
    prompt: Sequence[int],
    new_tokens: int,
    policy: Policy,
    stored: Rounded | None = None,
    turn: Turn | None = None,
    given: Mapping[int, int] = MappingProxyType({}),
) -> Evicted:
    """Greedy tokens for one prompt with `policy` evicting in every layer. stored, turn: as in
    `forward`.

    given: tokens that are taken at some steps whatever the logits; a near tie there is none.
    """
    kinds = [LayerState if window is None else WindowState for window in model.windows]
    layers = [kind(model, i, len(prompt), new_tokens, policy) for i, kind in enumerate(kinds)]
    newest, seen = forward(model, prompt, [layer.mask for layer in layers], turn=turn)
    for layer, attention in zip(layers, seen, strict=True):
        layer.prefilled(attention)
    windows = [] if stored is None else [stored.window(layer.slots) for layer in layers]
    selection = Selection(policy.share) if policy.share < 1 else None
    cache = Cache(stored, windows, selection)
    tokens = [given.get(0, int(newest.argmax()))]
    logits = [newest]
    kept = [_held(layers)]
    while len(tokens) < new_tokens and not (stored is not None and stored.is_near):
        for layer in layers:
            layer.join()
        masks = [layer.mask for layer in layers]
        newest, seen = forward(model, [*prompt, *tokens], masks, len(prompt), cache, turn)
        for layer, attention in zip(layers, seen, strict=True):
            layer.decoded(attention)
        tokens.append(given.get(len(tokens), int(newest.argmax())))
        logits.append(newest)
        kept.append(_held(layers))
    gap = min(layer.gap for layer in layers)
    promotions = sum(layer.promotions for layer in layers)
    is_near = any(one is not None and one.is_near for one in (stored, selection))
    return Evicted(tokens, torch.stack(logits), kept, gap, promotions, frozenset(given), is_near)


def _held(layers: Sequence[LayerState]) -> Kept:
    return [
        [] if isinstance(layer, WindowState) else [list(held) for held in layer.held]
        for layer in layers
    ]
