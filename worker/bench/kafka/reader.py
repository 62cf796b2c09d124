"""The client that reads first decisions, straight from the bytes that the broker sends.

A consumer unpacks every record, which takes a tenth of a core at 30,000 records a second, and that tenth would be
missing from the process under measurement. So this client fetches batches, searches their bytes for first decisions,
and leaves the rest packed.
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

WAIT = 100  # milliseconds that the broker may wait for new records
MOST = 4 << 20  # bytes of an answer
#: The number of a session at the end of its key, the length of the value, and then a decision on position 1; some
#: writers put the session first.
FIRST = rb'(\d+)[^{]{1,4}\{(?:"session_id":"[^"]*","arrived_at":\d+,)?"position":1,'
_HEAD = struct.Struct(">qi11xi")  # of a batch: offset of its first record, length, distance to its last record
_BEFORE_LENGTH_COUNTS = 12  # bytes


class FirstDecisions:
    """Read decisions from the given offsets on, of sessions whose ids begin with `name`.

    `sessions` are the numbers of the answered sessions, `times` the nanoseconds of the monotonic clock at the answer.
    """

    def __init__(self, consumer: AIOKafkaConsumer, offsets: Mapping[TopicPartition, int], name: str = NAME) -> None:
        self._first = re.compile(re.escape(name.encode()) + FIRST, re.DOTALL)
        self._client = consumer._client
        self._offsets = dict(offsets)
        self.sessions: list[int] = []
        self.times: list[int] = []

    async def read(self) -> None:
        """Read until cancelled."""
        leaders: dict[Any, list[TopicPartition]] = defaultdict(list)
        for tp in self._offsets:
            leaders[self._client.cluster.leader_for_partition(tp)].append(tp)
        await asyncio.gather(*(self._read_from(leader, tps) for leader, tps in leaders.items()))

    async def _read_from(self, leader: Any, tps: list[TopicPartition]) -> None:
        while True:
            topics: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
            for tp in tps:
                topics[tp.topic].append((tp.partition, self._offsets[tp], MOST))
            answer = await self._client.send(leader, FetchRequest(WAIT, 1, MOST, 0, list(topics.items())))
            now = time.monotonic_ns()
            for topic, parts in answer.topics:
                for partition, error, *_, packed in parts:
                    if error:
                        raise FailedError(f"the broker sends no decisions (protocol error {error})")
                    self._search(TopicPartition(topic, partition), packed or b"", now)

    def _search(self, tp: TopicPartition, packed: bytes, now: int) -> None:
        size, self._offsets[tp] = whole_batches(packed, self._offsets[tp])
        found = self._first.findall(packed, 0, size)
        self.sessions += map(int, found)
        self.times += [now] * len(found)


def whole_batches(packed: bytes, offset: int) -> tuple[int, int]:
    """Return the number of bytes of the complete batches, and the offset after them; the last batch may be cut off.

    >>> batch = _HEAD.pack(7, 15, 2) + bytes(4)
    >>> whole_batches(batch + batch[:20], 7)
    (27, 10)
    """
    at = 0
    while at + _HEAD.size <= len(packed):
        base, length, last = _HEAD.unpack_from(packed, at)
        end = at + _BEFORE_LENGTH_COUNTS + length
        if end > len(packed):
            break
        at, offset = end, base + last + 1
    return at, offset
