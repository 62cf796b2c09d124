"""An embedded run, and the same inputs sent to workers on Kafka, step by step of event time."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from tests.embedded.traffic import ARMS, SECOND, START, Sent, arrivals, deliver, settings
from tests.kafka.fleet import Fleet
from tests.programs import eventually
from worker.embedded.runner import Embedded, Headers
from worker.stream.topology import Record

#: The step of event time. A version is in force a lateness after it was made, so no step may be longer.
STEP = settings().lateness


class Golden:
    """An embedded run, with all records of its topics."""

    def __init__(self, users: int = 200, seconds: int = 40) -> None:
        self.records: list[Record] = []
        self.runner = Embedded(settings(), ARMS, partitions=4, tap=self._tap)
        self.sent: list[Sent] = deliver(self.runner, arrivals(users, seconds=seconds), live=True)
        # Second by second, so that every version has the time at which it can be made.
        rules = settings()
        end = self.runner.time + rules.window + rules.session_timeout + 2 * rules.lateness + 2 * SECOND
        while self.runner.time < end:
            self.runner.advance(self.runner.time + SECOND)

    def _tap(self, record: Record, headers: Headers) -> None:
        self.records.append(record)

    def values(self, name: str) -> list[bytes]:
        topic = getattr(self.runner.topics, name)
        return [record.value for record in self.records if record.topic == topic and record.value is not None]

    @property
    def facts(self) -> set[bytes]:
        return {value for value in self.values("journal") if b'"kind":"progress"' not in value}

    @property
    def hashes(self) -> list[str]:
        return [version.sha256 for version in self.runner.versions.history]

    @property
    def made(self) -> list[Record]:
        """The versions."""
        return [record for record in self.records if record.topic == self.runner.topics.parameters]

    def version_at(self, time: int) -> int:
        """Return the newest version once all partitions have come to a time."""
        made = [record for record in self.made if record.timestamp <= time]
        return max(orjson.loads(record.value or b"")["version"] for record in made)

    def step_after(self, time: int) -> int:
        """Return where the step that begins at a time ends: also where a version was made."""
        return min(time + STEP, self.runner.time, *(one.timestamp for one in self.made if one.timestamp > time))


def last_decisions(values: list[bytes]) -> dict[tuple[str, int], bytes]:
    """Return the last decision of every session and position."""
    return {(body["session_id"], body["position"]): value for value in values if (body := orjson.loads(value))}


def play(golden: Golden, fleet: Fleet, disturb: Callable[[int], None] = lambda step: None) -> None:
    """Send the inputs of a golden run, and let time pass as it did there.

    `disturb` is called in every step, with its number, between the arrivals and the clicks: while the workers are busy.
    A step ends when every running worker has the versions of its time. In production a version has a lateness to reach
    the workers before it is in force. Here too, since a step ends wherever a version was made: a worker that takes over
    arrivals of a killed one is then sure by which version that one served them (`Versions.is_certain`).
    """
    queue, now, step = sorted(golden.sent), START, 0
    opened: set[str] = set()
    while now < golden.runner.time:
        now = golden.step_after(now)
        due, queue = [sent for sent in queue if sent.at < now], [sent for sent in queue if sent.at >= now]
        came = [sent for sent in due if sent.topic == "arrivals"]
        opened |= {sent.session for sent in came}
        fleet.send(came)
        disturb(step)
        # Users answer what they see: no click comes before its decision.
        eventually(lambda: opened <= fleet.answered(), what="every arrival is answered")  # noqa: B023
        fleet.send(sent for sent in due if sent.topic == "clicks")
        fleet.set_clock(now)
        expected = golden.version_at(now)
        eventually(
            lambda: fleet.running and all(worker.has_version(expected) for worker in fleet.running),  # noqa: B023
            what=f"all workers have version {expected} at {now - START} ms",
        )
        step += 1
