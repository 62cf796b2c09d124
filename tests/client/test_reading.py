"""Decisions without a broker: positions, errors, and partitions that are new or move to another broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.structs import TopicPartition

from worker.client import reading
from worker.client.reading import DecisionReader
from worker.kafka.direct import PendingAnswer
from worker.stream.topology import Record

NOT_LEADER, OUT_OF_RANGE = 6, 1


class Brokers:
    """Takes fetches, and answers them when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, leaders: dict[int, int]) -> None:
        self.leaders, self.next_leaders = leaders, leaders
        self.fetches: list[tuple[int, dict[int, int], PendingAnswer]] = []
        self.records: list[Record] = []
        self.end = 5
        client: Any = SimpleNamespace(
            cluster=SimpleNamespace(leader_for_partition=lambda tp: self.leaders.get(tp.partition)),
            add_topic=lambda _: None,
            _wait_on_metadata=self._nothing,
            ready=self._ready,
            force_metadata_update=self._update,
        )
        consumer: Any = SimpleNamespace(_client=client, end_offsets=self._ends)
        monkeypatch.setattr(reading, "open_connection", lambda _, node: node)
        monkeypatch.setattr(reading, "send", self._take)
        monkeypatch.setattr(reading, "_PAUSE", 0.001)
        self.reader = DecisionReader(consumer, "d", self.records.extend)

    async def _nothing(self, _: Any) -> None:
        pass

    async def _ready(self, _: Any) -> bool:
        return True

    async def _update(self) -> None:
        self.leaders = self.next_leaders

    async def _ends(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, self.end)

    def _take(self, connection: Any, request: Any, answer: PendingAnswer) -> None:
        positions = {partition: offset for partition, offset, _ in request.topics[0][1]}
        self.fetches.append((connection, positions, answer))

    def answer(self, number: int, *, records: int = 0, errors: dict[int, int] | None = None) -> None:
        """Answer a fetch: so many records for each partition, or errors."""
        _, positions, answer = self.fetches[number]
        found = [
            (partition, (errors or {}).get(partition, 0), -1, -1, -1, None, -1, batch(offset, records))
            for partition, offset in positions.items()
        ]
        answer.set_result(SimpleNamespace(API_VERSION=11, error_code=0, topics=[("d", found)]))

    async def fetched(self, node: int, positions: dict[int, int]) -> None:
        """Wait until the last fetch of a broker is for these positions."""
        while [seen for at, seen, _ in self.fetches if at == node][-1:] != [positions]:  # noqa: ASYNC110 - a deadline
            await asyncio.sleep(0.001)


def batch(offset: int, records: int) -> bytes:
    if not records:
        return b""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 10_000)
    for number in range(records):
        builder.append(number, 1_000, b"key", b"%d" % (offset + number), [])
    data = bytearray(builder.build())
    data[:8] = offset.to_bytes(8, "big")  # the checksum does not cover it
    return bytes(data)


def play(monkeypatch: pytest.MonkeyPatch, leaders: dict[int, int], story: Callable[[Brokers], Awaitable[None]]) -> None:
    async def run() -> None:
        brokers = Brokers(monkeypatch, leaders)
        await brokers.reader.seek_to_end(len(leaders))
        running = asyncio.create_task(brokers.reader.run())
        async with asyncio.timeout(30):
            await story(brokers)
        running.cancel()

    asyncio.run(run())


def test_records_are_handed_over_and_the_next_fetch_begins_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(brokers: Brokers) -> None:
        await brokers.fetched(1, {0: 5, 1: 5})
        await brokers.fetched(2, {2: 5})
        brokers.answer([node for node, _, _ in brokers.fetches].index(1), records=2)
        assert [(record.partition, record.offset, record.value) for record in brokers.records] == [
            (0, 5, b"5"),
            (0, 6, b"6"),
            (1, 5, b"5"),
            (1, 6, b"6"),
        ]
        await brokers.fetched(1, {0: 7, 1: 7})

    play(monkeypatch, {0: 1, 1: 1, 2: 2}, story)


def test_new_partitions_are_read_from_their_beginning_as_soon_as_somebody_leads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(brokers: Brokers) -> None:
        await brokers.fetched(1, {0: 5})
        brokers.next_leaders = {0: 1, 1: 1}
        brokers.reader.extend(2)
        while len(brokers.leaders) < 2:  # noqa: ASYNC110 - the story has a deadline
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        brokers.answer(0)
        await brokers.fetched(1, {0: 5, 1: 0})

    play(monkeypatch, {0: 1}, story)


def test_a_partition_that_moves_is_read_from_its_new_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(brokers: Brokers) -> None:
        await brokers.fetched(1, {0: 5})
        await brokers.fetched(2, {1: 5})
        brokers.next_leaders = {0: 2, 1: 2}
        at = {node: number for number, (node, _, _) in enumerate(brokers.fetches)}
        brokers.answer(at[1], errors={0: NOT_LEADER})
        while brokers.leaders[0] != 2:  # noqa: ASYNC110 - the story has a deadline
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        brokers.answer(at[2], records=1)
        await brokers.fetched(2, {0: 5, 1: 6})

    play(monkeypatch, {0: 1, 1: 2}, story)


def test_a_position_that_is_gone_becomes_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(brokers: Brokers) -> None:
        await brokers.fetched(1, {0: 5, 1: 5})
        brokers.end = 90
        brokers.answer(0, errors={0: OUT_OF_RANGE})
        await brokers.fetched(1, {0: 90, 1: 5})

    play(monkeypatch, {0: 1, 1: 1}, story)


def test_a_lost_connection_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(brokers: Brokers) -> None:
        await brokers.fetched(1, {0: 5})
        brokers.fetches.pop()[2].set_exception(ConnectionError("lost"))
        await brokers.fetched(1, {0: 5})

    play(monkeypatch, {0: 1}, story)


def test_a_connection_that_closes_at_the_end_is_no_trouble(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        brokers = Brokers(monkeypatch, {0: 1})
        await brokers.reader.seek_to_end(1)
        running = asyncio.create_task(brokers.reader.run())
        async with asyncio.timeout(30):
            await brokers.fetched(1, {0: 5})
        running.cancel()
        await asyncio.wait([running])
        brokers.fetches[-1][2].set_exception(ConnectionError("closed"))

    asyncio.run(run())
    assert not caplog.text
