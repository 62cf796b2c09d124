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
from worker.metrics import Metrics
from worker.metrics.troubles import TroubleLog
from worker.runtime.learner_process import LearnerProcess
from worker.stream.parameters import Parameters
from worker.stream.topology import ONLY_PARTITION

log = logging.getLogger(__name__)

#: Seconds between two looks.
INTERVAL: Final = 2.0
#: Seconds without progress that are normal, as in a rebalance. The alert waits a minute more.
PATIENCE: Final = 20.0
#: Milliseconds after `effective_at` at which a version is late.
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
        partitions.parameters.watch(VersionWatch(metrics.troubles, clock=partitions.clock.earlier).received)

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


class VersionWatch:
    """Compares the arrival of versions with the time from which they serve, and reports `late-versions`.

    `clock` gives milliseconds since the epoch, not those of a clock that is ahead of the broker's.
    """

    def __init__(self, troubles: TroubleLog, *, clock: Callable[[], int]) -> None:
        self._troubles = troubles
        self._clock = clock
        self._began = clock()
        self._late = 0  # versions in a row

    def received(self, parameters: Parameters) -> None:
        """Note a new version, now that it can serve."""
        late = self._clock() - parameters.effective_at
        # A worker that starts reads old versions. When they came is unknown.
        if parameters.effective_at < self._began or late <= MARGIN:
            self._late = 0
            self._troubles.clear("late-versions")
            return
        self._late += 1
        if self._late >= IN_A_ROW or late > parameters.settings.window:
            self._troubles.set(
                "late-versions", f"version {parameters.version} came {late / 1000:.1f} s after its effective_at"
            )
