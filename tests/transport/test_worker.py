"""The real processors on the transport in memory: crashes and rebalances leave the journal of an embedded run."""

from __future__ import annotations

import random

import pytest
from aiokafka.structs import TopicPartition

from tests.embedded.traffic import ARMS, SECOND, START, settings
from tests.kafka.golden import Golden, last_decisions
from tests.transport.fake import FakeTransport, in_loop
from worker.kafka.parameters import PublishedParameters
from worker.kafka.pipelines import PartitionPipelines
from worker.kafka.processors import StreamProcessors
from worker.kafka.progress import ProgressReporter
from worker.metrics import Metrics
from worker.stream.decoding import Limits
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.topology import Topics

PARTITIONS = 4
TOPICS = Topics()


def produce(golden: Golden, kafka: FakeTransport) -> None:
    """Append the inputs of an embedded run."""
    for one in golden.sent:
        key = one.session.encode()
        tp = TopicPartition(getattr(TOPICS, one.topic), golden.runner.partition_of(key))
        kafka.append(tp, key, one.value, timestamp=one.at)


class WorkerOnFake:
    """A worker without learner process and web server."""

    def __init__(self, kafka: FakeTransport) -> None:
        self.metrics = Metrics()
        self.now = START
        zero = Parameters.first(settings(), ARMS)
        published = PublishedParameters(zero, [zero], self.metrics)
        processors = StreamProcessors(published, TOPICS, self.metrics, clock=lambda: self.now, limits=Limits())
        self.check_accounts = processors.check_accounts
        self.pipelines = PartitionPipelines(
            kafka, TOPICS, make_task=processors.make_task, handle_together=processors.handle_together
        )
        options = {"partitions": PARTITIONS, "clock": processors.clock, "interval": 0.0, "write_timeout": 60.0}
        self.progress = ProgressReporter(self.pipelines, kafka, **options)

    def imbalance(self) -> float:
        self.check_accounts()
        value = self.metrics.registry.get_sample_value
        return sum(
            abs(value("adcascade_accounting_imbalance", {"identity": name}) or 0.0)
            for name in ("arrivals", "sessions", "feedback")
        )


@pytest.fixture(scope="module")
def golden() -> Golden:
    """An embedded run of one window, whose only fold makes version 1."""
    return Golden(60, seconds=8)


def is_golden(kafka: FakeTransport, golden: Golden) -> bool:
    """Whether the journal holds the facts of the golden run, and folds to its parameters."""
    journal = kafka.values(TOPICS.journal)
    assert {value for value in journal if b'"progress"' not in value} == golden.facts
    versions = Learner(settings(), ARMS).handle(enumerate(journal)).versions
    return [version.sha256 for version in versions] == golden.hashes[1:]


@pytest.mark.parametrize("seed", range(12))
@in_loop
async def test_workers_that_crash_and_rebalance_anywhere_leave_the_golden_journal(golden: Golden, seed: int) -> None:
    chance, kafka = random.Random(seed), FakeTransport(TOPICS)
    produce(golden, kafka)
    worker, members = WorkerOnFake(kafka), 0
    await kafka.rebalance(worker.pipelines, range(PARTITIONS), "member-0")
    inputs = [tp for tp in kafka.durable if tp.topic in TOPICS.inputs]
    for step in range(10**5):
        if all(kafka.committed.get(tp, 0) == len(kafka.durable[tp]) for tp in inputs):
            break
        action = chance.random()
        if action < 0.3:
            await kafka.poll(worker.pipelines, most=chance.randrange(1, 8))
        elif pending := {batch.tp: batch for batch in reversed(kafka.pending())}:
            await kafka.persist(pending[chance.choice(sorted(pending))])  # the oldest of any partition
        if action > 0.97:
            kafka.commit(worker.pipelines)
        if action > 0.99 and step < 2_000:
            if chance.random() < 0.5:  # kill -9: a new process joins
                kafka.lose_pending()
                worker, members = WorkerOnFake(kafka), members + 1
            await kafka.rebalance(worker.pipelines, range(PARTITIONS), f"member-{members}")
    worker.now = golden.sent[-1].at + 60 * SECOND
    await worker.progress.set_targets()
    await kafka.persist_all()
    assert is_golden(kafka, golden)
    assert worker.imbalance() == 0
    # Feedback of several positions in one batch is answered once, and the batches differ.
    ours, theirs = last_decisions(kafka.values(TOPICS.decisions)), last_decisions(golden.values("decisions"))
    common = ours.keys() & theirs.keys()
    assert len(common) > 10
    assert {key: ours[key] for key in common} == {key: theirs[key] for key in common}


def test_progress_in_the_background_ends_all_sessions(golden: Golden) -> None:
    kafka = FakeTransport(TOPICS)
    produce(golden, kafka)
    worker = WorkerOnFake(kafka)
    worker.now = golden.sent[-1].at + 60 * SECOND
    sessions = {one.session.encode() for one in golden.sent}

    def deleted() -> bool:
        changelog = [record for tp, log in kafka.durable.items() if tp.topic == TOPICS.changelog for record in log]
        return {record.key for record in changelog if record.value is None} == sessions

    kafka.finished = deleted
    assert kafka.run(worker.pipelines, partitions=PARTITIONS, background=[worker.progress.run]) == 0
    assert is_golden(kafka, golden)
    assert worker.imbalance() == 0
