"""Quantised checkpoints, read in place: tokens are those of transformers with what they stand
for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.checkpoint.formats import Codec
from flexgen_h2o.core.units import ALIGN
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import BlockShape, Depth
from flexgen_h2o.engine.report import sizes_of
from flexgen_h2o.kernels import products
from flexgen_h2o.models import spec_from_folder
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, thinned
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

OF_MIXTURES = [
    (name, mixture) for name, known in QUANTISERS.items() if known.dims == 2 for mixture in MIXTURES
]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """A checkpoint in a format, by its name, and the tokens that transformers makes of what it
    stands for; of the format's own shape, or of a mixture."""

    @cache
    def made(name: str, mixture: str | None = None) -> Reference:
        shape = MIXTURES[mixture] if mixture else QUANTISERS[name].shape
        model = random_model(2, **shape)
        folder = tmp_path_factory.mktemp("model")
        save_quantised(model, folder, QUANTISERS[name])
        reference = make_reference(
            model, tmp_path_factory.mktemp("decoded"), random_prompts(LENGTHS), NEW_TOKENS
        )
        return replace(reference, folder=folder)

    return made


HELD = (
    ("all on disk", "device, 2x2"),
    ("everything split 30/30", "device, 2x2"),
    ("everything split 30/30", "3x1, joined"),
)


@pytest.mark.parametrize(
    ("name", "placement", "configuration"),
    thinned([(name, *held) for name in QUANTISERS for held in HELD], 2),
)
def test_tokens_are_those_of_transformers(
    quantised: Callable[..., Reference],
    name: str,
    placement: str,
    configuration: str,
    offload_dir: Path,
) -> None:
    """Wherever rows lie: parts that begin within blocks and words, and plain matrices beside
    decoded ones."""
    chosen = CONFIGURATIONS[configuration]
    assert_equal(quantised(name), chosen.policy(PLACEMENTS[placement]), chosen.budget, offload_dir)


@pytest.mark.parametrize(("name", "mixture"), thinned(OF_MIXTURES, 10))
def test_experts_are_decoded_group_by_group(
    quantised: Callable[..., Reference], name: str, mixture: str, offload_dir: Path
) -> None:
    """Three at a time, or all; in FP8 one that is half plain."""
    chosen = CONFIGURATIONS["3x1, joined"]
    policy = chosen.policy(
        PLACEMENTS["everything split 30/30"], expert_group=0 if mixture == "mixtral" else 3
    )
    assert_equal(quantised(name, mixture), policy, chosen.budget, offload_dir)


@pytest.mark.parametrize(("name", "mixture"), thinned(OF_MIXTURES[::-1], 15))
def test_products_of_experts_in_int8(
    quantised: Callable[..., Reference], name: str, mixture: str, tmp_path: Path
) -> None:
    assert_products_in_int8(quantised(name, mixture), tmp_path)


@pytest.mark.skipif(
    not products.has_loop(torch.bfloat16, in_order=True), reason="no loop here for rows in order"
)
@pytest.mark.parametrize(
    "placement", ["weights on disk", "weights split three ways", "all on device"]
)
@pytest.mark.parametrize("packs", [False, True])
def test_experts_are_multiplied_from_codes_in_bf16(
    quantised: Callable[..., Reference],
    packs: bool,
    placement: str,
    offload_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bits of what is decoded first; the codes stay in the ring meanwhile. Packed, rows of
    96 are not taken."""
    known = quantised("mxfp4")
    ways = list[int]()
    policy = Policy(3, 2, PLACEMENTS[placement], expert_group=3, compress_weight=packs)

    def logits() -> list[torch.Tensor]:
        watch = LogitsByRow()
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        with LLM(str(known.folder), policy, dtype="bfloat16", offload_dir=offload_dir) as llm:
            llm.generate(known.prompts, params, watch_logits=watch)
        return [torch.stack(watch.rows[row]) for row in range(len(known.prompts))]

    run_jobs = products.run
    monkeypatch.setattr(
        products,
        "run",
        lambda jobs, *rest: (ways.extend(j.coded for j in jobs), run_jobs(jobs, *rest)),
    )
    found = logits()
    assert set(ways) == {0, products.PACKED if packs else products.MXFP4}
    monkeypatch.setattr(Codec, "coded_parts", lambda *_: ())
    ways.clear()
    assert all(map(torch.equal, found, logits())) and set(ways) == {0}


@pytest.mark.parametrize("name", QUANTISERS)
def test_packed_from_what_it_stands_for(
    quantised: Callable[..., Reference], name: str, tmp_path: Path
) -> None:
    policy = Policy(2, 2, compress_weight=True, weight_bits=8)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    known = quantised(name)
    known.model.save_pretrained(tmp_path / "decoded")
    found, want = (
        tokens_of(run(folder, known.prompts, policy, tmp_path / "offload", params))
        for folder in (known.folder, tmp_path / "decoded")
    )
    assert found == want


@pytest.mark.parametrize("name", QUANTISERS)
def test_products_in_int8(quantised: Callable[..., Reference], name: str, tmp_path: Path) -> None:
    assert_products_in_int8(quantised(name), tmp_path)


def assert_products_in_int8(known: Reference, scratch: Path) -> None:
    """As near to the numbers as int8 with a scale a row is, nothing packed, and the same from every
    tier."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    policies = [
        Policy(2, 2, percent=(*place, 100, 0, 100, 0), int8_compute=True)
        for place in ((100, 0), (30, 0))
    ]
    first, other = (
        run(known.folder, known.prompts, policy, scratch / "offload", params) for policy in policies
    )
    assert tokens_of(first) == tokens_of(other)
    assert not (scratch / "offload" / "weights" / "packed").exists()
    same = torch.tensor(tokens_of(first)) == torch.tensor(known.tokens)[:, :4]
    assert same.float().mean() > 0.5


def test_a_plan_counts_the_bytes_of_the_format(quantised: Callable[..., Reference]) -> None:
    """Resident weights take what the files hold, scales as float32 and plain numbers in the compute
    dtype."""
    folder = quantised("4 bits, groups with zeros").folder
    spec, _ = spec_from_folder("tiny", folder)
    policy = Policy(percent=(100, 0, 100, 0, 100, 0))
    shape = BlockShape(1, 1, 1, (1,) * spec.num_blocks)
    plan = MemoryPlanner(spec, policy, 2, True).plan(shape, Depth(1, 1, 1))
    held = {torch.int32: 1, torch.bfloat16: 2, torch.float32: 0.5, torch.int64: 0}
    stored = load_file(folder / "model.safetensors").values()
    want = sum(tensor.nbytes * held[tensor.dtype] for tensor in stored)
    assert want <= plan.size("weights") <= want + ALIGN * len(stored)
    assert sizes_of(spec, {}, 2)[0] == want  # what a report calls the model's size
