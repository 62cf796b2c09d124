"""The worker on Kafka: partition pipelines, its two processes, and what else runs beside them, on a transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition

from worker.kafka import protocol
from worker.kafka.catalogue_check import CatalogueCheck
from worker.kafka.clients import run_client
from worker.kafka.clock import clock_of
from worker.kafka.connection import Connection
from worker.kafka.learner_process import LearnerProcess
from worker.kafka.memory import (
    available_memory,
    collect_garbage_rarely,
    let_the_loop_go_first,
    reuse_memory,
    sessions_that_fit,
)
from worker.kafka.parameters import PublishedParameters, published_versions, with_dimension
from worker.kafka.pipelines import PartitionPipelines
from worker.kafka.processors import StreamProcessors
from worker.kafka.progress import ProgressReporter
from worker.kafka.supervision import supervised
from worker.kafka.topics import input_partitions, largest_record, largest_version
from worker.kafka.transport import Background, Transport
from worker.kafka.version_watch import VersionWatch
from worker.kafka.versions_process import VersionsProcess
from worker.kafka.watch import SettingsWatch, WatermarkWatch, different
from worker.metrics import Metrics
from worker.secret import Secret
from worker.stream.decoding import Limits
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings, ignored_scale
from worker.stream.sizes import check_size
from worker.stream.topology import MOST_BYTES, ONLY_PARTITION, Topics
from worker.web.server import LOOPBACK, WebServer, operations
from worker.web.status import status_routes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """How a worker is connected and paced; times are in seconds."""

    connection: Connection
    topics: Topics = field(default_factory=Topics)
    #: The command line of the learner process (see `worker.kafka.learner`).
    learner: tuple[str, ...]
    #: The command line of the versions process (see `worker.kafka.versions`).
    versions: tuple[str, ...]
    progress_interval: float = 1.0
    write_timeout: float = 120.0
    in_flight: int = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker.

    `learning` has everything but the dimension; that is `dim`, or that of the published parameters. `max_open_sessions`
    is by default what the memory holds. `clock_file` is for tests (see `clock_of`).
    """

    pipelines: PipelineSettings
    learning: LearningSettings
    dim: int | None = None
    arms: tuple[Arm, ...] = ()
    limits: Limits = field(default_factory=Limits)
    secret: Secret | None = None
    max_open_sessions: int | None = None
    web_host: str = LOOPBACK
    web_port: int = 0
    clock_file: str | None = None


