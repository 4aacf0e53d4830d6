"""A spec's tensors against transformers' own parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.models import spec_from_config
from tests.parity.cases import BASES, FAMILY_SHAPES
from tests.parity.reference import stored_tensors

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "narrow": {"word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "narrow and untied": {"word_embed_proj_dim": 8, "tie_word_embeddings": False},
    "no bias": {"enable_bias": False},
    "plain norms": {"layer_norm_elementwise_affine": False},
    "no last norm": {"_remove_final_layer_norm": True},
    "one layer": {"num_hidden_layers": 1},
}


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "config",
    [
        *({**BASES["opt"], **kind} for kind in KINDS.values()),
        *({**BASES[shape["model_type"]], **shape} for shape in FAMILY_SHAPES.values()),
    ],
    ids=[*KINDS, *FAMILY_SHAPES],
)
def test_every_tensor_of_transformers_is_there_once(config: dict[str, Any]) -> None:
    theirs = on_meta(AutoConfig.for_model(**deepcopy(config)))
    spec = spec_from_config("m", theirs.config.to_dict(), "here")
    shapes = {name: tuple(p.shape) for name, p in stored_tensors(theirs).items()}
    if theirs.config.tie_word_embeddings:
        shapes.pop(next(name for name in ("lm_head.weight", "embed_out.weight") if name in shapes))
    tensors = spec.tensors
    found = Counter(stored_as(t, shapes) for t in tensors)
    assert {
        name: shape if count == 1 else (count, *shape) for (name, shape), count in found.items()
    } == shapes
    assert spec.num_weights == sum(p.numel() for p in theirs.parameters())


def stored_as(
    tensor: TensorSpec, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, tuple[int, ...]]:
    """Its name among these, and its shape there; of a slice, the slice's."""
    name = next(n for n in (tensor.name, *tensor.aliases) if n in shapes)
    return name, tensor.shape[::-1] if tensor.transposed else tensor.shape
