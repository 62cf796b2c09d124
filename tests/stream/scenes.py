"""Small worlds for the tests of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from worker.secret import Secret
from worker.stream.parameters import Parameters
from worker.stream.serving import Serving
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Emits, Record, Tally, Topics
from worker.stream.versions import Versions

TOPICS = Topics()
DIM = 2
ARMS = tuple(Arm(arm=name, reward=reward) for name, reward in (("cap", 1.0), ("shoe", 2.0), ("coat", 5.0)))


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


def decisions(emits: Emits) -> list[dict[str, Any]]:
    return [orjson.loads(value) for _, value in emits.decisions]


def facts(emits: Emits) -> list[dict[str, Any]]:
    return [orjson.loads(value) for _, value in emits.journal]


def reasons(emits: Emits) -> list[str]:
    return [dict(letter.headers)["adcascade.reason"].decode() for letter in emits.dead_letters]


def assert_balanced(tally: Tally, task: Serving) -> None:
    """The accounting of docs/design.md §7, over the whole life of a task."""
    assert tally.arrivals == tally.opened + tally.repeated + tally.dead_arrivals
    assert tally.opened + tally.recovered == sum(tally.ended.values()) + task.open_sessions + tally.handed_over
    assert tally.feedback + tally.recovered_parked == (
        tally.applied
        + tally.redundant
        + tally.late
        + tally.outside
        + task.parked
        + tally.handed_over_parked
        + tally.dead_feedback
    )
    assert sum(tally.dead.values()) == tally.dead_arrivals + tally.dead_feedback
