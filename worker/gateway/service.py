"""The `AdService` on Kafka: requests become records, decisions become answers.

Rules that hold in this file:

- A request is judged by the project's own decoder before it is sent, and by the slate if this gateway has seen the
  decision. What is rejected here has the reason that its dead letter would have, and leaves no record.
- Every gateway sees all decisions. So a session may be opened at one gateway and go on at another, and a request that
  comes again is answered from memory, wherever it comes.
- A click, the pass of the last ad, and feedback that is too late to count are answered when the brokers have them; any
  other request with the decision of a worker. At the deadline, a pass is answered from the slate if it is known, since
  slates never change. Otherwise the answer is the fallback ads, marked as such.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable
from typing import Any, Final

import orjson
from msgspec import structs

from worker.client.exchange import Exchange, Known
from worker.client.transport import Keyed
from worker.http.service import AdRequest, Answer, UnavailableError, fallback_answer
from worker.kafka.parameters import Received
from worker.runtime.clock import wall_clock
from worker.stream.decoding import Limits, Rejected, decode_arrival, decode_feedback
from worker.stream.events import Arrival, Decision, Feedback, encode_event
from worker.stream.feature_changes import encoder_of
from worker.stream.features import ContextEncoder
from worker.stream.feedback import NO_TOKEN, contradiction
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner

#: Seconds that a session is remembered beyond its end.
LONGER: Final = 5.0
FALLBACK_SHOWN: Final = (
    "only fallback ads were answered so far, and feedback for them does not count; send the arrival again for the "
    "decision"
)


class KafkaAdService:
    """Answers requests through the workers; `clock` gives milliseconds since the epoch.

    The newest version says how records are judged, how long sessions last, and which ads are the fallback.
    """

    def __init__(self, exchange: Exchange, limits: Limits, *, clock: Callable[[], int] = wall_clock) -> None:
        self.exchange, self._limits, self._clock = exchange, limits, clock
        self.late_feedback = 0
        #: The planner of the newest version; None before the first.
        self._newest: SlatePlanner | None = None
        #: Encodes named contexts; the names before the last change of features are understood as well.
        self._encoder: ContextEncoder | None = None

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def version(self) -> int:
        """The newest version, -1 before the first."""
        return -1 if self._newest is None else self._newest.parameters.version

    def take(self, records: Iterable[Received]) -> None:
        """Take records of the parameters topic; those that cannot be read are for the workers to report."""
        for record in records:
            if record.parameters is not None:
                self.adopt(record.parameters)

    def adopt(self, parameters: Parameters) -> None:
        """Use a version if it is newer than the present one, or the same from a newer position, with its accounts."""
        known = None if self._newest is None else self._newest.parameters
        if known is None or parameters.version > known.version:
            self._newest, self._encoder = SlatePlanner(parameters), encoder_of(parameters, [parameters])
            self.exchange.seconds = parameters.settings.grace / 1000 + LONGER
        elif self._newest and parameters.sha256 == known.sha256 and parameters.journal_offset > known.journal_offset:
            self._newest.parameters = parameters

    def newest(self) -> Parameters:
        """Return the newest version that is published."""
        return self._planner().parameters

    def ready(self) -> str | None:
        """Return why no requests can be answered."""
        if self._newest is None:
            return "no parameters are published yet: a worker has to run"
        return self.exchange.transport.trouble

    # ── arrivals ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def arrive(self, request: AdRequest, deadline: float) -> Answer:
        """Open a session, or find it."""
        planner, now = self._planner(), self._clock()
        record = request.record(now)
        arrival = decode_arrival(
            record, planner.parameters.settings, limits=self._limits, timestamp=now, encoder=self._encoder
        )
        key = arrival.session_id.encode()
        same = orjson.dumps((arrival.context, arrival.exclude))
        if self._encoder is not None:  # as it was sent: its columns may change before it comes again
            sent = orjson.loads(b"{%b}" % request.members[1:])
            same = orjson.dumps((sent["context"], arrival.exclude), option=orjson.OPT_SORT_KEYS)
        known = await self.exchange.arrive(Keyed("arrivals", key, record), same, deadline)
        return fallback_answer(planner, arrival) if known is None else self._current(key, known)

    # ── feedback ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def feedback(self, request: AdRequest, deadline: float) -> Answer:
        """Send a click or a pass; return what follows."""
        planner = self._planner()
        key = request.session_id.encode()
        known = self.exchange.known(key)
        decision = None if known is None else known.decision()
        record, feedback = self._judged(request, decision, planner)
        if self.exchange.is_unanswered(key):
            raise Rejected("arm-mismatch", FALLBACK_SHOWN)
        sent = self.exchange.report(Keyed("clicks", key, record))
        settings = planner.parameters.settings
        if decision is not None and feedback.occurred_at > decision.arrived_at + settings.session_timeout:
            self.late_feedback += 1
            in_time = await _acknowledged(sent, deadline)  # the workers count it, and report trouble if it is much
            return Answer(feedback.session_id, None, self.exchange.ending(key) or "expired", fallback=not in_time)
        last = settings.horizon if decision is None else _last(decision)
        if feedback.clicked or feedback.position >= last:
            in_time = await _acknowledged(sent, deadline)
            self.exchange.end(key, "clicked" if feedback.clicked else "exhausted")
            return Answer(feedback.session_id, None, self.exchange.ending(key), fallback=not in_time)
        if known is not None and (current := self._current(key, known)).decision is None:
            return current
        following = await self.exchange.decision(key, feedback.position + 1, deadline)
        if following is not None:
            return self._current(key, following)
        await _acknowledged(sent, 0.0)
        if known is not None:
            return Answer(feedback.session_id, _from_slate(known, feedback.position + 1))
        arrival = Arrival(session_id=feedback.session_id, occurred_at=feedback.occurred_at, context=())
        return fallback_answer(planner, arrival)

    def _judged(self, request: AdRequest, decision: Decision | None, planner: SlatePlanner) -> tuple[bytes, Feedback]:
        """Return the record of feedback and its content; raise `Rejected` if the workers would reject it."""
        now, settings = self._clock(), planner.parameters.settings
        # Feedback before its arrival would not count, and the clocks of two gateways may differ.
        record = request.record(now if decision is None else max(now, decision.arrived_at))
        horizon = settings.horizon if decision is None else max(settings.horizon, _last(decision))
        feedback = decode_feedback(record, limits=self._limits, horizon=horizon, timestamp=now, grace=settings.grace)
        if decision is not None:
            _check_display(feedback, decision)
        elif feedback.arm not in planner.index:
            raise Rejected("unknown-arm", "$.arm is not an arm of the newest version")
        return record, feedback

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def session(self, session_id: str) -> Answer | None:
        """Return the current decision of a session that this gateway has seen."""
        key = session_id.encode()
        known = self.exchange.known(key)
        return None if known is None else self._current(key, known)

    def _current(self, key: bytes, known: Known) -> Answer:
        decision = known.decision()
        session_id, timeout = decision.session_id, self._planner().parameters.settings.session_timeout
        if not decision.slate:
            return Answer(session_id, None, "empty")
        if (ending := self.exchange.ending(key)) is not None:
            return Answer(session_id, None, ending)
        if self._clock() > decision.arrived_at + timeout:
            return Answer(session_id, None, "expired")
        return Answer(session_id, known.value)

    def _planner(self) -> SlatePlanner:
        if self._newest is None:
            raise UnavailableError("no parameters are published yet: a worker has to run")
        return self._newest


def _last(decision: Decision) -> int:
    """Return the last position of a slate."""
    return decision.position + len(decision.slate) - 1


def _check_display(feedback: Feedback, decision: Decision) -> None:
    """Raise `Rejected` if a slate does not have the display; earlier positions are not in it."""
    ahead = feedback.position - decision.position
    if ahead >= len(decision.slate):
        raise Rejected("position", contradiction("position", _last(decision)))
    if ahead < 0:
        return
    if feedback.arm != decision.slate[ahead]:
        raise Rejected("arm-mismatch", contradiction("arm-mismatch", _last(decision)))
    if decision.tokens is not None:
        given = (feedback.token or "").encode()
        if not hmac.compare_digest(given, decision.tokens[ahead].encode()):
            raise Rejected("token", NO_TOKEN)


def _from_slate(known: Known, position: int) -> bytes:
    """Return the record of a later position, which no worker has sent yet; its figures are those of the one known."""
    decision, passed = known.decision(), position - known.position
    if passed <= 0:
        return known.value
    slate, tokens = decision.slate[passed:], decision.tokens and decision.tokens[passed:]
    return encode_event(structs.replace(decision, position=position, arm=slate[0], slate=slate, tokens=tokens))


async def _acknowledged(sent: asyncio.Future[Any], deadline: float) -> bool:
    """Return whether the brokers have a record before the deadline. Raises `UnavailableError` if they refused it."""
    if not sent.done():
        await asyncio.wait([sent], timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
    if not sent.done():
        return False
    if sent.exception() is not None:
        raise UnavailableError("no broker accepted the record; send it again")
    return True
