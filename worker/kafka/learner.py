"""The learner process: reads the journal, folds it, publishes the results, and reports to its worker.

The journal is not read through the consumer group, and no offset of it is committed: the newest version carries the
offset to continue at (`resume_offset`), together with all that was learned up to there.

`worker.kafka.learner_process` starts and kills this process. It reports on its standard output, and ends when its
standard input does, that is with its worker, however that ends. It shares the worker's standard error for its log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from operator import attrgetter
from time import monotonic
from typing import Protocol, TypeVar

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError
from aiokafka.structs import TopicPartition

from worker.child import end_with_parent, report
from worker.errors import AdcascadeError, FailedError
from worker.kafka import parameters as parameters_topic
from worker.kafka import protocol
from worker.kafka.clients import read_to_end, run_client, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.history import HistoryWriter
from worker.kafka.learner_process import LearnerStatus
from worker.kafka.memory import collect_garbage_rarely, reuse_memory
from worker.kafka.parameters import PublishedParameters, published_versions, with_dimension
from worker.kafka.records import next_records
from worker.metrics import Metrics
from worker.stream.encoding import encode_episode
from worker.stream.events import Tag
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.sizes import VERSION_BYTES
from worker.stream.topology import ONLY_PARTITION, Record, Topics
from worker.stream.troubles import Troubles
from worker.stream.versions import RoundedError, version_key

log = logging.getLogger(__name__)

#: How much lower the priority of the learner is: users wait for decisions, not for versions. Small, because a process
#: gets a share of a busy core that falls by a fifth with every step: 39 % with 2, 10 % with 10.
NICE = 2
#: The same for the thread that folds while the learner keeps up: its share of a core does not matter then.
CALM_NICE = 10
#: Seconds without records after which the process reports all the same.
REPORT_INTERVAL = 5.0

_T = TypeVar("_T")


def run_learner(
    connection: Connection, topics: Topics, *, learning: LearningSettings, dim: int | None, arms: tuple[Arm, ...]
) -> int:
    """Fold and publish until the standard input ends; return 1 after a failure. The arguments are the worker's."""
    logging.getLogger(parameters_topic.__name__).setLevel(logging.WARNING)  # the worker logs the versions
    os.nice(NICE)
    end_with_parent()
    protocol.install()
    collect_garbage_rarely()
    reuse_memory()
    try:
        history = run_client(connection, published_versions(connection, topics))
        learning = with_dimension(learning, dim, history)
        published = PublishedParameters(Parameters.first(learning, arms), history, Metrics())
        asyncio.run(_learn(connection, topics, published, lambda: Learner(learning, arms, published.history)))
    except AdcascadeError as error:
        report(LearnerStatus(failure=str(error)))
    except Exception as error:
        log.exception("the learner failed")
        report(LearnerStatus(failure=f"{type(error).__name__}: {error}"))
    return 1


_journal_record = attrgetter("offset", "value", "timestamp")


class Do(Protocol):
    """Runs a call in a thread, calmly in one of lower priority."""

    async def __call__(self, call: Callable[[], Outcome], *, calmly: bool = False) -> Outcome:
        """Return what the call returns."""


