"""The serving process: batches of requests through the stream's rules, durable before they are answered.

Rules that hold in this file:

- One batch is in work at a time: one transaction of the state folder. While it is committed, in a thread, further
  requests gather and make the next one. What a batch answers is set when it is committed, that is on disk.
- Statements run in the loop's thread. In another one, each would wait for the interpreter.
- The time of an event is the clock when its batch is handled, unless the request has one. It never goes back, so that
  after the progress of a time nothing comes that is earlier.
- An arrival that comes again is the same arrival: it takes the time of the first.
- An arrival that waits at its deadline is answered with fallback ads, or with the client's mistake. Its batch goes on.
  Feedback is answered when it is durable: the client has the slate.
- If a batch cannot be committed, memory is ahead of the disk. Then nothing more is answered, and the process ends.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Final, TypeVar

from worker.errors import FailedError
from worker.http.service import (
    AdRequest,
    Answer,
    UnavailableError,
    UnknownSessionError,
    fallback_answer,
)
from worker.metrics.observer import Metrics
from worker.runtime.settings import ProcessSettings
from worker.serve.store import TOPICS, Lesson, ServeStore
from worker.stream.decoding import Rejected, decode_arrival
from worker.stream.events import Order, Progress, Reason, encode_event
from worker.stream.parameters import Parameters
from worker.stream.session import Session
from worker.stream.topology import ONLY_PARTITION, DeadLetter, Emits, Record, Tally
from worker.stream.versions import Versions

#: Requests that may wait; beyond that, the process is overloaded.
MOST_WAITING: Final = 20_000
#: Deleted sessions that are remembered, so that feedback for them is known to be late.
MOST_ENDED: Final = 100_000
#: Why feedback is refused.
NEVER_OPENED: Final = "the session was never opened here, or ended long ago; send the session_id of its arrival"

_T = TypeVar("_T")
_NO_REQUEST: Final = AdRequest("", b"")


@dataclass(slots=True)
class Waiting:
    """A request that waits for its answer, or without a `topic`, work that waits for a transaction.

    Without either, it is a tick.
    """

    topic: str = ""
    request: AdRequest = _NO_REQUEST
    work: Callable[[], object] | None = None
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    since: float = field(default_factory=monotonic)
    error: Exception | None = None
    offset: int = -1


class ServeRunner:
    """The `AdService` of this process: handles requests in batches."""

    def __init__(self, store: ServeStore, versions: Versions, metrics: Metrics, settings: ProcessSettings) -> None:
        self.versions = versions
        self.serving = settings.serving(versions, TOPICS)(ONLY_PARTITION)
        self.failure: str | None = None
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._limits = settings.limits
        self._metrics = metrics
        self._clock = settings.clock
        self._interval = settings.progress_interval
        self._waiting: list[Waiting] = []
        self._ended: dict[int, int] = {}  # hashes of deleted sessions, and when they were deleted, the oldest first
        self._has_work = asyncio.Event()
        records = [
            Record(TOPICS.changelog, ONLY_PARTITION, -1, -1, key, value) for key, value in store.state.sessions()
        ]
        metrics.add(self.serving.restore(records))
        self.serving.acknowledged(store.progress)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def newest(self) -> Parameters:
        """Return the newest version."""
        return self.versions.newest

    def ready(self) -> str | None:
        """Return None, or why no requests can be taken."""
        return self.failure

    async def arrive(self, request: AdRequest, deadline: float) -> Answer:
        """Open a session, or find it; return its current decision."""
        answering: asyncio.Future[Answer] = self._submit(Waiting(TOPICS.arrivals, request))
        try:
            async with asyncio.timeout_at(deadline):
                return await answering
        except TimeoutError:
            return self._fallback(request)

    async def feedback(self, request: AdRequest, deadline: float) -> Answer:
        """Take a click or a pass; return the next decision, or how the session ended."""
        answering: asyncio.Future[Answer] = self._submit(Waiting(TOPICS.clicks, request))
        return await answering

    async def session(self, session_id: str) -> Answer | None:
        """Return the answer that the last request of a session would have now.

        It follows the batch before it, so that nothing is shown that a crash could take back.
        """
        return await self._transact(lambda: self._answer_of(session_id))

    async def order(self, order: Order) -> int:
        """Write an order to the journal; return its offset."""
        return await self._transact(lambda: self._store.add_journal([(None, encode_event(order))])[0][0])

    async def keep(self, lesson: Lesson) -> Sequence[tuple[int, str]]:
        """Keep what was learned; return the orders that are refused, by offset."""
        return await self._transact(lambda: self._store.add_lesson(lesson, self.versions.history))

    async def _transact(self, work: Callable[[], _T]) -> _T:
        """Do some work in the transaction of the next batch; return its result when that is committed."""
        results: list[_T] = []
        await self._submit(Waiting(work=lambda: results.append(work())))
        return results[0]

    def _submit(self, waiting: Waiting) -> asyncio.Future[Any]:
        """Add a request to the next batch; return its future."""
        if self.failure is not None:
            raise UnavailableError(self.failure)
        if len(self._waiting) >= MOST_WAITING:
            raise UnavailableError("too many requests wait")
        self._waiting.append(waiting)
        self._has_work.set()
        return waiting.future

    def now(self) -> int:
        """Return the time, which never goes back."""
        self._store.time = max(self._store.time, self._clock())
        return self._store.time

    async def run(self) -> None:
        """Handle batches until cancelled; raise `FailedError` if one cannot be committed."""
        ticking = asyncio.create_task(self._tick())
        ticking.add_done_callback(lambda _: self._has_work.set())
        try:
            while not ticking.done():
                await self._has_work.wait()
                self._has_work.clear()
                batch, self._waiting = self._waiting, []
                await self._run_batch(batch)
                # What is answered leaves before the next batch is planned, and more requests gather for that one.
                await asyncio.sleep(0)
            ticking.result()  # raises
        finally:
            self.failure = self.failure or "the server ends"
            ticking.cancel()
            for waiting in self._waiting:
                _fail(waiting.future, UnavailableError(self.failure))
            self._thread.shutdown()

    async def _tick(self) -> None:
        """Report progress, and let sessions expire, also without requests."""
        while True:
            await asyncio.sleep(self._interval)
            await self._submit(Waiting())

    async def _run_batch(self, batch: list[Waiting]) -> None:
        try:
            emits, progress, has_changes = self._handle(batch)
            if has_changes:
                synchronise = any(not waiting.topic and waiting.work is None for waiting in batch)
                commit = partial(self._store.commit, synchronise=synchronise)
                await asyncio.get_running_loop().run_in_executor(self._thread, commit)
            if progress:
                self.serving.acknowledged(progress)
        except BaseException as error:
            if isinstance(error, sqlite3.Error | FailedError):
                self.failure = f"the state folder cannot be written: {error}"
            for waiting in batch:
                _fail(waiting.future, UnavailableError(self.failure or "the server ends"))
            if self.failure:
                raise FailedError(f"{self.failure}; nothing more is answered") from None
            raise
        self._answer(batch, emits)

    # ── a batch ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, batch: list[Waiting]) -> tuple[Emits, int, bool]:
        """Handle a batch; return what came of it, its progress, and whether there is something to commit."""
        now, store = self.now(), self._store
        records = self._records(batch, now)
        started = perf_counter()
        emits = self.serving.handle(records)
        self._remember_ended(emits, now)
        if records or emits.changelog:
            self._metrics.batches([emits], len(records), perf_counter() - started)
        store.add_batch(records, emits)
        work = [waiting.work for waiting in batch if waiting.work is not None]
        for one in work:
            one()
        progress = now if now - store.progress >= 1000 * self._interval else 0
        if progress:
            store.progress = progress
            reached = Progress(partition=0, partitions=1, time=progress)
            store.add_journal([(None, encode_event(reached))])
        has_changes = bool(work or progress or emits.journal or emits.changelog or (records and store.tap))
        if has_changes:
            store.prepare()
        return emits, progress, has_changes

    def _records(self, batch: Iterable[Waiting], now: int) -> list[Record]:
        """Return the records of a batch; a request that can be refused immediately gets its error."""
        records: list[Record] = []
        arriving: dict[str, int] = {}
        for waiting in batch:
            topic, session_id, at = waiting.topic, waiting.request.session_id, now
            if not topic:
                continue
            known = self.serving.table.get(session_id)
            if topic == TOPICS.arrivals:
                at = known.arrived_at if type(known) is Session else arriving.setdefault(session_id, now)
            elif known is None and session_id not in arriving:
                waiting.error = absent = self._absent(session_id, now)
                tally = Tally(feedback=1, late=int(absent.over), unknown=int(not absent.over))
                tally.troubles.add("late-feedback", str(absent).partition(";")[0])
                self._metrics.add(tally)
                continue
            waiting.offset = self._store.next_offset(topic)
            key = session_id.encode("utf-8", errors="replace")
            records.append(Record(topic, ONLY_PARTITION, waiting.offset, now, key, waiting.request.record(at)))
        return records

    # ── feedback without a session ───────────────────────────────────────────────────────────────────────────────────

    def _remember_ended(self, emits: Emits, now: int) -> None:
        """Remember the sessions that a batch has deleted, and forget the oldest beyond `MOST_ENDED`."""
        for key, value in emits.changelog:
            if value is None:
                self._ended[hash(key)] = now
        while len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def _absent(self, session_id: str, now: int) -> UnknownSessionError:
        """Return why feedback for a session that is not in the table cannot count."""
        deleted, settings = self._ended.get(hash(session_id.encode(errors="replace"))), self.versions.newest.settings
        if deleted is None:
            return UnknownSessionError(NEVER_OPENED)
        late, timeout = (now - deleted + settings.lateness) / 1000, settings.session_timeout / 1000
        since = f"feedback counts until {timeout:g} s after the arrival, and this comes at least {late:,.0f} s too late"
        return UnknownSessionError(f"{since}; a longer --session-timeout of the server allows it", over=True)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, batch: Iterable[Waiting], emits: Emits) -> None:
        decisions = dict(emits.decisions)
        rejected = dict(map(_rejection, emits.dead_letters)) if emits.dead_letters else {}
        now = monotonic()
        for waiting in batch:
            future, topic, session_id = waiting.future, waiting.topic, waiting.request.session_id
            if topic == TOPICS.arrivals:
                self._metrics.decided(now - waiting.since)
            if future.done():  # with fallback ads, or the client has gone
                continue
            error = waiting.error or rejected.get((topic, waiting.offset))
            answer = None
            if topic and error is None:
                answer = self._answer_of(session_id, decisions.get(session_id.encode()))
                if answer is None and topic == TOPICS.arrivals:
                    error = UnavailableError("there is no room for this session")
                elif answer is None:  # this very batch has deleted the session
                    error = self._absent(session_id, self.now())
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answer)

    def _answer_of(self, session_id: str, decision: bytes | None = None) -> Answer | None:
        """Return the answer that the state of a session stands for; `decision` is the encoded one, if it is known."""
        session = self.serving.table.get(session_id)
        if type(session) is not Session:
            return None if decision is None else Answer(session_id, decision)
        if not session.is_open and session.slate:
            return Answer(session_id, None, session.ending)
        if self.now() > session.deadline:
            return Answer(session_id, None, "expired")
        if decision is None:
            decision = encode_event(session.decision(session_id, self.serving.tokens(session_id, session)))
        return Answer(session_id, decision)

    def _fallback(self, request: AdRequest) -> Answer:
        """Return fallback ads; raise `Rejected` for a client's mistake, which is the same at any time."""
        now = self.now()
        settings, encoder = self.versions.newest.settings, self.versions.encoders
        arrival = decode_arrival(request.record(now), settings, limits=self._limits, timestamp=now, encoder=encoder)
        return fallback_answer(self.versions.at(now), arrival)


def _rejection(letter: DeadLetter) -> tuple[tuple[str, int], Rejected]:
    headers = dict(letter.headers)
    reason: Reason = headers["adcascade.reason"].decode()  # type: ignore[assignment]
    where = headers["adcascade.topic"].decode(), int(headers["adcascade.offset"])
    return where, Rejected(reason, headers["adcascade.error"].decode())


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever waited may have gone
