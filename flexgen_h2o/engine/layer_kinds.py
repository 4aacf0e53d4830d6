"""Functions that compute a layer for a micro-batch: one per kind of layer, in one table.

A function gets the block, the layer and the number of the micro-batch. Before it is called, the
executor has opened the layer's weights, the hidden states, and in layers with attention the KV unit
(`BlockRun`). A new kind of layer is one function and one row of `LAYERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from flexgen_h2o.core.model import Layer, LayerKind
from flexgen_h2o.engine.decoding import score_prompts
from flexgen_h2o.kernels.workspace import some_rows, upload
from flexgen_h2o.models import Hidden, Queries, end_attention
from flexgen_h2o.models.layers import count_choices, sort_choices

if TYPE_CHECKING:
    from flexgen_h2o.engine.executor import BlockRun


def embed(run: BlockRun, layer: Layer, k: int) -> None:
    """Turn token ids into hidden states."""
    fed = run.inputs[k]
    run.family.embed(run.spec, run.opened, fed.ids, fed.positions, run.hidden.x, run.workspace)


def attend(run: BlockRun, layer: Layer, k: int) -> None:
    """Compute the attention of a transformer block, and its router if it has experts."""
    attended = _attend(run, layer, k)
    if attended is not None and run.spec.experts_of(layer.block):
        _route(run, attended)


def attend_and_mlp(run: BlockRun, layer: Layer, k: int) -> None:
    """Compute the attention and the MLP of a transformer block."""
    attended = _attend(run, layer, k)
    if attended is not None and run.spec.mlp[layer.block]:
        run.family.mlp(run.spec, run.opened, attended.hidden.x, run.workspace)


def mlp(run: BlockRun, layer: Layer, k: int) -> None:
    """Compute the MLP of a transformer block."""
    if run.spec.mlp[layer.block]:
        run.family.mlp(run.spec, run.opened, run.hidden.x, run.workspace)


def experts(run: BlockRun, layer: Layer, k: int) -> None:
    """Add the outputs of a group of experts to the sum of all experts."""
    if k in run.unsorted:
        run.unsorted.remove(k)
        sort_choices(run.hidden)
    hidden = run.hidden._replace(counts=run.counts[k])
    run.family.experts(run.spec, run.opened, layer.experts, hidden, run.workspace)


def head(run: BlockRun, layer: Layer, k: int) -> None:
    """Compute the logits of a micro-batch and sample its next tokens.

    If the head is cut into parts, each part computes some columns of the logits. They are held
    until the last part has run.
    """
    logits_at = partial(_logits, run, layer, k, run.hidden.x)
    if layer.rows.stop < run.spec.vocab_size:
        logits_at(run.inputs[k].last())
        return
    _score_prompts(run, k, logits_at)
    _sample(run, k, logits_at)
    if run.engine.wire is not None or not run.engine.device.is_asynchronous:
        run.settle(k)


def receive(run: BlockRun, layer: Layer, k: int) -> None:
    """Receive hidden states from the rank before."""
    assert run.engine.wire is not None
    run.engine.wire.recv_hidden(k, run.hidden.x)


def send(run: BlockRun, layer: Layer, k: int) -> None:
    """Send hidden states to the next rank."""
    assert run.engine.wire is not None
    run.engine.weights.check_unchanged()  # later ranks hand out what they compute from it
    run.engine.wire.send_hidden(k, len(run.batches[k].rows), run.hidden.x)


LAYERS: Mapping[LayerKind, Callable[[BlockRun, Layer, int], None]] = {
    "embedding": embed,
    "attention": attend,
    "block": attend_and_mlp,
    "mlp": mlp,
    "experts": experts,
    "head": head,
    "receive": receive,
    "send": send,
}


# ---- Parts of these functions


class JoinedAttention:
    """An attention layer of neighbouring micro-batches, or of one micro-batch in parts.

    Queries and outputs of several micro-batches are computed for all of them at once. Parts of one
    micro-batch are each computed alone (BlockShape.attending). Micro-batches attend one after
    another, each to its own KV unit.

    members: the micro-batches.
    hidden: the hidden states of them all.
    """

    def __init__(self, members: tuple[int, ...], hidden: Hidden) -> None:
        self.members = members
        self.hidden = hidden
        # Indices of tokens: the first one of the part that has begun, and the next one to attend.
        self._first_token = self._next_token = 0

    def attend(self, run: BlockRun, k: int) -> None:
        """Run the attention of the next micro-batch, `k`."""
        parts = run.parts[k]
        for part in parts:
            if self._next_token == self._first_token:
                end = self._next_token + len(part.ids) if len(parts) > 1 else len(self.hidden.x)
                self._begin(run, some_rows(self.hidden.x, slice(self._first_token, end)))
            start = self._next_token - self._first_token
            here = slice(start, start + len(part.ids))
            q, keys, v, sinks = self._queries
            queries = Queries(some_rows(q, here), some_rows(keys, here), some_rows(v, here), sinks)
            run.executor.attention.attend(run.cache, part, some_rows(self._out, here), queries)
            self._next_token += len(part.ids)
            if here.stop == len(self._out):
                end_attention(self._attention, self._out)
                self._first_token = self._next_token

    def _begin(self, run: BlockRun, x: torch.Tensor) -> None:
        """Compute queries, keys and values. x: (tokens, hidden)."""
        spec = run.spec
        ws = run.workspace
        self._out = ws.get("mixed", len(x), spec.num_heads * spec.head_dim)
        self._attention = run.family.attention(spec, run.opened, x, ws)
        self._queries = next(self._attention)


def _attend(run: BlockRun, layer: Layer, k: int) -> JoinedAttention | None:
    """Run the attention of one micro-batch in a layer.

    The first of several joined micro-batches computes the queries of all of them, the last one
    their outputs. Return the joined attention after the last micro-batch, and None before that.
    """
    attending = run.attending or JoinedAttention(run.together(layer, k), run.hidden)
    attending.attend(run, k)
    is_last = k == attending.members[-1]
    run.attending = None if is_last else attending
    return attending if is_last else None


def _route(run: BlockRun, attended: JoinedAttention) -> None:
    """Choose the experts of the tokens of joined micro-batches."""
    spec = run.spec
    hidden = attended.hidden
    assert hidden.mixed is not None and hidden.chosen is not None and spec.experts is not None
    run.family.route(spec, run.opened, hidden, run.workspace)
    hidden.mixed.zero_()
    tokens = [len(run.inputs[k].ids) for k in attended.members]
    counts = count_choices(hidden.chosen, tokens, spec.experts.count)
    run.counts.update(zip(attended.members, counts, strict=True))
    run.unsorted.update(attended.members)


LogitsAt = Callable[[slice | torch.Tensor], torch.Tensor]


def _logits(
    run: BlockRun, layer: Layer, k: int, x: torch.Tensor, places: slice | torch.Tensor
) -> torch.Tensor:
    """Return the logits of the tokens at `places`, with the layer's columns computed.

    x: (tokens, hidden). The result is (places, vocabulary).
    """
    spec = run.spec
    # Rows of logits that belong to earlier micro-batches.
    first = k * run.engine.plan.shape.rows if spec.head_rows else 0
    inputs = x[places] if isinstance(places, slice) else x.index_select(0, places)
    logits = run.workspace.get("logits", first + len(inputs), spec.vocab_size)[first:]
    columns = logits[:, layer.rows.start : layer.rows.stop]
    run.family.head(spec, run.opened, inputs, columns, run.workspace)
    return logits


def _score_prompts(run: BlockRun, k: int, logits_at: LogitsAt) -> None:
    """Give the scored tokens of prompts their log-probabilities."""

    def logits_of(places: list[int]) -> torch.Tensor:
        return logits_at(upload(torch.tensor(places, device="cpu"), run.hidden.x.device))

    isolates_errors = run.executor.decoding.watches.isolates_errors
    score_prompts(run.batches[k], run.inputs[k], logits_of, isolates_errors)


def _sample(run: BlockRun, k: int, logits_at: LogitsAt) -> None:
    """Sample the next tokens of a micro-batch, after each decode step of its sweep."""
    fed = run.inputs[k]
    for step in range(fed.steps):
        if step:
            finished, _ = run.append_tokens(k, run.sampled.pop(k)())
            assert not finished  # a sequence takes all the tokens that were fed ahead
        run.sampled[k] = run.executor.decoding.sample(
            run.batches[k], logits_at(fed.last(step)), run.engine.device.read_back
        )
