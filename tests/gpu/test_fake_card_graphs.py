"""Graphs of decode steps on a card of CPU memory (fake_card.py), which does again what it was
given."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from flexgen_h2o import SamplingParams
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.engine.graphs import PLAIN_SWEEPS
from flexgen_h2o.tiers.device import CudaDevice
from tests.gpu.fake_card import Card
from tests.gpu.test_cuda_parity import model_folder, prompts
from tests.gpu.test_fake_card import (
    CONFIGS,
    EVICTIONS,
    FAMILIES,
    FEW_TOKENS,
    like_the_cpu,
    some_slow,
)

graphs_like_the_cpu = partial(like_the_cpu, placement="all on the device", has_graphs=True)


def made(card: Card) -> int:
    return sum(count for (_, what), count in card.counts.items() if what == "graph")


def launches(card: Card) -> int:
    """Of graphs."""
    places = card.places.items()
    return sum(n for (_, what, at), n in places if what == "launch" and at.startswith("graph"))


@pytest.mark.parametrize(
    ("family", "eviction", "packed"),
    some_slow(product(FAMILIES, EVICTIONS, (False, True)), {("llama", "h2o", False)}),
)
def test_steps_of_the_same_rows_are_one_launch(
    tmp_path, family: str, eviction: str, packed: bool
) -> None:
    folder = model_folder(tmp_path, CONFIGS[family])
    card = graphs_like_the_cpu(
        folder, eviction=EVICTIONS[eviction], params=FEW_TOKENS, compress_cache=packed
    )
    assert made(card) == GRAPHS and launches(card) == REPLAYS


# Two blocks of rows, of two micro-batches and one; attention of each micro-batch, an MLP of a
# block's; of two layers.
GRAPHS = 2 * (3 + 2)
REPLAYS = GRAPHS * (FEW_TOKENS.max_tokens - 1 - PLAIN_SWEEPS)


# Rows are sorted by these: one leaves, the last takes its place, and leaves too; nobody takes its
# place.
LENGTHS = [SamplingParams(n, ignore_eos=True) for n in (3, 18, 18, 11, 18, 18, 18)]


@pytest.mark.parametrize("eviction", EVICTIONS.values(), ids=EVICTIONS)
def test_graphs_are_made_anew_for_other_rows_alone(tmp_path, eviction: Any) -> None:
    folder = model_folder(tmp_path, CONFIGS["llama"])
    card = graphs_like_the_cpu(folder, eviction=eviction, params=LENGTHS)
    assert made(card) == 2 * 2 * (2 + 1)


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("what", ["window", "common prefix"])
def test_windows_and_a_common_prefix_in_graphs(
    tmp_path, monkeypatch, what: str, eviction: str
) -> None:
    windows = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
    config = {**CONFIGS["llama"], "model_type": "qwen2", "use_sliding_window": True, **windows}
    folder = model_folder(tmp_path, config if what == "window" else CONFIGS["llama"])
    if what == "common prefix":
        given = [[*range(5, 45), *own] for own in prompts()]
        monkeypatch.setattr("tests.gpu.test_cuda_parity.prompts", lambda: given)
    card = graphs_like_the_cpu(folder, eviction=EVICTIONS[eviction], params=FEW_TOKENS)
    assert launches(card) == REPLAYS


class BrokenGraph:
    """A capture that `torch.cuda` has begun, and cannot end."""

    replay = None

    def capture_begin(self, *given: Any, **more: Any) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError(
            "CUDA error: operation not permitted when stream is capturing\nmore lines"
        )


@pytest.mark.parametrize(
    "error", [None, torch.cuda.OutOfMemoryError("all taken"), KeyboardInterrupt()], ids=str
)
def test_a_card_that_makes_no_graph_says_how_to_go_without(
    monkeypatch, error: BaseException | None
) -> None:
    def issue() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", BrokenGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr("flexgen_h2o.tiers.device._graph_stream", lambda device: None)
    card = CudaDevice.__new__(CudaDevice)
    card.torch_device = torch.device("cpu")
    with pytest.raises(FlexgenError if error is None else type(error)) as caught:
        card.graph(issue, None)
    if error is None:
        assert "when stream is capturing); use --overlap false" in str(
            caught.value
        ) and "\n" not in str(caught.value)
