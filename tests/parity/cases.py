"""What parity is checked over, as data: model shapes, placements, configurations.

The whole product would take an hour, so it is covered pairwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from flexgen_h2o.core.config import MemoryBudget, Policy

# Three blocks of 16 rows in a matrix, so that a split three ways is one.
COMMON: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": None,
    "pad_token_id": 1,
}
BASE: dict[str, Any] = {
    **COMMON,
    "model_type": "opt",
    "word_embed_proj_dim": 48,
    "ffn_dim": 96,
    "num_attention_heads": 4,
}
_LLAMA: dict[str, Any] = {
    **COMMON,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rope_theta": 100.0,
}
# By the model_type of transformers' config.
BASES: dict[str, dict[str, Any]] = {
    "opt": BASE,
    "llama": {**_LLAMA, "model_type": "llama"},
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "qwen3": {**_LLAMA, "model_type": "qwen3"},
    "qwen3_moe": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "olmoe": {
        **COMMON,
        "model_type": "olmoe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 32,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_theta": 100.0,
    },
    "gpt_oss": {
        **_LLAMA,
        "model_type": "gpt_oss",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "sliding_window": 8,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "gpt_neox": {
        **COMMON,
        "model_type": "gpt_neox",
        "intermediate_size": 96,
        "num_attention_heads": 3,
        "rotary_pct": 0.25,
        "rotary_emb_base": 100,
    },
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"model_type": "llama", "rope_scaling": {"rope_type": kind, "factor": 4.0, **values}}


# What each row changes of the base of its model_type; OPT where it names none.
SHAPES: dict[str, dict[str, Any]] = {
    "normal": {},
    "post-norm, narrow embedding (350m)": {
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 32,
    },
    "odd sizes": {
        "hidden_size": 60,
        "word_embed_proj_dim": 60,
        "num_attention_heads": 3,
        "ffn_dim": 83,
        "vocab_size": 127,
    },
    "one layer": {"num_hidden_layers": 1},
    "no bias, gelu (Galactica)": {"enable_bias": False, "activation_function": "gelu"},
    "norms without weights, none at the end": {
        "layer_norm_elementwise_affine": False,
        "_remove_final_layer_norm": True,
    },
    "untied head": {"tie_word_embeddings": False},
}

_ODD = {
    "num_key_value_heads": 1,
    "hidden_size": 66,
    "head_dim": 10,
    "intermediate_size": 83,
    "vocab_size": 127,
}
# Of the other families.
FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, a kv-head for each query head, tied": {
        "model_type": "llama",
        "num_key_value_heads": 6,
        "head_dim": None,
        "tie_word_embeddings": True,
    },
    "llama, one kv-head, odd sizes": {"model_type": "llama", **_ODD},
    "llama, biases, one layer, gelu": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_hidden_layers": 1,
        "hidden_act": "gelu",
    },
    "llama, rope linear": _rope("linear"),
    "llama, rope dynamic, positions filled": {**_rope("dynamic"), "max_position_embeddings": 16},
    "llama, rope llama3": _rope(
        "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "llama, rope yarn": _rope("yarn", original_max_position_embeddings=16),
    "mistral, windows": {"model_type": "mistral", "sliding_window": 7},
    "qwen2, windows of some layers": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen2": {"model_type": "qwen2", "head_dim": 8},
    "qwen3": {"model_type": "qwen3"},
    "qwen3, biases, one kv-head, odd sizes, tied": {
        "model_type": "qwen3",
        "attention_bias": True,
        "tie_word_embeddings": True,
        **_ODD,
    },
    "qwen3, one layer, window filled": {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 0,
    },
    "qwen3_moe": {"model_type": "qwen3_moe"},
    "qwen3_moe, a narrow MLP in every other layer, tied": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "intermediate_size": 16,
    },
    "qwen3_moe, the first layer an MLP, odd sizes": {
        "model_type": "qwen3_moe",
        "mlp_only_layers": [0],
        "num_experts": 5,
        "num_experts_per_tok": 1,
        "hidden_size": 68,
        "head_dim": 10,
        "moe_intermediate_size": 20,
        "num_key_value_heads": 1,
        "vocab_size": 127,
    },
    "mixtral": {"model_type": "mixtral"},
    "mixtral, one layer, all experts chosen": {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "num_experts_per_tok": 4,
        "hidden_act": "gelu",
        "attention_bias": True,  # of other families, and nothing to transformers
    },
    "olmoe": {"model_type": "olmoe"},
    "gpt_oss": {"model_type": "gpt_oss", "swiglu_limit": 1.5},
    "gpt_oss, one layer, one expert a token, odd sizes": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 1,
        "num_local_experts": 5,
        "num_experts_per_tok": 1,
        "hidden_size": 68,
        "head_dim": 10,
        "intermediate_size": 19,
        "num_key_value_heads": 1,
        "vocab_size": 127,
    },
    "gpt_oss, all experts chosen, no biases": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "attention_bias": False,
        "num_key_value_heads": 6,
        "rope_scaling": None,
    },
    "gpt_neox": {"model_type": "gpt_neox"},
    "gpt_neox, one after the other": {
        "model_type": "gpt_neox",
        "use_parallel_residual": False,
        "hidden_act": "gelu_fast",
        "rotary_pct": 1.0,
    },
    "gpt_neox, no bias, odd sizes, tied": {
        "model_type": "gpt_neox",
        "attention_bias": False,
        "hidden_size": 66,
        "intermediate_size": 83,
        "vocab_size": 127,
        "tie_word_embeddings": True,
        "rotary_pct": 0.4,
    },
}

# Shares of weights, KV cache and hidden states on device and host; the rest is on disk.
PLACEMENTS: dict[str, tuple[int, int, int, int, int, int]] = {
    "all on device": (100, 0, 100, 0, 100, 0),
    "all on host": (0, 100, 0, 100, 0, 100),
    "all on disk": (0, 0, 0, 0, 0, 0),
    "everything split 30/30": (30, 30, 30, 30, 30, 30),
    "weights on host": (0, 100, 100, 0, 100, 0),
    "weights on disk": (0, 0, 100, 0, 100, 0),
    "weights split three ways": (40, 30, 100, 0, 100, 0),
    "kv on host": (100, 0, 0, 100, 100, 0),
    "kv on disk": (100, 0, 0, 0, 100, 0),
    "kv split three ways": (100, 0, 40, 30, 100, 0),
    "kv on host and disk": (100, 0, 0, 60, 100, 0),
    "hidden on host": (100, 0, 100, 0, 0, 100),
    "hidden on disk": (100, 0, 100, 0, 0, 0),
    "hidden split three ways": (100, 0, 100, 0, 40, 30),
    "device and disk in halves": (50, 0, 50, 0, 50, 0),
    "each kind elsewhere": (20, 0, 0, 60, 0, 100),
}


@dataclass(frozen=True)
class Configuration:
    """A policy but for its placement. `stand_in`: a device tier of ordinary memory, else the device
    is host memory."""

    gbs: int
    num_batches: int
    stand_in: bool = False
    switches: dict[str, bool] = field(default_factory=dict)

    def policy(self, percent: tuple[int, int, int, int, int, int], **more: Any) -> Policy:
        return Policy(self.gbs, self.num_batches, percent, **self.switches, **more)

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget("64MiB" if self.stand_in else None, "64MiB", "64MiB")


# Five prompts: no block but "one batch" is filled evenly.
CONFIGURATIONS: dict[str, Configuration] = {
    "2x2": Configuration(2, 2),
    "one batch, sequential": Configuration(8, 1, switches={"overlap": False}),
    "3x1, joined": Configuration(3, 1, switches={"sep_layer": False}),
    "1x3, sequential, joined": Configuration(1, 3, switches={"overlap": False, "sep_layer": False}),
    "2x3, attends on host": Configuration(2, 3, switches={"cpu_cache_compute": True}),
    "device, 2x2": Configuration(2, 2, True),
    "device, 1x4": Configuration(1, 4, True),
    "device, 2x3, sequential": Configuration(2, 3, True, {"overlap": False}),
    "device, 4x1, joined": Configuration(4, 1, True, {"sep_layer": False}),
    "device, 2x3, attends on host": Configuration(2, 3, True, {"cpu_cache_compute": True}),
    "device, 5x1, attends on host, sequential, joined": Configuration(
        5, 1, True, {"cpu_cache_compute": True, "overlap": False, "sep_layer": False}
    ),
}


def thinned(cases: Iterable[Any], one_in: int) -> list[Any]:
    """All cases, values or tuples of them; the default suite runs one in so many, the nightly one
    the others too (scripts/nightly.sh)."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if i % one_in else [])
        for i, case in enumerate(tuples)
    ]


# Shapes that matter to where things lie; with the Latin square below each of them meets every
# placement.
LAID_OUT = (
    "normal",
    "post-norm, narrow embedding (350m)",
    "odd sizes",
    "one layer",
    "untied head",
    "llama",
    "llama, one kv-head, odd sizes",
    "gpt_oss",
    "qwen3",
    "gpt_neox",
    "gpt_neox, one after the other",
)


def pairwise_cases() -> Iterator[tuple[str, str, str]]:
    """(shape, placement, configuration): every pair of any two, for the shapes of LAID_OUT; the
    others, which only compute differently, all split and at one placement more."""
    placements = list(PLACEMENTS)
    configurations = list(CONFIGURATIONS)
    for p, placement in enumerate(placements):
        for c, configuration in enumerate(configurations):
            yield LAID_OUT[(p + c) % len(LAID_OUT)], placement, configuration
    for s, shape in enumerate(name for name in (*SHAPES, *FAMILY_SHAPES) if name not in LAID_OUT):
        yield shape, "everything split 30/30", configurations[s % len(configurations)]
        yield shape, placements[s % len(placements)], configurations[(s + 5) % len(configurations)]
