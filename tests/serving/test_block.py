"""Who enters the block, in which order, and what becomes of rows when clients go or the engine
fails. No engine."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import CODE_NOT_FINITE, Scoring, Sequence
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.models.load import find_model
from flexgen_h2o.serving import block
from flexgen_h2o.serving.answers import RequestRefused, read_asked
from flexgen_h2o.serving.block import Service, Ticket
from tests.serving.conftest import Panic

PLACES = 4
LENGTH = 50
NO_COLUMN = 3
NAN = 99
BROKEN = 66


class Over(Exception):
    """No row is left."""


class StubLLM:
    """An engine whose rows get a token a sweep. entered: first tokens of prompts, in their
    order."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(spec=SimpleNamespace(vocab_size=100))
        self.timeline = Timeline()
        self.eviction: Eviction = Full()
        self.admitted: list[int] = []
        self.peak_bytes: dict[str, int] = {}
        self.after_sweep: Callable[[int], None] = lambda sweep: None
        self.fault: BaseException | None = None  # that a sweep with the row BROKEN raises
        self.failed_runs = 0

    def prepare(self, sequences: abc.Sequence[Sequence]) -> Any:
        self.peak_bytes = {"host": 1}
        assert max(len(one.prompt_ids) for one in sequences) == LENGTH
        assert len({one.prompt_ids[0] for one in sequences}) == PLACES
        return SimpleNamespace(block_size=PLACES)

    def predict_run(self, sequences: abc.Sequence[Sequence]) -> None:
        return None

    def has_room(self, sequences: abc.Sequence[Sequence]) -> bool:
        if len(sequences[0].prompt_ids) == NO_COLUMN:
            raise UsageError("--kv-bytes 0.2: holds no column")
        return len(sequences[0].prompt_ids) <= LENGTH

    def run(
        self,
        requests: list[Request],
        on_finished: Callable[[list[Request]], None],
        callbacks: Callbacks,
        refill: bool,
        more: Callable[[], Any],
    ) -> None:
        running = [self._begin(requests[0])]
        sweep = 0
        assert callbacks.should_continue is not None and refill
        while running:
            for row in running:
                if not row.token_ids:
                    self.admitted.append(row.prompt_ids[0])
                row.token_ids.append(7)
            if self.fault is not None and any(row.prompt_ids[0] == BROKEN for row in running):
                self.failed_runs += 1
                self.peak_bytes = {}
                raise self.fault
            self.after_sweep(sweep)
            ended = [
                r
                for r in running
                if len(r.token_ids) >= r.params.max_tokens or not callbacks.should_continue(r)
            ]
            running = [r for r in running if r not in ended]
            for request in ended:
                if request.prompt_ids[0] == NAN:
                    request.fail(CODE_NOT_FINITE, "logits are not finite")
            on_finished(ended)
            while len(running) < PLACES and (found := more()) is not None:
                running.append(self._begin(found[0]))
            sweep += 1
        raise Over

    def _begin(self, request: Request) -> Request:
        request.clear()
        return request


class StubBatch:
    """Rows of a batch. later: how often it gives none for now. turn: rows after which it rests,
    once."""

    def __init__(
        self, rows: abc.Sequence[Request], later: int = 0, turn: int | None = None
    ) -> None:
        self.rows = deque(rows)
        self.done = list[int]()
        self.ended = list[BaseException | None]()
        self.is_gone = False
        self.running = 0
        self.service: Service | None = None  # it adds itself here where it gives none for now
        self.later = later
        self.turn = turn
        self.rests = False
        self.is_read = False

    @property
    def is_over(self) -> bool:
        return self.is_gone or self.is_read

    def next(self) -> Request | None:
        self.later -= 1
        if self.later >= 0 and self.service is not None:
            self.service.add_batch(self)
            return None
        if self.turn == 0:
            self.turn = None
            self.rests = True
            return None
        if self.turn is not None:
            self.turn -= 1
        self.is_read = not self.rows
        return self.rows.popleft() if self.rows else None

    def token(self, place: int, token: int, logprobs: object) -> None:
        pass

    def finish(self, request: Request) -> None:
        """Error rows are negative."""
        self.done.append(request.prompt_ids[0] * (1 if request.error is None else -1))

    def end(self, error: BaseException | None = None) -> None:
        self.ended.append(error)


