"""The serving process: batches of requests through the stream's rules, durable before they are answered.

Rules that hold in this file:

- One batch is in work at a time. While it is written to disk, further requests gather and make the next one: many
  requests, one write. What a batch answers is set when its step is on disk; without `sync`, when the system has it,
  which survives a kill of the process and no failure of power. A short write to a quick disk is not worth a thread
  (`durable.py`).
- The time of an event is the clock when its batch is handled, unless the request has one. It never goes back, so that
  after the progress of a time nothing comes that is earlier.
- An arrival that comes again is the same arrival: it takes the time of the first.
- If a step cannot be written, memory is ahead of the disk. Then nothing more is answered, and the process ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Final, Literal

import orjson

from worker.embedded.steps import Recorded, Step, StepWriter
from worker.errors import FailedError
from worker.http.service import Answer, ArriveRequest, FeedbackRequest, UnavailableError, UnknownSessionError
from worker.metrics import Metrics
from worker.secret import Secret
from worker.serve.durable import DurableSteps
from worker.stream.decoding import Limits, Rejected
from worker.stream.encoding import encode_journal, encode_progress
from worker.stream.events import Order, Progress, Reason
from worker.stream.room import SessionRoom
from worker.stream.serving import Serving
from worker.stream.session import Session
from worker.stream.tokens import slate_tokens
from worker.stream.topology import ONLY_PARTITION, DeadLetter, Emits, Record, Topics
from worker.stream.versions import Versions

log = logging.getLogger(__name__)

#: Requests that may wait; beyond that, the process is overloaded.
MOST_WAITING: Final = 20_000
#: Why feedback is refused.
NEVER_OPENED: Final = "it was never opened here, or it is over"

Kind = Literal["arrive", "feedback", "look", "order", "tick"]


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A request that waits for its answer."""

    kind: Kind
    session_id: str = ""
    request: ArriveRequest | FeedbackRequest | None = None
    order: Order | None = None
    future: asyncio.Future[Answer | None]
    since: float = field(default_factory=monotonic)
    error: Exception | None = None
    offset: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStart:
    """Where a runner begins: the state that the last process left."""

    sessions: Mapping[bytes, bytes] = field(default_factory=dict)
    journal_end: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict)  # by topic
    time: int = 0
    progress: int = 0
    position: int = 0  # of the steps that are kept


