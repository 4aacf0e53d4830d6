"""Runs on a card of CPU memory (fake_card.py): tokens, races, launches and syncs, where there is no card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.loop import BaseWeightStream
from flexgen_h2o.engine.prompts import Completion, Prompt
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.warm_up import warm_up_card
from flexgen_h2o.kvcache.eviction import H2ONorm
from flexgen_h2o.tiers.stream import NOTHING
from tests.gpu import test_cuda_parity
from tests.gpu.fake_card import NAME, Card
from tests.gpu.fake_engine import deferred_transfers, fake_card
from tests.gpu.test_cuda_parity import BUDGET, GREEDY, H2O, HALVES, PLACEMENTS, model_folder, off_by, prompts

CONFIGS = {name: {**config, "num_hidden_layers": 2} for name, config in test_cuda_parity.CONFIGS.items()}
FEW_TOKENS = SamplingParams(8, ignore_eos=True)  # a sweep takes a second on the fake card
EVICTIONS = {"full": None, "h2o": H2O(heavy_size=6, recent_size=3)}


def generate(folder, policy: Policy, device: str, budget: MemoryBudget, **more: Any):
    return test_cuda_parity.generate(folder, policy, device, budget, **{"params": FEW_TOKENS, **more})


def params_of(placement: str) -> SamplingParams:
    """Columns on a disk are to be written back too."""
    return GREEDY if sum(PLACEMENTS[placement]["percent"][2:4]) < 100 else FEW_TOKENS


def on_fake_card(folder, placement: str, eviction: Any = None, **more: Any):
    """Tokens, and what was counted."""
    with fake_card() as card:
        policy, params = Policy(3, 2, **PLACEMENTS[placement], **more), params_of(placement)
        tokens, *_ = generate(folder, policy, "cuda", BUDGET, eviction=eviction, params=params)
    return tokens, card


def some_slow(cases: Iterable[tuple[Any, ...]], fast: set[tuple[Any, ...]]) -> list[Any]:
    """A run on the card takes seconds: the default suite has a few."""
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


FAMILIES = ("normal", "llama")
GPT_OSS = {
    **CONFIGS["llama"], "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    "intermediate_size": 64, "sliding_window": 16,
}  # fmt: skip
FAST = {("normal", "h2o", "KV on host")}


@pytest.mark.parametrize(("family", "eviction", "placement"), some_slow(product(FAMILIES, EVICTIONS, PLACEMENTS), FAST))
def test_tokens_are_those_of_the_cpu_and_nothing_races(tmp_path, family: str, eviction: str, placement: str) -> None:
    folder, kept = model_folder(tmp_path, CONFIGS[family]), EVICTIONS[eviction]
    in_ram, params = MemoryBudget(host="1GiB"), params_of(placement)
    expected, *_ = generate(folder, Policy(4, 1), "cpu", in_ram, eviction=kept, params=params)
    tokens, card = on_fake_card(folder, placement, kept)
    assert tokens == expected
    assert not card.races


@pytest.mark.parametrize(
    ("dtype", "family", "eviction"), some_slow(product(HALVES, FAMILIES, EVICTIONS), {("float16", "llama", "h2o")})
)
def test_half_precision_is_near_the_cpu_in_full(tmp_path, dtype: str, family: str, eviction: str) -> None:
    folder, kept = model_folder(tmp_path, CONFIGS[family]), EVICTIONS[eviction]
    _, expected, _ = generate(folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"), eviction=kept)
    with fake_card():
        policy = Policy(3, 2, **PLACEMENTS["KV on host"])
        _, logits, _ = generate(folder, policy, "cuda", BUDGET, dtype=dtype, eviction=kept)
    assert off_by(logits, expected) <= HALVES[dtype]


def _no_fence_behind_weights(patch: pytest.MonkeyPatch) -> None:
    opened = BaseWeightStream.open
    patch.setattr(BaseWeightStream, "open", lambda stream, unit, fence: opened(stream, unit, lambda: NOTHING))


def _no_fence_behind_decoding(patch: pytest.MonkeyPatch) -> None:
    decode = BaseWeightStream.decode
    patch.setattr(BaseWeightStream, "decode", lambda stream, fence: decode(stream, lambda: NOTHING))


def _no_fence_behind_kv(patch: pytest.MonkeyPatch) -> None:
    closed = Executor.close_cache
    patch.setattr(Executor, "close_cache", lambda ex, key, region, fence: closed(ex, key, region, lambda: NOTHING))


def _no_fence_behind_hidden_states(patch: pytest.MonkeyPatch) -> None:
    closed = Executor.close_hidden
    patch.setattr(Executor, "close_hidden", lambda ex, key, region, fence: closed(ex, key, region, lambda: NOTHING))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drop", "placement", "more"),
    [
        (_no_fence_behind_weights, "weights on host, pinned", {}),
        (_no_fence_behind_weights, "weights on disk", {}),
        (_no_fence_behind_decoding, "weights on host, pinned", {"compress_weight": True}),
        (_no_fence_behind_kv, "KV on host", {}),
        (_no_fence_behind_kv, "KV on disk", {}),
        (_no_fence_behind_hidden_states, "hidden states split three ways", {}),
        (_no_fence_behind_hidden_states, "hidden states on disk", {}),
    ],
)
def test_a_fence_that_is_left_out_is_a_race(tmp_path, monkeypatch, drop, placement: str, more: dict[str, Any]) -> None:
    folder = model_folder(tmp_path, CONFIGS["normal"])
    _, sound = on_fake_card(folder, placement, **more)
    assert not sound.races
    drop(monkeypatch)
    _, card = on_fake_card(folder, placement, **more)
    assert card.races


@pytest.mark.parametrize(
    ("eviction", "placement"),
    some_slow(product(EVICTIONS, PLACEMENTS), {("h2o", "everything split"), ("full", "KV on disk")}),
)
def test_bytes_that_move_at_the_last_moment_are_the_same(tmp_path, eviction: str, placement: str) -> None:
    folder, kept = model_folder(tmp_path, CONFIGS["normal"]), EVICTIONS[eviction]
    expected, *_ = generate(folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"), eviction=kept, params=GREEDY)
    with deferred_transfers():
        policy = Policy(3, 2, **PLACEMENTS[placement])
        tokens, *_ = generate(folder, policy, "cpu", BUDGET, eviction=kept, params=GREEDY)
    assert tokens == expected


LENGTHS = (9, 2, 1, 3, 3, 3, 7)


@pytest.mark.parametrize("placement", ["all on the device", "KV on host", "hidden states on disk", "everything split"])
def test_rows_take_places_whose_tokens_come_late(tmp_path, placement: str) -> None:
    """In the same order, where rows have ended and where a micro-batch is empty."""
    folder, finished = model_folder(tmp_path, CONFIGS["llama"]), dict[str, list[int]]()
    given = {"dtype": "float32", "device": "cpu", "path": "_DUMMY_", "offload_dir": tmp_path, "budget": BUDGET}
    rows = [Prompt(i, tuple(ids), None) for i, ids in enumerate(sorted(prompts(), key=len, reverse=True))]
    params, tokens = [SamplingParams(n, ignore_eos=True) for n in LENGTHS], dict[str, list[Any]]()
    for name, late in (("at once", nullcontext()), ("late", deferred_transfers())):
        with late, LLM(str(folder), Policy(2, 2, **PLACEMENTS[placement]), **given) as llm:
            done, coming = list[Completion](), iter([([], []), (rows[3:], params[3:])])
            llm.run(rows[:3], params[:3], done.extend, refill=True, more=lambda it=coming: next(it, None))
        finished[name] = [one.index for one in done]
        tokens[name] = [one.token_ids for one in sorted(done, key=lambda one: one.index)]
    assert [len(ids) for ids in tokens["late"]] == list(LENGTHS)
    assert tokens["late"] == tokens["at once"] and finished["late"] == finished["at once"]


def of_block(card: Card, phase: str, what: str) -> float:
    """What a transformer block takes for a micro-batch in a sweep."""
    return sum(card.per_step(f"{phase} {kind}", what) for kind in ("attention", "mlp"))


KINDS = ("embedding", "attention", "mlp", "head")
ONE_LAUNCH = {**EVICTIONS, "h2o-norm": H2ONorm(heavy_size=6, recent_size=3)}
FAST_BLOCKS = {("llama", "h2o-norm", False)}  # packed: the loops that stand for the launches compile first


@pytest.mark.parametrize(
    ("family", "eviction", "packed"), some_slow(product(FAMILIES, ONE_LAUNCH, (False, True)), FAST_BLOCKS)
)
def test_launches_and_syncs_of_a_block(tmp_path, family: str, eviction: str, packed: bool) -> None:
    """Nothing in a layer waits for the card; packed columns give the CPU's tokens, as others do above."""
    folder, kept = model_folder(tmp_path, CONFIGS[family]), ONE_LAUNCH[eviction]
    tokens, card = on_fake_card(folder, "all on the device", kept, compress_cache=packed)
    if packed:
        alone, in_ram = Policy(4, 1, compress_cache=True), MemoryBudget(host="1GiB")
        assert tokens == generate(folder, alone, "cpu", in_ram, eviction=kept)[0]
        assert not card.races
    for phase, launches in (("decode", 12), ("prefill", 40)):
        told = {place: count for place, count in card.places.items() if place[0].startswith(phase)}
        assert of_block(card, phase, "launch") <= launches, told
        assert of_block(card, phase, "sync") == 0, told
    assert of_block(card, "decode", "fence") == 0, card.places