def rows_of(first: int, count: int, tokens: int = 1, length: int = 1) -> deque[Request]:
    return deque(
        Request(i, (first + i,) * length, params=SamplingParams(max_tokens=tokens))
        for i in range(count)
    )


def ticket_of(first: int, count: int, tokens: int = 1, length: int = 1) -> tuple[Ticket, list[Any]]:
    told: list[Any] = []
    return Ticket(rows_of(first, count, tokens, length), told.append), told


@pytest.fixture
def llm() -> StubLLM:
    return StubLLM()


@pytest.fixture
def service(llm: StubLLM) -> Service:
    found = Service(llm, PLACES, LENGTH, 20, 0.25)  # type: ignore[arg-type]
    found.open()
    assert found.capacity == PLACES
    return found


def submitted(service: Service, *ticket: int, **how: int) -> list[Any]:
    """Submit a client's rows, and return what the client is told."""
    one, told = ticket_of(*ticket, **how)
    service.submit(one)
    return told


def added(service: Service, rows: abc.Sequence[Request], **how: int) -> StubBatch:
    batch = StubBatch(rows, **how)
    batch.service = service
    service.add_batch(batch)  # type: ignore[arg-type]
    return batch


def kinds(told: list[Any]) -> list[str]:
    return [kind for kind, *_ in told]


def run(service: Service) -> None:
    with pytest.raises(Over):
        service.run()


def test_requests_take_turns(service: Service, llm: StubLLM) -> None:
    told = submitted(service, 10, 6)
    others = submitted(service, 20, 2)
    run(service)
    assert llm.admitted == [10, 20, 11, 21, 12, 13, 14, 15]
    assert kinds(told) == ["done"] * 6 and kinds(others) == ["done"] * 2
    assert service.counts.rows == sum(service.counts.latencies) == 8
    assert service.running == (0, 0)


def test_clients_come_first_and_batches_have_their_share(service: Service, llm: StubLLM) -> None:
    batch = added(service, rows_of(50, 5))
    second = added(service, rows_of(70, 5))
    submitted(service, 10, 9)
    run(service)
    assert llm.admitted[:9] == [50, 70, 10, 11, 12, 51, 13, 14, 15], "one of four places, in turn"
    assert sorted(batch.done) == [50, 51, 52, 53, 54] and batch.ended == second.ended == [None]


def test_a_single_place_is_for_batches_where_no_client_waits(service: Service) -> None:
    service.capacity = 1
    added(service, rows_of(50, 1))
    submitted(service, 10, 2)
    admitted = [service._next_row() for _ in range(4)]
    assert [row and row.prompt_ids[0] for row in admitted] == [10, 11, 50, None]


@pytest.mark.parametrize(("later", "clients"), [(1, 1), (3, 0)])
def test_a_batch_without_a_row_for_now_is_asked_again(
    service: Service, llm: StubLLM, later: int, clients: int
) -> None:
    """After the clients, and at once where there are none."""
    batch = added(service, rows_of(50, 1), later=later)
    submitted(service, 10, clients)
    run(service)
    assert llm.admitted == [10] * clients + [50] and batch.done == [50] and batch.ended == [None]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_batch_that_rests_ends_when_it_has_been_added_again(
    service: Service, llm: StubLLM, is_cancelled: bool
) -> None:
    """Its rows go on meanwhile, and others join them; if it is cancelled they end."""
    batch = added(service, rows_of(50, 5, tokens=9 if is_cancelled else 3), turn=2)
    other = added(service, rows_of(70, 6))

    def cancel(sweep: int) -> None:
        if batch.rests and not batch.is_gone:
            batch.is_gone = True
            service.add_batch(batch)  # type: ignore[arg-type]

    if is_cancelled:
        llm.after_sweep = cancel
    run(service)
    assert other.ended == [None]
    if not is_cancelled:
        assert batch.rests and batch.done == [50, 51] and not batch.ended
        service.add_batch(batch)  # type: ignore[arg-type]
        run(service)
    assert batch.done == ([] if is_cancelled else [50, 51, 52, 53, 54]) and batch.ended == [None]


