"""The driver between two generations: what it reads, and how soon it looks again."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaError
from faust.types import TP

from tests.transport.fake import in_loop, settle
from worker.kafka.connection import Connection
from worker.kafka.faust.client import Client, ask_for_unknown_topics
from worker.kafka.faust.driver import BatchConsumer
from worker.kafka.faust.link import FaustOptions, Link

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
