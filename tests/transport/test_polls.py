"""Flights: what is acknowledged, in whatever order writes become durable."""

from __future__ import annotations

from confluent_kafka import KafkaError, Message
from faust.types import TP
from hypothesis import given
from hypothesis import strategies as st

from worker.kafka.polls import Flight, Flights

A, B = TP("t", 0), TP("t", 1)


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
