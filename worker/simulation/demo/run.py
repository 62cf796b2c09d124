"""The whole topology in one process with simulated users, driven by event time.

Every step is a second of event time: what reaches the worker in it is sent and handled, users act on the decisions, and
the clock is told. Windows close and versions appear as they would on Kafka, only faster. Users keep coming until the
last window asked for is closed; those who came after it are served, but no part of the accounts.

With a state folder a run may be stopped anywhere, also by `kill -9`, and goes on with the next start: users come by the
seed and the clock alone (`worker.simulation.users`), clients whose answer was lost send their arrival again, and the
account of a window is stored in the transaction that closes it. The versions, their hashes and the accounts are then
those of a run that was never stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

import msgspec

from worker.embedded.runner import Embedded, Observer, Tap
from worker.embedded.state import StateFolder
from worker.errors import InputError
from worker.simulation.demo.ledger import Ledger, Row
from worker.simulation.environments import Chance, make_environment
from worker.simulation.score import Judge
from worker.simulation.users import BEGINNING, Habits, Sent, Users
from worker.stream.codec import decode_decision
from worker.stream.events import Decision
from worker.stream.parameters import Arm, LearningSettings, Parameters
from worker.stream.topology import Tally, Topics

TICK = 1_000  # milliseconds of event time per step


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a demo is; two runs with the same settings are the same."""

    environment: str = "opposite"
    policy: str = "aucbbp"
    users: int = 100
    episodes: int = 120
    seed: int = 0
    dim: int = 5
    arms: int = 10
    horizon: int = 5
    beta: float | str = 2.5
    bonus: str = "value"
    partitions: int = 8
    repeats: bool = True
    random_share: float = 0.0

    def learning(self) -> LearningSettings:
        """Return the learner's part of them."""
        return LearningSettings(
            dim=self.dim,
            horizon=self.horizon,
            repeats=self.repeats,
            policy=self.policy,
            bonus=self.bonus,
            beta=self.beta,
            random_share=self.random_share,
        )


class Watcher(Observer, Protocol):
    """An observer that also takes in what the processors cannot tell."""

    def add(self, tally: Tally) -> None:
        """Take note of what was recovered at the start."""

    def simulated(self, *, oracle: float, served: float, sessions: int, window_end: int) -> None:
        """Take note of what a closed window was worth under the true model."""

    def decided(self, seconds: float) -> None:
        """Take note of how long a session waited for its first decision."""

    def watermark(self, time: int) -> None:
        """Take note of the time up to which everything is processed."""

    def census(self, *, open_sessions: int, parked: int) -> Any:
        """Take note of what is in the tables."""


