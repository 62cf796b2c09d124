"""The Faust app of a worker: an agent that serves arrivals and clicks, a table of sessions, and the learner's role."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, cast

import faust
from faust.types import TP

from worker.errors import AdcascadeError
from worker.kafka import driver, store
from worker.kafka.consumer import PATIENCE, Consumer
from worker.kafka.driver import Assignor, PollSchema
from worker.kafka.partitions import Partitions
from worker.kafka.polls import Writer
from worker.kafka.settings import WorkerSettings
from worker.kafka.store import Tables
from worker.runtime.learner_process import LearnerProcess
from worker.runtime.supervision import Background
from worker.stream.topology import ONLY_PARTITION

log = logging.getLogger(__name__)

#: Seconds to end after a signal or a failure; then the process is killed.
STOP_TIMEOUT: Final = 10.0
#: Seconds between two commits.
COMMIT_INTERVAL: Final = 1.0


def worker_app(
    settings: WorkerSettings,
    partitions: Partitions,
    learner: LearnerProcess,
    *,
    count: int,
    background: Sequence[Background] = (),
) -> WorkerApp:
    """Return the app of a worker.

    Parameters
    ----------
    count : the number of partitions of the inputs
    background : coroutines that run while the app does
    """
    app = WorkerApp(
        settings.group,
        broker=f"{driver.SCHEME}://{settings.connection.servers[0]}",
        store=f"{store.SCHEME}://",
        PartitionAssignor=Assignor,
        TableManager=Tables,
        autodiscover=False,
        web_enabled=False,
        # Would create a topic to elect a leader with; the assignment of the journal does that here.
        topic_disable_leader=True,
        topic_partitions=count,
        topic_allow_declare=False,
        table_standby_replicas=0,
        broker_commit_interval=COMMIT_INTERVAL,
        broker_session_timeout=settings.member_timeout,
        # Longer than the driver is patient: Faust goes on as if it had an answer.
        broker_request_timeout=3 * PATIENCE,
        stream_wait_empty=True,
    )
    app.settings, app.partitions = settings, partitions
    app.background = [learner.run, *background]
    _declare(app, learner, count)
    return app


def _declare(app: WorkerApp, learner: LearnerProcess, count: int) -> None:
    """Declare what the app reads: the inputs, for the agent that serves, the session table, and the journal's owner."""
    topics = app.settings.topics
    # acks=False: Faust's ack happens when an iteration ends, also by an exception, and would lose the poll.
    inputs = app.topic(topics.arrivals, topics.clicks, schema=PollSchema(), acks=False, maxsize=2)
    changelog = app.topic(
        topics.changelog,
        schema=PollSchema(),
        partitions=count,
        acks=False,
        internal=True,
        allow_empty=True,
        maxsize=256,
    )
    # The buffer counts lists. Not 1: that has a special meaning to Faust.
    app.Table("sessions", changelog_topic=changelog, partitions=count, recovery_buffer_size=2)

    @app.agent(inputs, name="serve")
    async def serve(polls: Any) -> None:
        """Answer arrivals and join clicks. An event is a poll: the new records of all partitions."""
        async for event in polls.noack().events():
            try:
                await app.partitions.handle(event.value)
            except Exception as error:
                app.fail(error)  # an agent that raises would lose the poll and go on with the next one

    @app.on_partitions_assigned.connect
    async def elect(sender: Any, /, *assigned: Any, signal: Any = None, **_: Any) -> None:
        """Run the learner where the journal's only partition is assigned."""
        learner.assign(TP(topics.journal, ONLY_PARTITION) in assigned[0])


class WorkerApp(faust.App):
    """A Faust app that ends with the first failure. Made by `worker_app`."""

    settings: WorkerSettings
    partitions: Partitions
    #: Run from the start to the end of the app; the failure of one is that of the app.
    background: Sequence[Background] = ()
    running: Sequence[asyncio.Task[None]] = ()
    failure: BaseException | None = None

    @property
    def driver(self) -> Consumer:
        """The consumer, with what this driver has beyond Faust's interface."""
        return cast(Consumer, self.consumer)

    @property
    def writer(self) -> Writer:
        """Writes the outputs."""
        return cast(driver.Producer, self.producer).writer

    @property
    def serves(self) -> bool:
        """Whether the group has assigned partitions, if only none, and their sessions are recovered."""
        return self.failure is None and self.rebalancing_count > 0 and not self.rebalancing

    async def on_start(self) -> None:
        """Start what runs in the background: nothing is served before the parameters are read."""
        await super().on_start()
        # So that the group assigns the journal. It is not read here.
        self.topics.add(self.topic(self.settings.topics.journal, schema=PollSchema(), acks=False))
        self.partitions.connect(self.driver, self.writer)
        self.running = [asyncio.create_task(self._guard(work)) for work in self.background]

    async def _guard(self, work: Background) -> None:
        try:
            await work()
        except Exception as error:
            # An app that stops closes its consumer first, while the tasks still use it.
            if not self.should_stop:
                self.fail(error)

    async def stop(self) -> None:
        """Finish what is in flight, commit, leave the group; or end anyway after a while."""
        _end_within(STOP_TIMEOUT)
        for task in self.running:
            task.cancel()
        if self.running:
            await asyncio.wait(self.running)
        await super().stop()

    def _create_directories(self) -> None:
        """Make none: nothing is kept on disk."""

    def fail(self, error: BaseException) -> None:
        """End the process with an error and commit nothing."""
        self.add_future(self.crash(error))

    async def crash(self, reason: BaseException) -> None:
        """End the process with an error and commit nothing."""
        if self.failure is None and not self.should_stop:
            self.failure = reason
            expected = isinstance(reason, AdcascadeError)
            log.critical("the worker ends: %s", reason, exc_info=None if expected else reason)
            self.driver.flights.forget()
            _end_within(STOP_TIMEOUT)
        await super().crash(reason)


class WorkerProcess(faust.Worker):
    """Runs the app until a signal or a failure."""

    def install_signal_handlers(self) -> None:
        """Write all stacks at SIGUSR2: mode would wait in a debugger, and the worker would serve nobody."""
        super().install_signal_handlers()
        self.loop.add_signal_handler(signal.SIGUSR2, faulthandler.dump_traceback)


def run_app(app: WorkerApp) -> int:
    """Run until SIGTERM or SIGINT (0) or a failure (1)."""
    loop = asyncio.new_event_loop()
    process = WorkerProcess(app, loop=loop, override_logging=False, quiet=True, redirect_stdouts=False)
    process.spinner = None
    try:
        process.execute_from_commandline()
    except SystemExit as ended:
        code = ended.code
    return 1 if code or app.failure is not None else 0


def _end_within(seconds: float) -> None:
    """End the process, even if something hangs: a write to a broker that is gone waits for minutes."""

    def end() -> None:
        sys.stderr.write(f"adcascade: not stopped within {seconds:g} s; killed (uncommitted records are repeated)\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
