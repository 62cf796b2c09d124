"""Small worlds for the tests of the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import orjson

from worker.secret import Secret
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival, Decision, FeedbackFact, JournalEvent, Opened, Progress, encode_event
from worker.stream.parameters import Parameters
from worker.stream.serving import Serving
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import SlatePlanner
from worker.stream.topology import Emits, Record, Tally, Topics
from worker.stream.versions import Versions

TOPICS = Topics()
DIM = 2
ARMS = tuple(Arm(arm=name, reward=reward) for name, reward in (("cap", 1.0), ("shoe", 2.0), ("coat", 5.0)))

#: An additive model without intercept, rates or scales, whose numbers can be worked out by hand.
ADDITIVE: dict[str, Any] = {
    "repeats": True,
    "model": "additive",
    "intercept": False,
    "answers": "all",
    "standardise": False,
    "policy": "ucbbp",
    "bonus": "value",
    "beta": 2.5,
    "ridge": 0.5,
}


def settings(**changes: Any) -> LearningSettings:
    values: dict[str, Any] = {"dim": DIM, "horizon": 3, "warmup": 0, "session_timeout": 10_000, "lateness": 1_000}
    return LearningSettings(**{**values, **changes})


def parameters(**changes: Any) -> Parameters:
    return Parameters.first(settings(**changes), ARMS)


def serving(first: Parameters | None = None, *, secret: Secret | None = None) -> Serving:
    return Serving(Versions(first or parameters()), topics=TOPICS, secret=secret)


def arrival(session: str = "s", at: int = 1_000, context: Sequence[float] = (0.5, -1.0), **more: Any) -> Record:
    value = {"session_id": session, "occurred_at": at, "context": list(context), **more}
    return Record(TOPICS.arrivals, 0, 0, at, session.encode(), orjson.dumps(value))


def click(
    session: str = "s", at: int = 2_000, position: int = 1, arm: str = "coat", clicked: bool = True, **more: Any
) -> Record:
    value = {
        "session_id": session,
        "occurred_at": at,
        "position": position,
        "arm": arm,
        "clicked": clicked,
        **more,
    }
    return Record(TOPICS.clicks, 0, 0, at, session.encode(), orjson.dumps(value))


def passed(session: str = "s", at: int = 2_000, position: int = 1, arm: str = "coat", **more: Any) -> Record:
    return click(session, at, position, arm, False, **more)


def opened(session_id: str = "s", arrived_at: int = 100, slate: Sequence[str] = ("a", "b", "c"), **more: Any) -> Opened:
    """Return the fact that a session was opened."""
    fields = {"context": (0.5, -1.0), "modes": ("exploit",) * len(slate), "exclude": (), "parameters_version": 0}
    return Opened(session_id=session_id, arrived_at=arrived_at, slate=tuple(slate), **(fields | more))


def feedback(position: int, arm: str, clicked: bool, occurred_at: int = 150, session_id: str = "s") -> FeedbackFact:
    """Return the fact of an answer."""
    return FeedbackFact(session_id=session_id, occurred_at=occurred_at, position=position, arm=arm, clicked=clicked)


def progress(time: int, partition: int = 0, partitions: int = 1) -> Progress:
    """Return the fact that a partition has come to a time."""
    return Progress(partition=partition, partitions=partitions, time=time)


def written(events: Iterable[JournalEvent], start: int = 0) -> list[tuple[int, bytes]]:
    """Return events as the journal has them, from an offset on."""
    return [(offset, encode_event(event)) for offset, event in enumerate(events, start)]


def window_of_sessions(
    planner: SlatePlanner, contexts: np.ndarray, start: int, answer: Callable[[str, np.ndarray], bool | None]
) -> list[JournalEvent]:
    """Return the sessions of a window, planned as serving plans them.

    A user passes or clicks, as `answer` says of an arm and a context, or gives no further answer if it returns None.
    """
    length = planner.parameters.settings.window
    arrivals = [
        Arrival(session_id=f"{start}-{row}", occurred_at=start + row * length // len(contexts), context=tuple(context))
        for row, context in enumerate(contexts.tolist())
    ]
    slates = planner.plan(arrivals, [pack_context(one.context) for one in arrivals])
    events: list[JournalEvent] = []
    for one, slate, context in zip(arrivals, slates, contexts, strict=True):
        events.append(opened(one.session_id, one.occurred_at, slate.arms, context=one.context, modes=slate.modes))
        for position, arm in enumerate(slate.arms, 1):
            clicked = answer(arm, context)
            if clicked is None:
                break
            events.append(feedback(position, arm, clicked, one.occurred_at + position, one.session_id))
            if clicked:
                break
    return events


def decision(session_id: str, slate: Sequence[str], position: int = 1, **more: Any) -> Decision:
    """Return the decision that shows a slate from a position on."""
    fields: dict[str, Any] = {
        "arrived_at": 1_000,
        "arm": slate[0] if slate else None,
        "mode": "exploit" if slate else "none",
        "propensity": 1.0,
        "parameters_version": 7,
        "value": 0.5,
    }
    return Decision(session_id=session_id, position=position, slate=tuple(slate), **(fields | more))


def stored(changes: Iterable[tuple[bytes, bytes | None]]) -> list[Record]:
    """Return the records of a session table, as they are restored."""
    return [Record(TOPICS.changelog, 0, 0, 0, key, value) for key, value in dict(changes).items() if value is not None]


def decisions(emits: Emits) -> list[dict[str, Any]]:
    return [orjson.loads(value) for _, value in emits.decisions]


def facts(emits: Emits) -> list[dict[str, Any]]:
    return [orjson.loads(value) for _, value in emits.journal]


def reasons(emits: Emits) -> list[str]:
    return [dict(letter.headers)["adcascade.reason"].decode() for letter in emits.dead_letters]


def assert_balanced(tally: Tally, task: Serving) -> None:
    """The accounting of docs/design.md §7, over the whole life of a task."""
    assert set(tally.imbalances([task]).values()) == {0}
    assert sum(tally.dead.values()) == tally.dead_arrivals + tally.dead_feedback
