"""The driver between two generations: what it reads, and how soon it looks again."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.consumer.fetcher import FetchError
from aiokafka.errors import KafkaError
from faust.types import TP

from tests.transport.fake import in_loop, settle
from worker.kafka.connection import Connection
from worker.kafka.faust.client import Client, ask_for_unknown_topics
from worker.kafka.faust.driver import BatchConsumer
from worker.kafka.faust.link import FaustOptions, Link
from worker.kafka.fetched import FetchedPartition

CHANGELOG, ARRIVALS = TP("ads.sessions-changelog", 0), TP("ads.arrivals", 0)


def polls(*, accepts: bool, active: set[TP]) -> list[tuple[set[TP], float]]:
    """Return what a consumer reads in one step, with the longest time that the poll may take."""
    seen: list[tuple[set[TP], float]] = []

    class Consumer(BatchConsumer):
        flow_active = True  # type: ignore[assignment]

        def __init__(self) -> None:
            owner: Any = SimpleNamespace(accepts=lambda generation: accepts)
            self._link = Link(FaustOptions(connection=Connection(servers=("kafka:9092",))), owner)
            self.app: Any = SimpleNamespace(consumer_generation_id=1)
            self._thread: Any = SimpleNamespace(getmany=self._poll)

        async def _poll(self, readable: set[TP], seconds: float) -> dict[TP, Any]:
            seen.append((readable, seconds))
            return {}

        def _get_active_partitions(self) -> set[TP]:
            return active

        async def sleep(self, n: Any, **_: Any) -> None:
            seen.append((set(), n))

    assert asyncio.run(Consumer()._wait_next_records(1.0)) == ({}, active)
    return seen


def test_inputs_are_read_when_the_owner_accepts_them() -> None:
    assert polls(accepts=True, active={CHANGELOG, ARRIVALS}) == [({CHANGELOG, ARRIVALS}, 1.0)]


def test_a_worker_that_recovers_looks_again_soon_at_what_it_may_read() -> None:
    ((readable, seconds),) = polls(accepts=False, active={CHANGELOG, ARRIVALS})
    assert readable == {CHANGELOG}
    assert seconds < 0.1


def test_a_worker_without_resumed_partitions_does_not_sleep_for_a_second() -> None:
    ((readable, seconds),) = polls(accepts=True, active=set())
    assert not readable
    assert seconds < 0.1


def test_several_heartbeats_may_be_lost_before_a_member_is_given_up() -> None:
    options = [FaustOptions(connection=Connection(servers=("kafka:9092",)), session_timeout=one) for one in (1, 10, 60)]
    assert [one.heartbeat_interval for one in options] == [1 / 3, 1, 1]


def asks(known: set[str], subscribed: set[str] | None) -> int:
    """Return how often a heartbeat asks for the metadata of a cluster that has these topics."""
    asked: list[None] = []
    cluster = SimpleNamespace(partitions_for_topic=lambda topic: {0} if topic in known else None)
    subscription = None if subscribed is None else SimpleNamespace(topics=subscribed)
    consumer: Any = SimpleNamespace(
        _client=SimpleNamespace(cluster=cluster, force_metadata_update=lambda: asked.append(None)),
        _subscription=SimpleNamespace(subscription=subscription),
    )
    ask_for_unknown_topics(consumer)
    return len(asked)


def test_a_heartbeat_asks_for_topics_that_a_broker_did_not_know_when_it_started() -> None:
    assert asks({"ads.arrivals"}, {"ads.arrivals", "ads.clicks"}) == 1
    assert asks(set(), {"ads.arrivals", "ads.clicks"}) == 1
    assert asks({"ads.arrivals", "ads.clicks"}, {"ads.arrivals", "ads.clicks"}) == 0
    assert asks(set(), None) == 0  # not subscribed yet


# ── polls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Fetcher:
    """A fetcher that has nothing, and notes what is asked for."""

    def __init__(self) -> None:
        self._closed = False
        self._records: dict[TP, Any] = {}
        self._fetch_waiters: set[asyncio.Future[None]] = set()
        subscription = SimpleNamespace(assignment=object())
        self._subscriptions = SimpleNamespace(
            subscription=subscription, reassignment_in_progress=False, fetch_context=nullcontext
        )
        self.asked: list[Any] = []

    def fetch(self, assignment: Any, partitions: Any) -> None:
        self.asked.append(partitions)

    def _notify(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)


class PollingClient(Client):
    def __init__(self) -> None:
        self.fetcher = Fetcher()
        self.consumer: Any = SimpleNamespace(flow_active=True)

    def _ensure_consumer(self) -> Any:
        return SimpleNamespace(_fetcher=self.fetcher, _closed=False)


@in_loop
async def test_a_poll_without_records_ends_when_its_time_is_over_and_not_before() -> None:
    client, loop = PollingClient(), asyncio.get_running_loop()
    for seconds in (0.03, 0.01, 0.02):
        began = loop.time()
        assert await client.getmany(frozenset({ARRIVALS}), seconds) == {}
        assert seconds <= loop.time() - began < seconds + 5
        assert not client.fetcher._fetch_waiters


@in_loop
async def test_a_poll_that_may_wait_for_less_than_the_one_before_ends_in_time() -> None:
    client, loop = PollingClient(), asyncio.get_running_loop()
    polling = loop.create_task(client.getmany(frozenset({ARRIVALS}), 600.0))
    await settle()
    polling.cancel()
    await asyncio.wait([polling])
    assert not client.fetcher._fetch_waiters
    async with asyncio.timeout(30):
        assert await client.getmany(frozenset({ARRIVALS}), 0.01) == {}


@in_loop
async def test_an_error_of_the_coordinator_ends_a_poll() -> None:
    client = PollingClient()
    polling = asyncio.ensure_future(client.getmany(frozenset({ARRIVALS}), 600.0))
    await settle()
    (waiter,) = client.fetcher._fetch_waiters
    waiter.set_exception(KafkaError("fenced"))
    with pytest.raises(KafkaError, match="fenced"):
        await polling


@in_loop
async def test_other_tasks_run_between_two_polls_whether_a_poll_has_waited_or_not() -> None:
    consumer: Any = BatchConsumer.__new__(BatchConsumer)
    consumer._thread = client = PollingClient()
    for waits in (False, True, False):
        turns: list[None] = []
        asyncio.get_running_loop().call_soon(turns.append, None)
        if waits:
            await client.getmany(frozenset({ARRIVALS}), 0.001)
        await consumer.sleep(0)
        assert turns


def test_the_partitions_of_a_poll_are_the_same_object_as_long_as_they_are_the_same() -> None:
    consumer: Any = BatchConsumer.__new__(BatchConsumer)
    consumer._link = Link(FaustOptions(connection=Connection(servers=("kafka:9092",))), SimpleNamespace())
    active = {CHANGELOG, ARRIVALS}
    first = consumer._readable(active, True)
    assert consumer._readable(set(active), True) is first
    assert consumer._readable(active, False) == {CHANGELOG}
    active.discard(ARRIVALS)  # Faust changes the set that it has
    assert consumer._readable(active, True) == {CHANGELOG}
    active.add(ARRIVALS)
    assert consumer._readable(active, True) == first


# ── what is taken in the call that reads it ──────────────────────────────────────────────────────────────────────────


class OnceClient(PollingClient):
    """A client with a poll that waits, records that were fetched, and a consumer that takes them or does not."""

    def __init__(self, takes: bool = True, leaves: bool = False) -> None:
        super().__init__()
        self.taken: list[Any] = []
        self._takes, self._leaves = takes, leaves
        self.consumer.take_at_once = self._consume
        self.polling = asyncio.ensure_future(self.getmany(frozenset({ARRIVALS, CHANGELOG}), 600.0))

    def _consume(self, active: Any, drain: Any) -> bool:
        if self._takes:
            self.taken.append(drain())
        return self._takes

    def _drain(self, fetcher: Any, assignment: Any, active: Any) -> Any:
        drained = dict(fetcher._records)
        if not self._leaves:
            fetcher._records.clear()
        return drained

    def hold(self, *tps: TP, kind: type = FetchedPartition) -> None:
        self.fetcher._records.update({tp: kind.__new__(kind) for tp in tps})

    async def end(self) -> None:
        self.polling.cancel()
        await asyncio.wait([self.polling])


@in_loop
async def test_what_a_poll_waits_for_is_taken_at_once_and_asked_for_again() -> None:
    client = OnceClient()
    await settle()
    assert len(client.fetcher.asked) == 1
    for number in (1, 2):
        client.hold(ARRIVALS)
        assert client._take_at_once()
        assert len(client.taken) == number
        assert len(client.fetcher.asked) == number + 1
    await settle()
    assert not client.polling.done()
    await client.end()
    client.hold(ARRIVALS)
    assert not client._take_at_once(), "no poll waits"


@in_loop
async def test_the_poll_takes_what_cannot_be_taken_at_once() -> None:
    client = OnceClient()
    await settle()
    assert not client._take_at_once(), "nothing is there"
    client.hold(CHANGELOG, kind=FetchError)
    client.hold(ARRIVALS)
    assert not client._take_at_once(), "an error, or a changelog"
    client.fetcher._records.pop(CHANGELOG)
    client.consumer.flow_active = False
    assert not client._take_at_once(), "a rebalance has begun"
    client.consumer.flow_active = True
    client.fetcher._subscriptions.subscription = SimpleNamespace(assignment=object())
    assert not client._take_at_once(), "another assignment"
    assert not client.taken
    await client.end()


@in_loop
async def test_a_poll_that_is_about_to_go_on_takes_everything_itself() -> None:
    client = OnceClient()
    await settle()
    client._wake(client.fetcher)  # type: ignore[arg-type]
    client.hold(ARRIVALS)
    assert not client._take_at_once()
    await client.end()


@in_loop
async def test_the_poll_goes_on_if_the_consumer_declines_or_something_is_left() -> None:
    for client in (OnceClient(takes=False), OnceClient(leaves=True)):
        await settle()
        client.hold(ARRIVALS)
        assert not client._take_at_once()
        assert len(client.fetcher.asked) == 1
        await client.end()


class Owner:
    """An owner that takes what it is given."""

    def __init__(self) -> None:
        self.ready, self.has_room = True, True
        self.taken: list[Any] = []
        self.failures: list[Exception] = []

    def accepts(self, generation: int) -> bool:
        return self.ready and generation == 1

    def take_at_once(self, lists: Any) -> None:
        self.taken.append(lists)
        raise ZeroDivisionError

    def fail(self, error: Exception) -> None:
        self.failures.append(error)


@pytest.mark.parametrize("reason", ["flow", "stop", "generation", "owner", "partitions", "room", None])
def test_the_owner_is_given_records_at_once_only_if_a_poll_would_give_them_now(reason: str | None) -> None:
    class Consumer(BatchConsumer):
        flow_active = reason != "flow"  # type: ignore[assignment]
        should_stop = reason == "stop"  # type: ignore[assignment]

    owner, consumer = Owner(), cast(Any, Consumer.__new__(Consumer))
    consumer._link = Link(FaustOptions(connection=Connection(servers=("kafka:9092",))), cast(Any, owner))
    consumer.app = SimpleNamespace(consumer_generation_id=2 if reason == "generation" else 1)
    consumer._active_partitions = {ARRIVALS}
    active = consumer._readable({ARRIVALS}, True)
    owner.ready, owner.has_room = reason != "owner", reason != "room"
    if reason == "partitions":
        consumer._active_partitions = {ARRIVALS, CHANGELOG}
    assert consumer.take_at_once(active, lambda: {ARRIVALS: "records"}) is (reason is None)
    assert owner.taken == ([["records"]] if reason is None else [])
    assert len(owner.failures) == len(owner.taken), "an exception ends the worker"
