"""Checkpoints laid out in any way that transformers loads give transformers' tokens.

A layout is drawn from its index alone. The default suite takes a few; `scripts/slow_tests.sh` takes
LAYOUTS of them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.models import load
from tests.parity.cases import BASES, PLACEMENTS
from tests.parity.layouts import lay_out
from tests.parity.quantisers import QUANTISERS, save_quantised
from tests.parity.reference import (
    MIN_GAP,
    Reference,
    greedy,
    random_model,
    random_prompts,
    run,
    teacher_forced,
    tokens_of,
)
from tests.text.tiny import edit_json

LAYOUTS = 300
FEW = 20
CHUNK = 40
NEW_TOKENS = 4
PROMPTS = random_prompts((6, 3))


@cache
def source(kind: str, tied: bool) -> PreTrainedModel:
    return random_model(3, model_type=kind, tie_word_embeddings=tied)


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def move_to_odd_bytes(path: Path) -> None:
    """safetensors promises no alignment: a header that is a byte longer moves every value to an odd
    address, which transformers does not read."""
    data = path.read_bytes()
    path.unlink()  # a model of transformers may have mapped it
    length = int.from_bytes(data[:8], "little")
    odd = length + 1 - length % 2
    path.write_bytes(
        odd.to_bytes(8, "little") + data[8 : 8 + length].ljust(odd) + data[8 + length :]
    )


def check_layout(number: int, folder: Path, offload: Path) -> None:
    rng = random.Random(number)
    kind = rng.choice(sorted(BASES))
    made = lay_out(rng, source(kind, rng.random() < 0.5), folder)
    theirs = loaded(folder)
    want = [greedy(theirs, prompt, NEW_TOKENS) for prompt in PROMPTS]
    if rng.random() < 0.5:
        for path in folder.glob("*.safetensors"):
            move_to_odd_bytes(path)
    policy = Policy(2, 1, PLACEMENTS[rng.choice(sorted(PLACEMENTS))])
    got = tokens_of(run(folder, PROMPTS, policy, offload, SamplingParams(max_tokens=NEW_TOKENS)))
    if got == want:
        return
    best = (
        torch.cat([teacher_forced(theirs, p, t) for p, t in zip(PROMPTS, want, strict=True)])
        .topk(2)
        .values
    )
    assert (best[:, 0] - best[:, 1]).min() < MIN_GAP, (number, kind, made.said, want, got)


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(FEW, LAYOUTS, CHUNK))]
)
def test_any_layout_that_transformers_loads(start: int, tmp_path: Path) -> None:
    end = FEW if start == 0 else min(start + CHUNK, LAYOUTS)
    for number in range(start, end):
        check_layout(number, tmp_path / str(number), tmp_path / "offload")


# ---- What the files say besides


def stderr_lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("# ")]


@pytest.fixture
def copy_of(reference: Callable[[str], Reference], tmp_path: Path) -> Callable[[str], Path]:
    """A model's folder that a test may change."""

    def copied(shape: str) -> Path:
        say_once.cache_clear()
        return Path(shutil.copytree(reference(shape).folder, tmp_path / "model"))

    return copied


def generated(folder: Path, tmp_path: Path) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW_TOKENS)
    return tokens_of(run(folder, PROMPTS, Policy(2, 1), tmp_path / "off", params))


