"""Convert a Hugging Face folder without a tokenizer for CTranslate2: convert.py FOLDER TARGET
COMPUTE_TYPE.

The words of its vocabulary are made up, one a token id, and listed in TARGET/words.txt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from ctranslate2.converters import TransformersConverter

UNKNOWN = "No conversion is registered"  # how CTranslate2 says that it does not know a model


class MadeUpWords:
    """Answers what the converter asks of a tokenizer."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.words = [f"w{i}" for i in range(config["vocab_size"])]
        self.unk_token = self.words[3]
        ids = [config[f"{name}_token_id"] for name in ("bos", "eos")]
        padding = config.get("pad_token_id")  # LLaMA has none
        ids.append(ids[-1] if padding is None else padding)
        self.bos_token, self.eos_token, self.pad_token = (self.words[i] for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


class Converter(TransformersConverter):  # type: ignore[misc]
    def load_tokenizer(
        self, tokenizer_class: Any, model_name_or_path: str, **kwargs: Any
    ) -> MadeUpWords:
        return MadeUpWords(json.loads((Path(model_name_or_path) / "config.json").read_text()))


def main() -> int:
    source, target, compute_type = sys.argv[1:]
    converter = Converter(source, load_as_float16=False, low_cpu_mem_usage=True)
    try:
        with torch.inference_mode():
            converter.convert(target, quantization=compute_type, force=True)
    except ValueError as error:
        if not str(error).startswith(UNKNOWN):
            raise
        print(f"CTranslate2: {str(error).partition(' (')[0]}", file=sys.stderr)
        return 2
    config = json.loads((Path(source) / "config.json").read_text())
    (Path(target) / "words.txt").write_text("\n".join(MadeUpWords(config).words) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
