"""What a gateway must know of the published parameters: how records are judged, and the fallback ads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition

from worker.kafka.clients import partition_counts, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.parameters import decoded
from worker.kafka.records import plain
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner
from worker.stream.topology import ONLY_PARTITION, Topics

log = logging.getLogger(__name__)

_POLL: Final = 1_000  # milliseconds
_PAUSE: Final = 1.0  # seconds after a failed fetch


class PublishedModel:
    """The newest version of the parameters topic; `planner` is None until one is read.

    `on_newest` is called with every newer version.
    """

    def __init__(self, connection: Connection, topics: Topics, on_newest: Callable[[Parameters], None]) -> None:
        self._connection = connection
        self._tp = TopicPartition(topics.parameters, ONLY_PARTITION)
        self._on_newest = on_newest
        self.planner: SlatePlanner | None = None

    async def check(self) -> None:
        """Raise `FailedError` if there is no such topic."""
        await partition_counts(self._connection, self._tp.topic)

    @property
    def version(self) -> int:
        """The newest version, -1 before the first."""
        return -1 if self.planner is None else self.planner.parameters.version

    async def follow(self) -> None:
        """Read versions until cancelled; errors of the broker are logged, and reading begins anew."""
        while True:
            try:
                await self._read()
            except (KafkaError, OSError) as error:
                log.warning("parameters cannot be read: %r; trying again", error)
                await asyncio.sleep(_PAUSE)

    async def _read(self) -> None:
        async with standalone_consumer(self._connection, fetch_max_wait_ms=500) as consumer:
            consumer.assign([self._tp])
            await consumer.seek_to_beginning(self._tp)
            while True:
                fetched = await consumer.getmany(self._tp, timeout_ms=_POLL)
                if records := [plain(record) for record in fetched.get(self._tp, ())]:
                    # Not in the loop that answers: a version of 38,000 arms takes half a second.
                    self.take(await asyncio.to_thread(decoded, records))

    def take(self, versions: list[Parameters]) -> None:
        """Take the newest of some versions, if it is newer."""
        for parameters in versions:
            if parameters.version > self.version:
                self.planner = SlatePlanner(parameters)
                self._on_newest(parameters)
