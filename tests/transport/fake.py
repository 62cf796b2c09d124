"""Kafka in memory: the transport of tests. Batches become durable when, and in which order, a test wants."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from aiokafka.structs import TopicPartition

from worker.kafka.transport import Background, PartitionOwner, RecordList
from worker.stream.topology import MOST_BYTES, ONLY_PARTITION, Record, Topics


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in a loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


async def settle() -> None:
    """Let the loop run all callbacks."""
    for _ in range(5):
        await asyncio.sleep(0)


@dataclass(eq=False)
class FakeBatch:
    """A written batch that is durable once a test persists it."""

    tp: TopicPartition
    pairs: list[tuple[bytes | None, bytes | None]]
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def record_count(self) -> int:
        return len(self.pairs)


class FakeWriter:
    """Makes a batch of every call."""

    def __init__(self, batches: list[FakeBatch], tp: TopicPartition) -> None:
        self._batches, self._tp = batches, tp

    def write(self, pairs: Iterable[tuple[bytes | None, bytes | None]]) -> list[FakeBatch]:
        self._batches.append(FakeBatch(self._tp, list(pairs)))
        return self._batches[-1:]

    def write_with_headers(self, records: Iterable[tuple[Any, Any, Any]]) -> list[FakeBatch]:
        return self.write((key, value) for key, value, _ in records)


class FakeTransport:
    """Implements `worker.kafka.transport.Transport`. It outlives its workers, as a broker does."""

    def __init__(self, topics: Topics | None = None) -> None:
        self.topics = topics or Topics("t")
        self.is_member = self.can_write = True
        self.durable: dict[TopicPartition, list[Record]] = defaultdict(list)
        self.batches: list[FakeBatch] = []
        self.committed: dict[TopicPartition, int] = {}
        self.generation = 0
        self.reads_again: list[tuple[TopicPartition, int]] = []
        self.failures: list[BaseException] = []
        self.finished: Callable[[], bool] = lambda: False
        #: The clock of the broker, if its topics have LogAppendTime.
        self.clock: Callable[[], int] | None = None
        self._positions: dict[TopicPartition, int] = {}

    # ── what a worker calls ──────────────────────────────────────────────────────────────────────────────────────────

    def writer(self, topic: str, partition: int) -> FakeWriter:
        return FakeWriter(self.batches, TopicPartition(topic, partition))

    def flush(self) -> None:
        pass

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        return {tp: len(self.durable[tp]) for tp in partitions}

    def read_again(self, tp: TopicPartition, offset: int) -> None:
        self.reads_again.append((tp, offset))
        self._positions[tp] = offset

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def run(
        self, owner: PartitionOwner, *, partitions: int, background: Sequence[Background], most_bytes: int = MOST_BYTES
    ) -> int:
        """Run until `finished`, or a failure."""

        async def main() -> None:
            tasks = [asyncio.ensure_future(work()) for work in background]
            await self.rebalance(owner, range(partitions))
            while not self.failures and not self.finished():
                await self.poll(owner)
                for batch in self.pending():
                    await self.persist(batch)
                self.commit(owner)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(main())
        return 1 if self.failures else 0

    # ── what a broker does ───────────────────────────────────────────────────────────────────────────────────────────

    def append(self, tp: TopicPartition, key: bytes | None, value: bytes | None, timestamp: int = 0) -> None:
        log = self.durable[tp]
        log.append(Record(tp.topic, tp.partition, len(log), timestamp, key, value))

    async def rebalance(
        self, owner: PartitionOwner, partitions: Iterable[int], member: str = "me", skip: int = 0
    ) -> None:
        """Assign partitions in the next generation, or, with `skip`, so many generations later."""
        owner.close()
        await owner.drained(0.001)
        self.commit(owner)
        self.generation += 1 + skip
        kept = owner.assign(self.generation, member, partitions)
        fresh = {p: self.durable[TopicPartition(self.topics.changelog, p)] for p in set(partitions) - kept.keys()}
        tables = {p: {r.key: r for r in log} for p, log in fresh.items()}
        tables = {p: {k: r for k, r in table.items() if r.value is not None} for p, table in tables.items()}
        await owner.restore(tables, {p: len(log) - 1 for p, log in fresh.items() if log})
        inputs = [TopicPartition(topic, p) for topic in sorted(self.topics.inputs) for p in partitions]
        self._positions = {tp: self.committed.get(tp, 0) for tp in inputs}
        ends = {tp: len(self.durable[tp]) for tp in inputs}
        mine = ONLY_PARTITION in set(partitions)
        owner.open(self.generation, member, dict(self._positions), ends=ends, owns_journal=mine)

    async def poll(self, owner: PartitionOwner, most: int = 10**9) -> None:
        """Hand over the next records of every assigned partition."""
        lists = []
        for tp, start in self._positions.items():
            if records := self.durable[tp][start : start + most]:
                end = self._positions[tp] = records[-1].offset + 1
                lists.append(RecordList(tp=tp, generation=self.generation, start=start, end=end, records=records))
        if lists:
            await owner.take(lists)

    def commit(self, owner: PartitionOwner) -> None:
        self.committed |= owner.committable()

    # ── what a test decides ──────────────────────────────────────────────────────────────────────────────────────────

    def pending(self) -> list[FakeBatch]:
        return [batch for batch in self.batches if not batch.future.done()]

    async def persist(self, batch: FakeBatch) -> None:
        first, stamp = len(self.durable[batch.tp]), self.clock() if self.clock else -1
        for key, value in batch.pairs:
            self.append(batch.tp, key, value, max(0, stamp))
        batch.future.set_result(SimpleNamespace(offset=first, timestamp=stamp))
        await settle()

    async def persist_all(self) -> None:
        while pending := self.pending():
            await self.persist(pending[0])

    def lose_pending(self) -> None:
        """Drop the batches that are not durable, as a crash of the worker does."""
        self.batches = [batch for batch in self.batches if batch.future.done()]

    def written(self, topic: str) -> list[bytes | None]:
        """Return the keys that were written to a topic, durable or not."""
        return [key for batch in self.batches if batch.tp.topic == topic for key, _ in batch.pairs]

    def values(self, topic: str) -> list[bytes]:
        """Return the durable values of a topic."""
        logs = [log for tp, log in sorted(self.durable.items()) if tp.topic == topic]
        return [record.value for log in logs for record in log if record.value is not None]
