"""The rules by which requests and decisions meet: who waits for which decision, and what is remembered.

Rules that hold in this file:

- The decisions of all clients are received; one is used if its session is known here, or if `others` is set.
- The decision of the highest position of a session counts. Workers repeat decisions after a crash: a repeated or
  earlier one is counted and changes nothing.
- A wait ends with a decision of its position or a later one, or at its deadline. A decision that comes later is
  remembered, and answers the next wait.
- An arrival that is asked for again is answered from memory. If no decision came yet and nobody else waits for it, the
  same bytes are sent again; workers accept them as a repetition.

Deadlines are times of the event loop's clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from worker.client.transport import ClientTransport, Keyed
from worker.stream.decoding import Rejected, decode_decision
from worker.stream.events import Decision
from worker.stream.topology import Record

log = logging.getLogger(__name__)

REUSED: Final = "another arrival has this session_id; ids must be unique"

#: How a session ended, as far as it was reported here.
Ending: TypeAlias = Literal["clicked", "exhausted"]


class Known(NamedTuple):
    """The decision of a session as it came, and its position.

    It is decoded when it is needed, because a decoded one takes three times as much memory.
    """

    value: bytes
    position: int

    def decision(self) -> Decision:
        """Decode the decision."""
        return decode_decision(self.value)


@dataclass(slots=True)
class ClientCounts:
    """Counts of a client.

    arrivals, feedback : records sent
    answered, timed_out : waits that ended with a decision, or at the deadline
    late : decisions that came after somebody had stopped waiting for them
    repeated : decisions that were known already, or for an earlier position
    undelivered : records that no broker took in time
    """

    arrivals: int = 0
    feedback: int = 0
    answered: int = 0
    timed_out: int = 0
    late: int = 0
    repeated: int = 0
    undelivered: int = 0


@dataclass(slots=True, eq=False)
class _Session:
    """What is known of a session; `request` and `arrival` only if it was opened here."""

    since: float
    request: bytes | None = None
    arrival: Keyed | None = None
    known: Known | None = None
    ending: Ending | None = None
    asking: int = 0  # requests that wait for the answer to the arrival
    given_up: bool = False
    waits: tuple[tuple[int, asyncio.Future[Known]], ...] = ()


class Exchange:
    """Sends requests over a transport, and finds the decisions that answer them.

    Parameters
    ----------
    remember : most sessions that are remembered, and `seconds`, for how long
    others : whether sessions that other clients opened are remembered too
    """

    def __init__(self, transport: ClientTransport, *, remember: int, seconds: float, others: bool = False) -> None:
        self.transport = transport
        self.counts = ClientCounts()
        self._remember, self._others = remember, others
        self.seconds = seconds
        self._sessions: dict[bytes, _Session] = {}  # in the order in which they became known
        self._unacknowledged: set[asyncio.Future[None]] = set()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def arrive(self, record: Keyed, request: bytes, deadline: float) -> Known | None:
        """Open a session, or find it; return its decision, or None at the deadline.

        `request` is the part of the record that a repetition must share. Raises `Rejected` if it differs.
        """
        session = self._sessions.get(record.key) or self._add(record.key)
        if session.request not in (None, request):
            raise Rejected("session-reused", REUSED)
        if session.known is not None:
            return session.known
        if session.arrival is None:
            session.request, session.arrival = request, record
        if not session.asking:
            self._send(session.arrival)
            self.counts.arrivals += 1
        session.asking += 1
        try:
            return await self._wait(session, 1, deadline)
        finally:
            session.asking -= 1

    def report(self, record: Keyed) -> asyncio.Future[None]:
        """Send feedback; return the future of its acknowledgement."""
        self.counts.feedback += 1
        return self._send(record)

    async def decision(self, key: bytes, position: int, deadline: float) -> Known | None:
        """Return the decision of a session for a position or a later one, or None at the deadline."""
        return await self._wait(self._sessions.get(key) or self._add(key), position, deadline)

    def known(self, key: bytes) -> Known | None:
        """Return the last decision of a session; None if it is not remembered."""
        session = self._sessions.get(key)
        return None if session is None else session.known

    def is_unanswered(self, key: bytes) -> bool:
        """Return whether a session was opened here, and no decision has come yet."""
        session = self._sessions.get(key)
        return session is not None and session.arrival is not None and session.known is None

    def __len__(self) -> int:
        """Return the number of sessions that are remembered."""
        return len(self._sessions)

    def end(self, key: bytes, ending: Ending) -> None:
        """Remember that a session has ended. A click is final."""
        session = self._sessions.get(key) or self._add(key)
        if session.ending != "clicked":
            session.ending = ending

    def ending(self, key: bytes) -> Ending | None:
        """Return how a session ended; None if it has not, or if that is not known here."""
        session = self._sessions.get(key)
        return None if session is None else session.ending

    # ── records out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, record: Keyed) -> asyncio.Future[None]:
        sent = self.transport.send(record)
        self._unacknowledged.add(sent)
        sent.add_done_callback(self._settle)
        return sent

    def _settle(self, sent: asyncio.Future[None]) -> None:
        self._unacknowledged.discard(sent)
        if not sent.cancelled() and sent.exception() is not None:
            self.counts.undelivered += 1

    async def flush(self) -> None:
        """Wait until everything sent is acknowledged. Raises `UndeliveredError` if a record is given up."""
        for sent in list(self._unacknowledged):
            await asyncio.shield(sent)

    # ── decisions in ─────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, records: Sequence[Record]) -> None:
        """Accept decisions, and end the waits for them."""
        sessions, others = self._sessions, self._others
        for record in records:
            key, value = record.key, record.value
            if key is None or value is None:
                continue
            session = sessions.get(key)
            if session is None and not others:
                continue
            try:
                position = decode_decision(value).position
            except Rejected as rejected:
                log.warning("%s: not a decision: %s", record.where, rejected)
                continue
            self._apply(session or self._add(key), Known(value, position))

    def _apply(self, session: _Session, known: Known) -> None:
        before, position = session.known, known.position
        if before is not None and position <= before.position:
            self.counts.repeated += 1
            return
        session.known = known
        if session.given_up:
            self.counts.late += 1
            session.given_up = False
        if session.waits:
            for wanted, answer in session.waits:
                if wanted <= position and not answer.done():
                    answer.set_result(known)
            session.waits = tuple(wait for wait in session.waits if wait[0] > position)

    async def _wait(self, session: _Session, position: int, deadline: float) -> Known | None:
        known = session.known
        if known is None or known.position < position:
            wait = (position, asyncio.get_running_loop().create_future())
            session.waits += (wait,)
            try:
                async with asyncio.timeout_at(deadline):
                    known = await wait[1]
            except TimeoutError:
                known = None
            finally:
                if wait in session.waits:  # not if it was answered
                    session.waits = tuple(other for other in session.waits if other is not wait)
                    session.given_up = True
        if known is None:
            self.counts.timed_out += 1
        else:
            self.counts.answered += 1
        return known

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _add(self, key: bytes) -> _Session:
        """Remember a session from now on, and forget those that are too old or too many."""
        sessions, now = self._sessions, asyncio.get_running_loop().time()
        while sessions:
            oldest = next(iter(sessions))
            session = sessions[oldest]
            if len(sessions) < self._remember and now - session.since < self.seconds:
                break
            del sessions[oldest]
            if session.waits:  # as if it had become known just now
                session.since = now
                sessions[oldest] = session
                break
        added = sessions[key] = _Session(now)
        return added
