"""A Faust transport on aiokafka that hands over one message per poll instead of one per record.

Faust's own consumer spends 130 µs and more on each message before an agent sees it; this spends that on all that a poll
has brought. What it changes, and nothing else:

- What was read comes as `RecordList`: all inputs of a poll in one message, each changelog partition in one. Inputs are
  read only while `Serving` is open, that is between the end of one rebalance and the start of the next. Partitions of
  the topics in `owned_only` are never read: they are assigned to say who is in charge.
- What `Serving` has acknowledged is merged into Faust's commits. Faust itself acks nothing on those topics
  (``acks=False``): its ack happens when an iteration ends, however it ends.
- The client runs in the app's own loop (see `same_loop`).
- The producer is idempotent with ``acks=all``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, cast

import aiokafka
from aiokafka.errors import ConsumerStoppedError, IllegalStateError
from faust.transport.drivers import TRANSPORTS
from faust.transport.drivers import aiokafka as stock
from faust.types import TP, ConsumerMessage

from worker.runners.faust.records import RecordList, unpack_lean
from worker.runners.faust.same_loop import SameLoopConsumer

if TYPE_CHECKING:
    from worker.runners.faust.app import WorkerApp

log = logging.getLogger(__name__)

#: The scheme of broker addresses that selects this driver.
SCHEME = "adcascade"
TRANSPORTS.aliases[SCHEME] = f"{__name__}:Transport"

#: Seconds that a poll waits for the one before to be handled. It may also have got lost in a rebalance.
REST = 1.0


class Client(SameLoopConsumer):
    """Talks to the broker."""

    consumer: Consumer
    _paced_until = 0.0
    _heard_at = -inf

    async def on_start(self) -> None:
        """Connect, and note from then on when the group has heard of this member."""
        await super().on_start()
        coordinator = self._ensure_consumer()._coordinator
        beat = coordinator._do_heartbeat

        async def noted() -> bool:
            sent = time.monotonic()
            if heard := await beat():
                self._heard_at = sent
            return bool(heard)

        coordinator._do_heartbeat = noted

    def join(self) -> None:
        """Note that the group has just given out its partitions."""
        self._heard_at = time.monotonic()

    @property
    def is_member(self) -> bool:
        """Whether the group cannot have given the partitions of this worker to others yet.

        A process that was stopped for long, and goes on, has lost them and knows nothing of it; what it still has
        fetched, others have answered.
        """
        return time.monotonic() < self._heard_at + self.consumer.worker.options.session_timeout

    def _create_worker_consumer(self, transport: Any) -> aiokafka.AIOKafkaConsumer:
        app = self.consumer.worker
        options, conf = app.options, self.app.conf
        self._assignor = self.app.assignor
        return aiokafka.AIOKafkaConsumer(
            **options.connection.arguments(),
            client_id=conf.broker_client_id,
            group_id=conf.id,
            group_instance_id=conf.consumer_group_instance_id,
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=options.fetch_bytes,
            # Faust says 1500 ms. A fetch is for the partitions without unread data when it is sent; one that has just
            # been read waits for the next fetch, so up to this long if the others are silent.
            fetch_max_wait_ms=options.fetch_wait_ms,
            request_timeout_ms=int(conf.broker_request_timeout * 1000),
            check_crcs=conf.broker_check_crcs,
            session_timeout_ms=int(conf.broker_session_timeout * 1000),
            rebalance_timeout_ms=int(conf.broker_rebalance_timeout * 1000),
            heartbeat_interval_ms=int(conf.broker_heartbeat_interval * 1000),
            max_poll_interval_ms=int((conf.broker_max_poll_interval or 300) * 1000),
            metadata_max_age_ms=conf.consumer_metadata_max_age_ms,
            connections_max_idle_ms=conf.consumer_connections_max_idle_ms,
            isolation_level="read_committed",
        )

    async def _fetch_records(
        self,
        consumer: aiokafka.AIOKafkaConsumer,
        active_partitions: set[TP],
        timeout: float | None = None,  # noqa: ASYNC109 (Faust's)
        max_records: int | None = None,
    ) -> Any:
        """Return what has been fetched, or wait for it."""
        options, serving = self.consumer.worker.options, self.consumer.worker.serving
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout or 0.0)
        # After a poll with records, the next comes a little later: what arrives meanwhile comes in one list. Unread
        # data also keeps aiokafka from sending the next fetch, so this paces the fetches too; small ones cost up to
        # 260 µs a record. The first record after a silence does not wait.
        if (pause := self._paced_until - loop.time()) > 0:
            await asyncio.sleep(pause)
        await serving.rested(REST)
        fetcher = consumer._fetcher
        subscriptions = fetcher._subscriptions
        assignment = subscriptions.subscription and subscriptions.subscription.assignment
        found_waiting = True
        with subscriptions.fetch_context():
            # A poll may outlive the generation it began in. What it then took from the fetcher its caller would throw
            # away, and a changelog so robbed never ends its recovery.
            while self._still_in(subscriptions, assignment):
                if consumer._closed or fetcher._closed:
                    raise ConsumerStoppedError
                lists = await self._drain(fetcher, assignment, active_partitions)
                if lists:
                    if found_waiting and self._is_small(lists):
                        await self._await_fetch(fetcher, options.freshness)
                        await serving.calm(options.freshness)
                        if self._still_in(subscriptions, assignment):
                            lists = self._joined(lists, await self._drain(fetcher, assignment, active_partitions))
                    self._paced_until = loop.time() + options.pace
                    return lists
                remaining = deadline - loop.time()
                if remaining <= 0:
                    break
                await self._await_fetch(fetcher, remaining)
                found_waiting = False
        return {}

    def _still_in(self, subscriptions: Any, assignment: Any) -> bool:
        return bool(
            self.consumer.flow_active
            and assignment is not None
            and not subscriptions.reassignment_in_progress
            and subscriptions.subscription.assignment is assignment
        )

    @staticmethod
    async def _await_fetch(fetcher: Any, seconds: float) -> None:
        """Wait for the answer to the next fetch, at most so long."""
        waiter = fetcher._create_fetch_waiter()
        done, _ = await asyncio.wait([waiter], timeout=seconds)
        if not done:
            waiter.cancel()
        else:
            waiter.result()  # the coordinator passes its errors this way

    def _is_small(self, lists: dict[TP, RecordList]) -> bool:
        """Say whether there are only inputs, and not so many of them that the worker must be behind."""
        records = sum(len(taken.records) for taken in lists.values())
        return records < self.consumer.worker.options.poll_records and all(map(self.consumer.is_input, lists))

    def _joined(self, lists: dict[TP, RecordList], later: dict[TP, RecordList]) -> dict[TP, RecordList]:
        # A busy worker comes back for more only some time after the last fetch was answered: what it finds waiting is
        # as old as that. Taking it lets the next fetch go, and what that brings at once is younger by a whole round.
        for tp, more in later.items():
            lists[tp] = lists[tp].followed_by(more) if tp in lists else more
        return dict(sorted(lists.items(), key=lambda item: self.consumer.is_behind_arrivals(item[0])))

    async def _drain(self, fetcher: Any, assignment: Any, active: set[TP]) -> dict[TP, RecordList]:
        waiting = [
            TP(*tp)
            for tp in fetcher._records
            if tp in active and (state := assignment.state_value(tp)) and state.has_valid_position
        ]
        behind = {tp for tp in waiting if self.consumer.is_behind_arrivals(tp)}
        unpack_lean(fetcher)
        lists: dict[TP, RecordList] = {}
        # Arrivals first: feedback that is handled before its arrival has to be parked, stored and read again.
        for part in (set(waiting) - behind, behind):
            if part:  # to aiokafka no partitions means all of them
                lists |= await self._drain_part(fetcher, assignment, part)
        return lists

    async def _drain_part(self, fetcher: Any, assignment: Any, part: set[TP]) -> dict[TP, RecordList]:
        # With no timeout `fetched_records` does not give way to the loop, so the positions before and after belong to
        # what it returns. At most so much: until all that comes from here is handled, the worker does nothing else.
        states = {tp: assignment.state_value(tp) for tp in part}
        before = {tp: state.position for tp, state in states.items()}
        drained = await fetcher.fetched_records(part, timeout=0, max_records=self.consumer.worker.options.poll_records)
        generation = self.app.consumer_generation_id
        return {
            tp: RecordList(
                tp=tp, generation=generation, start=before[tp], end=state.position, records=drained.get(tp, ())
            )
            for tp, state in states.items()
            # A position can move without a record: transaction markers, compacted batches.
            if state.position != before[tp]
        }

    def member(self) -> str:
        """Return the name of this member in the group."""
        return str(self._ensure_consumer()._coordinator.member_id)

    def seek_to(self, positions: Mapping[TP, int]) -> None:
        """Read on from other positions."""
        consumer = self._ensure_consumer()
        for tp, offset in positions.items():
            consumer.seek(tp, offset)


class Consumer(stock.Consumer):
    """The Faust side of the consumer."""

    _thread: Client

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Where this generation starts to read each input partition.
        self.starts: dict[TP, int] = {}

    @property
    def worker(self) -> WorkerApp:
        """The app, by its own type."""
        return cast("WorkerApp", self.app)

    def _new_consumer_thread(self) -> Client:
        return Client(self, loop=self.loop, beacon=self.beacon)

    def member(self) -> str:
        """Return the name of this member in the group."""
        return self._thread.member()

    @property
    def is_member(self) -> bool:
        """Whether the group cannot have given the partitions of this worker to others yet."""
        return self._thread.is_member

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> Any:  # noqa: ASYNC109 (Faust's)
        skipped = self.worker.owned_only if self.worker.may_read else self.worker.owned_only | self._inputs
        readable = {tp for tp in active_partitions or () if tp.topic not in skipped}
        if not readable:
            # To aiokafka no partitions means all of them.
            await self.sleep(0.02)
            return {}
        return await self._thread.getmany(readable, timeout)

    def is_behind_arrivals(self, tp: TP) -> bool:
        """Say whether a partition has no arrivals."""
        return tp.topic != self._arrivals

    def is_input(self, tp: TP) -> bool:
        """Say whether a partition has arrivals or feedback."""
        return tp.topic in self._inputs

    @cached_property
    def _arrivals(self) -> str:
        return self.worker.names.arrivals

    @cached_property
    def _inputs(self) -> frozenset[str]:
        return self.worker.names.inputs

    async def getmany(
        self,
        timeout: float,  # noqa: ASYNC109 (Faust's)
    ) -> AsyncIterator[tuple[TP, ConsumerMessage]]:
        """Yield one message for all inputs that have news, and one per partition of the changelog that has."""
        lists, active = await self._wait_next_records(timeout)
        if not lists or self.should_stop:
            return
        inputs: list[RecordList] = []
        for tp, taken in cast(Mapping[TP, RecordList], lists).items():
            # What is dropped here was taken from the fetcher for good. For inputs `Serving` notices that and reads it
            # again; a changelog is read again by the recovery that follows every rebalance.
            if not self.flow_active or taken.generation != self.app.consumer_generation_id:
                return
            if active is None or tp in active or tp in self._buffered_partitions:
                self.app.monitor.track_tp_end_offset(tp, self.highwater(tp))
                if self.is_input(tp):
                    inputs.append(taken)
                else:
                    yield tp, self._message(taken, taken)
        if inputs:
            self.worker.serving.offer()
            # Under the name of any of them: Faust sends it to the one agent that all inputs have.
            yield inputs[-1].tp, self._message(inputs[-1], inputs)

    def _message(self, taken: RecordList, value: Any) -> ConsumerMessage:
        tp = taken.tp
        return ConsumerMessage(
            tp.topic,
            tp.partition,
            max(taken.end - 1, 0),
            taken.records[-1].timestamp / 1000 if taken.records else 0.0,
            0,
            None,
            None,
            value,
            None,
            0,
            0,
            tp,
            generation_id=taken.generation,
        )

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Seek to the committed offsets; where there is none that exists, to the first record."""
        offsets = dict(await super().seek_to_committed())
        inputs = [tp for tp in self.assignment() if self.is_input(tp)]
        if not inputs:
            return offsets
        first, last = await self.earliest_offsets(*inputs), await self.highwaters(*inputs)
        starts = {}
        for tp in inputs:
            committed = offsets.get(tp)
            start = first[tp] if committed is None or committed < 0 else committed
            if not first[tp] <= start <= last[tp]:
                log.error(
                    "%s-%d: the committed position %d is not between %d and %d: the topic was trimmed or made anew",
                    *(tp.topic, tp.partition, start, first[tp], last[tp]),
                )
                start = first[tp]
            starts[tp] = offsets[tp] = start
        # Also those where nothing is committed: then the position is known here and not only to aiokafka, some time.
        self._thread.seek_to(starts)
        self.starts = starts
        return offsets

    def reread(self, tp: TP, offset: int) -> None:
        """Read a partition again from a position that was skipped."""
        self.add_future(self._reread(tp, offset))

    async def _reread(self, tp: TP, offset: int) -> None:
        try:
            first = (await self.earliest_offsets(tp))[tp]
            if first > offset:
                self.worker.serving.skip(tp, first)
                offset = first
            self._thread.seek_to({tp: offset})
            # Faust drops what ends before the last message it saw.
            self._read_offset[tp] = None
        except IllegalStateError:
            log.info("%s-%d has been revoked meanwhile", tp.topic, tp.partition)

    # ── rebalance and commit ─────────────────────────────────────────────────────────────────────────────────────────

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        """Begin a generation."""
        self._thread.join()
        await super().on_partitions_assigned(assigned, generation_id)

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Stop taking records, then let Faust wait for what is under way, commit it, and go on."""
        self.worker.serving.close()
        await super().on_partitions_revoked(revoked)

    async def wait_empty(self) -> None:
        """Wait for everything under way to be acknowledged, then commit it."""
        self.worker.serving.close()
        if not await self.worker.serving.drained(self.worker.options.drain_timeout):
            log.warning("not everything could be written in time; it will be read and written again")
        await super().wait_empty()

    def _filter_committable_offsets(self, tps: Iterable[TP]) -> dict[TP, int]:
        offsets: dict[TP, int] = super()._filter_committable_offsets(tps)
        for tp, offset in self.worker.serving.committable().items():
            if offset > self.starts.get(tp, -1) and self._should_commit(tp, offset):
                offsets[tp] = offset
        return offsets

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Do without Faust's livelock detector: it takes lists for a stall, and partitions that are not read too."""


class Producer(stock.Producer):
    """Writes each record once, in order, to all replicas."""

    def _settings_default(self) -> Mapping[str, Any]:
        options = cast("WorkerApp", self.app).options
        settings = {**super()._settings_default(), **options.connection.arguments()}
        return {**settings, "linger_ms": 0, "max_batch_size": options.batch_bytes, "acks": "all"}

    def _settings_auth(self) -> Mapping[str, Any]:
        return {}  # with the connection, above

    def _settings_extra(self) -> Mapping[str, Any]:
        return {"enable_idempotence": True}

    @property
    def aiokafka(self) -> aiokafka.AIOKafkaProducer:
        """The producer below."""
        return self._ensure_producer()


class Transport(stock.Transport):
    """The transport that Faust finds by the scheme."""

    Consumer = Consumer
    Producer = Producer
