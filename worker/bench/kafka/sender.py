"""The client that sends live traffic (``python -m worker.bench.kafka.sender``).

It encodes all its requests beforehand, then only sends them and waits for the answers: the work that a producer does
for every batch would run while the worker is measured, on the same cores.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.protocol.produce import ProduceRequest

from worker.bench.kafka.recording import Script, live_arrival, live_click
from worker.errors import FailedError
from worker.kafka.writer import TopicWriters
from worker.stream.topology import Topics

TICK = 0.010  # seconds between two batches, unless a play has another
LOOK = 0.2  # seconds between a display and its feedback
NAME = "live-"  # prefix of the session ids, unless a play has another; the number of the session follows
BATCH = 512 << 10  # bytes
PATIENCE = 10_000  # milliseconds that a broker may take to answer


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Task of the sender: target, file of scripts, and sessions per second at the beginning and at the end.

    `tick` is the time between two batches in seconds, `name` the prefix of the session ids.
    """

    broker: str
    prefix: str
    partitions: int
    scripts: str
    first: float
    last: float
    seconds: float
    tick: float = TICK
    name: str = NAME

    def begun(self, elapsed: float) -> int:
        """Return the number of sessions that begin in the first `elapsed` seconds.

        >>> play = Play(broker="", prefix="", partitions=1, scripts="", first=10, last=30, seconds=4)
        >>> play.begun(2), play.begun(4)
        (30, 80)
        """
        return int(self.first * elapsed + (self.last - self.first) * elapsed**2 / (2 * self.seconds))


class SentTicks(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the sender: the time of each tick, and the events and sessions sent up to it.

    `times` are nanoseconds of the monotonic clock.
    """

    times: list[int]
    events: list[int]
    sessions: list[int]


class Sender:
    """Play sessions: an arrival, then its clicks, `LOOK` seconds apart."""

    def __init__(self, play: Play, scripts: list[Script]) -> None:
        self._names = Topics(play.prefix)
        self._partitions = play.partitions
        self._scripts = scripts
        self._name = play.name.encode()
        self._look = max(1, round(LOOK / play.tick))
        self._later: dict[int, list[tuple[bytes, Script, int, int]]] = defaultdict(list)
        self.sessions = 0

    def due(self, tick: int, sessions: int, now: int) -> dict[tuple[str, int], list[tuple[bytes, bytes]]]:
        """Return the records to send at a tick; `sessions` is the number of sessions begun by then, `now` the time."""
        arrivals, clicks = self._names.arrivals, self._names.clicks
        parts: dict[tuple[str, int], list[tuple[bytes, bytes]]] = defaultdict(list)
        for name, script, index, partition in self._later.pop(tick, ()):
            parts[clicks, partition].append((name, live_click(script, index, name, now)))
            if index + 1 < len(script.clicks):
                self._later[tick + self._look].append((name, script, index + 1, partition))
        for number in range(self.sessions, sessions):
            script, partition = self._scripts[number % len(self._scripts)], number % self._partitions
            name = self._name + b"%d" % number
            parts[arrivals, partition].append((name, live_arrival(script, name, now)))
            if script.clicks:
                self._later[tick + self._look].append((name, script, 0, partition))
        self.sessions = sessions
        return parts


class EncodedRequest:
    """A request that is encoded already; aiokafka's connection treats it like any other."""

    def __init__(self, request: Any) -> None:
        self.RESPONSE_TYPE = request.RESPONSE_TYPE
        self.build_request_header = request.build_request_header
        self.parse_response_header = request.parse_response_header
        self._bytes: bytes = request.encode()

    def prepare(self, _: Any) -> EncodedRequest:
        """Return itself: it was encoded for the versions of this connection."""
        return self

    def encode(self) -> bytes:
        """Return the bytes."""
        return self._bytes


class Tick(NamedTuple):
    """The requests of one tick, one for each broker, and the events and sessions sent up to it."""

    requests: list[tuple[Any, EncodedRequest]]
    events: int
    sessions: int


async def prepare(producer: AIOKafkaProducer, play: Play, scripts: list[Script], start: int) -> list[Tick]:
    """Encode the requests of a play that begins at `start`."""
    sender = Sender(play, scripts)
    ticks = []
    events = 0
    for tick in range(int(play.seconds / play.tick)):
        now = start + int(tick * play.tick * 1000)
        due = sender.due(tick, play.begun((tick + 1) * play.tick), now)
        events += sum(map(len, due.values()))
        ticks.append(Tick(await _requests(producer, due, now), events, sender.sessions))
    return ticks


async def _requests(
    producer: AIOKafkaProducer, due: dict[tuple[str, int], list[tuple[bytes, bytes]]], now: int
) -> list[tuple[Any, EncodedRequest]]:
    topics: dict[Any, dict[str, list[tuple[int, bytes]]]] = defaultdict(lambda: defaultdict(list))
    for (topic, partition), pairs in due.items():
        builder = producer.create_batch()
        for key, value in pairs:
            if builder.append(timestamp=now, key=key, value=value) is None:
                raise FailedError(f"a batch has more than {BATCH >> 10} KB: the rate is too high")
        leader = producer.client.cluster.leader_for_partition(TopicPartition(topic, partition))
        topics[leader][topic].append((partition, bytes(builder._build())))
    requests = []
    for leader, batches in topics.items():
        connection = await producer.client._get_conn(leader)
        request = ProduceRequest(None, 1, PATIENCE, list(batches.items())).prepare(connection._versions)
        requests.append((connection, EncodedRequest(request)))
    return requests


async def send(play: Play, scripts: list[Script]) -> SentTicks:
    """Send the whole play; return the times."""
    names = Topics(play.prefix)
    async with AIOKafkaProducer(bootstrap_servers=play.broker, max_batch_size=BATCH) as producer:
        await TopicWriters(producer).load_metadata(names.arrivals, names.clicks)
        ticks = await prepare(producer, play, scripts, time.time_ns() // 1_000_000)
        gc.collect()
        gc.freeze()
        times: list[int] = []
        answers: list[asyncio.Future[Any]] = []
        begun = time.monotonic()
        for number, tick in enumerate(ticks):
            await asyncio.sleep(max(0.0, begun + number * play.tick - time.monotonic()))
            times.append(time.monotonic_ns())
            # Sent without waiting for the last answer: a broker keeps the order within a connection.
            answers += [asyncio.ensure_future(connection.send(request)) for connection, request in tick.requests]
        for answer in await asyncio.gather(*answers):
            _check(answer)
    return SentTicks(times=times, events=[tick.events for tick in ticks], sessions=[tick.sessions for tick in ticks])


def _check(answer: Any) -> None:
    refused = {parts[1] for _, partitions in answer.topics for parts in partitions} - {0}
    if refused:
        raise FailedError(f"the broker refused records (protocol error {min(refused)})")


def main(argument: str) -> None:
    """Send the play in the argument, then write the times as JSON."""
    play = msgspec.json.decode(argument, type=Play)
    scripts = msgspec.msgpack.decode(Path(play.scripts).read_bytes(), type=list[Script])
    sys.stdout.write(msgspec.json.encode(asyncio.run(send(play, scripts))).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
