"""The device tier without a card: which kind is opened, what it computes in, what it copies."""

from __future__ import annotations

import pytest
import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import PAGE
from flexgen_h2o.tiers.device import CudaDevice, HostDevice, StandInDevice, open_device


@pytest.fixture
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("_no_card")
@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_budget_of_its_own_makes_a_device_tier(name: str) -> None:
    host, stand_in = open_device(name, separate_budget=False), open_device(name, separate_budget=True)
    assert (host.is_host, host.tier) == (True, "host")
    assert (stand_in.is_host, stand_in.tier) == (False, "device")
    assert host.torch_device == stand_in.torch_device == torch.device("cpu")


@pytest.mark.usefixtures("_no_card")
@pytest.mark.parametrize(("name", "says"), [("cuda", "no CUDA device"), ("tpu", "'tpu' is not one of auto, cpu, cuda")])
def test_a_device_that_is_not_there_is_refused(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"--device.*{says}"):
        open_device(name, separate_budget=False)


@pytest.mark.parametrize("kind", [HostDevice, StandInDevice])
@pytest.mark.parametrize(
    ("asked", "stored", "computed"),
    [
        (None, "float32", "float32"),
        (None, "bfloat16", "bfloat16"),
        (None, "float16", "bfloat16"),
        ("float32", "float16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_what_a_cpu_computes_in(kind: type[HostDevice], asked: str | None, stored: str, computed: str) -> None:
    assert kind().compute_dtype(asked, stored) == computed


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_a_cpu_is_never_made_to_compute_half_precision(stored: str) -> None:
    with pytest.raises(UsageError, match=r"--dtype float16: .*bfloat16"):
        HostDevice().compute_dtype("float16", stored)


def test_buffers_copies_and_fences() -> None:
    device = StandInDevice()
    for buffer in (device.buffer(3 * PAGE), device.host_staging(3 * PAGE)):
        assert (buffer.numel(), buffer.dtype, buffer.data_ptr() % PAGE) == (3 * PAGE, torch.uint8, 0)
    target = torch.zeros(3)
    device.copy(target, torch.tensor([1, 2, 3], dtype=torch.bfloat16))
    assert target.tolist() == [1, 2, 3]
    assert device.fence().is_done


class _Runtime:
    """CUDA's runtime, as far as pinning goes."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.code:
            self.pinned[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        del self.pinned[address]


def _card_with(runtime: _Runtime, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return CudaDevice()


def test_pinned_memory_is_given_back_with_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that stays registered after it was unmapped would pin whatever is mapped there next."""
    runtime = _Runtime(0)
    memory = _card_with(runtime, monkeypatch).host_staging(3 * PAGE)
    assert runtime.pinned == {memory.data_ptr(): 3 * PAGE}
    del memory
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--pin-weight 0"):
        _card_with(_Runtime(2), monkeypatch).host_staging(PAGE)
