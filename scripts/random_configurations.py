#!/usr/bin/env python3
"""Tokens of random configurations, so that a change that should alter none can show it.

    python scripts/random_configurations.py --output before.json      (at one commit)
    python scripts/random_configurations.py --compare before.json     (at another: exit 1 where a token differs)

A configuration is a family, a placement, an eviction policy, a compression, a dtype and refill or
not, and of mixtures how many experts move as one, drawn from its index alone; the models are random
and a few hundred kilobytes large. Both runs must be on the same machine: kernels round as its
vector width has it.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_attention_heads": 4},
    "llama": {
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 100.0,
    },
    "gpt_neox": {"intermediate_size": 128, "num_attention_heads": 4, "rotary_pct": 0.25},
    "qwen3_moe": {
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "rope_theta": 100.0,
    },
    "mixtral": {
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_theta": 100.0,
    },
    "olmoe": {
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "rope_theta": 100.0,
    },
    "gpt_oss": {
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "sliding_window": 8,
        "rope_scaling": None,
    },
}
MIXTURES = tuple(family for family, shape in FAMILIES.items() if "num_experts_per_tok" in shape)
EVICTIONS = (
    None,
    "h2o",
    "h2o:heavy_ratio=0.3,recent_ratio=0.2",
    "h2o-norm",
    "h2o-norm:sinks=0",
    "local",
    "tova",
    "snapkv",
    "random",
)


def draw(index: int) -> dict[str, Any]:
    """The configuration of an index, as JSON values."""
    rng = random.Random(index)

    def shares() -> list[int]:
        device = rng.choice((0, 0, 30, 50, 100))
        return [device, rng.choice((0, 30, 100 - device)) if device < 100 else 0]

    packs_cache = rng.random() < 0.3
    weights = rng.choice(
        (
            {},
            {},
            {"compress_weight": True, "weight_bits": rng.choice((4, 8))},
            {"int8_compute": True},
        )
    )
    family = rng.choice(tuple(FAMILIES))
    return {
        "family": family,
        "eviction": rng.choice(EVICTIONS),
        "dtype": rng.choice(("float32", "float32", "bfloat16")),
        "refill": rng.random() < 0.5,
        "device_budget": rng.random() < 0.5,  # a device tier of its own, in ordinary memory
        "prompts": [rng.randint(1, 40) for _ in range(rng.randint(1, 9))],
        "max_tokens": [rng.randint(1, 16) for _ in range(9)],
        "policy": {
            "gpu_batch_size": rng.randint(1, 4),
            "num_gpu_batches": rng.randint(1, 3),
            "percent": [*shares(), *shares(), *shares()],
            "overlap": rng.random() < 0.7,
            "sep_layer": rng.random() < 0.5,
            "cpu_cache_compute": rng.random() < 0.3,
            **({"compress_cache": True, "cache_bits": rng.choice((4, 8))} if packs_cache else {}),
            **weights,
            **({"expert_group": rng.choice((0, 1, 3))} if family in MIXTURES else {}),
        },
    }


def make_models(folder: Path) -> dict[str, Path]:
    """A random checkpoint of each family, the same at every call."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {}
    for family, shape in FAMILIES.items():
        common = {
            "vocab_size": 200,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "max_position_embeddings": 64,
        }
        config = AutoConfig.for_model(
            family, **common, **shape, bos_token_id=2, eos_token_id=7, pad_token_id=1
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.normal_(0, 0.2, generator=generator)
                if name.endswith("norm.weight"):
                    value.add_(1)
        made[family] = folder / family
        model.save_pretrained(made[family])
    return made


def tokens_of(configuration: dict[str, Any], model: Path, scratch: Path) -> list[list[int]] | str:
    """Return what each prompt got; the message where the configuration is refused."""
    from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
    from flexgen_h2o.kvcache.eviction import make_eviction

    rng = random.Random(len(configuration["prompts"]))
    prompts = [
        [rng.randrange(8, 200) for _ in range(length)] for length in configuration["prompts"]
    ]
    params = [SamplingParams(max_tokens=n) for n in configuration["max_tokens"][: len(prompts)]]
    asked = configuration["eviction"]
    name, _, settings = (asked or "").partition(":")
    given = {
        key: float(value)
        for key, value in (pair.split("=") for pair in settings.split(",") if pair)
    }
    budget = MemoryBudget("64MiB" if configuration["device_budget"] else None, "64MiB", "64MiB")
    policy = {**configuration["policy"], "percent": tuple(configuration["policy"]["percent"])}
    try:
        with LLM(
            model,
            Policy(**policy),
            make_eviction(name, **given) if asked else None,
            device="cpu",
            dtype=configuration["dtype"],
            budget=budget,
            offload_dir=scratch,
        ) as llm:
            done = llm.generate(prompts, params, refill=configuration["refill"])
    except ValueError as error:
        return f"refused: {error}"
    return [list(completion.token_ids) for completion in done]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="configurations (200)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write configurations and tokens as JSON"
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a file that --output wrote")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        found = []
        for index in range(args.count):
            drawn = draw(index)
            found.append(
                drawn
                | {"tokens": tokens_of(drawn, models[drawn["family"]], Path(folder) / "scratch")}
            )
    if args.output:
        args.output.write_text(json.dumps(found))
    differ = []
    if args.compare:
        before = json.loads(args.compare.read_text())[: args.count]
        pairs = zip(before, found, strict=True)
        differ = [i for i, (a, b) in enumerate(pairs) if a["tokens"] != b["tokens"]]
        for i in differ[:5]:
            print(json.dumps({**found[i], "before": before[i]["tokens"]}))
    refused = sum(isinstance(one["tokens"], str) for one in found)
    print(f"{len(found)} configurations, {refused} refused, {len(differ)} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
