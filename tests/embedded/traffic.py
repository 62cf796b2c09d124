"""Deterministic traffic for the embedded runner: users with a known model, delivered in any order within lateness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from worker.embedded.runner import Embedded
from worker.stream.learner import Learner
from worker.stream.settings import Arm, LearningSettings

SECOND = 1_000
START = 1_700_000_000_000 // 60_000 * 60_000
ARMS = tuple(Arm(arm=f"ad-{k}", reward=reward) for k, reward in enumerate((1.0, 0.6, 0.3, 0.8)))
TRUTH = np.array([-2.0, -1.0, 0.2, -3.0])


def settings(**changes: Any) -> LearningSettings:
    values: dict[str, Any] = {
        "dim": 3,
        "horizon": 3,
        "warmup": 1,
        "window": 10 * SECOND,
        "session_timeout": 8 * SECOND,
        "lateness": 4 * SECOND,
        "standardise": False,  # windows have a few sessions each
    }
    return LearningSettings(**{**values, **changes})


@dataclass(frozen=True, slots=True, order=True)
class Sent:
    """A record and the time of its delivery."""

    at: int
    topic: str = field(compare=False)
    session: str = field(compare=False)
    value: Any = field(compare=False)  # bytes; None is a tombstone


def arrivals(count: int, *, seconds: int, seed: int = 0) -> list[Sent]:
    """Return the arrivals of users over some seconds."""
    generator = np.random.default_rng(seed)
    sent = []
    for i, at in enumerate(np.sort(generator.integers(0, seconds * SECOND, count)).tolist()):
        name = f"user-{seed}-{i}"
        body = {"session_id": name, "occurred_at": START + at, "context": generator.normal(size=3).round(3).tolist()}
        if i % 7 == 0:
            body["exclude"] = [ARMS[i % len(ARMS)].arm]
        sent.append(Sent(START + at, "arrivals", name, orjson.dumps(body)))
    return sent


def answers(decision: dict[str, Any], context: Sequence[float]) -> list[Sent]:
    """Return the answers of a user to the slate of a first decision: passes, then a click or none."""
    generator = np.random.default_rng(list(decision["session_id"].encode()))
    sent, at = [], decision["arrived_at"]
    for position, arm in enumerate(decision["slate"], start=1):
        at += int(generator.integers(100, 2_500))
        if generator.random() < 0.1:
            break
        odds = TRUTH[int(arm.removeprefix("ad-"))] + 0.5 * context[0]
        clicked = bool(generator.random() < 1 / (1 + np.exp(-odds)))
        body = {
            "session_id": decision["session_id"],
            "occurred_at": at,
            "position": position,
            "arm": arm,
            "clicked": clicked,
        }
        sent.append(Sent(at, "clicks", decision["session_id"], orjson.dumps(body)))
        if clicked:
            break
    return sent


def deliver(
    runner: Embedded,
    sent: Sequence[Sent],
    *,
    live: bool = False,
    contexts: Mapping[str, Sequence[float]] | None = None,
) -> list[Sent]:
    """Deliver records in the order of their times, a second at a time; return all records delivered.

    With `live`, users also answer the decisions, by `contexts` if they differ from those that they send.
    """
    queue = sorted(sent)
    if live and contexts is None:
        contexts = {one.session: orjson.loads(one.value)["context"] for one in queue if one.topic == "arrivals"}
    everything: list[Sent] = []
    answered: set[str] = set()
    clock = runner.time or START
    while queue:
        clock += SECOND
        due = [one for one in queue if one.at < clock]
        queue = queue[len(due) :]
        for one in due:
            topic = getattr(runner.topics, one.topic)
            runner.send(topic, one.value, key=one.session.encode(), timestamp=one.at)
        everything += due
        fresh: list[Sent] = []
        for _, value in runner.pump():
            decision = orjson.loads(value)
            if contexts is not None and decision["session_id"] not in answered:
                answered.add(decision["session_id"])
                fresh += answers(decision, contexts[decision["session_id"]])
        queue = sorted(queue + fresh) if fresh else queue
        runner.advance(clock)
    return everything


def restart_learner(runner: Embedded, settings: LearningSettings, journal: Iterable[tuple[int, bytes]]) -> None:
    """Replace the learner by one that knows the versions and reads the journal again, as after a restart."""
    runner.learner = Learner(settings, ARMS, runner.versions.history)
    runner.learner.handle(journal)


def finish(runner: Embedded) -> None:
    """Advance until every window is closed and every session has expired."""
    configured = runner.versions.newest.settings
    runner.advance(runner.time + configured.window + configured.session_timeout + 2 * configured.lateness + 2 * SECOND)
    runner.advance(runner.time + SECOND)
