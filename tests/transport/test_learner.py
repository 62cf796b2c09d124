"""The learner process publishes episodes first, then each version once, and reports to its worker."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import orjson
import pytest
from confluent_kafka import KafkaError, KafkaException

from tests.embedded.traffic import ARMS, settings
from tests.kafka.golden import Golden
from tests.transport.memory_topics import MemoryMessage, MemoryTopics
from worker.errors import FailedError
from worker.kafka.learner import JournalPublisher
from worker.kafka.parameters import PublishedParameters, decoded
from worker.metrics import Metrics
from worker.stream.catalogue import Refusal
from worker.stream.events import Command
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters

TOPICS = Topics("t")


def publisher(topics: Any, journal: Any = None) -> JournalPublisher:
    published = PublishedParameters(Parameters.first(settings(), ARMS), [], Metrics())
    return JournalPublisher(
        TOPICS, published, journal=MemoryTopics() if journal is None else journal, versions=topics, producer=topics
    )


def written(topics: MemoryTopics) -> list[tuple[str, bytes | None]]:
    """Return topics and keys of all records without the history, in the order of the writes."""
    return [(one.topic, one.key) for one in topics.written if one.topic != TOPICS.parameters_history]


def versions(topics: MemoryTopics) -> list[Parameters]:
    return decoded(topics.topics[TOPICS.parameters])


class EndedError(Exception):
    """The journal has no further records."""


class Journal(MemoryTopics):
    """A journal that ends the learner at its end; `before_reading` is called with the number of each poll."""

    def __init__(self, facts: list[bytes]) -> None:
        super().__init__()
        for fact in facts:
            self.produce(TOPICS.journal, fact)
        self.polls = 0

    def before_reading(self, poll: int) -> None:
        """Do nothing."""

    def poll(self, seconds: float, most: int = 10_000) -> list[MemoryMessage]:
        self.polls += 1
        self.before_reading(self.polls)
        if not (found := super().poll(seconds, most)):
            raise EndedError
        return found


def test_a_learner_folds_the_journal_and_the_next_one_finds_nothing_to_do(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    topics, facts = MemoryTopics(), Golden(20, seconds=8).values("journal")
    for expected in ([0, 0, 1], [0, 0, 1]):
        mine = publisher(topics, Journal(facts))
        with pytest.raises(EndedError):
            mine.run(lambda mine=mine: Learner(settings(), ARMS, mine.published.history))  # type: ignore[misc]
        assert [version.version for version in versions(topics)] == expected
    reports = [orjson.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert {report["position"] for report in reports} >= {0, len(facts)}


def test_a_learner_continues_from_a_version_that_another_kind_of_machine_published_meanwhile(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    topics, facts = MemoryTopics(), Golden(20, seconds=8).values("journal")
    first = Learner(settings(), ARMS)
    *_, one = [*first.begin().versions, *first.handle(enumerate(facts)).versions]
    theirs = replace(one, radius=one.radius + 1e-12)
    assert (one.version, theirs.sha256 == one.sha256) == (1, False)

    class Raced(Journal):
        def before_reading(self, poll: int) -> None:
            if poll == 1:
                topics.produce(TOPICS.parameters, encode_parameters(theirs), b"1")

    mine, learners = publisher(topics, Raced(facts)), list[Learner]()

    def make_learner() -> Learner:
        learners.append(Learner(settings(), ARMS, mine.published.history))
        return learners[-1]

    with pytest.raises(EndedError):
        mine.run(make_learner)
    assert learners[1].current.sha256 == theirs.sha256
    assert {version.sha256 for version in versions(topics) if version.version == 1} == {theirs.sha256}
    assert b'{"rounded":1}' in capfdbinary.readouterr().out.splitlines()


def test_a_journal_that_is_trimmed_while_it_is_read_is_a_failure_that_says_so() -> None:
    class Trimmed(Journal):
        def before_reading(self, poll: int) -> None:
            raise KafkaException(KafkaError(KafkaError._AUTO_OFFSET_RESET))

    mine = publisher(MemoryTopics(), Trimmed([]))
    with pytest.raises(FailedError, match=r"t\.journal was trimmed while it was read: offset 0 is gone"):
        mine.run(lambda: Learner(settings(), ARMS))


def test_episodes_come_first_and_a_version_comes_once_whoever_makes_it(
    capfdbinary: pytest.CaptureFixture[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    topics, learner, facts = MemoryTopics(), Learner(settings(), ARMS), Golden(20, seconds=8).values("journal")
    begun, folded = learner.begin(), learner.handle(enumerate(facts))
    folded.refusals.append(Refusal(order=Command(action="freeze"), reason="as a test"))
    for either in (publisher(topics), publisher(topics)):
        either.publish(begun, learner, 0)
        either.publish(folded, learner, len(facts))
    assert written(topics) == [
        (TOPICS.parameters, b"0"),
        (TOPICS.episodes, b"1"),
        (TOPICS.parameters, b"0"),  # again, from a newer position
        (TOPICS.parameters, b"1"),
        (TOPICS.episodes, b"1"),
    ]
    assert [version.version for version in versions(topics)] == [0, 0, 1]
    assert "refused: as a test" in caplog.text
    reports = [orjson.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [report["position"] for report in reports] == [0, len(facts)] * 2
    assert reports[1]["watermark"] == learner.watermark
    assert reports[1]["episodes"] == [orjson.loads(topics.topics[TOPICS.episodes][0].value or b"")]


# ── two learners that disagree ───────────────────────────────────────────────────────────────────────────────────────


class Rival:
    """A learner process with its own β, which the supervisor starts again after a failure."""

    def __init__(self, topics: MemoryTopics, facts: list[tuple[int, bytes]], beta: float) -> None:
        self.topics, self.facts, self.settings = topics, facts, settings(beta=beta)
        self.failures = 0
        self.start()

    def start(self) -> None:
        self.publisher = publisher(self.topics)
        self.publisher.read_parameters()
        self.learner = Learner(self.settings, ARMS, self.publisher.published.history)
        self.publisher.publish(self.learner.begin(), self.learner, 0)

    def fold(self, until: int) -> None:
        for _ in range(20):
            try:
                self.publisher.publish(self.learner.handle(self.facts[:until]), self.learner, until)
                return
            except FailedError:
                self.failures += 1
                self.start()
        raise AssertionError("the learners do not converge")


@pytest.fixture(scope="module")
def facts() -> list[tuple[int, bytes]]:
    return list(enumerate(Golden(60, seconds=40).values("journal")))


def test_two_learners_with_different_settings_defer_to_what_is_published(facts: list[tuple[int, bytes]]) -> None:
    chance, topics = Random(1), MemoryTopics()
    rivals = [Rival(topics, facts, beta) for beta in (1.0, 4.0)]
    for until in range(10, len(facts) + 10, 10):
        for rival in chance.sample(rivals, 2):
            rival.fold(until)
    published = versions(topics)
    contents = {(version.version, version.sha256) for version in published}
    assert len(contents) == max(version.version for version in published) + 1 > 4, "one content for each version"
    assert {version.settings.beta for version in published} == {1.0, 4.0}
    assert rivals[0].learner.current.sha256 == rivals[1].learner.current.sha256
    assert min(rival.failures for rival in rivals) > 0


def test_of_two_contents_written_at_once_the_first_is_written_again_so_that_compaction_keeps_it(
    facts: list[tuple[int, bytes]],
) -> None:
    topics = MemoryTopics()
    one, other = (Rival(topics, facts, beta) for beta in (1.0, 4.0))
    theirs = next(version for version in other.learner.handle(facts).versions if version.version == 1)

    def write_theirs_first(topic: str, key: bytes | None) -> None:
        if (topic, key) == (TOPICS.parameters, b"1"):
            topics.error = lambda topic, key: None
            topics.produce(topic, encode_parameters(theirs), key)

    topics.error = write_theirs_first
    with pytest.raises(FailedError, match="two learners disagree"):
        one.publisher.publish(one.learner.handle(facts), one.learner, len(facts))
    contents = [version for version in versions(topics) if version.version == 1]
    assert [version.settings.beta for version in contents] == [4.0, 1.0, 4.0]
    assert topics.topics[TOPICS.parameters][-1].value == encode_parameters(theirs)


def test_a_version_that_the_topic_does_not_take_is_a_failure_that_says_so() -> None:
    topics, learner = MemoryTopics(), Learner(settings(), ARMS)
    topics.error = lambda topic, key: KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    with pytest.raises(FailedError, match=r"t\.parameters does not take version 0, which has [\d,]+ bytes"):
        publisher(topics).publish(learner.begin(), learner, 0)