class Demo:
    """A run that can be stepped through.

    Parameters
    ----------
    settings : what to run
    habits : how untidy the users are
    state : keeps it across restarts, if given; must hold a demo of the same settings (the episodes may be more)
    watchers : observe the runner and the accounts
    tap : hears every record

    Examples
    --------
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
        watchers: Sequence[Watcher] = (),
        tap: Tap | None = None,
    ) -> None:
        self.settings = settings
        self.learning = settings.learning()
        self.world = make_environment(
            settings.environment,
            dim=settings.dim,
            arms=settings.arms,
            generator=Chance.of(settings.seed).environment,
        )
        self.arms = tuple(f"ad-{place:0{len(str(settings.arms))}}" for place in range(1, settings.arms + 1))
        self.users = Users(
            self.world,
            self.arms,
            horizon=settings.horizon,
            rate=settings.users,
            period=self.learning.window,
            seed=settings.seed,
            habits=habits,
        )
        self._check_habits(self.users.habits)
        self._state, self._watchers, self._topics = state, watchers, Topics()
        self._ledger = Ledger(self.users, Judge(self.users, repeats=settings.repeats), state=state)
        self._before: Counter[str] = Counter()  # what earlier processes counted
        if state is not None:
            self._open(state)
        self.embedded = Embedded(
            self.learning,
            [Arm(arm=arm, reward=reward) for arm, reward in zip(self.arms, self.world.rewards.tolist(), strict=True)],
            partitions=settings.partitions,
            topics=self._topics,
            state=state,
            observers=[self._ledger, *watchers],
            tap=tap,
        )
        for watcher in watchers:
            watcher.add(self.embedded.tally)
        self.time = max(BEGINNING, self.embedded.time)
        self.resumed = self.embedded.time > 0  # there was a run to take up
        self._queue = self._under_way()
        self._period = self.users.period_of(self.time - 1) + 1  # the next whose users have not been called
        self._tell()

    def _check_habits(self, habits: Habits) -> None:
        learning = self.learning
        if max(habits.held_up, habits.transit[1]) + TICK > learning.lateness:
            raise InputError(f"records may be held up for at most {learning.lateness - TICK} ms: later is too late")
        if habits.look[0] < TICK:
            raise InputError(f"users must look at a display for at least {TICK} ms, one step of the clock")
        if habits.patience + habits.held_up + TICK > learning.session_timeout:
            raise InputError("users must lose patience before the session times out")

    # ── a state folder ───────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, state: StateFolder) -> None:
        """Take up the run that the folder holds, or begin one in it."""
        check_state(state, self.settings)
        if state.meta("demo.settings") is not None:
            self._before = Counter(msgspec.json.decode(state.meta("demo.counts") or b"{}", type=dict[str, int]))
            self._ledger.restore(state, self.users.start + self.settings.episodes * self.users.period)
        state.set_meta("demo.settings", msgspec.json.encode(self.settings))

    def _under_way(self) -> list[Sent]:
        """Return what is to reach the worker after now, from users that have been called already."""
        if not self.resumed:
            return []
        # Answers that were under way are lost. The clients ask again, and the same users answer the same.
        since = self.time - self.learning.session_timeout
        queue = self.users.again(since, self.time)
        for period in range(max(0, self.users.period_of(since)), self.users.period_of(self.time - 1) + 1):
            queue.extend(record for record in self.users.arrivals(period) if record.time > self.time)
        heapify(queue)
        return queue

    # ── going on ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ends_at(self) -> int:
        """When the last window is closed."""
        last = self.users.start + self.settings.episodes * self.users.period
        return last + self.learning.session_timeout + self.learning.lateness

    @property
    def finished(self) -> bool:
        """Whether all windows asked for are closed."""
        return self.time >= self.ends_at

    @property
    def done(self) -> float:
        """How much of the run is done, from 0 to 1."""
        return min(1.0, (self.time - BEGINNING) / (self.ends_at - BEGINNING))

    def step(self) -> None:
        """Let a second of event time pass."""
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
        self._tell()

    def _deliver(self, now: int) -> None:
        queue, embedded, topics = self._queue, self.embedded, self._topics
        while queue and queue[0].time <= now:
            record = heappop(queue)
            topic = topics.arrivals if record.topic == "arrivals" else topics.clicks
            embedded.send(topic, record.value, key=record.key, timestamp=record.time)
        for _, value in embedded.pump():
            self._show(decode_decision(value), now)

    def _show(self, decision: Decision, now: int) -> None:
        """Let a user see a decision, and do something about it."""
        if decision.position == 1 and self._ledger.served(
            decision.session_id, decision.slate, decision.parameters_version
        ):
            for watcher in self._watchers:
                watcher.decided((now - decision.arrived_at) / 1000)
        for record in self.users.answer(decision, now):
            heappush(self._queue, record)

    def _tell(self) -> None:
        fresh = self._ledger.fresh()
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

    # ── looking at it ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def rows(self) -> Sequence[Row]:
        """The windows closed so far, in order."""
        return self._ledger.rows

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
        """What was counted since the beginning; dead letters as ``dead.<reason>``.

        After a `kill -9`, what the killed process did in its last second is counted again.
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
    """Refuse a folder that holds something else than a demo of these settings; its episodes may be fewer or more."""
    stored = state.meta("demo.settings")
    if stored is None:
        if state.parameters():
            raise InputError(f"{state.path} holds the state of something else than a demo; choose another folder")
        return
    before = msgspec.json.decode(stored, type=DemoSettings)
    for name in DemoSettings.__struct_fields__:
        was, now = getattr(before, name), getattr(settings, name)
        if was != now and name != "episodes":
            flags = {True: f"--{name}", False: f"--no-{name}"}
            flag, other = (
                (flags[was], flags[now]) if isinstance(was, bool) else (f"--{name.replace('_', '-')} {was}", now)
            )
            raise InputError(f"{state.path} holds a demo with {flag}, not {other}; give the same, or another folder")
