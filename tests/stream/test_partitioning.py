"""Keys and partitions: sessions that are split between partitions are found, and only those."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from zlib import crc32

import pytest
from confluent_kafka import Producer

from tests.stream.scenes import TOPICS, arrival, click, parameters
from worker.stream.partitioning import (
    LEAST_SAMPLES,
    PartitionSurvey,
    crc32_partition,
    fnv1a_partition,
    murmur2_partition,
)
from worker.stream.serving import Serving, handle_together
from worker.stream.topology import Record, Tally
from worker.stream.versions import Versions

Place = Callable[[bytes, int], int]
PARTITIONS = 4


def random_partition(key: bytes, partitions: int) -> int:
    return random.Random(key + b"*").randrange(partitions)


def doubled(key: bytes, partitions: int) -> int:
    return crc32(key + key) % partitions


class Worker:
    """A worker with all partitions."""

    def __init__(self, partitions: int = PARTITIONS) -> None:
        survey = PartitionSurvey(TOPICS, partitions)
        self.tasks = [
            Serving(Versions(parameters()), partition=partition, topics=TOPICS, survey=survey)
            for partition in range(partitions)
        ]
        self.tally = Tally()

    def handle(self, *records: Record) -> None:
        batches: list[list[Record]] = [[] for _ in self.tasks]
        for record in records:
            batches[record.partition].append(record)
        for emits in handle_together(zip(self.tasks, batches, strict=True)):
            self.tally.add(emits.tally)

    def expire(self) -> None:
        for task in self.tasks:
            task.acknowledged(10_000_000)
            self.tally.add(task.handle([]).tally)

    @property
    def troubles(self) -> dict[str, str]:
        found = {kind: example for kind, _, example in self.tally.troubles}
        return {kind: found[kind] for kind in ("split-sessions", "wrong-key") if kind in found}


def placed(record: Record, place: Place, partitions: int = PARTITIONS) -> Record:
    return record._replace(partition=place(record.key or b"", partitions))


def traffic(worker: Worker, arrivals: Place, clicks: Place, sessions: int = 60) -> None:
    """Sessions one after the other: the arrival, then a click, in batches of their own."""
    partitions = len(worker.tasks)
    for number in range(sessions):
        worker.handle(placed(arrival(f"session-{number}"), arrivals, partitions))
        worker.handle(placed(click(f"session-{number}"), clicks, partitions))


@pytest.mark.parametrize(
    ("partitioner", "place"),
    [("murmur2_random", murmur2_partition), ("consistent_random", crc32_partition), ("fnv1a_random", fnv1a_partition)],
)
def test_the_partitioners_are_those_of_librdkafka(partitioner: str, place: Place) -> None:
    chance, found = random.Random(partitioner), dict[bytes, int]()
    keys = {chance.randbytes(length) for length in range(1, 71) for _ in range(5)}
    # A cluster within librdkafka; its topics have four partitions.
    with closing(Producer({"test.mock.num.brokers": 1, "partitioner": partitioner, "log_level": 0})) as producer:
        for key in keys:
            producer.produce("t", b"", key, on_delivery=lambda _, one: found.update({one.key(): one.partition()}))
        producer.flush()
    assert found == {key: place(key, 4) for key in keys}


@pytest.mark.parametrize("partitions", [1, 2, 4, 12])
@pytest.mark.parametrize("place", [murmur2_partition, crc32_partition, fnv1a_partition, doubled])
def test_any_partitioner_will_do_if_both_topics_have_it(place: Place, partitions: int) -> None:
    worker = Worker(partitions)
    traffic(worker, place, place)
    for number in range(40):  # feedback before its arrival, feedback without one
        worker.handle(placed(click(f"early-{number}"), place, partitions))
        worker.handle(placed(arrival(f"early-{number}"), place, partitions))
        worker.handle(placed(click(f"lonely-{number}"), place, partitions))
    worker.expire()
    assert worker.tally.late == 40
    assert worker.troubles == {}


@pytest.mark.parametrize(
    ("arrivals", "clicks", "expected"),
    [
        (
            murmur2_partition,
            crc32_partition,
            "ads.arrivals is partitioned by murmur2 (the default of the Java client), ads.clicks by crc32 (the default "
            "of librdkafka). Set partitioner=murmur2_random (murmur2) in the producer of ads.clicks",
        ),
        (crc32_partition, murmur2_partition, "partitioner=murmur2_random (murmur2) in the producer of ads.arrivals"),
        (crc32_partition, fnv1a_partition, "partitioner=consistent_random (crc32) in the producer of ads.clicks"),
        (murmur2_partition, doubled, "ads.clicks by none of murmur2, crc32, fnv1a. Set partitioner=murmur2_random"),
    ],
)
def test_topics_with_different_partitioners_split_sessions(arrivals: Place, clicks: Place, expected: str) -> None:
    worker = Worker()
    traffic(worker, arrivals, clicks)
    assert list(worker.troubles) == ["split-sessions"], "while the feedback waits, not when it has waited in vain"
    assert expected in worker.troubles["split-sessions"]


def test_an_unlisted_partitioner_of_arrivals_is_found_when_feedback_has_waited_in_vain() -> None:
    worker = Worker()
    traffic(worker, doubled, murmur2_partition)
    assert worker.troubles == {}
    worker.expire()
    assert "in the producer of ads.arrivals" in worker.troubles["split-sessions"]


def test_few_samples_are_no_evidence() -> None:
    worker = Worker()
    traffic(worker, murmur2_partition, crc32_partition, LEAST_SAMPLES - 1)
    assert worker.troubles == {}


def test_one_record_in_a_wrong_partition_is_found() -> None:
    worker = Worker()
    traffic(worker, murmur2_partition, murmur2_partition)
    record = click("lost")
    worker.handle(record._replace(partition=(murmur2_partition(b"lost", PARTITIONS) + 1) % PARTITIONS))
    assert list(worker.troubles) == ["split-sessions"]


def test_a_partitioner_that_changes_is_found() -> None:
    worker = Worker()
    traffic(worker, murmur2_partition, murmur2_partition, 200)
    traffic_of_changed = [placed(click(f"new-{number}"), crc32_partition) for number in range(50)]
    worker.handle(*traffic_of_changed)
    assert list(worker.troubles) == ["split-sessions"]


@pytest.mark.parametrize("make", [arrival, click])
@pytest.mark.parametrize(("key", "expected"), [(None, "no key"), (b"", "no key"), (b"user-1", "not the session_id")])
def test_keys_that_are_not_the_session_are_reported(
    make: Callable[[str], Record], key: bytes | None, expected: str
) -> None:
    worker = Worker()
    for number in range(30):
        worker.handle(make(f"session-{number}")._replace(key=key, partition=number % PARTITIONS, offset=number))
    ((kind, times, example),) = worker.tally.troubles
    assert (kind, times >= 20) == ("wrong-key", True)
    assert example.startswith(f"{make('s').topic}, partition 1, offset 29: ")
    assert expected in example


def test_random_partitions_of_keyed_arrivals_are_found() -> None:
    worker = Worker()
    traffic(worker, random_partition, murmur2_partition)
    worker.expire()
    assert list(worker.troubles) == ["split-sessions"]
