"""The client that reads: who was answered for the first time, straight from the bytes that the broker sends.

A consumer would unpack every record, which takes a tenth of a core at 30,000 records a second. What it takes, the
process that is measured lacks. So this asks for batches, looks through them for what first decisions look like, and
leaves the rest packed.
"""

from __future__ import annotations

import asyncio
import re
import struct
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.protocol.fetch import FetchRequest

from worker.bench.kafka.sender import NAME
from worker.errors import FailedError

WAIT = 100  # milliseconds that the broker may wait for something to send
MOST = 4 << 20  # bytes of an answer
#: The key of a session, the length of the value, and then a decision on position 1, however it begins.
FIRST = re.compile(NAME + rb'(\d+)[^{]{1,4}\{(?:"session_id":"[^"]*","arrived_at":\d+,)?"position":1,', re.DOTALL)
_HEAD = struct.Struct(">qi11xi")  # of a batch: the offset of its first record, its length, and how far its last is
_BEFORE_LENGTH_COUNTS = 12  # bytes


class FirstDecisions:
    """Reads decisions from where they end when it begins.

    `sessions` are the numbers of those who were answered, `moments` when, in nanoseconds of the monotonic clock.
    """

    def __init__(self, consumer: AIOKafkaConsumer, positions: Mapping[TopicPartition, int]) -> None:
        self._client = consumer._client
        self._positions = dict(positions)
        self.sessions: list[int] = []
        self.moments: list[int] = []

    async def read(self) -> None:
        """Go on until cancelled."""
        leaders: dict[Any, list[TopicPartition]] = defaultdict(list)
        for tp in self._positions:
            leaders[self._client.cluster.leader_for_partition(tp)].append(tp)
        await asyncio.gather(*(self._read_from(leader, tps) for leader, tps in leaders.items()))

    async def _read_from(self, leader: Any, tps: list[TopicPartition]) -> None:
        while True:
            topics: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
            for tp in tps:
                topics[tp.topic].append((tp.partition, self._positions[tp], MOST))
            answer = await self._client.send(leader, FetchRequest(WAIT, 1, MOST, 0, list(topics.items())))
            now = time.monotonic_ns()
            for topic, parts in answer.topics:
                for partition, error, *_, packed in parts:
                    if error:
                        raise FailedError(f"the broker does not send decisions (error {error} of the protocol)")
                    self._look_through(TopicPartition(topic, partition), packed or b"", now)

    def _look_through(self, tp: TopicPartition, packed: bytes, now: int) -> None:
        whole, self._positions[tp] = measured(packed, self._positions[tp])
        found = FIRST.findall(packed, 0, whole)
        self.sessions += map(int, found)
        self.moments += [now] * len(found)


def measured(packed: bytes, position: int) -> tuple[int, int]:
    """Return how many bytes the whole batches have, and the position after them; the last one may be cut off.

    >>> batch = _HEAD.pack(7, 15, 2) + bytes(4)
    >>> measured(batch + batch[:20], 7)
    (27, 10)
    """
    at = 0
    while at + _HEAD.size <= len(packed):
        base, length, last = _HEAD.unpack_from(packed, at)
        end = at + _BEFORE_LENGTH_COUNTS + length
        if end > len(packed):
            break
        at, position = end, base + last + 1
    return at, position