def _calm_down() -> None:
    """Lower the priority of this thread, where threads have one of their own (Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), CALM_NICE)


async def _learn(
    connection: Connection, topics: Topics, published: PublishedParameters, make_learner: Callable[[], Learner]
) -> None:
    producer = AIOKafkaProducer(
        **connection.arguments(), enable_idempotence=True, acks="all", max_request_size=VERSION_BYTES
    )
    async with (
        producer,
        standalone_consumer(
            connection, auto_offset_reset="none", fetch_max_wait_ms=500, max_partition_fetch_bytes=4 << 20
        ) as journal,
        standalone_consumer(connection) as parameters,
        standalone_consumer(connection) as history,
    ):
        publisher = JournalPublisher(
            topics,
            published,
            journal=journal,
            parameters=parameters,
            history=HistoryWriter(topics.parameters_history, consumer=history, producer=producer),
            producer=producer,
        )
        await publisher.run(make_learner)


class JournalPublisher:
    """Folds the journal from the resume offset of the newest version, and publishes the results."""

    #: Seconds to wait after fewer than so many records: a round trip for a few records is expensive, and versions are
    #: not urgent. But the records of a longer pause are folded in one go, and serving on the same cores waits
    #: meanwhile: with 0.25 s the p99 of decisions was 87 instead of 52 ms (27,500 events/s on two cores).
    pause, worthwhile = 0.08, 1000
    #: Seconds from a version to its record in the history, which nobody waits for. Meanwhile workers read the version:
    #: while the history was written just then, the p50 of decisions was 28 ms, two seconds later 10.
    history_delay = 2.0

    def __init__(
        self,
        topics: Topics,
        published: PublishedParameters,
        *,
        journal: AIOKafkaConsumer,
        parameters: AIOKafkaConsumer,
        history: HistoryWriter,
        producer: AIOKafkaProducer,
    ) -> None:
        self._topics = topics
        self._tp = TopicPartition(topics.journal, ONLY_PARTITION)
        self._published = published
        self._journal = journal
        self._parameters = parameters
        self._history = history
        self._producer = producer
        self._parameters_position = 0
        self._reported = monotonic()
        self._unkept_since: float | None = None  # a version that is not in the history yet
        self._calm: Executor | None = None  # a thread of lower priority, while this runs

    async def run(self, make_learner: Callable[[], Learner]) -> None:
        """Fold and publish until cancelled; `make_learner` starts from the published versions."""
        await self._read_parameters()
        # In a thread: during a long fold, the loop fetches the next records and answers the brokers. Of two, because a
        # thread without privileges cannot raise its priority again.
        with (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner") as thread,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="calm-learner", initializer=_calm_down) as calm,
        ):
            self._calm = calm

            async def do(call: Callable[[], _T], *, calmly: bool = False) -> _T:
                return await asyncio.get_running_loop().run_in_executor(calm if calmly else thread, call)

            while True:
                learner = await do(make_learner)
                try:
                    await self._fold(learner, do)
                except RoundedError as error:
                    log.info("the learner continues from the published version: %s", error)
                    report(LearnerStatus(rounded=1))

    async def _fold(self, learner: Learner, do: Do) -> None:
        position = await self._seek(learner)
        begun = await do(learner.begin)
        if self._published.history:
            await self._keep(begun.troubles)  # what the learner before this one has not written
        await self.publish(begun, learner, position)
        while True:
            fetched = await next_records(self._journal, seconds=0.5, most=5000)
            records = fetched.get(self._tp, [])
            if records:
                outcome = await do(
                    lambda: learner.handle(map(_journal_record, records)),  # noqa: B023
                    calmly=len(records) < self.worthwhile,
                )
                position = records[-1].offset + 1
                await self.publish(outcome, learner, position)
            elif monotonic() - self._reported > REPORT_INTERVAL:
                self._report(learner, position, Outcome())
            if self._unkept_since is not None and monotonic() - self._unkept_since > self.history_delay:
                outcome = Outcome()
                await self._keep(outcome.troubles)
                self._report(learner, position, outcome)
            if len(records) < self.worthwhile:
                await asyncio.sleep(self.pause)

    async def _seek(self, learner: Learner) -> int:
        journal, tp = self._journal, self._tp
        journal.assign([tp])
        first = (await journal.beginning_offsets([tp]))[tp]
        learner.check_start(first, (await journal.end_offsets([tp]))[tp])
        journal.seek(tp, learner.resume_offset)
        return learner.resume_offset

    async def publish(self, outcome: Outcome, learner: Learner, position: int) -> None:
        """Write episodes, versions and their history, and report to the worker."""
        for refusal in outcome.refusals:
            log.warning("an order was refused: %s", refusal.reason)
        # Episodes first: if the process ends in between, the next learner folds the window again and repeats them. The
        # other way round they would be lost.
        episodes = []
        for episode in outcome.episodes:
            if episode.rejected is not None:
                log.error("the window to %d gave no version: %s", episode.window_end, episode.rejected)
            episodes.append(encode_episode(episode))
            await self._producer.send_and_wait(self._topics.episodes, episodes[-1], key=b"%d" % episode.version)
        tags = deque(outcome.tags)
        for version in outcome.versions:
            # A learner that resumes from this version does not read the tags before it again.
            while tags and tags[0][0] < version.journal_offset:
                await self._tag(tags.popleft()[1], outcome.troubles)
            await self._read_parameters()
            if not self._published.wants(version):
                log.info("version %d is published already", version.version)
                continue
            if self._unkept_since is not None:  # at most one waits: however fast versions come, none is left out
                await self._keep(outcome.troubles)
            await self._write(version)
            self._unkept_since = monotonic()
            first = self._published.content(version.version)
            if first is not None and first.sha256 != version.sha256:
                # Another learner was faster. Of the records with one key, compaction keeps the last: let it be the
                # first content, which all workers serve by.
                await self._write(first)
                self._published.wants(version)  # raises
        for _, tag in tags:
            await self._tag(tag, outcome.troubles)
        self._report(learner, position, outcome, episodes)

    async def _write(self, version: Parameters) -> None:
        """Write a version, and take all that is in the topic by then."""
        topic, key = self._topics.parameters, version_key(version.version)
        value = await asyncio.get_running_loop().run_in_executor(self._calm, self._published.encode, version)
        try:
            written = await self._producer.send_and_wait(topic, value, key=key)
        except MessageSizeTooLargeError:
            raise FailedError(
                f"{topic} does not take version {version.version}, which has {len(value):,} bytes: set its "
                f"max.message.bytes to {VERSION_BYTES} (adcascade topics check)"
            ) from None
        if written.offset != self._parameters_position:
            await self._read_parameters()  # another learner has written, too
            return
        # What is read back would be these bytes, and a version can have several megabytes.
        record = Record(topic, ONLY_PARTITION, written.offset, written.timestamp, key, value)
        self._parameters_position += 1
        self._published.handle([record])

    def _report(self, learner: Learner, position: int, outcome: Outcome, episodes: Sequence[bytes] = ()) -> None:
        self._reported = monotonic()
        raw = tuple(map(msgspec.Raw, episodes))
        report(
            LearnerStatus(
                position=position,
                watermark=learner.watermark,
                slowest=learner.slowest_partition,
                late=outcome.late,
                episodes=raw,
                troubles=tuple(outcome.troubles),
            )
        )

    async def _keep(self, troubles: Troubles) -> None:
        """Add the last versions to the history. A failure delays it and nothing else: the next version repeats it."""
        versions, self._unkept_since = self._published.history, None
        try:
            await self._history.keep(versions)
        except KafkaError as error:
            troubles.add("history", f"versions up to {versions[-1].version}: {error!r}")

    async def _tag(self, tag: Tag, troubles: Troubles) -> None:
        await self._read_parameters()
        if self._unkept_since is not None:
            await self._keep(troubles)
        try:
            await self._history.tag(tag, self._published.history)
        except KafkaError as error:
            troubles.add("history", f"tag {tag.name}: {error!r}")

    async def _read_parameters(self) -> None:
        """Take all versions that are in the topic now."""
        records = await read_to_end(self._parameters, self._topics.parameters, self._parameters_position)
        if records:
            self._parameters_position = records[-1].offset + 1
            self._published.handle(records)
