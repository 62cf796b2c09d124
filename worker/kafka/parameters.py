"""The parameters topic: it is read, the last versions are kept, and those that contradict are refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from worker.errors import AdcascadeError, FailedError, InputError, OldVersionError, ParametersError
from worker.kafka.clients import END, TopicReader, offsets_of, partition_counts, readable_errors, record_of
from worker.kafka.connection import Connection, reason_of
from worker.metrics.observer import Metrics
from worker.runtime.supervision import Pauses, keep_running
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import check_same_model, other_kind
from worker.stream.slates import SlatePlanner, prepared
from worker.stream.topology import ONLY_PARTITION, Record, Topics
from worker.stream.versions import KEPT, RoundedError, Versions, check_same, keep, should_publish

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Milliseconds between a version and its record that show two clocks.
_ANOTHER_TIME: Final = 86_400_000
#: Seconds that a read waits for the next version; it returns as soon as there is one.
_WAIT: Final = 1.0
#: Seconds until the end of the topic is asked for again.
_RETRY: Final = 0.2


def published_versions(connection: Connection, topics: Topics) -> list[Parameters]:
    """Return the last versions of the parameters topic, oldest first."""
    partition_counts(connection, topics.parameters)
    kept: dict[int, Parameters] = {}
    with readable_errors(connection), TopicReader(connection) as reader:
        for parameters in decoded(reader.read_to_end(topics.parameters)):
            kept = keep(kept, parameters)
    return [kept[number] for number in sorted(kept)]


def decoded(records: Iterable[Record]) -> list[Parameters]:
    """Return the versions that can be decoded; workers count and log the others.

    One of an older release is an error: a worker that passed over it would begin afresh.
    """
    versions = []
    for record in records:
        if record.value is not None:
            try:
                versions.append(decode_parameters(record.value))
            except OldVersionError as error:
                raise InputError(f"{record.topic}, offset {record.offset}: {error}") from None
            except ParametersError:
                continue
    return versions


# ── in a worker ──────────────────────────────────────────────────────────────────────────────────────────────────────


class UnfitError(FailedError):
    """The configuration of this worker does not fit the published parameters, so that it cannot serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A record of the topic: the version that it holds, perhaps with its planner, or why it cannot be read."""

    offset: int
    timestamp: int
    parameters: Parameters | None = None
    planner: SlatePlanner | None = None
    error: AdcascadeError | None = None

    @property
    def published_at(self) -> int:
        """The time of publication, on the clock of the events; 0 if there is no version.

        The timestamp of the record is that. But where the events are of another time than the brokers, as in traffic of
        last year that is sent again, only `made_at` can be compared with them.
        """
        if self.parameters is None:
            return 0
        made_at = self.parameters.made_at
        return self.timestamp if abs(self.timestamp - made_at) < _ANOTHER_TIME else made_at


def received(
    record: Record, prepare: Callable[[Parameters], SlatePlanner | None] = lambda parameters: None
) -> Received:
    """Decode a record, in any thread."""
    parameters = planner = error = None
    if record.value is not None:
        try:
            parameters = decode_parameters(record.value)
            planner = prepare(parameters)
        except AdcascadeError as raised:
            error = raised
    return Received(
        offset=record.offset, timestamp=record.timestamp, parameters=parameters, planner=planner, error=error
    )


class PublishedParameters:
    """The published versions, and those that serve.

    A record that cannot be decoded, or that has another content for a known version, is refused: it is counted, logged
    and not used.

    Parameters
    ----------
    configured : version 0 by this worker's configuration; nothing is served before a version is published and read
    history : the versions published when the worker started
    """

    def __init__(self, configured: Parameters, history: Sequence[Parameters], metrics: Metrics) -> None:
        self._metrics = metrics
        self._configured = configured
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

    @property
    def newest(self) -> Parameters | None:
        """The newest published version."""
        return self._published.get(self.version)

    def content(self, version: int) -> Parameters | None:
        """Return a published version; None if it is not among the last."""
        return self._published.get(version)

    def handle(self, records: Iterable[Record]) -> None:
        """Take records of the topic."""
        self.take(map(received, records))

    def prepare(self, parameters: Parameters) -> SlatePlanner | None:
        """Prepare the planner of a version, in any thread, if it may serve and has none yet."""
        is_wanted = parameters.version > self.version - KEPT and self.content(parameters.version) is None
        return prepared(parameters) if is_wanted else None

    def take(self, versions: Iterable[Received]) -> None:
        """Take records of the topic that are decoded."""
        for record in versions:
            try:
                if record.error is not None:
                    raise record.error
                if record.parameters is not None:
                    self._take(record.parameters, record.planner, published_at=record.published_at)
            except UnfitError:
                raise
            except RoundedError as error:
                self._metrics.count("rounded_versions")
                log.info("parameters at offset %d are the same: %s", record.offset, error)
            except AdcascadeError as error:
                self._metrics.count("refused_versions")
                log.error("parameters at offset %d are refused: %s", record.offset, error)

    def _take(self, parameters: Parameters, planner: SlatePlanner | None = None, *, published_at: int = 0) -> None:
        number = parameters.version
        is_new = number not in self._published
        if not self._published:
            self._check_size(parameters)
            self.versions.replace_first(parameters)
        elif is_new:
            _check_kind(parameters, self._published[self.version])
        self._published = keep(self._published, parameters)
        self.versions.learn(parameters, planner, published_at=published_at)
        if is_new and number == self.version:  # not for what the topic still has of the past, after a start
            log.info("parameters version %d (%s…) received", number, parameters.sha256[:12])
        if number == self.version:
            self._metrics.version(parameters)

    def _check_size(self, first: Parameters) -> None:
        """Raise if another worker began with a model of another size; another catalogue or other settings may be."""
        try:
            check_same_model(self._configured.settings, first.settings)
        except InputError as error:
            raise UnfitError(f"another worker has published version {first.version}: {error}") from None

    def wants(self, parameters: Parameters) -> bool:
        """Return whether to publish a version; raise as `check_same` if it contradicts the topic."""
        try:
            if (known := self._published.get(parameters.version)) is not None:
                check_same(parameters, known)
            return should_publish(parameters, self.newest)
        except RoundedError:
            raise
        except FailedError:
            self._metrics.count("refused_versions")
            raise


def _check_kind(new: Parameters, known: Parameters) -> None:
    """Raise `ParametersError` for a version of another model: a model is of one kind for life, but for its features."""
    if name := other_kind(known.settings, new.settings):
        mine, theirs = getattr(known.settings, name), getattr(new.settings, name)
        raise ParametersError(
            f"version {new.version} has {name} {theirs}, version {known.version} has {mine}: "
            "it is of another model, whose writer needs topics of its own (--prefix)"
        )


# ── reading, in a thread ─────────────────────────────────────────────────────────────────────────────────────────────


class VersionReader:
    """Reads the topic in a thread of a worker or a gateway, which decodes, checks and prepares versions for serving.

    A thread is enough: decoding takes milliseconds, and factorising gives the interpreter up. The topic is read from
    its beginning, outside of any group: Faust's `GlobalTable` recovers in a loop when several workers run
    (faust-streaming issue 283).

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
                found = await asyncio.to_thread(offsets_of, self._admin, [self._place], END)
                self._end = found[self._place]
            except KafkaException as error:
                log.warning("the end of the parameters cannot be read: %s; trying again", reason_of(error))
                await asyncio.sleep(_RETRY)
        async with self._moved:
            await self._moved.wait_for(lambda: self.ready)

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
