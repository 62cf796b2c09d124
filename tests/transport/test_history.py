"""The history topic: two reads find a version; crashes, other learners, failures and garbage lose none."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import orjson
import pytest
from confluent_kafka import KafkaError, KafkaException

from tests.embedded.traffic import ARMS, settings
from tests.transport.memory import Cluster, FakeProducer
from tests.transport.test_learner import PARAMETERS, TOPICS, publisher
from worker.kafka.history import HistoryReader, HistoryWriter
from worker.stream.encoding import encode_journal
from worker.stream.events import ArmChange, Tag
from worker.stream.history import HOUR, INDEX_KEY, KeptVersion, tag_slot, tags
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.topology import Record
from worker.stream.troubles import Troubles
from worker.stream.versions import KEPT

TOPIC = TOPICS.parameters_history
START = 1_700_000_000_000
FIRST = Parameters.first(settings(), ARMS)


def versions(count: int, every: int = 600_000) -> list[Parameters]:
    return [replace(FIRST, version=number, made_at=START + number * every, folds=number) for number in range(count)]


class Topic(Cluster):
    """The history topic."""

    def __init__(self) -> None:
        super().__init__({TOPIC: 1, TOPICS.parameters: 1})

    @property
    def history(self) -> list[Record]:
        return self.records(TOPIC)

    def keys(self) -> list[bytes | None]:
        return [record.key for record in self.history if record.key != INDEX_KEY]

    def history_writer(self) -> HistoryWriter:
        return HistoryWriter(TOPIC, reader=self.reader(), producer=FakeProducer(self))  # type: ignore[arg-type]

    def history_reader(self) -> HistoryReader:
        reader = HistoryReader(self.reader(), TOPIC)
        reader.refresh()
        return reader


def last(made: list[Parameters], number: int) -> list[Parameters]:
    return made[max(0, number - KEPT) : number]


def test_the_index_is_read_and_then_one_version_however_long_the_topic_is() -> None:
    topic, made = Topic(), versions(60)
    writer = topic.history_writer()
    for number in range(1, 61):
        writer.keep(last(made, number))
    writer.tag(Tag(name="good", version=57), [])
    topic.compact(TOPIC)
    topic.reads = 0
    reader = topic.history_reader()
    assert topic.reads == 1, "the index only"
    assert tags(reader.slots) == {"good": 57}
    assert [kept.version for kept in reader.slots.values()].count(57) == 2
    assert {kept.version for slot, kept in reader.slots.items() if slot.startswith("recent/")} == set(range(54, 60))
    assert {kept.version for slot, kept in reader.slots.items() if slot.startswith("hour/")} >= {0, 5, 11, 17, 53, 59}
    assert reader.find("tag/good") == made[57]
    assert reader.find("tag/none") is None


@pytest.mark.parametrize("seed", range(40))
def test_learners_that_die_anywhere_or_write_at_the_same_time_lose_nothing(seed: int) -> None:
    """A learner dies after any write; a second one that was paused writes what it knows."""
    random, topic, made = Random(seed), Topic(), versions(40, every=200_000)
    tagged: dict[str, set[int]] = {}  # a write that failed may have come through
    writers = [topic.history_writer(), topic.history_writer()]
    for number in range(1, len(made) + 1):
        writer = random.choice(writers)
        fails_after = random.choice((1, 2, 3, 99))

        def error(_: str, __: bytes | None) -> KafkaError | None:
            nonlocal fails_after
            fails_after -= 1
            return KafkaError(KafkaError._MSG_TIMED_OUT) if fails_after < 0 else None

        topic.error = error
        try:
            writer.keep(last(made, number))
            if random.random() < 0.2:
                name = random.choice("ab")
                tagged.setdefault(name, {-1}).add(number - 1)
                writer.tag(Tag(name=name, version=number - 1), last(made, number))
                tagged[name] = {number - 1}
        except KafkaException:
            if random.random() < 0.5:
                writers[writers.index(writer)] = topic.history_writer()
        if random.random() < 0.1:
            topic.compact(TOPIC)
    topic.error = lambda topic, key: None
    topic.history_writer().keep(last(made, len(made)))
    reader = topic.history_reader()
    kept = {kept.version for kept in reader.slots.values()}
    assert {one.version for one in made if one.made_at > made[-1].made_at - HOUR} <= kept
    assert all(tags(reader.slots).get(name, -1) in possible for name, possible in tagged.items())
    for slot in reader.slots:
        found = reader.find(slot)
        assert found is not None
        assert found == made[found.version]
    # What the index says is what the log says.
    whole = HistoryReader(topic.reader(), TOPIC)
    whole.position = 0
    whole.refresh()
    assert {slot: kept.version for slot, kept in whole.slots.items()} == {
        slot: kept.version for slot, kept in reader.slots.items()
    }


def test_garbage_is_passed_over_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    topic, made = Topic(), versions(3)
    topic.history_writer().keep(made[:2])
    forged = orjson.loads(topic.history[0].value) | {"observations": 99}
    for key, value in [
        (b"recent/1", b"{ no version"),
        (b"\xff", b"{}"),
        (b"weather", b"{}"),
        (INDEX_KEY, b'{"through":"x"}'),
        (b"recent/0", orjson.dumps(forged)),
        (INDEX_KEY, b"{}"),
    ]:
        topic.append(TOPIC, 0, key, value)
    reader = topic.history_reader()
    assert reader.find("recent/0") is None, "its hash does not fit"
    assert reader.find("recent/1") == made[1], "the record before the damaged one"
    for text in ("passed over", "its key is no slot", "cannot be used: its sha256"):
        assert text in caplog.text
    topic.history_writer().keep(made)
    assert topic.history_reader().find("recent/2") == made[2]


def test_an_index_that_points_to_compacted_records_is_made_again_from_the_topic() -> None:
    topic, made = Topic(), versions(3)
    topic.history_writer().keep(made)
    reader = topic.history_reader()
    reader.slots = {slot: kept._replace(offset=99) for slot, kept in reader.slots.items()}
    assert reader.find("recent/1") == made[1]


def test_the_learner_keeps_what_it_publishes_and_tags_before_the_next_version(
    capfdbinary: pytest.CaptureFixture[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    topic, learner = Topic(), Learner(settings(), ARMS)
    orders = [
        ArmChange(arm="new", reward=1.0, active=True),
        Tag(name="good", version=1),
        ArmChange(arm="new", reward=2.0, active=True),
        Tag(name="none", version=77),
        Tag(name="old", version=0),
        Tag(name="old", version=None),
    ]
    outcome = learner.handle([(offset, encode_journal(order)) for offset, order in enumerate(orders)])
    writer = publisher(topic)
    writer.publish(Learner(settings(), ARMS).begin(), learner, 0)
    writer.publish(outcome, learner, len(orders))
    assert topic.keys() == [b"recent/0", b"recent/1", b"tag/good", b"recent/2", b"tag/old", b"tag/old"]
    assert topic.history[-2].value is None
    reader = topic.history_reader()
    assert reader.slots[tag_slot("good")] == KeptVersion(1, 0, reader.slots[tag_slot("good")].offset)
    good = reader.find("tag/good")
    assert good is not None
    assert good.sha256 == outcome.versions[0].sha256
    assert "version 77 is not kept" in caplog.text
    # Another learner finds nothing to do; one on a topic that was lost writes all that is left.
    count = len(topic.history)
    again = publisher(topic)
    again.read_parameters()
    again.keep(Troubles())
    assert len(topic.history) == count
    lost = Topic()
    lost.logs[PARAMETERS] = topic.logs[PARAMETERS]
    again = publisher(lost)
    again.read_parameters()
    again.keep(Troubles())
    assert [decode_parameters(one.value or b"").version for one in lost.history if one.key != INDEX_KEY] == [0, 1, 2]


def test_a_version_is_kept_at_the_latest_before_the_next_is_written(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    topic, learner = Topic(), Learner(settings(), ARMS)
    writer = publisher(topic)
    writer.publish(learner.begin(), learner, 0)
    assert topic.history == [], "workers read the version first"
    orders = [ArmChange(arm="new", reward=float(number), active=True) for number in range(1, 13)]
    outcome = learner.handle([(offset, encode_journal(order)) for offset, order in enumerate(orders)])
    writer.publish(outcome, learner, len(orders))
    assert topic.keys() == [b"recent/%d" % version for version in range(12)], "more than the topic of versions holds"
