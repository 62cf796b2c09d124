"""The learner process publishes episodes first, then each version once, and reports to its worker."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import orjson
import pytest
from confluent_kafka import KafkaError
from faust.types import TP

from tests.embedded.traffic import ARMS, START, settings
from tests.kafka.golden import Golden
from tests.stream.scenes import feedback, opened
from tests.transport.memory import Cluster, FakeProducer
from worker.errors import FailedError
from worker.kafka.clients import TopicReader
from worker.kafka.learner import JournalPublisher
from worker.kafka.parameters import PublishedParameters, decoded
from worker.metrics.observer import Metrics
from worker.stream.catalogue import Refusal
from worker.stream.events import Command, Progress, encode_event
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics
from worker.stream.version_records import encode_parameters

TOPICS = Topics("t")
JOURNAL = TP(TOPICS.journal, 0)
PARAMETERS = TP(TOPICS.parameters, 0)


def publisher(cluster: Cluster, journal: TopicReader | None = None) -> JournalPublisher:
    published = PublishedParameters(Parameters.first(settings(), ARMS), [], Metrics())
    return JournalPublisher(
        TOPICS,
        published,
        journal=journal or cluster.reader(),
        versions=cluster.reader(),
        producer=FakeProducer(cluster),  # type: ignore[arg-type]
    )


def written(cluster: Cluster) -> list[tuple[str, bytes | None]]:
    """Return topics and keys of what a learner wrote, without the history, in the order of the writes."""
    others = (TOPICS.journal, TOPICS.parameters_history)
    return [(one.topic, one.key) for one in cluster.written if one.topic not in others]


def versions(cluster: Cluster) -> list[Parameters]:
    return decoded(cluster.records(TOPICS.parameters))


class EndedError(Exception):
    """The journal has no further records."""


class Journal(TopicReader):
    """Reads a journal and ends the learner at its end; `before_reading` is called with the number of each poll."""

    polls = 0

    def before_reading(self, poll: int) -> None:
        """Do nothing."""

    def poll(self, seconds: float, most: int = 10_000) -> list[Any]:
        self.polls += 1
        self.before_reading(self.polls)
        records = super().poll(0, most)
        if not records and self.at_end:
            raise EndedError
        return records


def with_journal(users: int) -> Cluster:
    """Return a cluster with the journal of an embedded run."""
    cluster = Cluster.with_topics(TOPICS)
    for fact in Golden(users, seconds=8).values("journal"):
        cluster.append(*JOURNAL, None, fact)
    return cluster


def test_a_learner_folds_the_journal_and_the_next_one_finds_nothing_to_do(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    cluster = with_journal(20)
    for expected in ([0, 0, 1], [0, 0, 1]):
        mine = publisher(cluster, cluster.reader(Journal))
        with pytest.raises(EndedError):
            mine.run(lambda mine=mine: Learner(settings(), ARMS, mine.published.history))  # type: ignore[misc]
        assert [version.version for version in versions(cluster)] == expected
    reports = [orjson.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert {report["position"] for report in reports} >= {0, len(cluster.logs[JOURNAL])}


def test_a_learner_continues_from_a_version_that_another_kind_of_machine_published_meanwhile(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    cluster, first = with_journal(20), Learner(settings(), ARMS)
    *_, one = [*first.begin().versions, *first.handle(enumerate(cluster.values(TOPICS.journal))).versions]
    theirs = replace(one, model=one.model.shifted(0, 1e-12))
    assert (one.version, theirs.sha256 == one.sha256) == (1, False)

    class Raced(Journal):
        def before_reading(self, poll: int) -> None:
            if poll == 1:
                cluster.append(*PARAMETERS, b"1", encode_parameters(theirs))

    mine, learners = publisher(cluster, cluster.reader(Raced)), list[Learner]()

    def make_learner() -> Learner:
        learners.append(Learner(settings(), ARMS, mine.published.history))
        return learners[-1]

    with pytest.raises(EndedError):
        mine.run(make_learner)
    assert learners[1].current.sha256 == theirs.sha256
    assert {version.sha256 for version in versions(cluster) if version.version == 1} == {theirs.sha256}
    assert b'{"rounded":1}' in capfdbinary.readouterr().out.splitlines()


def test_a_journal_that_is_trimmed_while_it_is_read_is_a_failure_that_says_so() -> None:
    cluster = with_journal(5)

    class Trimmed(Journal):
        def before_reading(self, poll: int) -> None:
            cluster.firsts[JOURNAL] = 1

    mine = publisher(cluster, cluster.reader(Trimmed))
    with pytest.raises(FailedError, match=r"t\.journal was trimmed while it was read: offset 0 is gone"):
        mine.run(lambda: Learner(settings(), ARMS))


def test_episodes_come_first_and_a_version_comes_once_whoever_makes_it(
    capfdbinary: pytest.CaptureFixture[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    cluster, learner = with_journal(20), Learner(settings(), ARMS)
    facts = cluster.values(TOPICS.journal)
    begun, folded = learner.begin(), learner.handle(enumerate(facts))
    folded.refusals.append(Refusal(order=Command(action="freeze"), reason="as a test"))
    for either in (publisher(cluster), publisher(cluster)):
        either.publish(begun, learner, 0)
        either.publish(folded, learner, len(facts))
    assert written(cluster) == [
        (TOPICS.parameters, b"0"),
        (TOPICS.episodes, b"1"),
        (TOPICS.parameters, b"0"),  # again, from a newer position
        (TOPICS.parameters, b"1"),
        (TOPICS.episodes, b"1"),
    ]
    assert [version.version for version in versions(cluster)] == [0, 0, 1]
    assert "refused: as a test" in caplog.text
    reports = [orjson.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [report["position"] for report in reports] == [0, len(facts)] * 2
    assert reports[1]["watermark"] == learner.watermark.time
    assert reports[1]["episodes"] == [orjson.loads(cluster.values(TOPICS.episodes)[0])]


def test_the_learner_names_the_slowest_partition_and_counts_late_records_when_they_come() -> None:
    learner = Learner(settings(), ARMS)
    assert learner.watermark.slowest == -1
    times = {0: START + 90_000, 1: START + 80_000, 2: START + 95_000}
    learner.handle(enumerate(encode_event(Progress(partition=p, partitions=3, time=at)) for p, at in times.items()))
    assert (learner.watermark.slowest, learner.watermark.time) == (1, START + 80_000)
    arms, context = [arm.arm for arm in ARMS], (0.5,) * settings().dim
    facts = (opened(arrived_at=START, slate=arms, context=context), feedback(1, arms[0], True, occurred_at=START))
    outcome = learner.handle(enumerate(map(encode_event, facts), start=3))
    assert (outcome.late, outcome.episodes) == (2, [])


# ── two learners that disagree ───────────────────────────────────────────────────────────────────────────────────────


class Rival:
    """A learner process with its own β, which the supervisor starts again after a failure."""

    def __init__(self, cluster: Cluster, facts: list[tuple[int, bytes]], beta: float) -> None:
        self.cluster, self.facts, self.settings = cluster, facts, settings(beta=beta)
        self.failures = 0
        self.start()

    def start(self) -> None:
        self.publisher = publisher(self.cluster)
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
    chance, cluster = Random(1), Cluster.with_topics(TOPICS)
    rivals = [Rival(cluster, facts, beta) for beta in (1.0, 4.0)]
    for until in range(10, len(facts) + 10, 10):
        for rival in chance.sample(rivals, 2):
            rival.fold(until)
    published = versions(cluster)
    contents = {(version.version, version.sha256) for version in published}
    assert len(contents) == max(version.version for version in published) + 1 > 4, "one content for each version"
    assert {version.settings.beta for version in published} == {1.0, 4.0}
    assert rivals[0].learner.current.sha256 == rivals[1].learner.current.sha256
    assert min(rival.failures for rival in rivals) > 0


def test_of_two_contents_written_at_once_the_first_is_written_again_so_that_compaction_keeps_it(
    facts: list[tuple[int, bytes]],
) -> None:
    cluster = Cluster.with_topics(TOPICS)
    one, other = (Rival(cluster, facts, beta) for beta in (1.0, 4.0))
    theirs = next(version for version in other.learner.handle(facts).versions if version.version == 1)

    def write_theirs_first(topic: str, key: bytes | None) -> None:
        if (topic, key) == (TOPICS.parameters, b"1"):
            cluster.error = lambda topic, key: None
            cluster.append(*PARAMETERS, key, encode_parameters(theirs))

    cluster.error = write_theirs_first
    with pytest.raises(FailedError, match="two learners disagree"):
        one.publisher.publish(one.learner.handle(facts), one.learner, len(facts))
    contents = [version for version in versions(cluster) if version.version == 1]
    assert [version.settings.beta for version in contents] == [4.0, 1.0, 4.0]
    assert cluster.values(TOPICS.parameters)[-1] == encode_parameters(theirs)


def test_a_version_that_the_topic_does_not_take_is_a_failure_that_says_so() -> None:
    cluster, learner = Cluster.with_topics(TOPICS), Learner(settings(), ARMS)
    cluster.error = lambda topic, key: KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    with pytest.raises(FailedError, match=r"t\.parameters does not take version 0, which has [\d,]+ bytes"):
        publisher(cluster).publish(learner.begin(), learner, 0)
