"""Fetches in sessions without a broker: what is asked for, what is taken, and when everything is asked for again."""

from __future__ import annotations

import asyncio
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.fake import in_loop, settle
from worker.kafka import fetch_sessions, unpacking
from worker.kafka.direct import PendingAnswer
from worker.kafka.fetch_sessions import SessionFetcher

A, B, FAR, NOBODYS = (TopicPartition("in", number) for number in range(4))
OTHER = TopicPartition("log", 0)
LEADERS = {A: 1, B: 1, FAR: 2, OTHER: 1}
NO_SUCH_SESSION, OUT_OF_RANGE, NOT_LEADER = 70, 1, 6


class Request:
    """What a fetch asks for."""

    def __init__(self, message: Any) -> None:
        self.view: dict[TopicPartition, int] = {}
        has_sessions = message.API_VERSION >= 7
        self.session = (message.session_id, message.session_epoch) if has_sessions else None
        where = 2 if message.API_VERSION >= 9 else 1
        self.positions = {
            TopicPartition(topic, found[0]): found[where]
            for topic, partitions in message.topics
            for found in partitions
        }
        forgotten = message.forgotten_topics_data if has_sessions else ()
        self.forgotten = {TopicPartition(topic, one) for topic, partitions in forgotten for one in partitions}


