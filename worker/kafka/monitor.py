"""What no event reports, measured every few seconds: lag, balances, the learner, late versions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaException
from faust.types import TP

from worker.console import moment
from worker.errors import FailedError
from worker.kafka.app import WorkerApp
from worker.kafka.connection import reason_of
from worker.kafka.partitions import Partitions
from worker.metrics.observer import Metrics
from worker.runtime.learner_process import LearnerProcess
from worker.stream.topology import ONLY_PARTITION

log = logging.getLogger(__name__)

#: Seconds between two looks.
INTERVAL: Final = 2.0
#: Seconds without progress that are normal, as in a rebalance. The alert waits a minute more.
PATIENCE: Final = 20.0
#: Milliseconds after `effective_at` at which a version is late, when it is seen.
MARGIN: Final = 1_000
#: Versions late in a row that are trouble. One alone is the mark of a rebalance or a restart.
IN_A_ROW: Final = 2


class WorkerMonitor:
    """Measures a worker, and reports its lasting troubles."""

    def __init__(
        self,
        partitions: Partitions,
        learner: LearnerProcess,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._partitions = partitions
        self._learner = learner
        self._metrics = metrics
        self._clock = clock
        self._watermark: int | None = None
        self._since = 0.0  # when the watermark was first the present one
        self._began = partitions.clock.earlier()
        self._newest, self._late = -1, 0  # the newest version, and how many in a row were late

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
        """Check the balances; report what lasts: a learner that is down, a watermark that stands still."""
        learner, progress = self._learner, self._partitions.progress
        if app.serves:  # not while sessions are being restored
            self._partitions.check_accounts()
        learner.check()
        self._metrics.learning(learner.running)
        if not learner.running and progress:
            # Of its own partitions; the learner has the whole.
            self._metrics.watermark(min(progress.values()))
        self._look_at_watermark(serves=app.serves)
        self._look_at_versions()

    def _look_at_watermark(self, *, serves: bool) -> None:
        """Report a watermark that stands still, in the worker that learns: only there it covers all partitions.

        Every partition that is processed reports progress about once a second, with or without users. So the watermark
        stands still only if a partition is not processed, or if the learner does not read the journal.
        """
        learner, now = self._learner, self._clock()
        watermark = learner.watermark if serves and learner.running else None
        if watermark is None or watermark != self._watermark:
            self._watermark, self._since = watermark, now
        lasted = now - self._since
        where = f"partition {learner.slowest}" if learner.slowest >= 0 else "the learner"
        at = f"stands at {moment(learner.watermark)} UTC" if learner.watermark else "has not reported"
        example = f"{where} {at}, for {lasted:.0f} s" if lasted > PATIENCE else ""
        self._metrics.troubles.set("watermark-stalled", example)

    def _look_at_versions(self) -> None:
        """Report versions that come after the time from which they should serve; normally they are seconds early."""
        newest, troubles = self._partitions.parameters.newest, self._metrics.troubles
        if newest is None or newest.version == self._newest:
            return
        self._newest = newest.version
        late = self._partitions.clock.earlier() - newest.effective_at
        # A worker that starts reads old versions. When they came is unknown.
        if newest.effective_at < self._began or late <= MARGIN:
            self._late = 0
            troubles.clear("late-versions")
            return
        self._late += 1
        if self._late >= IN_A_ROW or late > newest.settings.window:
            troubles.set("late-versions", f"version {newest.version} came {late / 1000:.1f} s after its effective_at")

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
