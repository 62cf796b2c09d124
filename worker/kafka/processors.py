"""The stream's processors in a worker: with a clock, with metrics, and with the versions of the parameters topic."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from worker.kafka.learner_process import LearnerStatus
from worker.kafka.parameters import PublishedParameters
from worker.kafka.pipeline import PartitionTask
from worker.metrics import Metrics
from worker.secret import Secret
from worker.stream.decoding import Limits, decode_episode
from worker.stream.serving import Serving, handle_together
from worker.stream.topology import Emits, Record, Topics

log = logging.getLogger(__name__)

Clock = Callable[[], int]

_timestamp = itemgetter(Record._fields.index("timestamp"))


def wall_clock() -> int:
    """Return the milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def clock_of(file: str | None) -> Clock:
    """Return the machine's clock, or, for tests, one that reads its time from a file.

    With a file, event time passes as the test writes it, and runs on Kafka can be compared to the bit with runs of the
    embedded runner.
    """
    if file is None:
        return wall_clock
    path = Path(file)
    return lambda: int(path.read_text(encoding="ascii"))


class PartitionServing:
    """Serves one partition and keeps its accounts.

    Parameters
    ----------
    serving : the processor
    arrivals : the name of the arrivals topic
    on_release : called with this when the partition is given up
    """

    def __init__(
        self,
        serving: Serving,
        *,
        arrivals: str,
        clock: Clock,
        metrics: Metrics,
        on_release: Callable[[PartitionServing], None],
    ) -> None:
        self.serving = serving
        self.progress = 0  # the last that was acknowledged
        self._arrivals = arrivals
        self._clock = clock
        self._metrics = metrics
        self._on_release = on_release

    def restore(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Take over the sessions of the changelog."""
        self._metrics.add(self.serving.restore(items))

    def handle(self, records: Sequence[Record]) -> Emits:
        """Handle records; without any, delete the sessions that have ended."""
        if records:
            return handle_partitions([(self, records)])[0]
        if not self.serving.has_due:
            return Emits()
        emits = self.serving.handle(())
        self._metrics.add(emits.tally)
        return emits

    def dated(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return the records, all of them with a time."""
        # There may be no records: a position moves on without one over the marker of a transaction.
        if min(map(_timestamp, records), default=0) >= 0:
            return records
        # A producer may leave the time out (−1). Then the time of reading counts in the check for future events.
        now = self._clock()
        return [record if record.timestamp >= 0 else record._replace(timestamp=now) for record in records]

    def count(self, records: Sequence[Record], emits: Emits, seconds: float) -> None:
        """Count records and their results, which took so many seconds."""
        self._metrics.batch(emits, len(records), seconds)
        now = self._clock()
        for delay, times in Counter(now - one.timestamp for one in records if one.topic == self._arrivals).items():
            self._metrics.decided(max(0, delay) / 1000, times)

    def acknowledged(self, progress_time: int) -> None:
        """Note that everything up to this time is durable."""
        self.serving.acknowledged(progress_time)
        self.progress = progress_time

    def release(self) -> None:
        """Give the partition up."""
        self._metrics.add(self.serving.hand_over())
        self._on_release(self)


def handle_partitions(work: Sequence[tuple[PartitionServing, Sequence[Record]]]) -> list[Emits]:
    """Let partitions handle their records, all together."""
    started = time.perf_counter()
    dated = [(task, task.dated(records)) for task, records in work]
    emits = handle_together((task.serving, records) for task, records in dated)
    seconds = time.perf_counter() - started
    for (task, records), emitted in zip(dated, emits, strict=True):
        task.count(records, emitted, seconds)
    return emits


class StreamProcessors:
    """The processors of one worker, and the partitions that they serve at present."""

    def __init__(
        self,
        parameters: PublishedParameters,
        topics: Topics,
        metrics: Metrics,
        *,
        clock: Clock = wall_clock,
        limits: Limits,
        secret: Secret | None = None,
    ) -> None:
        self.parameters = parameters
        self.clock = clock
        self._topics = topics
        self._metrics = metrics
        self._limits = limits
        self._secret = secret
        self._tasks: list[PartitionServing] = []

    def make_task(self, partition: int) -> PartitionTask:
        """Return the task of a partition."""
        serving = Serving(
            self.parameters.versions,
            partition=partition,
            topics=self._topics,
            limits=self._limits,
            secret=self._secret,
        )
        task = PartitionServing(
            serving,
            arrivals=self._topics.arrivals,
            clock=self.clock,
            metrics=self._metrics,
            on_release=self._tasks.remove,
        )
        self._tasks.append(task)
        return task

    def handle_together(self, work: Sequence[tuple[Any, Sequence[Record]]]) -> list[Emits]:
        """Let several tasks handle their records, with the same results as one by one."""
        return handle_partitions(work)

    def on_learner_status(self, status: LearnerStatus) -> None:
        """Count the episodes, and note the watermark."""
        for episode in status.episodes:
            self._metrics.episode(decode_episode(bytes(episode)))
        if status.watermark:
            self._metrics.watermark(status.watermark)

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
