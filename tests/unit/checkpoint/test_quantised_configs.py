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

from flexgen_h2o.checkpoint import open_checkpoint, pack_checkpoint, write_random_checkpoint
from flexgen_h2o.checkpoint.formats import checkpoint_codec, checkpoint_format, weight_format
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.checkpoint.formats.quantised import is_left_out
from flexgen_h2o.checkpoint.packed_store import _Reader, decoded_rows
from flexgen_h2o.checkpoint.writing import RandomValues
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.models import spec_from_folder
from tests.parity.quantisers import (
    AWQ,
    FP8,
    GPTQ,
    QUANTISERS,
    Quantiser,
    compressed,
    gptq,
    save_quantised,
)
from tests.parity.reference import random_model

PACKED = compressed("pack-quantized", 4, 128)
INTEGERS = compressed("int-quantized", 8, None)
MXFP4 = {"quant_method": "mxfp4"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 16}
LARGE = {"hidden_size": 192, "num_hidden_layers": 1, "intermediate_size": 384}
GROUP = "config_groups.group_0."
WEIGHTS = GROUP + "weights."


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
        (FP8, "activation_scheme", "static", "'static' is not supported, only 'dynamic'"),
        (FP8, "weight_block_size", [128], r"\[128\]"),
        (FP8, "weight_block_size", [128, True], "True"),
        (FP8, "kv_cache_scheme", {"num_bits": 8}, ".* is not known"),
        (FP8, "modules_to_not_convert", [3], ".*is not a list of names"),
        (FP8, "modules_to_not_convert", ["(?i)lm_head"], r".*has '\(\?i\)lm_head' \(global"),
        (PACKED, "format", "nvfp4-pack-quantized", ".*is not supported"),
        (PACKED, "config_groups", {}, r"\{\}"),
        (PACKED, GROUP + "input_activations", {"dynamic": False}, ""),
        (PACKED, GROUP + "format", "int-quantized", "'int-quantized'"),
        (PACKED, "ignore", ["re:["], r".*has 're:\['"),
        (PACKED, "ignore", [r"re:(a|b)\1"], ".*which refers to a group"),
        (PACKED, WEIGHTS + "num_bits", True, "True is not supported, only 4 or 8"),
        (PACKED, WEIGHTS + "group_size", 12, "12"),
        (PACKED, WEIGHTS + "new", 1, r"\(1\) is not known"),
        (INTEGERS, WEIGHTS + "symmetric", False, ", with a scale a row"),
        (GPTQ, "dynamic", {"+:.*down": {"bits": 8}}, ""),
        (GPTQ, "dynamic", {"lm_head": {"bits": 4}}, ".*'lm_head' is not supported"),
        (GPTQ | {"has_g_idx": False}, "desc_act", True, "True is not supported, only False"),
        (GPTQ, "lm_head", True, "True is not supported, only False"),
        (GPTQ, "pack_dtype", "int16", "'int16'"),
        (GPTQ, "modules_in_block_to_quantize", "q_proj", "'q_proj'"),
        (GPTQ | {"checkpoint_format": "gptq"}, "format", "gptq_v2", "'gptq_v2'"),
        (AUTO_ROUND, "data_type", "mx_fp", "'mx_fp'"),
        (AUTO_ROUND, "act_bits", 8, "8"),
        (AUTO_ROUND, "packing_format", "auto_round:llm_compressor", ""),
        (AUTO_ROUND, "extra_config", {"lm_head": {"bits": 4}}, ".*'lm_head'"),
        (AUTO_ROUND, "extra_config", {"model.layers.0.mlp.up_proj": {"bits": 8}}, ".*bits 8"),
        (AWQ, "version", "gemv", "'gemv' is not supported, only 'gemm'"),
        (AWQ, "backend", "llm-awq", "'llm-awq'"),
        (PACKED, "sparsity_config", {"format": "sparse-24-bitmask"}, ""),
        (AWQ, "bits", 8, "8 is not supported, only 4"),
        (AWQ, "group_size", 0, "0"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method", "bitsandbytes", "'bitsandbytes'"),
    ],
)
def test_refused(config: dict[str, Any], path: str, value: Any, says: str) -> None:
    key = path.rpartition(".")[2]
    if key != "quant_method":
        checkpoint_codec(config)
    with pytest.raises(UsageError, match=f"quantization_config: .*{key} ?{says}") as error:
        checkpoint_codec(changed(config, path, value))
    assert "\n" not in str(error.value) and re.search(
        "; give .*checkpoint|no list|no whole|has '", str(error.value)
    )


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


