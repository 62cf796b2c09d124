"""The stream's processors in a worker: with a clock, with metrics, and with the versions of the parameters topic."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from worker.kafka.clock import Clock, ComparedClock, steady_clock, wall_clock
from worker.kafka.learner_process import LearnerStatus
from worker.kafka.parameters import PublishedParameters
from worker.kafka.pipeline import PartitionTask
from worker.metrics import Metrics
from worker.metrics.troubles import TroubleLog
from worker.secret import Secret
from worker.stream.bounds import OutputBounds
from worker.stream.decoding import Limits, decode_episode
from worker.stream.partitioning import PartitionSurvey
from worker.stream.room import SessionRoom
from worker.stream.serving import Serving, handle_together
from worker.stream.topology import MOST_BYTES, Emits, Record, Topics

log = logging.getLogger(__name__)

_timestamp = itemgetter(Record._fields.index("timestamp"))

#: Handles the records of several tasks.
HandlePartitions: TypeAlias = Callable[[Sequence[tuple[Any, Sequence[Record]]]], list[Emits]]


class PartitionServing:
    """Serves one partition and keeps its accounts.

    Parameters
    ----------
    serving : the processor
    together : handles records of several partitions, with their accounts
    on_release : called with this when the partition is given up
    """

    def __init__(
        self,
        serving: Serving,
        *,
        together: HandlePartitions,
        metrics: Metrics,
        on_release: Callable[[PartitionServing], None],
    ) -> None:
        self.serving = serving
        self.progress = 0  # the last that was acknowledged
        self._together = together
        self._metrics = metrics
        self._on_release = on_release

    @property
    def opened(self) -> tuple[tuple[int, int], ...] | None:
        """The sessions opened by the start of their window, for progress; None where all are journaled."""
        return self.serving.opened

    def restore(self, records: Iterable[Record]) -> None:
        """Take over the sessions of the changelog."""
        self._metrics.add(self.serving.restore(records))

    def take_over(self, start: int, end: int) -> None:
        """Note that other workers may have answered the arrivals between these offsets, the end excluded."""
        self.serving.take_over(start, end)

    def handle(self, records: Sequence[Record]) -> Emits:
        """Handle records; without any, delete the sessions that have ended."""
        if records:
            return self._together([(self, records)])[0]
        if not self.serving.has_due:
            return Emits()
        emits = self.serving.handle(())
        self._metrics.add(emits.tally)
        return emits

    def acknowledged(self, progress_time: int) -> None:
        """Note that everything up to this time is durable."""
        self.serving.acknowledged(progress_time)
        self.progress = progress_time

    def release(self) -> None:
        """Give the partition up."""
        self._metrics.add(self.serving.hand_over())
        self._on_release(self)


class StreamProcessors:
    """The processors of one worker, and the partitions that they serve at present."""

    def __init__(
        self,
        parameters: PublishedParameters,
        topics: Topics,
        metrics: Metrics,
        *,
        clock: Clock = wall_clock,
        steady: Clock = steady_clock,
        limits: Limits,
        secret: Secret | None = None,
        max_open_sessions: int | None = None,
        partitions: int | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.parameters = parameters
        self.clock = ComparedClock(clock, most=limits.max_ahead_ms, report=self._report_clock, steady=steady)
        self._topics = topics
        self._metrics = metrics
        self._limits = limits
        self._secret = secret
        self._room = SessionRoom(max_open_sessions)
        self._survey = None if partitions is None else PartitionSurvey(topics, partitions)
        self._bounds = OutputBounds(most_bytes)
        self._tasks: list[PartitionServing] = []

    def make_task(self, partition: int) -> PartitionTask:
        """Return the task of a partition."""
        serving = Serving(
            self.parameters.versions,
            partition=partition,
            topics=self._topics,
            limits=self._limits,
            secret=self._secret,
            room=self._room,
            survey=self._survey,
            bounds=self._bounds,
        )
        task = PartitionServing(
            serving, together=self.handle_together, metrics=self._metrics, on_release=self._tasks.remove
        )
        self._tasks.append(task)
        return task

    def _report_clock(self, sentence: str) -> None:
        troubles = self._metrics.troubles
        if sentence:
            troubles.set("clock", sentence)
        else:
            troubles.clear("clock")

    def handle_together(self, work: Sequence[tuple[Any, Sequence[Record]]]) -> list[Emits]:
        """Let several tasks handle their records, with the same results as one by one, and count them."""
        started = time.perf_counter()
        records = self._dated([some for _, some in work])
        emits = handle_together((task.serving, some) for (task, _), some in zip(work, records, strict=True))
        self._metrics.batches(emits, sum(map(len, records)), time.perf_counter() - started)
        now, arrivals = self.clock(), self._topics.arrivals
        delays = Counter(now - abs(one.timestamp) for some in records for one in some if one.topic == arrivals)
        for delay, times in delays.items():
            self._metrics.decided(max(0, delay) / 1000, times)
        return emits

    def _dated(self, lists: Sequence[Sequence[Record]]) -> Sequence[Sequence[Record]]:
        """Return the records, none of them later than now, and those without a time as `decoding` wants them."""
        timestamps = [timestamp for records in lists for timestamp in map(_timestamp, records)]
        if not timestamps:
            return lists  # a position moves on without a record over the marker of a transaction
        self.clock.witness(timestamps)
        latest = self.clock.latest()
        if max(timestamps) <= latest and min(timestamps) >= 0:
            return lists
        # A client that sets its timestamps sets them as it likes. One that leaves the time out sends −1.
        now = self.clock.later()
        return [
            [
                record
                if 0 <= record.timestamp <= latest
                else record._replace(timestamp=now if record.timestamp > 0 else -now)
                for record in records
            ]
            for records in lists
        ]

    def on_stages(self, spent: Sequence[tuple[str, float]]) -> None:
        """Count the seconds that lists of records spent in stages."""
        self._metrics.stages(spent)

    def on_learner_status(self, status: LearnerStatus) -> None:
        """Count episodes, late records and troubles, and note the watermark."""
        if status.late:
            self._metrics.late(status.late)
        for kind, times, example in status.troubles:
            self.troubles.add(kind, example, times)
        for episode in status.episodes:
            self._metrics.episode(decode_episode(bytes(episode)))
        self._metrics.rounded(status.rounded)
        if status.watermark:
            self._metrics.watermark(status.watermark)

    @property
    def troubles(self) -> TroubleLog:
        """The troubles of this worker."""
        return self._metrics.troubles

    @property
    def opened(self) -> int:
        """The number of sessions opened so far."""
        return self._metrics.opened

    @property
    def progress(self) -> int:
        """The progress of the slowest partition; 0 before all have made some."""
        return min((task.progress for task in self._tasks), default=0)

    def check_accounts(self) -> None:
        """Compare the counters with the session tables; call in the thread of the tasks."""
        imbalances = self._metrics.census(
            open_sessions=sum(task.serving.open_sessions for task in self._tasks),
            parked=sum(task.serving.parked for task in self._tasks),
        )
        wrong = {name: value for name, value in imbalances.items() if value}
        if wrong:
            log.error("the accounts do not balance: %s", wrong)
