"""Tells each partition, about once a second, up to which time it could be done."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from aiokafka.errors import KafkaError
from mode import Service

from worker.kafka.transport import Ports

if TYPE_CHECKING:
    from worker.kafka.faust.app import WorkerApp

log = logging.getLogger(__name__)


class Progress(Service):
    """Reads the clock, then the end offsets: what comes before those was sent before that time, or is late.

    The order matters. The lanes write the record when everything before these offsets is acknowledged.
    """

    def __init__(self, app: WorkerApp, ports: Ports, *, interval: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._app = app
        self._ports = ports
        self._interval = interval

    @Service.task
    async def _tick(self) -> None:
        while not self.should_stop:
            await self.sleep(self._interval)
            try:
                await self._aim()
            except KafkaError as error:
                log.warning("end offsets cannot be read: %r; trying again", error)
            serving = self._app.serving
            serving.check_stalled(asyncio.get_running_loop().time(), self._app.options.write_patience)

    async def _aim(self) -> None:
        serving = self._app.serving
        generation = self._app.consumer_generation_id
        lanes = [lane for lane in serving.lanes.values() if lane.wants_target]
        if not lanes or not self._app.may_read:
            return
        time = self._ports.clock()
        ends = await self._app.batch_consumer.highwaters(*(tp for lane in lanes for tp in lane.expected))
        if not serving.is_open(generation):
            return
        for lane in lanes:
            record = self._ports.progress(lane.partition, self._app.partitions, time)
            lane.aim(time, {tp: ends[tp] for tp in lane.expected}, record)
