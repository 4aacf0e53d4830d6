"""Whether a wait that is left out is found, on a card of CPU memory and with transfers at the last
moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.engine import stores
from flexgen_h2o.engine.executor import Executor
from flexgen_h2o.engine.loop import BaseWeightStream
from flexgen_h2o.engine.sequence import Sequence, with_params
from flexgen_h2o.engine.stores import HiddenStore, WeightStore
from flexgen_h2o.kvcache import store
from flexgen_h2o.kvcache.store import CacheStore
from flexgen_h2o.tiers import stream
from flexgen_h2o.tiers.stream import NOTHING, Done, Stream, wait_all
from flexgen_h2o.tiers.transfers import Lanes
from tests.gpu.fake_engine import deferred_transfers
from tests.gpu.test_cuda_parity import BUDGET, GREEDY, PLACEMENTS, model_folder, prompts
from tests.gpu.test_fake_card import CONFIGS, EVICTIONS, generate, on_fake_card, some_slow


def _no_fence_behind_weights(patch: pytest.MonkeyPatch) -> None:
    opened = BaseWeightStream.open
    patch.setattr(
        BaseWeightStream, "open", lambda stream, unit, fence: opened(stream, unit, lambda: NOTHING)
    )


def _no_fence_behind_decoding(patch: pytest.MonkeyPatch) -> None:
    decode = BaseWeightStream.decode
    patch.setattr(BaseWeightStream, "decode", lambda stream, fence: decode(stream, lambda: NOTHING))


def _no_fence_behind_kv(patch: pytest.MonkeyPatch) -> None:
    closed = Executor.close_cache
    patch.setattr(
        Executor,
        "close_cache",
        lambda ex, key, region, fence: closed(ex, key, region, lambda: NOTHING),
    )


def _no_fence_behind_hidden_states(patch: pytest.MonkeyPatch) -> None:
    closed = Executor.close_hidden
    patch.setattr(
        Executor,
        "close_hidden",
        lambda ex, key, region, fence: closed(ex, key, region, lambda: NOTHING),
    )


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
def test_a_fence_that_is_left_out_is_a_race(
    tmp_path, monkeypatch, drop, placement: str, more: dict[str, Any]
) -> None:
    folder = model_folder(tmp_path, CONFIGS["normal"])
    _, sound = on_fake_card(folder, placement, **more)
    assert not sound.races
    drop(monkeypatch)
    _, card = on_fake_card(folder, placement, **more)
    assert card.races


def at_the_last_moment(folder, placement: str, eviction: Any = None) -> Any:
    """Tokens, where bytes move once somebody waits for them."""
    with deferred_transfers():
        tokens, *_ = generate(
            folder,
            Policy(3, 2, **PLACEMENTS[placement]),
            "cpu",
            BUDGET,
            eviction=eviction,
            params=GREEDY,
        )
    return tokens


@pytest.mark.parametrize(
    ("eviction", "placement"),
    some_slow(
        product(EVICTIONS, PLACEMENTS), {("h2o", "everything split"), ("full", "KV on disk")}
    ),
)
def test_bytes_that_move_at_the_last_moment_are_the_same(
    tmp_path, eviction: str, placement: str
) -> None:
    folder = model_folder(tmp_path, CONFIGS["normal"])
    kept = EVICTIONS[eviction]
    expected, *_ = generate(
        folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"), eviction=kept, params=GREEDY
    )
    assert at_the_last_moment(folder, placement, kept) == expected


LENGTHS = (9, 2, 1, 3, 3, 3, 7)


@pytest.mark.parametrize(
    "placement", ["all on the device", "KV on host", "hidden states on disk", "everything split"]
)
def test_rows_take_places_whose_tokens_come_late(tmp_path, placement: str) -> None:
    """In the same order, where rows have ended and where a micro-batch is empty."""
    folder = model_folder(tmp_path, CONFIGS["llama"])
    finished = dict[str, list[int]]()
    given = {
        "dtype": "float32",
        "device": "cpu",
        "path": "_DUMMY_",
        "offload_dir": tmp_path,
        "budget": BUDGET,
    }
    rows = [
        Sequence(i, tuple(ids)) for i, ids in enumerate(sorted(prompts(), key=len, reverse=True))
    ]
    with_params(rows, [SamplingParams(n, ignore_eos=True) for n in LENGTHS])
    tokens = dict[str, list[Any]]()
    for name, late in (("at once", nullcontext()), ("late", deferred_transfers())):
        with late, LLM(str(folder), Policy(2, 2, **PLACEMENTS[placement]), **given) as llm:
            done = list[Sequence]()
            coming = iter([[], rows[3:]])
            llm.run(
                rows[:3],
                done.extend,
                refill=True,
                more=lambda it=coming: next(it, None),
            )
        finished[name] = [one.index for one in done]
        tokens[name] = [list(one.token_ids) for one in sorted(done, key=lambda one: one.index)]
    assert [len(ids) for ids in tokens["late"]] == list(LENGTHS)
    assert tokens["late"] == tokens["at once"] and finished["late"] == finished["at once"]


def _kv_is_loaded_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    load = CacheStore._load_part

    def too_early(cache: CacheStore, unit: Any, home: Any, data: Any, after: list[Any]) -> Any:
        return load(cache, unit, home, data, [one for one in after if one not in unit.last_store])

    patch.setattr(CacheStore, "_load_part", too_early)


def _hidden_states_are_loaded_before_they_are_stored(patch: pytest.MonkeyPatch) -> None:
    load = HiddenStore.load

    def too_early(hidden: HiddenStore, key: Any, region: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(hidden, "_stores", [[] for _ in hidden._stores])
            return load(hidden, key, region)

    patch.setattr(HiddenStore, "load", too_early)


def _without_waiting(patch: pytest.MonkeyPatch, owner: Any, name: str, module: Any) -> None:
    """Nothing waits within a method, neither here nor on the card."""
    method = getattr(owner, name)

    def too_early(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            for wait in ("wait_all", "wait_all_on_card"):
                within.setattr(module, wait, lambda events: None)
            return method(*given)

    patch.setattr(owner, name, too_early)


def _kv_is_made_while_the_region_is_stored(patch: pytest.MonkeyPatch) -> None:
    _without_waiting(patch, CacheStore, "open", store)


def _hidden_states_are_made_while_the_region_is_stored(patch: pytest.MonkeyPatch) -> None:
    _without_waiting(patch, HiddenStore, "open", stores)


def _a_block_begins_while_kv_of_the_last_is_stored(patch: pytest.MonkeyPatch) -> None:
    _without_waiting(patch, CacheStore, "settle", store)


def _weights_are_used_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    _without_waiting(patch, WeightStore, "load_resident", stores)


LAYERS = {
    **CONFIGS["normal"],
    "num_hidden_layers": 4,
}  # more units of KV in a block than the ring holds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drop", "placement"),
    [
        (_kv_is_made_while_the_region_is_stored, "KV on host"),
        (_a_block_begins_while_kv_of_the_last_is_stored, "KV on host"),
        (_hidden_states_are_made_while_the_region_is_stored, "hidden states split three ways"),
    ],
)
def test_a_wait_of_the_computing_thread_that_is_left_out_is_a_race(
    tmp_path, monkeypatch, drop, placement: str
) -> None:
    folder = model_folder(tmp_path, LAYERS)
    _, sound = on_fake_card(folder, placement)
    assert not sound.races
    drop(monkeypatch)
    _, card = on_fake_card(folder, placement)
    assert card.races


def _until_begun(events: Iterable[Any]) -> None:
    """In place of a wait of the card's."""
    for event in events:
        if isinstance(event, Done):
            event._wait_until_begun()


