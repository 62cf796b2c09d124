"""The whole topology in one process with simulated users, driven by event time.

A step is a second of event time: the records due are sent and handled, users answer the decisions, and the clock
advances. Windows close and versions appear as on Kafka, only faster. Users keep arriving until the last window is
closed; those after that window are served, but not part of the accounts.

With a state folder a run may be stopped anywhere, also by `kill -9`, and the next start continues it. Users depend on
the seed and the clock alone (`worker.simulation.users`), clients without an answer send their arrival again, and the
account of a window is stored in the transaction that closes it. Versions, hashes and accounts are then those of a run
that was never stopped.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from heapq import heapify, heappop, heappush
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from worker.bandit.additive import AdditiveModel
from worker.embedded.outputs import Tap
from worker.embedded.runner import Embedded
from worker.embedded.state import StateFolder
from worker.errors import FailedError, InputError
from worker.metrics import Metrics
from worker.simulation.demo.ledger import Ledger, Row
from worker.simulation.environments import make_environment
from worker.simulation.reporting import flag
from worker.simulation.users import BEGINNING, Habits, Sent, Users
from worker.simulation.world import Chance
from worker.simulation.worth import Valuer
from worker.stream.decoding import decode_decision
from worker.stream.events import Decision
from worker.stream.parameters import Parameters
from worker.stream.settings import LearningSettings
from worker.stream.topology import Topics

TICK = 1_000  # milliseconds of event time per step
WITHOUT = "; --no-beside leaves it out"


#: The defaults of serving and learning, which the demo shares with the worker.
_LEARNING = LearningSettings(dim=5)


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a demo; they decide the run. All windows of so small a run are learned from whole."""

    environment: str = "tastes"
    policy: str = _LEARNING.policy
    users: int = 100
    episodes: int = 120
    seed: int = 0
    dim: int = _LEARNING.dim
    arms: int = 10
    stay: float = 1.0
    horizon: int = _LEARNING.horizon
    model: str = _LEARNING.model
    intercept: bool = _LEARNING.intercept
    answers: str = _LEARNING.answers
    standardise: bool = _LEARNING.standardise
    beta: float | str = _LEARNING.beta
    bonus: str = _LEARNING.bonus
    ridge: float = _LEARNING.ridge
    partitions: int = 4
    repeats: bool = _LEARNING.repeats
    random_share: float = _LEARNING.random_share
    control_share: float = _LEARNING.control_share
    control: str = _LEARNING.control
    learn_at_most: int = 0

    def learning(self) -> LearningSettings:
        """Return the learner's part of the settings."""
        shared = {f.name for f in fields(LearningSettings)}.intersection(self.__struct_fields__)
        return LearningSettings(**{name: getattr(self, name) for name in shared})


