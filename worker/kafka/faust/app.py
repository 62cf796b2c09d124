"""The Faust app of a worker: subscriptions to the inputs, a table for the sessions, services for background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import faust
from faust.tables.manager import TableManager
from faust.types import TP
from mode import Service

from worker.kafka.faust import driver, store
from worker.kafka.faust.link import Link
from worker.kafka.faust.recovery import RecoveryEnd
from worker.kafka.faust.schema import ListSchema
from worker.kafka.transport import Background
from worker.stream.topology import ONLY_PARTITION


class WorkerApp(faust.App):
    """A Faust app. Made by `build`."""

    link: Link
    services: tuple[Service, ...] = ()

    async def on_start(self) -> None:
        """Start the background tasks first: no decision is made before the parameters are read."""
        await super().on_start()
        recovery = cast(TableManager, self.tables).recovery
        recovery._signal_recovery_end = RecoveryEnd(recovery)
        for service in self.services:
            await self.add_runtime_dependency(service)

    def on_rebalance_end(self) -> None:
        """Start reading: recovery is done and the positions are the committed ones."""
        try:
            consumer = cast(driver.BatchConsumer, self.consumer)
            assignment = consumer.assignment()
            self.link.owner.open(
                self.consumer_generation_id,
                consumer.member(),
                {tp: start for tp, start in consumer.starts.items() if tp in assignment},
                ends=consumer.ends,
                owns_journal=TP(self.link.options.topics.journal, ONLY_PARTITION) in assignment,
            )
        except Exception as error:
            self.link.owner.fail(error)
        super().on_rebalance_end()

    def _create_directories(self) -> None:
        """Make none: nothing is kept on disk."""


class BackgroundService(Service):
    """Runs a background task of the worker as long as the app runs. Its failure is that of the worker."""

    def __init__(self, task: Background, app: WorkerApp, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._work = task
        self._app = app

    async def on_start(self) -> None:
        """Start the task."""
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._work()
        except Exception as error:
            # An app that stops closes its consumer first, while the tasks still use it.
            if not self._app.should_stop:
                self._app.link.owner.fail(error)

    async def on_stop(self) -> None:
        """Cancel the task and wait for its end."""
        self._running.cancel()
        await asyncio.wait([self._running])


def build(
    link: Link, *, partitions: int, background: tuple[Background, ...], load_metadata: Callable[[], Awaitable[None]]
) -> WorkerApp:
    """Return the app of a worker whose inputs have so many partitions."""
    options = link.options
    app = WorkerApp(
        options.group,
        broker=f"{driver.SCHEME}://{options.connection.servers[0]}",
        store=f"{store.SCHEME}://",
        autodiscover=False,
        web_enabled=False,
        # Would create a topic to elect a leader with; the assignment of the journal does that here.
        topic_disable_leader=True,
        topic_partitions=partitions,
        topic_replication_factor=options.replication,
        table_standby_replicas=0,
        broker_session_timeout=options.session_timeout,
        broker_heartbeat_interval=options.heartbeat_interval,
        broker_request_timeout=max(40.0, options.session_timeout + 5),
        broker_commit_interval=options.commit_interval,
        stream_wait_empty=True,
        producer_max_request_size=16 << 20,
    )
    app.link = link
    app.services = tuple(BackgroundService(task, app) for task in background)
    app.Table(
        "sessions",
        changelog_topic=app.topic(
            options.topics.changelog,
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
    _add_agents(app, load_metadata)
    return app


def _add_agents(app: WorkerApp, load_metadata: Callable[[], Awaitable[None]]) -> None:
    topics = app.link.options.topics
    # acks=False: Faust's ack happens when an iteration ends, also by an exception, and would lose the list.
    inputs = app.topic(topics.arrivals, topics.clicks, schema=ListSchema(), acks=False, maxsize=2)
    journal = app.topic(topics.journal, schema=ListSchema(), acks=False)

    async def subscribe_to_inputs(stream: Any) -> None:
        # Never gets anything: the driver gives the records to the owner. The subscription makes the group assign them.
        try:
            await load_metadata()
        except Exception as error:
            app.link.owner.fail(error)
        async for _ in stream:
            pass

    async def subscribe_to_journal(stream: Any) -> None:
        # Never gets anything (see `Link.assigned_only`): the subscription makes the group assign the journal.
        async for _ in stream:
            pass

    app.agent(inputs, name="serving")(subscribe_to_inputs)
    app.agent(journal, name="learner")(subscribe_to_journal)
