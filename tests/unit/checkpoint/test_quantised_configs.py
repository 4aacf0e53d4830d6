"""What a quantization_config may say: the rest is refused in a line that names it, and damaged
tensors too."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.checkpoint import open_checkpoint, write_random_checkpoint
from flexgen_h2o.checkpoint.formats import check_quantization, weight_format
from flexgen_h2o.checkpoint.formats.quantised import is_left_out
from flexgen_h2o.checkpoint.writing import RandomValues
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.models import spec_from_folder
from tests.parity.quantisers import AWQ, FP8, GPTQ, QUANTISERS, compressed, save_quantised
from tests.parity.reference import random_model

PACKED = compressed("pack-quantized", 4, 128)
WEIGHTS = "config_groups.group_0.weights."


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *way, last = path.split(".")
    inner = config
    for key in way:
        inner = inner[key]
    inner[last] = value
    return config


@pytest.mark.parametrize(
    ("config", "path", "value", "says"),
    [
        (
            FP8,
            "activation_scheme",
            "static",
            "fp8 with activation_scheme 'static' is not supported, only 'dynamic'",
        ),
        (FP8, "weight_block_size", None, "fp8 with weight_block_size None"),
        (FP8, "weight_block_size", [128], r"fp8 with weight_block_size \[128\]"),
        (FP8, "weight_block_size", [128, 0], "fp8 with weight_block_size 0"),
        (FP8, "weight_block_size", [128, True], "fp8 with weight_block_size True"),
        (FP8, "fmt", "e5m2", "fp8 with fmt 'e5m2'"),
        (FP8, "expert_dtype", "fp4", "fp8 with expert_dtype 'fp4'"),
        (FP8, "kv_cache_scheme", {"num_bits": 8}, "fp8 with kv_cache_scheme .* is not known"),
        (FP8, "modules_to_not_convert", [3], "modules_to_not_convert .*is not a list of names"),
        (
            PACKED,
            "format",
            "nvfp4-pack-quantized",
            "with format 'nvfp4-pack-quantized' is not supported",
        ),
        (PACKED, "format", None, "with format None"),
        (PACKED, "kv_cache_scheme", {"num_bits": 8}, "with kv_cache_scheme"),
        (PACKED, "quantization_status", "calibration", "with quantization_status 'calibration'"),
        (PACKED, "sparsity_config", {"format": "sparse-24-bitmask"}, "with sparsity_config"),
        (PACKED, "transform_config", {"config_groups": {"u": 1}}, "with transform_config"),
        (PACKED, "config_groups", {}, r"with config_groups \{\}"),
        (PACKED, "config_groups", {"a": 1}, "with config_groups 1"),
        (
            PACKED,
            "config_groups.group_0.input_activations",
            {"dynamic": False},
            "with input_activations",
        ),
        (PACKED, "config_groups.group_0.format", "int-quantized", "with format 'int-quantized'"),
        (PACKED, "ignore", "lm_head", "ignore 'lm_head' is not a list of names; "),
        (PACKED, "ignore", ["re:["], r"ignore has 're:\['"),
        (FP8, "modules_to_not_convert", ["(?i)lm_head"], r"has '\(\?i\)lm_head' \(global flags"),
        (PACKED, "ignore", ["re:(?:[a-z.]+)*!"], "may take minutes to match"),
        (PACKED, "ignore", ["re:.*a.*b.*c.*d.*e.*f.*g"], "may take minutes to match"),
        (PACKED, "ignore", [r"re:(a|b)\1"], "which refers to a group"),
        (PACKED, "ignore", ["re:(?P<a>x)"], "which refers to a group"),
        (PACKED, WEIGHTS + "num_bits", 3, "weights with num_bits 3 is not supported, only 4 or 8"),
        (PACKED, WEIGHTS + "num_bits", True, "weights with num_bits True"),
        (PACKED, WEIGHTS + "type", "float", "weights with type 'float'"),
        (PACKED, WEIGHTS + "strategy", "tensor", "weights with strategy 'tensor'"),
        (PACKED, WEIGHTS + "strategy", None, "weights with strategy None"),
        (PACKED, WEIGHTS + "group_size", 12, "with group_size 12"),
        (PACKED, WEIGHTS + "group_size", None, "with group_size None"),
        (PACKED, WEIGHTS + "actorder", "group", "weights with actorder 'group'"),
        (PACKED, WEIGHTS + "new", 1, r"weights with new \(1\) is not known"),
        (
            compressed("int-quantized", 8, None),
            WEIGHTS + "symmetric",
            False,
            "supported in 8 bits, symmetric",
        ),
        (GPTQ, "bits", 3, "gptq with bits 3 is not supported, only 4 or 8"),
        (GPTQ, "bits", None, "gptq with bits None"),
        (
            GPTQ,
            "group_size",
            20,
            "gptq with group_size 20 is not supported, only -1 or 'multiples of 8'",
        ),
        (GPTQ, "group_size", None, "gptq with group_size None"),
        (GPTQ, "checkpoint_format", "marlin", "gptq with checkpoint_format 'marlin'"),
        (GPTQ, "lm_head", True, "gptq with lm_head True"),
        (GPTQ, "dynamic", {"+:.*down": {"bits": 8}}, "gptq with dynamic"),
        (
            GPTQ,
            "modules_in_block_to_quantize",
            [["q_proj"]],
            "gptq with modules_in_block_to_quantize",
        ),
        (GPTQ, "pack_dtype", "int16", "gptq with pack_dtype 'int16'"),
        (AWQ, "bits", 8, "awq with bits 8 is not supported, only 4"),
        (AWQ, "version", "gemv", "awq with version 'gemv'"),
        (AWQ, "zero_point", False, "awq with zero_point False"),
        (AWQ, "group_size", 0, "awq with group_size 0"),
        (
            {"quant_method": "bitsandbytes"},
            "load_in_4bit",
            True,
            "quant_method 'bitsandbytes' is not supported",
        ),
    ],
)
def test_refused(config: dict[str, Any], path: str, value: Any, says: str) -> None:
    if config["quant_method"] != "bitsandbytes":
        check_quantization(config)
    with pytest.raises(UsageError, match=f"quantization_config: .*{says}") as error:
        check_quantization(changed(config, path, value))
    assert "\n" not in str(error.value) and re.search(
        "; give .*checkpoint|no list|no whole|has '", str(error.value)
    )


@pytest.mark.parametrize(
    ("pattern", "module", "is_left"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.*.mlp", "model.layers.11.mlp.x", True),
        ("down_proj", "model.layers.3.mlp.down_proj", True),
        ("mlp.gate", "mlp.gate_proj", False),
    ],
)
def test_modules_are_left_out_as_transformers_does(
    pattern: str, module: str, is_left: bool
) -> None:
    assert (
        is_left_out(module, (pattern,)) is is_left is not should_convert_module(module, [pattern])
    )


@pytest.mark.timeout(5)
@pytest.mark.parametrize(("config", "key"), [(FP8, "modules_to_not_convert"), (PACKED, "ignore")])
def test_too_many_names(config: dict[str, Any], key: str) -> None:
    for names in (
        [f"re:m{i}" for i in range(500_000)],
        [f"re:{i}{'a' * 1900}" for i in range(4000)],
    ):
        with pytest.raises(
            UsageError,
            match=f"{key} has {len(names)} names of .* at most 4096 of 524288 are matched",
        ):
            check_quantization(config | {key: names})


PATTERNS = [
    "lm_head",
    "model.layers.1",
    "down_proj",
    "layers.*.gate",
    "a|b",
    "(q|k)_proj",
    r".*\.v_(x|proj)",
    "mlp.up",
]


def test_all_patterns_are_matched_at_once() -> None:
    parts = ("model.layers.1", "model.layers.11", "layers.2", "a", "ba", "x")
    modules = [
        f"{a}.{b}"
        for a in parts
        for b in ("mlp.gate", "mlp.up_proj", "q_proj", "v_proj", "down_proj", "b")
    ]
    left = [is_left_out(module, tuple(PATTERNS)) for module in modules]
    assert (
        left == [not should_convert_module(module, PATTERNS) for module in modules]
        and 5 < sum(left) < len(left) - 5
    )
    assert not is_left_out("lm_head", ())


@pytest.mark.timeout(20)  # each alone would take minutes: the module re keeps few expressions
def test_many_names_take_little_time(spec) -> None:
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(8) for j in range(512)]
    for config, key in ((FP8, "modules_to_not_convert"), (PACKED, "ignore")):
        form = weight_format(replace(spec, quantization=config | {key: names}), Policy(), 2)
        for i, kind in ((7, 0), (8, 1)):
            layouts = (
                form.layout(
                    TensorSpec("", f"model.layers.{i}.mlp.experts.{j}.up_proj.weight", (128, 128))
                )
                for j in range(512)
            )
            assert all(bool(layout.decoded_row_bytes) is bool(kind) for layout in layouts)


@pytest.mark.parametrize(
    ("pattern", "module", "is_left"),
    [
        ("re:(?i).*LM_HEAD", "lm_head", True),
        ("re:.*down", "model.layers.0.mlp.down_proj", True),
        ("lm_head", "lm_head", True),
        ("down_proj", "model.layers.0.mlp.down_proj", False),
        ("a[", "lm_head", False),
    ],
)
def test_modules_are_left_out_as_compressed_tensors_does(
    spec, pattern: str, module: str, is_left: bool
) -> None:
    """Behind "re:" an expression as it is, which may begin with flags; else a name, which is
    none."""
    for ignore in ([pattern], ["re:x|y", pattern, "re:z"]):
        form = weight_format(replace(spec, quantization={**PACKED, "ignore": ignore}), Policy(), 2)
        assert form.layout(TensorSpec("", f"{module}.weight", (128, 64))).decoded_row_bytes == (
            0 if is_left else 128
        )


@pytest.mark.parametrize("name", ["embed_tokens", "embed_positions", "embed_in"])
def test_compressed_tensors_has_no_embeddings(spec, name: str) -> None:
    form = weight_format(replace(spec, quantization=PACKED), Policy(), 2)
    assert (
        form.layout(TensorSpec("", f"model.decoder.{name}.weight", (128, 64))).decoded_row_bytes
        == 0
    )
    assert form.layout(TensorSpec("", "embed_out.weight", (128, 64))).decoded_row_bytes  # a Linear


def test_routers_and_embeddings_are_plain(spec) -> None:
    form = weight_format(replace(spec, quantization=FP8), Policy(), 2)
    for name in ("model.layers.0.mlp.gate.weight", "model.embed_tokens.weight", "lm_head.weight"):
        assert not form.layout(TensorSpec("", name, (128, 64))).decoded_row_bytes
    assert form.layout(
        TensorSpec("", "model.layers.0.mlp.experts.3.up_proj.weight", (128, 64))
    ).decoded_row_bytes
    outside = TensorSpec("", "model.decoder.project_in.weight", (128, 64))  # of OPT-350m
    assert form.layout(outside).decoded_row_bytes
    for config in (GPTQ, AWQ):
        form = weight_format(replace(spec, quantization=config), Policy(), 2)
        assert not form.layout(outside).decoded_row_bytes


@pytest.mark.parametrize("name", ["fp8", "4 bits, groups with zeros", "gptq", "awq"])
@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_damaged_tensors(tmp_path: Path, name: str, damage: str) -> None:
    model = random_model(model_type="llama", num_hidden_layers=1, intermediate_size=96)
    save_quantised(model, tmp_path, QUANTISERS[name])
    spec, _ = spec_from_folder("tiny", tmp_path)
    open_checkpoint(spec, tmp_path, tmp_path / "none")
    stored = load_file(tmp_path / "model.safetensors")
    for kind in [
        key.rpartition(".")[2] for key in stored if "down_proj" in key and "shape" not in key
    ]:
        key = f"model.layers.0.mlp.down_proj.{kind}"
        bad = {**stored}
        value = bad.pop(key)
        if damage == "shape":
            bad[key] = value[..., :-1].contiguous()
        elif damage == "dtype":
            bad[key] = torch.zeros(value.shape, dtype=torch.int64)
        save_file(bad, tmp_path / "model.safetensors")
        with pytest.raises(UsageError, match=f"{tmp_path}.*tensor '{key}' "):
            open_checkpoint(spec, tmp_path, tmp_path / "none")


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    """Found where it is decoded: a line that names the tensor, and not memory of something else."""
    save_quantised(
        random_model(model_type="llama", num_hidden_layers=1), tmp_path, QUANTISERS["gptq"]
    )
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.mlp.down_proj.g_idx"][7] = 5
    save_file(stored, tmp_path / "model.safetensors")
    says = r"tensor 'model.layers.0.mlp.down_proj.g_idx' has .* groups 0 to 5, of 5"
    with (
        LLM(str(tmp_path), Policy(1, 1), dtype="float32", offload_dir=tmp_path / "offload") as llm,
        pytest.raises(UsageError, match=says),
    ):
        llm.generate([[5, 6]], SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    "config",
    [
        FP8,
        compressed("pack-quantized", 4, 32),
        compressed("pack-quantized", 8, 32, False),
        compressed("int-quantized", 8, None),
        GPTQ,
        GPTQ | {"bits": 8, "desc_act": True},
        AWQ | {"group_size": 32},
    ],
)
def test_random_weights(tmp_path: Path, config: dict[str, Any]) -> None:
    """At the bytes of the format, with numbers like those of other random weights; and they run."""
    shape = {
        "model_type": "llama",
        "vocab_size": 120,
        "hidden_size": 192,
        "num_hidden_layers": 1,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps({**shape, "quantization_config": config}))
    spec, about = spec_from_folder("tiny", tmp_path)
    folder = write_random_checkpoint(spec, about, tmp_path / "random", "bfloat16")
    up = next(tensor for tensor in spec.mlp[0] if tensor.role == "up_proj.weight")
    numbers = RandomValues(spec, "bfloat16", 0).rows(up, 0, up.shape[0])
    assert (
        numbers.std().item() == pytest.approx(0.02, rel=0.35) and abs(numbers.mean().item()) < 0.003
    )
    assert len(numbers.unique(dim=0)) == len(numbers)
    assert open_checkpoint(spec, folder, tmp_path).nbytes < 2 * spec.num_weights * 0.75
    with LLM(
        str(folder), Policy(1, 1, percent=(30, 0, 100, 0, 100, 0)), offload_dir=tmp_path / "offload"
    ) as llm:
        assert (
            len(llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids)
            == 2
        )