class Demo:
    """A run that can be stepped through.

    `state` keeps the run across restarts; it must be empty or of the same settings (`episodes` may differ). `watchers`
    observe the runner and the accounts. `tap` receives every record.

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
        state: StateFolder | None = None,
        watchers: Sequence[Metrics] = (),
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
        self._state, self._watchers, self._topics = state, watchers, Topics()
        valuer = Valuer(self.world, horizon=settings.horizon, repeats=settings.repeats)
        self.ledger = Ledger(self.users, valuer, state=state)
        self._before: Counter[str] = Counter()  # counts of earlier processes
        if state is not None:
            self._open(state)
        self.embedded = Embedded(
            self.learning,
            self.users.arms,
            partitions=settings.partitions,
            topics=self._topics,
            state=state,
            observers=[self.ledger, *watchers],
            tap=tap,
        )
        for watcher in watchers:
            watcher.add(self.embedded.tally)
        self.time = max(BEGINNING, self.embedded.time)
        self.resumed = self.embedded.time > 0
        self._queue = self._in_flight()
        self._period = self.users.period_of(self.time - 1) + 1  # the next whose users arrive
        self._notified = len(self.rows)  # closed windows that the watchers have seen
        self._notify()

    # ── a state folder ───────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, state: StateFolder) -> None:
        """Continue the run in the folder, or begin one."""
        check_state(state, self.settings)
        if state.meta("demo.settings") is not None:
            self._before = Counter(msgspec.json.decode(state.meta("demo.counts") or b"{}", type=dict[str, int]))
            self.ledger.restore(state, self.users.start + self.settings.episodes * self.users.period)
        state.set_meta("demo.settings", msgspec.json.encode(self.settings))

    def _in_flight(self) -> list[Sent]:
        """Return the records that users who have arrived already will send after a restart."""
        if not self.resumed:
            return []
        # Answers in flight are lost. The clients send their arrivals again, and the users answer the same.
        since = self.time - self.learning.session_timeout
        queue = self.users.resent(since, self.time)
        for period in range(max(0, self.users.period_of(since)), self.users.period_of(self.time - 1) + 1):
            queue.extend(record for record in self.users.arrivals(period) if record.time > self.time)
        heapify(queue)
        return queue

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
        if self._state:
            self._state.set_meta("demo.counts", msgspec.json.encode(self.counts))
        self.embedded.advance(now)
        self.time = now
        self._notify()

    def _deliver(self, now: int) -> None:
        while self._queue and self._queue[0].time <= now:
            record = heappop(self._queue)
            topic = getattr(self._topics, record.topic)
            self.embedded.send(topic, record.value, key=record.key, timestamp=record.time)
        for _, value in self.embedded.pump():
            self._answer(decode_decision(value), now)

    def _answer(self, decision: Decision, now: int) -> None:
        """Let the user of a decision answer it."""
        if decision.position == 1 and self.ledger.served(
            decision.session_id, decision.slate, decision.parameters_version
        ):
            for watcher in self._watchers:
                watcher.decided((now - decision.arrived_at) / 1000)
        for record in self.users.answer(decision, now):
            heappush(self._queue, record)

    def _notify(self) -> None:
        fresh, self._notified = self.rows[self._notified :], len(self.rows)
        for watcher in self._watchers:
            for row in fresh:
                watcher.simulated(
                    oracle=row.score.oracle,
                    served=row.score.served,
                    sessions=row.score.sessions,
                    window_end=row.episode.window_end,
                )
            watcher.watermark(self.time)
            watcher.census(open_sessions=self.open_sessions, parked=sum(task.parked for task in self.embedded.tasks))

    # ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def rows(self) -> Sequence[Row]:
        """The windows closed so far, in order."""
        return self.ledger.rows

    @property
    def parameters(self) -> Parameters:
        """The newest version."""
        return self.embedded.versions.newest

    @property
    def open_sessions(self) -> int:
        """Sessions in the tables."""
        return sum(task.open_sessions for task in self.embedded.tasks)

    @property
    def counts(self) -> Counter[str]:
        """Counts since the start of the run; dead letters as ``dead.<reason>``.

        After a `kill -9`, the last second of the killed process is counted twice.
        """
        tally = self.embedded.tally
        counts = Counter(
            arrivals=tally.arrivals,
            feedback=tally.feedback,
            decisions=tally.decisions.total(),
            repeated=tally.repeated,
            redundant=tally.redundant,
            **{f"dead.{reason}": count for reason, count in tally.dead.items()},
        )
        counts.update(self._before)
        return counts

    @property
    def dead_letters(self) -> dict[str, int]:
        """Dead letters by reason, the most frequent first."""
        dead = {name.removeprefix("dead."): n for name, n in self.counts.items() if name.startswith("dead.")}
        return dict(sorted(dead.items(), key=lambda item: (-item[1], item[0])))


def check_state(state: StateFolder, settings: DemoSettings) -> None:
    """Refuse a folder with anything but a demo of these settings; `episodes` may differ."""
    stored = state.meta("demo.settings")
    if stored is None:
        if state.parameters():
            raise InputError(f"{state.path} does not hold the state of a demo; choose another folder")
        return
    before = msgspec.json.decode(stored, type=DemoSettings)
    for name in DemoSettings.__struct_fields__:
        was, now = getattr(before, name), getattr(settings, name)
        if was != now and name != "episodes":
            stored_flag, wanted = flag(name, was), flag(name, now)
            raise InputError(
                f"{state.path} holds a demo with {stored_flag}, not {wanted}; use the same or another folder"
            )


# ── the additive run to compare with ──────────────────────────────────────────────────────────────────────────────────


def additive(settings: DemoSettings) -> DemoSettings | None:
    """Return the same run with the additive model, to compare with; None if it is that run.

    The number of partitions changes no result, and with one of them a run takes the least time.
    """
    if settings.model == AdditiveModel.name:
        return None
    return msgspec.structs.replace(settings, model=AdditiveModel.name, partitions=1)


class Beside:
    """The same users served by another model, as far as the demo is; its process runs during a `with` block.

    `rows` are its closed windows, `sha256` is the hash of the version of the last one. It has a separate process,
    because Python runs one thread at a time: on two cores both runs together take as long as one. The process runs to
    its end at its own pace, and sends every closed window through a pipe.

    - Nothing is shown of it that is later than the demo: no more windows are received than the demo has closed.
    - The demo never waits for it, except at its own end.
    - It may be ahead by as many windows as the pipe holds, and then waits.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        self.rows: list[Row] = []
        self.sha256 = ""

    def __enter__(self) -> Beside:
        # Spawned, not forked: a fork would copy locked locks of other threads.
        context = multiprocessing.get_context("spawn")
        self._reports, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(self.settings, sending), daemon=True)
        self._process.start()
        sending.close()
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.join()
        self._reports.close()

    def follow(self, windows: int, *, wait: float = 0.0) -> bool:
        """Receive a window if there are fewer than the demo has closed; return whether there are as many then.

        Wait at most `wait` seconds for it. Raise `FailedError` if there will be none.
        """
        if len(self.rows) < windows and self._reports.poll(wait):
            try:
                received = self._reports.recv()
            except EOFError:
                raise FailedError(f"the additive run beside {self._ending()}{WITHOUT}") from None
            if isinstance(received, str):
                raise FailedError(f"the additive run beside failed: {received}{WITHOUT}")
            row, self.sha256 = received
            self.rows.append(row)
        return len(self.rows) >= windows

    def _ending(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended early with code {code}"


def _run(settings: DemoSettings, reports: Connection[Any, Any]) -> None:
    """Run to the end in the other process; send every closed window with its hash, or the text of a failure."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # signals to all processes are for the demo, which ends this one
        signal.signal(ignored, signal.SIG_IGN)
    try:
        demo, sent = Demo(settings), 0
        while not demo.finished:
            demo.step()
            for row in demo.rows[sent:]:
                reports.send((row, demo.parameters.sha256))
            sent = len(demo.rows)
    except BrokenPipeError:
        pass  # the demo has ended
    except Exception as error:
        reports.send(f"{type(error).__name__}: {error}")
