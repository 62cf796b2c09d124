"""The parameters topic: read its versions, keep the last of them, refuse those that contradict."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition

from worker.errors import AdcascadeError, FailedError, InputError, ParametersError
from worker.kafka.clients import partition_counts, read_to_end, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.records import plain
from worker.metrics import Metrics
from worker.stream.learner import should_publish
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import LearningSettings
from worker.stream.topology import ONLY_PARTITION, Record, Topics
from worker.stream.versions import Versions, keep

log = logging.getLogger(__name__)


async def published_versions(connection: Connection, topics: Topics) -> list[Parameters]:
    """Return the last versions of the parameters topic, oldest first."""
    await partition_counts(connection, topics.parameters)
    async with standalone_consumer(connection) as consumer:
        return last_versions(decoded(await read_to_end(consumer, topics.parameters)))


def decoded(records: Iterable[Record]) -> list[Parameters]:
    """Return the versions that can be decoded; workers count and log the others."""
    versions = []
    for record in records:
        if record.value is not None:
            try:
                versions.append(decode_parameters(record.value))
            except ParametersError:
                continue
    return versions


def last_versions(versions: Iterable[Parameters]) -> list[Parameters]:
    """Return the last versions by number, oldest first (see `keep`)."""
    kept: dict[int, Parameters] = {}
    for parameters in versions:
        kept = keep(kept, parameters)
    return [kept[number] for number in sorted(kept)]


def with_dimension(learning: LearningSettings, dim: int | None, history: Sequence[Parameters]) -> LearningSettings:
    """Return the settings with the given dimension, else with that of the published parameters.

    Raises `InputError` if there is neither, or if they differ.
    """
    newest = history[-1].settings.dim if history else None
    if dim is None and newest is None:
        raise InputError("--dim is missing: how many numbers has a context? (no parameters are published yet)")
    if dim is not None and newest is not None and dim != newest:
        raise InputError(
            f"--dim is {dim}, but the published parameters have {newest}: a model of another size needs "
            "topics of its own (--prefix)"
        )
    return replace(learning, dim=dim or newest or 0)


# ── in a worker ──────────────────────────────────────────────────────────────────────────────────────────────────────


class PublishedParameters:
    """The published versions, and those that serve.

    A record that cannot be decoded, or that has another content for a known version, is refused: it is counted, logged
    and not used.

    Parameters
    ----------
    configured : version 0 by this worker's configuration; serves if nothing is published yet
    history : the versions published when the worker started
    """

    def __init__(self, configured: Parameters, history: Sequence[Parameters], metrics: Metrics) -> None:
        self._metrics = metrics
        self._published: dict[int, Parameters] = {}
        self.versions = Versions(history[0] if history else configured)
        for parameters in history:
            self._take(parameters)

    @property
    def version(self) -> int:
        """The highest version published, -1 before the first."""
        return max(self._published, default=-1)

    @property
    def history(self) -> tuple[Parameters, ...]:
        """The last published versions, oldest first."""
        return tuple(parameters for _, parameters in sorted(self._published.items()))

    def handle(self, records: Sequence[Record]) -> None:
        """Take records of the topic."""
        for record in records:
            if record.value is None:
                continue
            try:
                self._take(decode_parameters(record.value))
            except AdcascadeError as error:
                self._metrics.refused()
                log.error("parameters at offset %d are refused: %s", record.offset, error)

    def _take(self, parameters: Parameters) -> None:
        number = parameters.version
        is_new = number not in self._published
        # Before `learn`, which raises: the learner goes by the topic even where this worker served its own version 0.
        self._published = keep(self._published, parameters)
        self.versions.learn(parameters)
        if is_new:
            log.info("parameters version %d (%s…) received", number, parameters.sha256[:12])
        if number == self.version:
            self._metrics.version(parameters)

    def wants(self, parameters: Parameters) -> bool:
        """Return whether to publish a version; raise `FailedError` if it contradicts the topic."""
        try:
            return should_publish(parameters, self._published.get(self.version))
        except FailedError:
            self._metrics.refused()
            raise


class ParametersReader:
    """Reads the parameters topic from its beginning, in every worker, outside of the group.

    Faust's `GlobalTable` recovers in a loop when several workers run (faust-streaming issue 283).
    """

    def __init__(self, connection: Connection, topics: Topics, published: PublishedParameters) -> None:
        self._connection = connection
        self._tp = TopicPartition(topics.parameters, ONLY_PARTITION)
        self._published = published
        #: Whether everything that was there at the start has been read.
        self.ready = False

    async def run(self) -> None:
        """Pass the versions on until cancelled; errors of the broker are logged and retried."""
        async with standalone_consumer(self._connection) as consumer:
            consumer.assign([self._tp])
            await consumer.seek_to_beginning(self._tp)
            end = (await consumer.end_offsets([self._tp]))[self._tp]
            while True:
                try:
                    fetched = await consumer.getmany(self._tp, timeout_ms=200)
                    position = await consumer.position(self._tp)
                except KafkaError as error:
                    log.warning("parameters cannot be read: %r; trying again", error)
                    await asyncio.sleep(1.0)
                    continue
                if records := [plain(record) for record in fetched.get(self._tp, ())]:
                    self._published.handle(records)
                self.ready = self.ready or position >= end
