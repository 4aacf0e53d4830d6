"""The forward of every family's layers, on matrices in one piece and in row parts, against
transformers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import BlockShape
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.linear import DenseRows, InputRows, RowParts, vector
from flexgen_h2o.kernels.prefill_attention import causal_attention_lse, with_sinks
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Hidden, Queries, end_attention, family_of, llama, spec_from_config
from flexgen_h2o.models.layers import count_choices, sort_choices
from tests.parity.cases import FAMILY_SHAPES
from tests.parity.reference import random_model, stored_tensors

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "ffn_dim": 40,
    "max_position_embeddings": 32,
    "num_attention_heads": 3,
    "word_embed_proj_dim": 24,
    "init_std": 0.2,
    "dropout": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "post-norm, narrow": {"word_embed_proj_dim": 10, "do_layer_norm_before": False},
    "galactica": {"activation_function": "gelu", "enable_bias": False},
    "untied, norms without weights": {
        "tie_word_embeddings": False,
        "layer_norm_elementwise_affine": False,
    },
}
Split = Callable[[torch.Tensor], RowParts]


def whole(t: torch.Tensor) -> RowParts:
    return (DenseRows(t),)


def in_three(t: torch.Tensor) -> RowParts:
    """Uneven parts for a matrix; a vector is never split."""
    n = len(t)
    sizes = [n] if t.dim() == 1 else [n // 3, 1, n - n // 3 - 1]
    return tuple(map(DenseRows, t.split(sizes)))


def logits_of(
    spec: ModelSpec, tensors: dict[str, torch.Tensor], ids: torch.Tensor, split: Split
) -> torch.Tensor:
    """The model's layers one after the other, as the executor calls them for one prompt."""
    family = family_of(spec)
    n = len(ids)
    sizes = MemoryPlanner(spec, Policy(), 4, True).workspace(
        BlockShape(rows=n, micro_batches=1, tokens=n, slots=(n,))
    )
    ws = Workspace(torch.zeros(sum(sizes.values()), dtype=torch.uint8), sizes, torch.float32)

    def roles(specs: tuple[TensorSpec, ...]) -> dict[str, RowParts]:
        return {t.role: parts_of(t) for t in specs}

    def parts_of(t: TensorSpec) -> RowParts:
        value = next(tensors[n] for n in (t.name, *t.aliases) if n in tensors)
        parts = split(value if t.index is None else value[t.index])
        return tuple(InputRows(vector((part,))) for part in parts) if t.transposed else parts

    def attend(window: int | None, queries: Queries) -> torch.Tensor:
        *qkv, sinks = queries
        if spec.rotary is not None:
            rotation = Rotation(torch.tensor(spec.rotary.frequencies), spec.rotary.scaling)
            rotation.rotate(qkv[:2], torch.arange(n))
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in qkv)
        out, lse = causal_attention_lse(q, k, v, spec.head_dim**-0.5, window)
        if sinks is not None:
            out, _ = with_sinks(out, lse, sinks)
        return out[0].transpose(0, 1).reshape(n, -1)

    x = torch.empty(n, spec.hidden_size)
    family.embed(spec, roles(spec.embedding), ids, torch.arange(n), x, ws)
    for i, (attention, mlp) in enumerate(zip(spec.attention, spec.mlp, strict=True)):
        layer = family.attention(spec, roles(attention), x, ws)
        end_attention(layer, attend(spec.window(i), next(layer)))
        if mlp:
            family.mlp(spec, roles(mlp), x, ws)
        elif spec.experts_of(i):
            assert spec.experts is not None
            size = (n, spec.experts.per_token)
            hidden = Hidden(
                x, torch.zeros_like(x), torch.empty(size, dtype=torch.int32), torch.empty(size)
            )
            family.route(spec, roles(attention), hidden, ws)
            (counts,) = count_choices(hidden.chosen, [n], spec.experts.count)
            hidden = hidden._replace(counts=counts)
            sort_choices(hidden)
            for group in (range(2), range(2, spec.experts.count)):
                tensors_of_group = spec.experts.inputs[i] + tuple(
                    t for e in group for t in spec.experts_of(i)[e]
                )
                family.experts(spec, roles(tensors_of_group), group, hidden, ws)
            x += hidden.mixed
    before = x.clone()
    logits = torch.empty(n, spec.vocab_size)
    family.head(spec, roles(spec.embedding + spec.head), x, logits, ws)
    assert torch.equal(x, before)  # the head leaves the hidden states as they are
    return logits


@pytest.mark.parametrize(("kind", "split"), zip(KINDS, cycle((in_three, whole)), strict=False))
def test_logits_equal_transformers(
    kind: str, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OPTConfig(**{**SHAPE, **KINDS[kind]})
    model = OPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # the initial 0 and 1 of biases and norms would hide a swap
                p.normal_(1.0 if "norm.weight" in name else 0.0, 0.3)
    assert_logits(model, split, monkeypatch)


@pytest.mark.parametrize(
    ("shape", "split"), zip(FAMILY_SHAPES, cycle((whole, in_three)), strict=False)
)
def test_logits_of_other_families(
    shape: str, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_logits(random_model(**FAMILY_SHAPES[shape]), split, monkeypatch)


def test_queries_are_normed_over_as_much_as_the_weight_is_long() -> None:
    """Each head of 8 as in Qwen3, or all three together as in OLMoE."""
    spec = spec_from_config("m", random_model(**FAMILY_SHAPES["qwen3"]).config.to_dict(), "here")
    for width, theirs in ((8, Qwen3RMSNorm(8)), (24, OlmoeRMSNorm(24))):
        found = torch.randn(5, 24)
        weight = torch.randn(width)
        theirs.load_state_dict({"weight": weight})
        want = theirs(found.view(5, -1, width)).view(5, 24)
        llama.norm_heads(spec, {"q_norm.weight": whole(weight)}, "q_norm", found)
        assert torch.allclose(found, want, atol=1e-5)
    before = found.clone()
    llama.norm_heads(spec, {}, "q_norm", found)
    assert torch.equal(found, before)


@torch.no_grad()
def assert_logits(model: PreTrainedModel, split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 11 tokens: two whole chunks and a short one, and more of those that norms and rotations
    see."""
    for name, count in (
        ("models.layers.TOKEN", 4),
        ("kernels.elementwise.NORM", 3),
        ("kernels.elementwise.ROTARY", 2),
    ):
        monkeypatch.setattr(f"flexgen_h2o.{name}_CHUNK", count)
    ids = torch.randint(0, 50, (11,))
    expected = model(ids[None]).logits[0]
    spec = spec_from_config("m", model.config.to_dict(), "here")
    actual = logits_of(spec, stored_tensors(model), ids, split)
    assert (actual - expected).abs().max() < 1e-4
    assert expected.std() > 0.1
