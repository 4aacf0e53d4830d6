"""Who is in the running block: rows of clients first, a share of the places for batches, and the engine's thread.

The engine runs in the main thread, where a signal ends it. Other threads call `Service`. Methods that take the lock on
the engine's thread hold signals, so that none is raised while it is held.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import FlexgenError, internal_reason
from flexgen_h2o.core.timeline import Span
from flexgen_h2o.engine.generation import Callbacks, Row
from flexgen_h2o.engine.prompts import CODE_INTERNAL, Completion, Prompt
from flexgen_h2o.engine.sampling import SamplingParams, TokenLogprobs
from flexgen_h2o.jobs.requests import Request, RowError
from flexgen_h2o.jobs.runner import MOST_BAD_LINES
from flexgen_h2o.llm import LLM
from flexgen_h2o.serving.answers import Refused, say_fault, say_line

TEMPLATE_PROMPT = 128  # tokens of a usual prompt, which the engine is opened for
LATENCIES = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)  # seconds: upper ends of the histogram
RECENT_S = 10.0  # over which speeds are measured
PLAIN_ROW_S = 1.0  # what a row is taken to need before one has been timed
MOST_RETRY_S = 120
MOST_ENDS = 64
MOST_SPANS, WATCHED_S = 1000, 15.0  # of the timeline, and for how long after somebody has asked
NO_ROOM = "prompt: it and max_tokens need more of the KV cache than this server was opened for; raise --max-len"


class Owner(Protocol):
    """Whose rows they are. All is called by the engine's thread.

    is_gone: nobody waits for the rows any more. is_over: `next` gives none any more; a batch that is
    not over and gives none rests, and is added again. asks_again: it gave none for now, of a batch that has read many
    bad lines.
    """

    @property
    def is_over(self) -> bool: ...

    is_gone: bool
    asks_again: bool

    def next(self) -> Request | None:
        """The next row to be run; None where there is none."""

    def token(self, place: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """A row has another token. place: of the request, its `prompt.index`."""

    def finish(self, request: Request, done: Completion) -> None:
        """A row is done."""

    def fail(self, request: Request, error: RowError) -> None:
        """A row cannot be run."""

    def end(self, error: BaseException | None = None) -> None:
        """No row of it runs or waits any more. error: of the engine, which ended all of them."""


@dataclass(eq=False)
class Ticket:
    """The rows of one client's request. tell: called with each event, from the engine's thread."""

    waiting: deque[Request]
    tell: Callable[[tuple[object, ...]], None]
    streams: bool = False
    is_gone: bool = False
    asks_again: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return self.is_gone or not self.waiting

    def next(self) -> Request | None:
        return self.waiting.popleft() if self.waiting else None

    def token(self, place: int, token: int, logprobs: TokenLogprobs | None) -> None:
        if self.streams:
            self.tell(("token", place, token, logprobs))

    def finish(self, request: Request, done: Completion) -> None:
        self.tell(("done", request, done))

    def fail(self, request: Request, error: RowError) -> None:
        if error.code == CODE_INTERNAL:
            say_line(f"a request: {error}")
        self.tell(("error", Refused(500 if error.is_ours else 400, str(error), error.code)))

    def end(self, error: BaseException | None = None) -> None:
        if isinstance(error, FlexgenError):
            self.tell(("error", Refused(500, str(error), "engine_error")))
        elif error is not None:
            self.tell(("error", Refused(500, "internal error", CODE_INTERNAL)))


@dataclass
class Counts:
    """What `/metrics` and `/status` show besides what runs now. tokens: of rows that are over; computed: of all."""

    rows: int = 0
    tokens: int = 0
    computed: int = 0
    prompt_tokens: int = 0
    given_up: int = 0
    failed: int = 0
    refused: int = 0
    sweeps: int = 0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCIES) + 1))  # of clients' rows
    latency_sum: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=deque)  # (when, computed then)

    def add_latency(self, seconds: float) -> None:
        self.latencies[bisect_left(LATENCIES, seconds)] += 1
        self.latency_sum += seconds

    def add_tokens(self, count: int) -> None:
        now = time.monotonic()
        self.computed += count
        if not self.recent or now - self.recent[-1][0] > RECENT_S / 20:
            self.recent.append((now, self.computed))
        while now - self.recent[0][0] > RECENT_S:
            self.recent.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Of the last seconds."""
        recent, now = list(self.recent), time.monotonic()
        if not recent or now - recent[-1][0] > RECENT_S:
            return 0.0
        return (self.computed - recent[0][1]) / max(1e-3, now - recent[0][0])


@dataclass
class _Running:
    """A row that runs, or that is to run again because a run with it has failed."""

    owner: Owner
    request: Request

    @property
    def can_run_again(self) -> bool:
        """Tokens that a client has seen are not taken back."""
        return not (isinstance(self.owner, Ticket) and self.owner.streams)


