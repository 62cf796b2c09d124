"""Records to the brokers without a broker: what goes together, what waits, and what is left to the producer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from struct import pack
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError
from aiokafka.producer.message_accumulator import MessageAccumulator
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import TopicPartition

from worker.client import sending
from worker.client.sending import RecordSender
from worker.kafka import direct
from worker.kafka.direct import PendingAnswer

A0, A1, OTHER = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("a", 2)
C0 = TopicPartition("c", 0)
LEADERS = {A0: 1, A1: 1, OTHER: 2, C0: 1}


class Brokers:
    """Takes the requests of a sender, and answers them when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[int, dict[tuple[str, int], list[bytes]], PendingAnswer]] = []
        self.away: set[int] = set()
        cluster = SimpleNamespace(leader_for_partition=LEADERS.get)
        self.accumulator = MessageAccumulator(cluster, 10_000, 0, 30.0, loop=asyncio.get_running_loop())
        producer: Any = SimpleNamespace(
            client=SimpleNamespace(cluster=cluster),
            _message_accumulator=self.accumulator,
            _sender=SimpleNamespace(_muted_partitions=set()),
        )
        self.muted = producer._sender._muted_partitions
        monkeypatch.setattr(sending, "open_connection", lambda _, node: None if node in self.away else node)
        monkeypatch.setattr(sending, "send", self._take)
        self.sender = RecordSender(producer, timeout=5.0, patient=("c",))

    def _take(self, connection: Any, request: Any, answer: PendingAnswer) -> None:
        values = {(topic, partition): values_of(data) for topic, parts in request._topics for partition, data in parts}
        self.requests.append((connection, values, answer))

    def answer(self, number: int, errors: dict[tuple[str, int], int] | None = None) -> None:
        """Answer a request, with errors for some partitions."""
        _, values, answer = self.requests[number]
        found = [
            (topic, [(partition, (errors or {}).get((topic, partition), 0), 7, -1)]) for topic, partition in values
        ]
        answer.set_result(SimpleNamespace(topics=found))

    def left(self, tp: TopicPartition) -> list[bytes]:
        """Return what the producer has to send."""
        return [
            value for batch in self.accumulator._batches.get(tp, ()) for value in values_of(batch.get_data_buffer())
        ]

    def write(self, tp: TopicPartition, value: bytes) -> asyncio.Future[Any]:
        return self.sender.write(tp.topic, tp.partition, [(b"key", value)])[0]


def values_of(data: Any) -> list[bytes]:
    records, values = MemoryRecords(bytes(data)), []
    while records.has_next():
        values += [record.value for record in records.next_batch()]
    return values


