"""The learner process: reads the journal, folds it, publishes the results, and reports to its worker.

The journal is not read through the consumer group, and no offset of it is committed: the newest version carries the
offset to continue at (`resume_offset`), together with all that was learned up to there.

`worker.runtime.learner_process` starts and kills this process, which reports to it (see `worker.runtime.process`). It
shares the worker's standard error for its log.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import closing
from time import monotonic
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from worker.errors import FailedError
from worker.kafka import parameters as parameters_topic
from worker.kafka.clients import TopicReader, durable_producer, readable_errors, write
from worker.kafka.connection import reason_of
from worker.kafka.control import KafkaControl
from worker.kafka.history import HistoryWriter
from worker.kafka.parameters import PublishedParameters, Received, published_versions
from worker.kafka.settings import WorkerSettings
from worker.metrics.observer import Metrics
from worker.runtime.learner_process import MOST_RECORDS, NICE, REPORT_INTERVAL, LearnerStatus
from worker.runtime.process import collect_garbage_rarely, report
from worker.stream.events import Tag, encode_event
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters
from worker.stream.topology import ONLY_PARTITION, Topics
from worker.stream.troubles import Troubles
from worker.stream.version_records import encode_parameters
from worker.stream.version_sizes import VERSION_BYTES
from worker.stream.versions import RoundedError, version_key

log = logging.getLogger(__name__)

#: The broker waits for this much of the journal, or this long: a round trip for a few records is expensive, and
#: versions are not urgent. But the records of a longer wait are folded in one go, and serving on the same cores waits
#: meanwhile: with 250 ms the p99 of decisions was 87 instead of 52 ms (27,500 events/s on two cores).
BATCHING: Final = {"fetch_min_bytes": 256 << 10, "fetch_wait_max_ms": 80}


def run_learner(settings: WorkerSettings) -> None:
    """Fold and publish for ever, under the settings of the worker."""
    connection, topics = settings.connection, settings.topics
    logging.getLogger(parameters_topic.__name__).setLevel(logging.WARNING)  # the worker logs the versions
    os.nice(NICE)
    collect_garbage_rarely()
    history = published_versions(connection, topics)
    control = KafkaControl(connection, topics)
    settings = settings.with_tagged(history, control.slots, control.load)
    learning, first = settings.configured(history)
    published = PublishedParameters(first, history, Metrics())
    with (
        readable_errors(connection),
        closing(durable_producer(connection)) as producer,
        TopicReader(connection, auto_offset_reset="error", fetch_message_max_bytes=4 << 20, **BATCHING) as journal,
        TopicReader(connection) as versions,
    ):
        publisher = JournalPublisher(topics, published, journal=journal, versions=versions, producer=producer)
        publisher.run(lambda: Learner(learning, settings.arms, published.history, first=first))


class JournalPublisher:
    """Folds the journal from the resume offset of the newest version, and publishes the results."""

    def __init__(
        self,
        topics: Topics,
        published: PublishedParameters,
        *,
        journal: TopicReader,
        versions: TopicReader,
        producer: Producer,
    ) -> None:
        self._topics = topics
        self.published = published
        self._journal = journal
        self._versions = versions
        self._history = HistoryWriter(topics.parameters_history, reader=versions, producer=producer)
        self._producer = producer
        self._parameters_position = 0
        self._reported = monotonic()

    def run(self, make_learner: Callable[[], Learner]) -> None:
        """Fold and publish for ever; `make_learner` starts from the published versions."""
        self.read_parameters()
        while True:
            learner = make_learner()
            try:
                self._fold(learner)
            except RoundedError as error:
                log.info("the learner continues from the published version: %s", error)
                report(LearnerStatus(rounded=1))

    def _fold(self, learner: Learner) -> None:
        learner.check_start(*self._journal.bounds(self._topics.journal))
        position = learner.resume_offset
        self._journal.read_from({(self._topics.journal, ONLY_PARTITION): position})
        self.publish(learner.begin(), learner, position)
        while True:
            records = self._next_records(position)
            if records:
                outcome = learner.handle((one.offset(), one.value(), one.timestamp()[1]) for one in records)
                position = records[-1].offset() + 1
                self.publish(outcome, learner, position)
            elif monotonic() - self._reported > REPORT_INTERVAL:
                self._report(learner, position, Outcome())

    def _next_records(self, position: int) -> list[Message]:
        try:
            return self._journal.poll(0.5, MOST_RECORDS)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._AUTO_OFFSET_RESET:
                raise
            raise FailedError(
                f"{self._topics.journal} was trimmed while it was read: offset {position} is gone"
            ) from None

    def publish(self, outcome: Outcome, learner: Learner, position: int) -> None:
        """Write episodes, versions and their history, and report to the worker."""
        for refusal in outcome.refusals:
            log.warning("an order was refused: %s", refusal.reason)
        # Episodes first: if the process ends in between, the next learner folds the window again and repeats them. The
        # other way round they would be lost.
        for episode in outcome.episodes:
            if episode.rejected is not None:
                log.error("the window to %d gave no version: %s", episode.window_end, episode.rejected)
            write(self._producer, self._topics.episodes, encode_event(episode), b"%d" % episode.version)
        tags = deque(outcome.tags)
        for version in outcome.versions:
            # A learner that resumes from this version does not read the tags before it again.
            while tags and tags[0][0] < version.journal_offset:
                self._tag(tags.popleft()[1], outcome.troubles)
            self.read_parameters()
            if not self.published.wants(version):
                log.info("version %d is published already", version.version)
                continue
            # Those before it: while workers read and prepare a version, its record in the history would delay them.
            self.keep(outcome.troubles)
            self._write(version)
            first = self.published.content(version.version)
            if first is not None and first.sha256 != version.sha256:
                # Another learner was faster. Of the records with one key, compaction keeps the last: let it be the
                # first content, which all workers serve by.
                self._write(first)
                self.published.wants(version)  # raises
        for _, tag in tags:
            self._tag(tag, outcome.troubles)
        self._report(learner, position, outcome)

    def _write(self, version: Parameters) -> None:
        """Write a version, and take all that is in the topic by then."""
        topic, key = self._topics.parameters, version_key(version.version)
        value = encode_parameters(version)
        try:
            written = write(self._producer, topic, value, key)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
                raise
            raise FailedError(
                f"{topic} does not take version {version.version}, which has {len(value):,} bytes: set its "
                f"max.message.bytes to {VERSION_BYTES} (adcascade topics check)"
            ) from None
        if written.offset() != self._parameters_position:
            self.read_parameters()  # another learner has written, too
            return
        # Not read back: a version can have several megabytes.
        self._parameters_position += 1
        self.published.take([Received(offset=written.offset(), timestamp=written.timestamp()[1], parameters=version)])

    def _report(self, learner: Learner, position: int, outcome: Outcome) -> None:
        self._reported = monotonic()
        report(LearnerStatus.of(learner, position, outcome))

    def keep(self, troubles: Troubles) -> None:
        """Add the last versions to the history. A failure delays it and nothing else: the next version repeats it."""
        try:
            self._history.keep(self.published.history)
        except KafkaException as error:
            troubles.add("history", f"versions up to {self.published.version}: {reason_of(error)}")

    def _tag(self, tag: Tag, troubles: Troubles) -> None:
        self.read_parameters()
        self.keep(troubles)
        try:
            self._history.tag(tag, self.published.history)
        except KafkaException as error:
            troubles.add("history", f"tag {tag.name}: {reason_of(error)}")

    def read_parameters(self) -> None:
        """Take all versions that are in the topic now."""
        records = self._versions.read_to_end(self._topics.parameters, self._parameters_position)
        if records:
            self._parameters_position = records[-1].offset + 1
            self.published.handle(records)
