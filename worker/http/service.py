"""The seam between HTTP and what decides: an `AdService`, on Kafka (`gateway`) or in this process (`serve`).

Rules that hold on both sides of it:

- A request becomes a record of `arrivals` or `clicks`, and is judged by the rules for those (`worker.stream.decoding`).
  A service raises `Rejected`, with the reason that a dead letter would have; the interface answers 4xx.
- A request that comes again has the same answer. An arrival is known by its session id, its context and exclusions.
- An answer follows when the request is durable. An arrival is answered at the deadline, with fallback ads that are
  marked as such, and so is feedback if it goes through Kafka. The request itself goes on; whoever sends it again gets
  the real answer.
- A service that cannot take requests at all raises `UnavailableError`; the interface answers 503.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Literal, NamedTuple, Protocol

import orjson

from worker.errors import AdcascadeError
from worker.stream.events import Arrival, encode_event
from worker.stream.parameters import Parameters
from worker.stream.session import Session
from worker.stream.settings import LearningSettings
from worker.stream.slates import SlatePlanner

#: How a session ended; `expired`: its time for feedback is over.
Ended = Literal["clicked", "exhausted", "expired", "empty"]


class UnavailableError(AdcascadeError):
    """The service takes no requests at present; the text says why. The client may try again."""


class UnknownSessionError(AdcascadeError):
    """There is no such session, or it is `over`; only a service that knows all sessions can tell."""

    def __init__(self, text: str, *, over: bool = False) -> None:
        super().__init__(text)
        self.over = over


class AdRequest(NamedTuple):
    """A user arrives, clicks, or passes an ad over.

    `members` are those of the record, as they came; each follows a comma. `occurred_at` is empty where it is missing.

    >>> AdRequest("s", b',"context":[1,2]').record(now=7)
    b'{"session_id":"s","occurred_at":7,"context":[1,2]}'
    """

    session_id: str
    members: bytes
    occurred_at: bytes = b""

    def record(self, now: int) -> bytes:
        """Return the record of `arrivals` or `clicks`; the time is `now` if it has none."""
        return b'{"session_id":%b,"occurred_at":%b%b}' % (
            orjson.dumps(self.session_id),
            self.occurred_at or b"%d" % now,
            self.members,
        )


class Answer(NamedTuple):
    """The answer to a request: the current decision of the session, or how it ended.

    `decision` is a record of the topic `decisions`, as it is encoded there. `fallback` marks an answer that was given
    because the deadline had come, with ads that nobody planned.
    """

    session_id: str
    decision: bytes | None
    ended: Ended | None = None
    fallback: bool = False

    def body(self) -> bytes:
        """Return the answer as JSON.

        >>> Answer("s", None, "clicked").body()
        b'{"session_id":"s","ended":"clicked"}'
        """
        if self.decision is None:
            document: dict[str, object] = {"session_id": self.session_id, "ended": self.ended}
            return orjson.dumps({**document, "fallback": True} if self.fallback else document)
        return self.decision[:-1] + b',"fallback":true}' if self.fallback else self.decision


def fallback_answer(planner: SlatePlanner, arrival: Arrival) -> Answer:
    """Return the answer with fallback ads to an arrival."""
    at, version = arrival.occurred_at, planner.parameters.version
    session = Session(at, at, b"", (), version, *planner.fallback(arrival))
    return Answer(arrival.session_id, encode_event(session.decision(arrival.session_id, None)), fallback=True)


def example_context(settings: LearningSettings) -> bytes:
    """Return a context that a version with these settings takes, as JSON."""
    declared = () if settings.features is None else settings.features.context
    named = {one.name: 0 if one.kind == "number" else one.values[0] if one.values else "any text" for one in declared}
    return orjson.dumps(named or [0] * settings.dim)


class AdService(Protocol):
    """What decides about ads. Deadlines are times of the event loop's clock."""

    def arrive(self, request: AdRequest, deadline: float) -> Awaitable[Answer]:
        """Open a session, or find it; return its current decision. Raises `Rejected` or `UnavailableError`."""

    def feedback(self, request: AdRequest, deadline: float) -> Awaitable[Answer]:
        """Take a click or a pass; return the next decision, or how the session ended.

        Raises as `arrive`, or `UnknownSessionError`.
        """

    async def session(self, session_id: str) -> Answer | None:
        """Return the answer that the last request of a session would have now; None if it is not known."""

    def newest(self) -> Parameters:
        """Return the newest version. Raises `UnavailableError`."""

    def ready(self) -> str | None:
        """Return None, or why no requests can be taken."""
