"""The engine on a card of CPU memory (fake_card.py), and with transfers at the last moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from flexgen_h2o.engine.executor import BlockRun, Executor
from flexgen_h2o.engine.loop import Step
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.ops import Operator
from flexgen_h2o.planner.profile import nominal_profile
from flexgen_h2o.tiers.device import Device, host_buffer
from flexgen_h2o.tiers.disk import DirectFile
from flexgen_h2o.tiers.stream import Done, Waitable
from flexgen_h2o.tiers.transfers import Lanes
from tests.gpu.fake_card import NAME, Card, CardTensor, Mode, merge

CARD_BYTES = 2**34
NOT_THERE = 2**40  # is no token


class _Fence(Waitable):
    def __init__(self, card: Card) -> None:
        self._card = card
        with card.lock:
            self._clock = card.now()
            card.count("fence", "fence")

    def wait(self) -> None:
        with self._card.lock:
            self._card.go_on(self._clock)
            self._card.count("wait", "fence")

    def wait_on_card(self) -> None:
        with self._card.lock:
            self._card.join(self._clock)

    def is_seen(self) -> None:
        """This thread has seen that it is done."""
        with self._card.lock:
            self._card.go_on(self._clock)

    @property
    def is_done(self) -> bool:
        return False  # nothing is done before someone has waited for it


class _ReadBack(_Fence):
    """Numbers are in the host's memory once someone has waited for them."""

    def __init__(self, card: Card, host: torch.Tensor, numbers: torch.Tensor) -> None:
        super().__init__(card)
        self._host = host
        self._numbers = numbers

    def wait(self) -> None:
        super().wait()
        self._host.copy_(self._numbers)


class CardDevice(Device):
    """As tiers.device.CudaDevice, on the card that is given."""

    is_host = False
    tier = "device"
    is_asynchronous = True
    dtypes = ("float16", "bfloat16", "float32")

    def __init__(self, card: Card, has_graphs: bool = False) -> None:
        self.torch_device = torch.device(NAME, 0)
        self._card = card
        self.has_graphs = has_graphs

    def compute_dtype(self, asked: str | None, stored: str) -> str:
        return asked or stored

    def card(self) -> tuple[str, int]:
        return "a card of CPU memory", CARD_BYTES

    def free_bytes(self) -> int:
        return CARD_BYTES

    def buffer(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)
        with self._card.lock:
            self._card.sync("buffer")
        return memory

    def host_staging(self, nbytes: int) -> torch.Tensor:
        memory = host_buffer(nbytes)
        with self._card.lock:
            self._card.pin(memory)
        return memory

    def start_copy(self, dst: torch.Tensor, src: torch.Tensor) -> Waitable:
        """Of memory that is not pinned a copy is carried out at once."""
        with self._card.own_stream(), self._card.lock:
            if any(map(self._card.is_pinned, (dst, src))):
                self._card.put_off(dst, src)
            else:
                dst.copy_(src, non_blocking=True)
            return _Fence(self._card)

    def copy_stream(self) -> AbstractContextManager[object]:
        return self._card.own_stream()

    def fence(self) -> Waitable:
        return _Fence(self._card)

    def read_back(self, found: torch.Tensor) -> tuple[torch.Tensor, Waitable]:
        numbers = torch.empty(found.shape, dtype=found.dtype)
        numbers.copy_(found, non_blocking=True)
        host = torch.full_like(numbers, NOT_THERE)
        return host, _ReadBack(self._card, host, numbers)

    def graph(self, issue: Callable[[], None], pool: object) -> Callable[[], None]:
        """What is recorded is carried out meanwhile: the first time that it is wanted it is
        done."""
        card = self._card
        is_done = True
        with card.lock:
            assert card.recorded is None
            card.recorded = recorded = list[Callable[[], object]]()
            card.count("graph", "made")
            with card.uncounted():
                issue()
            card.recorded = None

        def replay() -> None:
            nonlocal is_done
            with card.lock:
                card.before()
                card.count("launch", "graph")
                if not is_done:
                    with card.uncounted():
                        for operation in recorded:
                            operation()
            is_done = False

        return replay


