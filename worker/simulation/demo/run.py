"""The whole topology in one process with simulated users, driven by event time.

A step is a second of event time: the records due are sent and handled, users answer the decisions, and the clock
advances. Windows close and versions appear as on Kafka, only faster. Users keep arriving until the last window is
closed; those after that window are served, but not part of the accounts.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from multiprocessing.connection import Connection
from typing import Any

from worker.bandit.additive import AdditiveModel
from worker.embedded.runner import Embedded, Tap
from worker.errors import FailedError
from worker.metrics.observer import Metrics
from worker.simulation.demo.ledger import Ledger, Row
from worker.simulation.environments import make_environment
from worker.simulation.users import BEGINNING, Habits, Sent, Users
from worker.simulation.world import Chance
from worker.simulation.worth import Valuer
from worker.stream.decoding import decode_decision
from worker.stream.events import Decision
from worker.stream.parameters import Parameters
from worker.stream.settings import SETTINGS, LearningSettings

TICK = 1_000  # milliseconds of event time per step


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings(LearningSettings):
    """The settings of a demo, which decide the run: those of learning, and of the world and its users."""

    environment: str = "tastes"
    users: int = 100
    episodes: int = 120
    seed: int = 0
    dim: int = 5
    arms: int = 10
    stay: float = 1.0

    def learning(self) -> LearningSettings:
        """Return the learner's part of the settings."""
        return LearningSettings(**{name: getattr(self, name) for name in SETTINGS})


class Demo:
    """A run that can be stepped through; `metrics` observe the runner and the accounts, `tap` receives every record.

    >>> demo = Demo(DemoSettings(users=20, episodes=2))
    >>> while not demo.finished:
    ...     demo.step()
    >>> [row.index for row in demo.rows], demo.parameters.version
    ([0, 1], 2)
    """

    def __init__(
        self,
        settings: DemoSettings,
        *,
        habits: Habits | None = None,
        metrics: Metrics | None = None,
        tap: Tap | None = None,
    ) -> None:
        self.settings = settings
        self.learning = settings.learning()
        self.world = make_environment(
            settings.environment,
            dim=settings.dim,
            arms=settings.arms,
            generator=Chance.of(settings.seed).environment,
            stay=settings.stay,
        )
        self.users = Users(
            self.world,
            horizon=settings.horizon,
            rate=settings.users,
            period=self.learning.window,
            seed=settings.seed,
            habits=habits,
        )
        self.ledger = Ledger(self.users, Valuer(self.world, horizon=settings.horizon, repeats=settings.repeats))
        self.embedded = Embedded(
            self.learning,
            self.users.arms,
            partitions=1,  # the result does not depend on it
            metrics=metrics,
            tap=tap,
        )
        self.time = BEGINNING
        self._metrics = metrics
        self._queue: list[Sent] = []
        self._period = 0  # the next whose users arrive
        self._settle()

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ends_at(self) -> int:
        """The time at which the last window is closed."""
        last = self.users.start + self.settings.episodes * self.users.period
        return last + self.learning.grace

    @property
    def finished(self) -> bool:
        """Whether all windows are closed."""
        return self.time >= self.ends_at

    @property
    def done(self) -> float:
        """The finished share of the run."""
        return min(1.0, (self.time - BEGINNING) / (self.ends_at - BEGINNING))

    def step(self) -> None:
        """Advance by a second of event time."""
        now = self.time + TICK
        while self.users.start + self._period * self.users.period < now:
            for record in self.users.arrivals(self._period):
                heappush(self._queue, record)
            self._period += 1
        self._deliver(now)
        self.embedded.advance(now)
        self.time = now
        self._settle()

    def _deliver(self, now: int) -> None:
        topics = self.embedded.topics
        while self._queue and self._queue[0].time <= now:
            record = heappop(self._queue)
            self.embedded.send(getattr(topics, record.topic), record.value, key=record.key, timestamp=record.time)
        for _, value in self.embedded.pump():
            self._answer(decode_decision(value), now)

    def _answer(self, decision: Decision, now: int) -> None:
        """Let the user of a decision answer it."""
        if decision.position == 1:
            version = next(v for v in self.embedded.versions.history if v.version == decision.parameters_version)
            if self.ledger.served(decision.session_id, decision.slate, version) and self._metrics is not None:
                self._metrics.decided((now - decision.arrived_at) / 1000)
        for record in self.users.answer(decision, now):
            heappush(self._queue, record)

    def _settle(self) -> None:
        """Add the accounts of the windows closed since the last step, and let the metrics have them."""
        for episode in self.embedded.episodes[len(self.rows) :]:
            worth = self.ledger.close(episode).worth
            if self._metrics is not None:
                self._metrics.simulated(oracle=worth.oracle, served=worth.served, window_end=episode.window_end)
        if self._metrics is not None:
            self._metrics.watermark(self.time)
            self._metrics.census(self.embedded.tasks)

    # ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def rows(self) -> Sequence[Row]:
        """The windows closed so far, in order."""
        return self.ledger.rows

    @property
    def parameters(self) -> Parameters:
        """The newest version."""
        return self.embedded.versions.newest


# ── the same users, served by the additive model ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What is kept of a run: its settings, its windows, and the hash of its last version."""

    settings: DemoSettings
    rows: Sequence[Row]
    sha256: str


def additive_run(settings: DemoSettings) -> FinishedRun:
    """Run a demo with the additive model to its end."""
    demo, parent = Demo(replace(settings, model=AdditiveModel.name)), multiprocessing.parent_process()
    while not demo.finished and (parent is None or parent.is_alive()):
        demo.step()
    return FinishedRun(settings=demo.settings, rows=demo.rows, sha256=demo.parameters.sha256)


@contextmanager
def beside(settings: DemoSettings) -> Iterator[Connection[Any, Any]]:
    """Make the additive run in a separate process, which is killed at the end of the context; yield its connection.

    Python runs one thread at a time. On two cores, both runs together take as long as one.
    """
    # Spawned, not forked: a fork would copy locked locks of other threads.
    context = multiprocessing.get_context("spawn")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=_send_run, args=(settings, sent), daemon=True)
    process.start()
    sent.close()
    try:
        yield received
    finally:
        process.kill()
        process.join()
        received.close()


def _send_run(settings: DemoSettings, sent: Connection[Any, Any]) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # signals to all processes are for the demo, which ends this one
        signal.signal(ignored, signal.SIG_IGN)
    with suppress(BrokenPipeError):  # the demo was killed
        sent.send(additive_run(settings))


def received_run(connection: Connection[Any, Any]) -> FinishedRun:
    """Wait for the run; raise `FailedError` if its process has died."""
    try:
        run: FinishedRun = connection.recv()
    except EOFError:
        raise FailedError("the additive run beside ended early; --no-beside leaves it out") from None
    return run
