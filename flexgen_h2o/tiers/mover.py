"""Moves bytes between files, host and device memory: in chunks, directly where alignment allows, else staged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from flexgen_h2o.limits import PAGE, STAGING_BYTES, TRANSFER_CHUNK
from flexgen_h2o.tiers.device import Device
from flexgen_h2o.tiers.disk import DirectFile, aligned_range
from flexgen_h2o.tiers.events import Done, Waitable
from flexgen_h2o.tiers.transfer import Lanes
from flexgen_h2o.units import round_up

Memory = Literal["device", "host"]


class Mover:
    """All traffic of a run. Every method queues the work and returns its `Done`."""

    def __init__(self, device: Device, lanes: Lanes) -> None:
        self.device = device
        self.lanes = lanes
        self._staging = threading.local()

    def read(
        self, name: str, dst: torch.Tensor, memory: Memory, file: DirectFile, offset: int, nbytes: int,
        dtype: torch.dtype = torch.uint8, after: Sequence[Waitable] = (),
    ) -> Done:  # fmt: skip
        """Fill `dst`, which lies in `memory`, from file bytes [offset, offset + nbytes), which hold `dtype` values.

        Straight into `dst` when it is page-aligned host bytes with room for the aligned range; otherwise chunk by
        chunk through the worker's staging buffer, converted to dst's dtype and copied to dst's memory.
        """
        crosses = self._crosses(memory)
        if dtype == torch.uint8 and not crosses and _takes_direct(dst, offset, nbytes):
            jobs = [_bind(file.read, dst[a:b], offset + a, min(b, nbytes) - a) for a, b in _even_chunks(dst.numel())]
        else:
            flat = dst.view(-1) if dtype != torch.uint8 else dst.view(-1)[:nbytes]
            step = TRANSFER_CHUNK // dtype.itemsize
            jobs = [
                _bind(self._staged_read, flat[a:b], file, offset + a * dtype.itemsize, dtype, crosses)
                for a, b in _chunks(flat.numel(), step)
            ]
        return self.lanes.submit("disk_read", name, jobs, after)

    def write(
        self, name: str, file: DirectFile, offset: int, src: torch.Tensor, memory: Memory,
        after: Sequence[Waitable] = (),
    ) -> Done:  # fmt: skip
        """Write `src` (uint8), which lies in `memory`, to the file at `offset` (a multiple of 4 KiB).

        Whole pages are written: the file's bytes behind a `src` that ends inside one are undefined.
        """
        crosses = self._crosses(memory)
        if not crosses and src.data_ptr() % PAGE == 0 and src.numel() % PAGE == 0:
            jobs = [_bind(file.write, src[a:b], offset + a) for a, b in _even_chunks(src.numel())]
        else:
            jobs = [
                _bind(self._staged_write, src[a:b], file, offset + a, crosses)
                for a, b in _chunks(src.numel(), TRANSFER_CHUNK)
            ]
        return self.lanes.submit("disk_write", name, jobs, after)

    def _crosses(self, memory: Memory) -> bool:
        """Do bytes between a file and `memory` cross the link between host and device?"""
        return memory == "device" and not self.device.is_host

    def copy(self, lane: str, name: str, dst: torch.Tensor, src: torch.Tensor, after: Sequence[Waitable] = ()) -> Done:
        """Copy between host and device memory on lane `h2d` or `d2h`."""

        def job() -> int:
            self.device.copy(dst, src)
            return src.numel() * src.element_size()

        return self.lanes.submit(lane, name, [job], after)

    def copy_indexed(
        self, name: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], index: tuple[torch.Tensor, ...],
        after: Sequence[Waitable],
    ) -> Done:  # fmt: skip
        """Copy dst[index] = src[index] for each (dst, src), from device to host memory. index: as torch takes it."""

        def job() -> int:
            moved = 0
            for target, source in pairs:
                with self.device.beside_compute():  # the copies to the host wait for their stream
                    values = source[tuple(i.to(source.device) for i in index)].to(target.device)
                target[tuple(i.to(target.device) for i in index)] = values
                moved += values.numel() * values.element_size()
            return moved

        return self.lanes.submit("d2h", name, [job], after)

    def _staged_read(self, dst: torch.Tensor, file: DirectFile, offset: int, dtype: torch.dtype, crosses: bool) -> int:
        nbytes = dst.numel() * dtype.itemsize
        start, length = aligned_range(offset, nbytes)
        staging = self._thread_staging()[:length]
        got = file.read(staging, start, offset - start + nbytes)
        source = staging[offset - start : offset - start + nbytes]
        if source.data_ptr() % dtype.itemsize:
            source = source.clone()  # safetensors promises no alignment
        self.device.copy(dst, source.view(dtype))
        if crosses:
            self.lanes.count("h2d", dst.numel() * dst.element_size())
        return got

    def _staged_write(self, src: torch.Tensor, file: DirectFile, offset: int, crosses: bool) -> int:
        staging = self._thread_staging()[: round_up(src.numel(), PAGE)]
        self.device.copy(staging[: src.numel()], src)
        if crosses:
            self.lanes.count("d2h", src.numel())
        return file.write(staging, offset)

    def _thread_staging(self) -> torch.Tensor:
        if not hasattr(self._staging, "buffer"):
            self._staging.buffer = self.device.host_staging(STAGING_BYTES)
        buffer: torch.Tensor = self._staging.buffer
        return buffer


def _takes_direct(dst: torch.Tensor, offset: int, nbytes: int) -> bool:
    return (
        dst.dtype == torch.uint8
        and dst.is_contiguous()
        and dst.data_ptr() % PAGE == 0
        and dst.numel() % PAGE == 0
        and offset % PAGE == 0
        and dst.numel() >= nbytes
    )


def _chunks(total: int, step: int) -> list[tuple[int, int]]:
    return [(a, min(a + step, total)) for a in range(0, total, step)]


def _even_chunks(total: int) -> list[tuple[int, int]]:
    """Page-aligned runs of about TRANSFER_CHUNK bytes, none much shorter than the others: short requests are slow."""
    return _chunks(total, round_up(-(-total // max(1, total // TRANSFER_CHUNK)), PAGE))


def _bind(call: Callable[..., int], *args: object) -> Callable[[], int]:
    return lambda: call(*args)
