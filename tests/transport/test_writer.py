"""Batches against aiokafka's own accumulator: what is appended when, and in which order it would be sent."""

from __future__ import annotations

from typing import Any

from aiokafka.producer.message_accumulator import MessageAccumulator
from aiokafka.structs import TopicPartition

from tests.transport.fake import in_loop
from worker.kafka.writer import TopicWriter


class Cluster:
    def leader_for_partition(self, tp: Any) -> int:
        return 1


class Producer:
    def __init__(self, batch_bytes: int = 1000) -> None:
        self._message_accumulator = MessageAccumulator(Cluster(), batch_bytes, 0, 30)

    def take(self) -> list[Any]:
        """Take what the sender would take for one request."""
        nodes, _ = self._message_accumulator.drain_by_nodes(ignore_nodes=[])
        return [batch for batches in nodes.values() for batch in batches.values()]


@in_loop
async def test_records_collect_in_one_batch_until_it_is_taken() -> None:
    producer = Producer()
    writer = TopicWriter(producer, TopicPartition("t", 0))
    first = writer.write([(b"a", b"1"), (b"b", b"2")])
    assert writer.write([(b"c", b"3")]) == first
    assert [batch.record_count for batch in producer.take()] == [3]
    # Taken, but not built yet: its sequence numbers are given out, so nothing may be added any more.
    (second,) = writer.write([(b"d", b"4")])
    assert second is not first[0]
    assert first[0].record_count == 3


@in_loop
async def test_more_than_a_batch_holds_goes_into_several_that_are_sent_in_order() -> None:
    producer = Producer(batch_bytes=200)
    writer = TopicWriter(producer, TopicPartition("t", 0))
    batches = writer.write((b"key-%d" % n, b"x" * 50) for n in range(10))
    assert len(batches) > 2
    assert sum(batch.record_count for batch in batches) == 10
    taken = []
    while some := producer.take():
        taken += some
    assert taken == batches


@in_loop
async def test_a_record_larger_than_a_batch_goes_alone() -> None:
    writer = TopicWriter(Producer(batch_bytes=200), TopicPartition("t", 0))
    batches = writer.write([(b"a", b"1"), (b"b", b"x" * 5000), (b"c", b"3")])
    assert [batch.record_count for batch in batches] == [1, 1, 1]


@in_loop
async def test_a_batch_that_was_full_already_is_not_among_those_of_the_next_call() -> None:
    writer = TopicWriter(Producer(batch_bytes=200), TopicPartition("t", 0))
    (full,) = writer.write([(b"a", b"x" * 120)])
    (other,) = writer.write([(b"b", b"x" * 120)])  # its future must not wait for the one before
    assert other is not full
    assert (full.record_count, other.record_count) == (1, 1)
