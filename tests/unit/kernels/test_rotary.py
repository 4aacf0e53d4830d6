"""Rotary embeddings are those of transformers, to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from flexgen_h2o.kernels.elementwise import Rotation

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_rotation_equals_transformers(share: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.kernels.elementwise.ROTARY_CHUNK", 4)
    if share == 1:
        module, config = modeling_llama, LlamaConfig(hidden_size=64, num_attention_heads=4)
        embedding = module.LlamaRotaryEmbedding(config)
    else:
        module, config = modeling_gpt_neox, GPTNeoXConfig(hidden_size=64, num_attention_heads=4, rotary_pct=share)
        embedding = module.GPTNeoXRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 2, 3, 4, 77, 5000, 0, 3])  # two rows' prompts
    q, k = torch.randn(9, 4, 16).to(dtype), torch.randn(9, 3, 16).to(dtype)[:, ::2]
    cos, sin = embedding(q, positions[None])
    want = module.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    Rotation(embedding.inv_freq, embedding.attention_scaling).rotate((q, k), positions)
    for ours, theirs in zip((q, k), want, strict=True):
        assert torch.equal(ours, theirs[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_turned_by_its_rank_is_the_key_at_that_position(dtype: torch.dtype) -> None:
    rotation, keys = Rotation(torch.tensor([0.7, 0.1]), 1.2), torch.randn(2, 5, 6).to(dtype)
    ranks = torch.tensor([[3, 0, 1, 4, 2], [0, 1, 2, 2, 2]], dtype=torch.int32)
    want = keys.clone()
    for row, order in zip(want, ranks, strict=True):
        rotation.rotate((row.unsqueeze(1),), order)
    before = keys.clone()
    assert torch.equal(rotation.rotated_reference(keys, ranks), want) and torch.equal(keys, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "slots", "width", "pairs"), [(2, 5, 6, 2), (3, 40, 64, 32), (600, 9, 128, 16)])
def test_the_compiled_loop_turns_as_the_reference_does(
    rows: int, slots: int, width: int, pairs: int, dtype: torch.dtype
) -> None:
    """To rounding: it rounds once. Slots without a rank are left alone."""
    rotation, keys = Rotation(torch.rand(pairs), 1.1), torch.randn(rows, slots, width).to(dtype)
    ranks = torch.stack([torch.randperm(slots) for _ in range(rows)]).int()
    ranks[0, -1] = 2**30
    found, want = rotation.rotated(keys, ranks), rotation.rotated_reference(keys.float(), ranks)
    used = ranks < slots
    assert found.dtype == dtype
    assert torch.allclose(found.float()[used], want[used], atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 2**-8)


def test_what_does_not_go_together_is_refused() -> None:
    rotation, keys, ranks = Rotation(torch.ones(2), 1.0), torch.zeros(2, 5, 6), torch.zeros(2, 5).int()
    for bad in ((keys, ranks.long()), (keys, ranks[:, :4]), (keys.transpose(0, 1), ranks), (keys[..., :3], ranks)):
        with pytest.raises(ValueError, match="rotated: "):
            rotation.rotated(*bad)


def test_scaling_is_of_what_turns() -> None:
    q = torch.randn(3, 1, 6)
    before, frequencies = q.clone(), torch.tensor([0.5, 0.25])
    Rotation(frequencies, 1.5).rotate((q,), torch.tensor([0, 0, 0]))
    assert torch.equal(q[..., :4], before[..., :4] * 1.5) and torch.equal(q[..., 4:], before[..., 4:])
