"""Every way a checkpoint may be stored, computed in fp32, and the model that we ship."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTForCausalLM

from flexgen_h2o import MemoryBudget, Policy, SamplingParams
from flexgen_h2o.checkpoint.resolve import PACKAGED
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import (
    ByShape,
    LogitsByRow,
    Reference,
    assert_equal,
    greedy,
    opened,
    run,
    teacher_forced,
    tokens_of,
)


def save_safetensors(
    source: Path, folder: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]
) -> None:
    """`source`'s checkpoint with changed names or values."""
    shutil.copy(source / "config.json", folder)
    state = dict(
        change(name, value) for name, value in load_file(source / "model.safetensors").items()
    )
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def sharded(known: Reference, folder: Path) -> None:
    known.model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 3


def without_prefix(known: Reference, folder: Path) -> None:
    """As facebook's own files: the bare decoder, without its head."""
    save_safetensors(known.folder, folder, lambda name, value: (name.removeprefix("model."), value))


def in_bin_files(known: Reference, folder: Path) -> None:
    shutil.copy(known.folder / "config.json", folder)
    state = list(known.model.state_dict().items())
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    weight_map = {}
    for i, name in enumerate(names):
        half = dict(state[i::2])
        torch.save(half, folder / name)
        weight_map |= dict.fromkeys(half, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def in_one_bin_file(known: Reference, folder: Path) -> None:
    shutil.copy(known.folder / "config.json", folder)
    torch.save(known.model.state_dict(), folder / "pytorch_model.bin")


def at_odd_bytes(known: Reference, folder: Path) -> None:
    """safetensors promises no alignment: a header that is a byte longer moves every value to an odd
    address."""
    shutil.copy(known.folder / "config.json", folder)
    data = (known.folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    odd = end - 8 + 1 - end % 2
    header = odd.to_bytes(8, "little") + data[8:end].ljust(odd)
    (folder / "model.safetensors").write_bytes(header + data[end:])


@pytest.mark.parametrize(
    ("store", "placement"),
    [
        (in_one_bin_file, "weights split three ways"),
        (in_bin_files, "all on device"),
        (sharded, "weights on disk"),
        (without_prefix, "weights on disk"),
        (at_odd_bytes, "weights split three ways"),
        (at_odd_bytes, "all on device"),
    ],
)
def test_stored_as(
    store: Callable[[Reference, Path], None],
    placement: str,
    reference: ByShape,
    tmp_path: Path,
) -> None:
    known = reference("normal")
    folder = tmp_path / "model"
    folder.mkdir()
    store(known, folder)
    policy = Policy(2, 2, PLACEMENTS[placement])
    assert_equal(replace(known, folder=folder), policy, MemoryBudget(), tmp_path / "offload")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint_in_fp32(
    dtype: torch.dtype, reference: ByShape, tmp_path: Path
) -> None:
    known = reference("normal")
    folder = tmp_path / "model"
    folder.mkdir()
    save_safetensors(known.folder, folder, lambda name, value: (name, value.to(dtype)))
    model = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    policy = Policy(2, 2, PLACEMENTS["weights split three ways"])
    out = run(folder, known.prompts, policy, tmp_path / "offload", SamplingParams(max_tokens=5))
    assert tokens_of(out) == [greedy(model, p, 5) for p in known.prompts]


def test_a_tied_model_with_a_head_of_its_own(reference: ByShape, tmp_path: Path) -> None:
    """transformers ties where the two are equal, and else uses both, whatever the config says."""
    known = reference("llama, a kv-head for each query head, tied")
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((known.folder / "config.json").read_text())
    stored = load_file(known.folder / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    params = SamplingParams(max_tokens=5)
    for head, says_tied in ((table, True), (table.flip(0), True), (table.flip(0), False)):
        state = {**stored, "lm_head.weight": head.clone()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": says_tied}))
        model = AutoModelForCausalLM.from_pretrained(folder)
        found = tokens_of(run(folder, known.prompts, Policy(2, 3), tmp_path / "offload", params))
        assert found == [greedy(model, prompt, 5) for prompt in known.prompts]
        assert (found == known.tokens) is (head is table)


def test_shipped_model(tmp_path: Path) -> None:
    folder = PACKAGED["opt-tiny"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = ["def main(argv=None):\n    ", "import", "class Queue:\n    def put(self, item):"]
    watch = LogitsByRow()
    with opened(Path("opt-tiny"), Policy(2, 2, (20, 0, 0, 50, 100, 0)), tmp_path) as llm:
        out = llm.generate(texts, SamplingParams(max_tokens=10), watch_logits=watch)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    for prompt, one in zip(prompts, out, strict=True):
        assert one.token_ids == greedy(model, prompt, 10, model.config.eos_token_id)
        assert one.text == tokenizer.decode(one.token_ids, skip_special_tokens=True)
    pairs = zip(prompts, out, strict=True)
    watch.check([teacher_forced(model, prompt, one.token_ids) for prompt, one in pairs])
