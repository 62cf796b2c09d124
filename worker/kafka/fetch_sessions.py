"""Fetch some topics without aiokafka's tasks, in a fetch session with every broker.

For every poll, aiokafka's fetcher wakes a routine that looks at all partitions, starts a task with a timer, and sends
all positions to the broker, which answers with all partitions. Here a request leaves when a poll finds nothing, its
answer is handled by the call that reads its bytes (see `worker.kafka.direct`), and both have only those partitions that
have changed (KIP-227).

Rules that hold in this file:

- Positions are those of aiokafka's subscription state. What was fetched is held, judged and taken as aiokafka has it.
- A broker has one fetch at a time. It is sent only when nothing that was fetched is left, so a partition of a session
  is never fetched again from a position that has not moved.
- A session ends with its connection, with an error of the broker, and with the assignment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection
from aiokafka.consumer import consumer
from aiokafka.consumer.fetcher import FetchError
from aiokafka.errors import KafkaError
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import TopicPartition

from worker.kafka import unpacking
from worker.kafka.direct import PendingAnswer, SilenceWatch, open_connection, send, send_encoded
from worker.kafka.fetched import FetchedPartition
from worker.kafka.fetching import TwoConnectionsFetcher
from worker.kafka.messages import FETCH_VERSIONS, encode_fetch, version
from worker.kafka.records import unpacked
from worker.stream.topology import Record

log = logging.getLogger(__name__)

_LAST_EPOCH: Final = 2**31 - 1
_NO_BROKER: Final = -1  # leads what nobody leads
_LOOK: Final = 1.0  # seconds after which aiokafka's routine looks around, whatever happened; 0.2 by itself


class FetchSession:
    """What a broker knows of the positions of this process.

    >>> session = FetchSession()
    >>> first, second = TopicPartition("t", 0), TopicPartition("t", 1)
    >>> session.changes({first: 5, second: 7})
    ({TopicPartition(topic='t', partition=0): 5, TopicPartition(topic='t', partition=1): 7}, [])
    >>> session.continues(11)
    >>> session.changes({first: 6})
    ({TopicPartition(topic='t', partition=0): 6}, [TopicPartition(topic='t', partition=1)])
    """

    def __init__(self) -> None:
        self.number = self.epoch = 0
        self.sent: dict[TopicPartition, int] = {}

    def changes(self, positions: dict[TopicPartition, int]) -> tuple[dict[TopicPartition, int], list[TopicPartition]]:
        """Return the positions that the broker does not have yet, and the partitions that it is to forget."""
        sent = self.sent if self.number else {}
        self.sent = positions
        changed = {tp: position for tp, position in positions.items() if sent.get(tp) != position}
        return changed, [tp for tp in sent if tp not in positions]

    def continues(self, number: int) -> None:
        """Note the number that an answer has; without one, the next request has all positions again."""
        self.number = number
        self.epoch = (self.epoch % _LAST_EPOCH) + 1 if number else 0


class SessionFetcher(TwoConnectionsFetcher):
    """A fetcher that leaves the topics in `direct` to `fetch`; none at first."""

    def __init__(self, client: AIOKafkaClient, *arguments: Any, **named: Any) -> None:
        super().__init__(client, *arguments, **{**named, "fetcher_timeout": _LOOK})
        self.direct: Collection[str] = frozenset()
        #: Takes what was fetched in the call that has read it; returns whether no poll has to be woken for it.
        self.take_at_once: Callable[[], bool] = lambda: False
        self._direct_client = client
        self._sessions: dict[int, FetchSession] = {}
        self._session_assignment: Any = None
        self._busy: set[int] = set()  # brokers with a fetch on its way, or that are given a pause
        self._connecting: set[asyncio.Task[Any]] = set()
        self._plan: _Plan | None = None
        self._limits = (self._fetch_max_wait_ms, self._fetch_min_bytes, self._fetch_max_bytes, self._isolation_level)
        self._silence = SilenceWatch(client, client._request_timeout_ms / 1000)

    def _get_actions_per_node(self, assignment: Any) -> Any:
        return super()._get_actions_per_node(_Others(assignment, self.direct) if self.direct else assignment)

    def take(self, tp: TopicPartition, most: int) -> list[Record]:
        """Return what was fetched of a partition, at most so many records; raise what the broker says instead."""
        held = self._records[tp]
        if type(held) is FetchedPartition:
            if (plain := held.take(most)) is not None:
                del self._records[tp]
                return plain
            held = self._records[tp] = held.careful()
        taken: list[Record] = []
        if not isinstance(held, FetchError):
            held._partition_records._consumer_record = unpacked
            taken = held.getall(most)
            if held.has_more():
                return taken
        del self._records[tp]
        if tp.topic not in self.direct:
            self._notify(self._wait_consume_future)
        if isinstance(held, FetchError):
            held.check_raise()
        return taken

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def fetch(self, assignment: Any, partitions: Collection[TopicPartition]) -> None:
        """Ask for records of the partitions among these whose topics are direct, unless that has been done."""
        if assignment is not self._session_assignment:
            self._session_assignment = assignment
            self._sessions.clear()
        plan, cluster = self._plan, self._direct_client.cluster
        if plan is None or not plan.is_for(assignment, partitions, cluster):
            plan = self._plan = _Plan(assignment, partitions, cluster, self.direct)
        records, busy = self._records, self._busy
        for broker, some in plan.by_broker.items():
            if broker in busy:
                continue
            positions: dict[TopicPartition, int] = {
                tp: state._position
                for tp, state in some
                if state._position is not None and not state._paused and tp not in records
            }
            if positions:
                self._fetch_from(broker, assignment, positions)

    def _fetch_from(self, broker: int, assignment: Any, positions: dict[TopicPartition, int]) -> None:
        if broker == _NO_BROKER:
            self._pause(broker, f"no broker leads {len(positions)} partitions")
        elif (connection := open_connection(self._direct_client, broker)) is None:
            self._connect(broker)
        else:
            self._request(broker, connection, assignment, positions)

    def _request(
        self, broker: int, connection: AIOKafkaConnection, assignment: Any, positions: dict[TopicPartition, int]
    ) -> None:
        if (session := self._sessions.get(broker)) is None:
            session = self._sessions[broker] = FetchSession()
        changed, forgotten = session.changes(positions)
        take = partial(self._answered, broker, session, assignment)
        answer = PendingAnswer(take, partial(self._failed, broker), time.monotonic())
        self._busy.add(broker)
        try:
            message = version(FetchRequest, connection._versions)
            if message is not None and message.API_VERSION in FETCH_VERSIONS:
                numbers = session.number, session.epoch
                most = self._max_partition_fetch_bytes
                body = encode_fetch(message.API_VERSION, self._limits, numbers, changed, forgotten, most)
                send_encoded(connection, message, body, answer)
            else:
                send(connection, self._whole_request(positions), answer)
        except KafkaError as error:
            self._failed(broker, error)
        else:
            self._silence.watch()

    def _whole_request(self, positions: dict[TopicPartition, int]) -> FetchRequest:
        """Return a fetch for a broker without sessions: it gets all positions every time."""
        topics: dict[str, list[tuple[int, int, int]]] = {}
        for tp, position in positions.items():
            topics.setdefault(tp.topic, []).append((tp.partition, position, self._max_partition_fetch_bytes))
        return FetchRequest(*self._limits, list(topics.items()))

    def _connect(self, broker: int) -> None:
        """Connect to a broker; the next poll sends the fetch."""
        self._sessions.pop(broker, None)
        self._busy.add(broker)
        task = self._loop.create_task(self._direct_client.ready(broker))
        self._connecting.add(task)
        task.add_done_callback(partial(self._connected, broker))

    def _connected(self, broker: int, task: asyncio.Task[Any]) -> None:
        self._connecting.discard(task)
        if not task.cancelled() and task.exception() is None and task.result():
            self._is_free(broker)
        else:
            self._pause(broker, "no connection")

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answered(self, broker: int, session: FetchSession, assignment: Any, answer: Any) -> None:
        if getattr(answer, "error_code", 0):
            # The broker has dropped the session, for want of room or after a restart: the next request begins another.
            self._sessions.pop(broker, None)
            self._is_free(broker)
            return
        try:
            has_errors = self._hold(broker, session, assignment, answer)
        except Exception as error:  # else no fetch would ever be sent to this broker again
            self._failed(broker, error)
            return
        if has_errors:
            self._sessions.pop(broker, None)
            self._pause(broker, None)
            return
        self._busy.discard(broker)
        is_taken = False
        try:
            is_taken = self.take_at_once()
        finally:
            if not is_taken:
                self._is_free(broker)

    def _hold(self, broker: int, session: FetchSession, assignment: Any, answer: Any) -> bool:
        """Keep what an answer has until it is taken; return whether it has errors of partitions."""
        session.continues(getattr(answer, "session_id", 0))
        if self._hold_plain(session, assignment, answer):
            return False
        positions = [
            (topic, [(found[0], session.sent[TopicPartition(topic, found[0])], 0) for found in partitions])
            for topic, partitions in answer.topics
        ]
        # Ends at its first step: the answer is there already (see `TwoConnections.send`).
        handling = self._proc_fetch_request(assignment, broker, _Answered(positions, answer))
        with suppress(StopIteration):
            handling.send(None)
        return any(found[1] for _, partitions in answer.topics for found in partitions)

    def _hold_plain(self, session: FetchSession, assignment: Any, answer: Any) -> bool:
        """Keep what an answer has if there is nothing to judge in it; return whether that is so."""
        if answer.API_VERSION not in FETCH_VERSIONS or self._client_rack or not assignment.active:
            return False
        fetched: list[tuple[Any, int, int, FetchedPartition | None]] = []
        created = time.monotonic()
        for topic, partitions in answer.topics:
            for partition, error, highwater, stable, _, aborted, *_, data in partitions:
                tp = TopicPartition(topic, partition)
                position, state = session.sent[tp], assignment._tp_state[tp]
                if error or aborted or data is None:
                    return False
                if state._position != position:
                    continue  # left since; the next request has the present one
                if not data:
                    fetched.append((state, highwater, stable, None))
                    continue
                if not MemoryRecords(data).has_next():
                    return False
                held = FetchedPartition(self, assignment, tp, state, position=position, data=data, created=created)
                fetched.append((state, highwater, stable, held))
        now = int(1000 * time.time())
        for state, highwater, stable, fresh in fetched:
            state.highwater, state.lso, state.timestamp = highwater, stable, now
            if fresh is not None:
                self._records[fresh.tp] = fresh
        return True

    def _failed(self, broker: int, error: BaseException) -> None:
        self._sessions.pop(broker, None)
        self._pause(broker, error)

    def _pause(self, broker: int, error: object) -> None:
        """Leave a broker in peace for a moment, and ask which broker leads what."""
        if self._closed:
            return
        if error is not None:
            log.warning("records cannot be fetched: %s; trying again", error)
        self._busy.add(broker)
        self._notify(self._wait_consume_future)  # a position may be lost, which aiokafka's routine finds again
        self._direct_client.force_metadata_update()
        self._loop.call_later(self._retry_backoff, self._is_free, broker)

    def _is_free(self, broker: int) -> None:
        self._busy.discard(broker)
        for waiter in self._fetch_waiters:
            self._notify(waiter)


class _Others:
    """An assignment without the partitions that are fetched directly, but for those whose position was lost."""

    def __init__(self, assignment: Any, direct: Collection[str]) -> None:
        self.state_value = assignment.state_value
        self.tps = [
            tp for tp in assignment.tps if tp.topic not in direct or not assignment.state_value(tp).has_valid_position
        ]


class _Plan:
    """Which broker leads which of some partitions, as long as neither the assignment nor the metadata change.

    The states of partitions are aiokafka's: they last as long as the assignment.
    """

    def __init__(
        self, assignment: Any, partitions: Iterable[TopicPartition], cluster: Any, direct: Collection[str]
    ) -> None:
        self._assignment, self._partitions, self._metadata = assignment, partitions, cluster._partitions
        self.by_broker: dict[int, list[tuple[TopicPartition, Any]]] = {}
        for tp in partitions:
            state = assignment.state_value(tp)
            if state is not None and tp.topic in direct:
                leader = cluster.leader_for_partition(tp)
                self.by_broker.setdefault(_NO_BROKER if leader is None else leader, []).append((tp, state))

    def is_for(self, assignment: Any, partitions: Iterable[TopicPartition], cluster: Any) -> bool:
        """Whether this is still valid; aiokafka replaces the assignment and the metadata, it does not change them."""
        return (
            self._assignment is assignment and self._partitions is partitions and self._metadata is cluster._partitions
        )


class _Answered:
    """A fetch whose answer is known, for `TwoConnections.send`."""

    def __init__(self, topics: list[tuple[str, list[tuple[int, int, int]]]], answer: Any) -> None:
        self.topics, self.answer = topics, answer


def install() -> None:
    """Have the aiokafka consumers of this process fetch this way, and unpack within bounds."""
    unpacking.install()
    consumer.Fetcher = SessionFetcher