_setup: list[bool] = []


@contextmanager
def fake_card(has_graphs: bool = False) -> Iterator[Card]:
    """Runs on `cuda` within are on a card of CPU memory. has_graphs: decode steps become graphs."""
    if not _setup:
        _setup_privateuseone_for_python_backend(NAME)
        _setup.append(True)
    card = CardTensor.card = Card()
    with pytest.MonkeyPatch.context() as patch, Mode(card):
        _patch_engine(patch, card, has_graphs)
        _patch_triton(patch, card)
        _patch_clocks(patch, card)
        _patch_files(patch, card)
        yield card


def _patch_engine(patch: pytest.MonkeyPatch, card: Card, has_graphs: bool) -> None:
    """The engine opens the card, and tells its steps."""
    begin = BlockRun.begin_step
    compute = Executor.run
    made = torch.tensor

    def open_device(name: str, separate_budget: bool) -> Device:
        return CardDevice(card, has_graphs)

    def begin_step(block: BlockRun, step: Step) -> str | None:
        phase = begin(block, step)
        card.step = f"{phase} {block._layers[step.layer].kind}"
        if phase is not None:
            card.counts[card.step, "steps"] += 1
        return phase

    def tensor(data: Any, *, device: Any = None, **more: Any) -> torch.Tensor:
        found = made(data, **more)
        return found if device is None else found.to(device)

    patch.setattr("flexgen_h2o.llm.open_device", open_device)
    patch.setattr(
        "flexgen_h2o.planner.plans.profile_of_this_machine", lambda *given: nominal_profile(False)
    )
    patch.setattr(BlockRun, "begin_step", begin_step)
    # Tensors of inference mode are not seen by a tensor type of Python's.
    patch.setattr(Executor, "run", torch.no_grad()(compute.__wrapped__))  # type: ignore[attr-defined]
    patch.setattr(torch, "tensor", tensor)


