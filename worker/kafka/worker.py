"""The worker on Kafka: the processors behind the transport, watched, with a small web server beside them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from aiokafka.errors import KafkaError
from faust.types import TP
from mode import Service

from worker.kafka.clients import run_client
from worker.kafka.control import published_versions
from worker.kafka.faust.app import Options, WorkerApp, build, partition_count, run
from worker.kafka.learning import fitting
from worker.kafka.processors import Partition, Published, clock_of, progress_record, step
from worker.kafka.transport import Ports, Report
from worker.metrics import Metrics
from worker.secret import Secret
from worker.stream.codec import Limits, decode_episode
from worker.stream.parameters import Arm, LearningSettings, Parameters
from worker.stream.serving import Serving
from worker.web.server import LOOPBACK, WebServer, operations
from worker.web.status import status_routes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """All that a worker is told.

    `learning` has everything but the dimension; that is `dim`, or what the published parameters say. `clock_file` is
    for tests (see `clock_of`).
    """

    transport: Options
    learning: LearningSettings
    dim: int | None = None
    arms: tuple[Arm, ...] = ()
    limits: Limits = field(default_factory=Limits)
    secret: Secret | None = None
    web_host: str = LOOPBACK
    web_port: int = 0
    clock_file: str | None = None


def run_worker(settings: WorkerSettings) -> int:
    """Run until SIGTERM or SIGINT (0) or a failure (1).

    Raises `FailedError` or `InputError` before anything is started if the broker, the topics or the settings will not
    do.
    """
    transport = settings.transport
    connection, names = transport.connection, transport.names
    partitions = run_client(connection, partition_count(connection, names))
    history = run_client(connection, published_versions(connection, names))
    learning = fitting(settings.learning, settings.dim, history)
    warn(settings, learning, history)
    metrics = Metrics()
    processors = Processors(settings, learning, history, metrics)
    app = build(transport, processors.ports(), partitions=partitions)
    app.companions = (*app.companions, Watch(app, processors, metrics))

    def why_not() -> str | None:
        return unready(app, processors.published)

    routes = {
        **operations(metrics.registry, why_not),
        **status_routes(metrics, runner="worker", unready=why_not, clock=processors.clock),
    }
    with WebServer(routes, host=settings.web_host, port=settings.web_port) as server:
        log.info(
            "worker: %s.* on %s, status page, metrics and health at %s",
            *(names.prefix, ",".join(connection.servers), server.url),
            extra={"fields": {"url": server.url, "partitions": partitions, "group": transport.group}},
        )
        code = run(app)
    log.info("worker: stopped", extra={"fields": {"code": code}})
    return code


def warn(settings: WorkerSettings, learning: LearningSettings, history: Sequence[Parameters]) -> None:
    """Say what may surprise in what the worker was told."""
    newest = history[-1] if history else None
    if newest is not None and learning != newest.settings:
        changed = [f.name for f in fields(learning) if getattr(learning, f.name) != getattr(newest.settings, f.name)]
        log.warning(
            "settings differ from those of version %d and hold from the next version on: %s",
            *(newest.version, ", ".join(changed)),
        )
    if newest is None and not settings.arms:
        log.warning(
            "there are no arms: every decision will be empty until `adcascade arms add` (or give --catalog FILE)"
        )


class Processors:
    """Makes the processors of one worker, and knows those that live."""

    def __init__(
        self,
        settings: WorkerSettings,
        learning: LearningSettings,
        history: Sequence[Parameters],
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self.clock = clock_of(settings.clock_file)
        self._partitions: list[Partition] = []
        self.published = Published(Parameters.first(learning, settings.arms), history, metrics)

    def ports(self) -> Ports:
        """Return them as the transport wants them."""
        return Ports(
            serve=self._serve,
            step=step,
            parameters=self.published,
            heard=self._heard,
            progress=progress_record,
            clock=self.clock,
        )

    def _serve(self, partition: int, partitions: int) -> Partition:
        settings, names = self._settings, self._settings.transport.names
        task = Partition(
            Serving(
                self.published.versions,
                partition=partition,
                topics=names,
                limits=settings.limits,
                secret=settings.secret,
            ),
            arrivals=names.arrivals,
            clock=self.clock,
            metrics=self._metrics,
            released=self._partitions.remove,
        )
        self._partitions.append(task)
        return task

    def _heard(self, report: Report) -> None:
        for episode in report.episodes:
            self._metrics.episode(decode_episode(bytes(episode)))
        if report.watermark:
            self._metrics.watermark(report.watermark)

    @property
    def progress(self) -> int:
        """How far the partitions of this worker are; 0 before all of them have said it."""
        return min((task.progress for task in self._partitions), default=0)

    def census(self) -> None:
        """Compare the accounts with what is in the tables; in the thread of the tasks."""
        broken = self._metrics.census(
            open_sessions=sum(task.serving.open_sessions for task in self._partitions),
            parked=sum(task.serving.parked for task in self._partitions),
        )
        wrong = {name: value for name, value in broken.items() if value}
        if wrong:
            log.error("the accounts do not balance: %s", wrong)


def unready(app: WorkerApp, parameters: Published) -> str | None:
    """Say why this worker does not serve at present, or None if it does."""
    if app.serving.failure is not None:
        return "it has failed and ends"
    if not app.broadcast.ready.is_set():
        return "the parameters are being read"
    if not app.may_read:
        return "it joins its group, or recovers its sessions"
    if parameters.version < 0:
        return "no parameters are published yet"
    return None


class Watch(Service):
    """Counts, every few seconds, what only looking can tell: lag, tables, who learns."""

    interval = 2.0

    def __init__(self, app: WorkerApp, processors: Processors, metrics: Metrics, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._app = app
        self._processors = processors
        self._metrics = metrics

    @Service.task
    async def _look(self) -> None:
        while not self.should_stop:
            self._processors.census()
            learns = self._app.seat.taken
            self._metrics.learning(learns)
            if not learns and self._processors.progress:
                self._metrics.watermark(self._processors.progress)  # its own part; the learner knows the whole
            try:
                await self._measure_lag()
            except KafkaError as error:
                log.debug("lag cannot be measured: %r", error)
            await self.sleep(self.interval)

    async def _measure_lag(self) -> None:
        app, names = self._app, self._app.names
        if not app.may_read:
            return
        behind = {"arrivals": 0, "clicks": 0, "journal": 0}
        reached = {tp: place for lane in app.serving.lanes.values() for tp, place in lane.acknowledged.items()}
        journal = TP(names.journal, 0)
        if app.seat.taken and app.seat.position >= 0:
            reached[journal] = app.seat.position
        if reached:
            ends = await app.batch_consumer.highwaters(*reached)
            for tp, place in reached.items():
                behind[tp.topic.removeprefix(f"{names.prefix}.")] += max(0, ends[tp] - place)
        for topic, records in behind.items():
            self._metrics.consumer_lag(topic, records)
