"""The learner's seat: whoever is assigned the journal's only partition folds it.

The group decides who sits there; the records do not come through the group. A committed offset could not say where to
go on: that stands in the newest version (`resume_offset`), next to what was learned up to there. So the journal has a
reader of its own, started when the partition comes and stopped when it goes to another worker. A rebalance that leaves
it here does not disturb the fold. Two learners at once, while a paused worker has not noticed, can only publish the
same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition
from mode import Service

from worker.errors import FailedError
from worker.runners.faust.broadcast import Broadcast
from worker.runners.faust.connection import Connection
from worker.runners.faust.names import TopicNames
from worker.runners.faust.ports import Learner, Lessons, ParametersSink
from worker.runners.faust.records import next_records

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class LearnerSeat(Service):
    """Runs a learner while the journal is assigned to this worker.

    Parameters
    ----------
    learn
        Makes a learner from what the sink has seen.
    producer
        Returns the worker's producer, once it runs.
    failed
        Called when a version cannot be written: the worker must end.
    """

    #: Seconds between a failure of the learner and the next attempt.
    patience = 10.0
    #: Seconds to rest after fewer than so many records. Going to the thread and back for a handful of them, hundreds of
    #: times a second, takes time from serving; and nobody waits for what is learned.
    rest, worthwhile = 0.05, 1000

    def __init__(
        self,
        *,
        connection: Connection,
        names: TopicNames,
        broadcast: Broadcast,
        sink: ParametersSink,
        learn: Callable[[], Learner],
        producer: Callable[[], AIOKafkaProducer],
        failed: Callable[[BaseException], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._connection = connection
        self._names = names
        self._tp = TopicPartition(names.journal, 0)
        self._broadcast = broadcast
        self._sink = sink
        self._learn = learn
        self._producer = producer
        self._failed = failed
        self._task: asyncio.Task[None] | None = None
        #: Why there is no learner although one should be; serving goes on.
        self.failure: BaseException | None = None
        #: The journal offset that is folded next, -1 while nobody sits here.
        self.position = -1

    @property
    def taken(self) -> bool:
        """Whether a learner runs here."""
        return self._task is not None and not self._task.done()

    def assign(self, mine: bool) -> None:
        """Sit down or get up, after a rebalance."""
        if mine and self._task is None:
            log.info("the journal is assigned to this worker: it learns")
            self._task = asyncio.get_running_loop().create_task(self._sit())
        elif not mine and self._task is not None:
            log.info("the journal went to another worker")
            self._task.cancel()
            self._task = None
            self.position = -1

    async def on_stop(self) -> None:
        """Get up."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _sit(self) -> None:
        # A learner that fails must not end the serving: that goes on with the versions there are.
        while True:
            try:
                await self._fold()
            except FailedError as error:
                self.failure = error
                log.critical("the learner stops: %s", error)
                return
            except Exception as error:
                self.failure = error
                log.exception("the learner failed; it begins anew in %g s", self.patience)
                await asyncio.sleep(self.patience)

    async def _fold(self) -> None:
        await self._broadcast.read_to_end()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner") as thread:
            learner = await self._in(thread, self._learn)
            consumer = AIOKafkaConsumer(
                **self._connection.arguments(),
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="none",
                max_partition_fetch_bytes=4 << 20,
            )
            await consumer.start()
            try:
                self.position, self.failure = await self._seek(consumer, learner), None
                await self._publish(await self._in(thread, learner.begin))
                while True:
                    records = await next_records(consumer, self._tp, seconds=0.5, most=5000)
                    if records:
                        await self._publish(await self._in(thread, lambda: learner.handle(records)))  # noqa: B023
                        self.position = records[-1].offset + 1
                    if len(records) < self.worthwhile:
                        await asyncio.sleep(self.rest)
            finally:
                await consumer.stop()

    async def _seek(self, consumer: AIOKafkaConsumer, learner: Learner) -> int:
        consumer.assign([self._tp])
        first = (await consumer.beginning_offsets([self._tp]))[self._tp]
        last = (await consumer.end_offsets([self._tp]))[self._tp]
        learner.check_start(first, last)
        offset = learner.resume_offset
        if offset < first:
            raise FailedError(
                f"the journal {self._tp.topic} begins at {first}, but {offset} is still needed: it was trimmed. "
                "What was not folded is lost; raise its retention, then publish a version that resumes later"
            )
        if offset > last:
            raise FailedError(
                f"the parameters resume at {offset}, but the journal {self._tp.topic} ends at {last}: "
                "it was made anew, or the parameters belong to another one"
            )
        consumer.seek(self._tp, offset)
        return offset

    async def _in(self, thread: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(thread, call)

    async def _publish(self, lessons: Lessons) -> None:
        # Episodes first: if the worker ends in between, the next learner folds the window again and repeats them. The
        # other way round they would be lost.
        await self._write(self._names.episodes, lessons.episodes)
        for publication in lessons.parameters:
            await self._broadcast.read_to_end()
            if not self._sink.wants(publication):
                log.info("version %d is there already", publication.version)
                continue
            await self._write(self._names.parameters, [(publication.key, publication.value)])

    async def _write(self, topic: str, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            for key, value in pairs:
                await self._producer().send_and_wait(topic, value, key=key)
        except Exception as error:
            # The idempotent producer has waited out what passes by itself. It is shared with the serving.
            self._failed(error)
            raise
