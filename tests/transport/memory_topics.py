"""Topics in memory, with one partition each, behind the methods of `TopicReader` and of a producer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaError

from worker.stream.topology import ONLY_PARTITION, Record


class MemoryMessage:
    """A message of librdkafka."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def offset(self) -> int:
        return self._record.offset

    def value(self) -> bytes | None:
        return self._record.value

    def timestamp(self) -> tuple[int, int]:
        return 1, self._record.timestamp


class MemoryTopics:
    """All topics: a producer and a reader of them at once. `error` may refuse a write; `reads` counts records."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Record]] = defaultdict(list)
        self.written: list[Record] = []  # of all topics, in the order of the writes
        self.error: Callable[[str, bytes | None], KafkaError | None] = lambda topic, key: None
        self.reads = 0
        self._gone: set[tuple[str, int]] = set()
        self._positions: dict[str, int] = {}

    # ── the producer ─────────────────────────────────────────────────────────────────────────────────────────────────

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int = ONLY_PARTITION,
        on_delivery: Callable[[KafkaError | None, Any], None] = lambda error, message: None,
    ) -> None:
        if (error := self.error(topic, key)) is not None:
            on_delivery(error, None)
            return
        record = Record(topic, partition, len(self.topics[topic]), 0, key, value)
        self.topics[topic].append(record)
        self.written.append(record)
        on_delivery(None, MemoryMessage(record))

    def poll(self, seconds: float, most: int = 10_000) -> list[MemoryMessage]:
        """Return the next records, as a reader. A producer has nothing to do here."""
        found = []
        for topic, position in self._positions.items():
            found += [MemoryMessage(record) for record in self.topics[topic][position:][:most]]
            self._positions[topic] = position + len(found)
        return found

    # ── the reader ───────────────────────────────────────────────────────────────────────────────────────────────────

    def bounds(self, topic: str) -> tuple[int, int]:
        return 0, len(self.topics[topic])

    def read_from(self, positions: Mapping[tuple[str, int], int]) -> None:
        self._positions = {topic: offset for (topic, _), offset in positions.items()}

    def read_to(self, topic: str, start: int, end: int) -> Iterator[Record]:
        for record in self.topics[topic][start:end]:
            if (topic, record.offset) not in self._gone:
                self.reads += 1
                yield record

    def read_to_end(self, topic: str, start: int = 0) -> list[Record]:
        return list(self.read_to(topic, start, len(self.topics[topic])))

    def compact(self, topic: str) -> None:
        """Remove all but the last record of every key; offsets stay."""
        newest = {record.key: record.offset for record in self.topics[topic]}
        self._gone |= {(topic, one.offset) for one in self.topics[topic] if newest[one.key] != one.offset}
