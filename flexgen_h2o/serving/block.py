"""Choose which sequences enter the running block, and run the engine.

Clients come first, and batches get a share of the places. The engine runs in the main thread, where
a signal ends it. Other threads call `Service`. Methods that take the lock on the engine's thread
hold signals back, so that no signal raises while the lock is held.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import FlexgenError, internal_reason
from flexgen_h2o.core.timeline import Span
from flexgen_h2o.engine.generation import Callbacks, Listener
from flexgen_h2o.engine.sampling import SamplingParams, TokenLogprobs
from flexgen_h2o.engine.sequence import CODE_INTERNAL, Sequence
from flexgen_h2o.jobs.requests import Request, RowError
from flexgen_h2o.jobs.runner import MAX_BAD_S
from flexgen_h2o.llm import LLM
from flexgen_h2o.serving.answers import RequestRefused, refused, say_fault, shutting_down

if TYPE_CHECKING:
    from flexgen_h2o.serving.batches import OpenBatch

TEMPLATE_PROMPT = 128  # tokens of a usual prompt; the engine is opened for such prompts
# Upper ends of the histogram, in seconds.
LATENCIES = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
RECENT_S = 10.0  # seconds over which speeds are measured
PLAIN_ROW_S = 1.0  # seconds that a sequence is assumed to need before one has been timed
MAX_RETRY_S = 120
MAX_ENDS = 64
# Spans of the timeline, and seconds that they are kept after a request for them.
MAX_SPANS = 1000
WATCHED_S = 15.0
NO_ROOM = (
    "prompt: it and max_tokens need more of the KV cache than this server was opened for; "
    "raise --max-len"
)


@dataclass(eq=False)
class Ticket:
    """The sequences of one client's request.

    A ticket and an `OpenBatch` are the owners of sequences, and have the same methods. The
    engine's thread calls them.
    """

    waiting: deque[Request]  # requests that have not entered the block
    tell: Callable[[tuple[object, ...]], None]  # called with each event, from the engine's thread
    streams: bool = False  # whether the client gets each token as it is made
    is_gone: bool = False  # nobody waits for the sequences any more
    running: int = 0  # sequences that run, or are to run again; `Service` counts them
    # When the request arrived, by time.monotonic().
    began: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether `next` will return no more requests.

        A batch that is not over but has none for now is added again later.
        """
        return self.is_gone or not self.waiting

    def next(self) -> Request | None:
        """Return the next request to be run, or None if there is none."""
        return self.waiting.popleft() if self.waiting else None

    def token(self, place: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """Report that a sequence has another token.

        place: the `index` of its request.
        """
        if self.streams:
            self.tell(("token", place, token, logprobs))

    def finish(self, request: Request) -> None:
        """Report that a sequence is done, or cannot be run: its `error` says why."""
        if request.error is None:
            self.tell(("done", request))
        else:
            self.tell(("error", refused(RowError(request.error_code, request.error))))

    def end(self, error: BaseException | None = None) -> None:
        """Report that none of the owner's sequences runs or waits any more.

        error: an error of the engine that ended all of them.
        """
        if isinstance(error, FlexgenError):
            self.tell(("error", RequestRefused(str(error), "engine_error", 500)))
        elif error is not None:
            self.tell(("error", RequestRefused("internal error", CODE_INTERNAL, 500)))


@dataclass
class Counts:
    """Counts that `/metrics` and `/status` show besides what runs now."""

    rows: int = 0  # sequences that were answered
    tokens: int = 0  # new tokens of sequences that have ended
    computed: int = 0  # new tokens of all sequences
    prompt_tokens: int = 0  # prompt tokens of sequences that entered
    given_up: int = 0  # sequences whose owner was gone
    failed: int = 0  # sequences that ended with an error
    refused: int = 0  # requests refused because the queue is full
    sweeps: int = 0
    # Clients' sequences per bin of LATENCIES.
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCIES) + 1))
    latency_sum: float = 0.0  # seconds
    # (time, `computed` at that time), over the last RECENT_S
    recent: deque[tuple[float, int]] = field(default_factory=deque)

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
        """Tokens per second over the last RECENT_S seconds."""
        recent = list(self.recent)
        now = time.monotonic()
        if not recent or now - recent[-1][0] > RECENT_S:
            return 0.0
        return (self.computed - recent[0][1]) / max(1e-3, now - recent[0][0])


def can_run_again(request: Request) -> bool:
    """Return whether no client has seen its tokens, which cannot be taken back."""
    return not (isinstance(request.owner, Ticket) and request.owner.streams)


