"""Parts of a run, and of what measures a machine, on a card of CPU memory (fake_card.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.core.packing import KVPacking, int8_row_bytes
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import ALIGN, STAGING_BYTES, TRANSFER_CHUNK
from flexgen_h2o.kernels import int8, triton
from flexgen_h2o.kernels.beside import SlotForm, WholeColumns
from flexgen_h2o.kernels.prompt_columns import PromptSlots, choose_kept, put_prompts
from flexgen_h2o.kernels.workspace import upload_together
from flexgen_h2o.kvcache.store import Overlay
from flexgen_h2o.planner.measure import bench as measuring
from flexgen_h2o.planner.measure import engine as steps
from flexgen_h2o.planner.measure.bench import Bench
from flexgen_h2o.tiers import transfers
from flexgen_h2o.tiers.disk import DirectFile, FileRange
from flexgen_h2o.tiers.transfers import Lanes, Mover, _Staging
from tests.gpu.fake_card import Card
from tests.gpu.fake_engine import CardDevice, deferred_transfers, fake_card
from tests.unit.profiling.tiny import TINY

Launched = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@contextmanager
def launches_of() -> Iterator[tuple[Card, Launched]]:
    """A card, and the name, arguments and constants of each launch on it."""
    launched: Launched = []
    with fake_card() as card, pytest.MonkeyPatch.context() as patch, torch.no_grad():
        launch = triton.launch

        def watched(name: str, grid: Any, arguments: Any, **constants: Any) -> None:
            launch(name, grid, arguments, **constants)
            launched.append((name, arguments, constants))

        patch.setattr(triton, "launch", watched)
        yield card, launched


# ---- transfers


@pytest.mark.parametrize(("room", "copies"), [(STAGING_BYTES, 1), (150, 3)])
def test_columns_come_to_the_host_in_one_copy(
    room: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For which the thread waits once; in several where they are more than its staging holds."""
    monkeypatch.setattr(transfers, "STAGING_BYTES", room)
    areas = [torch.randn(2, 6, 4, 8), torch.randn(2, 6, 4, 8)]
    targets = [torch.zeros(2, 7, 4, 8), torch.zeros(2, 7, 4, 8)]  # of a part with a row more
    chosen = [0, 7, 3, 4, 5, 2]
    with fake_card() as card, deferred_transfers(), torch.no_grad():
        device = CardDevice(card)
        lanes = Lanes({"d2h": 1}, Timeline())
        try:
            pairs = [
                (there, here.to(device.torch_device))
                for there, here in zip(targets, areas, strict=True)
            ]
            slots = torch.tensor(chosen).to(device.torch_device)
            card.step = "store"
            Mover(device, lanes).copy_kv_entries("store_cache", pairs, slots, []).wait()
        finally:
            lanes.close()
    assert (card.counts["store", "copy"], card.counts["store", "sync"]) == (copies, copies), (
        card.places
    )
    assert lanes.bytes_moved["d2h"] == 2 * 6 * 8 * 4
    for target, area in zip(targets, areas, strict=True):
        expected = torch.zeros_like(target)
        for row, slot in enumerate(chosen):
            expected[slot // 4, row, slot % 4] = area[slot // 4, row, slot % 4]
        assert torch.equal(target, expected)


def read_in_chunks(tmp_path: Path) -> tuple[Card, bool]:
    """Of a run's reads from a file to the card: many chunks, of one thread and its slots; and
    whether all came."""
    chunk = TRANSFER_CHUNK // 4
    path = tmp_path / "values"
    values = torch.arange(9 * chunk, dtype=torch.float32)
    path.write_bytes(values.numpy().tobytes())
    with fake_card() as card, torch.no_grad():
        device = CardDevice(card)
        file = DirectFile(path)
        lanes = Lanes({"disk_read": 1, "h2d": 1}, Timeline())
        try:
            there = device.buffer(values.nbytes).view(torch.float32)
            source = FileRange(file, 0, values.nbytes, torch.float32)
            Mover(device, lanes).read("load_weight", there, "device", source).wait()
        finally:
            lanes.close()
            file.close()
        came = torch.equal(there.to("cpu"), values)
    assert lanes.bytes_moved["disk_read"] == values.nbytes and len(card.staging) == 1
    return card, came


def test_reads_go_on_beside_copies_of_what_was_read(tmp_path: Path) -> None:
    """The reader waits for a copy where it takes its slot again, and for no other."""
    card, came = read_in_chunks(tmp_path)
    assert came and not card.races


def test_a_slot_that_is_read_into_too_early_is_a_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Staging, "is_read_by", lambda staging, copy, source: None)
    card, came = read_in_chunks(tmp_path)
    assert card.races and not came


