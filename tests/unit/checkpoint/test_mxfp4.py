"""MXFP4 experts: what the engine opens of them is what transformers decodes, wherever their rows
lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flexgen_h2o.checkpoint import (
    match,
    pack_checkpoint,
    pack_random,
    read_index,
    write_random_checkpoint,
    writing,
)
from flexgen_h2o.checkpoint.formats import check_quantization, weight_format
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.core.units import ROW_BLOCK
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice
from tests.unit.weight_room import int8_values, opened, unpacked_layers, values

EXPERTS = 3
HIDDEN = 96
FFN = 64
CONFIG: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
}
SHAPES = {"gate_up_proj": (2 * FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}


@pytest.fixture
def experts(spec: ModelSpec) -> ModelSpec:
    """A block with three experts in the MLP's unit, and one matrix more in that of the
    attention."""
    matrices = tuple(
        TensorSpec(f"{i}.{kind}", f"model.layers.0.mlp.experts.{kind}", shape, index=i)
        for i in range(EXPERTS)
        for kind, shape in SHAPES.items()
    )
    plain = TensorSpec("q", "model.layers.0.self_attn.q_proj.weight", (HIDDEN, HIDDEN))
    return replace(
        spec,
        num_blocks=1,
        attention=((plain,),),
        mlp=(matrices,),
        quantization=CONFIG,
        hidden_size=HIDDEN,
        ffn_size=2 * FFN,
    )


@pytest.fixture
def folder(experts: ModelSpec, tmp_path: Path) -> Path:
    """Random bytes, scales near 127 so that numbers are of usual size."""
    stored = {t.name: torch.randn(t.shape) for t in experts.tensors if t.index is None}
    for kind, (rows, columns) in SHAPES.items():
        name = f"model.layers.0.mlp.experts.{kind}"
        stored[f"{name}_blocks"] = torch.randint(
            0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8
        )
        stored[f"{name}_scales"] = torch.randint(
            120, 128, (EXPERTS, rows, columns // 32), dtype=torch.uint8
        )
    save_file(stored, tmp_path / "model.safetensors")
    return tmp_path


def decoded(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What transformers makes of it, (experts, rows, columns), and plain tensors."""
    stored = load_file(folder / "model.safetensors")
    found = {name: value.to(dtype) for name, value in stored.items() if value.is_floating_point()}
    for kind in SHAPES:
        name = f"model.layers.0.mlp.experts.{kind}"
        both = (stored[f"{name}_{part}"] for part in ("blocks", "scales"))
        found[name] = convert_moe_packed_tensors(*both, dtype=dtype).transpose(1, 2)
    return found


@pytest.mark.parametrize(
    ("place", "device", "dtype"),
    [
        ((0, 0), HostDevice, torch.bfloat16),
        ((20, 30), StandInDevice, torch.float32),
        ((20, 30), HostDevice, torch.float16),
        ((100, 0), HostDevice, torch.float32),
    ],
)
def test_what_is_opened_is_what_transformers_decodes(
    experts: ModelSpec,
    folder: Path,
    place: tuple[int, int],
    device: type[Device],
    dtype: torch.dtype,
) -> None:
    checkpoint = match(experts, read_index(folder), folder)
    want = decoded(folder, dtype)
    form = weight_format(experts, Policy(), dtype.itemsize)
    with opened(experts, checkpoint, place, device(), dtype, form=form) as room:
        for unit, w in unpacked_layers(room, room.stream(2, ahead=2)):
            for t in unit.tensors:
                rows = want[t.name] if t.index is None else want[t.name][t.index]
                assert torch.equal(values(w[t.role]), rows), t.key


@pytest.mark.parametrize(("place", "device"), [((0, 0), HostDevice), ((20, 30), StandInDevice)])
def test_for_products_in_int8(
    experts: ModelSpec, folder: Path, place: tuple[int, int], device: type[Device]
) -> None:
    """Off by half of a row's scale at most; what is plain stays so."""
    checkpoint = match(experts, read_index(folder), folder)
    want = decoded(folder, torch.float32)
    form = weight_format(experts, Policy(int8_compute=True), 2)
    assert form.in_int8
    with opened(experts, checkpoint, place, device(), torch.bfloat16, form=form) as room:
        for unit, w in unpacked_layers(room, room.stream(2, ahead=1)):
            for t in unit.tensors:
                if t.index is not None:
                    rows, scales = int8_values(w[t.role])
                    off = (rows - want[t.name][t.index]).abs()
                    assert (off <= 0.5001 * scales).all(), t.key
                    assert torch.equal(
                        scales, want[t.name][t.index].abs().amax(1, keepdim=True) / 127
                    )
                else:
                    assert torch.equal(values(w[t.role]), want[t.name].bfloat16())