class Service:
    """One running block for all. rows: places that the engine is opened for; length: tokens of a row at most.

    most_queued: rows of clients that wait at most. batch_share: of the places, for batches where some wait. It is the
    listener of its own runs.
    """

    def __init__(self, llm: LLM, rows: int, length: int, most_queued: int, batch_share: float) -> None:
        self.llm, self.length, self.most_queued, self.batch_share = llm, length, most_queued, batch_share
        self.counts = Counts()
        self.is_open = True
        self._tickets: deque[Ticket] = deque()  # with rows that wait
        self._batches: deque[Owner] = deque()
        self._running: dict[int, _Running] = {}
        self._of_owner: dict[int, int] = {}  # rows that run, now or again, by id() of their owner
        # Rows of a run that failed. Groups of them run by themselves: the row that fails it is found, and others go on.
        self._is_trying = False
        self._suspects: deque[list[_Running]] = deque()  # groups that are to run
        self._group: deque[_Running] = deque()  # of the group that runs, rows that have not entered yet
        self._failed_runs = 0  # since a row was done
        self._serial = self._batch_rows = 0
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._template = self._make_template(rows)
        self.capacity = rows
        self.predicted: float | None = None  # tokens/s of a full block, as the planner has it
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)  # the newest, while somebody looks at them
        self._watched = 0.0
        self._ends = deque[float](maxlen=MOST_ENDS)  # of the newest micro-batches, as spans have it

    def _make_template(self, rows: int) -> tuple[list[Prompt], list[SamplingParams]]:
        """Rows that the engine is opened for: one whose prompt is as long as may be, and usual ones. Each has a
        beginning of its own, so that room for whole rows is planned. Where columns are dropped, the log-probabilities
        of a long prompt are taken in decode steps, and another one without them is fed whole; where new ones are not,
        a row with the shortest prompt takes most slots. These are there also where they are more than `rows`."""
        vocab, usual = self.llm.model.spec.vocab_size, min(TEMPLATE_PROMPT, self.length)
        eviction = self.llm.eviction
        special = [self.length] * (2 if eviction.needs.record else 1)
        special += [1] * (bool(eviction.needs.record) and not getattr(eviction, "while_decoding", False))
        sizes = [(n, self.length + 1) for n in special]
        sizes += [(usual, self.length + 1)] * (rows - len(sizes))
        prompts = [Prompt(i, (i % vocab,) * length, None) for i, (length, _) in enumerate(sizes)]
        params = [
            SamplingParams(max_tokens=total - length, prompt_logprobs=None if i else 0)
            for i, (length, total) in enumerate(sizes)
        ]
        return prompts, params

    def open(self) -> None:
        """Open the engine, if it is not. DoesNotFitError where the budgets are too small."""
        if not self.llm.peak_bytes:
            policy = self.llm.prepare(*self._template)
            self.capacity = min(self.capacity, policy.block_size)
            predicted = self.llm.foresee(*self._template)
            self.predicted = None if predicted is None else predicted.tokens_per_s

    # For other threads

    def submit(self, ticket: Ticket) -> None:
        """Let its rows run. Refused where too many wait already."""
        with self._lock:
            queued = sum(len(one.waiting) for one in self._tickets)
            if not self.is_open:
                raise Refused(503, "the server is shutting down", "shutting_down", retry_after=5)
            if queued + len(ticket.waiting) > self.most_queued:
                self.counts.refused += 1
                raise Refused(
                    429, f"{queued} rows wait already, at most {self.most_queued}; try again later", "queue_full",
                    retry_after=self._retry_after(queued),
                )  # fmt: skip
            self._tickets.append(ticket)
        self._wake.set()

    def give_up(self, ticket: Ticket) -> None:
        """Its client has gone: what waits is dropped, and what runs ends with its next token."""
        ticket.is_gone = True
        with self._lock:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            self.counts.given_up += len(ticket.waiting)
            ticket.waiting.clear()

    def add_batch(self, batch: Owner) -> None:
        with self._lock:
            self._batches.append(batch)
        self._wake.set()

    def watch(self) -> list[Span]:
        """The newest spans of the timeline; they are kept for a while from now on."""
        self._watched = time.monotonic() + WATCHED_S
        return list(self.spans)

    @property
    def last_sweep(self) -> dict[str, float] | None:
        """When the micro-batches of a block, the newest ones, went through all layers; seconds as in spans."""
        policy, ends = self.llm.policy, list(self._ends)
        count = 0 if policy is None else min(len(ends) - 1, policy.num_gpu_batches)
        return {"start": ends[-1 - count], "end": ends[-1]} if count > 0 else None

    def wake(self) -> None:
        """A batch has been cancelled."""
        self._wake.set()

    @property
    def queued(self) -> int:
        with self._lock:
            return sum(len(one.waiting) for one in self._tickets)

    @property
    def running(self) -> tuple[int, int]:
        """Rows that run, of clients and of batches."""
        return len(self._running) - self._batch_rows, self._batch_rows

    def _retry_after(self, queued: int) -> int:
        count, seconds = sum(self.counts.latencies), self.counts.latency_sum
        each = seconds / count if count else PLAIN_ROW_S
        return max(1, min(MOST_RETRY_S, round(each * queued / max(1, self.capacity))))

    # The engine's thread

    def run(self) -> None:
        """Serve until a signal arrives, whose Interrupted goes through."""
        while self.is_open:
            with interrupts.held():
                self._wake.clear()
                first = self._next_row()
            if first is None:
                interrupts.check()  # where it is to ask again there is no wait, which would do it
                interrupts.wait_for(self._wake)
                continue
            self._ends.clear()
            self._ends.append(time.perf_counter())
            try:
                self.llm.run(
                    [first[0]], [first[1]], self._finish,
                    Callbacks(listener=self, goes_on=self._goes_on, spares_rows=True), refill=True, more=self._more,
                )  # fmt: skip
            except BaseException as error:
                is_of_rows = not interrupts.asks_to_end(error) and (self._running or isinstance(error, FlexgenError))
                if not is_of_rows:
                    raise
                interrupts.check()  # the error may be its consequence
                with interrupts.held():
                    self._after(error)
            self.open()

    def close(self) -> None:
        """Refuse what comes from now on, and end what runs and waits."""
        with self._lock:
            self.is_open = False
            tickets = {id(one): one for one in self._tickets}
            groups = [list(self._running.values()), list(self._group), *list(self._suspects)]
            owners = [one.owner for group in groups for one in group]
            tickets |= {id(owner): owner for owner in owners if isinstance(owner, Ticket)}
            self._tickets.clear()
        for ticket in tickets.values():
            ticket.is_gone = True
            ticket.tell(("error", Refused(503, "the server is shutting down", "shutting_down", retry_after=5)))

    def _more(self) -> tuple[list[Prompt], list[SamplingParams]] | None:
        with interrupts.held():
            row = self._next_row()
        return None if row is None else ([row[0]], [row[1]])

    def _next_row(self) -> tuple[Prompt, SamplingParams] | None:
        """The row that enters next; None also where many have been refused, and `run` has to ask again. A single place
        has no share for batches: it is theirs where no client waits."""
        if self._is_trying:
            return self._next_suspect()
        is_their_turn = self.capacity > 1 and self._batch_rows < self.batch_share * self.capacity
        for take in (self._of_batches, self._of_tickets) if is_their_turn else (self._of_tickets, self._of_batches):
            for _ in range(MOST_BAD_LINES):
                if (found := take()) is None:
                    break
                one = _Running(*found)
                error = self._why_not(one)
                if error is None:
                    key = id(one.owner)
                    self._of_owner[key] = self._of_owner.get(key, 0) + 1
                    self.counts.prompt_tokens += len(one.request.prompt.token_ids)
                    return self._enter(one)
                self.counts.failed += 1
                one.owner.fail(one.request, error)
            else:
                self._wake.set()  # others first, and signals
        return None

    def _why_not(self, one: _Running) -> RowError | None:
        """Why the row cannot join the block; that is of this row alone, and others run."""
        try:
            if self.llm.has_room([one.request.prompt], [one.request.params]):
                return None
            return RowError("context_length_exceeded", NO_ROOM)
        except FlexgenError as error:
            return RowError("does_not_fit", str(error))
        except BaseException as error:
            if interrupts.asks_to_end(error):
                raise
            return RowError(CODE_INTERNAL, internal_reason(error))

    def _next_suspect(self) -> tuple[Prompt, SamplingParams] | None:
        """The next row of the group that runs by itself; of the next group when all rows of this one have ended."""
        while True:
            if not self._group:
                if self._running:
                    return None
                if not self._suspects:
                    self._is_trying = False
                    return self._next_row()
                self._group.extend(self._suspects.popleft())
            one = self._group.popleft()
            if not one.owner.is_gone:
                return self._enter(one)
            self._forget(one)

    def _enter(self, one: _Running) -> tuple[Prompt, SamplingParams]:
        self._serial += 1
        self._running[self._serial] = one
        self._batch_rows += not isinstance(one.owner, Ticket)
        return Prompt(self._serial, one.request.prompt.token_ids, None), one.request.params

    def _of_tickets(self) -> tuple[Owner, Request] | None:
        """A row of each request in turn."""
        with self._lock:
            while self._tickets:
                ticket = self._tickets.popleft()
                request = ticket.next()
                if ticket.waiting:
                    self._tickets.append(ticket)
                if request is not None:
                    return ticket, request
        return None

    def _of_batches(self) -> tuple[Owner, Request] | None:
        """A row of each batch in turn. A batch without further rows ends when its last row has; of one that asks again
        there is none now."""
        while True:
            with self._lock:
                batch = self._batches.popleft() if self._batches else None
            if batch is None:
                return None
            request = None if batch.is_gone else batch.next()
            if request is not None or (batch.asks_again and not batch.is_gone):
                with self._lock:
                    self._batches.append(batch)
                if request is not None:
                    return batch, request
                self._wake.set()
                return None
            if batch.is_over and id(batch) not in self._of_owner:
                batch.end()

    def _forget(self, one: _Running) -> None:
        """The row has ended, and so does a batch whose last one it is."""
        owner = one.owner
        key = id(owner)
        if key not in self._of_owner:  # it has failed as a whole
            return
        self._of_owner[key] -= 1
        if self._of_owner[key]:
            return
        del self._of_owner[key]
        if not isinstance(owner, Ticket) and owner.is_over and owner not in self._batches:
            owner.end()

    def _finish(self, done: list[Completion]) -> None:
        """Called by the engine with rows that have ended. They are handed out as they entered."""
        with interrupts.held():
            for completion in sorted(done, key=lambda one: one.index):
                one = self._running.pop(completion.index)
                owner = one.owner
                self._batch_rows -= not isinstance(owner, Ticket)
                self._failed_runs = 0
                if owner.is_gone:
                    self.counts.given_up += 1
                elif completion.error is not None:
                    self.counts.failed += 1
                    owner.fail(one.request, RowError(completion.error_code, completion.error))
                else:
                    self.counts.rows += 1
                    if isinstance(owner, Ticket):
                        self.counts.add_latency(time.monotonic() - owner.began)
                    owner.finish(one.request, completion)
                self._forget(one)

    def _goes_on(self, row: Row) -> bool:
        one = self._running[row.prompt.index]
        if not one.owner.is_gone:
            logprobs = row.logprobs[-1] if row.logprobs else None
            one.owner.token(one.request.prompt.index, row.token_ids[-1], logprobs)
        return not one.owner.is_gone

    def _after(self, error: BaseException) -> None:
        """A run has failed. An error that the package raises itself is of all its rows. Anything else may be the fault
        of one row: halves of the rows run by themselves, and a row that fails alone is that one. Runs that fail one
        after another are not the fault of a row."""
        rows = list(self._running.values())
        self._running.clear()
        self._batch_rows = 0
        self._failed_runs += 1
        most_failed = self.capacity.bit_length() + 2  # halves down to one row, and some more
        if isinstance(error, FlexgenError):
            self._end_owners(rows, error)
            return
        if not self._is_trying:
            say_fault(f"a run of {len(rows)} rows", error)
        if self._failed_runs > most_failed:
            self._end_owners(rows, error)
            return
        self._end_owners([one for one in rows if not one.can_run_again], error)
        rows = [one for one in rows if one.can_run_again]
        if len(rows) == 1:
            self.counts.failed += 1
            rows[0].owner.fail(rows[0].request, RowError(CODE_INTERNAL, internal_reason(error)))
            self._forget(rows[0])
            return
        middle = len(rows) // 2
        halves = [half for half in (rows[:middle], rows[middle:]) if half]
        self._suspects.extendleft(reversed(halves))
        self._is_trying = bool(self._suspects)

    def _end_owners(self, rows: Sequence[_Running], error: BaseException) -> None:
        owners = {id(one.owner): one.owner for one in rows}
        self.counts.failed += len(rows)
        with self._lock:
            for owner in owners.values():
                for queue in (self._tickets, self._batches):
                    if owner in queue:
                        queue.remove(owner)  # type: ignore[arg-type]
        for key, owner in owners.items():
            self._of_owner.pop(key, None)
            owner.is_gone = True
            owner.end(error)

    # Listener of a run

    def sweep(self, tokens: int) -> None:
        timeline = self.llm.timeline
        self.counts.add_tokens(tokens)
        self.counts.sweeps += 1
        self._ends.append(time.perf_counter())
        timeline.keep_spans = time.monotonic() < self._watched
        self.spans.extend(timeline.take())

    def finish(self, rows: Sequence[Row]) -> None:
        """Steps that took a prompt's tokens, and a token that nobody asked for, gave no new ones."""
        answered = sum(row.answered for row in rows)
        self.counts.tokens += answered
        self.counts.computed -= sum(len(row.token_ids) for row in rows) - answered
