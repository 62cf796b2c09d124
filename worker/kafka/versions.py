"""The reader of versions, in a thread of a worker or a gateway.

The thread decodes, checks and prepares versions for serving. A thread is enough: decoding takes milliseconds, and
factorising gives the interpreter up. The topic is read from its beginning, outside of any group: Faust's `GlobalTable`
recovers in a loop when several workers run (faust-streaming issue 283).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from worker.errors import AdcascadeError
from worker.kafka.clients import END, TopicReader, offsets_of, record_of
from worker.kafka.connection import Connection, reason_of
from worker.kafka.parameters import Received, received
from worker.runtime.supervision import Pauses, keep_running
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner
from worker.stream.topology import ONLY_PARTITION, Topics

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that a read waits for the next version; it returns as soon as there is one.
_WAIT: Final = 1.0
#: Seconds until the end of the topic is asked for again.
_RETRY: Final = 0.2


class VersionReader:
    """Reads the topic in a thread, for a worker or a gateway.

    Parameters
    ----------
    take : called in the loop with the next records
    prepare : makes the planner of a version, in the thread
    report : called with the reason while the topic cannot be read, and with an empty one when it can
    """

    #: Between a failure and the next try; never long, because a worker that takes partitions over has to wait for it.
    pauses = Pauses(most=4.0)

    def __init__(
        self,
        connection: Connection,
        topics: Topics,
        take: Callable[[list[Received]], None],
        *,
        prepare: Callable[[Parameters], SlatePlanner | None] = lambda parameters: None,
        report: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._connection = connection
        self._place = topics.parameters, ONLY_PARTITION
        self._take, self._prepare = take, prepare
        self._report = report
        self._position, self._has_versions = 0, False
        self._end: int | None = None  # of the topic, at the last request to catch up; None until it is known
        self._admin = AdminClient(connection.configuration())
        self._moved = asyncio.Condition()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="versions")

    @property
    def ready(self) -> bool:
        """Whether everything that was there at the last `catch_up` has been read, and at least one version."""
        return self._end is not None and self._end <= self._position and self._has_versions

    async def catch_up(self) -> None:
        """Return when everything is read that is in the topic now.

        A worker that takes a partition over has to know the versions that its last owner knew.
        """
        self._end = None
        while self._end is None:
            try:
                self._end = await asyncio.to_thread(self._find_end)
            except KafkaException as error:
                log.warning("the end of the parameters cannot be read: %s; trying again", reason_of(error))
                await asyncio.sleep(_RETRY)
        async with self._moved:
            await self._moved.wait_for(lambda: self.ready)

    def _find_end(self) -> int:
        return offsets_of(self._admin, [self._place], END)[self._place]

    async def run(self) -> None:
        """Read until cancelled; raise `UnfitError` if this worker cannot serve by a version."""
        try:
            await keep_running(self._read, self.pauses, self._on_end)
        finally:
            self._thread.shutdown(wait=False)

    async def _on_end(self, error: Exception | None, pause: float) -> None:
        if isinstance(error, AdcascadeError):
            raise error
        reason = reason_of(error) if isinstance(error, KafkaException) else repr(error)
        unexpected = None if isinstance(error, KafkaException) else error
        log.error("versions are read again in %g s: %s", pause, reason, exc_info=unexpected)
        self._report(reason)
        await asyncio.sleep(pause)

    async def _read(self) -> None:
        reader = await self._do(lambda: TopicReader(self._connection, fetch_wait_max_ms=500))
        try:
            reader.read_from({self._place: 0})
            while True:
                records = await self._do(lambda: self._poll(reader))
                self._take(records)
                self._has_versions |= any(record.parameters is not None for record in records)
                self._position = reader.positions[self._place]
                self._report("")
                async with self._moved:
                    self._moved.notify_all()
        finally:
            await self._do(reader.close)

    async def _do(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _poll(self, reader: TopicReader) -> list[Received]:  # in the thread
        return [received(record_of(message), self._prepare) for message in reader.poll(_WAIT)]
