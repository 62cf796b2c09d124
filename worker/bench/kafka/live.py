"""Live traffic at a given rate, and how long a client waits for the decision after its arrival.

The sender is a process of its own (see `bench_kafka_sender`), and the reader looks at no more than it needs (see
`bench_kafka_reader`): what they take of the machine the worker lacks. The sender says afterwards when each tick was
sent; Linux has one monotonic clock for all processes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from worker.bench.kafka.processes import Child
from worker.bench.kafka.reader import FirstDecisions
from worker.bench.kafka.recording import Recording, live_arrival
from worker.bench.kafka.sender import TICK, Play, Sent
from worker.bench.kafka.topics import ends, fill, partitions
from worker.errors import FailedError
from worker.kafka.clients import standalone_consumer
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

WARM = 3.0  # seconds that do not count
STRETCH = 0.5  # seconds of a rising rate that are looked at together
LONG = 100.0  # milliseconds; who lets half of the clients wait for longer does not keep up
SCRIPTS = 2_000  # sessions that are played over and over
SILENCE = 3.0  # seconds without a decision, then no more are waited for
LOOK = 0.1  # seconds between two looks at what was read
Floats = np.ndarray[Any, np.dtype[np.float64]]


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
    names: Topics,
    child: Child,
    recording: Recording,
    rates: tuple[float, float],
    seconds: float,
    folder: Path,
    count: int,
) -> Heard:
    """Let a child serve so many events per second, at first and at last; return what its clients see.

    `count` is the number of partitions.
    """
    await _probe(connection, names, child, recording, count)
    scripts = recording.scripts[:SCRIPTS]
    file = folder / "scripts.msgpack"
    file.write_bytes(msgspec.msgpack.encode(scripts))
    per_session = 1 + sum(len(script.clicks) for script in scripts) / len(scripts)
    play = Play(
        broker=connection.servers[0],
        prefix=names.prefix,
        partitions=count,
        scripts=str(file),
        first=rates[0] / per_session,
        last=rates[1] / per_session,
        seconds=seconds,
    )
    async with standalone_consumer(connection) as consumer:
        tps = partitions(names.decisions, count)
        decisions = FirstDecisions(consumer, await consumer.end_offsets(tps))
        with Child("sender", ["worker.bench.kafka.sender", msgspec.json.encode(play).decode()], folder) as sender:
            return await _listen(decisions, child, sender)


async def _probe(connection: Connection, names: Topics, child: Child, recording: Recording, count: int) -> None:
    """Wait until a child serves every partition."""
    now = time.time_ns() // 1_000_000
    script = recording.scripts[0]
    first = [f"probe-{place}".encode() for place in range(count)]
    await fill(
        connection,
        {(names.arrivals, place): [(name, live_arrival(script, name, now))] for place, name in enumerate(first)},
    )
    async with ends(connection) as look:
        await look.reached(partitions(names.decisions, count), count, child)


async def _listen(decisions: FirstDecisions, child: Child, sender: Child) -> Heard:
    reading = asyncio.create_task(decisions.read())
    try:
        sent = await _until_answered(decisions, child, sender, reading)
    finally:
        reading.cancel()
    if len(decisions.sessions) < sent.sessions[-1] / 10:
        raise FailedError(
            f"{child.name} answered {len(decisions.sessions)} of {sent.sessions[-1]} arrivals: {child.last_words()}"
        )
    return Heard(sent=sent, sessions=decisions.sessions, moments=decisions.moments)


async def _until_answered(decisions: FirstDecisions, child: Child, sender: Child, reading: asyncio.Task[None]) -> Sent:
    """Wait until everybody is answered, or nobody is any more; return what was sent."""
    last, answered = time.monotonic(), 0
    sent: Sent | None = None
    while sent is None or (answered < sent.sessions[-1] and time.monotonic() - last < SILENCE):
        await asyncio.wait([reading], timeout=LOOK)
        if reading.done():
            reading.result()
        if len(decisions.sessions) > answered:
            last, answered = time.monotonic(), len(decisions.sessions)
        child.check()
        if sent is None and sender.process.poll() is not None:
            sent = _told(sender)
    return sent


def _told(sender: Child) -> Sent:
    if sender.process.returncode:
        raise FailedError(f"the sender ended with {sender.process.returncode}: {sender.last_words()}")
    return msgspec.json.decode(sender.last_line(), type=Sent)
