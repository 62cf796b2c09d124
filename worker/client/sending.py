"""Records to the brokers, sent at once.

Rules that hold in this file:

- Records of one turn of the event loop go out together, in one request per broker. A partition has one request in
  flight at a time, so it keeps its order; what comes meanwhile goes together in the following one.
- Records for a patient topic wait until `PATIENCE` has passed since the last request, or go with an earlier one. Every
  request costs processor time here, in the broker and in the worker, which reads it by itself.
- A request is tried once. What a broker did not take goes to the aiokafka producer, which repeats it until it is taken
  or expires. As long as that producer has records of a partition, all further ones go the same way, behind them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.producer.message_accumulator import MessageBatch
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.structs import TopicPartition

from worker.kafka.direct import PendingAnswer, open_connection, send
from worker.kafka.writer import TopicWriters

log = logging.getLogger(__name__)

Pairs: TypeAlias = Sequence[tuple[bytes, bytes]]

#: Seconds between two requests if only records of patient topics wait.
PATIENCE: Final = 0.003

_ALL_REPLICAS: Final = -1
_NO_HEADERS: list[tuple[str, bytes]] = []


class _Lane:
    """The batches of a partition that wait, the newest last, and the one that is on its way."""

    __slots__ = ("in_flight", "is_patient", "tp", "waiting")

    def __init__(self, tp: TopicPartition, is_patient: bool) -> None:
        self.tp, self.is_patient = tp, is_patient
        self.waiting: deque[MessageBatch] = deque()
        self.in_flight: MessageBatch | None = None


class RecordSender:
    """Sends records over the connections of a producer.

    Parameters
    ----------
    producer : a started one, not idempotent
    timeout : seconds after which a broker gives a request up
    patient : topics whose records may wait for company
    """

    def __init__(self, producer: AIOKafkaProducer, *, timeout: float, patient: Collection[str] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._producer = producer
        self._accumulator = producer._message_accumulator
        self._muted = producer._sender._muted_partitions
        self._writers = TopicWriters(producer)
        self._timeout, self._patient = int(1000 * timeout), frozenset(patient)
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._ready: set[_Lane] = set()
        self._patient_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = self._is_due = False

    async def load_metadata(self, *topics: str) -> None:
        """Load the metadata of topics before the first record for them, and connect to their brokers."""
        await self._writers.load_metadata(*topics)
        client = self._producer.client
        for node in {broker.nodeId for broker in client.cluster.brokers()}:
            await client.ready(node)

    def write(self, topic: str, partition: int, pairs: Pairs) -> list[asyncio.Future[Any]]:
        """Send keys with values; return the futures of their batches, which resolve when all replicas have them."""
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = self._lanes[topic, partition] = _Lane(TopicPartition(topic, partition), topic in self._patient)
        if self._is_closed or self._accumulator._exception is not None or self._is_behind(lane):
            return [batch.future for batch in self._writers.writer(topic, partition).write(pairs)]
        used: list[asyncio.Future[Any]] = []
        now = int(1000 * time.time())
        batch = lane.waiting[-1] if lane.waiting else None
        for key, value in pairs:
            if batch is None or batch._builder.append(timestamp=now, key=key, value=value, headers=_NO_HEADERS) is None:
                batch = self._next(lane)
                batch._builder.append(timestamp=now, key=key, value=value, headers=_NO_HEADERS)
            if not used or used[-1] is not batch.future:
                used.append(batch.future)
        if lane.in_flight is None:
            self._make_ready(lane)
        return used

    async def close(self) -> None:
        """Wait until everything is acknowledged; leave the rest, and further records, to the producer."""
        self._is_closed = True
        deadline = self._loop.time() + self._timeout / 1000
        while on_way := self._on_way():
            if self._loop.time() > deadline:
                self._hand_over(list(self._lanes.values()))
            else:
                await asyncio.wait(on_way, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)

    def _on_way(self) -> list[asyncio.Future[Any]]:
        self._send_ready()
        return [lane.in_flight.future for lane in self._lanes.values() if lane.in_flight is not None]

    def _is_behind(self, lane: _Lane) -> bool:
        """Return whether the producer has records of a partition."""
        return lane.tp in self._muted or lane.tp in self._accumulator._batches

    def _next(self, lane: _Lane) -> MessageBatch:
        accumulator = self._accumulator
        batch = MessageBatch(lane.tp, accumulator.create_builder(), accumulator._batch_ttl, 0)
        lane.waiting.append(batch)
        return batch

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_ready(self, lane: _Lane) -> None:
        self._ready.add(lane)
        if self._is_due:
            return
        if not lane.is_patient or self._loop.time() >= self._patient_until:
            self._is_due = True
            self._loop.call_soon(self._send_ready)
        elif self._timer is None:
            self._timer = self._loop.call_at(self._patient_until, self._send_ready)

    def _send_ready(self) -> None:
        """Send the oldest batch of every partition that is ready, one request per broker."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ready, self._ready, self._is_due = self._ready, set(), False
        self._patient_until = self._loop.time() + PATIENCE
        cluster = self._producer.client.cluster
        by_leader: dict[int | None, list[_Lane]] = {}
        for lane in ready:
            if lane.waiting and lane.in_flight is None:
                lane.in_flight = lane.waiting.popleft()
                by_leader.setdefault(cluster.leader_for_partition(lane.tp), []).append(lane)
        for leader, lanes in by_leader.items():
            self._send(leader, lanes)

    def _send(self, leader: int | None, lanes: list[_Lane]) -> None:
        connection = None if leader is None else open_connection(self._producer.client, leader)
        if connection is None:
            self._hand_over(lanes)
            return
        topics: dict[str, list[tuple[int, bytes]]] = {}
        for lane in lanes:
            assert lane.in_flight is not None
            topics.setdefault(lane.tp.topic, []).append((lane.tp.partition, lane.in_flight.get_data_buffer()))
        request = ProduceRequest(None, _ALL_REPLICAS, self._timeout, list(topics.items()))
        answer = PendingAnswer(partial(self._answered, lanes), partial(self._failed, lanes), self._loop.time())
        try:
            send(connection, request, answer)
        except KafkaError as error:
            self._failed(lanes, error)

    def _answered(self, lanes: list[_Lane], answer: Any) -> None:
        taken = {
            (topic, found[0]): found for topic, partitions in answer.topics for found in partitions if not found[1]
        }
        refused: list[_Lane] = []
        for lane in lanes:
            found = taken.get(lane.tp)
            if found is None:
                refused.append(lane)
                continue
            batch, lane.in_flight = lane.in_flight, None
            if batch is None:  # it was left to the producer meanwhile
                continue
            batch.done(found[2], found[3] if len(found) > 3 else -1)
            if lane.waiting:
                self._make_ready(lane)
        self._hand_over(refused)

    def _failed(self, lanes: list[_Lane], error: BaseException) -> None:
        log.debug("records go to the producer: %r", error)
        self._hand_over(lanes)

    def _hand_over(self, lanes: list[_Lane]) -> None:
        """Leave all batches of some partitions to the producer, which repeats them."""
        accumulator = self._accumulator
        for lane in lanes:
            for batch in (lane.in_flight, *lane.waiting):
                if batch is not None:
                    accumulator._batches[lane.tp].append(batch)
            lane.in_flight = None
            lane.waiting.clear()
        if lanes and not accumulator._waiter_future.done():
            accumulator._waiter_future.set_result(None)