OF_LAYER, OF_LENGTH = 11, 4  # launches of a prefill layer, and for each length of its prompts


@pytest.mark.parametrize(
    ("family", "eviction", "packed"), some_slow(product(FAMILIES, EVICTIONS, (False, True)), {("llama", "h2o", True)})
)
def test_launches_of_prefill_do_not_grow_with_prompts(
    tmp_path, monkeypatch, family: str, eviction: str, packed: bool
) -> None:
    """But with different lengths among them, which are computed one after the other."""
    folder, kept, random = model_folder(tmp_path, CONFIGS[family]), EVICTIONS[eviction], torch.Generator()
    policy = Policy(3, 2, **PLACEMENTS["all on the device"], compress_cache=packed)
    for lengths, apart in (((20,) * 6, 1), ((20, 22, 24, 26, 28, 30), 3)):
        given = [torch.randint(4, 1000, (n,), generator=random.manual_seed(n)).tolist() for n in lengths]
        monkeypatch.setattr("tests.gpu.test_cuda_parity.prompts", lambda given=given: given)
        with fake_card() as card:
            generate(folder, policy, "cuda", BUDGET, eviction=kept, params=SamplingParams(2, ignore_eos=True))
        told = {place: count for place, count in card.places.items() if place[0].startswith("prefill")}
        of_length = OF_LENGTH + (eviction == "h2o") + packed  # scores, or a choice; and what lies beside packed slots
        assert of_block(card, "prefill", "launch") <= OF_LAYER + of_length * apart <= 40, told
        assert of_block(card, "prefill", "sync") == 0, told


