"""Models and references, made once for the whole session; every test here runs on the plain CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.eviction.engine import PAIRS, Wanted, wanted
from tests.eviction.plain_models import plain_model
from tests.eviction.reference import PlainModel
from tests.parity.cases import FAMILY_SHAPES, SHAPES
from tests.parity.reference import random_model

# One token; a budget of 8 reached only while decoding; filled by the prompt; neighbours of one
# length; longer.
LENGTHS = (1, 4, 8, 9, 9, 21)
NEW_TOKENS = 12
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64": {"hidden_size": 128, "word_embed_proj_dim": 128, "num_attention_heads": 2},
    **{
        f"llama, heads of {width}": {"model_type": "llama", "head_dim": width}
        for width in (64, 80, 96, 128)
    },
    "head width 15": {"hidden_size": 60, "word_embed_proj_dim": 60},
    "three layers": {"num_hidden_layers": 3},
    "long": {"max_position_embeddings": 256},
    "llama, 16 positions": {"model_type": "llama", "max_position_embeddings": 16},
    "qwen2, windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
# Of models that repeat themselves, or whose heavy columns are the recent ones, with the usual one.
SEEDS = {
    "post-norm, narrow embedding (350m)": 1,
    "qwen3, biases, one kv-head, odd sizes, tied": 4,
    "qwen3, one layer, window filled": 1,
    "qwen3_moe, a narrow MLP in every other layer, tied": 3,
    "qwen3_moe, the first layer an MLP, odd sizes": 3,
}


@dataclass(frozen=True)
class Known:
    folder: Path
    plain: PlainModel
    model: PreTrainedModel


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    """A saved model, by the name of its shape."""

    @cache
    def made(shape: str) -> Known:
        model = random_model(SEEDS.get(shape, 0), **(SHAPES | OTHER_SHAPES | FAMILY_SHAPES)[shape])
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        return Known(folder, plain_model(model), model)

    return made


@pytest.fixture(scope="session")
def reference(known: Callable[[str], Known]) -> Callable[..., Wanted]:
    """What the reference generates, by the names of shape and pair."""

    @cache
    def made(
        shape: str, pair: str, lengths: Sequence[int] = LENGTHS, new_tokens: int = NEW_TOKENS
    ) -> Wanted:
        return wanted(known(shape).plain, PAIRS[pair], lengths, new_tokens)

    return made


@pytest.fixture(autouse=True)
def _plain_cpu(plain_cpu: None) -> None:
    """Every test here."""
