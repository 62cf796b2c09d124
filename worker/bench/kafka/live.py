"""Live traffic at a given rate, and the wait of a client between its arrival and the decision.

The sender is a process of its own (`sender`), and the reader unpacks no more than it needs (`reader`), to leave the
processors to the worker. Afterwards the sender reports the time of each tick; Linux has one monotonic clock for all
processes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from worker.bench.kafka.processes import ChildProcess
from worker.bench.kafka.reader import FirstDecisions
from worker.bench.kafka.recording import Recording, live_arrival
from worker.bench.kafka.sender import NAME, TICK, Play, SentTicks
from worker.bench.kafka.topics import end_offsets, fill, partitions
from worker.errors import FailedError
from worker.kafka.clients import standalone_consumer
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

WARM = 3.0  # seconds that do not count
STRETCH = 0.5  # seconds of a rising rate that are judged together
LONG = 100.0  # milliseconds; if half of the clients wait for longer, the server does not keep up
SCRIPTS = 2_000  # sessions that are played over and over
SILENCE = 3.0  # seconds without a decision before the run ends
LOOK = 0.1  # seconds between two checks of the progress
Floats = np.ndarray[Any, np.dtype[np.float64]]


class TooSlowError(FailedError):
    """Most arrivals were not answered in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """Answered sessions with the times of the answers, in nanoseconds of the monotonic clock.

    `processor` is the processor time of the server's own process in seconds.
    """

    sent: SentTicks
    sessions: list[int]
    times: list[int]
    processor: float = 0.0

    def waits(self) -> tuple[Floats, Floats]:
        """Return for each answered session when it was sent, in seconds of the play, and its wait in milliseconds.

        >>> sent = SentTicks(times=[0, 10_000_000], events=[1, 3], sessions=[1, 3])
        >>> run = LiveRun(sent=sent, sessions=[0, 2], times=[1_000_000, 12_000_000])
        >>> [numbers.tolist() for numbers in run.waits()]
        [[0.0, 0.01], [1.0, 2.0]]
        """
        ticks = np.searchsorted(np.array(self.sent.sessions), np.array(self.sessions, np.int64), side="right")
        sent = np.array(self.sent.times, np.int64)[ticks]
        return (sent - self.sent.times[0]) / 1e9, (np.array(self.times, np.int64) - sent) / 1e6

    def latency(self, warm: float = WARM) -> Latency:
        """Return the waits after the warm-up."""
        sent, waits = self.waits()
        if not np.any(sent > warm):
            raise TooSlowError(f"no session after the first {warm:g} s was answered: no measurement")
        seconds = (self.sent.times[-1] - self.sent.times[0]) / 1e9
        return Latency(waits=waits[sent > warm], rate=self.sent.events[-1] / seconds)

    def highest_rate(self) -> float:
        """Return the highest rate, in events per second, at which half of the clients still waited less than `LONG`."""
        sent, waits = self.waits()
        ticks = round(STRETCH / TICK)
        rate = 0.0
        for first in range(0, len(self.sent.times) - ticks, ticks):
            begun, ended = ((self.sent.times[tick] - self.sent.times[0]) / 1e9 for tick in (first, first + ticks))
            inside = waits[(begun <= sent) & (sent < ended)]
            if len(inside) and np.median(inside) < LONG:
                rate = max(rate, (self.sent.events[first + ticks] - self.sent.events[first]) / (ended - begun))
        return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Waits in milliseconds from sending an arrival to its decision; `rate` is the number of events sent per second."""

    waits: Floats
    rate: float


# ── the client that reads ────────────────────────────────────────────────────────────────────────────────────────────


async def live(
    connection: Connection,
    names: Topics,
    child: ChildProcess,
    recording: Recording,
    rates: tuple[float, float],
    seconds: float,
    folder: Path,
    count: int,
) -> LiveRun:
    """Send live traffic to a child, as soon as it serves, and return the answers.

    `rates` are events per second at the beginning and at the end, `count` is the number of partitions.
    """
    await serves(connection, names, child, recording, count)
    per_session = events_per_session(recording)
    sessions = rates[0] / per_session, rates[1] / per_session
    return await play_live(connection, names, child, recording, sessions, seconds, folder, count)


def events_per_session(recording: Recording) -> float:
    """Return the mean number of records of the sessions that are played."""
    scripts = recording.scripts[:SCRIPTS]
    return 1 + sum(len(script.clicks) for script in scripts) / len(scripts)


async def play_live(
    connection: Connection,
    names: Topics,
    child: ChildProcess,
    recording: Recording,
    rates: tuple[float, float],
    seconds: float,
    folder: Path,
    count: int,
    *,
    tick: float = TICK,
    name: str = NAME,
) -> LiveRun:
    """Send live traffic to a child that serves; `rates` are sessions per second at the beginning and at the end."""
    scripts = recording.scripts[:SCRIPTS]
    file = folder / "scripts.msgpack"
    file.write_bytes(msgspec.msgpack.encode(scripts))
    play = Play(
        broker=connection.servers[0],
        prefix=names.prefix,
        partitions=count,
        scripts=str(file),
        first=rates[0],
        last=rates[1],
        seconds=seconds,
        tick=tick,
        name=name,
    )
    async with standalone_consumer(connection) as consumer:
        tps = partitions(names.decisions, count)
        decisions = FirstDecisions(consumer, await consumer.end_offsets(tps), name)
        with ChildProcess(
            "sender", ["worker.bench.kafka.sender", msgspec.json.encode(play).decode()], folder
        ) as sender:
            before = child.own_processor_seconds()
            run = await _answers(decisions, child, sender)
            return replace(run, processor=child.own_processor_seconds() - before)


async def serves(connection: Connection, names: Topics, child: ChildProcess, recording: Recording, count: int) -> None:
    """Wait until a child serves every partition."""
    now = time.time_ns() // 1_000_000
    script = recording.scripts[0]
    first = [f"probe-{number}".encode() for number in range(count)]
    await fill(
        connection,
        {(names.arrivals, number): [(name, live_arrival(script, name, now))] for number, name in enumerate(first)},
    )
    async with end_offsets(connection) as look:
        await look.reached(partitions(names.decisions, count), count, child)


async def _answers(decisions: FirstDecisions, child: ChildProcess, sender: ChildProcess) -> LiveRun:
    reading = asyncio.create_task(decisions.read())
    try:
        sent = await _until_answered(decisions, child, sender, reading)
    finally:
        reading.cancel()
    if len(decisions.sessions) < sent.sessions[-1] / 10:
        raise TooSlowError(
            f"{child.name} answered {len(decisions.sessions)} of {sent.sessions[-1]} arrivals: {child.last_error()}"
        )
    return LiveRun(sent=sent, sessions=decisions.sessions, times=decisions.times)


async def _until_answered(
    decisions: FirstDecisions, child: ChildProcess, sender: ChildProcess, reading: asyncio.Task[None]
) -> SentTicks:
    """Wait until all sessions are answered, or no more answers come; return what was sent."""
    last, answered = time.monotonic(), 0
    sent: SentTicks | None = None
    while sent is None or (answered < sent.sessions[-1] and time.monotonic() - last < SILENCE):
        await asyncio.wait([reading], timeout=LOOK)
        if reading.done():
            reading.result()
        if len(decisions.sessions) > answered:
            last, answered = time.monotonic(), len(decisions.sessions)
        child.check()
        if sent is None and sender.process.poll() is not None:
            sent = _result(sender)
    return sent


def _result(sender: ChildProcess) -> SentTicks:
    if sender.process.returncode:
        raise FailedError(f"the sender ended with {sender.process.returncode}: {sender.last_error()}")
    return msgspec.json.decode(sender.last_line(), type=SentTicks)