def _patch_triton(patch: pytest.MonkeyPatch, card: Card) -> None:
    """Count a kernel's launch as one, and let the operator's torch version compute."""
    launch_all = Operator.on_card

    def launch(name: str, grid: tuple[int, ...], arguments: Any, **more: Any) -> None:
        with card.lock:
            card.count("launch", name)

    def on_card(operator: Operator[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = launch_all(operator, *args, **kwargs)

        def compute() -> None:
            _copy_results(found, operator.torch(*args, **kwargs))

        before = card.recorded
        card.recorded = None
        with card.uncounted():
            compute()
        card.recorded = before
        if before is not None:
            before.append(compute)
        return found

    def angles(rotation: Rotation, positions: torch.Tensor, dtype: torch.dtype) -> Any:
        return rotation._angles(
            positions, dtype
        )  # a kernel keeps none: in a graph positions are overwritten

    patch.setattr(Rotation, "_newest_angles", angles)
    patch.setattr(triton, "is_installed", lambda: True)  # no kernel runs: it need not be
    patch.setattr(triton, "launch", launch)
    patch.setattr(Operator, "on_card", on_card)
    patch.setattr(triton, "supports", lambda *tensors: all(t.device.type == NAME for t in tensors))


def _copy_results(found: Any, computed: Any) -> None:
    """Copy results to the memory that the version for cards has allocated."""
    if isinstance(found, tuple):
        for one, other in zip(found, computed, strict=True):
            _copy_results(one, other)
    elif found is not computed:
        found.copy_(computed)


def _patch_clocks(patch: pytest.MonkeyPatch, card: Card) -> None:
    """Jobs begin behind what their submitter has done, and who waits for them goes on behind what
    they did."""
    finish = Done.finish_one
    begun = Done._wait_until_begun
    wait = Done.wait
    submit = Lanes.submit
    work = Lanes._work

    def finish_one(
        done: Any, error: BaseException | None = None, begun: Sequence[Waitable] = ()
    ) -> None:
        with card.lock:
            merge(done.__dict__.setdefault("clock", {}), card.clock)
        finish(done, error, begun)

    def wait_until_begun(done: Any) -> None:
        begun(done)
        with card.lock:
            merge(card.clock, done.__dict__.get("clock", {}))

    def wait_for(done: Any) -> None:
        wait(done)
        done.__dict__["waited"] = True

    def is_done(done: Any) -> bool:
        if not done._event.is_set() or "waited" not in done.__dict__:
            return False  # as on a machine whose links are slow
        with card.lock:
            merge(card.clock, done.__dict__.get("clock", {}))
        for one in done._begun:
            one.is_seen()
        return True

    def submit_bound(
        lanes: Lanes,
        lane: str,
        name: str,
        jobs: Sequence[Any],
        after: Sequence[Waitable] = (),
        *how: Any,
    ) -> Done:
        with card.lock:
            before = dict(card.clock)

        def bound(job: Any) -> Any:
            def run() -> int:
                with card.lock:
                    merge(card.clock, before)
                found: int = job()
                return found

            return run

        return submit(lanes, lane, name, [bound(job) for job in jobs], after, *how)

    def work_on_card(lanes: Lanes, *row: str) -> None:
        with Mode(card):
            work.__wrapped__(lanes, *row)  # type: ignore[attr-defined]

    patch.setattr(Done, "finish_one", finish_one)
    patch.setattr(Done, "_wait_until_begun", wait_until_begun)
    patch.setattr(Done, "wait", wait_for)
    patch.setattr(Done, "is_done", property(is_done))
    patch.setattr(Lanes, "submit", submit_bound)
    patch.setattr(Lanes, "_work", work_on_card)
    patch.setattr(
        Lanes, "_see_end", lambda *given: None
    )  # nothing may rest on a wait for the sake of a span


def _patch_files(patch: pytest.MonkeyPatch, card: Card) -> None:
    """Pinned memory is read and written by the thread that moves it."""
    read = DirectFile.read
    write = DirectFile.write

    def read_on_card(file: DirectFile, data: torch.Tensor, offset: int, needed: int) -> int:
        with card.lock:
            card.touch(data, writes=True)
        return read(file, data, offset, needed)

    def write_on_card(file: DirectFile, data: torch.Tensor, offset: int) -> int:
        with card.lock:
            card.touch(data, writes=False)
        return write(file, data, offset)

    patch.setattr(DirectFile, "read", read_on_card)
    patch.setattr(DirectFile, "write", write_on_card)


# ---- transfers at the last moment


class _Deferred(Waitable):
    """Jobs that are done once someone waits for them, on the thread that waits."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run

    def wait(self) -> None:
        run = self._run
        self._run = None
        if run is not None:
            run()

    @property
    def is_done(self) -> bool:
        return self._run is None


@contextmanager
def deferred_transfers() -> Iterator[None]:
    """Within, bytes move at the last moment that waiting allows: what nobody waited for is not
    there, or comes too late over bytes that are newer. A queue of one thread keeps its order. So do
    chosen tokens."""

    def submit(
        lanes: Lanes,
        lane: str,
        name: str,
        jobs: Sequence[Any],
        after: Sequence[Waitable] = (),
        *how: Any,
    ) -> _Deferred:
        queue = lanes._queue_of(lane, name)
        line: list[_Deferred] = lanes.__dict__.setdefault("deferred", {}).setdefault(queue, [])
        before = list(line) if lanes._queue_of_thread.count(queue) == 1 else []

        def run() -> None:
            for one in (*before, *after):
                one.wait()
            lanes._current.name = name
            for job in jobs:
                lanes.count(lane, job())

        line.append(_Deferred(run))
        return line[-1]

    def read_back(device: Device, found: torch.Tensor) -> tuple[torch.Tensor, _Deferred]:
        numbers = found.clone()
        host = torch.full_like(found, NOT_THERE)
        return host, _Deferred(lambda: host.copy_(numbers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "submit", submit)
        patch.setattr(Device, "read_back", read_back)
        yield
