"""Packed weights that are unpacked: what a layer opens are the rows that its matrices were packed
to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexgen_h2o.checkpoint import match, pack_checkpoint, read_index
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.kernels.linear import DenseRows, lookup
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.tiers.device import Device, HostDevice
from flexgen_h2o.tiers.stream import NOTHING, Done
from tests.unit.weight_room import (
    PAIRS,
    opened,
    spec_of,
    unpacked_layers,
    values,
    write_checkpoint,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], Any]:
    """By tied or not and bits: (spec, packed checkpoint, tensors that it was made from)."""
    found = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("weights")
        spec = spec_of(tied)
        tensors = write_checkpoint(folder, spec, torch.bfloat16, 1)
        checkpoint = match(spec, read_index(folder), folder)
        for bits in (4, 8):
            found[tied, bits] = (
                spec,
                pack_checkpoint(spec, checkpoint, folder, Groupwise(2, bits)),
                tensors,
            )
    return found


@pytest.mark.parametrize(
    ("dtype", "bits", "tied"), [(torch.float32, 4, True), (torch.bfloat16, 8, False)]
)
@pytest.mark.parametrize(("place", "device"), PAIRS)
def test_packed_layers_are_unpacked_into_the_planned_memory(
    packed: dict[tuple[bool, int], Any],
    place: tuple[int, int],
    device: type[Device],
    dtype: torch.dtype,
    bits: int,
    tied: bool,
) -> None:
    """Matrices whole, as their values were rounded, tables row by row; vectors as the file holds
    them. A region is free once unpacked."""
    spec, checkpoint, tensors = packed[tied, bits]
    with opened(
        spec,
        checkpoint,
        place,
        device(),
        dtype,
        sep_layer=tied,
        form=Groupwise(dtype.itemsize, bits),
    ) as room:
        stream = room.stream(2, ahead=len(room.layers.layers))
        for unit, w in unpacked_layers(room, stream):
            for t in unit.tensors:
                want = tensors[t.name]
                found = w[t.role]
                if t.looked_up:
                    rows = lookup(
                        torch.arange(len(want)), found, torch.empty(want.shape, dtype=dtype)
                    )
                    found = (DenseRows(rows),)
                if want.dim() == 2:
                    assert len(found) == 1
                    want = unpack_rows.torch(
                        pack_rows(want, bits), bits, torch.empty(want.shape, dtype=dtype)
                    )
                assert torch.equal(values(found), want.to(dtype)), t.name


def test_a_region_is_taken_again_after_what_unpacked_it(
    packed: dict[tuple[bool, int], Any],
) -> None:
    """Its next writer waits for the fence of the unpacking, not for the compute that follows."""
    spec, checkpoint, _ = packed[True, 4]
    with opened(
        spec, checkpoint, (0, 0), HostDevice(), torch.float32, depth=1, form=Groupwise(4, 4)
    ) as room:
        stream = room.stream(2, ahead=1)
        fence = Done()
        (first, second) = (room.layers.layers[i].unit for i in range(2))
        assert room.ring is not None
        stream.open(first, lambda: NOTHING)
        stream.decode(lambda: fence)
        region = room.ring.take(room.store.nbytes(second))
        assert region is not None and region.after == [fence]
        fence.finish_one()
