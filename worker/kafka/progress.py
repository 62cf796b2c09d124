"""The progress of each partition: the time up to which everything it got is in the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaException
from faust.types import TP

from worker.errors import FailedError
from worker.kafka.app import WorkerApp
from worker.kafka.connection import reason_of
from worker.runtime.clock import ComparedClock
from worker.stream.events import Progress, encode_event
from worker.stream.topology import ONLY_PARTITION

log = logging.getLogger(__name__)


class ProgressReporter:
    """Reads the clock, then the end offsets: records before those were sent before that time, or are late.

    The order matters. Progress is written when everything before these offsets is acknowledged; a partition that lags
    keeps its target and so holds time back.

    Parameters
    ----------
    count : the number of partitions of the inputs
    interval : seconds between two records of a partition
    """

    def __init__(self, *, count: int, clock: ComparedClock, interval: float) -> None:
        self._count = count
        self._clock = clock
        self._interval = interval
        self._waiting: dict[int, asyncio.Task[None]] = {}

    async def run(self, app: WorkerApp) -> None:
        """Report until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._interval)
                try:
                    await self._look(app)
                except (KafkaException, FailedError) as error:
                    log.warning("end offsets cannot be read: %s; trying again", reason_of(error))
        finally:
            for task in self._waiting.values():
                task.cancel()

    async def _look(self, app: WorkerApp) -> None:
        """Give a target to every partition that has reached its last one."""
        consumer, topics = app.driver, app.settings.topics
        generation = consumer.generation
        self._waiting = {partition: task for partition, task in self._waiting.items() if not task.done()}
        inputs = {
            partition: [TP(topics.arrivals, partition), TP(topics.clicks, partition)]
            for partition in app.partitions.servings
            if partition not in self._waiting and TP(topics.arrivals, partition) in consumer.starts
        }
        if not inputs or not consumer.flow_active:
            return
        time = self._clock.earlier()
        ends = await consumer.highwaters(*(tp for tps in inputs.values() for tp in tps))
        if generation != consumer.generation:
            return
        for partition, tps in inputs.items():
            work = self._report(app, partition, time, {tp: ends[tp] for tp in tps})
            self._waiting[partition] = asyncio.create_task(work)

    async def _report(self, app: WorkerApp, partition: int, time: int, ends: Mapping[TP, int]) -> None:
        """Write progress when everything before `ends` is acknowledged."""
        await app.driver.flights.reached(ends)
        if partition not in app.partitions.servings:
            return
        record = Progress(partition=partition, partitions=self._count, time=time)
        topic = app.settings.topics.journal
        try:
            written = await app.writer.write_one(topic, ONLY_PARTITION, encode_event(record))
        except KafkaException as error:
            app.fail(FailedError(f"progress was not acknowledged: {reason_of(error)}"))
            return
        kind, stamp = written.timestamp()
        is_brokers = kind == TIMESTAMP_LOG_APPEND_TIME  # else that of the producer, which the topic keeps
        if not is_brokers or self._clock.confirm(stamp, written_at=time):
            app.partitions.acknowledge(partition, time)
