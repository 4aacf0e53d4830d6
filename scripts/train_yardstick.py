"""Train a yardstick of the KV frontier: an OPT, or a LLaMA with grouped queries, with a context of
2,048, on source text, recall, copying and chains of several hops. Data, seeds and output:
tiny_training.py. Not shipped. The OPT goes on from the shipped opt-tiny, whose positions are
repeated; half an hour each on two cores with bf16 instructions.

    python scripts/train_yardstick.py llama --layers 4 --heads 4 --steps 2400 --output FOLDER
    python scripts/train_yardstick.py opt --init-from flexgen_h2o/assets/opt-tiny --steps 600 --short-share 0 \
        --peak-rate 1e-3 --seed 1 --output FOLDER
"""  # noqa: E501

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import sys
from pathlib import Path

from tiny_training import TASKS, Recipe, parser, train
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

CONTEXT = 2048


def build_opt(args: argparse.Namespace) -> PreTrainedModel:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=args.vocab_size,
            hidden_size=args.width,
            num_hidden_layers=args.layers,
            ffn_dim=4 * args.width,
            num_attention_heads=args.heads,
            max_position_embeddings=CONTEXT,
            word_embed_proj_dim=args.width,
            dropout=0.0,
            attention_dropout=0.0,
            layerdrop=0.0,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=2,
        )
    )


def build_llama(args: argparse.Namespace) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab_size,
            hidden_size=args.width,
            num_hidden_layers=args.layers,
            intermediate_size=(8 * args.width // 3 + 63) // 64 * 64,
            num_attention_heads=args.heads,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=True,
        )
    )


def recipe_of(family: str) -> Recipe:
    name, build = {"opt": ("OPT", build_opt), "llama": ("LLaMA with grouped queries", build_llama)}[
        family
    ]
    return Recipe(
        name=f"{family}-yardstick",
        family=name,
        purpose="what KV eviction and compression are measured on at 512 to 2,048 columns",
        script=f"{Path(__file__).name} {family}",
        short=(8, 512),
        long=(2, CONTEXT),
        build=build,
        tasks=TASKS,
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("family", choices=("opt", "llama"))
    options.set_defaults(steps=3600, short_share=0.6, layers=6)
    args = options.parse_args()
    if args.output is None:
        sys.exit("--output: is missing; give the folder to write")
    train(recipe_of(args.family), args)


if __name__ == "__main__":
    main()
