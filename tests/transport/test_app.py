"""The Faust app of a worker on Kafka in memory: agents, recovery, commits and rebalances are Faust's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from confluent_kafka import KafkaError

from tests.embedded.traffic import START, arrivals, settings
from tests.programs import until
from tests.transport.fake import new_partitions
from tests.transport.memory import NOWHERE, Cluster, FakeAdmin, FakeConsumer, FakeProducer
from worker.errors import FailedError
from worker.kafka import app as app_module
from worker.kafka.app import WorkerApp, worker_app
from worker.kafka.settings import WorkerSettings
from worker.kafka.store import SessionStore
from worker.metrics.observer import Metrics
from worker.stream.topology import Topics

TOPICS = Topics("t")
COUNT = 4


class NoLearner:
    """A learner process that only notes whether it would run here."""

    mine: bool | None = None

    def assign(self, mine: bool) -> None:
        self.mine = mine

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Kafka in memory, in place of librdkafka."""
    made = Cluster.with_topics(TOPICS, COUNT)
    monkeypatch.setattr("worker.kafka.consumer.confluent_kafka.Consumer", lambda _: FakeConsumer(made))
    monkeypatch.setattr("worker.kafka.driver.durable_producer", lambda *_, **__: FakeProducer(made))
    monkeypatch.setattr("worker.kafka.consumer.AdminClient", lambda _: FakeAdmin(made))
    monkeypatch.setattr(app_module, "_end_within", lambda seconds: None)
    return made


@dataclass
class Running:
    """A worker in this process."""

    app: WorkerApp
    learner: NoLearner
    metrics: Metrics

    def counted(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"adcascade_{name}") or 0.0


@asynccontextmanager
async def worker(group: str = "g") -> AsyncIterator[Running]:
    metrics, learner = Metrics(), NoLearner()
    configured = WorkerSettings(connection=NOWHERE, topics=TOPICS, learner=(), learning=settings(), group=group)
    partitions = new_partitions(TOPICS, metrics, clock=lambda: START)
    app = worker_app(configured, partitions, learner, count=COUNT)  # type: ignore[arg-type]
    starting = asyncio.create_task(app.start())
    running = Running(app, learner, metrics)
    await until(lambda: app.serves)
    try:
        yield running
    finally:
        await app.stop()
        await asyncio.wait([starting])


def send(cluster: Cluster, users: int, first: int = 0) -> set[str]:
    """Send arrivals; return their sessions."""
    sent = arrivals(first + users, seconds=1)[first:]
    for number, one in enumerate(sent):
        cluster.append(TOPICS.arrivals, (first + number) % COUNT, one.session.encode(), one.value, one.at)
    return {one.session for one in sent}


def answered(cluster: Cluster) -> set[str]:
    return {orjson.loads(value)["session_id"] for value in cluster.values(TOPICS.decisions)}


async def serve(cluster: Cluster, users: int, first: int = 0) -> None:
    """Send arrivals and wait for their decisions."""
    sessions = send(cluster, users, first)
    await until(lambda: answered(cluster) >= sessions)


def committed(cluster: Cluster) -> int:
    return sum(offset for (topic, _), offset in cluster.committed.items() if topic == TOPICS.arrivals)


async def test_nothing_is_committed_before_its_results_are_durable(cluster: Cluster) -> None:
    async with worker() as running:
        cluster.hold = True
        send(cluster, 8)
        await until(lambda: running.app.driver.flights.size == 8)
        await running.app.driver.commit()
        assert committed(cluster) == 0
        cluster.hold = False
        await until(lambda: committed(cluster) == 8)


async def test_the_next_worker_recovers_the_sessions_and_answers_no_arrival_again(cluster: Cluster) -> None:
    async with worker():
        await serve(cluster, 12)
    assert (committed(cluster), cluster.members) == (12, [])
    written = len(cluster.values(TOPICS.decisions))
    async with worker() as running:
        assert running.counted("sessions_recovered_total") == 12
        await serve(cluster, 4, first=12)
    assert len(cluster.values(TOPICS.decisions)) == written + 4


async def test_workers_share_the_partitions_and_one_of_them_learns(cluster: Cluster) -> None:
    async with worker() as first:
        await serve(cluster, 8)
        async with worker() as second:
            await until(lambda: first.app.serves and len(first.app.partitions.servings) == COUNT // 2)
            assert len(second.app.partitions.servings) == COUNT // 2
            assert [first.learner.mine, second.learner.mine] == [True, False]
            assert second.counted("sessions_recovered_total") == 4
            assert first.counted("sessions_recovered_total") == 0, "what stays here is not read again"
            await serve(cluster, 8, first=8)
        await until(lambda: first.app.serves and len(first.app.partitions.servings) == COUNT)
        await serve(cluster, 8, first=16)
    assert len(cluster.values(TOPICS.decisions)) == 24


async def test_lost_partitions_are_neither_committed_nor_kept(cluster: Cluster) -> None:
    async with worker() as running:
        cluster.hold = True
        send(cluster, 8)
        await until(lambda: running.app.driver.flights.size == 8)
        cluster.members[0].is_lost = True
        cluster.generation += 1
        count = running.app.rebalancing_count
        await until(lambda: running.app.rebalancing_count > count)
        assert committed(cluster) == 0
        cluster.hold = False
        await until(lambda: running.app.serves)
        await until(lambda: committed(cluster) == 8)


async def test_a_write_that_the_broker_refuses_ends_the_worker_and_commits_nothing(cluster: Cluster) -> None:
    async with worker() as running:
        too_large = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
        cluster.error = lambda topic, key: too_large if topic == TOPICS.journal else None
        send(cluster, 4)
        await until(lambda: running.app.failure is not None)
        assert isinstance(running.app.failure, FailedError)
        assert committed(cluster) == 0


@pytest.mark.parametrize("moment", range(4))
async def test_a_rebalance_in_the_middle_of_a_recovery_loses_no_session(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    async with worker():
        await serve(cluster, 24)
    monkeypatch.setattr("worker.kafka.thread.MOST_RECORDS", 3)  # several polls for each changelog
    applied, apply = 0, SessionStore.apply_changelog_batch

    def disturbed(store: SessionStore, *arguments: Any, **named: Any) -> None:
        nonlocal applied
        apply(store, *arguments, **named)
        if store.recovering:
            applied += 1
            if applied == moment + 1:
                cluster.generation += 1

    monkeypatch.setattr(SessionStore, "apply_changelog_batch", disturbed)
    async with worker() as running:
        await until(lambda: applied > moment and running.app.serves and running.app.rebalancing_count >= 2)
        recovered = sum(one.open_sessions for one in running.app.partitions.servings.values())
        assert recovered == 24