def test_staging_that_is_unpinned_while_it_is_used_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are views: without the memory itself nothing keeps it pinned once each has been read
    into."""
    made = _Staging.__init__

    def forgetful(staging: _Staging, memory: torch.Tensor) -> None:
        made(staging, memory)
        del staging._memory

    monkeypatch.setattr(_Staging, "__init__", forgetful)
    with pytest.raises(AssertionError, match="host memory is used after it was unpinned"):
        read_in_chunks(tmp_path)


def test_vectors_go_to_the_card_in_one_copy() -> None:
    """Each begins where the card would put one of its own: a kernel is compiled anew for another
    place."""
    hosts = [torch.arange(n) for n in (3, 0, 8, 1)]
    with fake_card() as card, torch.no_grad():
        card.step = "upload"
        there = upload_together(hosts, CardDevice(card).torch_device)
        assert [t.storage_offset() * t.itemsize % ALIGN for t in there] == [0] * 4
        assert all(
            torch.equal(here.to("cpu"), host) for here, host in zip(there, hosts, strict=True)
        )
    assert (card.counts["upload", "copy"], card.counts["upload", "launch"]) == (
        1 + len(hosts),
        0,
    ), card.places


# ---- columns of prompts


def test_columns_of_prompts_wait_for_nothing_without_triton() -> None:
    """Packed and put by torch operations, as many for all rows as for a few, to the bits of a
    CPU."""
    packing = KVPacking.of(16, "3/4")
    counted = list[int]()
    for prompts in (2, 6):
        k, v = (torch.randn(prompts, 30, 2, 16) for _ in range(2))
        scores = torch.rand(prompts, 2, 30)
        areas = [
            torch.zeros(2, 2 * prompts, 16, of.words).int() for of in (packing.keys, packing.values)
        ]
        beside = [torch.ones(2 * prompts, *of) for of in ((16,), (16,), (4, 16), (4, 16), (4,))]
        given = [
            k,
            v,
            scores,
            *areas,
            *(t.bfloat16() for t in beside[:2]),
            *beside[2:4],
            beside[4].int(),
        ]
        given += [torch.zeros(2 * prompts, 20).int(), torch.zeros(2 * prompts, 20)]
        expected = put_all([t.clone() for t in given], packing)
        with fake_card() as card, pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(triton, "supports", lambda *tensors: False)
            of_card = [t.to(CardDevice(card).torch_device) for t in given]
            card.step = "put"
            put_all(of_card, packing)
            assert card.counts["put", "sync"] == 0, card.places
            counted.append(card.counts["put", "launch"])
            card.step = "after"
            assert all(
                torch.equal(t.to("cpu"), one) for t, one in zip(of_card, expected, strict=True)
            )
    assert counted[0] == counted[1]


def put_all(given: list[torch.Tensor], packing: KVPacking) -> list[torch.Tensor]:
    """A few columns of prompts into slots, and what lies beside."""
    (
        k,
        v,
        scores,
        keys,
        values,
        centres,
        ranges,
        whole_keys,
        whole_values,
        whole_slots,
        positions,
        recorded,
    ) = given
    whole = WholeColumns(centres, ranges, whole_keys, whole_values, whole_slots)
    slots = PromptSlots(keys, values, 0, SlotForm(packing, whole=whole), 4, positions, recorded)
    put_prompts(k, v, choose_kept(scores, 2, 27, 18), scores, slots)
    return given


# ---- what measures a machine


def test_decode_attention_is_measured_as_the_engine_runs_it() -> None:
    """In one launch, with scores and without; whenever it begins, each row has a victim to lose."""
    with launches_of() as (card, launched):
        plain, scored = measuring.decode_rates(Bench(CardDevice(card), TINY), torch.float32)
        victims = [
            arguments[10].tolist() for _, arguments, constants in launched if constants["RECORDS"]
        ]
    assert all(rate > 0 for curve in (plain, scored) for _, rate in curve.points)
    assert {name for name, *_ in launched} == {"slots.attend_step"}
    assert {constants["RECORDS"] for *_, constants in launched} == {False, True}
    assert all(0 <= slot <= TINY.slots // 2 for slots in victims for slot in slots)


def test_columns_that_wait_for_the_disk_are_measured_in_ram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[torch.Tensor]()

    def overlay(layout: Any, part: Any, memory: torch.Tensor, dtype: torch.dtype) -> Overlay:
        made.append(memory)
        return Overlay(layout, part, memory, dtype)

    monkeypatch.setattr(steps, "Overlay", overlay)
    with fake_card() as card, torch.no_grad():
        assert steps.overlay_rate(Bench(CardDevice(card), TINY), torch.float32) > 0
    assert made and {memory.device.type for memory in made} == {"cpu"}


# ---- products in int8


@pytest.fixture
def untried() -> Iterator[None]:
    """Nobody knows yet what torch._int_mm can do."""
    int8._int_mm_works.cache_clear()
    yield
    int8._int_mm_works.cache_clear()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("inputs", "columns", "rows", "launches"),
    [
        (3, 2056, 1032, 3),
        (17, 2048, 1024, 3),
        (40, 2048, 1024, 1),
        (40, 2050, 1024, 100),
        (40, 2048, 1028, 100),
    ],
)
def test_products_in_int8_take_few_launches(
    inputs: int, columns: int, rows: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch._int_mm refuses on a card is filled up, or multiplied without it."""
    codes = torch.randint(-127, 128, (inputs, columns), dtype=torch.int8)
    weight = torch.randint(-127, 128, (rows, int8_row_bytes(columns)), dtype=torch.int8)
    expected, found = (torch.full((inputs, rows), 7, dtype=torch.int32) for _ in range(2))
    int8.int8_products_reference(codes, weight[:, :columns], expected)
    with fake_card() as card, torch.no_grad():

        def int_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
            if len(a) <= 16 or a.shape[1] % 8 or b.shape[1] % 8:
                raise RuntimeError(f"_int_mm of {tuple(a.shape)} and {tuple(b.shape)} on a card")
            card.count("launch", "_int_mm")
            with card.uncounted():
                out.copy_(a.double() @ b.double())

        monkeypatch.setattr(torch, "_int_mm", int_mm)
        where = CardDevice(card).torch_device
        out = found.to(where)
        held = weight.to(where)
        assert int8._int_mm_works(where)
        card.step = "product"
        int8.int8_products(codes.to(where), held[:, :columns], out)
        assert torch.equal(out.to("cpu"), expected)
    assert card.counts["product", "launch"] <= launches, card.places