class Worker:
    """The parts of a worker, on a transport whose inputs have so many partitions.

    `most_bytes` is the largest record that all output topics take.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        processors: StreamProcessors,
        transport: Transport,
        *,
        partitions: int,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.topics = settings.topics
        self.processors = processors
        self.transport = transport
        self.troubles = processors.troubles
        self.versions = VersionsProcess(settings.versions, processors.parameters, self.troubles)
        self.learner = LearnerProcess(settings.learner, processors.on_learner_status, self.troubles)
        self.version_watch = VersionWatch(
            self.troubles, clock=processors.clock.earlier, opened=lambda: processors.opened
        )
        processors.parameters.watch(self.version_watch.received)
        self.pipelines = PartitionPipelines(
            transport,
            settings.topics,
            make_task=processors.make_task,
            handle_together=processors.handle_together,
            parameters_ready=lambda: self.versions.ready,
            refresh_parameters=self.versions.catch_up,
            on_stages=processors.on_stages,
            assign_journal=self.learner.assign,
            limit=settings.in_flight,
            most_bytes=most_bytes,
        )
        self._progress = ProgressReporter(
            self.pipelines,
            transport,
            partitions=partitions,
            clock=processors.clock,
            interval=settings.progress_interval,
            write_timeout=settings.write_timeout,
        )
        self._partitions = partitions
        self._most_bytes = most_bytes

    def run(self, *background: Background) -> int:
        """Run until SIGTERM or SIGINT (0) or a failure (1). The caller configures logging."""
        protocol.install()
        collect_garbage_rarely()
        let_the_loop_go_first()
        reuse_memory()
        own = (self.versions.run, self.learner.run, self._progress.run)
        tasks = [supervised(task, self.troubles) for task in (*own, *background)]
        return self.transport.run(
            self.pipelines,
            partitions=self._partitions,
            background=tasks,
            most_bytes=self._most_bytes,
        )

    @property
    def serves(self) -> bool:
        """Whether records are read."""
        return self.pipelines.accepts(self.pipelines.generation)

    def unready(self) -> str | None:
        """Return why this worker does not serve at present, or None if it does."""
        if self.pipelines.failure is not None:
            return "it has failed and ends"
        if self.processors.parameters.version < 0:
            return "no parameters are published yet: the learner of one worker publishes version 0"
        if not self.versions.ready:
            return "the parameters are being read"
        if not self.serves:
            return "it joins its group, or recovers its sessions"
        return None


def run_worker(settings: WorkerSettings, transport: Transport) -> int:
    """Run until SIGTERM or SIGINT (0) or a failure (1).

    Raises `FailedError` or `InputError` before anything is started if the broker, the topics or the settings will not
    do.
    """
    connection, topics = settings.pipelines.connection, settings.pipelines.topics
    partitions = run_client(connection, input_partitions(connection, topics))
    most_bytes = run_client(connection, largest_record(connection, topics))
    history = run_client(connection, published_versions(connection, topics))
    learning = with_dimension(settings.learning, settings.dim, history)
    first = Parameters.first(learning, settings.arms)
    if not history:
        most = run_client(connection, largest_version(connection, topics))
        check_size(first.arms, first.model, most, settings=first.settings)
    warn(settings, learning, history)
    most_sessions = settings.max_open_sessions or sessions_that_fit(learning.dim, learning.horizon, available_memory())
    metrics = Metrics()
    catalogue = CatalogueCheck(settings.arms, metrics.troubles)
    catalogue.start(history[-1] if history else None)
    processors = StreamProcessors(
        PublishedParameters(first, history, metrics),
        topics,
        metrics,
        clock=clock_of(settings.clock_file),
        limits=settings.limits,
        secret=settings.secret,
        max_open_sessions=most_sessions,
        partitions=partitions,
        most_bytes=most_bytes,
    )
    worker = Worker(settings.pipelines, processors, transport, partitions=partitions, most_bytes=most_bytes)
    routes = {
        **operations(metrics.registry, worker.unready, metrics.trouble_lines),
        **status_routes(metrics, runner="worker", unready=worker.unready, clock=processors.clock),
    }
    with WebServer(routes, host=settings.web_host, port=settings.web_port) as server:
        log.info(
            "worker: %s.* on %s, status page, metrics and health at %s",
            *(topics.prefix, ",".join(connection.servers), server.url),
            extra={"fields": {"url": server.url, "partitions": partitions, "max_open_sessions": most_sessions}},
        )
        code = worker.run(WorkerMonitor(worker, metrics, learning, catalogue).run)
    log.info("worker: stopped", extra={"fields": {"code": code}})
    return code


def warn(settings: WorkerSettings, learning: LearningSettings, history: Sequence[Parameters]) -> None:
    """Log settings that may surprise."""
    newest = history[-1] if history else None
    if newest is not None and (changed := different(learning, newest.settings)):
        log.warning(
            "settings differ from those of version %d; if this worker learns, they hold from the next version on: %s",
            *(newest.version, ", ".join(changed)),
        )
    if newest is not None and (line := ignored_scale(settings.learning, newest.settings)):
        log.warning(line)
    if newest is None and not settings.arms:
        log.warning(
            "there are no arms: every decision will be empty until `adcascade arms add` (or give --catalog FILE)"
        )


class WorkerMonitor:
    """Measures every few seconds what no event reports: lag, balance of the accounts, whether the learner is here."""

    interval = 2.0

    def __init__(self, worker: Worker, metrics: Metrics, learning: LearningSettings, catalogue: CatalogueCheck) -> None:
        self._worker = worker
        self._catalogue = catalogue
        self._watermark = WatermarkWatch(metrics.troubles)
        self._settings = SettingsWatch(learning, metrics.troubles)
        self._processors = worker.processors
        self._metrics = metrics

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self._processors.check_accounts()
            self._worker.learner.check()
            self._worker.versions.check()
            self._worker.version_watch.check()
            learns = self._worker.learner.running
            self._metrics.learning(learns)
            if not learns and self._processors.progress:
                self._metrics.watermark(self._processors.progress)  # of its own partitions; the learner has the whole
            self.look_for_troubles()
            try:
                await self.measure_lag()
            except KafkaError as error:
                log.debug("lag cannot be measured: %r", error)
            await asyncio.sleep(self.interval)

    def look_for_troubles(self) -> None:
        """Report what lasts: another catalogue, other settings, a watermark that stands still."""
        worker, parameters, learner = self._worker, self._processors.parameters, self._worker.learner
        self._catalogue.again(parameters.history)
        if parameters.version >= 0:
            published = parameters.history[-1]
            self._settings.look(published.version, published.settings, learns=learner.running)
        if worker.serves and learner.running:
            self._watermark.look(learner.watermark, slowest=learner.slowest)
        else:
            self._watermark.pause()

    async def measure_lag(self) -> None:
        """Count the records between the acknowledged positions and the ends of the topics."""
        worker, topics = self._worker, self._worker.topics
        if not worker.serves:
            return
        lag = {"arrivals": 0, "clicks": 0, "journal": 0}
        reached = worker.pipelines.committable()
        if worker.learner.running and worker.learner.position >= 0:
            reached[TopicPartition(topics.journal, ONLY_PARTITION)] = worker.learner.position
        if reached:
            ends = await worker.transport.end_offsets(reached)
            for tp, position in reached.items():
                lag[tp.topic.removeprefix(f"{topics.prefix}.")] += max(0, ends[tp] - position)
        for topic, records in lag.items():
            self._metrics.consumer_lag(topic, records)
