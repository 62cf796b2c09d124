"""What no event reports, measured every few seconds: lag, balances, the learner, late versions, other settings."""

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
from worker.runtime.watch import CatalogueCheck, different
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings
from worker.stream.topology import ONLY_PARTITION

log = logging.getLogger(__name__)

#: Seconds between two looks.
INTERVAL: Final = 2.0
#: Seconds without progress that are normal, as in a rebalance. The alert waits a minute more.
PATIENCE: Final = 20.0


class WorkerMonitor:
    """Measures a worker, and reports its lasting troubles."""

    def __init__(
        self,
        partitions: Partitions,
        learner: LearnerProcess,
        learning: LearningSettings,
        catalogue: CatalogueCheck,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._partitions = partitions
        self._learner = learner
        self._catalogue = catalogue
        self._metrics = metrics
        self._learning = learning
        self._watermark, self._difference = Lasting(clock), Lasting(clock)
        self._versions = VersionWatch(metrics.troubles, clock=partitions.clock.earlier, opened=lambda: metrics.opened)
        partitions.parameters.watch(self._versions.received)

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
        """Check the balances; report what lasts: a learner that is down, a watermark that stands still, …."""
        learner, parameters, progress = self._learner, self._partitions.parameters, self._partitions.progress
        if app.serves:  # not while sessions are being restored
            self._partitions.check_accounts()
        learner.check()
        self._versions.check()
        self._metrics.learning(learner.running)
        if not learner.running and progress:
            # Of its own partitions; the learner has the whole.
            self._metrics.watermark(min(progress.values()))
        self._catalogue.again(parameters.history)
        self._look_at_watermark(serves=app.serves)
        if parameters.history:
            self._look_at_settings(parameters.history[-1])

    def _look_at_watermark(self, *, serves: bool) -> None:
        """Report a watermark that stands still, in the worker that learns: only there it covers all partitions.

        Every partition that is processed reports progress about once a second, with or without users. So the watermark
        stands still only if a partition is not processed, or if the learner does not read the journal.
        """
        learner = self._learner
        lasted = self._watermark.seconds(learner.watermark if serves and learner.running else None)
        where = f"partition {learner.slowest}" if learner.slowest >= 0 else "the learner"
        at = f"stands at {moment(learner.watermark)} UTC" if learner.watermark else "has not reported"
        example = f"{where} {at}, for {lasted:.0f} s" if lasted > PATIENCE else ""
        self._metrics.troubles.set("watermark-stalled", example)

    def _look_at_settings(self, published: Parameters) -> None:
        """Report settings of this worker that differ from those of the newest version, unless this worker learns.

        The worker that learns makes the next version with its own settings, so there they differ for one window.
        """
        changed = [] if self._learner.running else different(self._learning, published.settings)
        lasts = self._difference.seconds("differ" if changed else None) > PATIENCE  # not while the learner moves here
        example = f"version {published.version} has other values of {', '.join(changed)}" if lasts else ""
        self._metrics.troubles.set("settings-differ", example)

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


class Lasting:
    """Measures how long something has been the same.

    >>> now = [5.0]
    >>> lasting = Lasting(lambda: now[0])
    >>> lasting.seconds("a")
    0.0
    >>> now[0] += 3
    >>> lasting.seconds("a"), lasting.seconds("b"), lasting.seconds(None)
    (3.0, 0.0, 0.0)
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state: object = None
        self._since = 0.0

    def seconds(self, state: object) -> float:
        """Return the seconds since this state was reported first; 0 if it is new, or None."""
        if state is None or state != self._state:
            self._state, self._since = state, self._clock()
        return self._clock() - self._since


#: Milliseconds after `effective_at` at which a version is late.
MARGIN: Final = 1_000
#: Versions late in a row that are trouble. One alone is the mark of a rebalance or a restart.
IN_A_ROW: Final = 2


class VersionWatch:
    """Compares the arrival of versions with the time from which they serve, and reports `late-versions`.

    Parameters
    ----------
    clock : milliseconds since the epoch, not those of a clock that is ahead of the broker's
    opened : returns the number of sessions that this worker has opened
    """

    def __init__(self, troubles: TroubleLog, *, clock: Callable[[], int], opened: Callable[[], int]) -> None:
        self._troubles = troubles
        self._clock = clock
        self._began = clock()
        self._opened = opened
        self._before = opened()
        self._newest: Parameters | None = None
        self._late = 0  # versions in a row
        self._since: int | None = None  # when a session was opened for the first time after the newest version came

    def received(self, parameters: Parameters) -> None:
        """Note a new version, now that it can serve."""
        self._newest, self._since, self._before = parameters, None, self._opened()
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

    def check(self) -> None:
        """Report a version that is overdue: sessions are opened, but none comes. Call every few seconds."""
        newest, now = self._newest, self._clock()
        if newest is None or newest.frozen:
            return
        if self._since is None and self._opened() > self._before:
            self._since = now
        # The window of the first session closes within a window; allow one more.
        settings = newest.settings
        usual = settings.window + settings.session_timeout + 2 * settings.lateness
        if self._since is not None and (waited := now - self._since) > usual + settings.window:
            self._troubles.set(
                "late-versions",
                f"sessions are opened, but no version came after {newest.version} for {waited / 1000:.0f} s "
                f"(usual: {usual / 1000:.0f} s)",
            )