def _compute_takes_what_is_still_coming(patch: pytest.MonkeyPatch, kind: str) -> None:
    take = Stream.take

    def too_early(loads: Any, key: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            if type(loads._source).__name__ == kind:
                within.setattr(stream, "wait_all_on_card", _until_begun)
            return take(loads, key)

    patch.setattr(Stream, "take", too_early)


def _a_lane_goes_before_what_comes_first(patch: pytest.MonkeyPatch, lane: str) -> None:
    submit = Lanes.submit

    def too_early(
        lanes: Any, on: str, name: str, jobs: Any, after: Any = (), wait: Any = None
    ) -> Done:
        is_card = wait is not None and wait.__name__ == "_wait_on_card"
        return submit(
            lanes,
            on,
            name,
            jobs,
            after,
            _until_begun if is_card and on == lane else wait or wait_all,
        )

    patch.setattr(Lanes, "submit", too_early)


@pytest.mark.parametrize(
    ("drop", "of", "placement"),
    some_slow(
        [
            (_compute_takes_what_is_still_coming, "_Loads", "weights on host, pinned"),
            (_compute_takes_what_is_still_coming, "_Loads", "weights on disk"),
            (_compute_takes_what_is_still_coming, "CacheStore", "KV on host"),
            (_compute_takes_what_is_still_coming, "CacheStore", "KV on disk"),
            (_compute_takes_what_is_still_coming, "HiddenStore", "hidden states split three ways"),
            (_a_lane_goes_before_what_comes_first, "h2d", "weights on host, pinned"),
            (_a_lane_goes_before_what_comes_first, "h2d", "KV on host"),
            (_a_lane_goes_before_what_comes_first, "h2d", "hidden states split three ways"),
            (_a_lane_goes_before_what_comes_first, "d2h", "KV on host"),
            (_a_lane_goes_before_what_comes_first, "d2h", "hidden states split three ways"),
            (_a_lane_goes_before_what_comes_first, "disk_read", "weights on disk"),
            (_a_lane_goes_before_what_comes_first, "disk_write", "KV on disk"),
        ],
        {(_compute_takes_what_is_still_coming, "_Loads", "weights on host, pinned")},
    ),
)
def test_a_wait_of_the_card_that_is_left_out_is_a_race(
    tmp_path, monkeypatch, drop: Callable[..., None], of: str, placement: str
) -> None:
    """Nothing is one with it: `test_tokens_are_those_of_the_cpu_and_nothing_races`."""
    folder = model_folder(tmp_path, CONFIGS["normal"])
    drop(monkeypatch, of)
    _, card = on_fake_card(folder, placement)
    assert card.races


@pytest.mark.parametrize(
    ("drop", "placement"),
    some_slow(
        [
            (_kv_is_loaded_before_it_is_stored, "KV on host"),
            (_kv_is_loaded_before_it_is_stored, "KV on disk"),
            (_hidden_states_are_loaded_before_they_are_stored, "hidden states split three ways"),
            (_hidden_states_are_loaded_before_they_are_stored, "hidden states on disk"),
            (_kv_is_made_while_the_region_is_stored, "KV on host"),
            (_weights_are_used_before_they_are_read, "all on the device"),
        ],
        {(_kv_is_loaded_before_it_is_stored, "KV on host")},
    ),
)
def test_a_wait_that_is_left_out_changes_tokens(
    tmp_path, monkeypatch, drop: Callable[..., None], placement: str
) -> None:
    """Where bytes move at the last moment."""
    folder = model_folder(tmp_path, LAYERS)
    expected, *_ = generate(folder, Policy(4, 1), "cpu", MemoryBudget(host="1GiB"), params=GREEDY)
    assert at_the_last_moment(folder, placement) == expected
    drop(monkeypatch)
    assert at_the_last_moment(folder, placement) != expected
