"""The learner process publishes episodes first, then each version once, and reports to its worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from tests.embedded.traffic import ARMS, settings
from tests.kafka.golden import Golden
from tests.transport.fake import in_loop
from worker.kafka.learner import JournalPublisher
from worker.kafka.parameters import PublishedParameters, decoded
from worker.metrics import Metrics
from worker.stream.catalogue import Refusal
from worker.stream.events import Command
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics

TOPICS = Topics("t")


class Log:
    """All topics of the learner: producer and consumer at once."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self._position = 0

    async def send_and_wait(self, topic: str, value: bytes, key: bytes) -> None:
        offset = len(self.records)
        self.records.append(SimpleNamespace(topic=topic, partition=0, offset=offset, timestamp=0, key=key, value=value))

    def assignment(self) -> set[Any]:
        return set()

    def assign(self, partitions: Any) -> None:
        """Read everything."""

    async def beginning_offsets(self, partitions: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(partitions, len(self.records))

    def seek(self, tp: Any, offset: int) -> None:
        self._position = offset

    async def position(self, tp: Any) -> int:
        return self._position

    async def getmany(self, tp: Any, timeout_ms: int) -> dict[Any, list[Any]]:
        start, self._position = self._position, len(self.records)
        return {tp: [record for record in self.records[start:] if record.topic == tp.topic]}

    def written(self) -> list[tuple[str, bytes]]:
        return [(record.topic, record.key) for record in self.records]


def publisher(log: Any) -> JournalPublisher:
    published = PublishedParameters(Parameters.first(settings(), ARMS), [], Metrics())
    return JournalPublisher(TOPICS, published, journal=log, parameters=log, producer=log)


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
