"""The whole topology in one process, synchronously, without a broker.

Bytes go in (`send`), `pump` runs them through the same processors as on Kafka and returns decisions, `advance` sets the
time, so that windows close and versions appear. With a state folder, sessions, journal and parameters survive the
process, also a `kill -9`. The effects of a step are stored before its decisions are returned: a caller without an
answer sends again, and nothing counts twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Protocol
from zlib import crc32

from worker.embedded.state import StateFolder
from worker.errors import InputError
from worker.secret import Secret
from worker.stream.catalogue import Refusal
from worker.stream.decoding import Limits
from worker.stream.encoding import encode_episode, encode_journal
from worker.stream.events import Episode, Order, Progress
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.serving import Serving, handle_together
from worker.stream.settings import Arm, LearningSettings
from worker.stream.table import SessionRoom
from worker.stream.topology import ONLY_PARTITION, Emits, Record, Tally, Topics
from worker.stream.version_records import encode_parameters
from worker.stream.versions import KEPT, Versions, version_key

Headers = Sequence[tuple[str, bytes]]


class Observer(Protocol):
    """Observes what the processors emit."""

    def batches(self, emits: Sequence[Emits], records: int, seconds: float) -> None:
        """Observe batches of several partitions that were handled together, and so have one tally."""

    def episode(self, episode: Episode) -> None:
        """Observe a closed window."""

    def version(self, parameters: Parameters) -> None:
        """Observe a published version."""

    def late(self, records: int) -> None:
        """Observe journal records for windows that were already closed."""


class Tap(Protocol):
    """Receives every record on any topic."""

    def __call__(self, record: Record, headers: Headers) -> None:
        """Receive a record."""


class Embedded:
    """Runs the topology in this process; a `state` folder keeps everything across restarts.

    Arrivals and clicks have `partitions` partitions; the result does not depend on their number. Sessions beyond
    `max_open_sessions` are answered without being remembered; by default there is no bound.
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
        state: StateFolder | None = None,
        observers: Sequence[Observer] = (),
        tap: Tap | None = None,
        batch: int = 512,
        max_open_sessions: int | None = None,
    ) -> None:
        if partitions < 1:
            raise InputError(f"there must be at least one partition, not {partitions}")
        self.topics = topics or Topics()
        self.time = 0  # the latest time given to `advance`
        self.tally = Tally()
        self._state = state
        self._tap = tap
        self._observers = observers
        self._batch = batch
        self._offsets: Counter[tuple[str, int]] = Counter()  # the next ones, by topic and partition
        self._inboxes: list[list[Record]] = [[] for _ in range(partitions)]
        history = [decode_parameters(value) for value in state.parameters()] if state else []
        self.learner = Learner(settings, arms, history)
        self.versions = Versions(history[0] if history else self.learner.current)
        for parameters in history[1:]:
            self.versions.learn(parameters)
        room = SessionRoom(max_open_sessions)
        self.tasks = [
            Serving(
                self.versions,
                partition=partition,
                topics=self.topics,
                limits=limits,
                secret=secret,
                keep_changelog=state is not None,
                room=room,
            )
            for partition in range(partitions)
        ]
        self._journal_end = 0
        self._latest = 0  # the latest time given to `send`
        self._unread: list[tuple[int, bytes]] = []  # journal records that the learner has not handled
        if state is not None:
            self._resume(state)
        self._publish(self.learner.begin().versions)
        self._commit()

    def _resume(self, state: StateFolder) -> None:
        parts: list[list[Record]] = [[] for _ in self.tasks]
        for key, value in state.sessions():
            partition = self.partition_of(key)
            parts[partition].append(Record(self.topics.changelog, partition, -1, -1, key, value))
        for task, part in zip(self.tasks, parts, strict=True):
            self.tally.add(task.restore(part))
        self.time = int(state.meta("time") or b"0")
        first, self._journal_end = state.journal_bounds()
        self.learner.check_start(first, self._journal_end)
        self._unread.extend(state.journal(self.learner.resume_offset))
        self._learn()

    def partition_of(self, key: bytes) -> int:
        """Return the partition of a key."""
        return crc32(key) % len(self.tasks)

    # ── input ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, topic: str, value: bytes | None, *, key: bytes | None, timestamp: int) -> None:
        """Write a record to arrivals or clicks; the next `pump` handles it."""
        partition = self.partition_of(key or b"")
        record = Record(topic, partition, self._offsets[topic, partition], timestamp, key, value)
        self._offsets[topic, partition] += 1
        self._latest = max(self._latest, timestamp)
        self._inboxes[partition].append(record)
        if self._tap:
            self._tap(record, ())

    def order(self, event: Order) -> Outcome:
        """Write an order to the journal, let the learner execute it, and return the outcome."""
        self._journal([(None, encode_journal(event))])
        outcome = self._learn()
        self._commit()
        return outcome

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def pump(self) -> list[tuple[bytes, bytes]]:
        """Handle everything that was sent; return the decisions (key, value)."""
        decisions: list[tuple[bytes, bytes]] = []
        for poll in self._polls():
            decisions.extend(self._step(poll))
        return decisions

    def _polls(self) -> Iterator[dict[int, list[Record]]]:
        """Take what was sent, by partition, in parts of at most `batch` records.

        Few records of many partitions are one part: most of the time of a small step is its set-up.
        """
        poll: dict[int, list[Record]] = {}
        room = self._batch
        for partition, inbox in enumerate(self._inboxes):
            self._inboxes[partition] = []
            for start in range(0, len(inbox), self._batch):
                records = inbox[start : start + self._batch]
                if len(records) > room:
                    yield poll
                    poll, room = {}, self._batch
                poll[partition] = records
                room -= len(records)
        if poll:
            yield poll

    def advance(self, now: int) -> None:
        """Set the time; everything sent is handled, so all partitions have progressed to it."""
        if any(self._inboxes):
            raise InputError("call pump before advance: records are waiting")
        self.time = max(self.time, now)
        # A state folder may have been written with more partitions. The others are empty, and must not delay windows.
        count = max(len(self.tasks), self.learner.partitions)
        opened = [*(task.opened for task in self.tasks), *(None for _ in range(count - len(self.tasks)))]
        progress = [
            Progress(partition=partition, partitions=count, time=self.time, opened=counts)
            for partition, counts in enumerate(opened)
        ]
        self._journal([(None, encode_journal(one)) for one in progress])
        for task in self.tasks:
            task.acknowledged(self.time)
        if due := [partition for partition, task in enumerate(self.tasks) if task.has_due]:
            self._step(dict.fromkeys(due, ()))
        if self._state:
            self._state.set_meta("time", b"%d" % self.time)
        self._learn()
        self._commit()

    def _step(self, poll: Mapping[int, Sequence[Record]]) -> list[tuple[bytes, bytes]]:
        """Handle records by partition, all partitions together; return the decisions."""
        started = perf_counter()
        handled = handle_together((self.tasks[partition], records) for partition, records in poll.items())
        seconds = perf_counter() - started
        for partition, emits in zip(poll, handled, strict=True):
            self._journal(emits.journal)
            if self._tap:
                self._tap_emits(emits, partition)
            if self._state:
                self._state.change_sessions(emits.changelog)
        self._learn()  # now, while the records are in the CPU cache
        self._commit()
        self.tally.add(handled[0].tally)
        for observer in self._observers:
            observer.batches(handled, sum(map(len, poll.values())), seconds)
        return [decision for emits in handled for decision in emits.decisions]

    def _journal(self, records: Sequence[tuple[bytes | None, bytes]]) -> None:
        start = self._journal_end
        numbered = [(start + index, value) for index, (_, value) in enumerate(records)]
        self._journal_end += len(numbered)
        self._unread.extend(numbered)
        if self._state:
            self._state.append_journal(numbered)
        if self._tap:
            # Not before the events: `replay` refuses facts that are far ahead of their records.
            now = max(self.time, self._latest)
            for (offset, value), (key, _) in zip(numbered, records, strict=True):
                self._tap(Record(self.topics.journal, ONLY_PARTITION, offset, now, key, value), ())

    def _learn(self) -> Outcome:
        unread, self._unread = self._unread, []
        outcome = self.learner.handle(unread)
        self.tally.troubles.update(outcome.troubles)
        if outcome.late:
            for observer in self._observers:
                observer.late(outcome.late)
        for episode in outcome.episodes:
            self._emit(self.topics.episodes, b"%d" % episode.version, encode_episode(episode))
            for observer in self._observers:
                observer.episode(episode)
        self._publish(outcome.versions)
        for _, tag in outcome.tags:
            if self._state and not self._state.tag(tag):
                outcome.refusals.append(Refusal(order=tag, reason=f"version {tag.version} is not kept"))
        return outcome

    def _publish(self, versions: Iterable[Parameters]) -> None:
        for parameters in versions:
            value = encode_parameters(parameters)
            self._emit(self.topics.parameters, version_key(parameters.version), value)
            self.versions.learn(decode_parameters(value))
            if self._state:
                self._state.put_parameters(parameters, value, kept=KEPT)
                self._state.keep_history(self.versions.history)
            for observer in self._observers:
                observer.version(parameters)

    def _emit(
        self, topic: str, key: bytes | None, value: bytes | None, partition: int = 0, headers: Headers = ()
    ) -> None:
        if self._tap:
            self._tap(Record(topic, partition, self._offsets[topic, partition], self.time, key, value), headers)
            self._offsets[topic, partition] += 1

    def _tap_emits(self, emits: Emits, partition: int) -> None:
        for key, value in emits.decisions:
            self._emit(self.topics.decisions, key, value, partition)
        for letter in emits.dead_letters:
            self._emit(self.topics.dead_letters, letter.key, letter.value, 0, letter.headers)

    def _commit(self) -> None:
        if self._state:
            self._state.commit()
