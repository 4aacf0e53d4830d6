"""Every format of weights gives the tokens of transformers' model with what the format stands for,
wherever its rows lie: quantised checkpoints read in place, and what switches make of plain ones.

A format of checkpoints is one row of quantisers.QUANTISERS.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.checkpoint.formats import FORMATS, Codec
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import ALIGN
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import BlockShape, Depth
from flexgen_h2o.engine.report import sizes_of
from flexgen_h2o.kernels import products
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
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
INT8 = "products in int8"
SWITCHES: dict[str, dict[str, Any]] = {
    "packed in 4 bits": {"compress_weight": True, "weight_bits": 4},
    "packed in 8 bits": {"compress_weight": True, "weight_bits": 8},
    INT8: {"int8_compute": True},
}
PACKED = tuple(SWITCHES)[:2]
OF_FAMILIES = (*list(SHAPES)[1:], "llama", "gpt_neox", "qwen3", "mixtral", "gpt_oss")
# Of models that nearly tie with the usual seed; in int8, whose best token is farther from the next
# than MIN_GAP at every step.
INT8_SEEDS = dict(
    zip((*SHAPES, "llama", "gpt_neox"), (20, 148, 26, 24, 18, 1, 12, 38, 18), strict=True)
)
SEEDS = {(INT8, shape): seed for shape, seed in INT8_SEEDS.items()}
SEEDS[PACKED[0], "untied head"] = 1
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


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as whole numbers of at most 127, times what one is worth."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale.masked_fill(scale == 0, 1)).round() * scale


def in_int8(model: PreTrainedModel) -> PreTrainedModel:
    """The model with rows of its tables, matrices and linear layers' inputs in int8."""
    found = copy.deepcopy(model)
    for layer in found.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            layer.weight.data = rounded(layer.weight.data)
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return found


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
            bits = SWITCHES[form].get("weight_bits")
            computed = unpacked(model, bits) if bits else in_int8(model)
        else:
            computed = random_model(2, **(MIXTURES[shape] if shape else QUANTISERS[form].shape))
            save_quantised(computed, folder, QUANTISERS[form])
        decoded = tmp_path_factory.mktemp("decoded")
        reference = make_reference(computed, decoded, random_prompts(LENGTHS), NEW_TOKENS)
        if form == INT8:
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
OF_MIXTURES = [
    (name, mixture) for name, known in QUANTISERS.items() if known.dims == 2 for mixture in MIXTURES
]
CASES = [
    *thinned([(name, "", *held) for name in QUANTISERS for held in HELD], 2),
    *thinned([(*one, *HELD[2]) for one in OF_MIXTURES], 10),
]
# Each place meets several configurations, and each other shape one; two formats take turns.
for _forms, _shapes, _one_in in (
    (PACKED, OF_FAMILIES, 2),
    ((INT8, INT8), list(INT8_SEEDS)[1:], 1),
):
    _cases = [
        (_forms[(i + j) % 2], "normal", place, NAMES[(i + 3 * j) % len(NAMES)])
        for i, place in enumerate(PLACES)
        for j in range(2)
    ]
    _cases += [
        (_forms[(i + 1) % 2], shape, PLACES[2 * i % 5], NAMES[(3 * i + 1) % len(NAMES)])
        for i, shape in enumerate(_shapes)
    ]
    CASES += thinned(_cases, _one_in)


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
    if form != INT8:
        assert_equal(known, policy, chosen.budget, offload_dir)
        return
    watch = LogitsByRow()
    out = run(known.folder, known.prompts, policy, offload_dir, PARAMS, chosen.budget, watch)
    assert tokens_of(out) == known.tokens
    off = torch.cat(watch.of_rows)
    off = (off - torch.cat(known.logits)).abs()
    assert off.max() <= LOGIT_TOLERANCE and off.median() <= MEDIAN_TOLERANCE


@pytest.mark.parametrize("form", thinned(QUANTISERS, 3))
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
    thinned(
        [
            *((form, "") for form in QUANTISERS if form != "offset"),
            ("awq", "olmoe"),
            ("fp8", "mixtral"),
            (PACKED[0], "normal"),
        ],
        2,
    ),
)
def test_quantised_products_in_int8(
    form: str, mixture: str, in_format: Callable[..., Reference], tmp_path: Path
) -> None:
    """As near to the numbers as int8 with a scale a row is, and the same from every tier. What is
    quantised already is not packed."""
    known = in_format(form, mixture)
    switches = {**SWITCHES.get(form, {}), "int8_compute": True}
    first, other = (
        tokens_of(run(known.folder, known.prompts, policy, tmp_path, PARAMS))
        for policy in (
            Policy(2, 2, (*place, 100, 0, 100, 0), **switches) for place in ((100, 0), (30, 0))
        )
    )
    assert first == other
    assert (tmp_path / "weights" / "packed").exists() is (form in SWITCHES)
    assert (torch.tensor(first) == torch.tensor(known.tokens))[:, :4].float().mean() > 0.5


# ---- The same bits however weights are held


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
    known = in_format("mxfp4")

    def logits() -> torch.Tensor:
        watch = LogitsByRow()
        with LLM(known.folder, policy, dtype="bfloat16", offload_dir=offload_dir) as llm:
            llm.generate(known.prompts, PARAMS, watch_logits=watch)
        return torch.stack(watch.of_rows)

    found = logits()
    assert set(ways) == {0, products.PACKED if packs else products.MXFP4}
    monkeypatch.setattr(Codec, "coded_parts", lambda *_: ())
    ways.clear()
    assert torch.equal(found, logits()) and set(ways) == {0}


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
