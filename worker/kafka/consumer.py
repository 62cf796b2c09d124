"""The Faust side of the consumer: what is assigned, read and committed.

Faust decides what is read and from where; librdkafka keeps the group. The client thread alone uses librdkafka's
consumer (see `worker.kafka.thread`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from faust.transport import base
from faust.types import TP, ConsumerMessage

from worker.errors import FailedError
from worker.kafka.clients import BEGINNING, END, REQUEST_TIMEOUT, offsets_of
from worker.kafka.connection import reason_of
from worker.kafka.polls import Flights, Poll, RecordList
from worker.kafka.thread import ClientThread

if TYPE_CHECKING:
    from worker.kafka.app import WorkerApp
    from worker.kafka.driver import Producer

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that a request of a rebalance is repeated before the worker gives up, ends and is started again.
PATIENCE: Final = 60.0
_PAUSE: Final = 0.2
#: Seconds to acknowledge everything in flight before a rebalance.
_DRAIN_TIMEOUT: Final = 8.0


class Consumer(base.Consumer):
    """A Faust consumer whose messages are polls of all partitions."""

    app: WorkerApp

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = self.app.settings
        self._inputs = self.settings.topics.inputs
        self.flights = Flights(lambda error: self.app.fail(FailedError(f"a write was not acknowledged: {error.str()}")))
        #: What is read now: a new generation begins with every rebalance, and with every seek to committed offsets.
        self.generation = 0
        #: Where this generation began to read each input, and where that ended then.
        self.starts: dict[TP, int] = {}
        self.ends: dict[TP, int] = {}
        #: Whether everything was durable when the last rebalance began.
        self.was_drained = False
        self._polling: ClientThread | None = None
        self._offset_admin: AdminClient
        self._owned: set[TP] = set()
        self._reading: set[TP] = set()
        self._offsets: dict[TP, int] = {}
        self._rebalance_lock = asyncio.Lock()
        self._suspended: asyncio.Future[Any] | None = None

    @property
    def _kafka(self) -> ClientThread:
        assert self._polling is not None, "the consumer is not started"
        return self._polling

    async def on_start(self) -> None:
        """Start the client thread."""
        await super().on_start()
        self._offset_admin = AdminClient(self.settings.connection.configuration())
        producer = cast("Producer", self.app.producer)
        self._polling = ClientThread(
            confluent_kafka.Consumer(self.settings.of_consumer()),
            self,
            serve_reports=lambda: producer.librdkafka.poll(0) > 0,
            drain=_DRAIN_TIMEOUT,
        )
        self._polling.start()

    async def on_stop(self) -> None:
        """Finish what is in flight, commit it, and leave the group."""
        await super().on_stop()
        await self._kafka.close()

    async def subscribe(self, topics: Iterable[str]) -> None:
        """Join the group."""
        await self._kafka.subscribe(topics)

    # ── rebalances ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def on_assigned(self, assigned: set[TP]) -> None:
        """Let Faust recover the table and begin."""
        async with self._rebalance_lock:
            if not self.app.rebalancing:
                self.app.on_rebalance_start()  # the first time nothing is revoked before
            self._owned = assigned
            self.app.consumer_generation_id += 1
            await self.on_partitions_assigned(assigned, self.app.consumer_generation_id)

    async def on_revoked(self, revoked: set[TP]) -> None:
        """Let Faust stop the flow, wait for what is in flight and commit it."""
        async with self._rebalance_lock:
            self.app.on_rebalance_start()
            await self.on_partitions_revoked(revoked)
            self.flights.forget()  # what was not durable in time is the next owner's
            self._owned = set()

    async def on_lost(self, lost: set[TP]) -> None:
        """Drop everything and commit nothing: other workers own the partitions."""
        log.warning("the group has given the partitions of this worker to others")
        self.flights.forget()
        await self.on_revoked(lost)
        self.was_drained = False

    def on_fatal(self, error: KafkaError) -> None:
        """End the worker: its consumer will never read again."""
        self.app.fail(FailedError(f"the consumer has failed: {error.str()}"))

    def assignment(self) -> set[TP]:
        """Return the assigned partitions."""
        return self._owned

    # ── flow ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop_flow(self) -> None:
        """Read nothing more; polls on their way to the agent are dropped."""
        super().stop_flow()
        self.generation += 1
        self._reading, self._offsets = set(), {}
        self._read()

    def pause_partitions(self, tps: Iterable[TP]) -> None:
        """Stop reading partitions."""
        paused = set(tps)
        super().pause_partitions(paused)
        self._reading -= paused
        self._read()

    def resume_partitions(self, tps: Iterable[TP]) -> None:
        """Read partitions from the positions that `seek` gives them."""
        resumed = set(tps)
        super().resume_partitions(resumed)
        self._reading |= resumed
        self._read()

    def _read(self) -> None:
        """Tell the thread what is read now. Faust resumes partitions before it seeks: those have no position yet."""
        if self._polling is not None:
            positions = {tp: self._offsets[tp] for tp in self._reading if tp in self._offsets}
            self._polling.read(positions, self.generation)

    async def _seek(self, partition: TP, offset: int) -> None:
        self._offsets[partition] = offset

    async def seek_wait(self, partitions: Mapping[TP, int]) -> None:
        """Read changelogs from these positions."""
        self._offsets.update(partitions)
        self._read()

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Begin a generation: read the inputs from their committed offsets, or where there is none, from the first."""
        inputs = [tp for tp in self._owned if tp.topic in self._inputs]
        wanted = [TopicPartition(*tp) for tp in inputs]
        committed: dict[TP, int] = {}
        if inputs:
            found = await self._patiently(
                lambda: self._kafka.call(lambda consumer: consumer.committed(wanted, timeout=REQUEST_TIMEOUT))
            )
            committed = {TP(one.topic, one.partition): one.offset for one in found}
        first, last = await self.earliest_offsets(*inputs), await self.highwaters(*inputs)
        starts = {}
        for tp in inputs:
            start = committed[tp] if committed[tp] >= 0 else first[tp]
            if not first[tp] <= start <= last[tp]:
                log.error(
                    "%s-%d: the committed position %d is not between %d and %d: the topic was trimmed or made anew",
                    *(*tp, start, first[tp], last[tp]),
                )
                start = first[tp]
            starts[tp] = start
        self.generation += 1
        self.starts, self.ends = starts, dict(last)
        self.flights.begin(starts)
        self._offsets = dict(starts)
        self._read()
        return starts

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def next_messages(self) -> list[ConsumerMessage]:
        """Return the next poll as one message, or the lists of changelogs."""
        if not self.flow_active:
            await self.can_resume_flow.wait()
        polled = await self._getmany(None, 0.0)
        messages = [self._to_message(tp, records) for tp, records in polled.items()]
        if not any(isinstance(records, Poll) for records in polled.values()):
            self.handled(self.generation)
        return messages

    def handled(self, generation: int) -> None:
        """Note that a poll of a generation is handled: there is room for the next."""
        self._kafka.handled(generation)

    async def deliver(self, message: ConsumerMessage) -> None:
        """Give a message to its agent or table, unless the flow stops before there is room for it."""
        if self._suspended is None or self._suspended.done():
            self._suspended = asyncio.ensure_future(self.suspend_flow.wait())
        delivering = asyncio.ensure_future(self.callback(message))
        await asyncio.wait((delivering, self._suspended), return_when=asyncio.FIRST_COMPLETED)
        if delivering.done():
            delivering.result()
        else:
            delivering.cancel()

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> Any:  # noqa: ASYNC109 (Faust's)
        # What was read before a rebalance or a seek is dropped: a recovery that sees later records of a changelog first
        # would skip the earlier ones.
        while (poll := await self._kafka.next_poll()).generation != self.generation:
            pass
        found: dict[TP, Poll | RecordList] = {}
        inputs: list[RecordList] = []
        for one in poll.lists:
            if one.tp.topic in self._inputs:
                inputs.append(one)
            else:
                found[one.tp] = one
        if inputs:
            found[inputs[0].tp] = poll._replace(lists=inputs)
        return found

    def _to_message(self, tp: TP, record: Poll | RecordList) -> ConsumerMessage:
        end = record.end if isinstance(record, RecordList) else record.lists[0].end
        return ConsumerMessage(
            tp.topic,
            tp.partition,
            end - 1,
            0.0,
            0,
            None,
            None,
            cast(Any, record),
            None,
            0,
            0,
            tp,
            generation_id=self.app.consumer_generation_id,
        )

    def _new_topicpartition(self, topic: str, partition: int) -> TP:
        return TP(topic, partition)

    # ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def force_commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:
        """Commit the positions before which everything is acknowledged."""
        acknowledged = self.flights.acknowledged
        offsets = {tp: offset for tp, offset in acknowledged.items() if offset > self.starts.get(tp, offset)}
        return bool(offsets) and await self._commit(offsets)

    async def _commit(self, offsets: Mapping[TP, int]) -> bool:
        wanted = [TopicPartition(*tp, offset) for tp, offset in offsets.items()]
        try:
            await self._kafka.call(lambda consumer: consumer.commit(offsets=wanted, asynchronous=False))
        except KafkaException as error:
            log.warning("offsets could not be committed: %s", reason_of(error))
            return False
        # Not committed again before they move.
        self.starts |= {tp: offset for tp, offset in offsets.items() if tp in self.starts}
        return True

    async def wait_empty(self) -> None:
        """Wait until everything that was handled is durable, for as long as a rebalance can wait, and commit it."""
        flights = self.flights
        await asyncio.wait([flights.until(lambda: flights.are_idle)], timeout=_DRAIN_TIMEOUT)
        self.was_drained = flights.are_idle
        await self.force_commit()

    # ── offsets ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def earliest_offsets(self, *partitions: TP) -> Mapping[TP, int]:
        """Return the offsets of the first records."""
        return await self._list_offsets(partitions, BEGINNING)

    async def highwaters(self, *partitions: TP) -> Mapping[TP, int]:
        """Return the offsets after the last records."""
        return await self._list_offsets(partitions, END)

    async def _list_offsets(self, partitions: Iterable[TP], spec: OffsetSpec) -> dict[TP, int]:
        found = await self._patiently(lambda: asyncio.to_thread(offsets_of, self._offset_admin, partitions, spec))
        return {TP(*place): offset for place, offset in found.items()}

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a request, which is repeated for a while: a broker may be starting."""
        deadline = monotonic() + PATIENCE
        while True:
            try:
                return await ask()
            except KafkaException as error:
                if monotonic() > deadline:
                    raise FailedError(
                        f"the brokers have not answered for {PATIENCE:.0f} s: {reason_of(error)}"
                    ) from None
                log.warning("Kafka: %s; trying again", reason_of(error))
                await asyncio.sleep(_PAUSE)

    def highwater(self, tp: TP) -> int:
        """Return where an input ended when this generation began."""
        return self.ends.get(tp, 0)

    async def position(self, tp: TP) -> int | None:
        """Return the position before which everything is acknowledged."""
        return self.flights.acknowledged.get(tp)

    def topic_partitions(self, topic: str) -> int | None:
        """Return the number of partitions of the inputs."""
        return self.app.conf.topic_partitions

    def key_partition(self, topic: str, key: bytes | None, partition: int | None = None) -> int | None:
        """Return the given partition: outputs have explicit ones."""
        return partition

    async def create_topic(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `adcascade topics create` creates the topics."""