CHOICES = {"greedy": {}, "drawn": {"temperature": 0.8, "top_p": 0.9}}
MOST_OF_A_HEAD = {"greedy": 6, "drawn": 39}  # launches
HELD = ("all on the device", "weights on host, pinned", "KV on host", "hidden states split three ways")
FAST_HEADS = {("llama", "greedy", "KV on host"), ("llama", "drawn", "all on the device")}


@pytest.mark.parametrize(("family", "choice", "placement"), some_slow(product(FAMILIES, CHOICES, HELD), FAST_HEADS))
def test_a_sweep_waits_for_its_tokens_alone(tmp_path, family: str, choice: str, placement: str) -> None:
    """Once a micro-batch, where they go on. They come in one copy, and what the next sweep is fed goes in one."""
    folder, params = model_folder(tmp_path, CONFIGS[family]), SamplingParams(6, ignore_eos=True, **CHOICES[choice])

    def tokens_of(policy: Policy, device: str, budget: MemoryBudget) -> list[list[int]]:
        given = {"device": device, "budget": budget, "dtype": "float32", "offload_dir": tmp_path}
        with LLM(str(folder), policy, path="_DUMMY_", **given) as llm:
            return [out.token_ids for out in llm.generate(prompts(), params)]

    expected = tokens_of(Policy(4, 1), "cpu", MemoryBudget(host="1GiB"))
    with fake_card() as card:
        assert tokens_of(Policy(3, 2, **PLACEMENTS[placement]), "cuda", BUDGET) == expected
    assert not card.races
    assert not [place for place in card.places if place[:2] in {(f"decode {kind}", "sync") for kind in KINDS}]
    assert card.per_step("decode head", "launch") <= MOST_OF_A_HEAD[choice], card.places
    assert card.per_step("decode embedding", "launch") <= 4, card.places
    edges = [f"{phase} {kind}" for phase in ("prefill", "decode") for kind in ("head", "embedding")]
    heads = sum(card.counts[step, "steps"] for step in edges[::2])
    assert sum(card.counts[step, "copy"] for step in edges) <= (3 if choice == "drawn" else 2) * heads, card.places
    assert sum(n for (_, what, at), n in card.places.items() if what == "wait" and "decoding.py" in at) == heads
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
        tokens, _, report = generate(folder, Policy(3, 2, **PLACEMENTS["all on the device"]), "cuda", BUDGET)
    assert tokens == expected and not card.races and report.extra["common_prefix"]["tokens"] == 40
    assert of_block(card, "decode", "sync") == 0
    assert of_block(card, "decode", "launch") <= 30, card.places


