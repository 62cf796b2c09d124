"""Decisions from the brokers, handed over by the call that reads their bytes.

Rules that hold in this file:

- Every broker that leads partitions has one fetch at a time. The following one leaves as soon as the answer is handled.
- After an error, or when a broker leads other partitions than it is asked for, its fetches end. `run` begins them anew,
  after a pause and with newer metadata where there was an error.
- A position that a broker no longer has becomes the end of the partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.fetcher import READ_COMMITTED
from aiokafka.errors import KafkaError, OffsetOutOfRangeError, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.structs import TopicPartition

from worker.client.transport import Receive
from worker.kafka.direct import PendingAnswer, open_connection, send
from worker.kafka.records import unpacked
from worker.kafka.unpacking import BoundedPartitionRecords, KeptRecords

log = logging.getLogger(__name__)

_LONG_POLL: Final = 500  # milliseconds that the broker holds a fetch back while there is nothing new
_FETCH_BYTES: Final = 4 << 20  # in one answer; a larger batch comes alone
_PAUSE: Final = 0.2  # seconds after a failed fetch

Answer: TypeAlias = Any


class DecisionReader:
    """Reads all partitions of a topic.

    Parameters
    ----------
    consumer : a started one without partitions; its connections are used
    receive : called with the records of a partition
    """

    def __init__(self, consumer: AIOKafkaConsumer, topic: str, receive: Receive) -> None:
        self._loop = asyncio.get_running_loop()
        self._consumer, self._client = consumer, consumer._client
        self._topic, self._receive = topic, receive
        self._positions: dict[int, int] = {}
        self._lost: set[int] = set()  # partitions whose position a broker no longer has
        self._fetching: dict[int, list[int]] = {}  # brokers, and the partitions that they are asked for
        self._outdated: set[int] = set()  # brokers that are to be asked for other partitions
        self._failed = self._is_over = False
        self._wake = asyncio.Event()

    async def seek_to_end(self, partitions: int) -> None:
        """Begin at the ends of so many partitions."""
        self._client.add_topic(self._topic)
        await self._client._wait_on_metadata(self._topic)
        ends = await self._consumer.end_offsets(self._tps(range(partitions)))
        self._positions = {tp.partition: offset for tp, offset in ends.items()}

    def extend(self, partitions: int) -> None:
        """Read so many partitions, those that are new from their beginning."""
        for partition in range(partitions):
            self._positions.setdefault(partition, 0)
        self._wake.set()

    async def run(self) -> None:
        """Read until cancelled."""
        try:
            await self._run()
        finally:
            self._is_over = True  # the connections are closed next, with a fetch on its way

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._failed:
                self._failed = False
                await asyncio.sleep(_PAUSE)
                await self._client.force_metadata_update()
            try:
                await self._begin()
            except KafkaError as error:
                self._fail(error)
            await self._wake.wait()

    def _tps(self, partitions: Any) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition) for partition in partitions]

    def _fail(self, error: object) -> None:
        if not self._is_over:
            log.warning("decisions cannot be read: %r; trying again", error)
        self._failed = True
        self._wake.set()

    async def _begin(self) -> None:
        """Send a fetch to every broker that has none."""
        if self._lost:
            ends = await self._consumer.end_offsets(self._tps(self._lost))
            self._positions.update((tp.partition, offset) for tp, offset in ends.items())
            self._lost.clear()
        led: dict[int, list[int]] = {}
        for tp in self._tps(self._positions):
            leader = self._client.cluster.leader_for_partition(tp)
            if leader is None or leader < 0:
                self._fail(f"no broker leads {tp}")
            else:
                led.setdefault(leader, []).append(tp.partition)
        for leader, partitions in led.items():
            if leader in self._fetching:
                if self._fetching[leader] != partitions:
                    self._outdated.add(leader)
            elif await self._client.ready(leader):
                self._fetching[leader] = partitions
                self._fetch(leader)
            else:
                self._fail(f"no connection to broker {leader}")

    # ── fetches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fetch(self, leader: int) -> None:
        connection = open_connection(self._client, leader)
        wanted = [(partition, self._positions[partition], _FETCH_BYTES) for partition in self._fetching[leader]]
        request = FetchRequest(_LONG_POLL, 1, _FETCH_BYTES, READ_COMMITTED, [(self._topic, wanted)])
        take: Callable[[Answer], None] = partial(self._take, leader)
        try:
            if connection is None:
                raise ConnectionError(f"no connection to broker {leader}")
            send(connection, request, PendingAnswer(take, partial(self._end, leader), self._loop.time()))
        except (KafkaError, ConnectionError) as error:
            self._end(leader, error)

    def _end(self, leader: int, error: object) -> None:
        self._stop(leader)
        self._fail(error)

    def _stop(self, leader: int) -> None:
        self._fetching.pop(leader, None)
        self._outdated.discard(leader)
        self._wake.set()

    def _take(self, leader: int, answer: Answer) -> None:
        """Hand the records of an answer over, and fetch again."""
        code = getattr(answer, "error_code", 0)
        error: object = for_code(code) if code else None
        try:
            for _, found in answer.topics:
                for partition in found:
                    error = self._take_partition(partition, answer.API_VERSION) or error
        except Exception as raised:  # whatever a record may cause, those after it are read
            log.exception("decisions cannot be handled")
            error = raised
        if error is not None:
            self._end(leader, error)
        elif leader in self._outdated:
            self._stop(leader)
        else:
            self._fetch(leader)

    def _take_partition(self, found: tuple[Any, ...], version: int) -> object:
        """Hand the records of a partition over; return the error if there is one."""
        partition, code, data = found[0], found[1], found[-1]
        if code:
            kind = for_code(code)
            if kind is OffsetOutOfRangeError:
                self._lost.add(partition)
            return kind(f"{self._topic}-{partition}")
        if data:
            aborted = found[-3] if version >= 11 else found[-2] if version >= 4 else None
            tp, position = TopicPartition(self._topic, partition), self._positions[partition]
            held = BoundedPartitionRecords(tp, KeptRecords(data), aborted, position, None, None, True, READ_COMMITTED)
            held._consumer_record = unpacked
            records = list(held)
            self._positions[partition] = held.next_fetch_offset
            if records:
                self._receive(records)
        return None
