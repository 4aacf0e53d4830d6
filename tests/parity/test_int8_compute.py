"""Products in int8 give the tokens of a model whose linear layers do the same arithmetic, wherever
weights lie; with weights in 4 bits, of one whose int8 weights are made of those."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.kvcache.eviction import H2O
from tests.parity.cases import CONFIGURATIONS, FAMILY_SHAPES, PLACEMENTS, SHAPES
from tests.parity.conftest import LENGTHS, NEW_TOKENS
from tests.parity.reference import (
    LogitsByRow,
    Reference,
    make_reference,
    random_model,
    random_prompts,
    run,
    tokens_of,
)

# Of models whose best token is farther from the next than MIN_GAP, at every step.
SEEDS = dict(zip(SHAPES, (20, 148, 26, 24, 18, 1, 12), strict=True)) | {"llama": 38, "gpt_neox": 18}
SEEDS_OF_4_BITS = dict(zip(SEEDS, (17, 96, 25, 3, 64, 1, 186, 56, 20), strict=True))
MIN_GAP = 0.1
# Most logits are equal; a rounding error before the quantiser moves a code by one now and then,
# which is a hundredth of an input's largest value times a weight.
MEDIAN_TOLERANCE = 1e-5
LOGIT_TOLERANCE = 0.05


def codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as whole numbers of at most 127, in float64, and what one is worth."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale.masked_fill(scale == 0, 1)).round().double(), scale.double()


class Int8Linear(nn.Module):
    """A linear layer in int8: one scale for each row of the input and of the weight."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.codes = codes
        self.scale = scale
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = codes_of(x)
        out = (functional.linear(codes, self.codes) * scale * self.scale.squeeze(1)).float()
        return out if self.bias is None else out + self.bias


