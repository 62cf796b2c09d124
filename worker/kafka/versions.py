"""The versions process: reads the parameters topic, decodes, checks and prepares its versions for the worker.

`worker.kafka.versions_process` starts and kills this process. Its standard input is a socket: over it go reports and,
as open files, the versions, and requests come back. It ends when the socket is closed, that is with its worker, however
that ends. It shares the worker's standard error for its log.

The topic is read from its beginning, outside of any group. Faust's `GlobalTable` recovers in a loop when several
workers run (faust-streaming issue 283).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import socket
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition

from worker.child import ignore_signals
from worker.errors import AdcascadeError, FailedError
from worker.kafka.channel import Channel
from worker.kafka.clients import standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.records import plain
from worker.kafka.shared_arrays import write_parts
from worker.kafka.version_messages import Republished, VersionsReport, VersionsRequest
from worker.stream.handover import prepared, take_apart
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner
from worker.stream.topology import ONLY_PARTITION, Record, Topics
from worker.stream.version_decoding import decode_parameters, known_content
from worker.stream.versions import KEPT

log = logging.getLogger(__name__)

#: How much lower the priority of this process is: users wait for decisions, not for versions. But a version has to be
#: read in half of the lateness, also on busy cores, of which the process then gets a quarter.
NICE = 5
#: Milliseconds that a read waits for the next version; it returns as soon as there is one.
IDLE = 20_000
#: Seconds until the end of the topic is asked for again.
_RETRY = 0.2

_decode = msgspec.json.Decoder(VersionsRequest).decode


def run_versions(connection: Connection, topics: Topics) -> int:
    """Read and prepare versions until the standard input is closed; return 1 after a failure."""
    os.nice(NICE)
    ignore_signals()
    gc.freeze()

    async def read(channel: Channel) -> None:
        async with standalone_consumer(connection, fetch_max_wait_ms=IDLE) as consumer:
            await VersionsReader(consumer, TopicPartition(topics.parameters, ONLY_PARTITION), channel).run()

    return asyncio.run(run_reader(read))


async def run_reader(read: Callable[[Channel], Awaitable[None]]) -> int:
    """Read with a channel to the worker; report a failure and return 1."""
    channel = Channel(socket.socket(fileno=os.dup(0)))
    failure = "it has ended"
    try:
        await read(channel)
    except AdcascadeError as error:
        failure = str(error)
    except KafkaError as error:
        failure = f"parameters cannot be read: {error!r}"
    except Exception as error:
        log.exception("the versions process failed")
        failure = f"{type(error).__name__}: {error}"
    await _report(channel, VersionsReport(failure=failure))
    return 1


async def _report(channel: Channel, report: VersionsReport, file: int | None = None) -> None:
    try:
        await channel.send(msgspec.json.encode(report), file)
    except ConnectionError:
        os._exit(0)  # the worker has ended


class VersionsReader:
    """Reads the topic, and hands one version after the other to the worker."""

    def __init__(self, consumer: AIOKafkaConsumer, tp: TopicPartition, channel: Channel) -> None:
        self._consumer = consumer
        self._tp = tp
        self._channel = channel
        self._known: dict[int, str] = {}
        self._told = asyncio.Event()
        self._asked = -1
        self._question = asyncio.Event()

    async def run(self) -> None:
        """Read until the worker ends, or something fails."""
        self._consumer.assign([self._tp])
        await self._consumer.seek_to_beginning(self._tp)
        await asyncio.gather(self._listen(), self._answer(), self._read())

    async def _listen(self) -> None:
        while (line := await self._channel.receive()) is not None:
            request = _decode(line)
            if request.known is not None:
                self._known = request.known
                self._told.set()
            if request.asked >= 0:
                self._asked = request.asked
                self._question.set()
        os._exit(0)  # the worker has ended

    async def _answer(self) -> None:
        """Answer the question where the topic ends."""
        while True:
            await self._question.wait()
            self._question.clear()
            asked = self._asked
            try:
                end = (await self._consumer.end_offsets([self._tp]))[self._tp]
            except KafkaError as error:
                log.warning("the end of the parameters cannot be read: %r; trying again", error)
                await asyncio.sleep(_RETRY)
                self._question.set()
            else:
                await _report(self._channel, VersionsReport(asked=asked, end=end))

    async def _read(self) -> None:
        await self._told.wait()
        while True:
            try:
                fetched = await self._consumer.getmany(self._tp, timeout_ms=IDLE)
                position = await self._consumer.position(self._tp)
            except KafkaError as error:
                log.warning("parameters cannot be read: %r; trying again", error)
                await asyncio.sleep(1.0)
                continue
            for record in fetched.get(self._tp, ()):
                await self._pass_on(plain(record))
            await _report(self._channel, VersionsReport(position=position))

    async def _pass_on(self, record: Record) -> None:
        if record.value is None:
            return
        if (again := self._republished(record.value)) is not None:
            report = VersionsReport(offset=record.offset, timestamp=record.timestamp, again=again)
            await _report(self._channel, report)
            return
        try:
            parameters = decode_parameters(record.value)
            parameters.sha256  # noqa: B018 - computed here, once
        except AdcascadeError as error:
            report = VersionsReport(offset=record.offset, timestamp=record.timestamp, error=str(error))
            await _report(self._channel, report)
            return
        await self._hand_over(parameters, record)
        del parameters
        _return_memory()

    def _republished(self, value: bytes) -> Republished | None:
        document = known_content(value, self._known)
        try:
            return None if document is None else msgspec.convert(document, Republished, str_keys=True)
        except msgspec.ValidationError:
            return None  # decoding it says what is wrong

    async def _hand_over(self, parameters: Parameters, record: Record) -> None:
        # Also a known version with another content, which the worker compares and refuses.
        is_old = parameters.version <= max(self._known, default=-1) - KEPT
        skipped = is_old or parameters.version in self._known
        parts = take_apart(SlatePlanner(parameters) if skipped else prepared(parameters))
        texts = {name: np.frombuffer(getattr(parts, name), np.uint8) for name in ("record", "arms")}
        try:
            file, places = write_parts({**texts, **parts.arrays})
        except OSError as error:
            raise FailedError(f"version {parameters.version} cannot be handed to the worker: {error}") from None
        self._told.clear()
        try:
            report = VersionsReport(
                offset=record.offset, timestamp=record.timestamp, parts=places, prepared=not skipped
            )
            await _report(self._channel, report, file)
        finally:
            os.close(file)
        await self._told.wait()


def _return_memory() -> None:
    """Return the memory of a version to the system, where the library is glibc: the next one comes much later."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
