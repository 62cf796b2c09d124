"""The processors of a worker, as the transport wants to see them.

One `Published` per worker: what it learns from the parameters topic is shared by the tasks of all partitions. Time and
counting come in here; the processors themselves know neither.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path

from worker.errors import AdcascadeError, FailedError
from worker.kafka.transport import Lessons, Publication
from worker.metrics import Metrics
from worker.stream.codec import encode_episode, encode_progress
from worker.stream.events import Progress
from worker.stream.learner import Learner, Outcome, should_publish
from worker.stream.parameters import Parameters, decode_parameters, encode_parameters
from worker.stream.serving import Serving, handle_together
from worker.stream.topology import Emits, Record
from worker.stream.versions import KEPT, Versions

log = logging.getLogger(__name__)

Clock = Callable[[], int]

_timestamp = itemgetter(Record._fields.index("timestamp"))


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def wall_clock() -> int:
    """Return the milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def clock_of(file: str | None) -> Clock:
    """Return the clock of a worker: the machine's, or, for tests, one whose time stands in a file.

    With a file, event time passes as the test writes it, not as the machine goes, and runs on Kafka can be compared to
    the bit with runs of the embedded runner.
    """
    if file is None:
        return wall_clock
    path = Path(file)
    return lambda: int(path.read_text(encoding="ascii"))


def progress_record(partition: int, partitions: int, now: int) -> tuple[bytes | None, bytes]:
    """Return the journal record that says how far a partition is."""
    return None, encode_progress(Progress(partition=partition, partitions=partitions, time=now))


# ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Partition:
    """Serves one partition and keeps its accounts.

    Parameters
    ----------
    serving : the processor
    arrivals : the name of the arrivals topic
    released : called with this when the partition is given away
    """

    def __init__(
        self,
        serving: Serving,
        *,
        arrivals: str,
        clock: Clock,
        metrics: Metrics,
        released: Callable[[Partition], None],
    ) -> None:
        self.serving = serving
        self.progress = 0  # the last that was acknowledged
        self._arrivals = arrivals
        self._clock = clock
        self._metrics = metrics
        self._released = released

    def restore(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Take over the sessions of the changelog."""
        self._metrics.add(self.serving.restore(items))

    def handle(self, records: Sequence[Record]) -> Emits:
        """Step records; without any, forget what has ended."""
        return step([(self, records)])[0] if records else self._tidy()

    def _tidy(self) -> Emits:
        if not self.serving.has_due:
            return Emits()
        emits = self.serving.handle(())
        self._metrics.add(emits.tally)
        return emits

    def dated(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return the records, all of them with a time."""
        # There may be none: a position moves on without a record over the marker of a transaction.
        if min(map(_timestamp, records), default=0) >= 0:
            return records
        # A producer may leave the time out (−1). Then nothing can be said to lie too far after it: the time of reading
        # takes its place.
        now = self._clock()
        return [record if record.timestamp >= 0 else record._replace(timestamp=now) for record in records]

    def note(self, records: Sequence[Record], emits: Emits, seconds: float) -> None:
        """Count what was made of records, in so many seconds."""
        self._metrics.batch(emits, len(records), seconds)
        now = self._clock()
        for delay, times in Counter(now - one.timestamp for one in records if one.topic == self._arrivals).items():
            self._metrics.decided(max(0, delay) / 1000, times)

    def acknowledged(self, progress_time: int) -> None:
        """Hear that all up to this time is durable."""
        self.serving.acknowledged(progress_time)
        self.progress = progress_time

    def release(self) -> None:
        """Give the partition away."""
        self._metrics.add(self.serving.hand_over())
        self._released(self)


def step(work: Sequence[tuple[Partition, Sequence[Record]]]) -> list[Emits]:
    """Let partitions handle their records, all together."""
    started = time.perf_counter()
    dated = [(task, task.dated(records)) for task, records in work]
    emits = handle_together((task.serving, records) for task, records in dated)
    seconds = time.perf_counter() - started
    for (task, records), emitted in zip(dated, emits, strict=True):
        task.note(records, emitted, seconds)
    return emits


# ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Published:
    """What the parameters topic holds, and the versions that serve.

    A record that cannot be read, or that says something else of a version that is known, is refused: counted, logged,
    and nothing is served by it.

    Parameters
    ----------
    configured : version 0 as this worker would make it; serves if nothing is published yet
    history : what was published when the worker started
    """

    def __init__(self, configured: Parameters, history: Sequence[Parameters], metrics: Metrics) -> None:
        self._metrics = metrics
        self._published: dict[int, Parameters] = {}
        self.versions = Versions(history[0] if history else configured)
        for parameters in history:
            self._take(parameters)

    @property
    def version(self) -> int:
        """The highest version published, -1 before the first."""
        return max(self._published, default=-1)

    @property
    def history(self) -> tuple[Parameters, ...]:
        """The last published versions, oldest first, each from the newest position it was published with."""
        return tuple(parameters for _, parameters in sorted(self._published.items()))

    def handle(self, records: Sequence[Record]) -> None:
        """Take records of the topic."""
        for record in records:
            if record.value is None:
                continue
            try:
                self._take(decode_parameters(record.value))
            except AdcascadeError as error:
                self._metrics.refused()
                log.error("parameters at offset %d are refused: %s", record.offset, error)

    def _take(self, parameters: Parameters) -> None:
        number = parameters.version
        known = self._published.get(number)
        # What is published counts for the learner even where this worker has served by another version 0 of its own.
        if known is None or (known.sha256 == parameters.sha256 and known.journal_offset < parameters.journal_offset):
            newest = max(number, self.version)
            kept = {**self._published, number: parameters}
            self._published = {version: one for version, one in kept.items() if version > newest - KEPT}
        self.versions.learn(parameters)
        if known is None:
            log.info("parameters version %d (%s…) is known", number, parameters.sha256[:12])
        if number == self.version:
            self._metrics.version(parameters)

    def wants(self, publication: Publication) -> bool:
        """Return whether a version is to be written; raise `FailedError` if the topic contradicts it."""
        newest = self._published.get(self.version)
        try:
            return should_publish(decode_parameters(publication.value), newest)
        except FailedError:
            self._metrics.refused()
            raise


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class JournalFold:
    """The learner with its results as bytes."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @property
    def watermark(self) -> int:
        """Up to which event time the journal is complete."""
        return self._learner.watermark

    @property
    def resume_offset(self) -> int:
        """Where to read the journal from."""
        return self._learner.resume_offset

    def check_start(self, first: int, end: int) -> None:
        """Raise `FailedError` if the journal lacks what is needed."""
        self._learner.check_start(first, end)

    def begin(self) -> Lessons:
        """Return version 0, if nothing is published."""
        return self._lessons(self._learner.begin())

    def handle(self, records: Sequence[Record]) -> Lessons:
        """Fold records of the journal."""
        return self._lessons(self._learner.handle((record.offset, record.value) for record in records))

    def _lessons(self, outcome: Outcome) -> Lessons:
        for refusal in outcome.refusals:
            log.warning("an order was refused: %s", refusal.reason)
        for episode in outcome.episodes:
            if episode.rejected is not None:
                log.error("the window to %d gave no version: %s", episode.window_end, episode.rejected)
        return Lessons(
            episodes=[(b"%d" % episode.version, encode_episode(episode)) for episode in outcome.episodes],
            parameters=[publication(parameters) for parameters in outcome.versions],
        )


def publication(parameters: Parameters) -> Publication:
    """Return the record of a version; eight keys, so that the compacted topic keeps the last eight."""
    return Publication(parameters.version, b"%d" % (parameters.version % KEPT), encode_parameters(parameters))
