"""Parts of a run on a card of CPU memory (fake_card.py)."""

from __future__ import annotations

from pathlib import Path

import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import ALIGN, TRANSFER_CHUNK
from flexgen_h2o.kernels.workspace import upload_together
from flexgen_h2o.tiers.disk import DirectFile, FileRange
from flexgen_h2o.tiers.transfers import Lanes, Mover
from tests.gpu.fake_card import Card
from tests.gpu.fake_engine import CardDevice, fake_card

# ---- transfers


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
