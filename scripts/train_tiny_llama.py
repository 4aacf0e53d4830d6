"""Train a small LLaMA with grouped queries on rows of 256 tokens. Data, seeds and output:
tiny_training.py.

It is not shipped: it is what streaming past the trained length is shown on (docs/lab/quality.md).

    python scripts/train_tiny_llama.py --output FOLDER

Rotary positions have no table that ends, so the configuration allows 16 times the trained length: a
full cache may be asked to go there, and its predictions collapse.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
from pathlib import Path

from tiny_training import Recipe, parser, train
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 256
POSITIONS = 16 * CONTEXT


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        intermediate_size=(8 * args.width // 3 + 63) // 64 * 64,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


RECIPE = Recipe(
    name="llama-tiny",
    family="LLaMA",
    purpose="what streaming past the trained length is shown on",
    script=Path(__file__).name,
    short=(16, CONTEXT),
    long=(16, CONTEXT),
    build=build_model,
)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kv-heads", type=int, default=2)
    options.set_defaults(output=Path("llama-tiny"), steps=1400, short_share=0.0, layers=4)
    train(RECIPE, options.parse_args())


if __name__ == "__main__":
    main()