def play(monkeypatch: pytest.MonkeyPatch, story: Callable[[Brokers], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            await story(Brokers(monkeypatch))

    asyncio.run(run())


def test_records_of_one_turn_go_together_to_each_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(brokers: Brokers) -> None:
        sent = [brokers.write(tp, value) for tp, value in ((A0, b"1"), (A1, b"2"), (A0, b"3"), (OTHER, b"4"))]
        await asyncio.sleep(0)
        assert {node: values for node, values, _ in brokers.requests} == {
            1: {A0: [b"1", b"3"], A1: [b"2"]},
            2: {OTHER: [b"4"]},
        }
        brokers.answer(0)
        brokers.answer(1)
        assert all(future.done() for future in sent)
        await brokers.sender.close()

    play(monkeypatch, story)


def test_what_comes_while_a_request_is_on_its_way_goes_together_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(brokers: Brokers) -> None:
        brokers.write(A0, b"1")
        await asyncio.sleep(0)
        later = [brokers.write(A0, b"2"), brokers.write(A0, b"3")]
        await asyncio.sleep(0)
        assert len(brokers.requests) == 1
        brokers.answer(0)
        await asyncio.sleep(0)
        assert [values for _, values, _ in brokers.requests] == [{A0: [b"1"]}, {A0: [b"2", b"3"]}]
        assert not any(future.done() for future in later)
        brokers.answer(1)
        assert all(future.done() for future in later)

    play(monkeypatch, story)


def test_a_patient_record_goes_with_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "PATIENCE", 60.0)

    async def story(brokers: Brokers) -> None:
        brokers.write(C0, b"1")  # there was no request before it
        await asyncio.sleep(0)
        brokers.answer(0)
        brokers.write(C0, b"2")
        await asyncio.sleep(0)
        assert len(brokers.requests) == 1
        brokers.write(A0, b"3")
        await asyncio.sleep(0)
        assert brokers.requests[1][1] == {C0: [b"2"], A0: [b"3"]}

    play(monkeypatch, story)


def test_a_patient_record_goes_by_itself_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(brokers: Brokers) -> None:
        brokers.write(A0, b"1")
        await asyncio.sleep(0)
        brokers.write(C0, b"2")
        while len(brokers.requests) < 2:  # noqa: ASYNC110 - the story has a deadline
            await asyncio.sleep(0.001)
        assert brokers.requests[1][1] == {C0: [b"2"]}

    play(monkeypatch, story)


def test_at_the_end_nothing_waits_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "PATIENCE", 60.0)

    async def story(brokers: Brokers) -> None:
        brokers.write(A0, b"1")
        await asyncio.sleep(0)
        brokers.answer(0)
        sent = brokers.write(C0, b"2")
        closing = asyncio.create_task(brokers.sender.close())
        await asyncio.sleep(0)
        brokers.answer(1)
        await closing
        assert sent.done()

    play(monkeypatch, story)


def test_what_a_broker_refuses_goes_to_the_producer_and_what_follows_stays_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(brokers: Brokers) -> None:
        first, other = brokers.write(A0, b"1"), brokers.write(A1, b"2")
        await asyncio.sleep(0)
        brokers.write(A0, b"3")
        brokers.answer(0, {A0: 6})  # not the leader
        assert (first.done(), other.done()) == (False, True)
        brokers.write(A0, b"4")
        brokers.write(A1, b"5")
        await asyncio.sleep(0)
        assert brokers.left(A0) == [b"1", b"3", b"4"]
        assert brokers.requests[-1][1] == {A1: [b"5"]}
        # Until the producer has delivered them; a request of its own counts, too.
        del brokers.accumulator._batches[A0]
        brokers.muted.add(A0)
        brokers.write(A0, b"6")
        assert brokers.left(A0) == [b"6"]
        del brokers.accumulator._batches[A0]
        brokers.muted.clear()
        brokers.answer(1)
        brokers.write(A0, b"7")
        await asyncio.sleep(0)
        assert brokers.requests[-1][1] == {A0: [b"7"]}

    play(monkeypatch, story)


def test_without_a_connection_or_with_a_lost_one_the_producer_has_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(brokers: Brokers) -> None:
        brokers.away.add(2)
        brokers.write(OTHER, b"1")
        brokers.write(A0, b"2")
        await asyncio.sleep(0)
        assert brokers.left(OTHER) == [b"1"]
        brokers.requests[0][2].set_exception(KafkaConnectionError("lost"))
        assert brokers.left(A0) == [b"2"]
        await brokers.sender.close()

    play(monkeypatch, story)


@pytest.mark.parametrize("size", [1, 5, 7, 1000])
def test_answers_are_handed_over_whole_however_their_bytes_come(size: int) -> None:
    seen: list[bytes] = []
    connection: Any = SimpleNamespace(_requests=[(None, None, None)], _handle_frame=seen.append)
    frames = direct._Frames(connection, None)
    wanted = [b"first", b"", b"a longer one"]
    data = b"".join(pack(">i", len(frame)) + frame for frame in wanted)
    for at in range(0, len(data), size):
        frames.data_received(data[at : at + size])
    assert seen == wanted
