"""What no event reports, measured every few seconds: lag, accounts, the learner, late versions, other settings."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from confluent_kafka import KafkaException
from faust.types import TP

from worker.errors import FailedError
from worker.kafka.app import WorkerApp
from worker.kafka.connection import reason_of
from worker.kafka.processors import StreamProcessors
from worker.metrics import Metrics
from worker.runtime.learner_process import LearnerProcess
from worker.runtime.watch import CatalogueCheck, SettingsWatch, VersionWatch, WatermarkWatch
from worker.stream.settings import LearningSettings
from worker.stream.topology import ONLY_PARTITION

log = logging.getLogger(__name__)

INTERVAL: Final = 2.0


class WorkerMonitor:
    """Measures a worker, and reports its lasting troubles."""

    def __init__(
        self,
        processors: StreamProcessors,
        learner: LearnerProcess,
        learning: LearningSettings,
        catalogue: CatalogueCheck,
        metrics: Metrics,
    ) -> None:
        self._processors = processors
        self._learner = learner
        self._catalogue = catalogue
        self._metrics = metrics
        self._watermark = WatermarkWatch(metrics.troubles)
        self._settings = SettingsWatch(learning, metrics.troubles)
        self._versions = VersionWatch(
            metrics.troubles, clock=processors.clock.earlier, opened=lambda: processors.opened
        )
        processors.parameters.watch(self._versions.received)

    async def run(self, app: WorkerApp) -> None:
        """Measure until cancelled."""
        while True:
            self.look(app)
            try:
                await self.measure_lag(app)
            except (KafkaException, FailedError) as error:
                log.debug("lag cannot be measured: %s", reason_of(error))
            await asyncio.sleep(INTERVAL)

    def look(self, app: WorkerApp) -> None:
        """Check the accounts; report what lasts: a learner that is down, a watermark that stands still, …."""
        self._processors.check_accounts()
        self._learner.check()
        self._versions.check()
        learner, parameters, progress = self._learner, self._processors.parameters, app.partitions.progress
        self._metrics.learning(learner.running)
        if not learner.running and progress:
            # Of its own partitions; the learner has the whole.
            self._metrics.watermark(min(progress.values()))
        self._catalogue.again(parameters.history)
        if parameters.version >= 0:
            published = parameters.history[-1]
            self._settings.look(published.version, published.settings, learns=learner.running)
        if app.serves and learner.running:
            self._watermark.look(learner.watermark, slowest=learner.slowest)
        else:
            self._watermark.pause()

    async def measure_lag(self, app: WorkerApp) -> None:
        """Count the records between the acknowledged positions and the ends of the topics."""
        topics = app.settings.topics
        if not app.serves:
            return
        lag = {"arrivals": 0, "clicks": 0, "journal": 0}
        reached = dict(app.driver.flights.acknowledged)
        if self._learner.running and self._learner.position >= 0:
            reached[TP(topics.journal, ONLY_PARTITION)] = self._learner.position
        ends = await app.driver.highwaters(*reached)
        for tp, position in reached.items():
            lag[tp.topic.removeprefix(f"{topics.prefix}.")] += max(0, ends[tp] - position)
        for topic, records in lag.items():
            self._metrics.consumer_lag(topic, records)
