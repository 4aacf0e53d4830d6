"""Every format of weights gives the tokens of transformers' model with what the format stands for,
wherever its rows lie: quantised checkpoints read in place, and what switches make of plain ones.

A format of checkpoints is one row of quantisers.QUANTISERS.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.checkpoint.formats import FORMATS, Codec
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.core.units import ALIGN
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import BlockShape, Depth
from flexgen_h2o.engine.report import sizes_of
from flexgen_h2o.kernels import products
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.models import spec_from_folder
from tests.parity import offset_format
from tests.parity.cases import CONFIGURATIONS, FAMILY_SHAPES, PLACEMENTS, SHAPES, thinned
from tests.parity.conftest import LENGTHS, NEW_TOKENS
from tests.parity.quantisers import MIXTURES, QUANTISERS, save_quantised
from tests.parity.reference import (
    LogitsByRow,
    Reference,
    assert_equal,
    make_reference,
    random_model,
    random_prompts,
    run,
    tokens_of,
)

PARAMS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
# Formats that a policy's switches ask for.
SWITCHES: dict[str, dict[str, Any]] = {
    "packed in 4 bits": {"compress_weight": True, "weight_bits": 4},
    "packed in 8 bits": {"compress_weight": True, "weight_bits": 8},
    "products in int8": {"int8_compute": True},
    "products in int8 of 4 bits": {"int8_compute": True, "compress_weight": True},
}
IN_INT8 = tuple(SWITCHES)[2:]
# Of models that nearly tie with the usual seed; in int8, whose best token is farther from the next
# than MIN_GAP at every step.
SEEDS = {("packed in 8 bits", "gpt_neox"): 1, ("packed in 4 bits", "untied head"): 1}
for _name, _seeds in zip(
    IN_INT8,
    ((20, 148, 26, 24, 18, 1, 12, 38, 18), (17, 96, 25, 3, 64, 1, 186, 56, 20)),
    strict=True,
):
    for _shape, _seed in zip((*SHAPES, "llama", "gpt_neox"), _seeds, strict=True):
        SEEDS[_name, _shape] = _seed
MIN_GAP = 0.1
# In int8 most logits are equal; a rounding error before the quantiser moves a code by one now and
# then, which is a hundredth of an input's largest value times a weight.
MEDIAN_TOLERANCE = 1e-5
LOGIT_TOLERANCE = 0.05


# ---- What switches make of a model


ROUTERS = (".gate.weight", ".router.weight")
TRANSPOSED = {"gpt_oss": ("experts.gate_up_proj", "experts.down_proj")}  # stored for x W


def unpacked(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """The model with its matrices packed and unpacked again."""
    found = copy.deepcopy(model)
    transposed = TRANSPOSED.get(model.config.model_type, ())
    with torch.no_grad():
        for name, value in found.named_parameters():
            if value.dim() > 1 and not name.endswith((*ROUTERS, "_bias")):
                stored = value.transpose(1, 2) if name.endswith(transposed) else value
                rows = stored.flatten(0, -2)  # of all experts
                numbers = unpack_rows.torch(pack_rows(rows, bits), bits, torch.empty(rows.shape))
                stored.copy_(numbers.view(stored.shape))
    return found


def codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as whole numbers of at most 127, in float64, and what one is worth."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale.masked_fill(scale == 0, 1)).round().double(), scale.double()


def codes_of_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`codes_of` a matrix that was packed in 4 bits. The scale is that of the largest value that
    codes could stand for: 0 and 15 in each group of a row."""
    n, columns = weight.shape
    packed = pack_rows(weight, 4)
    values = unpack_rows.torch(packed, 4, torch.empty(n, columns))
    ends = packed[:, 4 * SlotPacking(columns, 4).value_words :].contiguous().view(torch.bfloat16)
    scale, least = ends.float().view(n, -1, 2).unbind(2)
    largest = torch.maximum(least.abs(), (least + 15 * scale).abs()).amax(dim=1, keepdim=True)
    steps = torch.full_like(largest, 127) / largest  # many values are between two codes
    return (values * steps.masked_fill(largest == 0, 0)).round().double(), largest.double() / 127


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


