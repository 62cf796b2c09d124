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
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection
from aiokafka.consumer import consumer
from aiokafka.consumer.fetcher import FetchError
from aiokafka.errors import KafkaError
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.structs import TopicPartition

from worker.kafka import unpacking
from worker.kafka.direct import PendingAnswer, SilenceWatch, open_connection, send
from worker.kafka.fetching import TwoConnectionsFetcher
from worker.kafka.records import unpacked
from worker.stream.topology import Record

log = logging.getLogger(__name__)

_WITH_SESSIONS: Final = 7  # the first version of a fetch that has sessions
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
        self._direct_client = client
        self._sessions: dict[int, FetchSession] = {}
        self._session_assignment: Any = None
        self._busy: set[int] = set()  # brokers with a fetch on its way, or that are given a pause
        self._connecting: set[asyncio.Task[Any]] = set()
        self._silence = SilenceWatch(client, client._request_timeout_ms / 1000)

    def _get_actions_per_node(self, assignment: Any) -> Any:
        return super()._get_actions_per_node(_Others(assignment, self.direct) if self.direct else assignment)

    def take(self, tp: TopicPartition, most: int) -> list[Record]:
        """Return what was fetched of a partition, at most so many records; raise what the broker says instead."""
        held = self._records[tp]
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

    def fetch(self, assignment: Any, partitions: Iterable[TopicPartition]) -> None:
        """Ask for records of these partitions of the direct topics, unless that has been done."""
        if assignment is not self._session_assignment:
            self._session_assignment = assignment
            self._sessions.clear()
        leader_of = self._direct_client.cluster.leader_for_partition
        positions: dict[int, dict[TopicPartition, int]] = {}
        for tp in partitions:
            state = assignment.state_value(tp)
            if state is None or tp in self._records or not state.has_valid_position or state.paused:
                continue
            leader = leader_of(tp)
            leader = _NO_BROKER if leader is None else leader
            if leader not in self._busy:
                positions.setdefault(leader, {})[tp] = state.position
        for leader, wanted in positions.items():
            if leader == _NO_BROKER:
                self._pause(leader, f"no broker leads {len(wanted)} partitions")
            elif (connection := open_connection(self._direct_client, leader)) is None:
                self._connect(leader)
            else:
                self._request(leader, connection, assignment, wanted)

    def _request(
        self, broker: int, connection: AIOKafkaConnection, assignment: Any, positions: dict[TopicPartition, int]
    ) -> None:
        session = self._sessions.setdefault(broker, FetchSession())
        request = _SessionRequest(self, session, *session.changes(positions))
        take = partial(self._answered, broker, session, assignment)
        self._busy.add(broker)
        try:
            send(connection, request, PendingAnswer(take, partial(self._failed, broker), self._loop.time()))
        except KafkaError as error:
            self._failed(broker, error)
        else:
            self._silence.watch()

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
        else:
            self._is_free(broker)

    def _hold(self, broker: int, session: FetchSession, assignment: Any, answer: Any) -> bool:
        """Keep what an answer has until it is taken; return whether it has errors of partitions."""
        session.continues(getattr(answer, "session_id", 0))
        positions = [
            (topic, [(found[0], session.sent[TopicPartition(topic, found[0])], 0) for found in partitions])
            for topic, partitions in answer.topics
        ]
        # Ends at its first step: the answer is there already (see `TwoConnections.send`).
        handling = self._proc_fetch_request(assignment, broker, _Answered(positions, answer))
        with suppress(StopIteration):
            handling.send(None)
        return any(found[1] for _, partitions in answer.topics for found in partitions)

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


class _SessionRequest:
    """A fetch of what has changed in a session."""

    def __init__(
        self,
        fetcher: Any,
        session: FetchSession,
        changed: dict[TopicPartition, int],
        forgotten: list[TopicPartition],
    ) -> None:
        topics: dict[str, list[tuple[int, int, int]]] = {}
        most = fetcher._max_partition_fetch_bytes
        for tp, position in changed.items():
            topics.setdefault(tp.topic, []).append((tp.partition, position, most))
        self._forgotten: dict[str, list[int]] = {}
        for tp in forgotten:
            self._forgotten.setdefault(tp.topic, []).append(tp.partition)
        self._session = session
        self._request = FetchRequest(
            fetcher._fetch_max_wait_ms,
            fetcher._fetch_min_bytes,
            fetcher._fetch_max_bytes,
            fetcher._isolation_level,
            list(topics.items()),
        )

    def prepare(self, versions: Any) -> Any:
        """Return the message for the versions of the protocol that a broker has."""
        message = self._request.prepare(versions)
        if message.API_VERSION >= _WITH_SESSIONS:
            message.session_id, message.session_epoch = self._session.number, self._session.epoch
            message.forgotten_topics_data = list(self._forgotten.items())
        return message


class _Answered:
    """A fetch whose answer is known, for `TwoConnections.send`."""

    def __init__(self, topics: list[tuple[str, list[tuple[int, int, int]]]], answer: Any) -> None:
        self.topics, self.answer = topics, answer


def install() -> None:
    """Have the aiokafka consumers of this process fetch this way, and unpack within bounds."""
    unpacking.install()
    consumer.Fetcher = SessionFetcher
