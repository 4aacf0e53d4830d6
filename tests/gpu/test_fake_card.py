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
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.loop import Step
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.warm_up import warm_up_card
from flexgen_h2o.kvcache.eviction import H2ONorm, SnapKV, TriAttention, VaSE
from flexgen_h2o.planner.cost_model import EXPERTS_LAUNCHES, PROMPT_LAUNCHES, ROUTER_LAUNCHES
from tests.extras import needs
from tests.gpu import test_cuda_parity
from tests.gpu.fake_card import NAME, Card
from tests.gpu.fake_engine import fake_card
from tests.gpu.test_cuda_parity import (
    BUDGET,
    GREEDY,
    H2O,
    HALVES,
    PLACEMENTS,
    model_folder,
    off_by,
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


def on_fake_card(
    folder,
    placement: str,
    eviction: Any = None,
    has_triton: bool = True,
    has_graphs: bool = False,
    params: Any = None,
    **more: Any,
):
    """Tokens, and what was counted."""
    with fake_card(has_triton, has_graphs) as card:
        policy = Policy(3, 2, **PLACEMENTS[placement], **more)
        params = params or params_of(placement)
        tokens, *_ = generate(folder, policy, "cuda", BUDGET, eviction=eviction, params=params)
    return tokens, card


def some_slow(cases: Iterable[tuple[Any, ...]], fast: set[tuple[Any, ...]]) -> list[Any]:
    """A run on the card takes seconds: the default suite has a few."""
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


FAMILIES = ("normal", "llama")
OLMOE, GPT_OSS = (
    {**config, "num_hidden_layers": 2}
    for config in (test_cuda_parity.OLMOE, test_cuda_parity.GPT_OSS)
)
RUNS = product(FAMILIES, EVICTIONS, (False, True), PLACEMENTS)
FAST = {("normal", "h2o", False, "KV on host"), ("llama", "h2o", True, "KV on host")}


@pytest.mark.parametrize(("family", "eviction", "packed", "placement"), some_slow(RUNS, FAST))
def test_tokens_are_those_of_the_cpu_and_nothing_races(
    tmp_path, family: str, eviction: str, packed: bool, placement: str
) -> None:
    folder = model_folder(tmp_path, CONFIGS[family])
    kept = EVICTIONS[eviction]
    in_ram = MemoryBudget(host="1GiB")
    params = params_of(placement)
    alone = Policy(4, 1, compress_cache=packed)
    expected, *_ = generate(folder, alone, "cpu", in_ram, eviction=kept, params=params)
    tokens, card = on_fake_card(folder, placement, kept, compress_cache=packed)
    assert tokens == expected
    assert not card.races


@pytest.mark.parametrize(
    ("dtype", "family", "eviction"),
    some_slow(product(HALVES, FAMILIES, EVICTIONS), {("float16", "llama", "h2o")}),
)
def test_half_precision_is_near_the_cpu_in_full(
    tmp_path, dtype: str, family: str, eviction: str
) -> None:
    folder = model_folder(tmp_path, CONFIGS[family])
    kept = EVICTIONS[eviction]
    _, expected, _ = generate(folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"), eviction=kept)
    with fake_card():
        policy = Policy(3, 2, **PLACEMENTS["KV on host"])
        _, logits, _ = generate(folder, policy, "cuda", BUDGET, dtype=dtype, eviction=kept)
    assert off_by(logits, expected) <= HALVES[dtype]


ON_CPU = [name for name in PLACEMENTS if name.startswith("attention on the CPU")]
EIGHT = H2O(heavy_size=6, recent_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ON_CPU)
@pytest.mark.parametrize(
    ("eviction", "more"),
    [
        (EIGHT, {"compress_cache": True}),
        (EIGHT, {"compress_cache": True, "cache_rotation": True}),
        (None, {"attn_sparsity": 0.5}),
    ],
)
def test_prompts_are_packed_where_they_are_held(
    tmp_path, eviction: Any, more: dict[str, Any], placement: str
) -> None:
    folder = model_folder(tmp_path, CONFIGS["llama"])
    params = params_of(placement)
    expected, *_ = generate(
        folder,
        Policy(4, 1, **more),
        "cpu",
        MemoryBudget(host="1GiB"),
        eviction=eviction,
        params=params,
    )
    tokens, card = on_fake_card(folder, placement, eviction, **more)
    assert tokens == expected and not card.races


def of_block(card: Card, phase: str, what: str) -> float:
    """What a transformer block takes for a micro-batch in a sweep."""
    return sum(card.per_step(f"{phase} {kind}", what) for kind in ("attention", "mlp"))


KINDS = ("embedding", "attention", "mlp", "head")


# Launches and syncs of a decode step of a block where kernels are torch's operations.
WITHOUT_TRITON = {
    ("normal", "full"): (34, 7),
    ("normal", "h2o"): (64, 7),
    ("llama", "full"): (66, 7),
    ("llama", "h2o"): (97, 7),
}


@pytest.mark.parametrize(
    ("family", "eviction", "placement"),
    some_slow(
        [
            ("llama", "h2o", "all on the device"),
            ("normal", "full", "KV on host"),
            ("llama", "full", ON_CPU[0]),
        ],
        {("llama", "h2o", "all on the device")},
    ),
)
def test_rotated_columns(tmp_path, family: str, eviction: str, placement: str) -> None:
    folder = model_folder(tmp_path, CONFIGS[family])
    kept = EVICTIONS[eviction]
    packed = {"compress_cache": True}
    in_ram = MemoryBudget(host="1GiB")
    params = params_of(placement)
    alone = Policy(4, 1, **packed, cache_rotation=True)
    expected, *_ = generate(folder, alone, "cpu", in_ram, eviction=kept, params=params)
    tokens, card = on_fake_card(folder, placement, kept, **packed, cache_rotation=True)
    assert tokens == expected and not card.races


@pytest.mark.parametrize(
    ("family", "eviction", "packed"),
    some_slow(product(FAMILIES, EVICTIONS, (False, True)), {("llama", "h2o", False)}),
)
def test_a_card_without_triton_takes_torchs_operations(
    tmp_path, family: str, eviction: str, packed: bool
) -> None:
    folder = model_folder(tmp_path, CONFIGS[family])
    kept = EVICTIONS[eviction]
    alone = Policy(4, 1, compress_cache=packed)
    expected, *_ = generate(folder, alone, "cpu", MemoryBudget(host="1GiB"), eviction=kept)
    tokens, card = on_fake_card(
        folder, "all on the device", kept, has_triton=False, compress_cache=packed
    )
    assert tokens == expected and not card.races
    if not packed:
        found = tuple(of_block(card, "decode", what) for what in ("launch", "sync"))
        assert all(
            n <= most for n, most in zip(found, WITHOUT_TRITON[family, eviction], strict=True)
        ), found


class Watched:
    """What each step of the walk issues: names, shapes, and numbers that kernels are given.
    Addresses are those of tensors that were there before the step, with the place that made them; a
    graph has its own for the others."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int, int], list[tuple[Any, list[tuple[int, str]]]]] = {}
        self._now = (0, 0, 0)
        self._made: dict[int, tuple[tuple[int, int, int], str]] = {}

    def begin(self, step: Step) -> None:
        self._now = step.sweep, step.layer, step.micro_batch
        self.steps[self._now] = []

    def made(self, tensor: torch.Tensor, where: str) -> None:
        self._made[tensor.untyped_storage()._cdata] = self._now, where

    def issued(self, name: str, tensors: Sequence[torch.Tensor], numbers: Sequence[object]) -> None:
        form = [name, *numbers]
        places = list[tuple[int, str]]()
        for tensor in tensors:
            form.append((tensor.dtype, tensor.shape, tensor.stride()))
            made, where = self._made.get(tensor.untyped_storage()._cdata, (None, "before"))
            places.append((0 if made == self._now else tensor.data_ptr(), where))
        self.steps.setdefault(self._now, []).append((form, places))


@pytest.mark.parametrize(
    ("family", "eviction", "packed"),
    some_slow(product(FAMILIES, EVICTIONS, (False, True)), {("llama", "h2o", False)}),
)
def test_decode_steps_are_alike(tmp_path, family: str, eviction: str, packed: bool) -> None:
    """What a graph of a step would need: all that differs is where a sweep's own state is uploaded
    to."""
    folder = model_folder(tmp_path, CONFIGS[family])
    watched = Watched()
    begin = Executor.begin_step
    kinds = {}

    def watched_step(executor: Executor, step: Step) -> str | None:
        watched.begin(step)
        kinds[step.layer] = executor._layers[step.layer].kind
        return begin(executor, step)

    with fake_card() as card, pytest.MonkeyPatch.context() as patch:
        card.watch = watched
        patch.setattr(Executor, "begin_step", watched_step)
        policy = Policy(3, 2, **PLACEMENTS["all on the device"], compress_cache=packed)
        generate(folder, policy, "cuda", BUDGET, eviction=EVICTIONS[eviction])
    moved = set[str]()
    compared = 0
    for (sweep, layer, k), mine in watched.steps.items():
        if 2 <= sweep < FEW_TOKENS.max_tokens - 1 and kinds[layer] in ("attention", "mlp"):
            theirs = watched.steps[sweep + 1, layer, k]
            assert [form for form, _ in mine] == [form for form, _ in theirs]
            both = zip(
                (p for _, of in mine for p in of), (p for _, of in theirs for p in of), strict=True
            )
            moved |= {where for (here, where), (there, _) in both if here != there}
            compared += bool(mine)
    assert compared >= 30
    assert all(where.startswith("kernels/workspace.py") for where in moved), moved  # `upload`


ONE_LAUNCH = {**EVICTIONS, "h2o-norm": H2ONorm(heavy_size=6, recent_size=3)}
FAST_BLOCKS = {
    ("llama", "h2o-norm", False)
}  # packed: the loops that stand for the launches compile first


@pytest.mark.parametrize(
    ("family", "eviction", "packed"),
    some_slow(product(FAMILIES, ONE_LAUNCH, (False, True)), FAST_BLOCKS),
)
def test_launches_and_syncs_of_a_block(tmp_path, family: str, eviction: str, packed: bool) -> None:
    """Nothing in a layer waits for the card; packed columns give the CPU's tokens, as others do
    above."""
    folder = model_folder(tmp_path, CONFIGS[family])
    kept = ONE_LAUNCH[eviction]
    tokens, card = on_fake_card(folder, "all on the device", kept, compress_cache=packed)
    if packed:
        alone = Policy(4, 1, compress_cache=True)
        in_ram = MemoryBudget(host="1GiB")
        assert tokens == generate(folder, alone, "cpu", in_ram, eviction=kept)[0]
        assert not card.races
    for phase, launches in (("decode", 12), ("prefill", 40)):
        told = {place: count for place, count in card.places.items() if place[0].startswith(phase)}
        assert of_block(card, phase, "launch") <= launches, told
        assert of_block(card, phase, "sync") == 0, told
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
    kept = EVICTIONS[eviction]
    random = torch.Generator()
    more: dict[str, Any] = {"eviction": kept, "params": SamplingParams(2, ignore_eos=True)}
    policy = Policy(8, 1, **PLACEMENTS["all on the device"], compress_cache=packed)
    most = (
        OF_PREFILL + 2 * (eviction == "h2o") + packed
    )  # scores and a choice; what lies beside packed slots
    for lengths in ((20,), (20,) * 8, (1, 2, 9, 15, 16, 17, 33, 100)):
        given = [
            torch.randint(4, 1000, (n,), generator=random.manual_seed(n)).tolist() for n in lengths
        ]
        monkeypatch.setattr("tests.gpu.test_cuda_parity.prompts", lambda given=given: given)
        with fake_card() as card:
            tokens, *_ = generate(folder, policy, "cuda", BUDGET, **more)
        told = {
            place: count for place, count in card.places.items() if place[0].startswith("prefill")
        }
        assert of_block(card, "prefill", "launch") <= most <= 40, told
        assert of_block(card, "prefill", "sync") == 0, told
        assert card.per_step("prefill attention", "launch") <= OF_STEP + PROMPT_LAUNCHES, told
    alone = Policy(8, 1, compress_cache=packed)
    assert (
        tokens == generate(folder, alone, "cpu", MemoryBudget(host="1GiB"), **more)[0]
        and not card.races
    )


OTHERS = {
    "snapkv": SnapKV(window=4, kv_budget=0.5),
    "vase": VaSE(kv_budget=0.5),
    "triattention": TriAttention(kv_budget=0.5, interval=2),
    "h2o-norm": H2ONorm(heavy_size=6, recent_size=3, grace=6),
}


@pytest.mark.slow
@pytest.mark.parametrize(("eviction", "placement"), product(OTHERS, ("all on the device", *ON_CPU)))
def test_other_policies_keep_the_same_columns_of_prompts(
    tmp_path, eviction: str, placement: str
) -> None:
    """Those that smooth scores, or rank by more than scores, see the prompts of one length at a
    time."""
    folder = model_folder(tmp_path, CONFIGS["llama"])
    kept = OTHERS[eviction]
    params = params_of(placement)
    expected, *_ = generate(
        folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"), eviction=kept, params=params
    )
    tokens, card = on_fake_card(folder, placement, kept)
    assert tokens == expected and not card.races


def test_states_of_layers_with_different_budgets_are_one_copy(tmp_path) -> None:
    """What lies whole beside packed slots differs as well: as many columns as half of a layer's
    slots, or less."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    windows = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 12,
        "layer_types": kinds,
    }
    folder = model_folder(tmp_path, {**CONFIGS["llama"], **windows, "num_hidden_layers": 3})
    kept = H2O(heavy_size=16, recent_size=16)
    packed = {"compress_cache": True}
    alone = Policy(4, 1, **packed)
    in_ram = MemoryBudget(host="1GiB")
    expected, *_ = generate(folder, alone, "cpu", in_ram, eviction=kept)
    tokens, card = on_fake_card(folder, "all on the device", kept, **packed)
    assert tokens == expected and not card.races
    copies = sum(
        n
        for (step, what, _), n in card.places.items()
        if (step, what) == ("decode attention", "copy")
    )
    assert copies == card.counts["decode embedding", "steps"], card.places


CHOICES = {"greedy": {}, "drawn": {"temperature": 0.8, "top_p": 0.9}}
MAX_OF_A_HEAD = {"greedy": 6, "drawn": 39}  # launches
HELD = (
    "all on the device",
    "weights on host, pinned",
    "KV on host",
    "hidden states split three ways",
)
FAST_HEADS = {("llama", "greedy", "KV on host"), ("llama", "drawn", "all on the device")}


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
    assert not [
        place
        for place in card.places
        if place[:2] in {(f"decode {kind}", "sync") for kind in KINDS}
    ]
    assert card.per_step("decode head", "launch") <= MAX_OF_A_HEAD[choice], card.places
    assert card.per_step("decode embedding", "launch") <= 4, card.places
    waits = [
        place
        for place in card.places
        if place[1] == "wait" and place[0] in {f"decode {kind}" for kind in KINDS[:3]}
    ]
    assert all("decoding.py" in at for *_, at in waits), (
        waits
    )  # for what comes to the card it is the card that waits
    edges = [f"{phase} {kind}" for phase in ("prefill", "decode") for kind in ("head", "embedding")]
    heads = sum(card.counts[step, "steps"] for step in edges[::2])
    assert (
        sum(card.counts[step, "copy"] for step in edges) <= (3 if choice == "drawn" else 2) * heads
    ), card.places
    assert (
        sum(n for (_, what, at), n in card.places.items() if what == "wait" and "decoding.py" in at)
        == heads
    )
    if placement == "all on the device":
        assert [card.per_step(f"decode {kind}", "fence") for kind in KINDS] == [0, 0, 0, 1]


@pytest.mark.parametrize("family", [pytest.param("normal", marks=pytest.mark.slow), "llama"])
def test_rows_behind_a_common_prefix_wait_for_nothing(tmp_path, monkeypatch, family: str) -> None:
    """All queries see the one copy of it; what a row has of its own is one launch."""
    alike = [[*range(10, 50), *own] for own in prompts()]
    monkeypatch.setattr("tests.gpu.test_cuda_parity.prompts", lambda: alike)
    folder = model_folder(tmp_path, CONFIGS[family])
    expected, *_ = generate(folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"))
    with fake_card() as card:
        tokens, _, report = generate(
            folder, Policy(3, 2, **PLACEMENTS["all on the device"]), "cuda", BUDGET
        )
    assert tokens == expected and not card.races and report.extra["common_prefix"]["tokens"] == 40
    assert of_block(card, "decode", "sync") == 0
    assert of_block(card, "decode", "launch") <= 30, card.places


@needs("gpu")
@pytest.mark.parametrize(
    ("eviction", "packed"), some_slow(product(ONE_LAUNCH, (False, True)), {("h2o", False)})
)
def test_sinks_are_part_of_the_launch(tmp_path, eviction: str, packed: bool) -> None:
    """gpt-oss: windows in every other layer, learned sinks in all."""
    folder = model_folder(tmp_path, GPT_OSS)
    alone = Policy(4, 1, compress_cache=packed)
    expected, *_ = generate(
        folder, alone, "cpu", MemoryBudget(host="1GiB"), eviction=ONE_LAUNCH[eviction]
    )
    tokens, card = on_fake_card(
        folder, "all on the device", ONE_LAUNCH[eviction], compress_cache=packed
    )
    assert tokens == expected and not card.races
    groups = card.counts[
        "decode experts", "steps"
    ]  # one a block, of the micro-batches that are joined
    assert card.counts["decode attention", "sync"] == groups, (
        "the host is told which experts the router has chosen"
    )
    assert card.per_step("decode experts", "sync") == 0
    assert card.per_step("decode experts", "launch") <= 15, (
        "products of two experts, two each, among them"
    )


@pytest.mark.parametrize("bits", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_of_a_group_are_one_launch(tmp_path, bits: int) -> None:
    """Gates and ups, and downs, whatever their number: weights in 16 bits, or in 4."""
    folder = model_folder(tmp_path, OLMOE)
    more: dict[str, Any] = {"compress_weight": True, "weight_bits": bits} if bits else {}
    expected, *_ = generate(folder, Policy(4, 1, **more), "cpu", MemoryBudget(host="1GiB"))
    tokens, card = on_fake_card(folder, "all on the device", None, expert_group=4, **more)
    assert tokens == expected and not card.races
    assert card.per_step("decode experts", "sync") == 0
    assert card.per_step("decode experts", "launch") <= 10 <= OF_STEP + EXPERTS_LAUNCHES, (
        card.places
    )
    assert card.per_step("decode attention", "launch") <= OF_STEP + ROUTER_LAUNCHES, card.places


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

        def watched(name: str, grid: Any, reference: Any, arguments: Any, **constants: Any) -> None:
            launched.add((name, *compiled_for(name, arguments), *sorted(constants.items())))
            launch(name, grid, reference, arguments, **constants)

        patch.setattr(triton, "launch", watched)
        patch.setattr("flexgen_h2o.llm.compile_subprocess", lambda *given: None)
        sizes = (128, 4, 2, 32, 16)
        packing = KVPacking.of(32, 4) if packed else None
        card = torch.device(NAME, 0)
        warm_up_card(card, torch.float32, sizes, kept is not None, eviction == "h2o-norm", packing)
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


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_few_rows_take_a_packed_weight_in_one_launch(tmp_path, bits: int) -> None:
    """That is resident, which is not unpacked then; beyond, a block unpacks each matrix in one
    launch."""
    folder = model_folder(tmp_path, CONFIGS["llama"])
    packed = {"compress_weight": True, "weight_bits": bits}
    expected, *_ = generate(folder, Policy(4, 1, **packed), "cpu", MemoryBudget(host="1GiB"))
    _, plain = on_fake_card(folder, "all on the device")
    tokens, resident = on_fake_card(folder, "all on the device", **packed)
    assert tokens == expected and not resident.races
    assert of_block(resident, "decode", "launch") <= of_block(plain, "decode", "launch")
    assert of_block(resident, "decode", "sync") == 0
    tokens, streamed = on_fake_card(folder, "weights on host, pinned", **packed)
    matrices = 7
    assert tokens == expected and not streamed.races
    assert of_block(streamed, "decode", "launch") <= of_block(plain, "decode", "launch") + matrices
    assert of_block(streamed, "decode", "sync") == 0