@pytest.mark.parametrize(("eviction", "packed"), some_slow(product(ONE_LAUNCH, (False, True)), {("h2o", False)}))
def test_sinks_are_part_of_the_launch(tmp_path, eviction: str, packed: bool) -> None:
    """gpt-oss: windows in every other layer, learned sinks in all."""
    folder = model_folder(tmp_path, GPT_OSS)
    alone = Policy(4, 1, compress_cache=packed)
    expected, *_ = generate(folder, alone, "cpu", MemoryBudget(host="1GiB"), eviction=ONE_LAUNCH[eviction])
    tokens, card = on_fake_card(folder, "all on the device", ONE_LAUNCH[eviction], compress_cache=packed)
    assert tokens == expected and not card.races
    groups = card.counts["decode experts", "steps"]  # one a block, of the micro-batches that are joined
    assert card.counts["decode attention", "sync"] == groups, "the host is told which experts the router has chosen"
    assert card.per_step("decode experts", "sync") == 0
    assert card.per_step("decode experts", "launch") <= 17, "products of two experts, two each, among them"


@pytest.mark.parametrize("bits", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_of_a_group_are_one_launch(tmp_path, bits: int) -> None:
    """Gates and ups, and downs, whatever their number: weights in 16 bits, or in 4."""
    config = {**CONFIGS["llama"], "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3}
    folder = model_folder(tmp_path, {**config, "intermediate_size": 64})
    more: dict[str, Any] = {"compress_weight": True, "weight_bits": bits} if bits else {}
    expected, *_ = generate(folder, Policy(4, 1, **more), "cpu", MemoryBudget(host="1GiB"))
    tokens, card = on_fake_card(folder, "all on the device", None, expert_group=4, **more)
    assert tokens == expected and not card.races
    assert card.per_step("decode experts", "sync") == 0
    assert card.per_step("decode experts", "launch") <= 12, card.places


@pytest.mark.parametrize(("eviction", "packed"), some_slow(product(ONE_LAUNCH, (False, True)), {("h2o-norm", False)}))
def test_a_run_launches_what_was_warmed_up(tmp_path, eviction: str, packed: bool) -> None:
    """Nothing else, in prompts of any length and while rows leave: whatever a kernel is compiled for is the same."""
    pytest.importorskip("triton")
    folder, kept, launched = model_folder(tmp_path, CONFIGS["llama"]), ONE_LAUNCH[eviction], set[Any]()
    with fake_card(), pytest.MonkeyPatch.context() as patch:
        launch = triton.launch

        def watched(name: str, grid: Any, reference: Any, arguments: Any, **constants: Any) -> None:
            launched.add((name, *compiled_for(name, arguments), *sorted(constants.items())))
            launch(name, grid, reference, arguments, **constants)

        patch.setattr(triton, "launch", watched)
        patch.setattr("flexgen_h2o.llm.compile_subprocess", lambda *given: None)
        sizes, packing = (128, 4, 2, 32, 16), KVPacking.of(32, 4) if packed else None
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
    return [(one, n == 1, n % 16 == 0) for one, n in given if isinstance(n, int) and one not in free]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_few_rows_take_a_packed_weight_in_one_launch(tmp_path, bits: int) -> None:
    """That is resident, which is not unpacked then; beyond, a block unpacks each matrix in one launch."""
    folder, packed = model_folder(tmp_path, CONFIGS["llama"]), {"compress_weight": True, "weight_bits": bits}
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


@pytest.mark.slow
def test_layers_without_summaries_take_one_launch(tmp_path) -> None:
    folder = model_folder(tmp_path, CONFIGS["llama"])
    launches = {}
    for layers in (1, 2):
        kept = H2O(heavy_size=6, recent_size=3, summaries=4, summary_layers=layers)
        expected, *_ = generate(folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"), eviction=kept)
        tokens, card = on_fake_card(folder, "all on the device", kept)
        assert tokens == expected and not card.races
        launches[layers] = of_block(card, "decode", "launch")
    assert launches[1] < launches[2]
