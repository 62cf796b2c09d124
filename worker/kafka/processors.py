"""The stream's processors in a worker: with a clock, with metrics, and with the versions of the parameters topic."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

from worker.kafka.parameters import PublishedParameters
from worker.kafka.polls import Poll
from worker.metrics import Metrics
from worker.runtime.clock import Clock, ComparedClock, steady_clock, wall_clock
from worker.runtime.learner_process import LearnerStatus
from worker.secret import Secret
from worker.stream.decoding import Limits, decode_episode
from worker.stream.partitioning import PartitionSurvey
from worker.stream.reading import OutputBounds
from worker.stream.serving import Serving, handle_together
from worker.stream.table import SessionRoom
from worker.stream.topology import MOST_BYTES, Emits, Record, Topics

log = logging.getLogger(__name__)

_timestamp = itemgetter(Record._fields.index("timestamp"))


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
        self._servings: list[Serving] = []

    # ── partitions ───────────────────────────────────────────────────────────────────────────────────────────────────

    def make_serving(self, partition: int) -> Serving:
        """Return the sessions of a partition, none so far."""
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
        self._servings.append(serving)
        return serving

    def restore(self, serving: Serving, records: Iterable[Record]) -> None:
        """Add sessions of the changelog."""
        self._metrics.add(serving.restore(records))

    def release(self, serving: Serving) -> None:
        """Give a partition up."""
        self._metrics.add(serving.hand_over())
        self._servings.remove(serving)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _report_clock(self, sentence: str) -> None:
        troubles = self._metrics.troubles
        if sentence:
            troubles.set("clock", sentence)
        else:
            troubles.clear("clock")

    def handle(self, work: Sequence[tuple[Serving, Sequence[Record]]]) -> list[Emits]:
        """Serve records of several partitions, with the same results as one by one, and count them."""
        started = time.perf_counter()
        records = self._dated([some for _, some in work])
        emits = handle_together((serving, some) for (serving, _), some in zip(work, records, strict=True))
        self._metrics.batches(emits, sum(map(len, records)), time.perf_counter() - started)
        now, arrivals = self.clock(), self._topics.arrivals
        delays = Counter(now - abs(one.timestamp) for some in records for one in some if one.topic == arrivals)
        for delay, times in delays.items():
            self._metrics.decided(max(0, delay) / 1000, times)
        return emits

    def delete_over(self, serving: Serving) -> Emits:
        """Delete the sessions that are over."""
        emits = serving.handle(())
        self._metrics.add(emits.tally)
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

    def measure(self, poll: Poll, began: float, ended: float, written: Iterable[float]) -> None:
        """Count the seconds that the lists of a poll spent in stages, and the writes of earlier polls.

        Times are of the monotonic clock.
        """
        wall = time.time() - (time.monotonic() - began)
        queued = began - poll.fetched
        spent = [("write", seconds) for seconds in written]
        for taken in poll.lists:
            if taken.records:
                waited = wall - queued - abs(taken.records[0].timestamp) / 1000
                spent += (("fetch", max(0.0, waited)), ("queue", queued), ("handle", ended - began))
        self._metrics.stages(spent)

    def on_learner_status(self, status: LearnerStatus) -> None:
        """Count episodes, late records and troubles, and note the watermark."""
        if status.late:
            self._metrics.late(status.late)
        for kind, times, example in status.troubles:
            self._metrics.troubles.add(kind, example, times)
        for episode in status.episodes:
            self._metrics.episode(decode_episode(bytes(episode)))
        self._metrics.rounded(status.rounded)
        if status.watermark:
            self._metrics.watermark(status.watermark)

    def check_accounts(self) -> None:
        """Compare the counters with the session tables; call in the thread of the tasks."""
        imbalances = self._metrics.census(
            open_sessions=sum(serving.open_sessions for serving in self._servings),
            parked=sum(serving.parked for serving in self._servings),
        )
        wrong = {name: value for name, value in imbalances.items() if value}
        if wrong:
            log.error("the accounts do not balance: %s", wrong)
