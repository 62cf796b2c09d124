"""The transport of production (see `worker.kafka.transport`): a Faust app with a driver that moves lists of records."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import faust
from aiokafka.structs import TopicPartition

from worker.errors import AdcascadeError
from worker.kafka.faust import compat
from worker.kafka.faust.app import WorkerApp, build
from worker.kafka.faust.driver import BatchConsumer, BatchProducer
from worker.kafka.faust.link import FaustOptions, Link
from worker.kafka.producing import ProduceRequests
from worker.kafka.transport import Background, PartitionOwner, PartitionWriter
from worker.kafka.writer import TopicWriters
from worker.stream.topology import MOST_BYTES

log = logging.getLogger(__name__)


class FaustTransport:
    """Implements `Transport` with one Faust app."""

    def __init__(self, options: FaustOptions) -> None:
        self._options = options
        self._app: WorkerApp | None = None
        self._topic_writers: TopicWriters | None = None
        self._ending: asyncio.Task[None] | None = None
        self.can_write = False

    @property
    def _consumer(self) -> BatchConsumer:
        assert self._app is not None
        return cast(BatchConsumer, self._app.consumer)

    @property
    def is_member(self) -> bool:
        """Whether the group cannot have assigned the partitions of this worker to others yet."""
        return self._consumer.is_member

    @property
    def _writers(self) -> TopicWriters:
        if self._topic_writers is None:
            assert self._app is not None
            producer = cast(BatchProducer, self._app.producer).aiokafka
            self._topic_writers = TopicWriters(producer, ProduceRequests(producer))
        return self._topic_writers

    def writer(self, topic: str, partition: int) -> PartitionWriter:
        """Return the writer of a partition."""
        return self._writers.writer(topic, partition)

    def flush(self) -> None:
        """Send what was written."""
        self._writers.flush()

    async def _load_metadata(self) -> None:
        topics = self._options.topics
        await self._writers.load_metadata(topics.journal, topics.dead_letters, topics.changelog, topics.decisions)
        self.can_write = True

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the end offsets of assigned partitions."""
        return await self._consumer.highwaters(*partitions)

    def read_again(self, tp: TopicPartition, offset: int) -> None:
        """Continue reading a partition at `offset`."""
        self._consumer.read_again(tp, offset)

    def fail(self, error: BaseException) -> None:
        """End the process with an error and commit nothing."""
        assert self._app is not None
        log.critical("the worker ends: %s", error, exc_info=None if isinstance(error, AdcascadeError) else error)
        _end_within(self._options.stop_timeout)
        self._ending = asyncio.get_running_loop().create_task(self._app.crash(error))

    def run(
        self, owner: PartitionOwner, *, partitions: int, background: Sequence[Background], most_bytes: int = MOST_BYTES
    ) -> int:
        """Run until SIGTERM or SIGINT (0) or a failure (1)."""
        compat.check()
        options = replace(self._options, batch_bytes=min(self._options.batch_bytes, most_bytes))
        self._app = build(
            Link(options, owner),
            partitions=partitions,
            background=tuple(background),
            load_metadata=self._load_metadata,
        )
        loop = asyncio.new_event_loop()
        process = _FaustProcess(self._app, loop=loop, override_logging=False, quiet=True, redirect_stdouts=False)
        process.spinner = None
        try:
            process.execute_from_commandline()
        except SystemExit as ended:
            code = ended.code
        return 1 if code or self._ending is not None else 0


class _FaustProcess(faust.Worker):
    """Runs the app until a signal or a failure, and ends in any case."""

    def _flag_as_shutdown_by_signal(self) -> None:
        _end_within(cast(WorkerApp, self.app).link.options.stop_timeout)
        super()._flag_as_shutdown_by_signal()

    def _enter_debugger(self) -> None:
        # At SIGUSR2, mode would wait at the prompt of a debugger, and the worker would serve nobody.
        self._on_sigusr1()


def _end_within(seconds: float) -> None:
    """End the process, whatever hangs: a flush to a broker that is gone waits for ever."""

    def end() -> None:
        sys.stderr.write(f"adcascade: not stopped within {seconds:g} s; killed (uncommitted records are repeated)\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
