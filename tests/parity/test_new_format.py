"""A quantised format of checkpoints is one module and one row of `formats.FORMATS`: the whole
engine runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.checkpoint.formats import FORMATS
from flexgen_h2o.core.errors import UsageError
from tests.parity import offset_format
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS
from tests.parity.conftest import LENGTHS, NEW_TOKENS
from tests.parity.offset_format import OFFSET_ROWS
from tests.parity.reference import (
    Reference,
    assert_equal,
    make_reference,
    random_model,
    random_prompts,
    run,
    tokens_of,
)


@pytest.fixture
def known_format() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "offset", offset_format.__name__)
        yield


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A checkpoint in the format, and the tokens that transformers makes of what it stands for."""
    model = random_model(tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    names = [
        name for name, value in model.named_parameters() if value.dim() == 2 and "embed" not in name
    ]
    stored = load_file(folder / "model.safetensors")
    values = dict(model.named_parameters())
    for name in names:
        numbers = stored.pop(name)
        offsets = torch.randn(-(-len(numbers) // OFFSET_ROWS))
        each = offsets.repeat_interleave(OFFSET_ROWS)[: len(numbers), None]
        base = name.removesuffix(".weight")
        stored |= {f"{base}.less": numbers - each, f"{base}.offset": offsets}
        with torch.no_grad():
            values[name].copy_((numbers - each) + each)
    reference = make_reference(
        model, tmp_path_factory.mktemp("decoded"), random_prompts(LENGTHS), NEW_TOKENS
    )
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "offset"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    return replace(reference, folder=folder)


@pytest.mark.usefixtures("known_format")
@pytest.mark.parametrize(
    ("placement", "configuration"),
    [
        ("all on device", "3x1, joined"),
        ("all on disk", "device, 2x2"),
        ("everything split 30/30", "device, 2x2"),
        ("everything split 30/30", "3x1, joined"),
    ],
)
def test_tokens_are_those_of_transformers(
    quantised: Reference, placement: str, configuration: str, offload_dir: Path
) -> None:
    """Wherever rows lie: parts that begin within the rows of an offset, and plain tables beside
    decoded matrices."""
    chosen = CONFIGURATIONS[configuration]
    assert_equal(quantised, chosen.policy(PLACEMENTS[placement]), chosen.budget, offload_dir)


@pytest.mark.usefixtures("known_format")
def test_switches_of_the_policy_come_first(quantised: Reference, tmp_path: Path) -> None:
    """--compress-weight packs what the checkpoint stands for."""
    policy = Policy(2, 2, compress_weight=True, weight_bits=8)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    quantised.model.save_pretrained(tmp_path / "decoded")
    found, want = (
        tokens_of(run(folder, quantised.prompts, policy, tmp_path / "offload", params))
        for folder in (quantised.folder, tmp_path / "decoded")
    )
    assert found == want


def test_an_unknown_format_is_refused_with_the_known_ones(quantised: Reference) -> None:
    with pytest.raises(
        UsageError,
        match=r"config.json: .*'offset' is not supported, only mxfp4, fp8, .*; give",
    ):
        LLM(str(quantised.folder))
