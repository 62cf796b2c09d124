"""The embedded runner against a loop that only decodes and encodes, the learner by itself, latency, and memory.

The traffic is recorded once, from simulated users, and then sent through fresh runners, so that only the runner is
timed. The bare codec loop decodes and encodes every event of that run (arrivals, clicks, journal, decisions) once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import orjson

from worker.bench.figures import Figure, in_process, medians, one_blas_thread, resident_memory
from worker.bench.learner import FIGURES as LEARNER_FIGURES
from worker.bench.learner import RecordedJournal, measure_learner
from worker.embedded.runner import Embedded, Headers
from worker.simulation.environments import Environment, make_environment
from worker.simulation.poison import KINDS, spoilt
from worker.simulation.users import BEGINNING, TIDY, Habits, Sent, Users
from worker.stream.decoding import Limits, decode_arrival, decode_decision, decode_feedback, decode_journal
from worker.stream.encoding import encode_arrival, encode_feedback, encode_journal
from worker.stream.events import Arrival
from worker.stream.settings import LearningSettings
from worker.stream.topology import Record

DIM, ARMS, HORIZON, PARTITIONS = 16, 50, 5, 8
RATE = 1_000  # users per second of event time
SECONDS = 60
ROUNDS = 5
POISON = 0.05
POLLED = 2_000  # records sent at once, as from one poll of a consumer
WINDOW, TIMEOUT, LATENESS = 10_000, 30_000, 2_000  # windows close and sessions end within the run
LEARNED_WINDOW = 20_000  # windows of the learner by itself: nearly as long as sessions may last, by default equal
OPEN = 100_000
SECOND = 1_000
MODEL = LearningSettings(dim=DIM).model
FIGURES = 9 + LEARNER_FIGURES  # number of figures that `measure` yields


@dataclass(slots=True)
class StreamTraffic:
    """The records of one run: those sent, per second of event time, and the journal and decisions that came out."""

    start: int
    seconds: list[list[Sent]] = field(default_factory=list)
    journal: list[bytes] = field(default_factory=list)
    decisions: list[bytes] = field(default_factory=list)

    def __call__(self, record: Record, headers: Headers) -> None:
        """Keep an output record."""
        if record.value is not None and record.topic == "ads.journal":
            self.journal.append(record.value)
        elif record.value is not None and record.topic == "ads.decisions":
            self.decisions.append(record.value)

    @property
    def sent(self) -> int:
        """Number of records sent."""
        return sum(map(len, self.seconds))


def measure() -> Iterator[Figure]:
    """Yield the figures of the stream."""
    with one_blas_thread():
        traffic, additive = record_traffic(), record_traffic("additive")
        yield from _throughput(traffic, additive)
        yield from _learner(traffic, additive)
        yield from _latency(traffic)
    yield from _memory()


def environment() -> Environment:
    """Return the environment of the simulated users."""
    return make_environment("opposite", dim=DIM, arms=ARMS, generator=np.random.default_rng(3))


def simulated_users(start: int = BEGINNING, habits: Habits = TIDY) -> Users:
    """Return the users of the environment."""
    world = environment()
    names = [arm.arm for arm in world.catalogue()]
    return Users(world, names, horizon=HORIZON, rate=RATE, period=SECOND, start=start, habits=habits)


def learning(model: str = MODEL) -> LearningSettings:
    """Return the settings of the benchmark's size."""
    return LearningSettings(
        dim=DIM, horizon=HORIZON, warmup=1, window=WINDOW, session_timeout=TIMEOUT, lateness=LATENESS, model=model
    )


def runner(model: str = MODEL, **more: object) -> Embedded:
    """Return a fresh embedded runner of the benchmark's size."""
    return Embedded(learning(model), environment().catalogue(), partitions=PARTITIONS, **more)  # type: ignore[arg-type]