def test_rows_without_room_are_refused_some_at_a_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "MAX_BAD_S", -1.0)
    batch = added(service, [*rows_of(60, 3, length=LENGTH + 1), *rows_of(70, 1)])
    assert service._next_row() is None and batch.done == [-60]
    run(service)
    assert batch.done == [-60, -61, -62, 70] and batch.ended == [None]


def test_a_batch_that_asks_again_and_again_can_be_ended(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = added(service, [], later=10**9)
    monkeypatch.setattr(interrupts, "_arrived", [15])
    with pytest.raises(interrupts.Interrupted):
        service.run()
    batch.is_gone = True
    assert service._next_row() is None and batch.ended == [None]


def test_tokens_are_counted_when_their_rows_are_over(service: Service) -> None:
    """Tokens that a row was given are not counted, and no count ever falls."""
    service.sweep(3)
    assert (service.counts.tokens, service.counts.computed) == (0, 3)
    given = Scoring((5,), (8, 9))
    one = Sequence(0, (5,), params=SamplingParams(1), scoring=given, token_ids=[8, 9, 7])
    service.finish([one])
    assert (service.counts.tokens, service.counts.computed) == (1, 1)


def test_the_engine_is_opened_for_rows_of_all_lengths(llm: StubLLM) -> None:
    """The shortest prompt grows the most if only prompts lose columns."""
    llm.eviction = H2O(heavy_ratio=0.1, while_decoding=False)
    sequences = Service(llm, PLACES, LENGTH, 20, 0.25)._template  # type: ignore[arg-type]
    template = [
        llm.eviction.slots(len(one.prompt_ids), one.params.max_tokens, 0) for one in sequences
    ]
    most = max(llm.eviction.slots(n, LENGTH - n + 1, 0) for n in range(1, LENGTH + 1))
    assert len(template) == PLACES and max(template) == most


def test_a_queue_has_an_end(service: Service) -> None:
    submitted(service, 10, 15)
    with pytest.raises(RequestRefused) as caught:
        submitted(service, 30, 6)
    assert caught.value.status == 429 and (caught.value.retry_after or 0) >= 1
    assert service.counts.refused == 1
    submitted(service, 30, 5)
    service.close()
    with pytest.raises(RequestRefused) as caught:
        submitted(service, 10, 1)
    assert caught.value.code == "shutting_down"


def test_a_server_is_closed_while_rows_enter(service: Service) -> None:
    """The engine's thread goes on meanwhile."""
    ticket, told = ticket_of(10, 1)
    running = dict[Any, int]()

    class Entering:
        @property
        def owner(self) -> Ticket:
            running[len(running)] = 0
            return ticket

    running[Entering()] = 0
    service._running = running
    service.close()
    assert [(kind, error.status) for kind, error in told] == [("error", 503)] and len(running) > 1


@pytest.mark.parametrize(
    ("first", "length", "status", "code"),
    [
        (10, LENGTH + 1, 400, "context_length_exceeded"),
        (10, NO_COLUMN, 400, "does_not_fit"),
        (NAN, 1, 500, "not_finite"),
    ],
)
def test_rows_that_cannot_be_run_fail_alone(
    service: Service, first: int, length: int, status: int, code: str
) -> None:
    told = submitted(service, first, 1, length=length)
    others = submitted(service, 20, 2)
    batch = added(service, [*rows_of(first, 1, length=length), *rows_of(70, 1)])
    run(service)
    [(kind, error)] = told
    assert (kind, error.status, error.code) == ("error", status, code)
    assert kinds(others) == ["done"] * 2
    assert sorted(batch.done) == [-first, 70] and batch.ended == [None]
    assert (service.counts.failed, service.counts.rows) == (2, 3)


def test_an_engine_that_fails_ends_its_rows_only(service: Service, llm: StubLLM) -> None:
    told = submitted(service, 10, 9, tokens=5)
    batch = added(service, rows_of(50, 9, tokens=5))
    others: list[Any] = []

    def fail(sweep: int) -> None:
        if sweep == 2 and not others:
            llm.peak_bytes = {}
            others.append(submitted(service, 20, 1))
            raise FlexgenError("logits are not finite")

    llm.after_sweep = fail
    run(service)
    assert kinds(told) == ["error"] and told[0][1].status == 500
    assert [str(error) for error in batch.ended] == ["logits are not finite"]
    assert kinds(others[0]) == ["done"] and llm.peak_bytes, "the engine is open again"


@pytest.mark.parametrize(
    "fault", [RuntimeError("half an emoji"), Panic("Rust"), MemoryError()], ids=repr
)
def test_a_row_that_a_run_fails_on_fails_alone(
    service: Service, llm: StubLLM, fault: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that ran with it run again in parts, and are done; a batch goes on behind it."""
    llm.fault = fault
    told = submitted(service, 10, 3, tokens=3)
    batch = added(service, rows_of(BROKEN - 2, 8, tokens=2))
    run(service)
    assert sorted(batch.done) == [-BROKEN, 64, 65, 67, 68, 69, 70, 71] and batch.ended == [None]
    assert kinds(told) == ["done"] * 3 and llm.failed_runs <= 3 and llm.peak_bytes
    assert service.running == (0, 0) and batch.running == 0
    assert (service.counts.failed, service.counts.rows) == (1, 10)
    [said] = capsys.readouterr().err.splitlines()
    assert f"internal error: {type(fault).__name__}" in said


def test_a_stream_that_a_run_fails_on_ends_and_others_go_on(service: Service, llm: StubLLM) -> None:
    """Its client has seen tokens, which would come again."""
    llm.fault = Panic("Rust")
    stream, told = ticket_of(20, 1, tokens=5)
    stream.streams = True
    service.submit(stream)
    batch = added(service, rows_of(BROKEN - 1, 3))
    run(service)
    assert kinds(told)[-1:] == ["error"] and told[-1][1].status == 500
    assert sorted(batch.done) == [-BROKEN, 65, 67] and batch.ended == [None]


def test_runs_that_all_fail_end_their_batches(service: Service, llm: StubLLM) -> None:
    """It is no row's fault, and the server goes on with what comes."""
    batch = added(service, rows_of(50, 100))
    later: list[StubBatch] = []

    def fail(sweep: int) -> None:
        if batch.ended:
            return
        llm.failed_runs += 1
        raise RuntimeError("broken")

    def end(error: BaseException | None = None) -> None:
        batch.ended.append(error)
        later.append(added(service, rows_of(80, 1)))

    batch.end = end  # type: ignore[method-assign]
    llm.after_sweep = fail
    run(service)
    assert [str(error) for error in batch.ended] == ["broken"] and llm.failed_runs < 10
    assert later[0].done == [80] and later[0].ended == [None]


def test_a_client_that_goes_away_from_a_row_that_is_to_run_again(
    service: Service, llm: StubLLM
) -> None:
    llm.fault = Panic("Rust")
    gone, told = ticket_of(20, 2, tokens=9)
    service.submit(gone)
    batch = added(service, rows_of(BROKEN, 2))
    gone.tell = lambda event: None
    llm.after_sweep = lambda sweep: service.give_up(gone) if service._is_trying else None
    run(service)
    assert not told and sorted(batch.done) == [-BROKEN, 67] and batch.ended == [None]
    assert batch.running == gone.running == 0


def test_an_answer_that_is_too_large_is_refused() -> None:
    reader = RequestReader(find_model("opt-tiny", None, None), SamplingParams())
    most = (1000, 1024)
    body = {"prompt": [[5, 6]] * 500, "max_tokens": 200}
    assert len(read_asked(reader, "/v1/completions", body, *most).requests) == 500
    with pytest.raises(RequestRefused) as caught:
        read_asked(reader, "/v1/completions", {**body, "logprobs": 20}, *most)
    assert caught.value.body["error"]["param"] == "logprobs"
