"""The history topic: two reads find a version; crashes, other learners, failures and garbage lose none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import orjson
import pytest
from confluent_kafka import KafkaError, KafkaException

from tests.embedded.traffic import ARMS, settings
from tests.transport.memory import NOWHERE, Cluster, FakeConsumer, FakeProducer
from tests.transport.test_learner import PARAMETERS, TOPICS, publisher
from worker.errors import InputError
from worker.kafka.control import KafkaControl
from worker.kafka.history import HistoryReader, HistoryWriter
from worker.runtime.settings import ProcessSettings
from worker.stream.events import ArmChange, Tag, encode_event
from worker.stream.history import HOUR, slot_of, tags
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.tagged import TaggedVersion
from worker.stream.topology import Record
from worker.stream.troubles import Troubles
from worker.stream.version_sizes import largest_size, too_large
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
        return [record.key for record in self.history]

    def history_writer(self) -> HistoryWriter:
        return HistoryWriter(TOPIC, reader=self.reader(), producer=FakeProducer(self))  # type: ignore[arg-type]

    def history_reader(self) -> HistoryReader:
        history = HistoryReader(TOPIC)
        history.refresh(self.reader())
        return history

    def find(self, slot: str) -> Parameters | None:
        return self.history_reader().find(slot, self.reader())


def last(made: list[Parameters], number: int) -> list[Parameters]:
    return made[max(0, number - KEPT) : number]


def test_the_last_hour_one_an_hour_and_what_is_tagged_are_found() -> None:
    topic, made = Topic(), versions(60)
    writer = topic.history_writer()
    for number in range(1, 61):
        writer.keep(last(made, number))
    writer.tag(Tag(name="good", version=57), [])
    topic.compact(TOPIC)
    slots = topic.history_reader().slots
    assert tags(slots) == {"good": 57}
    assert {kept.version for slot, kept in slots.items() if slot.startswith("recent/")} == set(range(54, 60))
    assert {kept.version for slot, kept in slots.items() if slot.startswith("week/")} >= {0, 5, 11, 17, 53, 59}
    assert topic.find("tag/good") == made[57]
    assert topic.find("tag/none") is None


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
    slots = topic.history_reader().slots
    assert {one.version for one in made if one.made_at > made[-1].made_at - HOUR} <= {
        kept.version for kept in slots.values()
    }
    assert all(tags(slots).get(name, -1) in possible for name, possible in tagged.items())
    for slot, kept in slots.items():
        assert topic.find(slot) == made[kept.version]


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> tuple[Topic, HistoryWriter, KafkaControl]:
    """A history whose version 1 is tagged good, its writer, and what reads it when a process starts."""
    topic, made = Topic(), versions(3)
    writer = topic.history_writer()
    writer.keep(made)
    writer.tag(Tag(name="good", version=1), made)
    monkeypatch.setattr("worker.kafka.control.partition_counts", lambda *_: {})
    monkeypatch.setattr("worker.kafka.clients.Consumer", lambda _: FakeConsumer(topic))
    return topic, writer, KafkaControl(NOWHERE, TOPICS)


def compared(tag: str) -> ProcessSettings:
    return ProcessSettings(learner=(), learning=settings(control_share=0.1, control=f"tag:{tag}"), arms=ARMS)


def test_a_control_group_finds_its_tag_and_goes_on_with_that_version_if_the_tag_moves(
    tagged: tuple[Topic, HistoryWriter, KafkaControl],
) -> None:
    (_, writer, history), made, wanted = tagged, versions(3), compared("good")
    learning, _ = wanted.with_tagged(made, history.slots, history.load).configured(made)
    assert learning.tagged == TaggedVersion.of("good", made[1])
    carrying = replace(made[2], settings=learning)
    writer.tag(Tag(name="good", version=2), made)
    assert wanted.with_tagged([carrying], history.slots, history.load).configured([carrying])[0] == learning
    assert wanted.surprises(carrying) == []
    again = wanted.with_tagged(made, history.slots, history.load).learning.tagged
    assert again is not None
    assert again.version == 2, "after another control"
    plain = ProcessSettings(learner=(), learning=settings(control="tag:bad"))
    assert plain.with_tagged(made, history.slots, history.load) is plain, "without a control group"


@pytest.mark.parametrize(
    ("tag", "published", "message"),
    [
        ("bad", [FIRST], "--control tag:bad: there is no tag 'bad'; the tags are good; `adcascade parameters tag bad`"),
        ("good", [], "--control tag:good: there is no tag 'good'; there are no tags; `adc"),
        ("good", [Parameters.first(settings(dim=5), ARMS)], "version 1 is of another model, with dim 3 where .* has 5"),
        ("good", [Parameters.first(settings(model="additive"), ARMS)], "with model personal where .* has additive"),
        ("good", [FIRST], "every version would carry it, and 4 arms of 3 .* of a record: 2 .* fit; give another"),
    ],
)
def test_a_tag_that_cannot_be_a_control_is_one_line(
    tagged: tuple[Topic, HistoryWriter, KafkaControl], monkeypatch, tag: str, published: list[Parameters], message: str
) -> None:
    full = largest_size(ARMS, FIRST.model, FIRST.settings)
    monkeypatch.setattr("worker.runtime.settings.too_large", partial(too_large, most=full))
    with pytest.raises(InputError, match=message) as refused:
        compared(tag).with_tagged(published, tagged[2].slots, tagged[2].load)
    assert "\n" not in str(refused.value)


def test_garbage_is_passed_over_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    topic, made = Topic(), versions(3)
    topic.history_writer().keep(made[:2])
    forged = orjson.loads(topic.history[0].value) | {"observations": 99}
    for key, value in [
        (b"recent/1", b"{ no version"),
        (b"\xff", b"{}"),
        (b"weather", b"{}"),
        (b"recent/0", orjson.dumps(forged)),
    ]:
        topic.append(TOPIC, 0, key, value)
    assert topic.find("recent/0") is None, "its hash does not fit"
    assert topic.find("recent/1") == made[1], "the record before the damaged one"
    for text in ("passed over", "its key is no slot", "cannot be used: its sha256"):
        assert text in caplog.text
    topic.history_writer().keep(made)
    assert topic.find("recent/2") == made[2]


def test_a_topic_that_was_made_again_is_read_from_its_beginning() -> None:
    topic, made = Topic(), versions(9)
    writer, history = topic.history_writer(), topic.history_reader()
    writer.keep(made[:8])
    history.refresh(topic.reader())
    lost = Topic()
    lost.history_writer().keep(made[8:])
    history.refresh(lost.reader())
    assert slot_of(history.slots, 7) is None
    assert history.find("recent/8", lost.reader()) == made[8]


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
    outcome = learner.handle([(offset, encode_event(order)) for offset, order in enumerate(orders)])
    writer = publisher(topic)
    writer.publish(Learner(settings(), ARMS).begin(), learner, 0)
    writer.publish(outcome, learner, len(orders))
    assert topic.keys() == [b"recent/0", b"week/0", b"recent/1", b"tag/good", b"recent/2", b"tag/old", b"tag/old"]
    assert topic.history[-1].value is None
    good = topic.find("tag/good")
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
    assert [decode_parameters(one.value or b"").version for one in lost.history] == [0, 0, 1, 2]


def test_a_version_is_kept_at_the_latest_before_the_next_is_written(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    topic, learner = Topic(), Learner(settings(), ARMS)
    writer = publisher(topic)
    writer.publish(learner.begin(), learner, 0)
    assert topic.history == [], "workers read the version first"
    orders = [ArmChange(arm="new", reward=float(number), active=True) for number in range(1, 13)]
    outcome = learner.handle([(offset, encode_event(order)) for offset, order in enumerate(orders)])
    writer.publish(outcome, learner, len(orders))
    keys = topic.keys()
    expected = [b"recent/%d" % version for version in range(12)]
    assert keys[:1] + keys[2:] == expected, "more than the topic of versions holds"
