"""A Faust transport driver on librdkafka. The scheme of the broker's URL selects it.

Faust keeps recovery, flow and commits; librdkafka keeps the group. The driver differs from Faust's own in these points:

- A message is a whole poll, the records of all input partitions together (`Poll`). Faust makes two tasks per message.
  Each changelog partition has a message of its own, since recovery counts offsets by partition.
- Polls are acknowledged by their delivery reports (`Flights`), not by the end of an iteration of the agent, which also
  comes with an exception. Faust's topics have ``acks=False``, and `force_commit` commits what is acknowledged.
- Outputs are written with explicit partitions by `Producer.write`. There is no other way: `send` of topics and tables
  is not implemented.
- The journal is assigned and never read: its owner runs the learner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, TypeVar, cast

import confluent_kafka
import faust
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from faust.serializers.schemas import Schema
from faust.transport import base
from faust.transport.drivers import TRANSPORTS
from faust.types import TP, ConsumerMessage, RecordMetadata
from faust.types.assignor import HostToPartitionMap, PartitionAssignorT
from mode import Service
from yarl import URL

from worker.errors import FailedError
from worker.kafka.clients import BEGINNING, END, REQUEST_TIMEOUT, durable_producer, existing_topics, offsets_of
from worker.kafka.connection import Connection, reason_of
from worker.kafka.polls import Flight, Flights, Poll, RecordList
from worker.kafka.thread import ClientThread
from worker.stream.topology import DeadLetter, Topics

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The scheme of broker addresses that selects this driver.
SCHEME: Final = "librdkafka"
TRANSPORTS.aliases[SCHEME] = f"{__name__}:Transport"

#: Seconds that a request of a rebalance is repeated before the worker gives up, ends and is started again.
PATIENCE: Final = 60.0
_PAUSE: Final = 0.2
#: Most seconds between two heartbeats, by which a member learns of a rebalance: about the longest wait of an arrival.
_HEARTBEATS: Final = 1.0
#: Seconds to acknowledge everything in flight before a rebalance.
_DRAIN_TIMEOUT: Final = 8.0
#: Seconds after which a write that no broker acknowledges fails the worker.
_WRITE_TIMEOUT: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """Options of the driver; times are in seconds."""

    connection: Connection
    topics: Topics = field(default_factory=Topics)
    group: str = "adcascade"
    #: Time after which the group gives the partitions of a silent member to others.
    session_timeout: float = 10.0

    def consumer_settings(self) -> dict[str, Any]:
        """Return the configuration of the consumer in the group."""
        session = int(1000 * self.session_timeout)
        return self.connection.configuration(
            group_id=self.group,
            session_timeout_ms=session,
            heartbeat_interval_ms=min(int(1000 * _HEARTBEATS), session // 3),
            max_poll_interval_ms=max(300_000, session),
            # Partitions with one number of all inputs and of the changelog go to one worker.
            partition_assignment_strategy="range",
            enable_auto_commit=False,
            auto_offset_reset="error",
            enable_partition_eof=True,
            isolation_level="read_committed",
            fetch_wait_max_ms=500,
            fetch_message_max_bytes=1 << 20,
            # Bounds the memory of what was fetched and not polled.
            queued_max_messages_kbytes=64 << 10,
        )


class DriverApp(faust.App):
    """A Faust app on this driver."""

    options: DriverOptions


class Assignor(PartitionAssignorT):
    """Tells Faust what librdkafka has assigned; Faust's own assignor talks to aiokafka."""

    def __init__(self, app: Any, replicas: int = 0) -> None:
        self.app, self.replicas = app, replicas

    def group_for_topic(self, topic: str) -> int:
        """Return the group of a topic, for transactions."""
        return 0

    def assigned_actives(self) -> set[TP]:
        """Return the assigned partitions."""
        return self.app.consumer.assignment()

    def assigned_standbys(self) -> set[TP]:
        """Return none: the changelog is read in a second."""
        return set()

    def is_active(self, tp: TP) -> bool:
        """Return whether a partition is assigned."""
        return tp in self.assigned_actives()

    def is_standby(self, tp: TP) -> bool:
        """Return whether a partition is a standby."""
        return False

    def key_store(self, topic: str, key: bytes) -> URL:
        """Return the worker with a key, for Faust's web views."""
        return URL()

    def table_metadata(self, topic: str) -> HostToPartitionMap:
        """Return the workers of a table, for Faust's web views."""
        return {}

    def tables_metadata(self) -> HostToPartitionMap:
        """Return the workers of all tables, for Faust's web views."""
        return {}


class PollSchema(Schema):  # type: ignore[type-arg]
    """Passes polls through: nothing is decoded here, so nothing can fail here.

    A decode error inside Faust would ack the message, that is lose the poll.
    """

    def compile(self, app: Any, **_: Any) -> Any:
        """Return Faust's decode function."""
        create_event = app.create_event

        async def decode(message: Any, *, propagate: bool = False) -> Any:
            return create_event(None, message.value, None, message)

        return decode