@pytest.mark.parametrize(
    ("quantization", "quantised", "plain"),
    [
        (PACKED, ["embed_out"], ["model.embed_tokens", "embed_positions", "gpt_neox.embed_in"]),
        (FP8, ["layers.0.experts.3.up_proj", "project_in"], ["0.mlp.gate", "embed", "lm_head"]),
        (GPTQ, ["layers.0.up_proj"], ["project_in"]),  # of OPT-350m, outside of the blocks
        (AWQ, ["layers.0.up_proj"], ["project_in"]),
    ],
)
def test_routers_and_embeddings_are_plain(
    spec, quantization: dict[str, Any], quantised: list[str], plain: list[str]
) -> None:
    form = weight_format(replace(spec, quantization=quantization), Policy(), 2)
    for name in (*quantised, *plain):
        layout = form.layout(TensorSpec("", f"{name}.weight", (128, 64)))
        assert bool(layout.decoded_row_bytes) is (name in quantised), name


@pytest.mark.parametrize(
    ("left_out", "columns", "says"),
    [
        (["model.layers.0.mlp.experts"], 64, "leave model.layers.0.mlp.experts out is not"),
        ([], 48, r"multiple of 32, and 'model.layers.0.*down_proj\[0\]' has 48"),
    ],
)
def test_experts_that_are_not_mxfp4(spec, left_out: list[str], columns: int, says: str) -> None:
    quantization = MXFP4 | {"modules_to_not_convert": left_out}
    form = weight_format(replace(spec, quantization=quantization), Policy(), 2)
    expert = TensorSpec("", "model.layers.0.mlp.experts.down_proj", (8, columns), index=0)
    with pytest.raises(UsageError, match=says):
        form.layout(expert)


