"""lm_eval's own Hugging Face model: what docs/reference/hugging-face.md says of scoring and
generation."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.integrations import disable_h2o, enable_h2o
from tests.extras import needs

TEXTS = (
    (
        "import os\n\n\ndef main(path):\n    with open(path) as file:\n        for line in",
        " file:\n            print(",
    ),
    ("class Queue:\n    def __init__(self):\n", "        self.items = []"),
    ("def add(a, b):\n    return", " a + b"),
)
SIZES = {"heavy_size": 6, "recent_size": 6}


@needs("eval")
@needs("bench")  # lm-eval's Hugging Face backend takes accelerate
def test_loglikelihoods_and_generation() -> None:
    instance = import_module("lm_eval.api.instance").Instance
    harness = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=str(PACKAGED["opt-tiny"]), batch_size=3, dtype="float32", device="cpu"
    )
    scored = [instance("loglikelihood", {}, pair, i) for i, pair in enumerate(TEXTS)]
    until = {"until": ["\n\n\n"], "max_gen_toks": 16}
    written = [
        instance("generate_until", {}, (context, until), i) for i, (context, _) in enumerate(TEXTS)
    ]

    def ask() -> tuple[Any, list[str]]:
        found = [value for value, _ in harness.loglikelihood(scored, disable_tqdm=True)]
        return pytest.approx(found, abs=1e-3), harness.generate_until(written, disable_tqdm=True)

    full, full_texts = ask()
    enable_h2o(harness.model, **SIZES)
    dropped, dropped_texts = ask()
    assert dropped == full.expected and dropped_texts != full_texts
    enable_h2o(harness.model, **SIZES, mode="mask")
    masked, masked_texts = ask()
    assert masked != full.expected and masked_texts == dropped_texts
    harness.batch_size_per_gpu = 1
    assert ask()[0] == masked.expected
    disable_h2o(harness.model)
    assert ask()[0] == full.expected
