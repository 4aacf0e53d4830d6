"""What the tests of rows that begin alike share: references of shapes, and which shape runs
where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.parity.cases import CONFIGURATIONS, FAMILY_SHAPES, PLACEMENTS, SHAPES
from tests.parity.conftest import NEW_TOKENS, SEEDS
from tests.parity.reference import Reference, make_reference, random_model

POSITIONS = 64


def references(
    prompts: Callable[[int], list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Reference]:
    """The reference of a shape by its name. prompts: of a seed; the first seed that leads to no
    near tie counts."""

    @cache
    def made(shape: str) -> Reference:
        config = {**(SHAPES | FAMILY_SHAPES)[shape], "max_position_embeddings": POSITIONS}
        for seed in range(5, 30):
            model = random_model(SEEDS.get(shape, 0), **config)
            try:
                return make_reference(
                    model, tmp_path_factory.mktemp("model"), prompts(seed), NEW_TOKENS
                )
            except AssertionError:
                continue
        raise AssertionError(f"{shape}: no prompts without near ties")

    return made


def cases() -> Iterator[tuple[str, str, str]]:
    """(shape, placement, configuration): every placement with the normal shape, each configuration
    in turn; each of the other shapes at one placement."""
    names = list(CONFIGURATIONS)
    turn = 0
    for placement in PLACEMENTS:
        yield "normal", placement, names[turn % len(names)]
        turn += 1
    others = (
        "post-norm, narrow embedding (350m)",
        "odd sizes",
        "llama",
        "llama, one kv-head, odd sizes",
        "llama, rope yarn",
        "qwen2",
        "gpt_neox",
        "gpt_neox, one after the other",
    )
    for s, shape in enumerate(others):
        yield shape, list(PLACEMENTS)[s * 2 % len(PLACEMENTS)], names[turn % len(names)]
        turn += 1
