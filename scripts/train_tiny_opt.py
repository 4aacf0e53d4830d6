"""Train the small OPT that the package ships (`--model opt-tiny`). Data, seeds and output:
tiny_training.py.

    python scripts/train_tiny_opt.py --output FOLDER
    python scripts/train_tiny_opt.py --output flexgen_h2o/assets/opt-tiny --init-from FOLDER --steps 600 \\
        --peak-rate 1e-3 --short-share 0 --seed 1

made the shipped model: a first run mostly on short rows, and a second one on rows of the full
context.
"""  # noqa: E501

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
from pathlib import Path

from tiny_training import Recipe, parser, train
from transformers import OPTConfig, OPTForCausalLM

CONTEXT = 1024


def build_model(args: argparse.Namespace) -> OPTForCausalLM:
    config = OPTConfig(
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
        do_layer_norm_before=True,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    return OPTForCausalLM(config)


RECIPE = Recipe(
    name="opt-tiny",
    family="OPT",
    purpose="embedded default, parity fixture and quality yardstick",
    script=Path(__file__).name,
    short=(12, 384),  # cheap rows first, then the full context so that every position is trained
    long=(5, CONTEXT),
    build=build_model,
)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(
        output=Path("flexgen_h2o/assets/opt-tiny"), steps=2800, short_share=0.7, layers=6
    )
    train(RECIPE, options.parse_args())


if __name__ == "__main__":
    main()