class Broker:
    """A fetcher with positions, and the requests that it sends; `newest` is the newest version that it may use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, newest: int = 11) -> None:
        unpacking.install()
        self.requests: list[Request] = []
        self.away: set[int] = set()
        self.refreshed = 0
        self._answers: list[PendingAnswer] = []
        self._subscriptions = SubscriptionState()
        self._subscriptions.assign_from_user({A, B, FAR, NOBODYS, OTHER})
        self.assignment = self._subscriptions.subscription.assignment
        for tp, position in ((A, 5), (B, 7), (FAR, 0), (NOBODYS, 0), (OTHER, 3)):
            self.assignment.state_value(tp).seek(position)
        client: Any = SimpleNamespace(
            _loop=asyncio.get_running_loop(),
            _metadata_max_age_ms=1000,
            _request_timeout_ms=40_000,
            _conns={},
            cluster=SimpleNamespace(leader_for_partition=LEADERS.get, _partitions={}),
            force_metadata_update=self._refresh,
            ready=self._ready,
            send=self._refuse,
        )
        connection = SimpleNamespace(_versions={1: (4, newest)})
        monkeypatch.setattr(
            fetch_sessions, "open_connection", lambda _, node: None if node in self.away else connection
        )
        monkeypatch.setattr(fetch_sessions, "send", self._take)
        monkeypatch.setattr(fetch_sessions, "send_encoded", self._take_encoded)
        self.fetcher = SessionFetcher(
            client,
            self._subscriptions,
            retry_backoff_ms=1,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
        self.fetcher.direct = frozenset({"in"})

    def _refresh(self) -> asyncio.Future[None]:
        self.refreshed += 1
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def _ready(self, node: int) -> bool:
        self.away.discard(node)
        return True

    async def _refuse(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    def _take(self, connection: Any, request: Any, answer: PendingAnswer) -> None:
        self.requests.append(Request(request.prepare(connection._versions)))
        self._answers.append(answer)

    def _take_encoded(self, connection: Any, message: Any, body: bytes, answer: PendingAnswer) -> None:
        self.requests.append(Request(type(message)(*message.SCHEMA.decode(BytesIO(body)))))
        self._answers.append(answer)

    def fetch(self, *tps: TopicPartition) -> None:
        self.fetcher.fetch(self.assignment, tps or (A, B))

    def answer(
        self, data: dict[TopicPartition, bytes | int], *, session: int = 9, error: int = 0, aborted: Any = None
    ) -> None:
        """Answer the last request with the bytes of partitions, or with errors."""
        topics = [
            (
                tp.topic,
                [
                    (tp.partition, found, -1, -1, -1, None, -1, b"")
                    if isinstance(found, int)
                    else (tp.partition, 0, 99, 98, 0, aborted, -1, found)
                ],
            )
            for tp, found in data.items()
        ]
        answer = SimpleNamespace(API_VERSION=11, error_code=error, session_id=session, topics=topics)
        self._answers[-1].set_result(answer)

    def lose(self) -> None:
        self._answers[-1].set_exception(KafkaConnectionError("lost"))

    def taken(self, tp: TopicPartition) -> list[bytes | None]:
        return [record.value for record in self.fetcher.take(tp, 100)]

    def position(self, tp: TopicPartition) -> int:
        position: int = self.assignment.state_value(tp).position
        return position


def records(first: int, *values: bytes) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 10_000)
    for number, value in enumerate(values):
        builder.append(number, 1_700_000_000_000, b"key", value, [])
    data = bytearray(builder.build())
    data[:8] = first.to_bytes(8, "big")
    return bytes(data)


@in_loop
async def test_a_session_begins_with_all_positions_and_goes_on_with_those_that_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker(monkeypatch)
    broker.fetch()
    broker.fetch()
    assert [one.positions for one in broker.requests] == [{A: 5, B: 7}], "one fetch at a time"
    assert broker.requests[0].session == (0, 0)
    broker.answer({A: records(5, b"x", b"y")})
    assert broker.taken(A) == [b"x", b"y"]
    assert (broker.position(A), broker.position(B)) == (7, 7)
    broker.fetch()
    assert broker.requests[1].positions == {A: 7}
    assert (broker.requests[1].session, broker.requests[1].forgotten) == ((9, 1), set())
    broker.answer({})
    broker.fetch()
    assert (broker.requests[2].positions, broker.requests[2].session) == ({}, (9, 2))
    await broker.fetcher.close()


@in_loop
async def test_a_partition_that_is_paused_or_still_has_records_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch)
    broker.fetch()
    broker.answer({A: records(5, b"x")})
    broker.assignment.state_value(B).pause()
    broker.fetch(A, B)
    assert len(broker.requests) == 1, "nothing is left to ask for"
    assert broker.taken(A) == [b"x"]
    broker.fetch(A, B)
    assert (broker.requests[1].positions, broker.requests[1].forgotten) == ({A: 6}, {B})
    await broker.fetcher.close()


@in_loop
async def test_a_lost_session_begins_anew_with_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch)
    broker.fetch()
    broker.answer({})
    broker.fetch()
    broker.answer({}, session=0, error=NO_SUCH_SESSION)
    broker.fetch()
    assert (broker.requests[2].positions, broker.requests[2].session) == ({A: 5, B: 7}, (0, 0))
    await broker.fetcher.close()


@in_loop
@pytest.mark.parametrize(("newest", "session"), [(11, (0, 0)), (6, None)])
async def test_a_broker_without_sessions_gets_all_positions_every_time(
    monkeypatch: pytest.MonkeyPatch, newest: int, session: Any
) -> None:
    broker = Broker(monkeypatch, newest)
    for _ in range(2):
        broker.fetch()
        broker.answer({}, session=0)
    assert [one.positions for one in broker.requests] == [{A: 5, B: 7}] * 2
    assert [one.session for one in broker.requests] == [session] * 2
    await broker.fetcher.close()


@in_loop
async def test_an_answer_for_a_position_that_was_left_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch)
    broker.fetch()
    broker.assignment.state_value(A).seek(2)
    broker.answer({A: records(5, b"x")})
    assert A not in broker.fetcher._records
    broker.fetch()
    assert broker.requests[1].positions == {A: 2}
    await broker.fetcher.close()


@in_loop
@pytest.mark.parametrize("how", ["lost", "refused"])
async def test_after_a_failure_everything_is_asked_for_again_a_little_later(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    broker = Broker(monkeypatch)
    broker.fetch()
    waiter = broker.fetcher._create_fetch_waiter()
    if how == "lost":
        broker.lose()
    else:
        broker.answer({A: NOT_LEADER})
    broker.fetch()
    assert len(broker.requests) == 1
    assert broker.refreshed
    async with asyncio.timeout(10):
        await waiter
    broker.fetch()
    assert (broker.requests[1].positions, broker.requests[1].session) == ({A: 5, B: 7}, (0, 0))
    await broker.fetcher.close()


@in_loop
async def test_a_position_that_the_broker_has_no_more_is_left_to_aiokafka(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch)
    others = fetch_sessions._Others
    assert others(broker.assignment, broker.fetcher.direct).tps == [OTHER]
    broker.fetch()
    broker.answer({A: OUT_OF_RANGE, B: records(7, b"x")})
    assert not broker.assignment.state_value(A).has_valid_position
    assert set(others(broker.assignment, broker.fetcher.direct).tps) == {A, OTHER}
    assert broker.taken(B) == [b"x"]
    await broker.fetcher.close()


@in_loop
async def test_every_broker_is_asked_by_itself_and_connected_to_first(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch)
    broker.away.add(2)
    broker.fetch(A, FAR)
    assert [one.positions for one in broker.requests] == [{A: 5}]
    await settle()
    broker.fetch(A, FAR)
    assert [one.positions for one in broker.requests] == [{A: 5}, {FAR: 0}]
    await broker.fetcher.close()


@in_loop
async def test_another_assignment_begins_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch)
    broker.fetch()
    broker.answer({})
    broker._subscriptions.assign_from_user({A, B})
    broker.assignment = broker._subscriptions.subscription.assignment
    for tp in (A, B):
        broker.assignment.state_value(tp).seek(1)
    broker.fetch()
    assert (broker.requests[1].positions, broker.requests[1].session) == ({A: 1, B: 1}, (0, 0))
    await broker.fetcher.close()


@in_loop
async def test_an_answer_that_cannot_be_handled_and_a_partition_without_leader_cost_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker(monkeypatch)
    broker.fetch(A, NOBODYS)
    assert [one.positions for one in broker.requests] == [{A: 5}]
    assert broker.refreshed == 1, "whoever leads the other one is asked for"
    broker.answer({B: records(7, b"x")})  # which was not asked for
    broker.fetch(A)
    assert len(broker.requests) == 1
    async with asyncio.timeout(10):
        while len(broker.requests) == 1:
            await broker.fetcher._create_fetch_waiter()
            broker.fetch(A)
    assert broker.requests[1].positions == {A: 5}
    await broker.fetcher.close()


@in_loop
@pytest.mark.parametrize("how", ["taken", "left", "raised"])
async def test_a_poll_is_woken_unless_its_records_were_taken_at_once(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    broker = Broker(monkeypatch)

    def take_at_once() -> bool:
        assert not broker.fetcher._busy, "the next fetch may be sent"
        if how == "raised":
            raise ZeroDivisionError
        return how == "taken"

    broker.fetcher.take_at_once = take_at_once
    waiter = broker.fetcher._create_fetch_waiter()
    broker.fetch()
    broker.answer({A: records(5, b"x")})
    assert waiter.done() is (how != "taken")
    waiter.cancel()
    await broker.fetcher.close()


# ── against what is plain to see ─────────────────────────────────────────────────────────────────────────────────────

ALL = (A, B, FAR, NOBODYS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("seek"), st.sampled_from((A, B)), st.integers(0, 3)),
        st.tuples(st.sampled_from(["pause", "resume", "lose position"]), st.sampled_from((A, B)), st.just(0)),
        st.tuples(st.just("answer"), st.sampled_from((A, B)), st.integers(0, 2)),
        st.tuples(st.sampled_from(["take", "metadata", "fail"]), st.sampled_from((A, B)), st.just(0)),
    ),
    max_size=25,
)


def step(broker: Broker, what: str, tp: TopicPartition, number: int) -> None:
    """Let something happen to a partition between two polls."""
    state = broker.assignment.state_value(tp)
    if what == "seek":
        state.seek(number)
    elif what in ("pause", "resume"):
        getattr(state, what)()
    elif what == "lose position":
        state.await_reset(-2)
    elif what == "take" and tp in broker.fetcher._records and state.has_valid_position:
        broker.taken(tp)
    elif what == "metadata":
        broker.fetcher._direct_client.cluster._partitions = {}
    elif what == "answer" and broker.fetcher._busy:
        asked = broker.requests[-1]
        broker.answer({tp: records(asked.view[tp], *[b"x"] * number)} if number and tp in asked.view else {})
    elif what == "fail" and broker.fetcher._busy:
        broker.answer({}, session=0, error=NO_SUCH_SESSION)


@given(STEPS)
def test_a_session_has_exactly_what_can_be_fetched_whatever_happens(steps: list[tuple[str, Any, int]]) -> None:
    @in_loop
    async def story() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            broker = Broker(monkeypatch)
            partitions, seen = frozenset((A, B)), 0
            view: dict[TopicPartition, int] = {}  # what the broker has, from all requests of the session
            for what in [*steps, ("answer", A, 0), ("take", A, 0), ("take", B, 0)]:
                step(broker, *what)
                held = set(broker.fetcher._records)
                broker.fetcher.fetch(broker.assignment, partitions)
                if len(broker.requests) == seen:
                    continue
                seen, asked = len(broker.requests), broker.requests[-1]
                view = {} if asked.session == (0, 0) else view
                view = {tp: at for tp, at in (view | asked.positions).items() if tp not in asked.forgotten}
                asked.view = dict(view)
                states = {tp: broker.assignment.state_value(tp) for tp in partitions - held}
                fetchable = {tp: one for tp, one in states.items() if one.has_valid_position and not one.paused}
                assert view == {tp: one.position for tp, one in fetchable.items()}
            await broker.fetcher.close()

    story()


def outcome(broker: Broker, tp: TopicPartition) -> Any:
    try:
        return broker.fetcher.take(tp, 100)
    except KafkaError as error:
        return repr(error)


DATA = st.sampled_from([b"", records(5, b"x"), records(5, b"x", b"y")[:-3], records(3, b"u", b"v", b"x"), NOT_LEADER])


@given(
    data=st.dictionaries(st.sampled_from((A, B)), DATA | st.just(OUT_OF_RANGE), max_size=2),
    aborted=st.sampled_from([None, [], [(7, 1)]]),
    moved=st.booleans(),
    paused=st.booleans(),
)
def test_a_plain_answer_is_held_as_aiokafka_holds_it(data: Any, aborted: Any, moved: bool, paused: bool) -> None:
    @in_loop
    async def story() -> None:
        outcomes = []
        for plain in (True, False):
            with pytest.MonkeyPatch.context() as monkeypatch:
                broker = Broker(monkeypatch)
                if not plain:
                    monkeypatch.setattr(SessionFetcher, "_hold_plain", lambda *_: False)
                broker.assignment.state_value(B).seek(5)
                broker.fetch()
                if moved:
                    broker.assignment.state_value(A).seek(4)
                broker.answer(data, aborted=aborted)
                if paused:
                    broker.assignment.state_value(B).pause()
                held = list(broker.fetcher._records)
                taken = [outcome(broker, tp) for tp in held]
                states = [broker.assignment.state_value(tp) for tp in (A, B)]
                kept = [(one._position, one.highwater, one.lso, one.timestamp is None) for one in states]
                outcomes.append((held, taken, kept, set(broker.fetcher._records), set(broker.fetcher._busy)))
                await broker.fetcher.close()
        assert outcomes[0] == outcomes[1]

    story()


@in_loop
async def test_a_fetch_goes_to_the_leader_that_the_present_metadata_have(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch)
    leaders = dict(LEADERS)
    cluster = broker.fetcher._direct_client.cluster
    cluster.leader_for_partition = leaders.get
    partitions = frozenset((A, B))
    broker.fetcher.fetch(broker.assignment, partitions)
    broker.answer({})
    leaders[B], cluster._partitions = 2, {}
    broker.fetcher.fetch(broker.assignment, partitions)
    assert [(one.positions, one.forgotten) for one in broker.requests[1:]] in (
        [({}, {B}), ({B: 7}, set())],
        [({B: 7}, set()), ({}, {B})],
    )
    await broker.fetcher.close()
