"""Parts of a run on a card of CPU memory (fake_card.py)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import ALIGN, TRANSFER_CHUNK
from flexgen_h2o.kernels.workspace import upload_together
from flexgen_h2o.tiers.disk import DirectFile, FileRange
from flexgen_h2o.tiers.transfers import Lanes, Mover
from tests.gpu.fake_engine import CardDevice, fake_card


def test_reads_go_on_beside_copies_of_what_was_read(tmp_path: Path) -> None:
    """The reader waits for a copy where it takes its slot again, and for no other: many chunks of a
    file go to the card, by one thread and its slots."""
    chunk = TRANSFER_CHUNK // 4
    path = tmp_path / "values"
    values = torch.arange(9 * chunk, dtype=torch.float32)
    path.write_bytes(values.numpy().tobytes())
    with fake_card() as card, torch.no_grad(), closing(DirectFile(path)) as file:
        device = CardDevice(card)
        with closing(Lanes({"disk_read": 1, "h2d": 1}, Timeline())) as lanes:
            there = device.buffer(values.nbytes).view(torch.float32)
            source = FileRange(file, 0, values.nbytes, torch.float32)
            Mover(device, lanes).read("load_weight", there, "device", source).wait()
        assert torch.equal(there.to("cpu"), values) and not card.races
    assert lanes.bytes_moved["disk_read"] == values.nbytes and len(card.staging) == 1


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
