"""The client of a worker: the consumer of aiokafka in the worker's own loop, and what one poll takes from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import aiokafka
from aiokafka.errors import ConsumerStoppedError
from faust.types import TP

from worker.kafka.faust.same_loop import SameLoopConsumer
from worker.kafka.records import RecordList, unpack_lean

if TYPE_CHECKING:
    from worker.kafka.faust.driver import Consumer

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
                    if self._is_small(lists):
                        if found_waiting:
                            await self._await_fetch(fetcher, options.freshness)
                        # Else the decisions on what was handled last would be sent only after these are handled.
                        await serving.calm(options.calm)
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
