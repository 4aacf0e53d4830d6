"""The llama.cpp peer: the order of rows that its converter makes."""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
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
        (LLAMA, "model.layers.0.self_attn.k_proj.weight", 4, "blk.0.attn_k.weight", [0, 2, 1, 3]),
        (LLAMA, "model.layers.0.mlp.up_proj.weight", 4, "blk.0.ffn_up.weight", [0, 1, 2, 3]),
        (LLAMA, "lm_head.weight", 2, "output.weight", [0, 1]),
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
    ((found, shape, read),) = load("llamacpp/convert.py")._sources(
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
    ((found, shape, read),) = load("llamacpp/convert.py")._sources(
        iter(tensors), "qwen3_moe", {"num_attention_heads": 2}
    )
    assert (found, shape, read().shape) == ("blk.3.ffn_down_exps.weight", (3, 2, 3), (3, 2, 3))
    assert read()[:, :, 0].tolist() == [[0, 1], [10, 11], [20, 21]]


class FakeLlama:
    """What run.py asks of llama_cpp: of 16 logits of a sequence the one at the sum of its tokens so
    far is 1."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}
        self.steps: list[int] = []

    def llama_get_memory(self, context: object) -> object:
        return context

    def llama_memory_clear(self, memory: object, data: bool) -> None:
        self.seen.clear()

    def llama_decode(self, context: object, batch: Any) -> int:
        self.wanted: list[int] = []
        for i in range(batch.n_tokens):
            row = self.seen.setdefault(batch.seq_id[i][0], [])
            assert batch.pos[i] == len(row) and batch.n_seq_id[i] == 1
            row.append(batch.token[i])
            if batch.logits[i]:
                self.wanted.append(batch.seq_id[i][0])
        self.steps.append(batch.n_tokens)
        return 0

    def llama_get_logits(self, context: object) -> Any:
        logits = np.zeros((len(self.wanted), 16), np.float32)
        for i, row in enumerate(self.wanted):
            logits[i, sum(self.seen[row]) % 16] = 1
        self.logits = logits
        return logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeLlama, Any]:
    """The library, and run.py with sessions of a batch of 8 tokens on it."""
    fake = FakeLlama()
    run = load("llamacpp/run.py")
    batch = SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(8)])
    for name in ("token", "pos", "n_seq_id", "logits"):
        setattr(batch, name, [0] * 8)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.setattr(run, "_converted", lambda request: request.model_dir)
    monkeypatch.setattr(run, "_context", lambda *_: nullcontext(run.Session(None, batch, 16)))
    return fake, run
