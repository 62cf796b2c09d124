"""The real partitions without a broker: crashes and rebalances leave the journal of an embedded run."""

from __future__ import annotations

import random

import orjson
import pytest
from faust.types import TP

from tests.embedded.traffic import ARMS, SECOND, START, settings
from tests.kafka.golden import Golden, last_decisions
from tests.transport.fake import ZERO, FakeWorker, new_partitions, settle
from tests.transport.memory import Cluster
from worker.kafka.progress import ProgressReporter
from worker.metrics.observer import Metrics
from worker.stream.learner import Learner
from worker.stream.topology import Topics

PARTITIONS = 4
TOPICS = Topics()


def produce(golden: Golden, kafka: Cluster, *, since: int = 0, until: int = 10**15) -> None:
    """Append the inputs of an embedded run, or those of a time."""
    for one in golden.sent:
        if not since < one.at <= until:
            continue
        key = one.session.encode()
        tp = TP(getattr(TOPICS, one.topic), golden.runner.partition_of(key))
        kafka.append(*tp, key, one.value, timestamp=one.at)


class WorkerOnFake(FakeWorker):
    """A worker without learner process and web server; its clock is `error` milliseconds wrong."""

    def __init__(self, kafka: Cluster, *, error: int = 0) -> None:
        self.metrics = Metrics()
        self.now, self.error = START, error
        clocks = {"clock": lambda: self.now + self.error, "steady": lambda: self.now}
        partitions = new_partitions(TOPICS, self.metrics, ZERO, **clocks)
        super().__init__(kafka, TOPICS, partitions)
        self.progress = ProgressReporter(count=PARTITIONS, clock=partitions.clock, interval=0.0)

    async def report_progress(self) -> None:
        """Let all partitions write their progress, and make it durable."""
        await self.progress._look(self)  # type: ignore[arg-type]
        await settle()
        await self.persist_all()

    def imbalance(self) -> float:
        self.partitions.check_accounts()
        value = self.metrics.registry.get_sample_value
        return sum(
            abs(value("adcascade_accounting_imbalance", {"identity": name}) or 0.0)
            for name in ("arrivals", "sessions", "feedback")
        )


@pytest.fixture(scope="module")
def golden() -> Golden:
    """An embedded run of one window, whose only fold makes version 1."""
    return Golden(60, seconds=8)


def is_golden(kafka: Cluster, golden: Golden) -> bool:
    """Whether the journal holds the facts of the golden run, and folds to its parameters."""
    journal = kafka.records(TOPICS.journal)
    assert {record.value for record in journal if b'"progress"' not in (record.value or b"")} == golden.facts
    versions = Learner(settings(), ARMS).handle((one.offset, one.value, one.timestamp) for one in journal).versions
    return [version.sha256 for version in versions if version.version] == golden.hashes[1:]


async def disturbed(golden: Golden, kafka: Cluster, seed: int) -> WorkerOnFake:
    """Let workers serve the golden inputs that crash and rebalance anywhere; return the last, after its progress."""
    chance = random.Random(seed)
    produce(golden, kafka)
    worker = WorkerOnFake(kafka)
    await worker.rebalance(range(PARTITIONS))
    inputs = [tp for tp in kafka.logs if tp.topic in TOPICS.inputs]
    for step in range(10**5):
        if all(kafka.committed.get(tp, 0) == len(kafka.logs[tp]) for tp in inputs):
            break
        action = chance.random()
        if action < 0.3:
            await worker.poll(most=chance.randrange(1, 8))
        elif pending := {write.tp: write for write in reversed(worker.pending)}:
            await worker.persist(pending[chance.choice(sorted(pending))])  # the oldest of any partition
        if action > 0.97:
            worker.commit()
        if action > 0.99 and step < 2_000:
            if chance.random() < 0.5:  # kill -9: a new process joins
                worker = WorkerOnFake(kafka)
            await worker.rebalance(range(PARTITIONS))
    await worker.persist_all()
    worker.now = golden.sent[-1].at + 60 * SECOND
    await worker.report_progress()
    return worker


