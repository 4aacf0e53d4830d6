"""One run for the engine and for the planner, and a checkpoint whose bytes are whole pages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.model import with_head_rows
from flexgen_h2o.core.units import PAGE, round_up
from flexgen_h2o.engine.prompts import prompts_from_python
from flexgen_h2o.engine.workload import Block
from flexgen_h2o.kvcache.eviction import Eviction, Full
from flexgen_h2o.planner.cost_model import CostModel, Machine
from flexgen_h2o.planner.profile import nominal_profile
from tests.parity.reference import opened, random_prompts, stored_tensors

# 16 rows of every matrix are whole pages in fp32, and so are the keys of a head of one row in 64
# slots.
_SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "max_position_embeddings": 254}
_HEADS: dict[str, Any] = {
    **_SIZES,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SHAPE: dict[str, Any] = {**_SIZES, "word_embed_proj_dim": 64, "ffn_dim": 128}
# The same of the other families, by model_type.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "qwen2": {  # the first of its two blocks has a window
        **_HEADS,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neox": {**_SIZES, "intermediate_size": 128, "num_attention_heads": 4},
    "qwen3_moe": {
        **_HEADS,
        "moe_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
}
ITEMSIZE = 4


@dataclass(frozen=True)
class Run:
    """A policy but for its placement, and what is run: by default five prompts, so that the last
    block is smaller.

    stand_in: a device tier of ordinary memory, else the device is host memory. header: tokens that
    all prompts begin with, before those of `lengths`; they are fed once a micro-batch, with the
    full cache once a block.
    """

    gbs: int = 2
    num_batches: int = 2
    stand_in: bool = True
    switches: dict[str, Any] = field(default_factory=dict)
    eviction: Eviction = field(default_factory=Full)
    lengths: tuple[int, ...] = (9,) * 5
    new_tokens: int = 3
    header: int = 0

    @property
    def prompts(self) -> list[list[int]]:
        header = random_prompts((self.header,), seed=2)[0]
        return [[*header, *own] for own in random_prompts(self.lengths)]

    def policy(self, percent: tuple[int, int, int, int, int, int]) -> Policy:
        return Policy(self.gbs, self.num_batches, percent, **self.switches)

    def costs(self, llm: LLM, head_rows: int = 0) -> CostModel:
        """Of what the engine has run, as its own planner counts the workload."""
        plan = llm.planner.planned
        assert plan is not None
        machine = Machine(nominal_profile(not self.stand_in), "float32", not self.stand_in)
        spec = with_head_rows(llm.model.spec, head_rows)
        return CostModel(spec, plan.policy, plan.need, machine)

    def blocks(self, llm: LLM) -> list[Block]:
        plan = llm.planner.planned
        assert plan is not None
        rows = prompts_from_python(self.prompts, None, SHAPE["vocab_size"])
        for row in rows:
            row.max_new = self.new_tokens
        return llm.planner._shapes(rows, plan.policy, plan.need.common)

    def go(
        self, folder: Path, percent: tuple[int, int, int, int, int, int], offload_dir: Path
    ) -> LLM:
        """The engine has run it, and is closed."""
        budget = MemoryBudget("64MiB" if self.stand_in else None, "64MiB", "64MiB")
        policy = self.policy(percent)
        with opened(folder, policy, offload_dir, eviction=self.eviction, budget=budget) as llm:
            llm.share_prefix = "on" if self.header else "off"
            llm.generate(self.prompts, SamplingParams(max_tokens=self.new_tokens, ignore_eos=True))
        return llm


def write_aligned(model: PreTrainedModel, folder: Path) -> None:
    """The model's folder, its matrices first and one behind the other from the second page of their
    file on."""
    model.config.save_pretrained(folder)
    tied = model.config.tie_word_embeddings
    tensors = [
        (name, t)
        for name, t in stored_tensors(model).items()
        if not (tied and name == "lm_head.weight")
    ]
    tensors.sort(key=lambda pair: pair[1].dim() < 2)
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors:
        start = end
        end = end + ITEMSIZE * tensor.numel()
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(entries).encode()
    head = head.ljust(round_up(len(head) + 8, PAGE) - 8)
    data = b"".join(tensor.detach().numpy().tobytes() for _, tensor in tensors)
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
