"""The learner's process: reads the journal, folds it, publishes what was learned, and tells its worker.

The records do not come through the consumer group: a committed offset could not say where to go on. That stands in the
newest version (`resume_offset`), next to what was learned up to there.

Started and killed by `worker.kafka.learner_process`. It reports on its standard output, a line of JSON each (`Report`),
and ends when its standard input does, that is with its worker, however that ends. What it logs goes where the worker's
log goes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition

from worker.errors import FailedError
from worker.kafka.broadcast import Broadcast
from worker.kafka.connection import Connection
from worker.kafka.memory import collect_garbage_rarely, return_memory_periodically
from worker.kafka.records import next_records
from worker.kafka.transport import Learner, Lessons, ParametersSink, Report
from worker.stream.topology import Topics

log = logging.getLogger(__name__)

#: How far it stands back behind the serving: users wait for decisions, nobody for what is learned.
NICE = 10

_T = TypeVar("_T")


def run(connection: Connection, names: Topics, sink: ParametersSink, learn: Callable[[], Learner]) -> int:
    """Learn until the standard input ends; return 1 after a failure. Logging is the caller's.

    `learn` makes a learner from what the sink has seen.
    """
    os.nice(NICE)
    # The worker decides when this ends. Signals to the whole group (Ctrl-C, systemd) are for the worker.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    threading.Thread(target=_end_with_input, daemon=True).start()
    collect_garbage_rarely()
    return_memory_periodically()
    try:
        asyncio.run(_fold(connection, names, sink, learn))
    except FailedError as error:
        _tell(Report(failure=str(error)))
        return 1
    except Exception:
        log.exception("the learner failed")
    return 1


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _tell(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


async def _fold(connection: Connection, names: Topics, sink: ParametersSink, learn: Callable[[], Learner]) -> None:
    broadcast = Broadcast(connection=connection, topic=names.parameters, sink=sink)
    producer = AIOKafkaProducer(
        **connection.arguments(), enable_idempotence=True, acks="all", max_request_size=16 << 20
    )
    consumer = AIOKafkaConsumer(
        **connection.arguments(),
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="none",
        max_partition_fetch_bytes=4 << 20,
    )
    async with broadcast, producer, consumer:
        await Fold(names, broadcast, sink, consumer, producer).run(learn)


class Fold:
    """Folds the journal from where the newest version says."""

    #: Seconds to rest after fewer than so many records: a round trip for each handful is dear, and nobody waits for
    #: what is learned. But what comes in a longer rest is folded in one go, and whoever is served from the same cores
    #: waits meanwhile: with 0.25 s their p99 was 87 instead of 52 ms (27,500 events/s on two cores).
    rest, worthwhile = 0.08, 1000

    def __init__(
        self,
        names: Topics,
        broadcast: Broadcast,
        sink: ParametersSink,
        consumer: AIOKafkaConsumer,
        producer: AIOKafkaProducer,
    ) -> None:
        self._names = names
        self._tp = TopicPartition(names.journal, 0)
        self._broadcast = broadcast
        self._sink = sink
        self._consumer = consumer
        self._producer = producer

    async def run(self, learn: Callable[[], Learner]) -> None:
        """Go on until cancelled."""
        await self._broadcast.read_to_end()
        # In a thread, so that the next records are fetched, and the brokers are answered, during a long fold.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner") as thread:

            async def do(call: Callable[[], _T]) -> _T:
                return await asyncio.get_running_loop().run_in_executor(thread, call)

            learner = await do(learn)
            position = await self._seek(learner)
            await self._publish(await do(learner.begin), learner, position)
            while True:
                fetched = await next_records(self._consumer, seconds=0.5, most=5000)
                records = fetched.get(self._tp, [])
                if records:
                    lessons = await do(lambda: learner.handle(records))  # noqa: B023
                    await self._publish(lessons, learner, records[-1].offset + 1)
                if len(records) < self.worthwhile:
                    await asyncio.sleep(self.rest)

    async def _seek(self, learner: Learner) -> int:
        consumer, tp = self._consumer, self._tp
        consumer.assign([tp])
        first = (await consumer.beginning_offsets([tp]))[tp]
        last = (await consumer.end_offsets([tp]))[tp]
        learner.check_start(first, last)
        offset = learner.resume_offset
        if offset < first:
            raise FailedError(
                f"the journal {tp.topic} begins at {first}, but {offset} is still needed: it was trimmed. "
                "What was not folded is lost; raise its retention, then publish a version that resumes later"
            )
        if offset > last:
            raise FailedError(
                f"the parameters resume at {offset}, but the journal {tp.topic} ends at {last}: "
                "it was made anew, or the parameters belong to another one"
            )
        consumer.seek(tp, offset)
        return offset

    async def _publish(self, lessons: Lessons, learner: Learner, position: int) -> None:
        # Episodes first: if the process ends in between, the next learner folds the window again and repeats them. The
        # other way round they would be lost.
        await self._write(self._names.episodes, lessons.episodes)
        for publication in lessons.parameters:
            await self._broadcast.read_to_end()
            if not self._sink.wants(publication):
                log.info("version %d is there already", publication.version)
                continue
            await self._write(self._names.parameters, [(publication.key, publication.value)])
        episodes = tuple(msgspec.Raw(value) for _, value in lessons.episodes)
        _tell(Report(position=position, watermark=learner.watermark, episodes=episodes))

    async def _write(self, topic: str, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        for key, value in pairs:
            await self._producer.send_and_wait(topic, value, key=key)