@pytest.mark.parametrize("seed", range(12))
async def test_workers_that_crash_and_rebalance_anywhere_leave_the_golden_journal(golden: Golden, seed: int) -> None:
    kafka = Cluster.with_topics(TOPICS, PARTITIONS)
    worker = await disturbed(golden, kafka, seed)
    assert is_golden(kafka, golden)
    assert worker.imbalance() == 0
    deleted = {record.key for record in kafka.records(TOPICS.changelog) if record.value is None}
    assert deleted == {one.session.encode() for one in golden.sent}, "progress ends all sessions"
    # Feedback of several positions in one batch is answered once, and the batches differ.
    ours, theirs = last_decisions(kafka.values(TOPICS.decisions)), last_decisions(golden.values("decisions"))
    common = ours.keys() & theirs.keys()
    assert len(common) > 10
    assert {key: ours[key] for key in common} == {key: theirs[key] for key in common}


async def test_a_partition_that_lags_keeps_its_target_and_holds_time_back(golden: Golden) -> None:
    kafka = Cluster.with_topics(TOPICS, PARTITIONS)
    worker = WorkerOnFake(kafka)
    await worker.rebalance(range(PARTITIONS))
    produce(golden, kafka)
    early = worker.now
    await worker.report_progress()
    assert not [value for value in kafka.values(TOPICS.journal) if b"progress" in value]
    worker.now += SECOND
    await worker.report_progress()
    await worker.poll()
    await worker.persist_all()
    await settle()
    await worker.persist_all()
    times = {orjson.loads(value)["time"] for value in kafka.values(TOPICS.journal) if b"progress" in value}
    assert times == {early}


HOUR = 3_600_000


@pytest.mark.parametrize(
    ("broker", "wrong", "error"),
    [
        pytest.param(True, range(3, 7), HOUR, id="an hour ahead for four seconds"),
        pytest.param(True, range(3, 7), -HOUR, id="an hour behind for four seconds"),
        pytest.param(True, range(4), HOUR, id="an hour ahead from the start"),
        pytest.param(True, range(60), HOUR, id="an hour ahead for good"),
        pytest.param(False, range(3, 7), HOUR, id="an hour ahead for four seconds, without the time of the broker"),
    ],
)
async def test_a_wrong_clock_costs_no_session_and_no_feedback(
    golden: Golden, broker: bool, wrong: range, error: int
) -> None:
    _, undisturbed, _ = await second_by_second(golden, broker=broker, wrong=range(0), error=0)
    worker, kafka, reported = await second_by_second(golden, broker=broker, wrong=wrong, error=error)
    assert is_golden(kafka, golden)
    assert worker.imbalance() == 0
    assert not kafka.values(TOPICS.dead_letters)
    # Every user who passed over the first ad got the second one.
    decisions = last_decisions(kafka.values(TOPICS.decisions))
    assert decisions == last_decisions(undisturbed.values(TOPICS.decisions))
    assert len({session for session, position in decisions if position > 1}) > 10
    # From the second that shows it (the first progress brings the time of the broker) to the last, and not longer.
    assert reported == [second for second in range(40) if second in wrong and second > 0]


async def second_by_second(
    golden: Golden, *, broker: bool, wrong: range, error: int
) -> tuple[WorkerOnFake, Cluster, list[int]]:
    """Serve the inputs of a golden run as time passes; return the seconds with trouble, too.

    The clock of the worker is wrong in some of the seconds. With `broker`, the broker sets the times of the journal.
    """
    kafka, reported = Cluster.with_topics(TOPICS, PARTITIONS), []
    worker = WorkerOnFake(kafka, error=error if 0 in wrong else 0)
    kafka.clock = (lambda: worker.now) if broker else None
    await worker.rebalance(range(PARTITIONS))
    for second in range(40):
        worker.now = START + second * SECOND
        worker.error = error if second in wrong else 0
        produce(golden, kafka, since=worker.now - SECOND, until=worker.now)
        await worker.poll()
        await worker.persist_all()
        await worker.report_progress()
        if any(trouble.name == "clock" for trouble in worker.metrics.troubles.active()):
            reported.append(second)
    return worker, kafka, reported