def codes_of_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`codes_of` a matrix that was packed in 4 bits. The scale is that of the largest value that
    codes could stand for: 0 and 15 in each group of a row."""
    n, columns = weight.shape
    packed = pack_rows(weight, 4)
    values = unpack_rows.torch(packed, 4, torch.empty(n, columns))
    scale, least = (
        packed[:, 4 * SlotPacking(columns, 4).value_words :]
        .contiguous()
        .view(torch.bfloat16)
        .float()
        .view(n, -1, 2)
        .unbind(2)
    )
    largest = torch.maximum(least.abs(), (least + 15 * scale).abs()).amax(dim=1, keepdim=True)
    steps = (
        torch.full_like(largest, 127) / largest
    )  # many values are in the middle between two codes
    return (values * steps.masked_fill(largest == 0, 0)).round().double(), largest.double() / 127


CODES = {8: codes_of, 4: codes_of_4_bits}  # by the bits that weights are held in


def in_int8(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """The model with its linear layers in int8, and rows of its tables as they are looked up
    there."""
    found = copy.deepcopy(model)
    for parent in list(found.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                bias = None if layer.bias is None else layer.bias.data
                setattr(parent, name, Int8Linear(*CODES[bits](layer.weight.data), bias))
    with torch.no_grad():
        for table in found.modules():
            if isinstance(table, nn.Embedding):
                codes, scale = CODES[bits](table.weight)
                table.weight.copy_(codes * scale)
    return found


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """A model of a shape on disk as it is, and what transformers makes of it in int8, from weights
    in so many bits."""

    @cache
    def made(shape: str, bits: int = 8) -> Reference:
        seed = SEEDS_OF_4_BITS[shape] if bits == 4 else SEEDS[shape]
        model = random_model(seed, **(SHAPES | FAMILY_SHAPES)[shape])
        prompts = random_prompts(LENGTHS)
        known = make_reference(
            in_int8(model, bits), tmp_path_factory.mktemp("int8"), prompts, NEW_TOKENS
        )
        best = torch.cat(known.logits).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > MIN_GAP
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        return replace(known, folder=folder)

    return made


NAMES = list(CONFIGURATIONS)
# Where weights may lie; each place meets two configurations, and of weights in 4 bits others.
PLACES = (
    "all on device",
    "all on host",
    "all on disk",
    "everything split 30/30",
    "weights split three ways",
)
PAIRS = [
    (p, NAMES[(i + 3 * j) % len(NAMES)], 4 + 4 * ((i + j) % 2))
    for i, p in enumerate(PLACES)
    for j in range(2)
]
OTHER_SHAPES = [
    (shape, PLACES[s % 5], NAMES[(3 * s + 1) % len(NAMES)], 4 + 4 * (s % 2))
    for s, shape in enumerate(list(SEEDS)[1:])
]


def assert_near(
    known: Reference, configuration: str, placement: str, bits: int, offload_dir: Path
) -> None:
    chosen = CONFIGURATIONS[configuration]
    watch = LogitsByRow()
    policy = chosen.policy(PLACEMENTS[placement], int8_compute=True, compress_weight=bits == 4)
    out = run(known.folder, known.prompts, policy, offload_dir, PARAMS, chosen.budget, watch)
    assert tokens_of(out) == known.tokens
    off = torch.cat(
        [torch.stack(watch.rows[row]) - want for row, want in enumerate(known.logits)]
    ).abs()
    assert off.max() <= LOGIT_TOLERANCE
    assert off.median() <= MEDIAN_TOLERANCE


PARAMS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(("placement", "configuration", "bits"), PAIRS)
def test_placement(
    placement: str,
    configuration: str,
    bits: int,
    quantised: Callable[..., Reference],
    offload_dir: Path,
) -> None:
    assert_near(quantised("normal", bits), configuration, placement, bits, offload_dir)


@pytest.mark.parametrize(("shape", "placement", "configuration", "bits"), OTHER_SHAPES)
def test_shape(
    shape: str,
    placement: str,
    configuration: str,
    bits: int,
    quantised: Callable[..., Reference],
    offload_dir: Path,
) -> None:
    assert_near(quantised(shape, bits), configuration, placement, bits, offload_dir)


def test_it_is_told_from_the_model_as_it_is(
    quantised: Callable[..., Reference], offload_dir: Path
) -> None:
    """What the tests above allow is far less than what int8 changes."""
    known = quantised("normal")
    watch = LogitsByRow()
    run(known.folder, known.prompts, Policy(5), offload_dir, PARAMS, watch=watch)
    off = torch.stack([watch.rows[row][0] - want[0] for row, want in enumerate(known.logits)]).abs()
    assert off.median() > 1000 * MEDIAN_TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "eviction", "compress_cache", "compress_weight"),
    [
        ("bfloat16", None, False, False),
        ("float32", H2O(heavy_size=4, recent_size=2), True, False),
        ("bfloat16", H2O(heavy_size=4, recent_size=2), True, True),
        ("float32", None, False, True),
    ],
)
def test_the_same_wherever_weights_lie(
    dtype: str,
    eviction: object,
    compress_cache: bool,
    compress_weight: bool,
    quantised: Callable[..., Reference],
    offload_dir: Path,
) -> None:
    """To the bit: sums are whole numbers, however a matrix is split."""
    known = quantised("normal")
    found = []
    for placement in ("all on device", "weights split three ways", "weights on disk"):
        for stand_in in (False, True):
            watch = LogitsByRow()
            budget = CONFIGURATIONS["device, 2x2" if stand_in else "2x2"].budget
            policy = Policy(
                2,
                2,
                PLACEMENTS[placement],
                int8_compute=True,
                compress_cache=compress_cache,
                compress_weight=compress_weight,
            )
            with LLM(
                str(known.folder),
                policy,
                eviction,
                dtype=dtype,
                budget=budget,
                offload_dir=offload_dir,
            ) as llm:
                llm.generate(known.prompts, PARAMS, watch_logits=watch)
            found.append(
                torch.stack([torch.stack(watch.rows[row]) for row in range(len(known.prompts))])
            )
    assert torch.isfinite(found[0]).all()
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_random_weights(tmp_path: Path) -> None:
    """They are packed without writing the checkpoint; in bf16."""
    policy = Policy(2, 2, PLACEMENTS["weights split three ways"], int8_compute=True)
    with LLM("opt-tiny", policy, path="_DUMMY_", dtype="bfloat16", offload_dir=tmp_path) as llm:
        out = llm.generate([[5, 6, 7, 8], [9, 10]], PARAMS)
    assert [len(row) for row in tokens_of(out)] == [NEW_TOKENS] * 2
    assert [f.parent.parent.name for f in tmp_path.rglob("*.safetensors")] == ["packed"]
