"""DeepSpeed ZeRO-Inference: its settings within a budget, and its own 4-bit weights against a slow
reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from bench.baselines.contract import kv_and_work_bytes
from flexgen_h2o.evaluation.fidelity import divergence
from tests.unit.bench.test_flexgen_peer import PEERS, packed, scored
from tests.unit.bench.test_throughput_sweep import OPT_TINY, load, request


def test_deepspeed_takes_as_many_buffers_as_fit(tmp_path: Path) -> None:
    deepspeed = load("deepspeed/run.py")
    beside = sum(kv_and_work_bytes(request(tmp_path)))

    def buffers(free: int, room: int = 0) -> int:
        asked = request(tmp_path, variant="nvme", budget=beside + free, room=room)
        return int(deepspeed.choose_settings(asked, largest=1000)["buffers"])

    assert [buffers(12_000), buffers(40_000)] == [3, deepspeed.SETTINGS["buffers"]]
    with pytest.raises(deepspeed.DoesNotFitError, match="4 rows"):
        buffers(7_999)
    assert (
        buffers(7_999, beside + 8_000)
        == buffers(-beside, beside + 8_000)
        == deepspeed.FEWEST_BUFFERS
    )


def test_in_4_bits_a_buffer_holds_a_packed_matrix(tmp_path: Path) -> None:
    deepspeed = load("deepspeed/run.py")
    matrix = 4096 * 128
    asked = request(tmp_path, variant="nvme-4bit", dtype="bf16")
    # The embedding is packed; that of 1026 positions is not, and is larger then.
    assert deepspeed.largest_parameter(asked) == (1026 * 256, 2 * 2048 * 256)
    assert deepspeed.largest_parameter(request(tmp_path, variant="nvme")) == (2048 * 256, 0)
    asked = request(tmp_path, variant="nvme-4bit", dtype="bf16", model_dir=tmp_path, budget=1)
    save_file(
        {"matrix": torch.zeros(4096, 128, dtype=torch.bfloat16)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((OPT_TINY / "config.json").read_text())
    largest, unpacked = deepspeed.largest_parameter(asked)
    assert (
        largest == matrix // 4 + 2 * matrix // 64
    )  # half a byte a number, two numbers of the dtype for each group
    beside = sum(kv_and_work_bytes(asked)) + 2 * unpacked
    asked = replace(asked, budget=beside + 3 * 2 * largest)
    assert deepspeed.choose_settings(asked, largest, unpacked)["buffers"] == 3
    assert (
        deepspeed.choose_settings(asked, largest, unpacked)["block_mib"]
        < deepspeed.SETTINGS["block_mib"]
    )
    smaller = replace(asked, settings={"block_mib": 1})
    assert deepspeed.choose_settings(smaller, largest, unpacked)["block_mib"] == 1
    config = deepspeed.zero_config(asked, deepspeed.SETTINGS, largest, tmp_path)
    assert config["weight_quantization"] == {
        "quantized_initialization": deepspeed.WEIGHT_QUANTIZATION
    }
    assert config["zero_optimization"]["offload_param"]["device"] == "nvme"
    assert "weight_quantization" not in deepspeed.zero_config(
        request(tmp_path), deepspeed.SETTINGS, 1, tmp_path
    )


def test_what_deepspeed_does_not_pack_is_refused(tmp_path: Path) -> None:
    deepspeed = load("deepspeed/run.py")
    save_file({"odd": torch.zeros(2, 65, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    for config, said in (
        ({}, "odd: DeepSpeed 0.19.8 packs groups of 64"),
        ({"num_experts": 4}, "which experts are"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(deepspeed.RefusedError, match=said):
            deepspeed.largest_parameter(
                request(tmp_path, variant="nvme-4bit", dtype="bf16", model_dir=tmp_path)
            )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(deepspeed.RefusedError, match="--dtype fp32: "):
        deepspeed.largest_parameter(request(tmp_path, variant="nvme-4bit"))
    save_file({"wide": torch.zeros(2, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(deepspeed.RefusedError, match="which is F32"):
        deepspeed.largest_parameter(
            request(tmp_path, variant="nvme-4bit", dtype="bf16", model_dir=tmp_path)
        )


@pytest.mark.slow
@pytest.mark.skipif(
    not (PEERS / "deepspeed" / "installed.txt").exists(),
    reason="needs DeepSpeed's own environment: bash bench/baselines/deepspeed/setup.sh",
)
def test_its_4_bits_are_those_of_a_slow_reference(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(OPT_TINY, dtype=torch.bfloat16)
    full = None
    for variant in ("nvme", "nvme-4bit"):
        tokens, found = scored("deepspeed", variant, "bf16", tmp_path)
        if variant == "nvme-4bit":
            for matrix in {
                id(m.weight): m for m in model.modules() if type(m) in (nn.Linear, nn.Embedding)
            }.values():
                matrix.weight.data = packed(matrix.weight.data, 1)
        with torch.inference_mode():
            want = model(tokens[:, :-1], logits_to_keep=6).logits.float()
        assert divergence(want, found).mean() < 0.005  # both in bf16
        assert full is None or divergence(full, found).mean() > 0.05
        full = want