def test_bytes_are_those_of_the_format(experts: ModelSpec) -> None:
    form = weight_format(experts, Policy(), 2)
    (gate_up, *_) = experts.mlp[0]
    layout = form.layout(gate_up)
    assert sum(stored.row_bytes for stored in layout.stored) == HIDDEN // 2 + HIDDEN // 32
    assert layout.decoded_row_bytes == 2 * HIDDEN and 2 * FFN % ROW_BLOCK == 0


def test_packed_from_what_it_stands_for(experts: ModelSpec, folder: Path, tmp_path: Path) -> None:
    form = Groupwise(4, 8)
    want = decoded(folder, torch.float32)
    packed = pack_checkpoint(
        experts, match(experts, read_index(folder), folder), tmp_path / "cache", form
    )
    with opened(experts, packed, (100, 0), HostDevice(), torch.float32, form=form) as room:
        for unit, w in unpacked_layers(room, room.stream(2, ahead=1)):
            for t in unit.tensors:
                rows = want[t.name] if t.index is None else want[t.name][t.index]
                spread = rows.amax(1) - rows.amin(1) if rows.dim() == 2 else rows * 0
                assert ((values(w[t.role]) - rows).abs().t() <= spread / 255).all()


def test_random_weights(tmp_path: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bytes of the format, with numbers like those of other random weights; transformers
    loads them."""
    monkeypatch.setattr(writing, "TABLE_VALUES", 65_521)
    config = GptOssConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
    )
    tensors = []
    for name, value in AutoModelForCausalLM.from_config(config).state_dict().items():
        rows = tuple(value.shape[1:]) if value.dim() < 3 else (value.shape[2], value.shape[1])
        indices = range(4) if ".experts." in name else [None]
        shape = rows if ".experts." in name else tuple(value.shape)
        tensors += [TensorSpec(f"{name}.{i}", name, shape, index=i) for i in indices]
    model = replace(
        spec,
        num_blocks=1,
        embedding=(),
        attention=(tuple(tensors),),
        mlp=((),),
        head=(),
        tied=False,
        quantization=CONFIG,
    )
    about = {
        **config.to_dict(),
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": CONFIG,
    }
    folder = write_random_checkpoint(model, about, tmp_path / "m", "bfloat16")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    ours = decoded_experts(folder, name)
    assert ours.std().item() == pytest.approx(0.02, rel=0.25) and not torch.equal(ours[0], ours[1])
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True)
    )
    assert torch.equal(theirs.state_dict()[name], ours.transpose(1, 2))

    packed = pack_random(model, about, tmp_path / "p", "bfloat16", 0, Groupwise(2, 8))
    again = pack_checkpoint(
        model, match(model, read_index(folder), folder), tmp_path / "c", Groupwise(2, 8)
    )
    for one, other in ((packed.tensors[key], again.tensors[key]) for key in again.tensors):
        assert (
            one.path.read_bytes()[one.offset :][: one.nbytes]
            == other.path.read_bytes()[other.offset :][: other.nbytes]
        )


def decoded_experts(folder: Path, name: str) -> torch.Tensor:
    stored = load_file(folder / "model.safetensors")
    return convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"]).transpose(
        1, 2
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"modules_to_not_convert": "lm_head"}, "not a list of names"),
        ({"modules_to_not_convert": ["("]}, r"has '\('"),
        ({"kv_cache_quant": "fp8"}, r"with kv_cache_quant \('fp8'\) is not known"),
    ],
)
def test_configs_that_mean_something_else_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_quantization(CONFIG | change)


def test_experts_that_are_left_plain_are_refused(experts: ModelSpec, folder: Path) -> None:
    left_out = {"modules_to_not_convert": ["model.layers.0.mlp.experts"]}
    with pytest.raises(UsageError, match=r"leave model.layers.0.mlp.experts out is not supported"):
        match(replace(experts, quantization=CONFIG | left_out), read_index(folder), folder)


def test_columns_that_are_no_blocks_are_refused(experts: ModelSpec, folder: Path) -> None:
    tensor = replace(experts.mlp[0][0], shape=(8, 48))
    with pytest.raises(
        UsageError, match=r"multiple of 32, and 'model.layers.0.*gate_up_proj\[0\]' has 48"
    ):
        match(replace(experts, mlp=((tensor,),)), read_index(folder), folder)
