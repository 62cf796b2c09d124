"""The driver between two generations: what it reads, and how soon it looks again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from faust.types import TP

from worker.kafka.connection import Connection
from worker.kafka.faust.client import ask_for_unknown_topics
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
