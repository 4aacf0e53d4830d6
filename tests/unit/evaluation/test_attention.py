"""The attention that is watched is transformers'; removed columns are as masked ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.sequence import with_params
from flexgen_h2o.evaluation.attention_maps import HEAVY, Without, probabilities
from flexgen_h2o.evaluation.fidelity import FidelityRunner, Probe
from flexgen_h2o.evaluation.rows import Case, TextRow
from flexgen_h2o.kernels.prefill_attention import column_sums
from flexgen_h2o.kvcache.part import Prompts
from tests.parity.reference import random_model

PROMPT = 13
STEPS = 6
FAMILIES = ("opt-tiny", "llama", "gpt_neox")


@pytest.fixture(autouse=True)
def _plain_cpu(plain_cpu: None) -> None:
    """Every test here."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in PACKAGED:
        return PACKAGED[request.param]
    made = tmp_path_factory.mktemp(request.param)
    random_model(seed=1, model_type=request.param).save_pretrained(made)
    return made


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def opened(folder: Path, tmp_path: Path, batch: int = 2) -> LLM:
    llm = LLM(str(folder), Policy(batch, 2), Probe(), dtype="float32", offload_dir=tmp_path / "o")
    llm.share_prefix = "off"
    return llm


def ids_of(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 120, (n,), generator=generator).tolist() for n in lengths]


def attentions(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """(blocks, heads, n, n)"""
    with torch.no_grad():
        return torch.stack(model(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]


def see_all(llm: LLM, prompts: list[list[int]], rows: int) -> dict[tuple[int, int], torch.Tensor]:
    """(heads, n, n) by prompt and transformer block, `rows` queries at a time."""
    found = {}

    def see(at: list[int], block: int, attention: Prompts) -> None:
        for i, row in enumerate(at):
            q, k, lse = (t[i : i + 1] for t in (attention.q, attention.k, attention.lse))
            one = replace(attention, q=q, k=k, lse=lse)
            tiles = list(probabilities(one, rows))
            assert [first for first, _ in tiles] == list(range(0, q.shape[2], rows))
            p = found[row, block] = torch.cat([tile for _, tile in tiles], dim=1)
            by_group = p.sum(dim=1).view(k.shape[1], -1, k.shape[2]).sum(dim=1)
            assert torch.allclose(by_group, column_sums(q, k, lse, one.scale)[0], atol=1e-4), (
                "what policies score"
            )

    read = prompts_from_python(prompts, None, llm.model.spec.vocab_size)
    asked = with_params(read, SamplingParams(1, ignore_eos=True))
    llm.run(asked, lambda done: None, Callbacks(prompts=see))
    return found


def test_what_is_watched_is_the_attention_of_transformers(
    folder: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    """Ragged rows in micro-batches of two; one token; two of a length, computed together."""
    prompts = ids_of([7, 1, 12, 7, 3])
    with opened(folder, tmp_path) as llm:
        found = see_all(llm, prompts, rows=4)
        blocks = range(llm.model.spec.num_blocks)
    assert sorted(found) == [(row, block) for row in range(5) for block in blocks]
    for row, ids in enumerate(prompts):
        for block, want in enumerate(attentions(model, ids)):
            assert (found[row, block] - want).abs().max() < 1e-5


# ---- columns removed


def masked_logits(
    model: PreTrainedModel, ids: list[int], removed: list[torch.Tensor]
) -> torch.Tensor:
    """Of the continuation's tokens but the first; removed: (heads, columns of the prompt) bool, of
    each block, that the queries behind the prompt do not see."""
    n = len(ids)
    least = torch.finfo(torch.float32).min

    def mask_of(
        block: int, module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        hidden = later.expand(len(removed[block]), n, n).clone()
        hidden[:, PROMPT:, :PROMPT] |= removed[block][:, None, :]
        return args, kwargs | {"attention_mask": torch.where(hidden, least, 0.0)[None]}

    layers = [m for name, m in model.named_modules() if name.endswith(("self_attn", ".attention"))]
    assert len(layers) == len(removed)
    hooks = [
        m.register_forward_pre_hook(partial(mask_of, i), with_kwargs=True)
        for i, m in enumerate(layers)
    ]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, PROMPT : n - 1]
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("sinks", [0, 2])
def test_removed_columns_are_masked_in_all_later_queries(
    folder: Path, model: PreTrainedModel, tmp_path: Path, sinks: int
) -> None:
    """They are those with the largest sums of attention, for each kv-head on its own."""
    whole = ids_of([PROMPT + STEPS] * 3)
    share = 0.4
    rows = [TextRow(tuple(ids[:PROMPT]), tuple(ids[PROMPT:])) for ids in whole]
    eviction = Without(share, HEAVY, sinks)
    with opened(folder, tmp_path) as llm:
        group = llm.model.spec.num_heads // llm.model.spec.num_kv_heads
        _, (found,) = FidelityRunner(llm, 2**28).texts(rows, [Case("x", eviction, 1 - share)])
    for row, ids in enumerate(whole):
        removed = []
        for p in attentions(model, ids)[:, :, :PROMPT, :PROMPT]:
            sums = p.sum(dim=1).view(-1, group, PROMPT).sum(dim=1)
            heavy = sums[:, sinks:].topk(int(share * PROMPT), dim=1).indices + sinks
            gone = torch.zeros(sums.shape, dtype=torch.bool).scatter(1, heavy, True)
            removed.append(gone.repeat_interleave(group, dim=0))
        logits = masked_logits(model, ids, removed)
        want = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[PROMPT + 1 :]))
        assert np.allclose(found[row, 2], want.numpy(), atol=2e-4)
    assert found[:, 0].max() > 1e-3, "something is lost"
