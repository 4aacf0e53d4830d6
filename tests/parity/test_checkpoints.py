"""Every way a checkpoint may be stored, computed in fp32, and the model that we ship."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, OPTForCausalLM

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.checkpoint.resolve import PACKAGED
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import (
    LOGIT_TOLERANCE,
    LogitsByRow,
    Reference,
    greedy,
    run,
    teacher_forced,
    tokens_of,
)


@pytest.mark.parametrize(
    "placement", ["weights on disk", "weights split three ways", "all on device"]
)
def test_at_odd_bytes(
    placement: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """safetensors promises no alignment: a header that is a byte longer moves every value to an odd
    address. (Names, dtypes and files are those of test_layouts.py.)"""
    known = reference("normal")
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(known.folder / "config.json", folder)
    data = (known.folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    odd = length + 1 - length % 2
    header = odd.to_bytes(8, "little") + data[8 : 8 + length].ljust(odd)
    (folder / "model.safetensors").write_bytes(header + data[8 + length :])
    params = SamplingParams(max_tokens=len(known.tokens[0]))
    policy = Policy(2, 2, PLACEMENTS[placement])
    out = run(folder, known.prompts, policy, tmp_path / "offload", params)
    assert tokens_of(out) == known.tokens


TEXTS = [
    "def main(argv=None):\n    ",
    "import",
    "class Queue:\n    def put(self, item):\n        self.",
]


def test_shipped_model(tmp_path: Path) -> None:
    folder = PACKAGED["opt-tiny"]
    new = 10
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    watch = LogitsByRow()
    eos = model.config.eos_token_id
    with LLM(
        "opt-tiny", Policy(2, 2, (20, 0, 0, 50, 100, 0)), dtype="float32", offload_dir=tmp_path
    ) as llm:
        out = llm.generate(TEXTS, SamplingParams(max_tokens=new), watch_logits=watch)
    for row, (prompt, one) in enumerate(zip(prompts, out, strict=True)):
        assert one.token_ids == greedy(model, prompt, new, eos)
        assert one.text == tokenizer.decode(one.token_ids, skip_special_tokens=True)
        want = teacher_forced(model, prompt, one.token_ids)
        assert (torch.stack(watch.rows[row]) - want).abs().max() <= LOGIT_TOLERANCE
