"""The traffic of `adcascade bench kafka`: recorded once without a broker, then the same for every variant.

Simulated users answer the slates of one learned version of the parameters. That version is published to the worker
under test, and no window closes during the run, so the worker plans the same slates that the recorded clicks answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from worker.bench.kafka.baselines import OutputSizes
from worker.bench.stream import DIM, HORIZON, MODEL, RATE, SECOND, simulated_users
from worker.embedded.runner import Embedded
from worker.simulation.users import TIDY, Sent, Users
from worker.stream.decoding import decode_decision
from worker.stream.parameters import Parameters
from worker.stream.serving import Serving
from worker.stream.settings import LearningSettings
from worker.stream.topology import Record, Topics
from worker.stream.versions import Versions

LEARNED_FROM = 6  # seconds of event time that the version is learned from
# Settings of the measured worker. During a run no window closes and no session expires.
WINDOW, TIMEOUT, LATENESS = 3_600 * SECOND, 3_600 * SECOND, 5 * SECOND
QUICK = replace(TIDY, look=(50, 200), transit=(1, 5))  # users whose sessions end within seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One session to be played live: its records without their beginning, session and time."""

    arrival: bytes
    clicks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Arrivals and clicks in the order of their times, with the output of a worker.

    `states` are the table values of open sessions. `decisions_per_click` holds if every click comes alone.
    """

    parameters: Parameters
    arrivals: tuple[Sent, ...]
    clicks: tuple[Sent, ...]
    scripts: tuple[Script, ...]
    states: tuple[bytes, ...]
    sizes: OutputSizes
    decisions_per_click: float

    @property
    def events(self) -> int:
        """Number of input records."""
        return len(self.arrivals) + len(self.clicks)

    def first(self, sessions: int) -> Recording:
        """Return the records of the first sessions only."""
        kept = {sent.key for sent in self.arrivals[:sessions]}
        return replace(
            self,
            arrivals=self.arrivals[:sessions],
            clicks=tuple(sent for sent in self.clicks if sent.key in kept),
        )


def record(sessions: int, start: int, model: str = MODEL) -> Recording:
    """Serve users who arrive from `start` on, until they have answered all displays."""
    parameters = learned(model)
    users = simulated_users(start)
    arrivals = _arrivals(users, sessions)
    serving = Serving(Versions(parameters), topics=Topics())
    clicks: list[Sent] = []
    opened: list[bytes] = []
    feedback: list[bytes] = []
    states: list[bytes] = []
    changes: list[bytes] = []
    decisions: list[bytes] = []
    for first in range(0, sessions, RATE):
        emits = serving.handle([_record(sent) for sent in arrivals[first : first + RATE]])
        opened += [value for _, value in emits.journal]
        states += [value for _, value in emits.changelog if value is not None]
        while emits.decisions:
            shown = [value for _, value in emits.decisions]
            decisions += shown
            answers = [sent for value in shown for sent in users.answer(decode_decision(value), 0)]
            clicks += answers
            emits = serving.handle([_record(sent) for sent in answers])
            feedback += [value for _, value in emits.journal]
            changes += [value for _, value in emits.changelog if value is not None]
    return Recording(
        parameters=parameters,
        arrivals=tuple(arrivals),
        clicks=tuple(sorted(clicks, key=lambda sent: sent.time)),
        scripts=tuple(_scripts(arrivals, clicks)),
        states=tuple(states),
        sizes=OutputSizes(_mean(opened), _mean(feedback), _mean(states + changes), _mean(decisions)),
        decisions_per_click=(len(decisions) - len(arrivals)) / len(clicks),
    )


def learned(model: str = MODEL) -> Parameters:
    """Return a version that was learned from a few thousand users."""
    return learned_from(LearningSettings(dim=DIM, horizon=HORIZON, model=model), simulated_users(habits=QUICK))


def learned_from(
    settings: LearningSettings, users: Users, *, window: int = WINDOW, timeout: int = TIMEOUT
) -> Parameters:
    """Return a version that was learned from users, with the window and the timeout of the measured worker.

    It is in force from time 0 on and precedes any journal.
    """
    quick = replace(settings, warmup=1, window=SECOND, session_timeout=2 * SECOND, lateness=SECOND // 2)
    served = Embedded(quick, users.world.catalogue())
    for second in range(LEARNED_FROM):
        now = users.start + (second + 1) * SECOND
        due = list(users.arrivals(second))
        while due:
            for sent in due:
                served.send(f"ads.{sent.topic}", sent.value, key=sent.key, timestamp=sent.time)
            due = [answer for _, value in served.pump() for answer in users.answer(decode_decision(value), 0)]
        served.advance(now)
    newest = served.versions.newest
    return replace(
        newest,
        version=1,
        settings=replace(newest.settings, window=WINDOW, session_timeout=TIMEOUT, lateness=LATENESS),
        effective_at=0,
        made_at=0,
        window_end=None,
        journal_offset=-1,
        resume_offset=0,
        progress={},
    )


def live_arrival(script: Script, session: bytes, now: int) -> bytes:
    """Return the arrival of a session at the time `now`."""
    return b'{"session_id":"%b","occurred_at":%d%b' % (session, now, script.arrival)


def live_click(script: Script, index: int, session: bytes, now: int) -> bytes:
    """Return the click (or pass) at an index of the script."""
    return b'{"session_id":"%b","occurred_at":%d%b' % (session, now, script.clicks[index])


def _arrivals(users: Users, sessions: int) -> list[Sent]:
    found: list[Sent] = []
    second = 0
    while len(found) < sessions:
        found += users.arrivals(second)
        second += 1
    return found[:sessions]


def _scripts(arrivals: Sequence[Sent], clicks: Sequence[Sent]) -> Iterator[Script]:
    answers: dict[bytes, list[bytes]] = {}
    for sent in clicks:
        answers.setdefault(sent.key, []).append(_after_time(sent.value))
    for sent in arrivals:
        yield Script(arrival=_after_time(sent.value), clicks=tuple(answers.get(sent.key, ())))


def _after_time(value: bytes) -> bytes:
    """Return the rest of a record after session_id and occurred_at.

    >>> _after_time(b'{"session_id":"s","occurred_at":12,"position":1}')
    b',"position":1}'
    """
    rest = value.partition(b'"occurred_at":')[2]
    return rest[rest.index(b",") :]


def _record(sent: Sent) -> Record:
    return Record(f"ads.{sent.topic}", 0, 0, sent.time, sent.key, sent.value)


def _mean(values: Sequence[bytes]) -> int:
    return round(sum(map(len, values)) / max(1, len(values)))
