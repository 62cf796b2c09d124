"""Compressed batches: the broker refuses those that unpack to too much, and takes ordinary ones."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from confluent_kafka import KafkaError, Producer

from tests.kafka.fleet import Fleet
from tests.kafka.world import eventually
from worker.kafka.topics import DEFAULT_BYTES

#: Bytes of zeros that each codec packs into a batch below `max.message.bytes`. Snappy packs 21 to 1.
BOMBS = {"gzip": 70_000_000, "zstd": 70_000_000, "lz4": 70_000_000, "snappy": 20_000_000}


def send(fleet: Fleet, topic: str, codec: str, *values: bytes) -> tuple[set[int], int]:
    """Produce values to a partition in one batch; return the codes of errors and the bytes of a request."""
    codes: set[int] = set()
    statistics: list[str] = []
    settings = {
        "bootstrap.servers": fleet.address,
        "compression.type": codec,
        "message.max.bytes": 1_000_000_000,
        "queue.buffering.max.kbytes": 2_000_000,
        "linger.ms": 50,
        "statistics.interval.ms": 20,
        "stats_cb": statistics.append,
    }
    with closing(Producer(settings)) as producer:

        def delivered(error: KafkaError | None, _: object) -> None:
            codes.add(KafkaError.NO_ERROR if error is None else error.code())

        for value in values:
            producer.produce(topic, value, b"key", 0, on_delivery=delivered)
        producer.flush()
        statistics.clear()
        eventually(lambda: producer.poll(0.1) is not None and statistics, what="statistics")
    found = json.loads(statistics[0])
    requests = sum(broker["req"].get("Produce", 0) for broker in found["brokers"].values())
    return codes, found["tx_bytes"] // requests  # a new topic may be asked twice


@pytest.mark.parametrize("codec", BOMBS)
def test_a_small_batch_that_unpacks_to_too_much_is_refused_by_the_broker_and_ordinary_ones_arrive(
    fleet: Fleet, codec: str
) -> None:
    bomb = bytes(BOMBS[codec])
    for topic in (fleet.names.arrivals, fleet.names.clicks):
        codes, sent = send(fleet, topic, codec, bomb)
        assert codes == {KafkaError.MSG_SIZE_TOO_LARGE}
        assert sent < DEFAULT_BYTES, "it is small on its way"
    codes, _ = send(fleet, fleet.names.decisions, codec, bomb)
    assert codes == {KafkaError.NO_ERROR}, "a topic that stays compressed takes it"
    values = [b'{"session_id":"s-%d"}' % n for n in range(2_000)]
    codes, sent = send(fleet, fleet.names.arrivals, codec, *values)
    assert codes == {KafkaError.NO_ERROR}
    assert sent < sum(map(len, values)), "they went compressed"
    assert [record.value for record in fleet.read(fleet.names.arrivals)] == values