def record_traffic(model: str = MODEL) -> StreamTraffic:
    """Serve simulated users for a minute of event time, and keep the records of all topics."""
    users = simulated_users()
    traffic = StreamTraffic(users.start)
    served = runner(model, tap=traffic)
    waiting: dict[int, list[Sent]] = {}

    def schedule(records: Sequence[Sent]) -> None:
        for record in records:
            waiting.setdefault((record.time - users.start) // SECOND, []).append(record)

    for second in range(SECONDS):
        schedule(users.arrivals(second))
        now = users.start + (second + 1) * SECOND
        due = waiting.pop(second, [])
        traffic.seconds.append(due)
        for decision in _serve(served, due):
            schedule(users.answer(decode_decision(decision), now))
        served.advance(now)
    return traffic


def _serve(served: Embedded, records: Sequence[Sent]) -> list[bytes]:
    topics = {"arrivals": served.topics.arrivals, "clicks": served.topics.clicks}
    for sent in records:
        served.send(topics[sent.topic], sent.value, key=sent.key, timestamp=sent.time)
    return [value for _, value in served.pump()]


def _run(traffic: StreamTraffic, model: str = MODEL) -> None:
    served = runner(model)
    for second, records in enumerate(traffic.seconds):
        for first in range(0, len(records), POLLED):
            _serve(served, records[first : first + POLLED])
        served.advance(traffic.start + (second + 1) * SECOND)


def _code(traffic: StreamTraffic) -> None:
    limits = Limits()
    for records in traffic.seconds:
        for sent in records:
            if sent.topic == "arrivals":
                encode_arrival(decode_arrival(sent.value, limits=limits, dim=DIM, timestamp=sent.time))
            else:
                encode_feedback(decode_feedback(sent.value, limits=limits, horizon=HORIZON, timestamp=sent.time))
    for value in traffic.journal:
        encode_journal(decode_journal(value))
    for value in traffic.decisions:
        orjson.dumps(msgspec.structs.asdict(decode_decision(value)))


def poisoned(traffic: StreamTraffic) -> StreamTraffic:
    """Return the same traffic with one bad record, of every kind in turn, after every `1 / POISON` good ones."""
    mixed = StreamTraffic(traffic.start)
    known = next(sent.value for sent in traffic.seconds[0] if sent.topic == "arrivals")
    kinds = [kind for kind in KINDS if kind != "session-reused"]  # needs the partition of the session that it reuses
    made = 0
    for records in traffic.seconds:
        second: list[Sent] = []
        for sent in records:
            second.append(sent)
            if (made + 1) / POISON <= mixed.sent + len(second):
                topic, value = spoilt(kinds[made % len(kinds)], known, arm="ad-01", horizon=HORIZON)
                second.append(Sent(sent.time, topic, sent.key, value))
                made += 1
        mixed.seconds.append(second)
    return mixed


def _throughput(traffic: StreamTraffic, additive: StreamTraffic) -> Iterator[Figure]:
    mixed = poisoned(traffic)
    seconds = medians(
        {
            "runner": lambda: _run(traffic),
            "codec": lambda: _code(traffic),
            "poisoned": lambda: _run(mixed),
            "additive": lambda: _run(additive, "additive"),
        },
        rounds=ROUNDS,
    )
    detail = f"d={DIM} K={ARMS} H={HORIZON}, {PARTITIONS} partitions, {traffic.sent:,} events in"
    yield Figure("embedded runner", traffic.sent / seconds["runner"], "events/s", detail=detail)
    yield Figure("bare codec loop", traffic.sent / seconds["codec"], "events/s", detail="the same events")
    yield Figure("runner / codec loop", seconds["codec"] / seconds["runner"], "×", least=0.3, detail="in events/s")
    yield Figure(
        "personal / additive",
        traffic.sent / seconds["runner"] / (additive.sent / seconds["additive"]),
        "×",
        least=0.85,
        detail="embedded runner in events/s, each model with its own slates",
    )
    yield Figure(
        "with poison / without",
        seconds["runner"] / seconds["poisoned"],
        "×",
        least=0.9,
        detail=f"good events/s, {POISON:.0%} of the records bad",
    )


def _learner(traffic: StreamTraffic, additive: StreamTraffic) -> Iterator[Figure]:
    """Measure the learner on the journals of both models."""
    journals = [
        RecordedJournal.closed(one.journal, replace(learning(model), window=LEARNED_WINDOW), environment().catalogue())
        for model, one in (("additive", additive), (MODEL, traffic))
    ]
    yield from measure_learner(*journals, rounds=ROUNDS)


def _latency(traffic: StreamTraffic) -> Iterator[Figure]:
    """Measure the time from sending records to their decisions, in live batches of 1 and of 32."""
    for size, unit in ((1, "one record at a time"), (32, "32 records at a time")):
        served = runner()
        records = [sent for second in traffic.seconds[:40] for sent in second][: 2_000 * size // 8]
        took = []
        for start in range(0, len(records), size):
            began = time.perf_counter()
            _serve(served, records[start : start + size])
            took.append(time.perf_counter() - began)
        median, high = np.percentile(took[10:], (50, 99)) * 1e3
        yield Figure("record to decision", float(median), "ms", detail=f"p50, {unit}; p99 {high:.3g} ms")


def _memory() -> Iterator[Figure]:
    grown = in_process(_open_sessions, OPEN)
    yield Figure(
        f"{OPEN:,} open sessions",
        grown / 1e6,
        "MB",
        most=300,
        detail=f"d={DIM} K={ARMS} H={HORIZON}, learner's window included",
    )
    yield Figure("one open session", grown / OPEN, "bytes")


def _open_sessions(count: int) -> int:
    """Return the memory that this process gains by opening sessions."""
    served = runner()
    generator = np.random.default_rng(5)
    start = 1_700_000_000_000
    before = resident_memory()
    for first in range(0, count, 1_000):
        for number, context in enumerate(generator.standard_normal((1_000, DIM)).tolist(), start=first):
            name = f"{number:032x}"
            arrival = Arrival(session_id=name, occurred_at=start + number // 2, context=tuple(context))
            served.send(
                served.topics.arrivals, encode_arrival(arrival), key=name.encode(), timestamp=start + number // 2
            )
        served.pump()
        served.advance(start + first // 2)
    return resident_memory() - before
