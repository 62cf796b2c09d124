"""The embedded runner against a loop that only decodes and encodes, and the learner by itself.

The traffic of a demo is recorded once, and then sent through fresh runners, so that only the runner is timed. The bare
codec loop decodes and encodes every event of that run (arrivals, clicks, journal, decisions) once.

The learner reads the journal of that run in polls, as in its process. Progress at the end closes the last windows, so
that every session is folded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import msgspec
import numpy as np
import orjson

from worker.bench.figures import Figure, fastest
from worker.embedded.runner import Embedded, Headers
from worker.simulation.demo.run import Demo, DemoSettings
from worker.simulation.users import BEGINNING, TIDY
from worker.simulation.world import Environment
from worker.stream.decoding import Limits, decode_arrival, decode_decision, decode_feedback, decode_journal
from worker.stream.events import Opened, Progress, encode_event
from worker.stream.learner import Learner
from worker.stream.settings import LearningSettings
from worker.stream.topology import Record, Topics

TOPICS: Final = Topics()
DIM, ARMS, HORIZON, PARTITIONS = 16, 50, 5, 8
SIZE: Final = f"d={DIM} K={ARMS} H={HORIZON}"
CONTEXTS: Final[list[list[float]]] = np.random.default_rng(7).standard_normal((512, DIM)).round(6).tolist()
SECOND: Final = 1_000
RATE: Final = 1_000  # users per second of event time
SECONDS: Final = 60
ROUNDS: Final = 5
POLLED: Final = 2_000  # records sent at once, as from one poll of a consumer
POLLED_FACTS: Final = 5_000  # the same for the learner


#: A demo whose windows close and whose sessions end within the run.
PLAYED: Final = DemoSettings(
    environment="opposite",
    dim=DIM,
    arms=ARMS,
    horizon=HORIZON,
    users=10 * RATE,
    window=10 * SECOND,
    session_timeout=30 * SECOND,
    lateness=2 * SECOND,
    warmup=1,
)
SETTINGS: Final = PLAYED.learning()
#: The learner by itself: windows nearly as long as sessions may last; by default they are equal.
LEARNED: Final = replace(SETTINGS, window=20 * SECOND)


class StreamTraffic:
    """The records of one run: those sent, per second of event time, and the journal and decisions that came out."""

    def __init__(self, seconds: int) -> None:
        self.seconds: list[list[Record]] = [[] for _ in range(seconds)]
        self.journal: list[bytes] = []
        self.decisions: list[bytes] = []

    def __call__(self, record: Record, headers: Headers) -> None:
        """Keep a record."""
        if record.topic in (TOPICS.arrivals, TOPICS.clicks):
            self.seconds[(record.timestamp - BEGINNING - 1) // SECOND].append(record)
        elif record.value is not None and record.topic == TOPICS.journal:
            self.journal.append(record.value)
        elif record.value is not None and record.topic == TOPICS.decisions:
            self.decisions.append(record.value)

    @property
    def sent(self) -> int:
        """Number of records sent."""
        return sum(map(len, self.seconds))


def measure(*, seconds: int = SECONDS, rounds: int = ROUNDS) -> Iterator[Figure]:
    """Yield the figures of the stream, from traffic of some seconds of event time."""
    traffic = record_traffic(seconds)
    yield from _throughput(traffic, rounds)
    yield _learner(traffic, rounds)


@cache
def environment() -> Environment:
    """Return the environment of the simulated users."""
    return Demo(PLAYED).world


def runner() -> Embedded:
    """Return a fresh embedded runner."""
    return Embedded(SETTINGS, environment().catalogue(), partitions=PARTITIONS)


def record_traffic(seconds: int) -> StreamTraffic:
    """Serve simulated users, and keep the records of all topics."""
    traffic = StreamTraffic(seconds)
    demo = Demo(PLAYED, habits=TIDY, tap=traffic)
    for _ in range(seconds):
        demo.step()
    return traffic


# ── throughput ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _throughput(traffic: StreamTraffic, rounds: int) -> Iterator[Figure]:
    seconds = fastest({"runner": lambda: _run(traffic), "codec": lambda: _code(traffic)}, rounds=rounds)
    detail = f"{SIZE}, {PARTITIONS} partitions, {traffic.sent:,} events in"
    yield Figure("embedded runner", traffic.sent / seconds["runner"], "events/s", detail=detail)
    yield Figure("bare codec loop", traffic.sent / seconds["codec"], "events/s", detail="the same events")
    yield Figure("runner / codec loop", seconds["codec"] / seconds["runner"], "×", least=0.25, detail="in events/s")


def _run(traffic: StreamTraffic) -> None:
    served = runner()
    for second, records in enumerate(traffic.seconds, start=1):
        for first in range(0, len(records), POLLED):
            for sent in records[first : first + POLLED]:
                served.send(sent.topic, sent.value, key=sent.key, timestamp=sent.timestamp)
            served.pump()
        served.advance(BEGINNING + second * SECOND)


def _code(traffic: StreamTraffic) -> None:
    limits, settings = Limits(), LearningSettings(dim=DIM)
    for records in traffic.seconds:
        for sent in records:
            if sent.topic == TOPICS.arrivals:
                encode_event(decode_arrival(sent.value or b"", settings, limits=limits, timestamp=sent.timestamp))
            else:
                encode_event(
                    decode_feedback(sent.value or b"", limits=limits, horizon=HORIZON, timestamp=sent.timestamp)
                )
    for value in traffic.journal:
        encode_event(decode_journal(value))
    for value in traffic.decisions:
        orjson.dumps(msgspec.structs.asdict(decode_decision(value)))


# ── the learner ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _learner(traffic: StreamTraffic, rounds: int) -> Figure:
    """Measure the learner by itself, against only decoding the same facts."""
    facts = closed_journal(traffic.journal)
    seconds = fastest(
        {"learner": lambda: fold(facts), "decoding": lambda: [decode_journal(value) for _, value, _ in facts]},
        rounds=rounds,
    )
    sessions = sum(isinstance(decode_journal(value), Opened) for _, value, _ in facts)
    detail = (
        f"{LEARNED.model}, {len(facts):,} facts of {sessions:,} sessions, {sessions / seconds['learner']:,.0f} "
        f"sessions/s; {seconds['decoding'] / seconds['learner']:.2g} × only decoding"
    )
    return Figure("learner", len(facts) / seconds["learner"], "facts/s", least=80_000, detail=detail)


def closed_journal(values: Sequence[bytes]) -> list[tuple[int, bytes, int]]:
    """Return the offset, value and timestamp of journal records, and of progress that closes all windows."""
    reports = [event for event in map(decode_journal, values) if isinstance(event, Progress)]
    end = max(event.time for event in reports) + LEARNED.window + LEARNED.grace
    last = Progress(partition=0, partitions=1, time=end)
    return [(offset, value, end) for offset, value in enumerate([*values, encode_event(last)])]


def fold(facts: Sequence[tuple[int, bytes, int]]) -> Learner:
    """Fold a journal; return the learner."""
    learner = Learner(LEARNED, environment().catalogue())
    for first in range(0, len(facts), POLLED_FACTS):
        learner.handle(facts[first : first + POLLED_FACTS])
    return learner
