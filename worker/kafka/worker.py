"""A worker on Kafka, from its settings to its end: checks, the parts of the Faust app, the status page."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from worker.http.pages import operations
from worker.http.server import WebServer
from worker.kafka.app import WorkerApp, run_app, worker_app
from worker.kafka.driver import DriverOptions
from worker.kafka.monitor import WorkerMonitor
from worker.kafka.parameters import PublishedParameters, published_versions, with_dimension
from worker.kafka.partitions import Partitions
from worker.kafka.processors import StreamProcessors
from worker.kafka.progress import ProgressReporter
from worker.kafka.settings import WorkerSettings
from worker.kafka.topics import compressed_inputs, input_partitions, largest_record, largest_version
from worker.kafka.versions import VersionReader
from worker.metrics import Metrics
from worker.runtime.clock import clock_of
from worker.runtime.learner_process import LearnerProcess
from worker.runtime.memory import (
    available_memory,
    collect_garbage_rarely,
    let_the_loop_go_first,
    sessions_that_fit,
)
from worker.runtime.supervision import supervised
from worker.runtime.watch import CatalogueCheck, different
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings, ignored_scale
from worker.stream.version_records import check_size
from worker.web.status import status_routes

log = logging.getLogger(__name__)


def run_worker(settings: WorkerSettings) -> int:
    """Run until SIGTERM or SIGINT (0) or a failure (1). The caller configures logging.

    Raises `FailedError` or `InputError` before anything is started if the broker, the topics or the settings will not
    do.
    """
    connection, topics = settings.connection, settings.topics
    count = input_partitions(connection, topics)
    most_bytes = largest_record(connection, topics)
    history = published_versions(connection, topics)
    learning = with_dimension(settings.learning, settings.dim, history)
    first = Parameters.first(learning, settings.arms)
    if not history:
        check_size(first, largest_version(connection, topics))
    for line in compressed_inputs(connection, topics):
        log.warning(line)
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
        partitions=count,
        most_bytes=most_bytes,
    )
    worker = Worker(settings, processors, learning, catalogue, metrics, count=count, most_bytes=most_bytes)
    routes = {
        **operations(metrics.registry, worker.unready, metrics.trouble_lines),
        **status_routes(metrics, runner="worker", unready=worker.unready, clock=processors.clock),
    }
    with WebServer(routes, host=settings.web_host, port=settings.web_port) as server:
        log.info(
            "worker: %s.* on %s, status page, metrics and health at %s",
            *(topics.prefix, ",".join(connection.servers), server.url),
            extra={"fields": {"url": server.url, "partitions": count, "max_open_sessions": most_sessions}},
        )
        code = worker.run()
    log.info("worker: stopped", extra={"fields": {"code": code}})
    return code


class Worker:
    """The parts of a worker whose inputs have `count` partitions."""

    def __init__(
        self,
        settings: WorkerSettings,
        processors: StreamProcessors,
        learning: LearningSettings,
        catalogue: CatalogueCheck,
        metrics: Metrics,
        *,
        count: int,
        most_bytes: int,
    ) -> None:
        troubles, topics = metrics.troubles, settings.topics
        self._parameters = processors.parameters
        self._versions = VersionReader(settings.connection, topics, processors.parameters, troubles)
        learner = LearnerProcess(settings.learner, processors.on_learner_status, troubles)
        partitions = Partitions(processors, topics, know_versions=self._versions.catch_up, most_bytes=most_bytes)
        progress = ProgressReporter(count=count, clock=processors.clock, interval=settings.progress_interval)
        monitor = WorkerMonitor(processors, learner, learning, catalogue, metrics)
        self._app: WorkerApp = worker_app(
            DriverOptions(
                connection=settings.connection,
                topics=topics,
                group=settings.group,
                session_timeout=settings.member_timeout,
            ),
            partitions,
            learner,
            count=count,
            replication=settings.changelog_replication,
            background=[
                self._versions.run,
                supervised(lambda: progress.run(self._app), troubles, name="progress"),
                supervised(lambda: monitor.run(self._app), troubles, name="monitor"),
            ],
        )

    def run(self) -> int:
        """Run until SIGTERM or SIGINT (0) or a failure (1)."""
        collect_garbage_rarely()
        let_the_loop_go_first()
        return run_app(self._app)

    def unready(self) -> str | None:
        """Return why this worker does not serve at present, or None if it does."""
        if self._app.failure is not None:
            return "it has failed and ends"
        if self._parameters.version < 0:
            return "no parameters are published yet: the learner of one worker publishes version 0"
        if not self._versions.ready:
            return "the parameters are being read"
        if not self._app.serves:
            return "it joins its group, or recovers its sessions"
        return None


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
