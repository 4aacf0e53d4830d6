"""Tiny random models, what transformers generates with them, and one checked run of our engine."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flexgen_h2o import LLM, Completion, MemoryBudget, Policy, SamplingParams
from tests.parity.cases import BASE, BASES

LOGIT_TOLERANCE = 1e-4
# Two tokens nearer than this could change places by rounding alone: no honest reference.
MIN_GAP = 1e-3
LONG = 24  # more new tokens than a disk unit's overlay holds


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(4, BASE["vocab_size"], (n,), generator=generator).tolist() for n in lengths
    ]


def random_model(
    seed: int = 0, std: float = 0.2, model_type: str = "opt", **shape: Any
) -> PreTrainedModel:
    """fp32 values large enough that tokens vary: with transformers' own std of 0.02 greedy repeats
    one token."""
    config = AutoConfig.for_model(**deepcopy({**BASES[model_type], **shape}))
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(0, std, generator=generator)
            if name.endswith("norm.weight"):
                value.add_(1)
    return model


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's parameters as checkpoints have them: experts, which transformers holds together,
    one by one, but for those of gpt-oss."""
    found = dict[str, torch.Tensor]()
    of_mixtral = model.config.model_type == "mixtral"
    names = ("w1", "w3", "w2") if of_mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, value in model.named_parameters(remove_duplicate=False):
        stored = name.replace(".mlp.", ".block_sparse_moe.") if of_mixtral else name
        if "experts" not in name or model.config.model_type == "gpt_oss":
            found[stored] = value
            continue
        for i, expert in enumerate(value):
            own = (
                zip(names[:2], expert.chunk(2), strict=True)
                if "gate_up" in name
                else ((names[2], expert),)
            )
            found |= {f"{stored.rpartition('.')[0]}.{i}.{kind}.weight": part for kind, part in own}
    return found


def greedy(
    model: PreTrainedModel, prompt: Sequence[int], max_new: int, eos: int | None = None
) -> list[int]:
    """transformers' tokens for a single prompt, without padding."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=1,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def teacher_forced(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]
) -> torch.Tensor:
    """(tokens, vocab): the logits that each generated token was chosen from."""
    logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :]


@dataclass(frozen=True)
class Reference:
    """A model on disk, prompts, and what transformers makes of them; `tokens` and `logits` by
    prompt."""

    folder: Path
    model: PreTrainedModel
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[torch.Tensor]


ByShape = Callable[[str], Reference]  # the reference of a shape by its name


def make_reference(
    model: PreTrainedModel, folder: Path, prompts: list[list[int]], max_new: int
) -> Reference:
    """Saves `model` in `folder` and runs transformers. Refuses references that could not tell right
    from wrong."""
    model.save_pretrained(folder)
    tokens = [greedy(model, p, max_new) for p in prompts]
    logits = [teacher_forced(model, p, t) for p, t in zip(prompts, tokens, strict=True)]
    assert len({token for row in tokens for token in row}) > 3, (
        "greedy repeats itself: take another seed"
    )
    best = torch.cat(logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > MIN_GAP, "a near tie: take another seed"
    return Reference(folder, model, prompts, tokens, logits)


class LogitsByRow:
    """Collects what `LLM.generate` shows of every step's logits."""

    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = defaultdict(list)

    def __call__(self, rows: list[int], logits: torch.Tensor) -> None:
        for row, values in zip(rows, logits.float().cpu().clone(), strict=True):
            self.rows[row].append(values)

    @property
    def of_rows(self) -> list[torch.Tensor]:
        """(steps, vocab) of each row."""
        return [torch.stack(self.rows[row]) for row in sorted(self.rows)]

    def check(self, known: Sequence[torch.Tensor]) -> None:
        """Compare the logits of each row with those of the reference."""
        for row, want in enumerate(known):
            found = torch.stack(self.rows[row][: len(want)])
            assert (found - want).abs().max() <= LOGIT_TOLERANCE, f"row {row}"


def opened(folder: Path, policy: Policy | str, offload_dir: Path, **more: Any) -> LLM:
    """An LLM that computes in fp32, as the references do."""
    return LLM(str(folder), policy, **{"dtype": "float32", **more}, offload_dir=offload_dir)


def run(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    policy: Policy | str,
    offload_dir: Path,
    params: SamplingParams,
    budget: MemoryBudget | None = None,
    watch: LogitsByRow | None = None,
) -> list[Completion]:
    with opened(folder, policy, offload_dir, budget=budget) as llm:
        return llm.generate(prompts, params, watch_logits=watch)


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


def assert_equal(
    reference: Reference, policy: Policy, budget: MemoryBudget, offload_dir: Path
) -> None:
    """The engine gives the reference's tokens, and its logits within 1e-4."""
    watch = LogitsByRow()
    params = SamplingParams(max_tokens=len(reference.tokens[0]))
    out = run(reference.folder, reference.prompts, policy, offload_dir, params, budget, watch)
    assert tokens_of(out) == reference.tokens
    watch.check(reference.logits)


# ---- Rows that end at an end-of-sequence token


@dataclass(frozen=True)
class Ended:
    """A folder whose config names `eos`, and what transformers generates with it."""

    folder: Path
    eos: int
    prompts: list[list[int]]
    tokens: list[list[int]]


def folder_with_eos(source: Path, folder: Path, eos: int | list[int]) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    return folder


def token_that_ends(rows: Sequence[Sequence[int]]) -> int:
    """The token that makes rows end at the most different steps, while one at least goes on to its
    length."""

    def lengths(token: int) -> set[int]:
        return {row.index(token) if token in row else len(row) for row in rows}

    everywhere = Counter(t for row in rows for t in set(row))
    return max(
        (t for t, n in everywhere.items() if n < len(rows)), key=lambda t: (len(lengths(t)), -t)
    )
