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
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition

from worker.errors import FailedError
from worker.kafka import parameters as parameters_topic
from worker.kafka.clients import read_to_end, run_client, standalone_consumer
from worker.kafka.connection import Connection
from worker.kafka.learner_process import LearnerStatus
from worker.kafka.memory import collect_garbage_rarely, return_memory_periodically
from worker.kafka.parameters import PublishedParameters, published_versions, with_dimension
from worker.kafka.records import next_records
from worker.metrics import Metrics
from worker.stream.encoding import encode_episode
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters, encode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import ONLY_PARTITION, Topics
from worker.stream.versions import version_key

log = logging.getLogger(__name__)

#: How much lower the priority of the learner is: users wait for decisions, not for versions.
NICE = 10

_T = TypeVar("_T")


def run_learner(
    connection: Connection, topics: Topics, *, learning: LearningSettings, dim: int | None, arms: tuple[Arm, ...]
) -> int:
    """Fold and publish until the standard input ends; return 1 after a failure. The arguments are the worker's."""
    logging.getLogger(parameters_topic.__name__).setLevel(logging.WARNING)  # the worker logs the versions
    history = run_client(connection, published_versions(connection, topics))
    learning = with_dimension(learning, dim, history)
    published = PublishedParameters(Parameters.first(learning, arms), history, Metrics())
    os.nice(NICE)
    # The worker decides when this process ends. Signals to the whole group (Ctrl-C, systemd) are for the worker.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    threading.Thread(target=_end_with_input, daemon=True).start()
    collect_garbage_rarely()
    return_memory_periodically()
    try:
        asyncio.run(_learn(connection, topics, published, lambda: Learner(learning, arms, published.history)))
    except FailedError as error:
        _report(LearnerStatus(failure=str(error)))
    except Exception:
        log.exception("the learner failed")
    return 1


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _report(status: LearnerStatus) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
    sys.stdout.buffer.flush()


async def _learn(
    connection: Connection, topics: Topics, published: PublishedParameters, make_learner: Callable[[], Learner]
) -> None:
    producer = AIOKafkaProducer(
        **connection.arguments(), enable_idempotence=True, acks="all", max_request_size=16 << 20
    )
    async with (
        producer,
        standalone_consumer(
            connection, auto_offset_reset="none", fetch_max_wait_ms=500, max_partition_fetch_bytes=4 << 20
        ) as journal,
        standalone_consumer(connection) as parameters,
    ):
        publisher = JournalPublisher(topics, published, journal=journal, parameters=parameters, producer=producer)
        await publisher.run(make_learner)


class JournalPublisher:
    """Folds the journal from the resume offset of the newest version, and publishes the results."""

    #: Seconds to wait after fewer than so many records: a round trip for a few records is expensive, and versions are
    #: not urgent. But the records of a longer pause are folded in one go, and serving on the same cores waits
    #: meanwhile: with 0.25 s the p99 of decisions was 87 instead of 52 ms (27,500 events/s on two cores).
    pause, worthwhile = 0.08, 1000

    def __init__(
        self,
        topics: Topics,
        published: PublishedParameters,
        *,
        journal: AIOKafkaConsumer,
        parameters: AIOKafkaConsumer,
        producer: AIOKafkaProducer,
    ) -> None:
        self._topics = topics
        self._tp = TopicPartition(topics.journal, ONLY_PARTITION)
        self._published = published
        self._journal = journal
        self._parameters = parameters
        self._producer = producer
        self._parameters_position = 0

    async def run(self, make_learner: Callable[[], Learner]) -> None:
        """Fold and publish until cancelled; `make_learner` starts from the published versions."""
        await self._read_parameters()
        # In a thread: during a long fold, the loop fetches the next records and answers the brokers.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner") as thread:

            async def do(call: Callable[[], _T]) -> _T:
                return await asyncio.get_running_loop().run_in_executor(thread, call)

            learner = await do(make_learner)
            position = await self._seek(learner)
            await self.publish(await do(learner.begin), learner, position)
            while True:
                fetched = await next_records(self._journal, seconds=0.5, most=5000)
                records = fetched.get(self._tp, [])
                if records:
                    outcome = await do(lambda: learner.handle((one.offset, one.value) for one in records))  # noqa: B023
                    await self.publish(outcome, learner, records[-1].offset + 1)
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
        """Write episodes and versions, and report to the worker."""
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
        for version in outcome.versions:
            await self._read_parameters()
            if not self._published.wants(version):
                log.info("version %d is published already", version.version)
                continue
            key = version_key(version.version)
            await self._producer.send_and_wait(self._topics.parameters, encode_parameters(version), key=key)
        raw = tuple(map(msgspec.Raw, episodes))
        _report(LearnerStatus(position=position, watermark=learner.watermark, episodes=raw))

    async def _read_parameters(self) -> None:
        """Take all versions that are in the topic now."""
        records = await read_to_end(self._parameters, self._topics.parameters, self._parameters_position)
        if records:
            self._parameters_position = records[-1].offset + 1
            self._published.handle(records)
