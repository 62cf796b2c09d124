"""Puts the worker together: a Faust app with one agent for the inputs, and services for the rest."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import faust
from aiokafka.admin import AIOKafkaAdminClient
from faust.tables.manager import TableManager
from faust.types import TP
from mode import Service

from worker.errors import FailedError
from worker.kafka.broadcast import Broadcast
from worker.kafka.connection import Connection
from worker.kafka.faust import compat as pins
from worker.kafka.faust import driver, store
from worker.kafka.faust.recovery import RecoveryEnd
from worker.kafka.faust.schema import ListSchema
from worker.kafka.learner_process import LearnerSeat
from worker.kafka.memory import collect_garbage_rarely, return_memory_periodically
from worker.kafka.pipelines import Serving
from worker.kafka.progress import Progress
from worker.kafka.transport import PartitionTask, Ports
from worker.kafka.writer import TopicWriters
from worker.stream.topology import Topics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the transport runs. The defaults are for a worker with its own core; times are in seconds."""

    connection: Connection
    names: Topics = field(default_factory=Topics)
    group: str = "adcascade"
    #: The command line of the learner's process (see `worker.kafka.learner`).
    learner: tuple[str, ...]
    replication: int = 1
    session_timeout: float = 10.0
    commit_interval: float = 1.0
    progress_interval: float = 1.0
    drain_timeout: float = 8.0
    write_patience: float = 120.0
    stop_patience: float = 10.0
    pace: float = 0.006
    freshness: float = 0.004
    calm: float = 0.010
    fetch_wait_ms: int = 100
    fetch_bytes: int = 1 << 20
    poll_records: int = 2048
    batch_bytes: int = 512 << 10
    under_way: int = 4_096


class WorkerApp(faust.App):
    """The Faust app of a worker. Made by `build`, run by `run`."""

    options: Options
    names: Topics
    partitions: int
    #: Makes the task of a partition.
    make_task: Callable[[int], PartitionTask]
    serving: Serving
    broadcast: Broadcast
    seat: LearnerSeat
    #: Topics that are assigned to this worker but not read through Faust.
    owned_only: frozenset[str]
    #: Services beside Faust's own.
    companions: tuple[Service, ...] = ()
    #: Whether the output topics are known to the producer; nothing is read before.
    knows_topics = False
    _sessions: Any
    _outlets: TopicWriters | None = None
    _failing: asyncio.Task[None] | None = None

    @property
    def batch_consumer(self) -> driver.Consumer:
        """The consumer, by its own type."""
        return cast(driver.Consumer, self.consumer)

    @property
    def batch_producer(self) -> driver.Producer:
        """The producer, by its own type."""
        return cast(driver.Producer, self.producer)

    async def on_start(self) -> None:
        """Start the companions first: no decision is made before the parameters are read."""
        await super().on_start()
        recovery = cast(TableManager, self.tables).recovery
        recovery._signal_recovery_end = RecoveryEnd(recovery)
        for service in self.companions:
            await self.add_runtime_dependency(service)

    async def know_topics(self) -> None:
        """Let the producer find out where its partitions are."""
        names = self.names
        await self._find_outlets().load_metadata(names.journal, names.dead_letters, names.changelog, names.decisions)
        self.knows_topics = True

    def _find_outlets(self) -> TopicWriters:
        if self._outlets is None:
            self._outlets = TopicWriters(self.batch_producer.aiokafka)
        return self._outlets

    @property
    def may_read(self) -> bool:
        """Whether input may be read: the group is settled, the parameters are known, the outputs are known."""
        return self.knows_topics and self.broadcast.ready.is_set() and self.serving.is_open(self.consumer_generation_id)

    def on_rebalance_end(self) -> None:
        """Open the lanes: recovery is done and the positions are those that were committed."""
        try:
            self._open()
        except Exception as error:
            self.serving.fail(error)
        super().on_rebalance_end()

    def _open(self) -> None:
        consumer = self.batch_consumer
        assignment = consumer.assignment()
        self.serving.open(
            generation=self.consumer_generation_id,
            member=consumer.member(),
            outlets=self._find_outlets(),
            starts={tp: start for tp, start in consumer.starts.items() if tp in assignment},
            restored=self._sessions.data.hand_over(),
        )
        self.seat.assign(TP(self.names.journal, 0) in assignment)

    def fail(self, error: BaseException) -> None:
        """End the worker without acknowledging anything more."""
        log.critical("the worker ends: %s", error, exc_info=error)
        _end_within(self.options.stop_patience)
        self._failing = asyncio.get_running_loop().create_task(self.crash(error))

    def _create_directories(self) -> None:
        """Make none: nothing is kept on disk."""


