"""The progress of each partition: the time up to which everything it got is in the journal."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from aiokafka.errors import KafkaError

from worker.kafka.clock import ComparedClock
from worker.kafka.pipeline import PartitionPipeline
from worker.kafka.pipelines import PartitionPipelines
from worker.kafka.transport import Transport
from worker.stream.encoding import encode_progress
from worker.stream.events import Progress

log = logging.getLogger(__name__)


class ProgressReporter:
    """Reads the clock, then the end offsets: records before those were sent before that time, or are late.

    The order matters. A pipeline writes its progress when everything before these offsets is acknowledged.
    """

    def __init__(
        self,
        pipelines: PartitionPipelines,
        transport: Transport,
        *,
        partitions: int,
        clock: ComparedClock,
        interval: float,
        write_timeout: float,
    ) -> None:
        self._pipelines = pipelines
        self._transport = transport
        self._partitions = partitions
        self._clock = clock
        self._interval = interval
        self._write_timeout = write_timeout

    async def run(self) -> None:
        """Set targets until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.set_targets()
            except KafkaError as error:
                log.warning("end offsets cannot be read: %r; trying again", error)
            self._pipelines.check_stalled(asyncio.get_running_loop().time(), self._write_timeout)

    async def set_targets(self) -> None:
        """Give a target to every pipeline that has reached its last one."""
        generation = self._pipelines.generation
        pipelines = [pipeline for pipeline in self._pipelines.by_partition.values() if pipeline.needs_target]
        if not pipelines or not self._pipelines.accepts(generation):
            return
        time = self._clock.earlier()
        ends = await self._transport.end_offsets([tp for pipeline in pipelines for tp in pipeline.expected])
        if not self._pipelines.accepts(generation):
            return
        for pipeline in pipelines:
            own = {tp: ends[tp] for tp in pipeline.expected}
            pipeline.set_target(time, own, partial(self._record, pipeline, time), self._clock.confirm)

    def _record(self, pipeline: PartitionPipeline, time: int) -> bytes:
        """Return the progress record; made when it is written, so that no session that was opened is missing."""
        opened = pipeline.task.opened
        return encode_progress(
            Progress(partition=pipeline.partition, partitions=self._partitions, time=time, opened=opened)
        )
