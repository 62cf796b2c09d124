"""The learner process publishes episodes first, then each version once, and reports to its worker."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiokafka.errors import MessageSizeTooLargeError

from tests.embedded.traffic import ARMS, settings
from tests.kafka.golden import Golden
from tests.transport.fake import in_loop
from worker.errors import FailedError
from worker.kafka.history import HistoryWriter
from worker.kafka.learner import JournalPublisher
from worker.kafka.parameters import PublishedParameters, decoded
from worker.metrics import Metrics
from worker.stream.catalogue import Refusal
from worker.stream.events import Command
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics
from worker.stream.version_encoding import encode_parameters

TOPICS = Topics("t")


class Log:
    """All topics of the learner: producer and consumer at once."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self._position = 0

    async def send_and_wait(self, topic: str, value: bytes | None, key: bytes) -> Any:
        offset = len(self.records)
        self.records.append(SimpleNamespace(topic=topic, partition=0, offset=offset, timestamp=0, key=key, value=value))
        return self.records[-1]

    def assignment(self) -> set[Any]:
        return set()

    def assign(self, partitions: Any) -> None:
        """Read everything."""

    async def beginning_offsets(self, partitions: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(partitions, len(self.records))

    def pause(self, tp: Any) -> None:
        """Fetch nothing."""

    def resume(self, tp: Any) -> None:
        """Fetch again."""

    def seek(self, tp: Any, offset: int) -> None:
        self._position = offset

    async def position(self, tp: Any) -> int:
        return self._position

    async def getmany(self, tp: Any, timeout_ms: int) -> dict[Any, list[Any]]:
        start, self._position = self._position, len(self.records)
        return {tp: [record for record in self.records[start:] if record.topic == tp.topic]}

    def written(self) -> list[tuple[str, bytes]]:
        return [(record.topic, record.key) for record in self.records]


@in_loop
async def test_a_learner_continues_from_versions_that_another_kind_of_machine_published(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    log, facts = Log(), Golden(20, seconds=8).values("journal")
    learner = Learner(settings(), ARMS)
    zero, *_, one = [*learner.begin().versions, *learner.handle(enumerate(facts)).versions]
    theirs = replace(one, radius=one.radius + 1e-12)
    assert (one.version, theirs.sha256 == one.sha256) == (1, False)
    for version in (zero, theirs):
        await log.send_and_wait(TOPICS.parameters, encode_parameters(version), b"%d" % version.version)
    mine = publisher(log)
    made = learner.handle(())
    made.versions.append(one)
    learners: list[Learner] = []

    async def fold(learner: Learner, _: Any) -> None:
        learners.append(learner)
        if len(learners) == 1:
            await mine.publish(made, learner, len(facts))
        raise KeyboardInterrupt

    mine._fold = fold  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        await mine.run(lambda: Learner(settings(), ARMS, mine._published.history))
    assert [one.current.sha256 for one in learners] == [theirs.sha256] * 2
    assert len(log.records) == 2, "nothing is published over it"
    assert b'{"rounded":1}' in capfdbinary.readouterr().out.splitlines()


def publisher(log: Any, history: Any = None) -> JournalPublisher:
    published = PublishedParameters(Parameters.first(settings(), ARMS), [], Metrics())
    kept = Log() if history is None else history
    writer = HistoryWriter(TOPICS.parameters_history, consumer=kept, producer=kept)
    return JournalPublisher(TOPICS, published, journal=log, parameters=log, history=writer, producer=log)


@in_loop
async def test_episodes_come_first_and_a_version_comes_once_whoever_makes_it(
    capfdbinary: pytest.CaptureFixture[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    log, learner, facts = Log(), Learner(settings(), ARMS), Golden(20, seconds=8).values("journal")
    begun, folded = learner.begin(), learner.handle(enumerate(facts))
    folded.refusals.append(Refusal(order=Command(action="freeze"), reason="as a test"))
    for either in (publisher(log), publisher(log)):
        await either.publish(begun, learner, 0)
        await either.publish(folded, learner, len(facts))
    assert log.written() == [
        (TOPICS.parameters, b"0"),
        (TOPICS.episodes, b"1"),
        (TOPICS.parameters, b"0"),  # again, from a newer position
        (TOPICS.parameters, b"1"),
        (TOPICS.episodes, b"1"),
    ]
    assert [version.version for version in decoded(log.records)] == [0, 0, 1]
    assert "refused: as a test" in caplog.text
    reports = [orjson.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [report["position"] for report in reports] == [0, len(facts)] * 2
    assert reports[1]["watermark"] == learner.watermark
    assert reports[1]["episodes"] == [orjson.loads(log.records[1].value)]


# ── two learners that disagree ───────────────────────────────────────────────────────────────────────────────────────


class Rival:
    """A learner process with its own β, which the supervisor starts again after a failure."""

    def __init__(self, log: Log, facts: list[tuple[int, bytes]], beta: float) -> None:
        self.log, self.facts, self.settings = log, facts, settings(beta=beta)
        self.failures = 0
        self.publisher = publisher(log)

    async def start(self) -> None:
        self.publisher = publisher(self.log)
        await self.publisher._read_parameters()
        self.learner = Learner(self.settings, ARMS, self.publisher._published.history)
        await self.publisher.publish(self.learner.begin(), self.learner, 0)

    async def fold(self, until: int) -> None:
        for _ in range(20):
            try:
                await self.publisher.publish(self.learner.handle(self.facts[:until]), self.learner, until)
                return
            except FailedError:
                self.failures += 1
                await self.start()
        raise AssertionError("the learners do not converge")


@pytest.fixture(scope="module")
def facts() -> list[tuple[int, bytes]]:
    return list(enumerate(Golden(60, seconds=40).values("journal")))


@in_loop
async def test_two_learners_with_different_settings_defer_to_what_is_published(facts: list[tuple[int, bytes]]) -> None:
    chance, log = Random(1), Log()
    rivals = [Rival(log, facts, beta) for beta in (1.0, 4.0)]
    for rival in rivals:
        await rival.start()
    for until in range(10, len(facts) + 10, 10):
        for rival in chance.sample(rivals, 2):
            await rival.fold(until)
    versions = decoded(record for record in log.records if record.topic == TOPICS.parameters)
    contents = {(version.version, version.sha256) for version in versions}
    assert len(contents) == max(version.version for version in versions) + 1 > 4, "one content for each version"
    assert {version.settings.beta for version in versions} == {1.0, 4.0}
    assert rivals[0].learner.current.sha256 == rivals[1].learner.current.sha256
    assert min(rival.failures for rival in rivals) > 0


@in_loop
async def test_of_two_contents_written_at_once_the_first_is_written_again_so_that_compaction_keeps_it(
    facts: list[tuple[int, bytes]],
) -> None:
    log = Log()
    one, other = (Rival(log, facts, beta) for beta in (1.0, 4.0))
    for rival in (one, other):
        await rival.start()
    ahead = other.learner.handle(facts)
    send = log.send_and_wait

    async def raced(topic: str, value: bytes, key: bytes) -> Any:
        if topic == TOPICS.parameters and log.send_and_wait is raced and key == b"1":
            log.send_and_wait = send  # type: ignore[method-assign]
            theirs = next(version for version in ahead.versions if version.version == 1)
            await send(topic, encode_parameters(theirs), key)
        return await send(topic, value, key)

    log.send_and_wait = raced  # type: ignore[method-assign]
    with pytest.raises(FailedError, match="two learners disagree"):
        await one.publisher.publish(one.learner.handle(facts), one.learner, len(facts))
    written = [version for version in decoded(log.records[1:]) if version.version == 1]
    assert [version.settings.beta for version in written] == [4.0, 1.0, 4.0]
    assert log.records[-1].value == encode_parameters(written[0])


@in_loop
async def test_a_version_that_the_topic_does_not_take_is_a_failure_that_says_so() -> None:
    class Small(Log):
        async def send_and_wait(self, topic: str, value: bytes, key: bytes) -> None:
            raise MessageSizeTooLargeError

    learner = Learner(settings(), ARMS)
    with pytest.raises(FailedError, match=r"t\.parameters does not take version 0, which has [\d,]+ bytes"):
        await publisher(Small()).publish(learner.begin(), learner, 0)


@in_loop
async def test_a_learner_does_not_decode_the_versions_that_it_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    log, learner, facts = Log(), Learner(settings(), ARMS), Golden(20, seconds=8).values("journal")

    def fail(_: bytes) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr("worker.kafka.parameters.decode_parameters", fail)
    mine = publisher(log)
    await mine.publish(learner.begin(), learner, 0)
    outcome = learner.handle(enumerate(facts))
    await mine.publish(outcome, learner, len(facts))
    assert [version.sha256 for version in mine._published.history] == [
        outcome.versions[0].sha256,
        outcome.versions[-1].sha256,
    ]
