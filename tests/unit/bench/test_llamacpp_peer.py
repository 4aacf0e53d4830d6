"""The llama.cpp peer: the order of rows that its converter makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench" / "baselines"))

from contract import (
    StoredTensor,
    stored_tensors,
)

from tests.unit.bench.test_throughput_sweep import load

LLAMA: dict[str, Any] = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
NEOX: dict[str, Any] = {"model_type": "gpt_neox", "num_attention_heads": 2}


def stored(folder: Path, name: str, rows: int, first: int = 0) -> StoredTensor:
    """A tensor (rows, 3) whose values, as bits, are the numbers of their rows, from `first` on."""
    bits = np.repeat(np.arange(first, first + rows, dtype=np.uint16), 3)
    header = json.dumps(
        {name: {"dtype": "BF16", "shape": [rows, 3], "data_offsets": [0, bits.nbytes]}}
    ).encode()
    (folder / "x.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bits.tobytes()
    )
    return next(stored_tensors([folder / "x.safetensors"]))


@pytest.mark.parametrize(
    ("config", "name", "rows", "becomes", "order"),
    [
        # Pairs of a head of 4 are (i, i + 2) in transformers and neighbours in llama.cpp.
        (
            LLAMA,
            "model.layers.7.self_attn.q_proj.weight",
            8,
            "blk.7.attn_q.weight",
            [0, 2, 1, 3, 4, 6, 5, 7],
        ),
        (LLAMA, "model.layers.0.mlp.up_proj.weight", 4, "blk.0.ffn_up.weight", [0, 1, 2, 3]),
        # Rows are (heads, 3, width) in transformers and (3, heads, width) in llama.cpp.
        (
            NEOX,
            "gpt_neox.layers.1.attention.query_key_value.weight",
            12,
            "blk.1.attn_qkv.weight",
            [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11],
        ),
    ],
)
def test_rows_are_in_the_order_of_llamacpp(
    tmp_path: Path, config: dict[str, Any], name: str, rows: int, becomes: str, order: list[int]
) -> None:
    ((found, shape, read),) = load("systems/convert_llamacpp.py")._sources(
        iter([stored(tmp_path, name, rows)]), config["model_type"], config
    )
    assert found == becomes and shape == (rows, 3)
    assert read().shape == (rows, 3) and read()[:, 0].tolist() == order


def test_experts_of_a_layer_are_one_tensor(tmp_path: Path) -> None:
    tensors = []
    for expert in (2, 0, 1):  # as files have them: in any order
        folder = tmp_path / str(expert)
        folder.mkdir()
        tensors.append(
            stored(folder, f"model.layers.3.mlp.experts.{expert}.down_proj.weight", 2, 10 * expert)
        )
    ((found, shape, read),) = load("systems/convert_llamacpp.py")._sources(
        iter(tensors), "qwen3_moe", {"num_attention_heads": 2}
    )
    assert (found, shape, read().shape) == ("blk.3.ffn_down_exps.weight", (3, 2, 3), (3, 2, 3))
    assert read()[:, :, 0].tolist() == [[0, 1], [10, 11], [20, 21]]