class ServeRunner:
    """Handles requests in batches.

    Parameters
    ----------
    clock : milliseconds since the epoch
    record : whether steps carry the records, for the log
    progress_interval : seconds between two progress records
    sync : whether answers wait for the disk; otherwise it is written once per `progress_interval`
    """

    def __init__(
        self,
        folder: Path,
        versions: Versions,
        start: RunnerStart,
        metrics: Metrics,
        *,
        clock: Callable[[], int],
        topics: Topics,
        limits: Limits | None = None,
        secret: Secret | None = None,
        max_open_sessions: int | None = None,
        record: bool = False,
        progress_interval: float = 1.0,
        sync: bool = True,
    ) -> None:
        self.topics = topics
        self.versions = versions
        self.serving = Serving(
            versions, topics=topics, limits=limits, secret=secret, room=SessionRoom(max_open_sessions)
        )
        self.failure: str | None = None
        self.writer = StepWriter(folder, start.position)
        self._durable = DurableSteps(self.writer)
        self._secret = secret
        self._metrics = metrics
        self._clock = clock
        self._record = record
        self._sync = sync
        self._interval = progress_interval
        self._time, self._progress = start.time, start.progress
        self._journal_end = start.journal_end
        self._offsets = dict.fromkeys((topics.arrivals, topics.clicks, topics.decisions, topics.dead_letters), 0)
        self._offsets.update(start.offsets)
        self._waiting: list[Waiting] = []
        self._wake: asyncio.Future[None] | None = None
        records = [
            Record(topics.changelog, ONLY_PARTITION, -1, -1, key, value) for key, value in start.sessions.items()
        ]
        metrics.add(self.serving.restore(records))
        self.serving.acknowledged(start.progress)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, waiting: Waiting) -> asyncio.Future[Answer | None]:
        """Add a request to the next batch; return its future."""
        if self.failure is not None:
            raise UnavailableError(self.failure)
        if len(self._waiting) >= MOST_WAITING:
            raise UnavailableError("too many requests wait")
        self._waiting.append(waiting)
        self._wake_up()
        return waiting.future

    def is_arriving(self, session_id: str) -> bool:
        """Return whether the arrival of a session waits for the next batch."""
        return any(one.kind == "arrive" and one.session_id == session_id for one in self._waiting)

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        self._wake = None

    def now(self) -> int:
        """Return the time, which never goes back."""
        self._time = max(self._time, self._clock())
        return self._time

    async def run(self) -> None:
        """Handle batches until cancelled; raise `FailedError` if a step cannot be written."""
        loop = asyncio.get_running_loop()
        ticking = loop.create_task(self._tick())
        ticking.add_done_callback(lambda _: self._wake_up())
        try:
            while not ticking.done():
                if not self._waiting:
                    self._wake = loop.create_future()
                    await self._wake
                batch, self._waiting = self._waiting, []
                await self._run_batch(batch)
                # What is answered leaves before the next batch is planned, and more requests gather for that one.
                await asyncio.sleep(0)
            ticking.result()  # raises
        except OSError as error:
            self.failure = f"the state folder cannot be written: {error.strerror or error}"
            raise FailedError(f"{self.failure}; nothing more is answered") from None
        finally:
            self.failure = self.failure or "the server ends"
            ticking.cancel()
            for waiting in self._waiting:
                _fail(waiting.future, UnavailableError(self.failure))
            self._durable.close()
            self.writer.close()

    async def _tick(self) -> None:
        """Report progress, and let sessions expire, also without requests."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval)
            if not self._sync:
                await self._durable.synchronise()
            await self.submit(Waiting(kind="tick", future=loop.create_future()))

    async def _run_batch(self, batch: list[Waiting]) -> None:
        try:
            step, emits = self._handle(batch)
            if step is not None:
                frame = self.writer.encode(step)
                if not self._sync:
                    self.writer.append(frame)
                elif self._durable.is_quick(len(batch)):
                    self._durable.append(frame)
                else:
                    await self._durable.append_in_thread(frame)
                if step.progress:
                    self.serving.acknowledged(step.progress)
                    self._progress = step.progress
        except OSError as error:
            for waiting in batch:
                _fail(
                    waiting.future, UnavailableError(f"the state folder cannot be written: {error.strerror or error}")
                )
            raise
        except BaseException:
            for waiting in batch:
                _fail(waiting.future, UnavailableError("the server ends"))
            raise
        self._answer(batch, emits)

    # ── a batch ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, batch: list[Waiting]) -> tuple[Step | None, Emits]:
        """Handle a batch; return what to write, and what came of it."""
        now = self.now()
        records = self._records(batch, now)
        started = perf_counter()
        emits = self.serving.handle(records)
        if records or emits.changelog:
            self._metrics.batch(emits, len(records), perf_counter() - started)
        journal: list[tuple[bytes | None, bytes]] = list(emits.journal)
        start = self._journal_end
        progress = now if now - self._progress >= 1000 * self._interval else 0
        for waiting in batch:
            if waiting.order is not None:
                waiting.offset = start + len(journal)
                journal.append((None, encode_journal(waiting.order)))
        if progress:
            reached = Progress(partition=0, partitions=1, time=progress, opened=self.serving.opened)
            journal.append((None, encode_progress(reached)))
        self._journal_end += len(journal)
        outputs = self._outputs(emits) if self._record else ()
        if not (journal or emits.changelog or (self._record and records)):
            return None, emits
        step = Step(
            time=now,
            journal_start=start,
            journal=tuple(journal),
            sessions=tuple(emits.changelog),
            offsets=dict(self._offsets),
            inputs=tuple(Recorded(one.topic, one.offset, one.key, one.value) for one in records)
            if self._record
            else (),
            outputs=outputs,
            progress=progress,
            has_orders=any(waiting.order is not None for waiting in batch),
        )
        return step, emits

    def _records(self, batch: Iterable[Waiting], now: int) -> list[Record]:
        """Return the records of a batch; a request that can be refused at once gets its error."""
        table, topics, records = self.serving.table, self.topics, []
        arriving: dict[str, int] = {}
        for waiting in batch:
            session_id, request = waiting.session_id, waiting.request
            known = table.get(session_id) if request is not None else None
            if isinstance(request, ArriveRequest):
                at = known.arrived_at if type(known) is Session else arriving.setdefault(session_id, now)
                records.append(self._record_of(waiting, topics.arrivals, request.record(at), now))
            elif isinstance(request, FeedbackRequest):
                if known is None and session_id not in arriving:
                    waiting.error = UnknownSessionError(NEVER_OPENED)
                    continue
                records.append(self._record_of(waiting, topics.clicks, request.record(now), now))
        return records

    def _record_of(self, waiting: Waiting, topic: str, value: bytes, now: int) -> Record:
        waiting.offset = self._offsets[topic]
        self._offsets[topic] += 1
        key = waiting.session_id.encode("utf-8", errors="replace")
        return Record(topic, ONLY_PARTITION, waiting.offset, now, key, value)

    def _outputs(self, emits: Emits) -> tuple[Recorded, ...]:
        decisions = [self._output(self.topics.decisions, key, value) for key, value in emits.decisions]
        letters = [
            self._output(self.topics.dead_letters, letter.key, letter.value, tuple(letter.headers))
            for letter in emits.dead_letters
        ]
        return (*decisions, *letters)

    def _output(
        self, topic: str, key: bytes | None, value: bytes | None, headers: tuple[tuple[str, bytes], ...] = ()
    ) -> Recorded:
        offset = self._offsets[topic]
        self._offsets[topic] += 1
        return Recorded(topic, offset, key, value, headers)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, batch: Iterable[Waiting], emits: Emits) -> None:
        decisions = dict(emits.decisions)
        rejected = dict(map(_rejection, emits.dead_letters)) if emits.dead_letters else {}
        now = monotonic()
        for waiting in batch:
            future = waiting.future
            if waiting.kind == "arrive":
                self._metrics.decided(now - waiting.since)
            if future.done():  # with fallback ads, or the client has gone
                continue
            topic = self.topics.arrivals if waiting.kind == "arrive" else self.topics.clicks
            error = waiting.error or (rejected.get((topic, waiting.offset)) if waiting.request is not None else None)
            if error is not None:
                future.set_exception(error)
            elif waiting.kind in ("tick", "order"):
                future.set_result(None)
            else:
                answer = self._answer_of(waiting.session_id, decisions.get(waiting.session_id.encode()))
                if answer is None and waiting.request is not None:
                    future.set_exception(UnavailableError("there is no room for this session"))
                else:
                    future.set_result(answer)

    def _answer_of(self, session_id: str, decision: bytes | None) -> Answer | None:
        session = self.serving.table.get(session_id)
        if type(session) is not Session:
            return None if decision is None else Answer(session_id, decision)
        return self.answer_from(session_id, session, decision)

    def answer_from(self, session_id: str, session: Session, decision: bytes | None = None) -> Answer:
        """Return the answer that the state of a session stands for; `decision` is the encoded one, if it is known."""
        if not session.is_open and session.slate:
            return Answer(session_id, None, session.ending)
        if self.now() > session.deadline:
            return Answer(session_id, None, "expired")
        if decision is None:
            decision = orjson.dumps(session.decision(session_id, self._tokens(session_id, session)))
        return Answer(session_id, decision)

    def _tokens(self, session_id: str, session: Session) -> tuple[str, ...] | None:
        if self._secret is None:
            return None
        slate, first = session.slate[session.passed :], session.passed + 1
        return slate_tokens(
            self._secret, session_id=session_id, slate=slate, arrived_at=session.arrived_at, first=first
        )


def _rejection(letter: DeadLetter) -> tuple[tuple[str, int], Rejected]:
    headers = dict(letter.headers)
    reason: Reason = headers["adcascade.reason"].decode()  # type: ignore[assignment]
    where = headers["adcascade.topic"].decode(), int(headers["adcascade.offset"])
    return where, Rejected(reason, headers["adcascade.error"].decode())


def _fail(future: asyncio.Future[Answer | None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # whoever waited may have gone
