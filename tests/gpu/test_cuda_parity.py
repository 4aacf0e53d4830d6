"""The same tokens on a card as on the CPU, for placements that send every kind of bytes over every
link.

Run by scripts/gpu_suite.sh. FLEXGEN_GPU_TEST_DEVICE=cpu runs them on the stand-in device instead (a
device tier of ordinary memory), which checks the tests themselves where there is no card.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.kvcache.eviction import H2O, Random, SnapKV, Tova
from flexgen_h2o.tiers.device import CARD_LIBRARY_BYTES
from tests.parity.reference import LogitsByRow

DEVICE = os.environ.get("FLEXGEN_GPU_TEST_DEVICE", "cuda")
ON_CARD = DEVICE == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        ON_CARD and not torch.cuda.is_available(), reason="no CUDA device is usable here"
    ),
]

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
CONFIG: dict[str, Any] = {**SIZES, "model_type": "opt", "ffn_dim": 512, "word_embed_proj_dim": 128}
POST_NORM = {**CONFIG, "word_embed_proj_dim": 64, "do_layer_norm_before": False}
LLAMA = {**SIZES, "model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 256}
NEOX = {**SIZES, "model_type": "gpt_neox", "intermediate_size": 512}
CONFIGS = {"normal": CONFIG, "post-norm": POST_NORM, "llama": LLAMA, "gpt_neox": NEOX}
OLMOE = {
    **LLAMA,
    "model_type": "olmoe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 64,
}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "sliding_window": 16,
}
MXFP4 = {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}
MIXTURES = [
    (f"{name} {''.join(more)}", config, more)
    for name, config in (("olmoe", OLMOE), ("gpt_oss", GPT_OSS), ("mxfp4", MXFP4))
    for more in ({}, {"compress_weight": True}, {"compress_cache": True})
    if config is not MXFP4 or "compress_weight" not in more  # is in few bits already
]
PROMPT_LENGTHS = (
    23,
    5,
    41,
    5,
    17,
    1,
    30,
)  # not divisible by gbs x K = 6, and one row of a single token
THOUSAND = 1000 if ON_CARD else 40
NEW_TOKENS = 20  # more than the steps after which a disk part of the KV cache is written back
BUDGET = MemoryBudget(device="64MiB", host="1GiB")

# percent: weights, KV cache, hidden states on device and host; the rest is on disk
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on the device": {"percent": (100, 0, 100, 0, 100, 0)},
    "weights on host, pinned": {"percent": (0, 100, 100, 0, 100, 0)},
    "weights on host, not pinned": {"percent": (0, 100, 100, 0, 100, 0), "pin_weight": False},
    "weights on disk": {"percent": (0, 0, 100, 0, 100, 0)},
    "weights split three ways": {"percent": (30, 40, 100, 0, 100, 0)},
    "KV on host": {"percent": (100, 0, 0, 100, 100, 0)},
    "KV on disk": {"percent": (100, 0, 0, 0, 100, 0)},
    "KV split three ways": {"percent": (100, 0, 40, 30, 100, 0)},
    "attention on the CPU, KV on host": {
        "percent": (100, 0, 0, 100, 100, 0),
        "cpu_cache_compute": True,
    },
    "attention on the CPU, KV split": {
        "percent": (100, 0, 30, 30, 100, 0),
        "cpu_cache_compute": True,
    },
    "hidden states split three ways": {"percent": (100, 0, 100, 0, 30, 30)},
    "hidden states on disk": {"percent": (100, 0, 100, 0, 0, 0)},
    "everything split": {"percent": (30, 30, 30, 30, 30, 30)},
    "everything split, one after another": {"percent": (30, 30, 30, 30, 30, 30), "overlap": False},
    "everything on disk": {"percent": (0, 0, 0, 0, 0, 0), "sep_layer": False},
}


EVICTIONS = (
    H2O(heavy_size=6, recent_size=3),
    Random(heavy_size=9),
    SnapKV(heavy_size=4),
    Tova(heavy_size=4),
)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 1000, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


GREEDY = SamplingParams(NEW_TOKENS, ignore_eos=True)


def generate(
    folder: Path,
    policy: Policy,
    device: str,
    budget: MemoryBudget,
    dtype: str = "float32",
    eviction=None,
    params: SamplingParams = GREEDY,
):
    """Tokens and logits of every row, and the report. The random checkpoint beside `folder` is
    shared by all runs."""
    watched = LogitsByRow()
    with LLM(
        str(folder),
        policy,
        eviction,
        device=device,
        dtype=dtype,
        budget=budget,
        path="_DUMMY_",
        offload_dir=folder.parent,
    ) as llm:
        outs = llm.generate(prompts(), params, watch_logits=watched)
        return [out.token_ids for out in outs], watched.of_rows, llm.report


def model_folder(parent: Path, config: dict[str, Any]) -> Path:
    folder = parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


OF_WEIGHTS = [name for name in PLACEMENTS if "weights" in name] + ["all on the device"]
OF_KV = [name for name in PLACEMENTS if "KV" in name] + ["all on the device"]
OF_EXPERTS = ("all on the device", "weights on host, pinned", "everything split")
LONG = {"max_position_embeddings": 1100}
# What runs: a model, settings of a policy, an eviction policy, steps, and a placement.
RUNS: list[Any] = [
    *(
        pytest.param(config, {}, None, NEW_TOKENS, place, id=f"{name} {place}")
        for name, config in CONFIGS.items()
        for place in PLACEMENTS
    ),
    *(
        pytest.param(
            config, {**more, "expert_group": 2}, None, NEW_TOKENS, place, id=f"{name} {place}"
        )
        for name, config, more in MIXTURES
        for place in OF_EXPERTS
    ),
    *(
        (CONFIG, {"compress_weight": True, "weight_bits": bits}, None, NEW_TOKENS, place)
        for bits in (4, 8)
        for place in OF_WEIGHTS
    ),
    *(
        pytest.param(CONFIG, {}, one, NEW_TOKENS, place, id=f"{one.name} {place}")
        for one in EVICTIONS
        for place in OF_KV
    ),
    (CONFIG, {"compress_weight": True}, EVICTIONS[0], NEW_TOKENS, "everything split"),
    # Long enough that a late transfer would show.
    *(({**one, **LONG}, {}, EVICTIONS[0], THOUSAND, "KV on host") for one in (CONFIG, LLAMA)),
]


@pytest.mark.parametrize(("config", "more", "eviction", "steps", "place"), RUNS)
def test_logits_are_those_of_the_cpu(
    tmp_path, config: dict[str, Any], more: dict[str, Any], eviction: Any, steps: int, place: str
) -> None:
    """Tokens too, of a full cache. A near tie between two columns may fall the other way on a card;
    it moves logits little."""
    folder = model_folder(tmp_path, config)
    given = {"eviction": eviction, "params": SamplingParams(steps, ignore_eos=True)}
    alone = Policy(4, 1, **more)
    tokens, expected, _ = generate(folder, alone, "cpu", MemoryBudget(host="1GiB"), **given)
    placed = Policy(3, 2, **more, **PLACEMENTS[place])
    got, logits, report = generate(folder, placed, DEVICE, BUDGET, **given)
    is_plain = eviction is None and not more
    for mine, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 if is_plain else 1e-3)
    assert got == tokens or not is_plain
    if not placed.cpu_cache_compute:
        assert (report.io_bytes["h2d"] > 0) == (placed.percent != (100, 0, 100, 0, 100, 0))
    assert report.peak_bytes["device"] <= BUDGET.device
    assert eviction is None or report.kv["bytes"] < report.kv["full_bytes"]
    assert report.policy.compress_weight == alone.compress_weight


def test_rows_draw_what_they_draw_on_the_cpu(tmp_path) -> None:
    """One row may differ: a number drawn may lie between what two sums of probabilities are rounded
    to."""
    params = SamplingParams(
        NEW_TOKENS, temperature=0.8, top_p=0.9, top_k=50, seed=3, ignore_eos=True
    )
    folder = model_folder(tmp_path, CONFIG)
    expected, *_ = generate(folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"), params=params)
    got, *_ = generate(
        folder, Policy(3, 2, **PLACEMENTS["KV on host"]), DEVICE, BUDGET, params=params
    )
    greedy, *_ = generate(folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"))
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= len(got) - (
        1 if ON_CARD else 0
    )
    assert expected != greedy


# And how far logits may be off, of their own spread. Cards before Ampere are refused bfloat16.
HALVES = {"float16": 0.02, "bfloat16": 0.1}
if (
    ON_CARD
    and torch.cuda.is_available()
    and not torch.cuda.is_bf16_supported(including_emulation=False)
):
    del HALVES["bfloat16"]


def off_by(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The mean distance of logits over their spread, of the steps for which all tokens before are
    the same."""
    errors = []
    for found, expected in zip(mine, theirs, strict=True):
        alike = (found.argmax(1) == expected.argmax(1)).long().cumprod(0).sum()
        steps = slice(0, int(alike) + 1)
        errors.append((found[steps] - expected[steps]).abs().flatten())
    return float(torch.cat(errors).mean() / torch.cat([t.flatten() for t in theirs]).std())