class Service(Listener):
    """One running block for all clients and batches. It is the listener of its own runs.

    rows: places that the engine is opened for.
    length: most tokens of a sequence, prompt and answer.
    most_queued: most sequences of clients that wait.
    batch_share: share of the places that batches get while some wait.
    """

    def __init__(
        self, llm: LLM, rows: int, length: int, most_queued: int, batch_share: float
    ) -> None:
        self.llm = llm
        self.length = length
        self.most_queued = most_queued
        self.batch_share = batch_share
        self.counts = Counts()
        self.is_open = True
        # Called with whether sequences of clients run, by the engine's thread.
        self.on_clients: Callable[[bool], None] = lambda run: None
        self._tickets: deque[Ticket] = deque()  # tickets with sequences that wait
        self._batches: deque[OpenBatch] = deque()
        # Sequences that run, in the order of entering; the values mean nothing.
        self._running: dict[Request, None] = {}
        # Sequences of a run that failed. Groups of them run by themselves, until the one that fails
        # is found and the others continue.
        self._is_trying = False
        self._suspects: deque[list[Request]] = deque()  # groups that are to run
        # Sequences of the running group that have not entered yet.
        self._group: deque[Request] = deque()
        self._failed_runs = 0  # failed runs since a sequence was done
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._template = self._make_template(rows)
        self.capacity = rows
        self.predicted: float | None = None  # tokens/s of a full block, predicted by the planner
        # The newest spans, while somebody looks at them.
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._watched = 0.0
        # Ends of the newest micro-batches, in the time of spans.
        self._ends = deque[float](maxlen=MAX_ENDS)

    def _make_template(self, rows: int) -> list[Sequence]:
        """Return the sequences that the engine is opened for.

        Special prompts come first, then usual ones. The first has the greatest length. Each has a
        beginning of its own, so that room for whole sequences is planned. If KV entries are
        dropped, the log-probabilities of a long prompt are computed in decode steps. Another long
        prompt without them is therefore added, which is prefilled whole. If new KV entries are not
        dropped, the shortest prompt needs the most slots and is added. The special ones are
        included even if they are more than `rows`.
        """
        vocab = self.llm.model.spec.vocab_size
        usual = min(TEMPLATE_PROMPT, self.length)
        eviction = self.llm.eviction
        special = [self.length] * (2 if eviction.needs.record else 1)
        special += [1] * (
            bool(eviction.needs.record) and not getattr(eviction, "while_decoding", False)
        )
        sizes = [(n, self.length + 1) for n in special]
        sizes += [(usual, self.length + 1)] * (rows - len(sizes))
        template = []
        for i, (length, total) in enumerate(sizes):
            params = SamplingParams(max_tokens=total - length, prompt_logprobs=None if i else 0)
            template.append(Sequence(i, (i % vocab,) * length, params=params))
        return template

    def open(self) -> None:
        """Open the engine if it is not open. Raise DoesNotFitError if the budgets are too small."""
        if not self.llm.peak_bytes:
            policy = self.llm.prepare(self._template)
            self.capacity = min(self.capacity, policy.block_size)
            predicted = self.llm.predict_run(self._template)
            self.predicted = None if predicted is None else predicted.tokens_per_s

    # Methods for other threads

    def submit(self, ticket: Ticket) -> None:
        """Queue the ticket's sequences. Raise RequestRefused if too many wait already."""
        with self._lock:
            queued = sum(len(one.waiting) for one in self._tickets)
            if not self.is_open:
                raise shutting_down()
            if queued + len(ticket.waiting) > self.most_queued:
                self.counts.refused += 1
                raise RequestRefused(
                    f"{queued} rows wait already, at most {self.most_queued}; try again later",
                    "queue_full",
                    429,
                    retry_after=self._retry_after(queued),
                )
            self._tickets.append(ticket)
        self._wake.set()

    def give_up(self, ticket: Ticket) -> None:
        """Drop what waits of a client that has gone. What runs ends with its next token."""
        ticket.is_gone = True
        with self._lock:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            self.counts.given_up += len(ticket.waiting)
            ticket.waiting.clear()

    def add_batch(self, batch: OpenBatch) -> None:
        with self._lock:
            self._batches.append(batch)
        self._wake.set()

    def watch(self) -> list[Span]:
        """Return the newest spans of the timeline, and keep spans for WATCHED_S more seconds."""
        self._watched = time.monotonic() + WATCHED_S
        return list(self.spans)

    @property
    def last_sweep(self) -> dict[str, float] | None:
        """The time in which the newest micro-batches of a block passed all layers, as in spans."""
        policy = self.llm.policy
        ends = list(self._ends)
        count = 0 if policy is None else min(len(ends) - 1, policy.num_gpu_batches)
        return {"start": ends[-1 - count], "end": ends[-1]} if count > 0 else None

    def wake(self) -> None:
        """Wake the engine's thread, because a batch was cancelled."""
        self._wake.set()

    @property
    def queued(self) -> int:
        with self._lock:
            return sum(len(one.waiting) for one in self._tickets)

    @property
    def running(self) -> tuple[int, int]:
        """Numbers of running sequences, of clients and of batches."""
        owners = [one.owner for one in list(self._running)]
        clients = sum(isinstance(owner, Ticket) for owner in owners)
        return clients, len(owners) - clients

    def _retry_after(self, queued: int) -> int:
        count = sum(self.counts.latencies)
        seconds = self.counts.latency_sum
        each = seconds / count if count else PLAIN_ROW_S
        return max(1, min(MAX_RETRY_S, round(each * queued / max(1, self.capacity))))

    # Methods on the engine's thread

    def run(self) -> None:
        """Serve until a signal arrives. Its Interrupted is not caught."""
        while self.is_open:
            with interrupts.held():
                self._wake.clear()
                first = self._enter()
            if first is None:
                # `run` may loop without waiting, and only a wait checks for signals
                interrupts.check()
                interrupts.wait_for(self._wake)
                continue
            self._ends.clear()
            self._ends.append(time.perf_counter())
            try:
                self.llm.run(
                    [first],
                    self._finish,
                    Callbacks(listener=self, should_continue=self._goes_on, isolates_errors=True),
                    refill=True,
                    more=self._more,
                )
            except BaseException as error:
                is_of_rows = not interrupts.asks_to_end(error) and (
                    self._running or isinstance(error, FlexgenError)
                )
                if not is_of_rows:
                    raise
                interrupts.check()  # the error may be a consequence of the signal
                with interrupts.held():
                    self._after(error)
            self.open()

    def close(self) -> None:
        """Refuse new requests, and end those that run or wait."""
        with self._lock:
            self.is_open = False
            tickets = {id(one): one for one in self._tickets}
            groups = [list(self._running), list(self._group), *list(self._suspects)]
            owners = [one.owner for group in groups for one in group]
            tickets |= {id(owner): owner for owner in owners if isinstance(owner, Ticket)}
            self._tickets.clear()
        for ticket in tickets.values():
            ticket.is_gone = True
            ticket.tell(("error", shutting_down()))

    def _more(self) -> list[Request] | None:
        with interrupts.held():
            found = self._enter()
        return None if found is None else [found]

    def _enter(self) -> Request | None:
        found = self._next_row()
        self.on_clients(any(isinstance(one.owner, Ticket) for one in self._running))
        return found

    def _next_row(self) -> Request | None:
        """Return the sequence that enters next, or None.

        None also means that many were refused, and `run` must ask again. A block of one place has
        no share for batches: they get it if no client waits.
        """
        if self._is_trying:
            return self._next_suspect()
        _, of_batches = self.running
        is_their_turn = self.capacity > 1 and of_batches < self.batch_share * self.capacity
        for take in (
            (self._of_batches, self._of_tickets)
            if is_their_turn
            else (self._of_tickets, self._of_batches)
        ):
            ends = time.monotonic() + MAX_BAD_S
            while (request := take()) is not None:
                if self._has_room(request):
                    request.owner.running += 1
                    self.counts.prompt_tokens += len(request.prompt_ids)
                    self._running[request] = None
                    return request
                self.counts.failed += 1
                request.owner.finish(request)
                if time.monotonic() > ends:  # others have their turn first, and signals
                    self._wake.set()
                    break
        return None

    def _has_room(self, request: Request) -> bool:
        """Return whether the sequence can join the block. Otherwise it fails alone."""
        try:
            if self.llm.has_room([request]):
                return True
            request.fail("context_length_exceeded", NO_ROOM)
        except FlexgenError as error:
            request.fail("does_not_fit", str(error))
        except BaseException as error:
            if interrupts.asks_to_end(error):
                raise
            request.fail(CODE_INTERNAL, internal_reason(error))
        return False

    def _next_suspect(self) -> Request | None:
        """Return the next sequence of the group that runs by itself.

        It is one of the next group once all sequences of this group have ended.
        """
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
                self._running[one] = None
                return one
            self._forget(one)

    def _of_tickets(self) -> Request | None:
        """Return a sequence of the next ticket; tickets take turns."""
        with self._lock:
            while self._tickets:
                ticket = self._tickets.popleft()
                request = ticket.next()
                if ticket.waiting:
                    self._tickets.append(ticket)
                if request is not None:
                    request.owner = ticket
                    return request
        return None

    def _of_batches(self) -> Request | None:
        """Return a sequence of the next batch; batches take turns.

        A batch without further sequences ends when its last sequence has ended. A batch that has
        none now may have added itself again: it is asked at the next call.
        """
        for _ in range(len(self._batches)):
            with self._lock:
                batch = self._batches.popleft() if self._batches else None
            if batch is None:
                return None
            request = None if batch.is_gone else batch.next()
            if request is not None:
                with self._lock:
                    self._batches.append(batch)
                request.owner = batch
                return request
            if batch.is_over and not batch.running and batch not in self._batches:
                batch.end()
        return None

    def _forget(self, request: Request) -> None:
        """Count a sequence as ended, and end its batch if it was the last one."""
        owner = request.owner
        if not owner.running:  # the owner has failed as a whole
            return
        owner.running -= 1
        is_batch = not isinstance(owner, Ticket)
        if is_batch and not owner.running and owner.is_over and owner not in self._batches:
            owner.end()

    def _finish(self, done: list[Request]) -> None:
        """Hand out sequences that have ended, in the order in which they entered.

        The engine calls this.
        """
        with interrupts.held():
            for request in [one for one in self._running if one in done]:
                del self._running[request]
                owner = request.owner
                self._failed_runs = 0
                if owner.is_gone:
                    self.counts.given_up += 1
                else:
                    if request.error is not None:
                        self.counts.failed += 1
                    else:
                        self.counts.rows += 1
                        if isinstance(owner, Ticket):
                            self.counts.add_latency(time.monotonic() - owner.began)
                    owner.finish(request)
                self._forget(request)

    def _goes_on(self, sequence: Sequence) -> bool:
        assert isinstance(sequence, Request)
        owner = sequence.owner
        if not owner.is_gone:
            logprobs = sequence.logprobs[-1] if sequence.logprobs else None
            owner.token(sequence.index, sequence.token_ids[-1], logprobs)
        return not owner.is_gone

    def _after(self, error: BaseException) -> None:
        """Handle a run that has failed.

        An error that the package raises itself concerns all sequences of the run. Any other error
        may be the fault of one sequence. Halves of the sequences then run by themselves, and one
        that fails alone is at fault. Runs that fail one after another are not the fault of one
        sequence.
        """
        rows = list(self._running)
        self._running.clear()
        self._failed_runs += 1
        most_failed = self.capacity.bit_length() + 2  # halves down to one sequence, and some more
        if isinstance(error, FlexgenError):
            self._end_owners(rows, error)
            return
        if not self._is_trying:
            say_fault(f"a run of {len(rows)} rows", error)
        if self._failed_runs > most_failed:
            self._end_owners(rows, error)
            return
        self._end_owners([one for one in rows if not can_run_again(one)], error)
        rows = [one for one in rows if can_run_again(one)]
        if len(rows) == 1:
            self.counts.failed += 1
            rows[0].fail(CODE_INTERNAL, internal_reason(error))
            rows[0].owner.finish(rows[0])
            self._forget(rows[0])
            return
        middle = len(rows) // 2
        halves = [half for half in (rows[:middle], rows[middle:]) if half]
        self._suspects.extendleft(reversed(halves))
        self._is_trying = bool(self._suspects)

    def _end_owners(self, rows: abc.Sequence[Request], error: BaseException) -> None:
        owners = list({id(one.owner): one.owner for one in rows}.values())
        self.counts.failed += len(rows)
        with self._lock:
            for owner in owners:
                for queue in (self._tickets, self._batches):
                    if owner in queue:
                        queue.remove(owner)
        for owner in owners:
            owner.running = 0
            owner.is_gone = True
            owner.end(error)

    # Methods of a run's listener

    def sweep(self, tokens: int) -> None:
        timeline = self.llm.timeline
        self.counts.add_tokens(tokens)
        self.counts.sweeps += 1
        self._ends.append(time.perf_counter())
        timeline.keep_spans = time.monotonic() < self._watched
        self.spans.extend(timeline.take())

    def finish(self, rows: abc.Sequence[Sequence]) -> None:
        """Count finished sequences' tokens, and subtract tokens that are not new.

        These are tokens of a prompt that decode steps took, and tokens that nobody asked for.
        """
        answered = sum(row.answered for row in rows)
        self.counts.tokens += answered
        self.counts.computed -= sum(len(row.token_ids) for row in rows) - answered
