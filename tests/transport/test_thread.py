"""The client thread on Kafka in memory: positions, back-pressure, calls, revocations, and the flights it reports to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from confluent_kafka import KafkaError, Message
from faust.types import TP
from hypothesis import given
from hypothesis import strategies as st

from tests.programs import until
from tests.transport.memory import Cluster, FakeConsumer, event
from worker.kafka.polls import Flight, Flights
from worker.kafka.thread import MOST_POLLS, ClientThread

A, B = TP("t", 0), TP("t", 1)


class Loop:
    """What the loop does in a rebalance, noted."""

    def __init__(self) -> None:
        self.flights = Flights(lambda error: None)
        self.assigned: set[TP] | None = None
        self.events: list[str] = []
        self.may_finish = asyncio.Event()
        self.may_finish.set()

    async def on_assigned(self, assigned: set[TP]) -> None:
        self.assigned = assigned
        self.events.append("assigned")

    async def on_revoked(self, revoked: set[TP]) -> None:
        self.events.append("revoked")
        await self.may_finish.wait()
        self.events.append("finished")

    async def on_lost(self, lost: set[TP]) -> None:
        self.events.append("lost")

    def on_fatal(self, error: KafkaError) -> None:
        self.events.append("fatal")


@asynccontextmanager
async def running(cluster: Cluster, drain: float = 5.0) -> AsyncIterator[tuple[ClientThread, Loop, FakeConsumer]]:
    loop, consumer = Loop(), FakeConsumer(cluster)
    thread = ClientThread(consumer, loop, serve_reports=lambda: False, drain=drain)  # type: ignore[arg-type]
    thread.start()
    await thread.subscribe(["t"])
    await until(lambda: loop.assigned is not None)
    try:
        yield thread, loop, consumer
    finally:
        await thread.close()


async def offsets(thread: ClientThread, generation: int, count: int) -> list[tuple[int, int]]:
    """Return partition and offset of the next records."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        poll = await thread.next_poll()
        thread.handled(poll.generation)
        if poll.generation == generation:
            found += [(record.partition, record.offset) for one in poll.lists for record in one.records]
    return found


def filled(records: int) -> Cluster:
    cluster = Cluster({"t": 2})
    for number in range(records):
        cluster.append("t", number % 2, b"k", b"%d" % number)
    return cluster


async def test_what_is_read_and_from_where_is_what_the_loop_says() -> None:
    async with running(filled(8)) as (thread, loop, consumer):
        assert (loop.assigned, consumer.reading) == ({A, B}, {})
        await thread.read({A: 1}, 1)
        assert await offsets(thread, 1, 3) == [(0, 1), (0, 2), (0, 3)]
        assert set(consumer.reading) == {A}
        await thread.read({A: 1, B: 2}, 1)
        assert await offsets(thread, 1, 2) == [(1, 2), (1, 3)], "no record of the first comes again"
        await thread.read({A: 2}, 2)
        assert await offsets(thread, 2, 2) == [(0, 2), (0, 3)], "a new generation starts where it says"


async def test_records_that_were_deleted_are_skipped() -> None:
    cluster = filled(10)
    cluster.firsts[A] = 3
    async with running(cluster) as (thread, _, _consumer):
        await thread.read({A: 1}, 1)
        assert await offsets(thread, 1, 2) == [(0, 3), (0, 4)]


async def test_no_more_is_polled_than_the_loop_takes() -> None:
    cluster = filled(2)
    async with running(cluster) as (thread, _, consumer):
        await thread.read({A: 0}, 1)
        await until(lambda: consumer.reading[A] == 1)
        for _ in range(4):
            cluster.append("t", 0, b"k", b"more")
            await thread.call(lambda _: None)  # it has gone round, and would have polled
        assert (MOST_POLLS, consumer.reading[A]) == (1, 1)
        assert [offset for _, offset in await offsets(thread, 1, 5)] == [0, 1, 2, 3, 4]


async def test_a_revocation_waits_for_the_loop_and_runs_its_calls_meanwhile() -> None:
    cluster = filled(2)
    async with running(cluster) as (thread, loop, consumer):
        await thread.read({A: 0, B: 0}, 1)
        await offsets(thread, 1, 2)
        loop.may_finish.clear()
        other = FakeConsumer(cluster)
        other.subscribe(["t"], on_assign=lambda *_: None, on_revoke=lambda *_: None)
        await until(lambda: "revoked" in loop.events)
        assert await thread.call(lambda _: "committed") == "committed"
        await thread.read({}, 2)
        assert set(consumer.reading) == {A, B}, "in a revocation nothing but unassign is taken"
        loop.may_finish.set()
        await until(lambda: (other.poll(), "finished" in loop.events)[1])
        await until(lambda: (other.poll(), loop.assigned == {A})[1])
        assert loop.events == ["assigned", "revoked", "finished", "assigned"]
        assert consumer.reading == {}


