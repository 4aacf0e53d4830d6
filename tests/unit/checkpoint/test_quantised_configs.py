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
from flexgen_h2o.checkpoint.packed_store import decoded_rows
from flexgen_h2o.checkpoint.writing import RandomValues
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.models import spec_from_folder
from tests.parity.quantisers import AWQ, FP8, GPTQ, QUANTISERS, compressed, save_quantised
from tests.parity.reference import random_model

PACKED = compressed("pack-quantized", 4, 128)
INTEGERS = compressed("int-quantized", 8, None)
MXFP4 = {"quant_method": "mxfp4"}
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
