"""Compressed weights give the tokens of the model whose weights are the unpacked ones, wherever
they lie."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from flexgen_h2o import Policy, SamplingParams
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from tests.parity.cases import CONFIGURATIONS, FAMILY_SHAPES, PLACEMENTS, SHAPES, thinned
from tests.parity.conftest import LENGTHS, NEW_TOKENS
from tests.parity.reference import (
    Reference,
    assert_equal,
    make_reference,
    opened,
    random_model,
    random_prompts,
    run,
    tokens_of,
)

ROUTERS = (".gate.weight", ".router.weight")
TRANSPOSED = {"gpt_oss": ("experts.gate_up_proj", "experts.down_proj")}  # stored for x W


def unpacked(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """The model with its matrices packed and unpacked again."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in found.named_parameters():
            if value.dim() > 1 and not name.endswith((*ROUTERS, "_bias")):
                stored = (
                    value.transpose(1, 2)
                    if name.endswith(TRANSPOSED.get(model.config.model_type, ()))
                    else value
                )
                rows = stored.flatten(0, -2)  # of all experts
                unpacked = unpack_rows.torch(pack_rows(rows, bits), bits, torch.empty(rows.shape))
                stored.copy_(unpacked.view(stored.shape))
    return found


SEEDS = {("gpt_neox", 8): 1, ("untied head", 4): 1}  # of models that nearly tie with the usual one


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Reference]:
    """A model of a shape on disk as it is, and what transformers makes of it unpacked from so many
    bits."""

    @cache
    def made(shape: str, bits: int) -> Reference:
        model = random_model(SEEDS.get((shape, bits), 0), **(SHAPES | FAMILY_SHAPES)[shape])
        prompts = random_prompts(LENGTHS)
        known = make_reference(
            unpacked(model, bits), tmp_path_factory.mktemp("unpacked"), prompts, NEW_TOKENS
        )
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        return replace(known, folder=folder)

    return made


NAMES = list(CONFIGURATIONS)
# Where weights may lie; each place meets three configurations, 4 and 8 bits take turns.
PLACES = (
    "all on device",
    "all on host",
    "all on disk",
    "everything split 30/30",
    "weights split three ways",
)
CASES = [
    ("normal", place, NAMES[(i + 3 * j) % len(NAMES)], 4 + 4 * ((i + j) % 2))
    for i, place in enumerate(PLACES)
    for j in range(3)
] + [
    (shape, PLACES[(2 * s + p) % 5], NAMES[(2 * s + 5 * p) % len(NAMES)], 8 - 4 * ((s + p) % 2))
    for s, shape in enumerate(
        [*list(SHAPES)[1:], "llama", "gpt_neox", "qwen3", "mixtral", "gpt_oss"]
    )
    for p in range(2)
]


@pytest.mark.parametrize(("shape", "placement", "configuration", "bits"), thinned(CASES, 2))
def test_tokens_are_those_of_the_unpacked_weights(
    shape: str,
    placement: str,
    configuration: str,
    bits: int,
    packed: Callable[[str, int], Reference],
    offload_dir: Path,
) -> None:
    chosen = CONFIGURATIONS[configuration]
    policy = chosen.policy(PLACEMENTS[placement], compress_weight=True, weight_bits=bits)
    assert_equal(packed(shape, bits), policy, chosen.budget, offload_dir)


POLICY = Policy(2, 2, PLACEMENTS["weights split three ways"], compress_weight=True)
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def test_half_precision_is_packed_as_it_is_stored(tmp_path: Path) -> None:
    """A bfloat16 checkpoint, also as a .bin file, computed in fp32: vectors are converted when
    read, matrices unpacked."""
    half = random_model().to(torch.bfloat16)
    half.save_pretrained(tmp_path / "model")
    half.config.save_pretrained(tmp_path / "bin")
    torch.save(half.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    prompts = random_prompts(LENGTHS)
    known = make_reference(unpacked(half.float(), 8), tmp_path / "unpacked", prompts, NEW_TOKENS)
    policy = replace(POLICY, weight_bits=8)
    for name in ("model", "bin"):
        out = run(tmp_path / name, prompts, policy, tmp_path / "offload", PARAMS)
        assert tokens_of(out) == known.tokens


@pytest.mark.parametrize("bits", [4, 8])
def test_random_weights_are_those_of_the_checkpoint_packed(bits: int, tmp_path: Path) -> None:
    """They are packed without writing the checkpoint, whose values they are."""
    prompts = [[5, 6, 7, 8], [9, 10]]
    policy = replace(POLICY, weight_bits=bits)
    shape = Path("opt-tiny")
    with opened(shape, policy, tmp_path / "packed", path="_DUMMY_") as llm:
        found = tokens_of(llm.generate(prompts, PARAMS))
    (file,) = (tmp_path / "packed").rglob("*.safetensors")
    assert file.parent.parent.name == "packed"
    with opened(shape, Policy(), tmp_path / "whole", path="_DUMMY_") as llm:
        llm.generate(prompts, PARAMS)
    (file,) = (tmp_path / "whole").rglob("*.safetensors")
    assert tokens_of(run(file.parent, prompts, policy, tmp_path / "again", PARAMS)) == found