# float16 is refused where the CPU computes.
@pytest.mark.parametrize("dtype", HALVES if ON_CARD else ["bfloat16"])
@pytest.mark.parametrize("place", ["all on the device", "KV on host", "everything split"])
@pytest.mark.parametrize("eviction", [None, EVICTIONS[0]], ids=["full", "h2o"])
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["opt", "llama"])
def test_half_precision_is_near_the_cpu_in_full(
    tmp_path, config, eviction, place: str, dtype: str
) -> None:
    folder = model_folder(tmp_path, config)
    _, expected, _ = generate(
        folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"), eviction=eviction
    )
    policy = Policy(3, 2, **PLACEMENTS[place])
    tokens, logits, report = generate(folder, policy, DEVICE, BUDGET, dtype, eviction=eviction)
    assert all(len(row) == NEW_TOKENS for row in tokens)
    assert off_by(logits, expected) <= HALVES[dtype]
    assert report.extra["dtype"] == dtype


@pytest.mark.skipif(not ON_CARD, reason="counts the card's own bytes")
def test_card_holds_no_more_than_the_budget(tmp_path) -> None:
    folder = model_folder(tmp_path, CONFIG)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    generate(folder, Policy(3, 2, percent=(30, 30, 30, 30, 30, 30)), DEVICE, BUDGET)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= BUDGET.device + CARD_LIBRARY_BYTES
