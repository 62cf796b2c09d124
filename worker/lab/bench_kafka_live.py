"""Live traffic at a given rate, and how long a client waits for the decision after its arrival.

The sender is a process of its own (``python -m worker.lab.bench_kafka_live``) that makes all its batches beforehand and
then only sends them, and the reader looks at no more than it needs: what they take of the machine the worker lacks.
The sender says afterwards when each tick was sent; Linux has one monotonic clock for all processes.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from worker.errors import FailedError
from worker.lab.bench_kafka_processes import Child
from worker.lab.bench_kafka_topics import ends, fill, partitions
from worker.lab.bench_kafka_traffic import PARTITIONS, Recording, Script, live_arrival, live_click
from worker.runners.faust.connection import Connection
from worker.runners.faust.names import TopicNames
from worker.runners.faust.outlets import Outlets
from worker.runners.faust.records import next_records
from worker.runners.kafka_client import reader

TICK = 0.010  # seconds between two batches of the sender
LOOK = 20  # ticks that a user looks at a display
WARM = 3.0  # seconds that do not count
STRETCH = 0.5  # seconds of a rising rate that are looked at together
LONG = 100.0  # milliseconds; who lets half of the clients wait for longer does not keep up
SCRIPTS = 2_000  # sessions that are played over and over
SILENCE = 3.0  # seconds without a decision, then no more are waited for
BATCH = 512 << 10  # bytes
Floats = np.ndarray[Any, np.dtype[np.float64]]
_FIRST = b'"position":1,'
_NAME = b"live-"  # and the number of the session


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """What the sender is told: where to, from which file, and how many sessions per second, at first and at last."""

    broker: str
    prefix: str
    scripts: str
    first: float
    last: float
    seconds: float

    def begun(self, elapsed: float) -> int:
        """Return how many sessions begin within so many seconds.

        >>> play = Play(broker="", prefix="", scripts="", first=10, last=30, seconds=4)
        >>> play.begun(2), play.begun(4)
        (30, 80)
        """
        return int(self.first * elapsed + (self.last - self.first) * elapsed**2 / (2 * self.seconds))


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What the sender has sent: for each tick when that was, and how many events and sessions so far.

    `moments` are nanoseconds of the monotonic clock.
    """

    moments: list[int]
    events: list[int]
    sessions: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Who was answered and when, in nanoseconds of the monotonic clock."""

    sent: Sent
    sessions: list[int]
    moments: list[int]

    def waits(self) -> tuple[Floats, Floats]:
        """Return when each answered session was sent, in seconds of the play, and for how many milliseconds it waited.

        >>> sent = Sent(moments=[0, 10_000_000], events=[1, 3], sessions=[1, 3])
        >>> heard = Heard(sent=sent, sessions=[0, 2], moments=[1_000_000, 12_000_000])
        >>> [numbers.tolist() for numbers in heard.waits()]
        [[0.0, 0.01], [1.0, 2.0]]
        """
        ticks = np.searchsorted(np.array(self.sent.sessions), np.array(self.sessions, np.int64), side="right")
        sent = np.array(self.sent.moments, np.int64)[ticks]
        return (sent - self.sent.moments[0]) / 1e9, (np.array(self.moments, np.int64) - sent) / 1e6

    def latency(self) -> Latency:
        """Return how long was waited after the warm-up."""
        sent, waits = self.waits()
        if not np.any(sent > WARM):
            raise FailedError(f"nobody was answered who came after the first {WARM:g} s: no measurement")
        seconds = (self.sent.moments[-1] - self.sent.moments[0]) / 1e9
        return Latency(waits=waits[sent > WARM], rate=self.sent.events[-1] / seconds)

    def taken(self) -> float:
        """Return the highest rate, in events per second, at which half of the clients still waited less than `LONG`."""
        sent, waits = self.waits()
        ticks = round(STRETCH / TICK)
        rate = 0.0
        for first in range(0, len(self.sent.moments) - ticks, ticks):
            begun, ended = ((self.sent.moments[tick] - self.sent.moments[0]) / 1e9 for tick in (first, first + ticks))
            inside = waits[(begun <= sent) & (sent < ended)]
            if len(inside) and np.median(inside) < LONG:
                rate = max(rate, (self.sent.events[first + ticks] - self.sent.events[first]) / (ended - begun))
        return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Milliseconds from sending an arrival to holding its decision; `rate` is that of the events sent."""

    waits: Floats
    rate: float

    def quantile(self, share: float) -> float:
        """Return how long that share of the clients waited at most."""
        return float(np.quantile(self.waits, share))


# ── the client that reads ────────────────────────────────────────────────────────────────────────────────────────────


async def live(
    connection: Connection,
    names: TopicNames,
    child: Child,
    recording: Recording,
    rates: tuple[float, float],
    seconds: float,
    folder: Path,
) -> Heard:
    """Let a child serve so many events per second, at first and at last; return what its clients see."""
    await _probe(connection, names, child, recording)
    scripts = recording.scripts[:SCRIPTS]
    file = folder / "scripts.msgpack"
    file.write_bytes(msgspec.msgpack.encode(scripts))
    per_session = 1 + sum(len(script.clicks) for script in scripts) / len(scripts)
    play = Play(
        broker=connection.servers[0],
        prefix=names.prefix,
        scripts=str(file),
        first=rates[0] / per_session,
        last=rates[1] / per_session,
        seconds=seconds,
    )
    async with reader(connection) as consumer:
        tps = partitions(names.decisions)
        consumer.assign(tps)
        await consumer.seek_to_end(*tps)
        for tp in tps:
            await consumer.position(tp)  # only now it stands there
        with Child("sender", ["worker.lab.bench_kafka_live", msgspec.json.encode(play).decode()], folder) as sender:
            return await _listen(consumer, child, sender)