def build(options: Options, ports: Ports, *, partitions: int) -> WorkerApp:
    """Return the app of a worker whose inputs have this many partitions (see `partition_count`)."""
    pins.check()
    names = options.names
    app = WorkerApp(
        options.group,
        broker=f"{driver.SCHEME}://{options.connection.servers[0]}",
        store=f"{store.SCHEME}://",
        autodiscover=False,
        web_enabled=False,
        # Would create a topic to elect a leader with; the journal does that here.
        topic_disable_leader=True,
        topic_partitions=partitions,
        topic_replication_factor=options.replication,
        table_standby_replicas=0,
        broker_session_timeout=options.session_timeout,
        broker_heartbeat_interval=min(3.0, options.session_timeout / 3),
        broker_request_timeout=max(40.0, options.session_timeout + 5),
        broker_commit_interval=options.commit_interval,
        stream_wait_empty=True,
        producer_max_request_size=16 << 20,
    )
    app.options, app.names, app.partitions = options, names, partitions
    app.owned_only = frozenset((names.journal,))
    app.make_task = lambda partition: ports.serve(partition, partitions)
    app.serving = Serving(
        names=names,
        step=ports.step,
        limit=options.under_way,
        is_member=lambda: app.batch_consumer.is_member,
        reread=lambda tp, offset: app.batch_consumer.reread(tp, offset),
        failed=app.fail,
    )
    app.broadcast = Broadcast(connection=options.connection, topic=names.parameters, sink=ports.parameters)
    app.seat = LearnerSeat(options.learner, heard=ports.heard)
    app._sessions = app.Table(
        "sessions",
        changelog_topic=app.topic(
            names.changelog,
            schema=ListSchema(),
            partitions=partitions,
            replicas=options.replication,
            compacting=True,
            acks=False,
            internal=True,
            allow_empty=True,
            maxsize=256,
        ),
        partitions=partitions,
        # Counts lists here. Not 1: that has a meaning of its own to Faust.
        recovery_buffer_size=2,
    )
    _add_agents(app, names)
    app.companions = (app.broadcast, app.seat, Progress(app, ports, interval=options.progress_interval))
    return app


def _add_agents(app: WorkerApp, names: Topics) -> None:
    # acks=False: Faust's ack happens when an iteration ends, also by an exception, and would lose the list.
    inputs = app.topic(names.arrivals, names.clicks, schema=ListSchema(), acks=False, maxsize=2)
    journal = app.topic(names.journal, schema=ListSchema(), acks=False)

    async def serve(stream: Any) -> None:
        # Out of here an exception would restart the agent, some seconds later, as if nothing had happened.
        try:
            await app.know_topics()
            async for event in stream.noack().events():
                await app.serving.take(event.value)
        except Exception as error:
            app.serving.fail(error)

    async def hold_the_seat(stream: Any) -> None:
        # Never gets anything (see `owned_only`): its subscription makes the group assign the journal to one worker.
        async for _ in stream:
            pass

    app.agent(inputs, name="serving")(serve)
    app.agent(journal, name="learner")(hold_the_seat)


async def partition_count(connection: Connection, names: Topics) -> int:
    """Return how many partitions the inputs have; raise `FailedError` if the topics are not as they must be."""
    admin = AIOKafkaAdminClient(**connection.arguments())
    await admin.start()
    try:
        # All of them: asked by name, a broker with auto.create.topics.enable would make what is missing, its own way.
        described = await admin.describe_topics()
    finally:
        await admin.close()
    counts = {topic["topic"]: len(topic["partitions"]) for topic in described if not topic["error_code"]}
    missing = [name for name in _outside(names) if name not in counts]
    if missing:
        raise FailedError(f"no topic {', '.join(missing)}: create them first (adcascade topics create)")
    count = counts[names.arrivals]
    for name in (names.clicks, names.decisions, names.changelog):
        if counts.get(name, count) != count:
            raise FailedError(f"{name} has {counts[name]} partitions and {names.arrivals} {count}: they must be equal")
    for name in (names.journal, names.parameters):
        if counts[name] != 1:
            raise FailedError(f"{name} has {counts[name]} partitions: it must have one, that is its order")
    return count


def _outside(names: Topics) -> tuple[str, ...]:
    return (
        *(names.arrivals, names.clicks, names.decisions, names.journal),
        *(names.parameters, names.episodes, names.dead_letters),
    )


class _Worker(faust.Worker):
    """Runs the app until a signal or a failure, and in any case ends."""

    def _flag_as_shutdown_by_signal(self) -> None:
        _end_within(self.app.options.stop_patience)  # type: ignore[attr-defined]
        super()._flag_as_shutdown_by_signal()


def run(app: WorkerApp) -> int:
    """Run the app until SIGTERM or SIGINT (0) or a failure (1). Logging is the caller's."""
    collect_garbage_rarely()
    return_memory_periodically()
    worker = _Worker(app, loop=asyncio.new_event_loop(), override_logging=False, quiet=True, redirect_stdouts=False)
    worker.spinner = None
    try:
        worker.execute_from_commandline()
    except SystemExit as ended:
        code = ended.code
    return 1 if code or app.serving.failure is not None else 0


def _end_within(seconds: float) -> None:
    """End the process, whatever hangs: a flush to a broker that is gone waits for ever."""

    def end() -> None:
        sys.stderr.write(
            f"adcascade: not stopped within {seconds:g} s; ending anyway (what is not committed is repeated)\n"
        )
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
