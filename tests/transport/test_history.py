"""The history topic: two reads find a version; crashes, other learners, failures and garbage lose none."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import orjson
import pytest
from aiokafka.errors import KafkaError

from tests.embedded.traffic import ARMS, settings
from tests.transport.fake import in_loop
from tests.transport.test_learner import TOPICS, Log, publisher
from worker.kafka.history import HistoryReader, HistoryWriter
from worker.stream.encoding import encode_journal
from worker.stream.events import ArmChange, Tag
from worker.stream.history import HOUR, INDEX_KEY, KeptVersion, recent_slot, tag_slot, tags
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.troubles import Troubles
from worker.stream.version_decoding import decode_parameters
from worker.stream.versions import KEPT

TOPIC = TOPICS.parameters_history
START = 1_700_000_000_000
FIRST = Parameters.first(settings(), ARMS)


def versions(count: int, every: int = 600_000) -> list[Parameters]:
    return [replace(FIRST, version=number, made_at=START + number * every) for number in range(count)]


class Topic(Log):
    """The history topic; compaction keeps offsets. It counts the records that were fetched."""

    fetched = 0

    def compact(self) -> None:
        newest = {record.key: record.offset for record in self.records}
        for record in self.records:
            record.gone = newest[record.key] != record.offset

    async def getmany(self, tp: Any, timeout_ms: int) -> dict[Any, list[Any]]:
        found = (await super().getmany(tp, timeout_ms))[tp]
        there = [record for record in found if not getattr(record, "gone", False)]
        self.fetched += len(there)
        return {tp: there}

    def writer(self) -> HistoryWriter:
        return HistoryWriter(TOPIC, consumer=self, producer=self)  # type: ignore[arg-type]

    async def reader(self) -> HistoryReader:
        reader = HistoryReader(self, TOPIC)  # type: ignore[arg-type]
        await reader.refresh()
        return reader


def last(made: list[Parameters], number: int) -> list[Parameters]:
    return made[max(0, number - KEPT) : number]


@in_loop
async def test_the_index_is_read_and_then_one_version_however_long_the_topic_is() -> None:
    topic, made = Topic(), versions(60)
    writer = topic.writer()
    for number in range(1, 61):
        await writer.keep(last(made, number))
    await writer.tag(Tag(name="good", version=57), [])
    topic.compact()
    topic.fetched = 0
    reader = await topic.reader()
    assert topic.fetched == 1, "the index only"
    assert tags(reader.held) == {"good": 57}
    assert [kept.version for kept in reader.held.values()].count(57) == 2
    assert {kept.version for slot, kept in reader.held.items() if slot.startswith("recent/")} == set(range(54, 60))
    assert {kept.version for slot, kept in reader.held.items() if slot.startswith("hour/")} >= {0, 5, 11, 17, 53, 59}
    assert await reader.find("tag/good") == made[57]
    assert await reader.find("tag/none") is None


@pytest.mark.parametrize("seed", range(40))
@in_loop
async def test_learners_that_die_anywhere_or_write_at_the_same_time_lose_nothing(seed: int) -> None:
    """A learner dies after any write; a second one that was paused writes what it knows."""
    random, topic, made = Random(seed), Topic(), versions(40, every=200_000)
    tagged: dict[str, set[int]] = {}  # a write that failed may have come through
    writers = [topic.writer(), topic.writer()]
    for number in range(1, len(made) + 1):
        writer = random.choice(writers)
        fails_after = random.choice((1, 2, 3, 99))

        async def send(topic_name: str, value: bytes | None, key: bytes) -> Any:
            nonlocal fails_after
            fails_after -= 1
            if fails_after < 0:
                raise KafkaError("the broker is gone")
            return await Log.send_and_wait(topic, topic_name, value, key)

        topic.send_and_wait = send  # type: ignore[method-assign]
        try:
            await writer.keep(last(made, number))
            if random.random() < 0.2:
                name = random.choice("ab")
                tagged.setdefault(name, {-1}).add(number - 1)
                await writer.tag(Tag(name=name, version=number - 1), last(made, number))
                tagged[name] = {number - 1}
        except KafkaError:
            if random.random() < 0.5:
                writers[writers.index(writer)] = topic.writer()
        if random.random() < 0.1:
            topic.compact()
    del topic.send_and_wait  # type: ignore[method-assign]
    await topic.writer().keep(last(made, len(made)))
    reader = await topic.reader()
    kept = {kept.version for kept in reader.held.values()}
    assert {one.version for one in made if one.made_at > made[-1].made_at - HOUR} <= kept
    assert all(tags(reader.held).get(name, -1) in possible for name, possible in tagged.items())
    for slot in reader.held:
        found = await reader.find(slot)
        assert found is not None
        assert found == made[found.version]
    # What the index says is what the log says.
    whole = HistoryReader(topic, TOPIC)  # type: ignore[arg-type]
    whole.position = 0
    await whole.refresh()
    assert {slot: kept.version for slot, kept in whole.held.items()} == {
        slot: kept.version for slot, kept in reader.held.items()
    }


@in_loop
async def test_garbage_is_passed_over_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    topic, made = Topic(), versions(3)
    await topic.writer().keep(made[:2])
    forged = orjson.loads(topic.records[0].value) | {"observations": 99}
    for key, value in [
        (b"recent/1", b"{ no version"),
        (b"\xff", b"{}"),
        (b"weather", b"{}"),
        (INDEX_KEY, b'{"through":"x"}'),
        (b"recent/0", orjson.dumps(forged)),
        (INDEX_KEY, b"{}"),
    ]:
        await topic.send_and_wait(TOPIC, value, key)
    reader = await topic.reader()
    assert await reader.find("recent/0") is None, "its hash does not fit"
    assert await reader.find("recent/1") == made[1], "the record before the damaged one"
    for text in ("passed over", "its key is no slot", "cannot be used: its sha256", "its index"):
        assert text in caplog.text or text == "its index"
    await topic.writer().keep(made)
    assert await (await topic.reader()).find("recent/2") == made[2]


@in_loop
async def test_an_index_that_points_to_compacted_records_is_made_again_from_the_topic() -> None:
    topic, made = Topic(), versions(3)
    await topic.writer().keep(made)
    reader = await topic.reader()
    reader.held = {slot: kept._replace(offset=99) for slot, kept in reader.held.items()}
    assert await reader.find(recent_slot(1)) == made[1]


@in_loop
async def test_the_learner_keeps_what_it_publishes_and_tags_before_the_next_version(
    capfdbinary: pytest.CaptureFixture[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    log, topic, learner = Log(), Topic(), Learner(settings(), ARMS)
    orders = [
        ArmChange(arm="new", reward=1.0, active=True),
        Tag(name="good", version=1),
        ArmChange(arm="new", reward=2.0, active=True),
        Tag(name="none", version=77),
        Tag(name="old", version=0),
        Tag(name="old", version=None),
    ]
    outcome = learner.handle([(offset, encode_journal(order)) for offset, order in enumerate(orders)])
    writer = publisher(log, topic)
    await writer.publish(Learner(settings(), ARMS).begin(), learner, 0)
    await writer.publish(outcome, learner, len(orders))
    keys = [record.key for record in topic.records if record.key != INDEX_KEY]
    assert keys == [b"recent/0", b"recent/1", b"tag/good", b"recent/2", b"tag/old", b"tag/old"]
    assert topic.records[-2].value is None
    reader = await topic.reader()
    assert reader.held[tag_slot("good")] == KeptVersion(1, 0, reader.held[tag_slot("good")].offset)
    good = await reader.find("tag/good")
    assert good is not None
    assert good.sha256 == outcome.versions[0].sha256
    assert "version 77 is not kept" in caplog.text
    # Another learner finds nothing to do; one on a topic that was lost writes all that is left.
    count = len(topic.records)
    again = publisher(log, topic)
    await again._read_parameters()
    await again._keep(Troubles())
    assert len(topic.records) == count
    lost = Topic()
    again = publisher(log, lost)
    await again._read_parameters()
    await again._keep(Troubles())
    assert [decode_parameters(one.value).version for one in lost.records if one.key != INDEX_KEY] == [0, 1, 2]


@in_loop
async def test_a_version_is_kept_at_the_latest_before_the_next_is_written(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    log, topic, learner = Log(), Topic(), Learner(settings(), ARMS)
    writer = publisher(log, topic)
    await writer.publish(learner.begin(), learner, 0)
    assert topic.records == [], "workers read the version first"
    orders = [ArmChange(arm="new", reward=float(number), active=True) for number in range(1, 13)]
    outcome = learner.handle([(offset, encode_journal(order)) for offset, order in enumerate(orders)])
    await writer.publish(outcome, learner, len(orders))
    kept = [record.key for record in topic.records if record.key != INDEX_KEY]
    assert kept == [b"recent/%d" % version for version in range(12)], "more than the topic of versions holds"
