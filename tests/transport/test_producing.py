"""Requests of an idempotent producer without a broker: order, sequence numbers, and what happens to failures."""

from __future__ import annotations

import asyncio
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError
from aiokafka.producer.message_accumulator import MessageAccumulator
from aiokafka.producer.sender import Sender
from aiokafka.producer.transaction_manager import TransactionManager
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.fake import in_loop, settle
from worker.kafka import producing, writer
from worker.kafka.direct import PendingAnswer
from worker.kafka.producing import ProduceRequests
from worker.kafka.writer import TopicWriters

A, B, OTHER = TopicPartition("a", 0), TopicPartition("b", 0), TopicPartition("a", 1)
LEADERS: dict[TopicPartition, int | None] = {A: 1, B: 1, OTHER: 2}
NOT_LEADER, TOO_LARGE = 6, 10
#: A request: the broker, and for each partition its first sequence number and its values.
Sent = tuple[int, dict[tuple[str, int], tuple[int, list[bytes]]]]


class Brokers:
    """Takes requests of the newest version that they know, and answers them when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, newest: int = 7) -> None:
        self.newest = newest
        self.sent: list[Sent] = []
        self.data: list[dict[TopicPartition, bytes]] = []
        self.away: set[int] = set()
        self.leaders = dict(LEADERS)
        self._answers: list[PendingAnswer] = []
        cluster = SimpleNamespace(leader_for_partition=self.leaders.get)
        numbers = TransactionManager(None, 0)
        numbers.set_pid_and_epoch(5, 0)
        self.accumulator = MessageAccumulator(cluster, 10_000, 0, 30.0, txn_manager=numbers)
        client: Any = SimpleNamespace(
            cluster=cluster, _conns={}, force_metadata_update=lambda: None, _maybe_wait_metadata=settle
        )
        sender = Sender(
            client,
            acks=-1,
            txn_manager=numbers,
            message_accumulator=self.accumulator,
            retry_backoff_ms=1,
            request_timeout_ms=40_000,
        )
        producer: Any = SimpleNamespace(client=client, _sender=sender, _message_accumulator=self.accumulator)
        monkeypatch.setattr(producing, "open_connection", self._connection)
        monkeypatch.setattr(producing, "send", self._take)
        monkeypatch.setattr(producing, "send_encoded", self._take_encoded)
        monkeypatch.setattr(producing.SendProduceReqHandler, "_default_backoff", 0.001, raising=False)
        self._writers = TopicWriters(producer, ProduceRequests(producer))

    def _connection(self, client: Any, node: int) -> Any:
        return None if node in self.away else SimpleNamespace(node=node, _versions={0: (0, self.newest)})

    def _take(self, connection: Any, request: Any, answer: PendingAnswer) -> None:
        self._take_message(connection, request.prepare(connection._versions), answer)

    def _take_encoded(self, connection: Any, message: Any, body: bytes, answer: PendingAnswer) -> None:
        self._take_message(connection, type(message)(*message.SCHEMA.decode(BytesIO(body))), answer)

    def _take_message(self, connection: Any, message: Any, answer: PendingAnswer) -> None:
        assert (message.required_acks, message.timeout) == (-1, 40_000)
        parts = {(topic, partition): _content(data) for topic, some in message.topics for partition, data in some}
        self.sent.append((connection.node, parts))
        self.data.append(
            {TopicPartition(topic, one): bytes(data) for topic, some in message.topics for one, data in some}
        )
        self._answers.append(answer)

    def write(self, tp: TopicPartition, *values: bytes) -> asyncio.Future[Any]:
        (batch,) = self._writers.writer(*tp).write([(b"key", value) for value in values])
        return batch.future

    def flush(self) -> None:
        self._writers.flush()

    def answer(self, number: int, *, offset: int = 7, error: int = 0) -> None:
        rest = (-1, 0) if self.newest >= 5 else (-1,)
        found = [(topic, [(partition, error, offset, *rest)]) for topic, partition in self.sent[number][1]]
        self._answers[number].set_result(SimpleNamespace(API_VERSION=self.newest, topics=found))

    def lose(self, number: int) -> None:
        self._answers[number].set_exception(KafkaConnectionError("lost"))

    async def repeated(self, number: int) -> Sent:
        """Wait for a request."""
        async with asyncio.timeout(10):
            while len(self.sent) <= number:  # noqa: ASYNC110 (what sends has a pause of its own)
                await asyncio.sleep(0.001)
        return self.sent[number]


def _content(data: Any) -> tuple[int, list[bytes]]:
    batch = MemoryRecords(bytes(data)).next_batch()
    return batch.base_sequence, [record.value for record in batch]


@in_loop
@pytest.mark.parametrize("newest", [2, 4, 7])
async def test_what_is_written_in_one_turn_goes_together_to_each_broker(
    monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    brokers = Brokers(monkeypatch, newest)
    written = [brokers.write(A, b"1"), brokers.write(B, b"2"), brokers.write(A, b"3"), brokers.write(OTHER, b"4")]
    assert brokers.sent == []
    await settle()
    assert brokers.sent == [(1, {A: (0, [b"1", b"3"]), B: (0, [b"2"])}), (2, {OTHER: (0, [b"4"])})]
    brokers.answer(0, offset=40)
    brokers.answer(1)
    assert written[0].result().offset == 40
    assert all(future.done() for future in written)


@in_loop
async def test_a_broker_has_one_request_at_a_time_and_the_numbers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch)
    brokers.write(A, b"1", b"2")
    await settle()
    later = [brokers.write(A, b"3"), brokers.write(A, b"4"), brokers.write(B, b"5")]
    await settle()
    assert len(brokers.sent) == 1
    brokers.answer(0)
    assert brokers.sent[1:] == [(1, {A: (2, [b"3", b"4"]), B: (0, [b"5"])})]
    assert not any(future.done() for future in later)
    brokers.answer(1)
    assert all(future.done() for future in later)


@in_loop
@pytest.mark.parametrize("how", ["refused", "lost"])
async def test_what_failed_is_repeated_with_its_number_before_what_comes_later(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    brokers = Brokers(monkeypatch)
    first = brokers.write(A, b"1", b"2")
    await settle()
    later = brokers.write(A, b"3")
    if how == "refused":
        brokers.answer(0, error=NOT_LEADER)
    else:
        brokers.lose(0)
    assert not first.done()
    assert await brokers.repeated(1) == (1, {A: (0, [b"1", b"2"])})
    brokers.answer(1)
    assert first.done() and not later.done()
    assert await brokers.repeated(2) == (1, {A: (2, [b"3"])})


@in_loop
async def test_an_error_that_no_repetition_mends_fails_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch)
    failed, other = brokers.write(A, b"1"), brokers.write(OTHER, b"2")
    await settle()
    brokers.answer(0, error=TOO_LARGE)
    await settle()
    assert failed.exception() is not None
    brokers.answer(1)
    assert other.exception() is None


@in_loop
@pytest.mark.parametrize("missing", ["connection", "leader"])
async def test_without_a_connection_or_a_leader_the_producer_itself_sends(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    brokers = Brokers(monkeypatch)
    if missing == "connection":
        brokers.away.add(2)
    else:
        brokers.leaders[OTHER] = None
    wakes = brokers.accumulator.waiter()
    brokers.write(A, b"1")
    await settle()
    assert not wakes.done(), "the producer's own task sleeps while all goes well"
    brokers.write(OTHER, b"2")
    await settle()
    assert wakes.done()
    assert list(brokers.accumulator._batches) == [OTHER]
    assert [sent[0] for sent in brokers.sent] == [1]


@in_loop
async def test_a_flush_sends_at_once_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch)
    brokers.flush()
    assert brokers.sent == []
    brokers.write(A, b"1")
    brokers.flush()
    assert brokers.sent == [(1, {A: (0, [b"1"])})]
    brokers.write(OTHER, b"2")
    await settle()
    assert brokers.sent[1:] == [(2, {OTHER: (0, [b"2"])})], "without a flush at the end of the turn"


@in_loop
async def test_a_failure_of_the_producer_fails_every_batch_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch)
    written = [brokers.write(A, b"1"), brokers.write(B, b"2"), brokers.write(OTHER, b"3")]
    await settle()
    waiting = brokers.write(A, b"4")
    brokers.accumulator.fail_all(KafkaConnectionError("lost"))
    assert all(future.exception() is not None for future in (*written, waiting))
    with pytest.raises(KafkaConnectionError):
        brokers.write(A, b"5")
    await settle()
    assert not brokers.accumulator._pending_batches


@in_loop
async def test_a_flush_of_the_producer_waits_for_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch)
    brokers.write(A, b"1")
    await settle()
    flushing = asyncio.ensure_future(brokers.accumulator.flush())
    await settle()
    assert not flushing.done()
    brokers.answer(0)
    async with asyncio.timeout(10):
        await flushing
    assert not brokers.accumulator._pending_batches


@in_loop
async def test_a_batch_that_the_producer_itself_takes_has_its_numbers_and_ends_with_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = Brokers(monkeypatch)
    brokers.away.add(1)
    future = brokers.write(A, b"1", b"2")
    message = asyncio.ensure_future(brokers.accumulator.add_message(A, b"key", b"3", 1.0))
    await settle()
    nodes, _ = brokers.accumulator.drain_by_nodes(ignore_nodes=[])
    (batch,) = nodes[1].values()
    assert _content(batch.get_data_buffer()) == (0, [b"1", b"2", b"3"])
    batch.done(7, -1, 0)
    assert future.result().offset == 7
    assert (await message.result()).offset == 9, "of one who has sent a record through the producer"
    brokers.away.clear()
    brokers.write(A, b"4")
    await settle()
    assert brokers.sent == [(1, {A: (3, [b"4"])})]
    assert brokers.accumulator._pending_batches.isdisjoint({batch})


@given(
    first=st.sampled_from([0, 5, 2**31 - 3, 2**31 - 1]),
    turns=st.lists(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 3)), min_size=1, max_size=4), max_size=5),
)
def test_requests_have_the_numbers_and_the_bytes_that_aiokafka_gives_them(first: int, turns: Any) -> None:
    @in_loop
    async def story() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(writer.time, "time", lambda: 1_700_000_000.0)
            brokers = Brokers(monkeypatch)
            numbers = TransactionManager(None, 0)
            numbers.set_pid_and_epoch(5, 0)
            cluster = SimpleNamespace(leader_for_partition=LEADERS.get)
            accumulator = MessageAccumulator(cluster, 10_000, 0, 30.0, txn_manager=numbers)
            writers = TopicWriters(SimpleNamespace(_message_accumulator=accumulator))
            for one in (numbers, brokers.accumulator._txn_manager):
                one._sequence_numbers.update({A: first, B: first})
            for number, turn in enumerate(turns):
                for tp, size in turn:
                    brokers.write(tp, *[b"value"] * size)
                    writers.writer(*tp).write([(b"key", b"value")] * size)
                await settle()
                nodes, _ = accumulator.drain_by_nodes(ignore_nodes=[])
                assert brokers.data[number] == {tp: bytes(one.get_data_buffer()) for tp, one in nodes[1].items()}
                brokers.answer(number)
            assert brokers.accumulator._txn_manager._sequence_numbers == numbers._sequence_numbers

    story()
