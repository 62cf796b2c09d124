"""The driver of a worker without Faust, threads and a broker: a test decides what becomes durable, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from faust.types import TP

from tests.embedded.traffic import ARMS, settings
from tests.transport.memory import Cluster, FakeProducer, Write
from worker.kafka.parameters import PublishedParameters
from worker.kafka.partitions import Partitions
from worker.kafka.polls import Flights, Poll, RecordList, Writer
from worker.metrics.observer import Metrics
from worker.runtime.clock import Clock, steady_clock
from worker.runtime.settings import ProcessSettings
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics

ZERO = Parameters.first(settings(), ARMS)


async def settle() -> None:
    """Let the loop run all callbacks."""
    for _ in range(5):
        await asyncio.sleep(0)


def new_partitions(
    topics: Topics, metrics: Metrics, zero: Parameters = ZERO, *, steady: Clock = steady_clock, **options: Any
) -> Partitions:
    """Return the partitions of a worker that has one published version."""
    published = PublishedParameters(zero, [zero], metrics)
    process = ProcessSettings(learner=(), learning=settings(), **options)
    return Partitions(published, process, topics, metrics, know_versions=settle, steady=steady)


class FakeWorker:
    """Partitions with a driver that does what a test says. It is app and consumer to them."""

    def __init__(self, kafka: Cluster, topics: Topics, partitions: Partitions) -> None:
        self.kafka, self.partitions = kafka, partitions
        self.settings = SimpleNamespace(topics=topics)
        self.producer = FakeProducer(kafka)
        self.writer = Writer(self.producer)  # type: ignore[arg-type]
        self.failure: BaseException | None = None
        self.flights = Flights(lambda error: self.fail(RuntimeError(error.str())))
        self.generation, self.number = 0, 0
        self.starts: dict[TP, int] = {}
        self.ends: dict[TP, int] = {}
        self.positions: dict[TP, int] = {}
        self.was_drained = False
        self.flow_active = True
        partitions.connect(self, self.writer)  # type: ignore[arg-type]

    driver = property(lambda self: self)
    pending = property(lambda self: self.producer.pending)

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.flights.forget()

    # ── what the driver does ─────────────────────────────────────────────────────────────────────────────────────────

    async def rebalance(self, partitions: Iterable[int]) -> None:
        """Revoke everything, and assign these partitions."""
        self.commit()
        self.was_drained = self.flights.are_idle
        self.generation += 1
        self.flights.forget()
        given, topics = list(partitions), self.settings.topics
        ends = {one: len(self.kafka.logs[TP(topics.changelog, one)]) for one in given}
        kept = self.partitions.keep(ends)
        tables = {one: self.kafka.table(topics.changelog, one) for one in given if one not in kept}
        await self.partitions.restore(tables, {one: ends[one] - 1 for one in tables})
        inputs = [TP(topic, one) for one in given for topic in (topics.arrivals, topics.clicks)]
        self.generation, self.number = self.generation + 1, 0
        self.starts = {tp: self.kafka.committed.get(tp, 0) for tp in inputs}
        self.ends = {tp: len(self.kafka.logs[tp]) for tp in inputs}
        self.positions = dict(self.starts)
        self.flights.begin(self.starts)

    def next_poll(self, most: int = 10**6) -> Poll | None:
        lists = []
        for tp, position in self.positions.items():
            records = self.kafka.logs[tp][position : position + most]
            if records:
                self.positions[tp] = position + len(records)
                lists.append(RecordList(tp, self.positions[tp], records))
        if not lists:
            return None
        self.number += 1
        return Poll(self.generation, self.number - 1, lists, 0.0)

    async def poll(self, most: int = 10**6) -> None:
        """Let the partitions handle the next records."""
        if (poll := self.next_poll(most)) is not None:
            await self.partitions.handle(poll)

    async def persist(self, write: Write) -> None:
        """Make a write durable, and report it."""
        self.producer.persist(write)
        self.flights.advance()
        await settle()

    async def persist_all(self) -> None:
        while self.pending:
            await self.persist(self.pending[0])

    def handled(self, generation: int) -> None:
        """There is always room."""

    def commit(self) -> None:
        self.kafka.committed |= self.flights.acknowledged

    async def highwaters(self, *partitions: TP) -> Mapping[TP, int]:
        return {tp: len(self.kafka.logs[tp]) for tp in partitions}