@pytest.mark.parametrize(
    ("name", "damage"),
    [("fp8", "missing"), ("4 bits, groups with zeros", "shape"), ("gptq", "dtype")],
)
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
    spec, _ = spec_from_folder("tiny", tmp_path)
    source = open_checkpoint(spec, tmp_path, tmp_path / "none")
    says = r"tensor 'model.layers.0.mlp.down_proj.g_idx' has .* groups 0 to 5, of 5"
    with pytest.raises(UsageError, match=says):
        pack_checkpoint(spec, source, tmp_path / "cache", Groupwise(4, 4))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (FP8, "llama"),
        (compressed("pack-quantized", 8, 32, False), "llama"),
        (INTEGERS, "llama"),
        (GPTQ, "llama"),
        (GPTQ | {"bits": 8, "desc_act": True}, "llama"),
        (AWQ | {"group_size": 32}, "llama"),
        (MXFP4, "gpt_oss"),
    ],
)
def test_random_weights(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    """At the bytes of the format, with numbers like those of other random weights."""
    model = random_model(model_type=kind, tie_word_embeddings=False, **LARGE)
    about = {**model.config.to_dict(), "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(about))
    spec, about = spec_from_folder("tiny", tmp_path)
    folder = write_random_checkpoint(spec, about, tmp_path / "random", "bfloat16")
    matrix = next(one for one in spec.tensors if one.role.endswith("down_proj.weight"))
    source = RandomValues(spec, "bfloat16", 0)
    [numbers] = decoded_rows(checkpoint_format(spec), matrix, source, matrix.shape[0])
    assert numbers.std().item() == pytest.approx(0.02, rel=0.35)
    assert abs(numbers.mean().item()) < 0.003
    assert len(numbers.unique(dim=0)) == len(numbers)
    assert open_checkpoint(spec, folder, tmp_path).nbytes < 2 * spec.num_weights * 0.75


# What exporters write beside the settings that the numbers depend on.
GPTQ_IN_TRANSFORMERS = {
    "tokenizer": None,
    "dataset": None,
    "damp_percent": 0.1,
    "act_group_aware": True,
    "true_sequential": True,
    "format": "gptq",
    "meta": {"quantizer": ["optimum:2.1.0", "gptqmodel:7.0.0"]},
    "backend": "auto",
    "model_seqlen": None,
    "block_name_to_quantize": None,
    "module_name_preceding_first_block": None,
    "batch_size": 1,
    "pad_token_id": None,
    "max_input_length": None,
    "cache_block_outputs": True,
    "modules_in_block_to_quantize": None,
}
OF_AUTO_ROUND = {
    "autoround_version": "0.15.0",
    "data_type": "int",
    "act_bits": 16,
    "enable_quanted_input": False,
    "iters": 1000,
    "lr": 0.001,
    "minmax_lr": 0.001,
    "nsamples": 512,
    "seqlen": 4096,
    "batch_size": 4,
    "low_gpu_mem_usage": True,
    "block_name_to_quantize": "model.layers",
}


@pytest.mark.parametrize(
    ("plain", "more"),
    [
        (GPTQ, GPTQ_IN_TRANSFORMERS | {"checkpoint_format": "gptq", "desc_act": True}),
        (GPTQ, {"checkpoint_format": "GPTQ", "pack_dtype": "int32", "method": "gptq"}),
        (GPTQ, {"lm_head": False, "rotation": None, "dynamic": {"+:.*": {"bits": 4}}}),
        (GPTQ, OF_AUTO_ROUND | {"provider": "auto-round", "damp_percent": 0.01}),
        (AWQ, GPTQ_IN_TRANSFORMERS | {"format": "gemm", "sym": True, "desc_act": False}),
        (AWQ, {"method": "awq", "checkpoint_format": "gemm", "meta": {}, "lm_head": False}),
        (AWQ, OF_AUTO_ROUND | {"zero_point": False, "sym": True, "provider": "auto-round"}),
        (FP8, {"modules_to_convert": None, "scale_fmt": "float", "expert_dtype": "fp8"}),
        (FP8, {"method": "fp8", "format": "float8_e4m3fn", "bits": 8, "meta": {"uri": "x"}}),
        (PACKED, {"version": "0.15.0", "provider": "auto-round", "transform_config": {}}),
        (PACKED, {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "ignore": []}}),
        (MXFP4, {"dequantize": True}),
    ],
)
def test_fields_of_exporters_that_change_nothing(plain: dict[str, Any], more: dict) -> None:
    assert checkpoint_codec({**plain, **more}) == checkpoint_codec(plain)


@pytest.mark.parametrize(
    ("packing", "same_as"),
    [
        ({}, {"sym": True}),
        ({"packing_format": "auto_round:auto_gptq", "sym": False}, {"sym": False}),
        ({"backend": "auto_round:gptq:exllamav2"}, {"sym": True}),
        ({"packing_format": "auto_round"}, {"sym": True, "checkpoint_format": "gptq_v2"}),
        ({"backend": "AUTO_ROUND"}, {"sym": True, "checkpoint_format": "gptq_v2"}),
        ({"backend": "auto_round:exllamav2"}, {"sym": True, "checkpoint_format": "gptq_v2"}),
        ({"packing_format": "auto_round:auto_awq", "backend": "auto"}, {"quant_method": "awq"}),
    ],
)
def test_auto_round_is_read_in_the_layout_that_it_packed(
    packing: dict[str, Any], same_as: dict[str, Any]
) -> None:
    plain = {"quant_method": "gptq", "bits": 4, "group_size": 16, **same_as}
    plain.pop("sym", None) if "awq" in plain.values() else None
    assert checkpoint_codec(AUTO_ROUND | OF_AUTO_ROUND | packing) == checkpoint_codec(plain)


def _zeros(stored: dict[str, torch.Tensor], words: int, bits: int) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a matrix with a word of ones subtracted from its zeros."""
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return {**stored, "qzeros": stored["qzeros"] - words * ones}


def _decoded(folder: Path, quantiser: Quantiser) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (decoded, expected) numbers of the quantised matrices of a small model."""
    model = random_model(model_type="llama", num_hidden_layers=1, intermediate_size=96)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("proj.weight"):
                value[::3, :16].abs_()  # groups without negative numbers, whose zero is 0
    save_quantised(model, folder, quantiser)
    spec, _ = spec_from_folder("tiny", folder)
    form = checkpoint_format(spec)
    source = _Reader(open_checkpoint(spec, folder, folder / "none"))
    wanted = model.state_dict()
    found = []
    for matrix in spec.tensors:
        if matrix.name.endswith("proj.weight"):
            [rows] = decoded_rows(form, matrix, source, matrix.shape[0])
            found.append((rows.clone(), wanted[matrix.name]))
    return found


NAMED = {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.v_proj"], ["down_proj"]]}
NOT_NAMED = ("k_proj", "o_proj", "up_proj", "gate_proj")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("more", "quantise", "subtracted", "left_out"),
    [
        ({"sym": True}, {"symmetric": True}, 0, ()),
        ({"sym": True}, {"symmetric": True}, 1, ()),
        ({"sym": True, "desc_act": True}, {"symmetric": True, "order": True}, 0, ()),
        ({"sym": True, "checkpoint_format": "gptq_v2"}, {"symmetric": True}, 1, ()),
        ({}, {"symmetric": True}, 0, ()),
        ({}, {"symmetric": False}, 1, ()),
        ({"sym": False}, {"symmetric": False}, 1, ()),
        ({"sym": False, "desc_act": True}, {"symmetric": False, "order": True}, 1, ()),
        ({"sym": False, "format": "gptq_v2"}, {"symmetric": False}, 0, ()),
        ({"sym": False} | NAMED, {"symmetric": False}, 1, NOT_NAMED),
        (
            {"quant_method": "auto-round", "sym": False, "packing_format": "auto_round"}
            | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}},
            {"symmetric": False, "without": "g_idx"},
            0,
            ("up_proj",),
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": False}
            | {"extra_config": {r".*layers\.0.*o_proj.*": {"bits": 16, "data_type": "fp"}}},
            {"symmetric": False, "without": "g_idx"},
            1,
            ("o_proj",),
        ),
    ],
)
def test_zeros_of_gptq(
    tmp_path: Path, bits: int, more: dict, quantise: dict, subtracted: int, left_out: tuple
) -> None:
    """Zeros stored less 1, by words, or as they are; those of symmetric matrices are half."""
    without = quantise.get("without", "")

    def quantised(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        make = gptq(bits, 16, 0, quantise.get("order", False), quantise["symmetric"])
        stored, numbers = make(weight)
        stored.pop(without, None)
        return _zeros(stored, subtracted, bits), numbers

    config = {"quant_method": "gptq", "bits": bits, "group_size": 16, **more}
    for found, wanted in _decoded(tmp_path, Quantiser(config, quantised, left_out)):
        assert torch.equal(found, wanted)


def test_zeros_that_a_symmetric_config_contradicts(tmp_path: Path) -> None:
    quantiser = Quantiser(GPTQ | {"sym": True}, gptq(4, 16, 1, False, symmetric=False))
    says = r"tensor 'model.*q_proj.qzeros' has different zeros.* set sym to false"
    with pytest.raises(UsageError, match=says):
        _decoded(tmp_path, quantiser)