class Consumer(base.Consumer):
    """The Faust side of the consumer: what is assigned, read and committed."""

    app: DriverApp

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = self.app.options
        self.flights = Flights(self._on_write_error)
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
        self._offset_admin = AdminClient(self.options.connection.configuration())
        producer = cast(Producer, self.app.producer)
        self._polling = ClientThread(
            confluent_kafka.Consumer(self.options.consumer_settings()),
            self,
            serve_reports=producer.serve_reports,
            flights=self.flights,
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

    def _on_write_error(self, error: KafkaError) -> None:
        self.add_future(self.app.crash(FailedError(f"a write was not acknowledged: {error.str()}")))

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
        self.add_future(self.app.crash(FailedError(f"the consumer has failed: {error.str()}")))

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
        inputs = [tp for tp in self._owned if tp.topic in self.options.topics.inputs]
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
            if one.tp.topic in self.options.topics.inputs:
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
        wanted = [TopicPartition(*tp) for tp in partitions]
        found = await self._patiently(lambda: asyncio.to_thread(offsets_of, self._offset_admin, wanted, spec))
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
        """Create a topic."""
        await self.app.producer.create_topic(*args, **kwargs)


class Fetcher(Service):
    """Hands what is polled to Faust. Its own fetcher spends four tasks on each message."""

    def __init__(self, app: DriverApp, **kwargs: Any) -> None:
        self.app = app
        super().__init__(**kwargs)

    @Service.task
    async def fetch(self) -> None:
        """Deliver one message after the other until stopped."""
        consumer = cast(Consumer, self.app.consumer)
        while not self.should_stop:
            for message in await consumer.next_messages():
                if message.generation_id == self.app.consumer_generation_id and consumer.flow_active:
                    await consumer.deliver(message)


class Producer(base.Producer):
    """Writes each record once, in order, to all replicas."""

    app: DriverApp
    _librdkafka: confluent_kafka.Producer | None = None

    @property
    def _kafka(self) -> confluent_kafka.Producer:
        if self._librdkafka is None:
            timeout = int(1000 * _WRITE_TIMEOUT)
            self._librdkafka = durable_producer(self.app.options.connection, message_timeout_ms=timeout)
        return self._librdkafka

    def serve_reports(self) -> bool:
        """Serve delivery reports; called by the client thread. Return whether there were any."""
        return self._librdkafka is not None and bool(self._librdkafka.poll(0))

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(
        self,
        topic: str,
        partition: int,
        pairs: Sequence[tuple[bytes | None, bytes | None]],
        flight: Flight,
        *,
        is_changelog: bool = False,
    ) -> None:
        """Write keys with values to a partition; the flight takes their delivery reports."""
        taken = self._kafka.produce_batch(
            topic,
            [{"key": key, "value": value} for key, value in pairs],
            partition,
            flight.on_changelog_delivery if is_changelog else flight.on_delivery,
        )
        flight.writes += len(pairs)
        if taken != len(pairs):
            raise FailedError(f"{len(pairs) - taken} records for {topic} could not be queued")

    def write_dead_letters(self, topic: str, partition: int, letters: Iterable[DeadLetter], flight: Flight) -> None:
        """Write dead letters with their headers."""
        for key, value, headers in letters:
            self._kafka.produce(topic, value, key, partition, on_delivery=flight.on_delivery, headers=headers)
            flight.writes += 1

    async def send_and_wait(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition: int | None,
        timestamp: float | None,
        headers: Any,
        *,
        transactional_id: str | None = None,
    ) -> RecordMetadata:
        """Write a record, and wait until all replicas have it."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[RecordMetadata] = loop.create_future()

        def settle(error: KafkaError | None, message: Message) -> None:
            if written.done():
                return
            if error is not None:
                written.set_exception(KafkaException(error))
                return
            kind, stamp = message.timestamp()
            tp = TP(topic, message.partition())
            written.set_result(RecordMetadata(topic, tp.partition, tp, message.offset(), stamp, kind))

        def on_delivery(error: KafkaError | None, message: Message) -> None:  # in the client thread
            loop.call_soon_threadsafe(settle, error, message)

        self._kafka.produce(topic, value, key, partition, on_delivery=on_delivery)
        return await written

    async def flush(self) -> None:
        """Do nothing: `Consumer.wait_empty` waits for what is in flight."""

    async def on_stop(self) -> None:
        """Give up what no broker has taken by now: it is not committed, and is read again."""
        if self._librdkafka is not None:
            self._librdkafka.purge()

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create_topic(
        self, topic: str, partitions: int, replication: int, *, config: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Create a topic if it does not exist."""
        admin = AdminClient(self.app.options.connection.configuration())
        if await asyncio.to_thread(existing_topics, admin, [topic]):
            return
        new = NewTopic(
            topic, partitions, replication, config={key: str(value) for key, value in (config or {}).items()}
        )
        await asyncio.wrap_future(admin.create_topics([new])[topic])

    def key_partition(self, topic: str, key: bytes) -> TP:
        """Raise: outputs have explicit partitions."""
        raise FailedError(f"{topic}: records are written with explicit partitions")


class Transport(base.Transport):
    """The driver that Faust selects by the scheme."""

    Consumer = Consumer
    Producer = Producer
    Fetcher = Fetcher
    driver_version = f"confluent-kafka={confluent_kafka.version()}"
