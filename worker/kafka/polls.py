"""Polls, and their results on the way to the broker.

A poll is what the driver hands to the agent: the records of all partitions that were there at one moment. Rules that
hold in this file (docs/design.md §3):

1. The results of a poll are written together. When all of them are durable the poll is acknowledged, and only then may
   its offsets be committed.
2. A poll is acknowledged after the ones before it, but the next is handled while these are still being written.
3. A write that fails fails the worker. Nothing that came after it is ever acknowledged.

Delivery reports come in the client thread and change nothing but the counters of a flight. Everything else runs in the
event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from faust.types import TP

from worker.errors import FailedError
from worker.stream.topology import DeadLetter, Record

K = TypeVar("K")


class RecordList(NamedTuple):
    """Records that one poll got from a partition, and the position after them.

    The position may be beyond the last record: over deleted records and the marks of transactions.
    """

    tp: TP
    end: int
    records: Sequence[Record]


class Poll(NamedTuple):
    """The records of one poll: the polls of a generation are numbered from 0, and each follows the one before.

    `fetched` is a time of the monotonic clock.
    """

    generation: int
    number: int
    lists: Sequence[RecordList]
    fetched: float


class Flight:
    """The results of a poll, or of a deletion, on their way to the broker."""

    __slots__ = ("_reported", "changelog", "ends", "error", "since", "size", "writes")

    def __init__(self, ends: Mapping[TP, int], size: int) -> None:
        self.ends, self.size = ends, size
        self.since = monotonic()
        self.writes = 0
        #: The last changelog offset of each partition that it wrote to.
        self.changelog: dict[int, int] = {}
        self.error: KafkaError | None = None
        self._reported = 0

    def on_delivery(self, error: KafkaError | None, message: Message) -> None:
        """Count a delivery report, in the client thread."""
        if error is not None:
            self.error = error
        self._reported += 1

    def on_changelog_delivery(self, error: KafkaError | None, message: Message) -> None:
        """Count the delivery report of a changelog record, in the client thread."""
        if error is None:
            self.changelog[message.partition()] = message.offset()
        self.on_delivery(error, message)

    @property
    def is_durable(self) -> bool:
        """Whether all of its writes are acknowledged."""
        return self._reported == self.writes and self.error is None


class Flights:
    """The flights of a worker, in order, and the positions before which everything is acknowledged.

    `fail` is called when a write has failed.
    """

    def __init__(self, fail: Callable[[KafkaError], None]) -> None:
        self._fail = fail
        self._flying: deque[Flight] = deque()
        self._waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        #: Everything before these positions is acknowledged.
        self.acknowledged: dict[TP, int] = {}
        #: The last durable changelog offset of each partition that is served.
        self.changelog: dict[int, int] = {}
        #: The records whose results are not durable yet.
        self.size = 0
        #: The seconds that flights took, since this was cleared.
        self.durations: list[float] = []

    @property
    def are_idle(self) -> bool:
        """Whether everything is durable."""
        return not self._flying

    @property
    def are_awaited(self) -> bool:
        """Whether somebody waits for an acknowledgement."""
        return bool(self._waits)

    def begin(self, starts: Mapping[TP, int]) -> None:
        """Start reading at these positions, and at no others."""
        self.acknowledged = dict(starts)

    def launch(self, flight: Flight) -> None:
        """Add a flight, all of whose writes are handed to the producer."""
        self._flying.append(flight)
        self.size += flight.size
        self.advance()

    def advance(self) -> None:
        """Acknowledge what is durable; called after delivery reports."""
        flying = self._flying
        while flying and flying[0].is_durable:
            flight = flying.popleft()
            self.size -= flight.size
            self.durations.append(monotonic() - flight.since)
            _raise_to(self.acknowledged, flight.ends)
            _raise_to(self.changelog, flight.changelog)
        if flying and flying[0].error is not None:
            self._fail(flying[0].error)
        if self._waits:
            self._waits = [wait for wait in self._waits if not _settled(*wait)]

    def forget(self) -> None:
        """Ignore what is on its way: the partitions belong to another worker."""
        self._flying.clear()
        self.acknowledged, self.size = {}, 0
        self.advance()

    def until(self, condition: Callable[[], bool]) -> asyncio.Future[None]:
        """Return a future that resolves when a condition holds; it is checked whenever something is acknowledged."""
        wait: tuple[Callable[[], bool], asyncio.Future[Any]]
        wait = condition, asyncio.get_running_loop().create_future()
        if not _settled(*wait):
            self._waits.append(wait)
        return wait[1]

    def reached(self, ends: Mapping[TP, int]) -> asyncio.Future[None]:
        """Return a future that resolves when everything before these positions is acknowledged."""
        return self.until(lambda: all(self.acknowledged.get(tp, -1) >= end for tp, end in ends.items()))


class Writer:
    """Writes each record once, in order, to all replicas."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def write(
        self,
        topic: str,
        partition: int,
        pairs: Sequence[tuple[bytes | None, bytes | None]],
        flight: Flight,
        *,
        is_changelog: bool = False,
    ) -> None:
        """Write keys with values to a partition; the flight gets their delivery reports."""
        queued = self._producer.produce_batch(
            topic,
            [{"key": key, "value": value} for key, value in pairs],
            partition,
            flight.on_changelog_delivery if is_changelog else flight.on_delivery,
        )
        flight.writes += len(pairs)
        if queued != len(pairs):
            raise FailedError(f"{len(pairs) - queued} records for {topic} could not be queued")

    def write_dead_letters(self, topic: str, partition: int, letters: Iterable[DeadLetter], flight: Flight) -> None:
        """Write dead letters with their headers."""
        for key, value, headers in letters:
            self._producer.produce(topic, value, key, partition, on_delivery=flight.on_delivery, headers=headers)
            flight.writes += 1

    async def write_one(self, topic: str, partition: int, value: bytes) -> Message:
        """Write a record without a key; return its delivery report when all replicas have it."""
        written: Future[Message] = Future()
        written.set_running_or_notify_cancel()  # from here on, only the delivery report ends it

        def on_delivery(error: KafkaError | None, message: Message) -> None:  # in the client thread
            if error is None:
                written.set_result(message)
            else:
                written.set_exception(KafkaException(error))

        self._producer.produce(topic, value, None, partition, on_delivery=on_delivery)
        return await asyncio.wrap_future(written)


def _raise_to(numbers: dict[K, int], higher: Mapping[K, int]) -> None:
    """Raise the numbers that are there."""
    for key, number in higher.items():
        if number > numbers.get(key, number):
            numbers[key] = number


def _settled(condition: Callable[[], bool], future: asyncio.Future[None]) -> bool:
    if not future.done() and condition():
        future.set_result(None)
    return future.done()
