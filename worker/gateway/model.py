"""What a gateway must know of the published parameters: how records are judged, and the fallback ads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from worker.kafka.clients import TopicReader, record_of
from worker.kafka.connection import Connection, reason_of
from worker.kafka.parameters import decoded
from worker.stream.feature_changes import encoder_of
from worker.stream.features import ContextEncoder
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner
from worker.stream.topology import ONLY_PARTITION, Topics

log = logging.getLogger(__name__)

_POLL_WAIT: Final = 0.2  # seconds; the end of the gateway waits as long
_PAUSE: Final = 1.0  # seconds after an error


class PublishedModel:
    """The newest version of the parameters topic; `planner` is None until one is read.

    A thread reads and decodes: a version of 38,000 arms takes half a second. It calls `on_newest` with every newer
    version.
    """

    def __init__(self, connection: Connection, topics: Topics, on_newest: Callable[[Parameters], None]) -> None:
        self._connection, self._topic = connection, topics.parameters
        self._on_newest = on_newest
        self._stopping = threading.Event()
        self.planner: SlatePlanner | None = None
        #: Encodes named contexts; the names before the last change of features are understood as well.
        self.encoder: ContextEncoder | None = None

    @property
    def version(self) -> int:
        """The newest version, -1 before the first."""
        return -1 if self.planner is None else self.planner.parameters.version

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Read versions meanwhile."""
        thread = threading.Thread(target=self._follow, name="parameters", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            await asyncio.to_thread(thread.join)

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                self._read()
            except Exception as error:  # goes on in any case: nobody would notice that it does not
                log.warning("parameters cannot be read: %s; trying again", reason_of(error))
                self._stopping.wait(_PAUSE)

    def _read(self) -> None:
        with TopicReader(self._connection) as reader:
            reader.read_from({(self._topic, ONLY_PARTITION): 0})
            while not self._stopping.is_set():
                for parameters in decoded(map(record_of, reader.poll(_POLL_WAIT))):
                    self.adopt(parameters)

    def adopt(self, parameters: Parameters) -> None:
        """Use a version if it is newer than the present one, or the same from a newer position, with its accounts."""
        known = None if self.planner is None else self.planner.parameters
        if known is None or parameters.version > known.version:
            self.planner, self.encoder = SlatePlanner(parameters), encoder_of(parameters, [parameters])
            self._on_newest(parameters)
        elif self.planner and parameters.sha256 == known.sha256 and parameters.journal_offset > known.journal_offset:
            self.planner.parameters = parameters
