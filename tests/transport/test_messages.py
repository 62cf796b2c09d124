"""The messages of every poll, made by hand, against aiokafka's own."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import pytest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from worker.kafka.messages import (
    ANSWERS,
    FETCH_VERSIONS,
    PRODUCE_VERSIONS,
    encode_fetch,
    encode_produce,
    version,
)

INT16, INT32, INT64 = (st.integers(-(1 << bits), (1 << bits) - 1) for bits in (15, 31, 63))
NUMBERS = st.integers(0, (1 << 31) - 1)
TOPICS = st.sampled_from(["ads.arrivals", "ads.clicks", "ünïcode"])
PARTITIONS = st.builds(TopicPartition, TOPICS, NUMBERS)


def by_aiokafka(message: Any) -> bytes:
    encoded: bytes = message.SCHEMA.encode([message.__dict__[name] for name in message.SCHEMA.names])
    return encoded


@given(
    api_version=st.sampled_from(FETCH_VERSIONS),
    limits=st.tuples(NUMBERS, NUMBERS, NUMBERS, st.sampled_from([0, 1])),
    session=st.tuples(NUMBERS, NUMBERS),
    changed=st.dictionaries(PARTITIONS, INT64, max_size=6),
    forgotten=st.lists(PARTITIONS, unique=True, max_size=4),
    most=NUMBERS,
)
def test_a_fetch_has_the_bytes_of_aiokafka(
    api_version: int,
    limits: tuple[int, int, int, int],
    session: tuple[int, int],
    changed: dict[TopicPartition, int],
    forgotten: list[TopicPartition],
    most: int,
) -> None:
    topics: dict[str, list[tuple[int, int, int]]] = {}
    for tp, position in changed.items():
        topics.setdefault(tp.topic, []).append((tp.partition, position, most))
    left: dict[str, list[int]] = {}
    for tp in forgotten:
        left.setdefault(tp.topic, []).append(tp.partition)
    message = FetchRequest(*limits, list(topics.items())).prepare({1: (api_version, api_version)})
    message.session_id, message.session_epoch = session
    message.forgotten_topics_data = list(left.items())
    assert encode_fetch(api_version, limits, session, changed, forgotten, most) == by_aiokafka(message)


@given(
    api_version=st.sampled_from(PRODUCE_VERSIONS),
    acks=st.sampled_from([-1, 1]),
    timeout=NUMBERS,
    batches=st.dictionaries(PARTITIONS, st.binary(max_size=20) | st.binary(max_size=20).map(bytearray), max_size=8),
)
def test_a_produce_request_has_the_bytes_of_aiokafka(
    api_version: int, acks: int, timeout: int, batches: dict[TopicPartition, bytes]
) -> None:
    topics: dict[str, list[tuple[int, bytes]]] = {}
    for tp, data in batches.items():
        topics.setdefault(tp.topic, []).append((tp.partition, bytes(data)))
    message = ProduceRequest(None, acks, timeout, list(topics.items())).prepare({0: (api_version, api_version)})
    assert encode_produce(acks, timeout, batches) == by_aiokafka(message)


@pytest.mark.parametrize("request_kind", [FetchRequest, ProduceRequest])
@given(span=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_a_message_has_the_version_that_aiokafka_would_choose(request_kind: Any, span: tuple[int, int]) -> None:
    versions = {request_kind.API_KEY: span}
    empty: Any = FetchRequest(0, 0, 0, 0, []) if request_kind is FetchRequest else ProduceRequest(None, 1, 1, [])
    try:
        expected = type(empty.prepare(versions))
    except NotImplementedError:
        expected = type(None)
    assert type(version(request_kind, versions)) is expected
    assert version(request_kind, {}) is None


def a_fetch_answer(api_version: int) -> st.SearchStrategy[tuple[Any, ...]]:
    replica = (INT32,) if api_version >= 11 else ()
    aborted = st.sampled_from([None, []])
    found = st.tuples(INT32, INT16, INT64, INT64, INT64, aborted, *replica, st.binary(max_size=9))
    topics = st.lists(st.tuples(TOPICS, st.lists(found, max_size=4)), max_size=3)
    return st.tuples(INT32, INT16, INT32, topics)


def a_produce_answer(api_version: int) -> st.SearchStrategy[tuple[Any, ...]]:
    start = (INT64,) if api_version >= 5 else ()
    found = st.tuples(INT32, INT16, INT64, INT64, *start)
    return st.tuples(st.lists(st.tuples(TOPICS, st.lists(found, max_size=4)), max_size=3), INT32)


@pytest.mark.parametrize("kind", ANSWERS, ids=lambda kind: kind.__name__)
@given(data=st.data(), cut=st.integers(1, 30))
def test_a_usual_answer_is_decoded_by_hand_and_a_cut_one_never_as_something_else(
    kind: Any, data: Any, cut: int
) -> None:
    fields = data.draw((a_fetch_answer if kind.API_KEY == 1 else a_produce_answer)(kind.API_VERSION))
    encoded = kind.SCHEMA.encode(fields)
    decode, part = ANSWERS[kind]
    assert decode(encoded, part) == dict(zip(kind.SCHEMA.names, fields, strict=True))
    assert decode(encoded + b"more", part) == decode(encoded, part), "as aiokafka, which reads no further"
    with suppress(struct.error):
        assert decode(encoded[:-cut], part) is None
