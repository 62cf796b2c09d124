"""The Kafka client of a worker: an aiokafka consumer in the worker's own loop, and how a poll collects records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from math import inf
from typing import Any, NamedTuple, cast

import aiokafka
from aiokafka.errors import ConsumerStoppedError
from faust.types import TP

from worker.kafka.faust.link import Link, link_of
from worker.kafka.faust.same_loop import SameLoopConsumer
from worker.kafka.fetch_sessions import SessionFetcher, install
from worker.kafka.fetched import FetchedPartition
from worker.kafka.transport import RecordList


def ask_for_unknown_topics(consumer: aiokafka.AIOKafkaConsumer) -> None:
    """Ask for the metadata again while it lacks a topic that the consumer has subscribed to.

    A broker that has just started does not know its topics yet. The leader of a group that asks it then assigns nothing
    to anybody, and aiokafka asks again after five minutes. As soon as the topics are known, it rejoins by itself.
    """
    client, subscription = consumer._client, consumer._subscription.subscription
    topics = subscription.topics if subscription is not None else ()
    if any(client.cluster.partitions_for_topic(topic) is None for topic in topics):
        client.force_metadata_update()


class _Wait(NamedTuple):
    """A poll that waits for a fetch."""

    fetcher: SessionFetcher
    assignment: Any
    active: Collection[TP]
    waiter: asyncio.Future[None]


class Client(SameLoopConsumer):
    """The connection to the broker, and the membership in the group."""

    #: Whether a poll has let other tasks run since this was reset.
    has_waited = False
    _last_heartbeat = -inf
    _alarm: asyncio.TimerHandle | None = None
    _wait: _Wait | None = None

    @property
    def _link(self) -> Link:
        return link_of(self.app)

    async def on_start(self) -> None:
        """Connect, fetch the inputs directly, and note the time of every heartbeat that the group accepts."""
        await super().on_start()
        consumer = self._ensure_consumer()
        consumer._fetcher.direct = self._link.inputs
        consumer._fetcher.take_at_once = self._take_at_once
        coordinator = consumer._coordinator
        beat = coordinator._do_heartbeat

        async def noted() -> bool:
            sent = time.monotonic()
            ask_for_unknown_topics(consumer)
            if accepted := await beat():
                self._last_heartbeat = sent
            return bool(accepted)

        coordinator._do_heartbeat = noted

    def note_membership(self) -> None:
        """Note that the group has just assigned its partitions."""
        self._last_heartbeat = time.monotonic()

    @property
    def is_member(self) -> bool:
        """Whether the group cannot have assigned the partitions of this worker to others yet.

        A process that continues after a long stop has lost them without notice; other workers have handled the records
        that it still holds.
        """
        return time.monotonic() < self._last_heartbeat + self._link.options.session_timeout

    def _create_worker_consumer(self, transport: Any) -> aiokafka.AIOKafkaConsumer:
        options, conf = self._link.options, self.app.conf
        self._assignor = self.app.assignor
        install()
        return aiokafka.AIOKafkaConsumer(
            **options.connection.arguments(),
            client_id=conf.broker_client_id,
            group_id=conf.id,
            group_instance_id=conf.consumer_group_instance_id,
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=options.fetch_bytes,
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

    async def getmany(self, active_partitions: Any, timeout: float) -> Any:  # noqa: ASYNC109 (Faust's)
        """Return the fetched records, or wait for some; without Faust's way into another thread."""
        return await self._fetch_records(self._ensure_consumer(), active_partitions, timeout)

    async def _fetch_records(
        self,
        consumer: aiokafka.AIOKafkaConsumer,
        active_partitions: Collection[TP],
        timeout: float | None = None,  # noqa: ASYNC109 (Faust's)
        max_records: int | None = None,
    ) -> Any:
        """Return the fetched records, or wait for some.

        Nothing waits by the clock here. An idle worker takes a record as soon as it is fetched; what comes while a poll
        is handled is fetched meanwhile and makes the next one. So polls grow with the load by themselves.

        The partitions must be the same object, unchanged, as long as they are the same.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout or 0.0)
        fetcher: SessionFetcher = consumer._fetcher
        subscriptions = fetcher._subscriptions
        assignment = subscriptions.subscription and subscriptions.subscription.assignment
        with subscriptions.fetch_context():
            # A poll may outlive the generation it began in. Its caller would drop the records, and the recovery of a
            # changelog with dropped records never ends.
            while self._still_in(subscriptions, assignment):
                if consumer._closed or fetcher._closed:
                    raise ConsumerStoppedError
                if fetcher._records and (lists := self._drain(fetcher, assignment, active_partitions)):
                    return lists
                if deadline <= loop.time():
                    break
                fetcher.fetch(assignment, active_partitions)
                self._wake_by(fetcher, deadline)
                await self._fetched(_Wait(fetcher, assignment, active_partitions, loop.create_future()))
        return {}

    async def _fetched(self, wait: _Wait) -> None:
        """Wait until something is fetched, or for the alarm; raise what the coordinator reports."""
        # As `_create_fetch_waiter`, without a turn of the loop to forget it.
        waiters = wait.fetcher._fetch_waiters
        waiters.add(wait.waiter)
        self._wait = wait
        try:
            await wait.waiter
        finally:
            self._wait = None
            waiters.discard(wait.waiter)
            self.has_waited = True

    def _take_at_once(self) -> bool:
        """Hand over what was just fetched, in place of the poll that waits for it; return whether that is all.

        A live worker has a poll every few milliseconds. Waking the poll, its way through Faust's generators and back to
        the next wait would take a turn of the loop and as long as reading the answer does.
        """
        wait = self._wait
        if wait is None or wait.waiter.done() or not self._still_in(wait.fetcher._subscriptions, wait.assignment):
            return False
        fetcher, assignment, active, _ = wait
        held = [fetched for tp, fetched in fetcher._records.items() if tp in active]
        # Errors and changelogs go through the poll.
        if fetcher._closed or set(map(type, held)) != {FetchedPartition}:
            return False
        owner = cast(Any, self.consumer)
        if not owner.take_at_once(active, lambda: self._drain(fetcher, assignment, active)):
            return False
        if not fetcher._records.keys().isdisjoint(active):
            return False  # more than one poll takes
        fetcher.fetch(assignment, active)
        return True

    def _still_in(self, subscriptions: Any, assignment: Any) -> bool:
        return bool(
            self.consumer.flow_active
            and assignment is not None
            and not subscriptions.reassignment_in_progress
            and subscriptions.subscription.assignment is assignment
        )

    def _wake_by(self, fetcher: SessionFetcher, deadline: float) -> None:
        """End the wait for a fetch at this time of the loop's clock, or before.

        A poll ends after a few milliseconds and may wait for a second. So the alarm of a poll stays for those that
        follow; it wakes one of them early, which then waits on.
        """
        alarm = self._alarm
        if alarm is None or alarm.when() > deadline:
            if alarm is not None:
                alarm.cancel()
            self._alarm = asyncio.get_running_loop().call_at(deadline, self._wake, fetcher)

    def _wake(self, fetcher: SessionFetcher) -> None:
        self._alarm = None
        for waiter in fetcher._fetch_waiters:
            fetcher._notify(waiter)

    def _drain(self, fetcher: SessionFetcher, assignment: Any, active: Collection[TP]) -> dict[TP, RecordList]:
        lists: dict[TP, RecordList] = {}
        if not (waiting := [tp for tp in fetcher._records if tp in active]):
            return lists  # nothing but partitions that are not read
        fetcher.begin_poll()
        # Arrivals first: feedback that is handled before its arrival has to be parked, stored and read again.
        first = self._link.arrivals
        if arrivals := [tp for tp in waiting if tp.topic == first]:
            self._take(fetcher, assignment, arrivals, lists)
        if others := [tp for tp in waiting if tp.topic != first]:
            self._take(fetcher, assignment, others, lists)
        return lists

    def _take(self, fetcher: SessionFetcher, assignment: Any, part: list[Any], lists: dict[TP, RecordList]) -> None:
        # Nothing here yields to the loop, so the positions before and after belong to the records. Their number is
        # limited: the worker does nothing else until they are handled.
        generation, room = self.app.consumer_generation_id, self._link.options.poll_records
        for tp in part:
            state = assignment.state_value(tp)
            if state is None or (start := state._position) is None:
                continue
            fetched = fetcher._records[tp]._created
            records = fetcher.take(tp, room)
            # A position can move without a record: transaction markers, compacted batches.
            if (end := state.position) != start:
                lists[tp] = RecordList(
                    tp=tp, generation=generation, start=start, end=end, records=records, fetched=fetched
                )
            room -= len(records)
            if not room:
                break

    def member(self) -> str:
        """Return the id of this member in the group."""
        return str(self._ensure_consumer()._coordinator.member_id)

    def seek_to(self, positions: Mapping[TP, int]) -> None:
        """Continue reading at these positions."""
        consumer = self._ensure_consumer()
        for tp, offset in positions.items():
            consumer.seek(tp, offset)
