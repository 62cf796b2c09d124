"""A worker on Kafka, from its settings to its end: checks, the parts of the Faust app, the status page."""

from __future__ import annotations

import logging
from functools import partial

from worker.http.pages import operations
from worker.http.server import WebServer
from worker.kafka.app import WorkerApp, run_app, worker_app
from worker.kafka.control import KafkaControl
from worker.kafka.monitor import WorkerMonitor
from worker.kafka.parameters import PublishedParameters, VersionReader, published_versions
from worker.kafka.partitions import Partitions
from worker.kafka.progress import ProgressReporter
from worker.kafka.settings import WorkerSettings
from worker.kafka.topics import topics_at_start
from worker.metrics.catalogue import CONSUMED
from worker.metrics.observer import Metrics
from worker.runtime.learner_process import LearnerProcess, count_report
from worker.runtime.process import collect_garbage_rarely, let_the_loop_go_first
from worker.runtime.supervision import supervised
from worker.web.status import status_routes

log = logging.getLogger(__name__)


def run_worker(settings: WorkerSettings) -> int:
    """Run until SIGTERM or SIGINT (0) or a failure (1). The caller configures logging.

    Raises `FailedError` or `InputError` before anything is started if the broker, the topics or the settings will not
    do.
    """
    connection, topics = settings.connection, settings.topics
    count = topics_at_start(connection, topics)
    history = published_versions(connection, topics)
    control = KafkaControl(connection, topics)
    settings = settings.with_tagged(history, control.slots, control.load)
    metrics = Metrics(CONSUMED)
    parameters = PublishedParameters(settings.first_version(history), history, metrics)
    versions = VersionReader(
        *(connection, topics, parameters.take),
        prepare=parameters.prepare,
        report=partial(metrics.troubles.set, "versions-down"),
    )
    partitions = Partitions(parameters, settings, topics, metrics, know_versions=versions.catch_up)
    learner = LearnerProcess(settings.learner, partial(count_report, metrics), metrics.troubles)
    monitor = WorkerMonitor(partitions, learner, metrics)
    progress = ProgressReporter(count=count, clock=partitions.clock, interval=settings.progress_interval)
    background = [
        versions.run,
        supervised(lambda: progress.run(app), metrics.troubles, name="progress"),
        supervised(lambda: monitor.run(app), metrics.troubles, name="monitor"),
    ]
    app = worker_app(settings, partitions, learner, count=count, background=background)
    unready = partial(_unready, app, versions, parameters)
    routes = {
        **operations(metrics.registry, unready, metrics.trouble_lines),
        **status_routes(metrics, runner="worker", unready=unready, clock=partitions.clock),
    }
    with WebServer(routes, host=settings.web_host, port=settings.web_port) as server:
        log.info(
            "worker: %s.* on %s, status page, metrics and health at %s",
            *(topics.prefix, ",".join(connection.servers), server.url),
            extra={"fields": {"url": server.url, "partitions": count}},
        )
        collect_garbage_rarely()
        let_the_loop_go_first()
        code = run_app(app)
    log.info("worker: stopped", extra={"fields": {"code": code}})
    return code


def _unready(app: WorkerApp, versions: VersionReader, parameters: PublishedParameters) -> str | None:
    """Return why a worker does not serve at present, or None if it does."""
    if app.failure is not None:
        return "it has failed and ends"
    if parameters.version < 0:
        return "no parameters are published yet: the learner of one worker publishes version 0"
    if not versions.ready:
        return "the parameters are being read"
    if not app.serves:
        return "it joins its group, or recovers its sessions"
    return None
