"""The partitions that this worker serves: their sessions in memory, polls in, results out.

Rules that hold in this file (docs/design.md §3):

- A partition belongs to this worker from its recovery until the group gives it to another one. Its sessions stay in
  memory over a rebalance if everything was durable before and nobody else has written to its changelog since.
- Journal, dead letters, changelog and decisions of a poll are written together, as one flight.
- A poll of an earlier generation is dropped: its records are read again.
- A record that makes serving raise costs one dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Final

from faust.types import TP

from worker.errors import FailedError
from worker.kafka.consumer import Consumer
from worker.kafka.parameters import PublishedParameters
from worker.kafka.polls import Flight, Poll, RecordList, Writer
from worker.metrics.observer import Metrics
from worker.runtime.clock import Clock, ComparedClock, steady_clock
from worker.runtime.settings import ProcessSettings
from worker.stream.serving import Serving, handle_together
from worker.stream.topology import ONLY_PARTITION, Emits, Record, Topics, dead_letter

log = logging.getLogger(__name__)

_timestamp = itemgetter(Record._fields.index("timestamp"))

#: Records in flight (handled and not durable): then no poll is handled. Bounds memory, and what a crash repeats.
MOST_IN_FLIGHT: Final = 4_096
#: Bytes of dead letters that count as a record in flight: they are as long as clients made them.
LETTER_BYTES: Final = 16 << 10
#: Sessions that are restored before the loop may do something else.
RESTORED_AT_ONCE: Final = 10_000


class Partitions:
    """The sessions of the assigned partitions, with the clock, the metrics and the versions of the worker.

    Parameters
    ----------
    know_versions : returns when all versions are known that are published now; called in every rebalance
    """

    def __init__(
        self,
        parameters: PublishedParameters,
        settings: ProcessSettings,
        topics: Topics,
        metrics: Metrics,
        *,
        know_versions: Callable[[], Awaitable[None]],
        steady: Clock = steady_clock,
    ) -> None:
        self.servings: dict[int, Serving] = {}
        #: The time up to which the progress of each partition is durable.
        self.progress: dict[int, int] = {}
        self.parameters = parameters
        report = partial(metrics.troubles.set, "clock")
        self.clock = ComparedClock(settings.clock, most=settings.limits.max_ahead, report=report, steady=steady)
        self._topics = topics
        self._metrics = metrics
        self._know_versions = know_versions
        self.make_serving = settings.serving(parameters.versions, topics)
        self._generation = self._next_number = -1
        self._knowing: asyncio.Task[None] | None = None
        self._consumer: Consumer
        self._writer: Writer

    def connect(self, consumer: Consumer, writer: Writer) -> None:
        """Use these clients from now on."""
        self._consumer, self._writer = consumer, writer

    # ── rebalances ───────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, changelogs: Mapping[int, int]) -> dict[int, int]:
        """Drop the partitions that are not assigned any more, or were changed by others.

        `changelogs` has the end offset of the changelog of each assigned partition. Return the last offset of those
        that are kept.
        """
        if self._knowing is not None:
            self._knowing.cancel()
        self._knowing = asyncio.ensure_future(self._know_versions())
        drained, ends = self._consumer.was_drained, self._consumer.flights.changelog
        kept = {p for p in self.servings if drained and changelogs.get(p) == ends[p] + 1}
        for partition in self.servings.keys() - kept:
            self._metrics.add(self.servings.pop(partition).hand_over())
            self.progress.pop(partition, None)
            del ends[partition]
        return {partition: ends[partition] for partition in kept}

    async def restore(self, tables: dict[int, dict[bytes, Record]], ends: Mapping[int, int]) -> None:
        """Make the sessions of partitions from their tables, the last changelog record of each session."""
        for partition in sorted(tables):
            serving = self.make_serving(partition)
            sessions = iter(tables.pop(partition).values())
            try:
                while some := list(islice(sessions, RESTORED_AT_ONCE)):
                    self._metrics.add(serving.restore(some))
                    await asyncio.sleep(0)
            except BaseException:  # the next rebalance
                self._metrics.add(serving.hand_over())
                raise
            self.servings[partition] = serving
            self._consumer.flights.changelog[partition] = ends.get(partition, -1)

    async def _begin(self, generation: int) -> None:
        """Begin a generation, with all versions that the last owners of the partitions knew."""
        if self._knowing is not None:
            await asyncio.shield(self._knowing)
        consumer, arrivals = self._consumer, self._topics.arrivals
        for partition, serving in self.servings.items():
            tp = TP(arrivals, partition)
            if tp in consumer.starts:
                serving.take_over(consumer.starts[tp], consumer.ends[tp])
        self._generation, self._next_number = generation, 0

    # ── polls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, poll: Poll) -> None:
        """Serve the records of a poll: plan and join them, and write the results."""
        flights = self._consumer.flights
        if poll.generation == self._consumer.generation != self._generation:
            await self._begin(poll.generation)
        if flights.size > MOST_IN_FLIGHT:
            await flights.until(lambda: flights.size <= MOST_IN_FLIGHT)
        if poll.generation != self._consumer.generation:
            return  # a rebalance has begun
        if poll.number != self._next_number:
            raise FailedError(f"poll {poll.number} came, but {self._next_number} was next: some records were lost")
        self._next_number += 1
        work = self._by_partition(poll.lists)
        began = time.monotonic()
        emits = self._emits(work)
        flight = Flight({batch.tp: batch.end for batch in poll.lists}, _size(work, emits))
        for partition, emitted in zip(work, emits, strict=True):
            self._write(partition, emitted, flight)
        flights.launch(flight)
        self._consumer.handled(poll.generation)
        self.measure(poll, began, time.monotonic(), flights.durations)
        flights.durations.clear()

    def _by_partition(self, lists: Sequence[RecordList]) -> dict[int, list[Record]]:
        """Return the records by partition, arrivals first: feedback before its arrival has to be parked."""
        work: dict[int, list[Record]] = {}
        for batch in sorted(lists, key=lambda batch: batch.tp.topic != self._topics.arrivals):
            if batch.tp.partition in self.servings:
                work.setdefault(batch.tp.partition, []).extend(batch.records)
        return work

    def _emits(self, work: Mapping[int, Sequence[Record]]) -> list[Emits]:
        parts = [(self.servings[partition], records) for partition, records in work.items()]
        try:
            return self.serve(parts)
        except Exception:
            log.exception("serving raised on %d records", sum(map(len, work.values())))
            return [self._isolate(serving, records) for serving, records in parts]

    def serve(self, work: Sequence[tuple[Serving, Sequence[Record]]]) -> list[Emits]:
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

    def _isolate(self, serving: Serving, records: Iterable[Record]) -> Emits:
        """Handle records one by one, those that raise as dead letters. Handling a record again changes nothing."""
        together, survived, failed = Emits(), 0, 0
        for record in records:
            try:
                emits = self.serve([(serving, [record])])[0]
            except Exception as error:
                failed += 1
                reason = f"serving raised {type(error).__name__}: {error}"[:500]
                together.dead_letters.append(dead_letter(record, "invalid", reason))
                continue
            survived += 1
            together.journal += emits.journal
            together.dead_letters += emits.dead_letters
            together.changelog += emits.changelog
            together.decisions += emits.decisions
        if not survived and failed > 1:
            # The fault is not in a record. Going on would turn all traffic into dead letters.
            raise FailedError(f"serving failed on every one of {failed} records")
        return together

    def _write(self, partition: int, emits: Emits, flight: Flight) -> None:
        topics, writer = self._topics, self._writer
        if emits.decisions:
            writer.write(topics.decisions, partition, emits.decisions, flight)
        if emits.journal:
            writer.write(topics.journal, ONLY_PARTITION, emits.journal, flight)
        if emits.dead_letters:
            writer.write_dead_letters(topics.dead_letters, ONLY_PARTITION, emits.dead_letters, flight)
        if emits.changelog:
            writer.write(topics.changelog, partition, emits.changelog, flight, is_changelog=True)

    def measure(self, poll: Poll, began: float, ended: float, written: Iterable[float]) -> None:
        """Count the seconds that the lists of a poll spent in stages, and the writes of earlier polls.

        Times are of the monotonic clock.
        """
        wall = time.time() - (time.monotonic() - began)
        queued = began - poll.fetched
        spent = [("write", seconds) for seconds in written]
        for batch in poll.lists:
            if batch.records:
                waited = wall - queued - abs(batch.records[0].timestamp) / 1000
                spent += (("fetch", max(0.0, waited)), ("queue", queued), ("handle", ended - began))
        self._metrics.stages(spent)

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def acknowledge(self, partition: int, progress: int) -> None:
        """Note that the progress of a partition is durable, and delete the sessions that are over by then."""
        serving = self.servings.get(partition)
        if serving is None:
            return
        serving.acknowledged(progress)
        self.progress[partition] = progress
        if serving.has_due:
            flight, emits = Flight({}, 0), serving.handle(())
            self._metrics.add(emits.tally)
            self._write(partition, emits, flight)
            self._consumer.flights.launch(flight)

    def check_accounts(self) -> None:
        """Compare the counters with the session tables, while no sessions are being restored."""
        self._metrics.census(self.servings.values())


def _size(work: Mapping[int, Sequence[Record]], emits: Iterable[Emits]) -> int:
    letters = sum(len(letter.value or b"") for emitted in emits for letter in emitted.dead_letters)
    return sum(map(len, work.values())) + letters // LETTER_BYTES
