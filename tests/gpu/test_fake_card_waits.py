"""Whether a wait that is left out is found, on a card of CPU memory and with transfers at the last
moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest

from flexgen_h2o import MemoryBudget, Policy
from flexgen_h2o.engine import stores
from flexgen_h2o.engine.executor import BlockRun
from flexgen_h2o.engine.loop import WeightStream
from flexgen_h2o.engine.stores import HiddenStore
from flexgen_h2o.kvcache import store
from flexgen_h2o.kvcache.store import CacheStore
from flexgen_h2o.tiers import stream
from flexgen_h2o.tiers.stream import NOTHING, Done, Stream, wait_all
from flexgen_h2o.tiers.transfers import Lanes
from tests.gpu.fake_engine import deferred_transfers
from tests.gpu.test_cuda_parity import BUDGET, GREEDY, PLACEMENTS, model_folder
from tests.gpu.test_fake_card import CONFIGS, EVICTIONS, generate, on_fake_card, some_slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "placement", "more"),
    [
        (WeightStream, "open", "weights on host, pinned", {}),
        (WeightStream, "open", "weights on disk", {}),
        (WeightStream, "decode", "weights on host, pinned", {"compress_weight": True}),
        (BlockRun, "close_cache", "KV on host", {}),
        (BlockRun, "close_cache", "KV on disk", {}),
        (BlockRun, "close_hidden", "hidden states split three ways", {}),
        (BlockRun, "close_hidden", "hidden states on disk", {}),
    ],
)
def test_a_fence_that_is_left_out_is_a_race(
    tmp_path, monkeypatch, owner: Any, method: str, placement: str, more: dict[str, Any]
) -> None:
    """The fence is the method's last argument."""
    folder = model_folder(tmp_path, CONFIGS["normal"])
    _, sound = on_fake_card(folder, placement, **more)
    assert not sound.races
    whole = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *given: whole(*given[:-1], lambda: NOTHING))
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


def _without_waiting(patch: pytest.MonkeyPatch, owner: Any, name: str, module: Any) -> None:
    """Nothing waits within a method, neither here nor on the card."""
    method = getattr(owner, name)

    def too_early(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            for wait in ("wait_all", "wait_all_on_card"):
                within.setattr(module, wait, lambda events: None)
            return method(*given)

    patch.setattr(owner, name, too_early)


LAYERS = {
    **CONFIGS["normal"],
    "num_hidden_layers": 4,
}  # more units of KV in a block than the ring holds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "module", "placement"),
    [
        (CacheStore, "open", store, "KV on host"),
        (CacheStore, "settle", store, "KV on host"),
        (HiddenStore, "open", stores, "hidden states split three ways"),
    ],
)
def test_a_wait_of_the_computing_thread_that_is_left_out_is_a_race(
    tmp_path, monkeypatch, owner: Any, method: str, module: Any, placement: str
) -> None:
    folder = model_folder(tmp_path, LAYERS)
    _, sound = on_fake_card(folder, placement)
    assert not sound.races
    _without_waiting(monkeypatch, owner, method, module)
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