async def _probe(connection: Connection, names: TopicNames, child: Child, recording: Recording) -> None:
    """Wait until a child serves every partition."""
    now = time.time_ns() // 1_000_000
    script = recording.scripts[0]
    first = [f"probe-{place}".encode() for place in range(PARTITIONS)]
    await fill(
        connection,
        {(names.arrivals, place): [(name, live_arrival(script, name, now))] for place, name in enumerate(first)},
    )
    async with ends(connection) as look:
        await look.reached(partitions(names.decisions), PARTITIONS, child)


async def _listen(consumer: AIOKafkaConsumer, child: Child, sender: Child) -> Heard:
    sessions: list[int] = []
    moments: list[int] = []
    last = time.monotonic()
    sent: Sent | None = None
    while sent is None or (len(sessions) < sent.sessions[-1] and time.monotonic() - last < SILENCE):
        fetched = await next_records(consumer, seconds=0.2)
        now = time.monotonic_ns()
        for records in fetched.values():
            first = [record.key or b"" for record in records if _FIRST in (record.value or b"")]
            sessions += [int(key[len(_NAME) :]) for key in first]
            moments += [now] * len(first)
            last = now / 1e9
        child.check()
        if sent is None and sender.process.poll() is not None:
            sent = _told(sender)
    if len(sessions) < sent.sessions[-1] / 10:
        raise FailedError(
            f"{child.name} answered {len(sessions)} of {sent.sessions[-1]} arrivals: {child.last_words()}"
        )
    return Heard(sent=sent, sessions=sessions, moments=moments)


def _told(sender: Child) -> Sent:
    if sender.process.returncode:
        raise FailedError(f"the sender ended with {sender.process.returncode}: {sender.last_words()}")
    return msgspec.json.decode(sender.last_line(), type=Sent)


# ── the client that sends ────────────────────────────────────────────────────────────────────────────────────────────


class Sender:
    """Plays sessions: an arrival, then its clicks, one look after the other."""

    def __init__(self, names: TopicNames, scripts: list[Script]) -> None:
        self._names = names
        self._scripts = scripts
        self._later: dict[int, list[tuple[bytes, Script, int, int]]] = defaultdict(list)
        self.sessions = 0

    def due(self, tick: int, sessions: int, now: int) -> dict[tuple[str, int], list[tuple[bytes, bytes]]]:
        """Return what is to be sent at a tick, at the time `now`, with so many sessions begun in all."""
        arrivals, clicks = self._names.arrivals, self._names.clicks
        parts: dict[tuple[str, int], list[tuple[bytes, bytes]]] = defaultdict(list)
        for name, script, place, partition in self._later.pop(tick, ()):
            parts[clicks, partition].append((name, live_click(script, place, name, now)))
            if place + 1 < len(script.clicks):
                self._later[tick + LOOK].append((name, script, place + 1, partition))
        for number in range(self.sessions, sessions):
            script, partition = self._scripts[number % len(self._scripts)], number % PARTITIONS
            name = _NAME + b"%d" % number
            parts[arrivals, partition].append((name, live_arrival(script, name, now)))
            if script.clicks:
                self._later[tick + LOOK].append((name, script, 0, partition))
        self.sessions = sessions
        return parts


class Tick(NamedTuple):
    """All that is sent at a moment, as batches that are ready to go, and how much had been sent with it."""

    batches: list[tuple[TopicPartition, Any]]
    events: int
    sessions: int


def prepare(producer: AIOKafkaProducer, play: Play, scripts: list[Script], start: int) -> list[Tick]:
    """Make the batches of a play that begins at `start`."""
    sender = Sender(TopicNames(play.prefix), scripts)
    ticks = []
    events = 0
    for tick in range(int(play.seconds / TICK)):
        now = start + int(tick * TICK * 1000)
        batches = []
        due = sender.due(tick, play.begun((tick + 1) * TICK), now)
        for (topic, partition), pairs in due.items():
            builder = producer.create_batch()
            for key, value in pairs:
                if builder.append(timestamp=now, key=key, value=value) is None:
                    raise FailedError(f"a batch of {TICK:g} s has more than {BATCH >> 10} KB: choose a lower rate")
            builder._build()
            batches.append((TopicPartition(topic, partition), builder))
            events += len(pairs)
        ticks.append(Tick(batches, events, sender.sessions))
    return ticks


async def send(play: Play, scripts: list[Script]) -> Sent:
    """Send for as long as the play says."""
    names = TopicNames(play.prefix)
    async with AIOKafkaProducer(bootstrap_servers=play.broker, max_batch_size=BATCH) as producer:
        await Outlets(producer).know(names.arrivals, names.clicks)
        ticks = prepare(producer, play, scripts, time.time_ns() // 1_000_000)
        gc.collect()
        gc.freeze()
        append = producer._message_accumulator._append_batch
        moments = []
        begun = time.monotonic()
        for number, tick in enumerate(ticks):
            await asyncio.sleep(max(0.0, begun + number * TICK - time.monotonic()))
            moments.append(time.monotonic_ns())
            for tp, builder in tick.batches:
                append(builder, tp)
        await producer.flush()
    return Sent(moments=moments, events=[tick.events for tick in ticks], sessions=[tick.sessions for tick in ticks])


def main(argument: str) -> None:
    """Send what the argument says, then tell how much it was."""
    play = msgspec.json.decode(argument, type=Play)
    scripts = msgspec.msgpack.decode(Path(play.scripts).read_bytes(), type=list[Script])
    sys.stdout.write(msgspec.json.encode(asyncio.run(send(play, scripts))).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
