"""attn_sparsity against a slow reference on the whole attention matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import OPTForCausalLM

from flexgen_h2o import MemoryBudget, Policy, SamplingParams
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import LEAST_GAP, LOGIT_TOLERANCE, LogitsByRow, Reference, run, tokens_of

NEW_TOKENS = 6


def sparse_weights(scores: torch.Tensor, prompt_len: int, share: float) -> torch.Tensor:
    """(heads, n, n) attention weights: a decode query keeps int(share x past) past ones and its own, as they are."""
    n = scores.shape[-1]
    causal = torch.ones(n, n).tril().bool()
    weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    for head in weights:
        for query in range(prompt_len, n):
            past = head[query, :query]
            kept = past.topk(int(share * query)).indices
            past[[i for i in range(query) if i not in kept.tolist()]] = 0.0
    return weights


@torch.no_grad()
def sparse_logits(model: OPTForCausalLM, ids: list[int], prompt_len: int, share: float) -> torch.Tensor:
    """The newest token's logits, everything computed anew."""
    decoder, heads = model.model.decoder, model.config.num_attention_heads
    x = decoder.embed_tokens(torch.tensor(ids)) + decoder.embed_positions.weight[2 : 2 + len(ids)]
    for layer in decoder.layers:
        own = layer.self_attn
        normed = layer.self_attn_layer_norm(x)
        q, k, v = (f(normed).view(len(ids), heads, -1).transpose(0, 1) for f in (own.q_proj, own.k_proj, own.v_proj))
        weights = sparse_weights(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, prompt_len, share)
        x = x + own.out_proj((weights @ v).transpose(0, 1).reshape(len(ids), -1))
        x = x + layer.fc2(F.relu(layer.fc1(layer.final_layer_norm(x))))
    return model.lm_head(decoder.final_layer_norm(x[-1]))


def sparse_greedy(model: OPTForCausalLM, prompt: list[int], share: float) -> tuple[list[int], torch.Tensor]:
    tokens: list[int] = []
    logits = []
    for _ in range(NEW_TOKENS):
        logits.append(sparse_logits(model, [*prompt, *tokens], len(prompt), share))
        tokens.append(int(logits[-1].argmax()))
    best = torch.stack(logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > LEAST_GAP, "a near tie: take another share"
    return tokens, torch.stack(logits)


@pytest.fixture(scope="module")
def sparse(reference: Callable[[str], Reference]) -> Callable[[float], list[tuple[list[int], torch.Tensor]]]:
    known = reference("normal")
    made: dict[float, list[tuple[list[int], torch.Tensor]]] = {}

    def rows(share: float) -> list[tuple[list[int], torch.Tensor]]:
        if share not in made:
            made[share] = [sparse_greedy(known.model, p, share) for p in known.prompts]
        return made[share]

    return rows


def test_the_reference_itself_is_transformers_when_nothing_is_cut(reference: Callable[[str], Reference]) -> None:
    known = reference("normal")
    for prompt, tokens in zip(known.prompts, known.tokens, strict=True):
        assert sparse_greedy(known.model, prompt, 1.0)[0][: len(tokens)] == tokens


@pytest.mark.parametrize(
    ("policy", "budget", "share"),
    [
        (Policy(5, 1), MemoryBudget(), 0.25),
        (Policy(2, 2, PLACEMENTS["kv split three ways"]), MemoryBudget("64MiB", "64MiB", "64MiB"), 0.5),
        (Policy(2, 3, PLACEMENTS["kv on host"], cpu_cache_compute=True), MemoryBudget(*["64MiB"] * 3), 0.05),
    ],
    ids=["one batch", "split three ways", "on host"],
)  # fmt: skip
def test_most_attended_values_only(
    policy: Policy, budget: MemoryBudget, share: float, sparse, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    known, watch = reference("normal"), LogitsByRow()
    changed = Policy(**{**policy.to_json(), "attn_sparsity": share})
    out = run(known.folder, known.prompts, changed, tmp_path, SamplingParams(max_tokens=NEW_TOKENS), budget, watch)
    want = sparse(share)
    assert tokens_of(out) == [tokens for tokens, _ in want]
    for row, (_, logits) in enumerate(want):
        assert (torch.stack(watch.rows[row]) - logits).abs().max() <= LOGIT_TOLERANCE
