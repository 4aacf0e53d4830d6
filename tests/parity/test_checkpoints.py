"""Every way a checkpoint may be stored, computed in fp32, and the model that we ship."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTForCausalLM

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

STORED = ("weights on disk", "weights split three ways", "all on device")


def save_safetensors(
    source: Path, folder: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]
) -> None:
    """`source`'s checkpoint with changed names or values."""
    shutil.copy(source / "config.json", folder)
    state = dict(
        change(name, value) for name, value in load_file(source / "model.safetensors").items()
    )
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("dtype", "placement"),
    zip((torch.bfloat16, torch.float16, torch.bfloat16), STORED, strict=True),
)
def test_half_precision_checkpoint_in_fp32(
    dtype: torch.dtype, placement: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    known = reference("normal")
    folder = tmp_path / "model"
    folder.mkdir()
    save_safetensors(known.folder, folder, lambda name, value: (name, value.to(dtype)))
    model = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    params = SamplingParams(max_tokens=5)
    out = run(
        folder, known.prompts, Policy(2, 2, PLACEMENTS[placement]), tmp_path / "offload", params
    )
    assert tokens_of(out) == [greedy(model, p, 5) for p in known.prompts]


def bin_file(known: Reference, folder: Path) -> None:
    shutil.copy(known.folder / "config.json", folder)
    torch.save(known.model.state_dict(), folder / "pytorch_model.bin")


def sharded(known: Reference, folder: Path) -> None:
    known.model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 3


def sharded_bin(known: Reference, folder: Path) -> None:
    shutil.copy(known.folder / "config.json", folder)
    state = list(known.model.state_dict().items())
    halves = {
        "pytorch_model-00001-of-00002.bin": dict(state[::2]),
        "pytorch_model-00002-of-00002.bin": dict(state[1::2]),
    }
    for name, half in halves.items():
        torch.save(half, folder / name)
    weight_map = {tensor: name for name, half in halves.items() for tensor in half}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def without_prefix(known: Reference, folder: Path) -> None:
    """As facebook's own files: the bare decoder, without its head."""
    save_safetensors(known.folder, folder, lambda name, value: (name.removeprefix("model."), value))


def at_odd_bytes(known: Reference, folder: Path) -> None:
    """safetensors promises no alignment: a header that is a byte longer moves every value to an odd
    address."""
    shutil.copy(known.folder / "config.json", folder)
    data = (known.folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    odd = length + 1 - length % 2
    header = data[8 : 8 + length].ljust(odd)
    (folder / "model.safetensors").write_bytes(
        odd.to_bytes(8, "little") + header + data[8 + length :]
    )


@pytest.mark.parametrize(
    ("store", "placement"),
    [
        (bin_file, STORED[1]),
        (sharded, STORED[0]),
        (sharded_bin, STORED[2]),
        (without_prefix, STORED[0]),
        *((at_odd_bytes, placement) for placement in STORED),
    ],
)
def test_stored_as(
    store: Callable[[Reference, Path], None],
    placement: str,
    reference: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    known = reference("normal")
    folder = tmp_path / "model"
    folder.mkdir()
    store(known, folder)
    params = SamplingParams(max_tokens=len(known.tokens[0]))
    out = run(
        folder, known.prompts, Policy(2, 2, PLACEMENTS[placement]), tmp_path / "offload", params
    )
    assert tokens_of(out) == known.tokens


def test_a_tied_model_with_a_head_of_its_own(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """transformers ties where the two are equal, and else uses both, whatever the config says."""
    known = reference("llama, a kv-head for each query head, tied")
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(known.folder / "config.json", folder)
    stored = load_file(known.folder / "model.safetensors")
    params = SamplingParams(max_tokens=5)

    def tokens(head: torch.Tensor) -> list[list[int]]:
        save_file(
            {**stored, "lm_head.weight": head},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        return tokens_of(run(folder, known.prompts, Policy(2, 3), tmp_path / "offload", params))

    table = stored["model.embed_tokens.weight"]
    assert tokens(table.clone()) == known.tokens
    other = tokens(table.flip(0))
    want = [
        greedy(AutoModelForCausalLM.from_pretrained(folder), prompt, 5) for prompt in known.prompts
    ]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert tokens(table.flip(0)) == want == other != known.tokens


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
