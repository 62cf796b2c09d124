"""The Kafka client of a worker: an aiokafka consumer in the worker's own loop, and how a poll collects records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from math import inf
from typing import Any

import aiokafka
from aiokafka.errors import ConsumerStoppedError
from faust.types import TP

from worker.kafka.faust.link import Link, link_of
from worker.kafka.faust.same_loop import SameLoopConsumer
from worker.kafka.fetching import install
from worker.kafka.records import unpack_lean
from worker.kafka.transport import RecordList


class Client(SameLoopConsumer):
    """The connection to the broker, and the membership in the group."""

    _last_heartbeat = -inf

    @property
    def _link(self) -> Link:
        return link_of(self.app)

    async def on_start(self) -> None:
        """Connect, and note the time of every heartbeat that the group accepts."""
        await super().on_start()
        coordinator = self._ensure_consumer()._coordinator
        beat = coordinator._do_heartbeat

        async def noted() -> bool:
            sent = time.monotonic()
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

    async def _fetch_records(
        self,
        consumer: aiokafka.AIOKafkaConsumer,
        active_partitions: set[TP],
        timeout: float | None = None,  # noqa: ASYNC109 (Faust's)
        max_records: int | None = None,
    ) -> Any:
        """Return the fetched records, or wait for some.

        Nothing waits by the clock here. An idle worker takes a record as soon as it is fetched; what comes while a poll
        is handled is fetched meanwhile and makes the next one. So polls grow with the load by themselves.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout or 0.0)
        fetcher = consumer._fetcher
        subscriptions = fetcher._subscriptions
        assignment = subscriptions.subscription and subscriptions.subscription.assignment
        with subscriptions.fetch_context():
            # A poll may outlive the generation it began in. Its caller would drop the records, and the recovery of a
            # changelog with dropped records never ends.
            while self._still_in(subscriptions, assignment):
                if consumer._closed or fetcher._closed:
                    raise ConsumerStoppedError
                if lists := await self._drain(fetcher, assignment, active_partitions):
                    return lists
                remaining = deadline - loop.time()
                if remaining <= 0:
                    break
                await self._await_fetch(fetcher, remaining)
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
        """Wait for the answer to the next fetch, at most so many seconds."""
        waiter = fetcher._create_fetch_waiter()
        done, _ = await asyncio.wait([waiter], timeout=seconds)
        if not done:
            waiter.cancel()
        else:
            waiter.result()  # the coordinator passes its errors this way

    async def _drain(self, fetcher: Any, assignment: Any, active: set[TP]) -> dict[TP, RecordList]:
        if not fetcher._records:
            return {}
        waiting = [
            TP(*tp)
            for tp in fetcher._records
            if tp in active and (state := assignment.state_value(tp)) and state.has_valid_position
        ]
        arrivals = {tp for tp in waiting if tp.topic == self._link.arrivals}
        unpack_lean(fetcher)
        lists: dict[TP, RecordList] = {}
        # Arrivals first: feedback that is handled before its arrival has to be parked, stored and read again.
        for part in (arrivals, set(waiting) - arrivals):
            if part:  # to aiokafka no partitions means all of them
                lists |= await self._drain_part(fetcher, assignment, part)
        return lists

    async def _drain_part(self, fetcher: Any, assignment: Any, part: set[TP]) -> dict[TP, RecordList]:
        # Without a timeout `fetched_records` does not yield to the loop, so the positions before and after belong to
        # the returned records. Their number is limited: the worker does nothing else until they are handled.
        states = {tp: assignment.state_value(tp) for tp in part}
        before = {tp: state.position for tp, state in states.items()}
        fetched = {tp: fetcher._records[tp]._created for tp in part}
        drained = await fetcher.fetched_records(part, timeout=0, max_records=self._link.options.poll_records)
        generation = self.app.consumer_generation_id
        return {
            tp: RecordList(
                tp=tp,
                generation=generation,
                start=before[tp],
                end=state.position,
                records=drained.get(tp, ()),
                fetched=fetched[tp],
            )
            for tp, state in states.items()
            # A position can move without a record: transaction markers, compacted batches.
            if state.position != before[tp]
        }

    def member(self) -> str:
        """Return the id of this member in the group."""
        return str(self._ensure_consumer()._coordinator.member_id)

    def seek_to(self, positions: Mapping[TP, int]) -> None:
        """Continue reading at these positions."""
        consumer = self._ensure_consumer()
        for tp, offset in positions.items():
            consumer.seek(tp, offset)
