"""`evaluate layers` run to its end, and its schedule in runs of other commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doors.conftest import Answer
from tests.parity.reference import random_model

Door = Callable[..., Answer]


@pytest.fixture
def layers(command: Door, tmp_path: Path) -> Callable[[str], tuple[dict[str, Any], str]]:
    """The command with its flags; its JSON and what it prints."""

    def run(flags: str) -> tuple[dict[str, Any], str]:
        out = command(f"evaluate layers --offload-dir o --resamples 20 --json l.json {flags}")
        assert out.code == 0, out.err
        return json.loads((tmp_path / "l.json").read_text()), out.out

    return run


@pytest.mark.slow
def test_other_rows_gain_from_the_schedule(layers: Door, command: Door, tmp_path: Path) -> None:
    """On the shipped model, whose first and last layers need their columns and whose third needs hardly any."""
    asked = "--kv-budget 0.5 --eviction h2o-norm --compress-cache"
    rows = "--num-prompts 4 --recall-prompts 4 --prompt-len 160 --gen-len 12 --gpu-batch-size 4"
    found, out = layers(f"{rows} {asked} --markdown l.md")
    shares = [layer["share"] for layer in found["layers"]]
    weights = [float(weight) for weight in found["schedule"].split("/")]
    assert len(weights) == 6 and weights == pytest.approx(shares, rel=1e-2)
    assert found["share"] == 86 / 172 == pytest.approx(sum(shares) / 6)
    assert weights[2] < min(weights[0], weights[5])
    losses = [layer["loss"] for layer in found["layers"]]
    assert losses[0][0] > losses[0][-1] >= 0 and losses[2][0] < losses[0][0] / 4
    uniform, by_layer = found["cells"]
    assert by_layer["kl"]["value"] < uniform["kl"]["value"] / 1.5
    assert 0.9 * uniform["kv_share"] < by_layer["kv_share"] <= uniform["kv_share"]
    assert {"inside", "after"} == set(by_layer["recall"]) and found["settings"]["recall_prompts"] == 4
    assert (tmp_path / "l.md").read_text() in out and "with --compress-cache --cache-bits 4" in out
    flag = f"--kv-layer-schedule {found['schedule']}"
    assert f"`{flag}`" in out
    ran = command(f"flex-opt --model opt-tiny --prompt-len 32 --gen-len 4 --offload-dir o --no-log {asked} {flag}")
    assert ran.code == 0, ran.err
    planned = command(f"plan --model opt-tiny --prompt-len 32 --gen-len 4 --hardware t4 {asked} {flag}")
    assert planned.code == 0 and flag in planned.out, planned.err


def test_rows_of_a_file_and_stretches_of_layers_without_windows(layers: Door, tmp_path: Path) -> None:
    """A model without a tokenizer, whose second and fourth layer have windows; the model's own tokens are followed."""
    sizes = {"num_hidden_layers": 5, "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}
    shape = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "num_key_value_heads": 2, **sizes}
    random_model(**shape).save_pretrained(tmp_path / "mixed")
    rows = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (20, 12, 20, 9)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--model mixed --prompts p.jsonl --continuation greedy --prompt-len 20 --gen-len 6 --hh-size 4 --groups 2"
    found, out = layers(flags)
    assert [(layer["first"], layer["last"]) for layer in found["layers"]] == [(0, 2), (4, 4)]
    assert all(layer["loss"][0] > 0 for layer in found["layers"])
    assert found["share"] == 8 / 26 and len(found["schedule"].split("/")) == 2
    assert found["layers"][0]["share"] * 2 + found["layers"][1]["share"] == pytest.approx(3 * found["share"])
    assert "recall" not in found["full"] and found["settings"]["prompts"] == 4
    assert "layers 0 - 2" in out and "layer 4" in out
