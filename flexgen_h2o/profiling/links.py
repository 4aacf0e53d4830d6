"""Bytes a second over the link between host and device, and the fixed cost of one copy, through a transfer lane."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexgen_h2o.limits import PAGE, TRANSFER_CHUNK
from flexgen_h2o.profiling.bench import Bench, Call
from flexgen_h2o.tiers.buffers import host_buffer
from flexgen_h2o.tiers.events import wait_all
from flexgen_h2o.tiers.mover import Mover

PIECE = 4 * TRANSFER_CHUNK  # of a weight's part that lives on the host: one copy


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second; transfer_s: seconds from handing a small copy to the lane until its bytes are there."""

    h2d: float
    d2h: float
    h2d_unpinned: float
    d2h_unpinned: float
    transfer_s: float


def link_rates(bench: Bench, mover: Mover) -> LinkRates:
    """Of the bench's device, which is not host memory itself."""
    device, nbytes = bench.device, bench.sizes.link_bytes
    pinned, plain, there = device.host_staging(nbytes), host_buffer(nbytes), device.buffer(nbytes)
    *copies, small = bench.seconds_of(
        _copies(mover, "h2d", there, pinned),
        _copies(mover, "d2h", pinned, there),
        _copies(mover, "h2d", there, plain),
        _copies(mover, "d2h", plain, there),
        lambda: mover.copy("h2d", "probe", there[:PAGE], pinned[:PAGE]).wait(),
    )
    h2d, d2h, h2d_unpinned, d2h_unpinned = (nbytes / seconds for seconds in copies)
    return LinkRates(h2d, d2h, h2d_unpinned, d2h_unpinned, small)


def _copies(mover: Mover, lane: str, target: torch.Tensor, source: torch.Tensor) -> Call:
    """Piece by piece, all of them queued."""

    def copy_all() -> None:
        pieces = zip(target.split(PIECE), source.split(PIECE), strict=True)
        wait_all([mover.copy(lane, "probe", t, s) for t, s in pieces])

    return copy_all
