"""Runs on a card of CPU memory (fake_card.py): tokens, races, launches and syncs, where there is no
card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.ops import Layers
from flexgen_h2o.kernels.warm_up import warm_up_card
from flexgen_h2o.kvcache.eviction import H2ONorm
from flexgen_h2o.planner.cost_model import PROMPT_LAUNCHES
from tests.extras import needs
from tests.gpu import test_cuda_parity
from tests.gpu.fake_card import NAME, Card
from tests.gpu.fake_engine import deferred_transfers, fake_card
from tests.gpu.test_cuda_parity import (
    BUDGET,
    GREEDY,
    H2O,
    PLACEMENTS,
    model_folder,
    prompts,
)

CONFIGS = {
    name: {**config, "num_hidden_layers": 2} for name, config in test_cuda_parity.CONFIGS.items()
}
FEW_TOKENS = SamplingParams(8, ignore_eos=True)  # a sweep takes a second on the fake card
EVICTIONS = {"full": None, "h2o": H2O(heavy_size=6, recent_size=3)}


def generate(folder, policy: Policy, device: str, budget: MemoryBudget, **more: Any):
    return test_cuda_parity.generate(
        folder, policy, device, budget, **{"params": FEW_TOKENS, **more}
    )


def params_of(placement: str) -> SamplingParams:
    """Columns on a disk are to be written back too."""
    return GREEDY if sum(PLACEMENTS[placement]["percent"][2:4]) < 100 else FEW_TOKENS


def like_the_cpu(
    folder,
    placement: str,
    eviction: Any = None,
    params: Any = None,
    has_graphs: bool = False,
    size: tuple[int, int] = (3, 2),
    **more: Any,
) -> Card:
    """Run on the fake card: the tokens are the CPU's, and nothing races. Returns what was
    counted."""
    given = {"eviction": eviction, "params": params or params_of(placement)}
    in_ram = MemoryBudget(host="1GiB")
    expected, *_ = generate(folder, Policy(4, 1, **more), "cpu", in_ram, **given)
    with fake_card(has_graphs) as card:
        policy = Policy(*size, **PLACEMENTS[placement], **more)
        tokens, *_ = generate(folder, policy, "cuda", BUDGET, **given)
    assert tokens == expected
    assert not card.races
    return card


def some_slow(cases: Iterable[tuple[Any, ...]], fast: set[tuple[Any, ...]]) -> list[Any]:
    """A run on the card takes seconds: the default suite has a few."""
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


FAMILIES = ("normal", "llama")
RUNS = product(FAMILIES, EVICTIONS, (False, True), PLACEMENTS)
FAST = {("normal", "h2o", False, "KV on host"), ("llama", "h2o", True, "KV on host")}


@pytest.mark.parametrize(("family", "eviction", "packed", "placement"), some_slow(RUNS, FAST))
def test_tokens_are_those_of_the_cpu_and_nothing_races(
    tmp_path, family: str, eviction: str, packed: bool, placement: str
) -> None:
    folder = model_folder(tmp_path, CONFIGS[family])
    like_the_cpu(folder, placement, EVICTIONS[eviction], compress_cache=packed)


@pytest.mark.parametrize(
    ("eviction", "placement"),
    some_slow(
        product(EVICTIONS, PLACEMENTS), {("h2o", "everything split"), ("full", "KV on disk")}
    ),
)
def test_bytes_that_move_at_the_last_moment_are_the_same(
    tmp_path, eviction: str, placement: str
) -> None:
    """Bytes move once somebody waits for them, beside no card."""
    folder = model_folder(tmp_path, CONFIGS["normal"])
    more: dict[str, Any] = {"eviction": EVICTIONS[eviction], "params": GREEDY}
    in_ram = MemoryBudget(host="1GiB")
    expected, *_ = generate(folder, Policy(4, 1), "cpu", in_ram, **more)
    with deferred_transfers():
        placed = Policy(3, 2, **PLACEMENTS[placement])
        tokens, *_ = generate(folder, placed, "cpu", BUDGET, **more)
    assert tokens == expected


def of_block(card: Card, phase: str, what: str) -> float:
    """What a transformer block takes for a micro-batch in a sweep."""
    return sum(card.per_step(f"{phase} {kind}", what) for kind in ("attention", "mlp"))


KINDS = ("embedding", "attention", "mlp", "head")


ONE_LAUNCH = {**EVICTIONS, "h2o-norm": H2ONorm(heavy_size=6, recent_size=3)}
FAST_BLOCKS = {
    ("llama", "h2o-norm", False)
}  # packed: the loops that stand for the launches compile first


@pytest.mark.parametrize(
    ("family", "eviction", "packed"),
    some_slow(product(FAMILIES, ONE_LAUNCH, (False, True)), FAST_BLOCKS),
)
def test_launches_and_syncs_of_a_block(tmp_path, family: str, eviction: str, packed: bool) -> None:
    """Nothing in a layer waits for the card."""
    folder = model_folder(tmp_path, CONFIGS[family])
    kept = ONE_LAUNCH[eviction]
    card = like_the_cpu(folder, "all on the device", kept, compress_cache=packed)
    for phase, launches in (("decode", 12), ("prefill", 40)):
        assert of_block(card, phase, "launch") <= launches, card.places
        assert of_block(card, phase, "sync") == 0, card.places
    assert of_block(card, "decode", "fence") == 0, card.places


# launches of attention, and of an MLP, in a decode step: the planner adds what others take more
OF_STEP = 5
OF_PREFILL = 13  # launches of a layer with the full cache in 16 bits


@pytest.mark.parametrize(
    ("family", "eviction", "packed"),
    some_slow(product(FAMILIES, EVICTIONS, (False, True)), {("llama", "h2o", True)}),
)
def test_launches_of_prefill_do_not_grow_with_prompts(
    tmp_path, monkeypatch, family: str, eviction: str, packed: bool
) -> None:
    """Nor with their lengths."""
    folder = model_folder(tmp_path, CONFIGS[family])
    random = torch.Generator()
    given = EVICTIONS[eviction], SamplingParams(2, ignore_eos=True)
    # scores and a choice; what lies beside packed slots
    most = OF_PREFILL + 2 * (eviction == "h2o") + packed
    for lengths in ((20,), (20,) * 8, (1, 2, 9, 15, 16, 17, 33, 100)):
        ids = [
            torch.randint(4, 1000, (n,), generator=random.manual_seed(n)).tolist() for n in lengths
        ]
        monkeypatch.setattr("tests.gpu.test_cuda_parity.prompts", lambda ids=ids: ids)
        card = like_the_cpu(folder, "all on the device", *given, size=(8, 1), compress_cache=packed)
        assert of_block(card, "prefill", "launch") <= most <= 40, card.places
        assert of_block(card, "prefill", "sync") == 0, card.places
        assert card.per_step("prefill attention", "launch") <= OF_STEP + PROMPT_LAUNCHES


def test_without_overlap_each_step_is_waited_for(tmp_path) -> None:
    folder = model_folder(tmp_path, CONFIGS["llama"])
    card = like_the_cpu(folder, "all on the device", overlap=False)
    assert all(card.per_step(f"decode {kind}", "wait") >= 1 for kind in KINDS), card.places


CHOICES = {"greedy": {}, "drawn": {"temperature": 0.8, "top_p": 0.9}}
MAX_OF_A_HEAD = {"greedy": 6, "drawn": 39}  # launches
HELD = (
    "all on the device",
    "weights on host, pinned",
    "KV on host",
    "hidden states split three ways",
)
FAST_HEADS = {("llama", "drawn", "KV on host")}


@pytest.mark.parametrize(
    ("family", "choice", "placement"), some_slow(product(FAMILIES, CHOICES, HELD), FAST_HEADS)
)
def test_a_sweep_waits_for_its_tokens_alone(
    tmp_path, family: str, choice: str, placement: str
) -> None:
    """Once a micro-batch, where they go on. They come in one copy, and what the next sweep is fed
    goes in one."""
    folder = model_folder(tmp_path, CONFIGS[family])
    params = SamplingParams(6, ignore_eos=True, **CHOICES[choice])

    def tokens_of(policy: Policy, device: str, budget: MemoryBudget) -> list[list[int]]:
        given = {"device": device, "budget": budget, "dtype": "float32", "offload_dir": tmp_path}
        with LLM(str(folder), policy, path="_DUMMY_", **given) as llm:
            return [out.token_ids for out in llm.generate(prompts(), params)]

    expected = tokens_of(Policy(4, 1), "cpu", MemoryBudget(host="1GiB"))
    with fake_card() as card:
        assert tokens_of(Policy(3, 2, **PLACEMENTS[placement]), "cuda", BUDGET) == expected
    assert not card.races
    of_steps = [f"decode {kind}" for kind in KINDS]
    assert not any(card.counts[step, "sync"] for step in of_steps), card.places
    assert card.per_step("decode head", "launch") <= MAX_OF_A_HEAD[choice], card.places
    assert card.per_step("decode embedding", "launch") <= 4, card.places
    waits = {place: n for place, n in card.places.items() if place[1] == "wait"}
    for_tokens = {place: n for place, n in waits.items() if "decoding.py" in place[2]}
    # for what comes to the card it is the card that waits
    assert not any(step in of_steps[:3] for step, *_ in waits.keys() - for_tokens.keys()), waits
    edges = [f"{phase} {kind}" for phase in ("prefill", "decode") for kind in ("head", "embedding")]
    heads = sum(card.counts[step, "steps"] for step in edges[::2])
    copies = sum(card.counts[step, "copy"] for step in edges)
    assert copies <= (3 if choice == "drawn" else 2) * heads, card.places
    assert sum(for_tokens.values()) == heads
    if placement == "all on the device":
        assert [card.per_step(f"decode {kind}", "fence") for kind in KINDS] == [0, 0, 0, 1]


@needs("gpu")
@pytest.mark.parametrize(
    ("eviction", "packed"), some_slow(product(ONE_LAUNCH, (False, True)), {("h2o-norm", False)})
)
def test_a_run_launches_what_was_warmed_up(tmp_path, eviction: str, packed: bool) -> None:
    """Nothing else, in prompts of any length and while rows leave: whatever a kernel is compiled
    for is the same."""
    folder = model_folder(tmp_path, CONFIGS["llama"])
    kept = ONE_LAUNCH[eviction]
    launched = set[Any]()
    with fake_card(), pytest.MonkeyPatch.context() as patch:
        launch = triton.launch

        def watched(name: str, grid: Any, arguments: Any, **constants: Any) -> None:
            launched.add((name, *compiled_for(name, arguments), *sorted(constants.items())))
            launch(name, grid, arguments, **constants)

        patch.setattr(triton, "launch", watched)
        patch.setattr("flexgen_h2o.llm.compile_subprocess", lambda *given: None)
        packing = KVPacking.of(32, 4) if packed else None
        card = torch.device(NAME, 0)
        sizes = 128, 4, 2, 32, 16
        per_query = eviction == "h2o-norm"
        warm_up_card(Layers(card, torch.float32, *sizes, kept is not None, per_query, packing))
        warmed = set(launched)
        policy = Policy(3, 2, **PLACEMENTS["all on the device"], compress_cache=packed)
        generate(folder, policy, "cuda", BUDGET, eviction=kept)
    assert warmed and launched == warmed


def compiled_for(name: str, arguments: Sequence[Any]) -> list[tuple[str, bool, bool]]:
    """Of integers: whether they are 1, and whether they are multiples of 16."""
    file, _, function = name.partition(".")
    kernel = getattr(import_module(f"{triton.__name__}.{file}"), function)
    free = vars(kernel).get("kwargs", vars(kernel))["do_not_specialize"] or ()
    given = zip(kernel.arg_names, arguments, strict=False)
    return [
        (one, n == 1, n % 16 == 0) for one, n in given if isinstance(n, int) and one not in free
    ]
