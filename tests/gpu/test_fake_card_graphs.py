"""Graphs of decode steps on a card of CPU memory (fake_card.py), which does again what it was
given."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from flexgen_h2o import MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.engine.graphs import PLAIN_SWEEPS, StepGraphs
from flexgen_h2o.kvcache.eviction import Tova
from flexgen_h2o.tiers.device import CudaDevice
from tests.gpu.fake_card import Card
from tests.gpu.fake_engine import CardDevice
from tests.gpu.test_cuda_parity import model_folder, prompts
from tests.gpu.test_fake_card import (
    CONFIGS,
    EVICTIONS,
    FAMILIES,
    FEW_TOKENS,
    OLMOE,
    generate,
    on_fake_card,
    some_slow,
)

on_card_with_graphs = partial(on_fake_card, has_graphs=True)


def like_the_cpu(folder, eviction: Any, params: Any = FEW_TOKENS, **more: Any) -> Card:
    """All on the card, whose tokens are the CPU's, without a race."""
    in_ram = MemoryBudget(host="1GiB")
    expected, *_ = generate(
        folder, Policy(4, 1, **more), "cpu", in_ram, eviction=eviction, params=params
    )
    tokens, card = on_card_with_graphs(folder, "all on the device", eviction, params=params, **more)
    assert tokens == expected and not card.races
    return card


def made(card: Card) -> int:
    return sum(count for (_, what), count in card.counts.items() if what == "graph")


def launches(card: Card) -> int:
    """Of graphs."""
    found = (
        count
        for (_, what, where), count in card.places.items()
        if what == "launch" and where.startswith("graph")
    )
    return sum(found)


@pytest.mark.parametrize(
    ("family", "eviction", "packed"),
    some_slow(product(FAMILIES, EVICTIONS, (False, True)), {("llama", "h2o", False)}),
)
def test_steps_of_the_same_rows_are_one_launch(
    tmp_path, family: str, eviction: str, packed: bool
) -> None:
    card = like_the_cpu(
        model_folder(tmp_path, CONFIGS[family]), EVICTIONS[eviction], compress_cache=packed
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
    card = like_the_cpu(model_folder(tmp_path, CONFIGS["llama"]), eviction, LENGTHS)
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
    assert launches(like_the_cpu(folder, EVICTIONS[eviction])) == REPLAYS


def test_graphs_that_were_seldom_used_are_made_later() -> None:
    graphs = StepGraphs(CardDevice(Card(), has_graphs=True))
    sweeps = list[int]()

    def sweep(rows: int | None) -> bool:
        graphs.begin_sweep(rows, lambda: [torch.zeros(1)])
        graphs.run((0, 0), lambda: None, None)
        return graphs._is_used

    for rows, count in enumerate((4, 4, 8, 20)):
        sweeps.append(sum(sweep(rows) for _ in range(count)))
    # Behind two plain sweeps, then behind four, until graphs were worth making, then behind two
    # again.
    assert sweeps == [2, 0, 4, 18]
    assert [sweep(rows) for rows in (3, None, 3, 4, 4, None, 4)] == [
        True,
        False,
        True,
        False,
        False,
        False,
        True,
    ]


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


def test_graphs_need_what_a_sweep_tells_them(tmp_path, monkeypatch) -> None:
    folder = model_folder(tmp_path, CONFIGS["llama"])
    expected, *_ = generate(folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"))
    begin = StepGraphs.begin_sweep

    def forget(graphs: StepGraphs, rows: Any, inputs: Any) -> None:
        kept = graphs._inputs
        begin(graphs, rows, lambda: kept or inputs())

    monkeypatch.setattr(StepGraphs, "begin_sweep", forget)
    tokens, card = on_card_with_graphs(folder, "all on the device")
    assert launches(card) == REPLAYS
    assert tokens != expected


@pytest.mark.parametrize(
    ("placement", "config", "more"),
    [
        ("KV on host", "normal", {}),
        ("weights on host, pinned", "normal", {}),
        ("all on the device", "normal", {"eviction": Tova(heavy_size=4)}),
        ("all on the device", "normal", {"overlap": False}),
        ("all on the device", "olmoe", {}),
        ("attention on the CPU, KV on host", "normal", {}),
    ],
)
def test_other_steps_are_not_graphs(
    tmp_path, placement: str, config: str, more: dict[str, Any]
) -> None:
    folder = model_folder(tmp_path, {**CONFIGS, "olmoe": OLMOE}[config])
    _, card = on_card_with_graphs(
        folder, placement, params=SamplingParams(PLAIN_SWEEPS + 3, ignore_eos=True), **more
    )
    assert not made(card)
