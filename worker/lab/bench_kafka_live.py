"""Live traffic at a given rate, and how long a client waits for the decision after its arrival.

The sender is a process of its own (``python -m worker.lab.bench_kafka_live``), so that writing does not delay reading.
A session's id carries the moment of its sending; Linux has one monotonic clock for all processes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from worker.errors import FailedError
from worker.lab.bench_kafka_processes import Child
from worker.lab.bench_kafka_topics import ends, fill, partitions
from worker.lab.bench_kafka_traffic import PARTITIONS, Recording, Script, live_arrival, live_click
from worker.runners.faust.connection import Connection
from worker.runners.faust.names import TopicNames
from worker.runners.faust.outlets import Outlets
from worker.runners.kafka_client import reader

TICK = 0.004  # seconds between two batches of the sender
LOOK = 50  # ticks that a user looks at a display
WARM = 3.0  # seconds that do not count
SCRIPTS = 2_000  # sessions that are played over and over
SILENCE = 3.0  # seconds without a decision, then no more are waited for
_FIRST = b'"position":1,'


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """What the sender is told: where to, from which file, and how fast."""

    broker: str
    prefix: str
    scripts: str
    sessions_per_second: float
    seconds: float


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What the sender has sent, and how long it took."""

    sessions: int
    events: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Milliseconds from sending an arrival to holding its decision; `rate` is of the events sent, per second."""

    waits: np.ndarray[Any, np.dtype[np.float64]]
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
    rate: float,
    seconds: float,
    folder: Path,
) -> Latency:
    """Let a child serve so many events per second; return what its clients see."""
    await _probe(connection, names, child, recording)
    scripts = recording.scripts[:SCRIPTS]
    file = folder / "scripts.msgpack"
    file.write_bytes(msgspec.msgpack.encode(scripts))
    per_session = 1 + sum(len(script.clicks) for script in scripts) / len(scripts)
    play = Play(
        broker=connection.servers[0],
        prefix=names.prefix,
        scripts=str(file),
        sessions_per_second=rate / per_session,
        seconds=WARM + seconds,
    )
    async with reader(connection) as consumer:
        tps = partitions(names.decisions)
        consumer.assign(tps)
        await consumer.seek_to_end(*tps)
        for tp in tps:
            await consumer.position(tp)  # only now it stands there
        with Child("sender", ["worker.lab.bench_kafka_live", msgspec.json.encode(play).decode()], folder) as sender:
            waits, sent = await _listen(consumer, child, sender)
    if len(waits) < 10:
        raise FailedError(f"{child.name} answered {len(waits)} of {sent.sessions} arrivals: {child.last_words()}")
    return Latency(waits=np.array(waits), rate=sent.events / sent.seconds)


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


async def _listen(consumer: AIOKafkaConsumer, child: Child, sender: Child) -> tuple[list[float], Sent]:
    waits: list[float] = []
    begun = answered = 0
    heard = time.monotonic()
    told: Sent | None = None
    while told is None or (answered < told.sessions and time.monotonic() - heard < SILENCE):
        fetched = await consumer.getmany(timeout_ms=200)
        now = time.monotonic_ns()
        for records in fetched.values():
            for record in records:
                if _FIRST not in record.value:
                    continue
                sent = int(record.key.rpartition(b"-")[2])
                begun, answered, heard = begun or sent, answered + 1, time.monotonic()
                if sent - begun > WARM * 1e9:
                    waits.append((now - sent) / 1e6)
        child.check()
        if told is None and sender.process.poll() is not None:
            told = _told(sender)
    return waits, told


def _told(sender: Child) -> Sent:
    if sender.process.returncode:
        raise FailedError(f"the sender ended with {sender.process.returncode}: {sender.last_words()}")
    return msgspec.json.decode(sender.last_words(), type=Sent)


# ── the client that sends ────────────────────────────────────────────────────────────────────────────────────────────


class Sender:
    """Plays sessions: an arrival, then its clicks, one look after the other."""

    def __init__(self, names: TopicNames, scripts: list[Script]) -> None:
        self._names = names
        self._scripts = scripts
        self._later: dict[int, list[tuple[bytes, Script, int, int]]] = defaultdict(list)
        self._tick = 0
        self.sessions = self.events = 0

    def due(self, tick: int, sessions: int) -> dict[tuple[str, int], list[tuple[bytes, bytes]]]:
        """Return what is to be sent up to a tick, with so many sessions begun in all."""
        arrivals, clicks = self._names.arrivals, self._names.clicks
        now = time.time_ns() // 1_000_000
        parts: dict[tuple[str, int], list[tuple[bytes, bytes]]] = defaultdict(list)
        for earlier in range(self._tick, tick + 1):
            for name, script, place, partition in self._later.pop(earlier, ()):
                parts[clicks, partition].append((name, live_click(script, place, name, now)))
                if place + 1 < len(script.clicks):
                    self._later[tick + LOOK].append((name, script, place + 1, partition))
        for number in range(self.sessions, sessions):
            script, partition = self._scripts[number % len(self._scripts)], number % PARTITIONS
            name = b"live-%d-%d" % (number, time.monotonic_ns())
            parts[arrivals, partition].append((name, live_arrival(script, name, now)))
            if script.clicks:
                self._later[tick + LOOK].append((name, script, 0, partition))
        self._tick, self.sessions = tick + 1, sessions
        self.events += sum(map(len, parts.values()))
        return parts


async def send(play: Play, scripts: list[Script]) -> Sent:
    """Send for as long as the play says."""
    names = TopicNames(play.prefix)
    sender = Sender(names, scripts)
    async with AIOKafkaProducer(bootstrap_servers=play.broker, max_batch_size=512 << 10) as producer:
        outlets = Outlets(producer)
        await outlets.know(names.arrivals, names.clicks)
        begun = time.monotonic()
        while (elapsed := time.monotonic() - begun) < play.seconds:
            for (topic, partition), pairs in sender.due(
                int(elapsed / TICK), int(elapsed * play.sessions_per_second)
            ).items():
                outlets.to(topic, partition).pairs(pairs)
            await asyncio.sleep(TICK)
        await producer.flush()
    return Sent(sessions=sender.sessions, events=sender.events, seconds=time.monotonic() - begun)


def main(argument: str) -> None:
    """Send what the argument says, then tell how much it was."""
    play = msgspec.json.decode(argument, type=Play)
    scripts = msgspec.msgpack.decode(Path(play.scripts).read_bytes(), type=list[Script])
    sys.stdout.write(msgspec.json.encode(asyncio.run(send(play, scripts))).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