def assert_tokens(folder: Path, tmp_path: Path) -> None:
    theirs = loaded(folder)
    want = [greedy(theirs, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert generated(folder, tmp_path) == want


def test_at_odd_bytes(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where all is fp32, so that bytes on disk are otherwise computed with as they are."""
    folder = copy_of("normal")
    want = generated(folder, tmp_path)
    move_to_odd_bytes(folder / "model.safetensors")
    policy = Policy(2, 2, PLACEMENTS["weights on disk"])
    out = run(folder, PROMPTS, policy, tmp_path / "off", SamplingParams(max_tokens=NEW_TOKENS))
    assert tokens_of(out) == want


def test_what_is_not_used_is_said(
    copy_of: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensors, and an adapter beside the model; not settings of a quantiser, which are of the
    checkpoint that was quantised."""
    folder = copy_of("llama")
    want = [greedy(loaded(folder), prompt, NEW_TOKENS) for prompt in PROMPTS]
    path = folder / "model.safetensors"
    biases = {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(144) for i in range(2)}
    save_file(load_file(path) | biases, path, metadata={"format": "pt"})
    save_file({"lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    capfd.readouterr()
    assert generated(folder, tmp_path) == want
    said = "".join(stderr_lines(capfd))
    assert "'model.layers.0.self_attn.q_proj.bias' and 1 more" in said
    assert "adapter_config.json" in said and "quant" not in said
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"holds an adapter \(adapter_config.json\)"):
        LLM(str(folder))


# `is_zipped` None: a safetensors file.
@pytest.mark.parametrize(
    ("differs", "is_sharded", "is_zipped"),
    [(True, False, None), (True, True, True), (True, False, False), (False,) * 3],
)
def test_a_head_beside_a_tied_table(
    differs: bool,
    is_sharded: bool,
    is_zipped: bool | None,
    copy_of: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Files of torch before 1.6 cannot be mapped, and count all the same."""
    folder = copy_of("llama, a kv-head for each query head, tied")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    table = tensors["model.embed_tokens.weight"]
    head = {"lm_head.weight": table.flip(0).contiguous() if differs else table.clone()}
    parts = {"pytorch_model.bin": tensors | head}
    if is_sharded:
        parts = {"pytorch_model-0.bin": tensors, "pytorch_model-1.bin": head}
        weight_map = {name: shard for shard, part in parts.items() for name in part}
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "pytorch_model.bin.index.json").write_text(index)
    for shard, part in parts.items():
        if is_zipped is None:
            save_file(part, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            torch.save(part, folder / shard, _use_new_zipfile_serialization=is_zipped)
    assert_tokens(folder, tmp_path)
    said = [line for line in stderr_lines(capfd) if "has a head with other numbers" in line]
    assert len(said) == differs


@pytest.mark.parametrize("name", ["fp8", "4 bits, groups", "mxfp4"])
def test_a_head_of_its_own_beside_quantised_matrices(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The config ties it. Nothing that the format stores is said to be unused, shapes of matrices
    included."""
    quantiser = QUANTISERS[name]
    folder = tmp_path / "m"
    model = random_model(2, **(dict(quantiser.shape) | {"tie_word_embeddings": False}))
    save_quantised(model, folder, quantiser)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    capfd.readouterr()
    assert generated(folder, tmp_path) == [greedy(model, one, NEW_TOKENS) for one in PROMPTS]
    [line] = stderr_lines(capfd)
    assert "has a head with other numbers than the embedding that config.json ties it to" in line


GPTQ_FILE = {"bits": 4, "group_size": 16, "desc_act": False, "sym": True, "damp_percent": 0.01}
AWQ_FILE = {"zero_point": True, "q_group_size": 24, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("name", "file", "settings"),
    [("gptq", "quantize_config.json", GPTQ_FILE), ("awq", "quant_config.json", AWQ_FILE)],
)
def test_settings_of_a_quantiser_in_a_file_of_their_own(
    name: str, file: str, settings: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """AutoGPTQ's and AutoAWQ's, where config.json has no quantization_config."""
    say_once.cache_clear()
    folder = tmp_path / "model"
    model = random_model(2, **QUANTISERS[name].shape)
    save_quantised(model, folder, QUANTISERS[name])
    edit_json(folder / "config.json", quantization_config=None)
    with pytest.raises(UsageError, match=r"quantised \(GPTQ or AWQ\), and config.json has no"):
        generated(folder, tmp_path)
    edit_json(folder / file, **settings)
    capfd.readouterr()
    assert generated(folder, tmp_path) == [greedy(model, one, NEW_TOKENS) for one in PROMPTS]
    [line] = stderr_lines(capfd)
    assert "read as quantization_config, which config.json does not have" in line


def test_settings_of_two_files_that_differ_are_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """config.json counts. A setting that it means without words is not another one."""
    say_once.cache_clear()
    folder = tmp_path / "model"
    save_quantised(random_model(2, **QUANTISERS["gptq"].shape), folder, QUANTISERS["gptq"])
    edit_json(folder / "config.json", quantization_config=GPTQ_FILE | {"quant_method": "gptq"})
    for more, count in (({"checkpoint_format": "gptq"}, 0), ({"checkpoint_format": "gptq_v2"}, 1)):
        edit_json(folder / "quantize_config.json", **GPTQ_FILE, **more)
        capfd.readouterr()
        load.find_model(str(folder), None)
        assert [("gptq_v2" in line) for line in stderr_lines(capfd)] == [True] * count


# ---- Positions


@pytest.mark.parametrize(
    ("shape", "scaling", "most"),
    [
        (
            "llama",
            {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 64},
            160,
        ),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0}, 128),
        (
            "mistral, windows",
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            128,
        ),
        ("llama", {"type": "linear", "factor": 3.0}, 96),
        # It depends on the length; and a stretch that ends before max_position_embeddings lowers
        # nothing.
        ("llama", {"type": "dynamic", "factor": 4.0}, 32),
        (
            "llama",
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
            32,
        ),
    ],
)
def test_stretched_positions(
    shape: str, scaling: dict[str, Any], most: int, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """As vLLM counts them; tokens are transformers', which has no limit."""
    folder = copy_of(shape)
    fields = {"max_position_embeddings": 32, "rope_theta": 100.0, "rope_scaling": scaling}
    edit_json(folder / "config.json", rope_parameters=None, **fields)
    if shape == "mistral, windows":
        edit_json(
            folder / "config.json", sliding_window=40
        )  # that would hide nothing of 32 positions
    theirs = loaded(folder)
    [prompt] = random_prompts((most - NEW_TOKENS + 1,))
    with LLM(str(folder), Policy(1, 1), dtype="float32", offload_dir=tmp_path / "off") as llm:
        assert llm.model.spec.max_positions == most
        [got] = llm.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS))
        assert got.token_ids == greedy(theirs, prompt, NEW_TOKENS)
        with pytest.raises(UsageError, match=f"{most} positions"):
            llm.generate([[*prompt, 5, 6, 7, 8]], SamplingParams(max_tokens=1))


def test_at_most_so_many_tokens_of_a_sequence(
    copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy_of("llama")
    with LLM(
        str(folder), Policy(1, 1), dtype="float32", offload_dir=tmp_path / "off", max_model_len=40
    ) as llm:
        assert llm.model.spec.max_positions == 40
        with pytest.raises(UsageError, match="40 positions"):
            llm.generate([list(range(4, 45))])
    for wrong in (0, 65, True, "8"):
        with pytest.raises(UsageError, match="--max-model-len"):
            LLM(str(folder), max_model_len=wrong)  # type: ignore[arg-type]


# ---- Tokenizers


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (("sentencepiece", "google.protobuf"), "sentencepiece protobuf"),
        (("google.protobuf",), "protobuf"),
    ],
)
def test_a_sentencepiece_model_alone(
    missing: tuple[str, ...],
    named: str,
    copy_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message names the packages that are missing, not one that would not help."""
    folder = copy_of("llama")
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    edit_json(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", unk_token="<unk>")
    monkeypatch.setattr(load, "_is_installed", lambda module: module not in missing)
    with pytest.raises(UsageError, match=f"tokenizer.model alone, .* pip install {named}, or"):
        LLM(str(folder))


def test_dropout_of_a_tokenizer_is_not_obeyed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It cuts the same text in other ways each time, which is for training."""
    say_once.cache_clear()
    text = "def main(argv=None): hello world, this is a text"
    folder = Path(shutil.copytree(PACKAGED["opt-tiny"], tmp_path / "model"))
    want = load.find_model(str(folder), None).encode(text)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = load.find_model(str(folder), None)
    assert [found.encode(text) for _ in range(5)] == [want] * 5
    [line] = stderr_lines(capfd)
    assert "its tokenizer's dropout is for training, and is not applied" in line