async def test_a_loop_that_does_not_finish_delays_a_revocation_for_a_while_only() -> None:
    cluster = filled(2)
    async with running(cluster, drain=0.05) as (_thread, loop, _consumer):
        loop.may_finish.clear()
        other = FakeConsumer(cluster)
        other.subscribe(["t"], on_assign=lambda *_: None, on_revoke=lambda *_: None)
        await until(lambda: (other.poll(), loop.assigned == {A})[1])
        assert loop.events == ["assigned", "revoked", "assigned"]
        loop.may_finish.set()


async def test_a_fatal_error_is_reported_to_the_loop_and_others_are_logged() -> None:
    cluster = filled(0)
    async with running(cluster) as (_thread, loop, _consumer):
        passing, fatal = KafkaError(KafkaError._TRANSPORT), KafkaError(KafkaError.FENCED_INSTANCE_ID, "fenced", True)
        cluster.incoming = [event(A, 0, error) for error in (passing, fatal)]
        await until(lambda: loop.events == ["assigned", "fatal"])


# ── flights: what is acknowledged when writes become durable in any order ────────────────────────────────────────────

REPORT = Message()


def launched(flights: Flights, ends: dict[TP, int], writes: int, size: int = 1) -> Flight:
    flight = Flight(ends, size)
    flight.writes = writes
    flights.launch(flight)
    return flight


@given(st.permutations([0, 0, 1, 1, 1, 3, 3]))  # the third has no results
def test_nothing_is_acknowledged_before_all_before_it_in_whatever_order_writes_become_durable(order: list[int]) -> None:
    flights = Flights(lambda error: None)
    flights.begin({A: 0})
    flying = [launched(flights, {A: 10 * (number + 1)}, order.count(number)) for number in range(4)]
    missing = [order.count(number) for number in range(4)]
    for number in order:
        flying[number].on_delivery(None, REPORT)
        missing[number] -= 1
        flights.advance()
        durable = next((place for place, left in enumerate(missing) if left), 4)
        assert flights.acknowledged == {A: 10 * durable}
        assert flights.size == 4 - durable
    assert flights.are_idle


def test_a_failed_write_fails_the_worker_and_nothing_behind_it_is_acknowledged() -> None:
    failures: list[KafkaError] = []
    flights = Flights(failures.append)
    flights.begin({A: 0})
    first, second = launched(flights, {A: 5}, 1), launched(flights, {A: 9}, 1)
    second.on_delivery(None, REPORT)
    first.on_delivery(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), REPORT)
    flights.advance()
    assert [error.code() for error in failures] == [KafkaError.MSG_SIZE_TOO_LARGE]
    assert flights.acknowledged == {A: 0}


def test_what_lands_after_a_new_start_moves_only_partitions_that_are_still_read_and_never_back() -> None:
    flights = Flights(lambda error: None)
    flights.begin({A: 0, B: 0})
    flight = launched(flights, {A: 5, B: 5}, 1)
    flights.begin({A: 7})
    flight.on_delivery(None, REPORT)
    flights.advance()
    assert flights.acknowledged == {A: 7}
    lost = launched(flights, {A: 9}, 1)
    flights.forget()
    lost.on_delivery(None, REPORT)
    flights.advance()
    assert (flights.acknowledged, flights.size, flights.are_idle) == ({}, 0, True), "nothing, after a loss"


def test_the_last_changelog_offset_of_each_served_partition_is_known() -> None:
    flights = Flights(lambda error: None)
    flights.changelog = {0: -1, 1: 4}
    flight = launched(flights, {}, 3)
    for partition, offset in ((0, 7), (1, 3), (2, 9)):
        flight.on_changelog_delivery(None, Message("changelog", partition, offset))
    flights.advance()
    assert flights.changelog == {0: 7, 1: 4}


async def test_who_waits_for_positions_is_woken_when_all_of_them_are_reached() -> None:
    flights = Flights(lambda error: None)
    flights.begin({A: 0, B: 0})
    reached = flights.reached({A: 5, B: 5})
    first, second = launched(flights, {A: 6}, 1), launched(flights, {B: 5}, 1)
    first.on_delivery(None, REPORT)
    flights.advance()
    assert not reached.done()
    second.on_delivery(None, REPORT)
    flights.advance()
    assert reached.done()
    assert flights.reached({A: 6}).done(), "reached already"
