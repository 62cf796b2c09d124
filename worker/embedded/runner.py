"""The whole topology in one process, synchronously, without a broker.

Bytes go in (`send`), `pump` runs them through the same processors as on Kafka and returns decisions, `advance` sets the
time, so that windows close and versions appear. Everything is in memory; a `tap` receives every record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import TypeAlias
from zlib import crc32

from worker.errors import InputError
from worker.metrics.observer import Metrics
from worker.secret import Secret
from worker.stream.decoding import Limits
from worker.stream.events import Episode, Order, Progress, encode_event
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.serving import Serving, handle_together
from worker.stream.settings import Arm, LearningSettings
from worker.stream.table import SessionRoom
from worker.stream.topology import ONLY_PARTITION, Emits, Record, Tally, Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import Versions, version_key

Headers: TypeAlias = Sequence[tuple[str, bytes]]
#: Receives every record on any topic.
Tap: TypeAlias = Callable[[Record, Headers], None]


class Embedded:
    """Runs the topology in this process.

    Arrivals and clicks have `partitions` partitions; the result does not depend on their number. Sessions beyond
    `max_open_sessions` are answered without being remembered; by default there is no bound. `first` is version 0 where
    that starts from a history (`worker.stream.starting`). `metrics` sum what the processors emit, and `episodes` has
    the closed windows.
    """

    def __init__(
        self,
        settings: LearningSettings,
        arms: Sequence[Arm],
        *,
        partitions: int = 8,
        topics: Topics | None = None,
        limits: Limits | None = None,
        secret: Secret | None = None,
        metrics: Metrics | None = None,
        tap: Tap | None = None,
        max_open_sessions: int | None = None,
        first: Parameters | None = None,
    ) -> None:
        if partitions < 1:
            raise InputError(f"there must be at least one partition, not {partitions}")
        self.topics = topics or Topics()
        self.tally = Tally()
        self._outputs = Outputs(self.topics, tap)
        self._metrics = metrics
        self.episodes: list[Episode] = []
        self._inboxes: list[list[Record]] = [[] for _ in range(partitions)]
        self.learner = Learner(settings, arms, first=first)
        self.versions = Versions(self.learner.current)
        room = SessionRoom(max_open_sessions)
        self.tasks = [
            Serving(
                self.versions,
                partition=partition,
                topics=self.topics,
                limits=limits,
                secret=secret,
                keep_changelog=False,
                room=room,
            )
            for partition in range(partitions)
        ]
        self._latest = 0  # the latest time given to `send`
        self._unread: list[tuple[int, bytes]] = []  # journal records that the learner has not handled
        self._publish(self.learner.begin().versions)

    @property
    def time(self) -> int:
        """The latest time given to `advance`."""
        return self._outputs.time

    def partition_of(self, key: bytes) -> int:
        """Return the partition of a key."""
        return crc32(key) % len(self.tasks)

    # ── input ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, topic: str, value: bytes | None, *, key: bytes | None, timestamp: int) -> None:
        """Write a record to arrivals or clicks; the next `pump` handles it."""
        partition = self.partition_of(key or b"")
        record = Record(topic, partition, self._outputs.next_offset(topic, partition), timestamp, key, value)
        self._latest = max(self._latest, timestamp)
        self._inboxes[partition].append(record)
        if self._outputs.tap:
            self._outputs.tap(record, ())

    def order(self, event: Order) -> Outcome:
        """Write an order to the journal, let the learner execute it, and return the outcome."""
        self._journal([(None, encode_event(event))])
        return self._learn()

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def pump(self) -> list[tuple[bytes, bytes]]:
        """Handle everything that was sent; return the decisions (key, value)."""
        poll = {partition: inbox for partition, inbox in enumerate(self._inboxes) if inbox}
        self._inboxes = [[] for _ in self.tasks]
        return self._step(poll) if poll else []

    def advance(self, now: int) -> None:
        """Set the time; everything sent is handled, so all partitions have progressed to it."""
        if any(self._inboxes):
            raise InputError("call pump before advance: records are waiting")
        self._outputs.time = max(self.time, now)
        count = len(self.tasks)
        progress = [Progress(partition=one, partitions=count, time=self.time) for one in range(count)]
        self._journal([(None, encode_event(one)) for one in progress])
        for task in self.tasks:
            task.acknowledged(self.time)
        if due := [partition for partition, task in enumerate(self.tasks) if task.has_due]:
            self._step(dict.fromkeys(due, ()))
        self._learn()

    def _step(self, poll: Mapping[int, Sequence[Record]]) -> list[tuple[bytes, bytes]]:
        """Handle records by partition, all partitions together; return the decisions."""
        started = perf_counter()
        handled = handle_together((self.tasks[partition], records) for partition, records in poll.items())
        seconds = perf_counter() - started
        for partition, emits in zip(poll, handled, strict=True):
            self._journal(emits.journal)
            self._outputs.add_emits(emits, partition)
        self._learn()  # now, while the records are in the CPU cache
        self.tally.add(handled[0].tally)
        if self._metrics is not None:
            self._metrics.batches(handled, sum(map(len, poll.values())), seconds)
        return [decision for emits in handled for decision in emits.decisions]

    def _journal(self, records: Sequence[tuple[bytes | None, bytes]]) -> None:
        # Not before the events: `replay` refuses facts that are far ahead of their records.
        self._unread += self._outputs.add_journal(records, time=max(self.time, self._latest))

    def _learn(self) -> Outcome:
        unread, self._unread = self._unread, []
        outcome = self.learner.handle(unread)
        self.tally.troubles.update(outcome.troubles)
        if self._metrics is not None:
            self._metrics.late(outcome.late)
        for episode in outcome.episodes:
            self._outputs.emit(self.topics.episodes, b"%d" % episode.version, encode_event(episode))
            if self._metrics is not None:
                self._metrics.episode(episode)
        self.episodes += outcome.episodes
        self._publish(outcome.versions)
        return outcome

    def _publish(self, versions: Iterable[Parameters]) -> None:
        for parameters in versions:
            value = encode_parameters(parameters)
            self.versions.learn(decode_parameters(value))
            self._outputs.emit(self.topics.parameters, version_key(parameters.version), value)
            if self._metrics is not None:
                self._metrics.version(parameters)


class Outputs:
    """Gives records their offsets, and the `tap` the records, if there is one; `time` is that of the records.

    The embedded runner and `adcascade serve` write through this.
    """

    def __init__(self, topics: Topics, tap: Tap | None) -> None:
        self.topics, self.tap = topics, tap
        self.time = 0
        self.journal_end = 0
        self.offsets: Counter[tuple[str, int]] = Counter()  # the next ones, by topic and partition

    def next_offset(self, topic: str, partition: int = ONLY_PARTITION) -> int:
        """Give out the next offset of a partition."""
        offset = self.offsets[topic, partition]
        self.offsets[topic, partition] += 1
        return offset

    def add_journal(
        self, records: Sequence[tuple[bytes | None, bytes]], *, time: int | None = None
    ) -> list[tuple[int, bytes]]:
        """Append keys and values to the journal; return the values with their offsets."""
        numbered = list(enumerate((value for _, value in records), start=self.journal_end))
        self.journal_end += len(numbered)
        if self.tap is not None:
            now = self.time if time is None else time
            for (offset, value), (key, _) in zip(numbered, records, strict=True):
                self.tap(Record(self.topics.journal, ONLY_PARTITION, offset, now, key, value), ())
        return numbered

    def add_emits(self, emits: Emits, partition: int = ONLY_PARTITION) -> None:
        """Add the decisions and dead letters of a batch."""
        if self.tap is not None:
            for key, value in emits.decisions:
                self.emit(self.topics.decisions, key, value, partition)
            for letter in emits.dead_letters:
                self.emit(self.topics.dead_letters, letter.key, letter.value, headers=letter.headers)

    def emit(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition: int = ONLY_PARTITION,
        headers: Headers = (),
    ) -> None:
        """Add a record at the next offset of its partition."""
        if self.tap is not None:
            self.tap(Record(topic, partition, self.next_offset(topic, partition), self.time, key, value), headers)