def in_int8(model: PreTrainedModel, codes: Callable[..., Any]) -> PreTrainedModel:
    """The model with its linear layers in int8, and rows of its tables as they are looked up
    there."""
    found = copy.deepcopy(model)
    for parent in list(found.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                bias = None if layer.bias is None else layer.bias.data
                setattr(parent, name, Int8Linear(*codes(layer.weight.data), bias))
    with torch.no_grad():
        for table in found.modules():
            if isinstance(table, nn.Embedding):
                numbers, scale = codes(table.weight)
                table.weight.copy_(numbers * scale)
    return found


AS_COMPUTED: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = dict(
    zip(
        SWITCHES,
        (
            partial(unpacked, bits=4),
            partial(unpacked, bits=8),
            partial(in_int8, codes=codes_of),
            partial(in_int8, codes=codes_of_4_bits),
        ),
        strict=True,
    )
)


@pytest.fixture(scope="module", autouse=True)
def known_format() -> Iterator[None]:
    """The tests' own format, as a new row of FORMATS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "offset", offset_format.__name__)
        yield


@pytest.fixture(scope="module")
def in_format(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """A checkpoint for a format, and the tokens that transformers makes of what it stands for; of a
    shape, or of the format's own."""

    @cache
    def made(form: str, shape: str = "") -> Reference:
        folder = tmp_path_factory.mktemp("model")
        if form in SWITCHES:
            known = SHAPES | FAMILY_SHAPES
            model = random_model(SEEDS.get((form, shape), 0), **known[shape])
            model.save_pretrained(folder)
            computed = AS_COMPUTED[form](model)
        else:
            computed = random_model(2, **(MIXTURES[shape] if shape else QUANTISERS[form].shape))
            save_quantised(computed, folder, QUANTISERS[form])
        decoded = tmp_path_factory.mktemp("decoded")
        reference = make_reference(computed, decoded, random_prompts(LENGTHS), NEW_TOKENS)
        if form in IN_INT8:
            best = torch.cat(reference.logits).topk(2).values
            assert (best[:, 0] - best[:, 1]).min() > MIN_GAP
        return replace(reference, folder=folder)

    return made


# ---- Formats x families x placements


NAMES = list(CONFIGURATIONS)
PLACES = (
    "all on device",
    "all on host",
    "all on disk",
    "everything split 30/30",
    "weights split three ways",
)
HELD = (
    ("all on disk", "device, 2x2"),
    ("everything split 30/30", "device, 2x2"),
    ("everything split 30/30", "3x1, joined"),
)
PACKED, INT8 = (tuple(SWITCHES)[i : i + 2] for i in (0, 2))
OF_FAMILIES = (*list(SHAPES)[1:], "llama", "gpt_neox", "qwen3", "mixtral", "gpt_oss")
OF_MIXTURES = [
    (name, mixture) for name, known in QUANTISERS.items() if known.dims == 2 for mixture in MIXTURES
]
# Each place meets several configurations; 4 and 8 bits take turns.
CASES = [
    *thinned([(name, "", *held) for name in QUANTISERS for held in HELD], 2),
    *thinned([(*one, HELD[2][0], HELD[2][1]) for one in OF_MIXTURES], 10),
    *thinned(
        [
            (PACKED[(i + j) % 2], "normal", place, NAMES[(i + 3 * j) % len(NAMES)])
            for i, place in enumerate(PLACES)
            for j in range(3)
        ],
        2,
    ),
    *thinned(
        [
            (PACKED[(s + 1) % 2], shape, PLACES[2 * s % 5], NAMES[2 * s % len(NAMES)])
            for s, shape in enumerate(OF_FAMILIES)
        ],
        2,
    ),
    *thinned(
        [
            (INT8[(i + j + 1) % 2], "normal", place, NAMES[(i + 3 * j) % len(NAMES)])
            for i, place in enumerate(PLACES)
            for j in range(2)
        ],
        1,
    ),
    *thinned(
        [
            (INT8[(s + 1) % 2], shape, PLACES[s % 5], NAMES[(3 * s + 1) % len(NAMES)])
            for s, shape in enumerate(OF_FAMILIES[: len(SHAPES) + 1])
        ],
        1,
    ),
]


@pytest.mark.parametrize(("form", "shape", "placement", "configuration"), CASES)
def test_tokens_are_those_of_transformers(
    form: str,
    shape: str,
    placement: str,
    configuration: str,
    in_format: Callable[..., Reference],
    offload_dir: Path,
) -> None:
    """Parts begin within blocks, words and the rows of an offset; plain matrices lie beside decoded
    ones. Experts are decoded three at a time, or all; in FP8 one is half plain."""
    known = in_format(form, shape)
    chosen = CONFIGURATIONS[configuration]
    group = 3 if shape in ("qwen3_moe", "olmoe") else 0
    switches = SWITCHES.get(form, {"expert_group": group} if group else {})
    policy = chosen.policy(PLACEMENTS[placement], **switches)
    if form not in IN_INT8:
        assert_equal(known, policy, chosen.budget, offload_dir)
        return
    watch = LogitsByRow()
    out = run(known.folder, known.prompts, policy, offload_dir, PARAMS, chosen.budget, watch)
    assert tokens_of(out) == known.tokens
    off = torch.cat(watch.of_rows)
    off = (off - torch.cat(known.logits)).abs()
    assert off.max() <= LOGIT_TOLERANCE and off.median() <= MEDIAN_TOLERANCE


@pytest.mark.parametrize("form", QUANTISERS)
def test_switches_of_the_policy_come_first(
    form: str, in_format: Callable[..., Reference], tmp_path: Path
) -> None:
    """--compress-weight packs what the checkpoint stands for."""
    known = in_format(form)
    known.model.save_pretrained(tmp_path / "decoded")
    policy = Policy(2, 2, compress_weight=True, weight_bits=8)
    found, want = (
        tokens_of(run(folder, known.prompts, policy, tmp_path / "offload", PARAMS))
        for folder in (known.folder, tmp_path / "decoded")
    )
    assert found == want


@pytest.mark.parametrize(
    ("form", "mixture"),
    [
        *((form, "") for form in QUANTISERS if form != "offset"),
        ("awq", "olmoe"),
        ("fp8", "mixtral"),
    ],
)
def test_quantised_products_in_int8(
    form: str, mixture: str, in_format: Callable[..., Reference], tmp_path: Path
) -> None:
    """As near to the numbers as int8 with a scale a row is, nothing packed, and the same from every
    tier."""
    known = in_format(form, mixture)
    policies = [
        Policy(2, 2, percent=(*place, 100, 0, 100, 0), int8_compute=True)
        for place in ((100, 0), (30, 0))
    ]
    first, other = (
        tokens_of(run(known.folder, known.prompts, policy, tmp_path, PARAMS)) for policy in policies
    )
    assert first == other and not (tmp_path / "weights" / "packed").exists()
    assert (torch.tensor(first) == torch.tensor(known.tokens))[:, :4].float().mean() > 0.5


# ---- The same bits however weights are held


def logits_of(known: Reference, *llm: Any, **options: Any) -> torch.Tensor:
    watch = LogitsByRow()
    with LLM(str(known.folder), *llm, **options) as made:
        made.generate(known.prompts, PARAMS, watch_logits=watch)
    return torch.stack(watch.of_rows)


@pytest.mark.parametrize(
    ("dtype", "eviction", "switches"),
    [
        ("bfloat16", None, {}),
        ("float32", H2O(heavy_size=4, recent_size=2), {"compress_cache": True}),
        ("bfloat16", H2O(heavy_size=4, recent_size=2), {"compress_weight": True}),
    ],
)
def test_int8_is_the_same_wherever_weights_lie(
    dtype: str,
    eviction: object,
    switches: dict[str, bool],
    in_format: Callable[..., Reference],
    offload_dir: Path,
) -> None:
    """To the bit: sums are whole numbers, however a matrix is split."""
    known = in_format("products in int8", "normal")
    held = [
        ("all on device", "2x2"),
        ("weights split three ways", "device, 2x2"),
        ("weights on disk", "2x2"),
        ("weights on disk", "device, 2x2"),
    ]
    first, *others = (
        logits_of(
            known,
            Policy(2, 2, PLACEMENTS[placement], int8_compute=True, **switches),
            eviction,
            dtype=dtype,
            budget=CONFIGURATIONS[configuration].budget,
            offload_dir=offload_dir,
        )
        for placement, configuration in held
    )
    assert torch.isfinite(first).all() and all(torch.equal(first, other) for other in others)


@pytest.mark.skipif(
    not products.has_loop(torch.bfloat16, in_order=True), reason="no loop here for rows in order"
)
@pytest.mark.parametrize(
    ("packs", "placement"),
    [
        (False, "weights on disk"),
        (False, "all on device"),
        (True, "weights split three ways"),
    ],
)
def test_experts_are_multiplied_from_codes_in_bf16(
    packs: bool,
    placement: str,
    in_format: Callable[..., Reference],
    offload_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bits of what is decoded first; the codes stay in the ring meanwhile. Packed, rows of
    96 are not taken."""
    ways = list[int]()
    policy = Policy(3, 2, PLACEMENTS[placement], expert_group=3, compress_weight=packs)
    run_jobs = products.run
    monkeypatch.setattr(
        products,
        "run",
        lambda jobs, *rest: (ways.extend(j.coded for j in jobs), run_jobs(jobs, *rest)),
    )
    at = {"dtype": "bfloat16", "offload_dir": offload_dir}
    found = logits_of(in_format("mxfp4"), policy, **at)
    assert set(ways) == {0, products.PACKED if packs else products.MXFP4}
    monkeypatch.setattr(Codec, "coded_parts", lambda *_: ())
    ways.clear()
    assert torch.equal(found, logits_of(in_format("mxfp4"), policy, **at)) and set(ways) == {0}


# ---- Plans, random weights, errors


def test_a_plan_counts_the_bytes_of_the_format(in_format: Callable[..., Reference]) -> None:
    """Resident weights take what the files hold, scales as float32 and plain numbers in the compute
    dtype."""
    folder = in_format("4 bits, groups with zeros").folder
    spec, _ = spec_from_folder("tiny", folder)
    policy = Policy(percent=(100, 0, 100, 0, 100, 0))
    shape = BlockShape(1, 1, 1, (1,) * spec.num_blocks)
    plan = MemoryPlanner(spec, policy, 2, True).plan(shape, Depth(1, 1, 1))
    held = {torch.int32: 1, torch.bfloat16: 2, torch.float32: 0.5, torch.int64: 0}
    stored = load_file(folder / "model.safetensors").values()
    want = sum(tensor.nbytes * held[tensor.dtype] for tensor in stored)
    assert want <= plan.size("weights") <= want + ALIGN * len(stored)
    assert sizes_of(spec, {}, 2)[0] == want  # what a report calls the model's size


def test_an_unknown_format_is_refused_with_the_known_ones(
    in_format: Callable[..., Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_format("offset").folder
    monkeypatch.delitem(FORMATS, "offset")
    says = r"config.json: .*'offset' is not supported, only mxfp4, fp8, .*; give"
    with pytest.raises(UsageError, match=says):
        LLM(str(folder))
