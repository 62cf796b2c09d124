"""A model of the whole system, run under thousands of random schedules.

Partitions are served by owners that crash, or pause and wake up as zombies; learners crash, pause, and run side by
side. A step is one write that becomes durable, one read, or one commit, and anything may end between any two steps, so
every prefix of the writes in flight on a topic is durable at some crash. Input records come late within `lateness`, and
twice. Two kinds of worlds:

- **recorded**: slates depend on the session alone and feedback is given beforehand, so there is a golden result: the
  fold of the same facts without any disturbance. Every version published must be the golden one.
- **live**: slates depend on the version. Learners publish late, and a server knows a version for certain only some time
  after that, so that a session can be planned twice. Decisions, facts and table values become durable in any order, and
  users answer what they were shown first. Arms change and commands are given. Every version published must be what a
  fresh learner makes of the same journal, and nothing may be trained on that was not displayed. What is uncertain is
  not trained on: `World.uncertain` has these sessions.

A journaled session must have all its feedback in the journal, unless it is uncertain.

``ADCASCADE_SCHEDULES=20000`` runs more of them. `run` returns how many sessions are uncertain:
``python -c "from tests.stream.test_learner_model import run; print(run(range(1500), live=True, stormy=True))"``
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec import structs

import worker.stream.learner as learner_module
from tests.stream import scenes
from worker.bandit.additive import AdditiveModel
from worker.errors import FailedError
from worker.stream.decoding import MAX_FACT_LEAD, MAX_PROGRESS_LEAD, decode_journal
from worker.stream.events import (
    ArmChange,
    ArmEntry,
    CatalogueChange,
    Command,
    FeedbackFact,
    Import,
    JournalEvent,
    Opened,
    Progress,
    Tag,
    encode_event,
)
from worker.stream.joining import ClosedWindow, SessionPlan
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.version_records import parameters_document
from worker.stream.versions import KEPT, should_publish
from worker.stream.windows import OpenWindows, Watermark

SCHEDULES = int(os.environ.get("ADCASCADE_SCHEDULES", "600"))

# The cheaper model: tens of thousands of folds are made, and what they learn does not matter here.
SETTINGS = LearningSettings(
    dim=1, horizon=3, window=50, session_timeout=40, lateness=10, standardise=False, model="additive", intercept=False
)
ARMS = tuple(Arm(arm=name, reward=1.0) for name in "abc")
LAST_ARRIVAL = 350
END = 10_000  # after this time everything is closed
FAR_AHEAD = "ahead"  # a session of the far future
GRACE = SETTINGS.lateness // 2  # every server knows a version so long after its publication


#: Weights of the steps when servers crash all the time and versions are many and late.
STORM = (50, 6, 4, 12, 0, 1)


def slate_of(session: int, version: int) -> tuple[str, ...]:
    """Plan a session: some order of some arms, as a version has it."""
    mixed = Random(session * 1009 + version)
    return tuple(mixed.sample("abc", mixed.choice((2, 3))))


class World:
    """Logs, clock, users, servers and learners."""

    def __init__(
        self,
        seed: int,
        *,
        live: bool,
        stormy: bool = False,
        learner: type[Learner] = Learner,
        server: type[Server] | None = None,
    ) -> None:
        self.random = Random(seed)
        self.live = live
        self.stormy = stormy
        self.clock = 0
        partitions = self.random.choice((1, 2, 3))
        self.inputs: list[list[tuple[Any, ...]]] = [[] for _ in range(partitions)]
        self.committed = [0] * partitions
        self.changelogs: list[dict[int, Opened]] = [{} for _ in range(partitions)]
        self.journal: list[tuple[int, bytes, int]] = []
        self.mischief = Random(-1 - seed)
        self.parameters: list[Parameters] = []  # what the topic holds
        self.published: list[Parameters] = []  # all that was ever written
        self.published_at: dict[int, int] = {}
        self.uncertain: set[str] = set()  # sessions that are not learned from
        self.facts: list[JournalEvent] = []  # of a recorded world
        self.shown: dict[int, tuple[str, ...]] = {}  # the slate that a session saw first
        self.displayed: dict[int, set[tuple[str, bool]]] = {}
        self.coming: list[tuple[int, int, tuple[Any, ...]]] = []  # (time of appending, partition, record)
        self._make_learner = learner
        self._make_server = server or Server
        self._create_users()
        self.servers = [self._make_server(self, partition) for partition in range(partitions)]
        self.zombies: list[Server] = []
        self.learners = [Reader(self, learner)]
        self.asleep: list[Reader] = []

    # ── users ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _create_users(self) -> None:
        for session in range(self.random.randint(6, 16) * (4 if self.stormy else 1)):
            # Some windows stay empty.
            arrived_at = self.random.choice((self.random.randint(0, LAST_ARRIVAL), self.random.randint(130, 240)))
            self._send(session, arrived_at, ("arrival", session, arrived_at))
            if not self.live:
                plan = opened(session, arrived_at, 0)
                self.facts.append(plan)
                for report in self._answers(session, plan.slate, arrived_at + self.random.randint(-3, 42)):
                    self._send(session, report.occurred_at, ("feedback", session, report))
                    self.facts.append(report)

    def _answers(self, session: int, slate: tuple[str, ...], at: int) -> list[FeedbackFact]:
        """Show a slate to the user, who looks at some of it and reports some of it; in a storm, only the last."""
        shown = slate[: self.random.randint(1, len(slate))]
        clicked = self.random.random() < 0.5
        self.displayed[session] = {(arm, clicked and arm == shown[-1]) for arm in shown}
        if not clicked:  # the next display came, and the user left
            self.displayed[session] |= {(arm, False) for arm in slate[len(shown) : len(shown) + 1]}
        reports = [
            scenes.feedback(position, arm, clicked and position == len(shown), max(0, at) + position, f"s{session}")
            for position, arm in enumerate(shown, 1)
            if (position == len(shown) if self.stormy else self.random.random() < 0.6)
        ]
        if self.random.random() < 0.1:
            reports.append(scenes.feedback(1, "nonsense", True, max(0, at), f"s{session}"))
        return reports

    def _send(self, session: int, occurred_at: int, record: tuple[Any, ...]) -> None:
        partition = session % len(self.inputs)
        appended_at = occurred_at + self.random.randint(0, SETTINGS.lateness)
        self.coming.append((appended_at, partition, record))
        if self.random.random() < 0.2:
            self.coming.append((appended_at + self.random.choice((0, 5, 200)), partition, record))

    def show(self, session: int, slate: tuple[str, ...]) -> None:
        """Deliver a decision; a client keeps to the first one that it gets."""
        if self.live and session not in self.shown:
            self.shown[session] = slate
            for report in self._answers(session, slate, self.clock):
                self._send(session, report.occurred_at, ("feedback", session, report))

    # ── logs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def pass_time(self, to: int) -> None:
        self.clock = max(self.clock, to)
        due = sorted((c for c in self.coming if c[0] <= self.clock), key=lambda c: c[0])
        self.coming = [c for c in self.coming if c[0] > self.clock]
        for _, partition, record in due:
            self.inputs[partition].append(record)

    def append(self, event: JournalEvent) -> None:
        """Write to the journal; the broker sets the timestamp. Now and then, something far ahead of it comes first."""
        now = self.clock + 1
        events = [self._far_ahead(now), event] if self.mischief.random() < 0.05 else [event]
        self.journal += [(offset, encode_event(one), now) for offset, one in enumerate(events, len(self.journal))]

    def _far_ahead(self, now: int) -> JournalEvent:
        later = self.mischief.choice((1, 1000, 10**12))
        partition, partitions = self.mischief.randrange(len(self.inputs)), len(self.inputs)
        return self.mischief.choice(
            (
                structs.replace(opened(99, now + MAX_FACT_LEAD + later, 0), session_id=FAR_AHEAD),
                scenes.feedback(1, "a", True, now + MAX_FACT_LEAD + later, "s1"),
                Progress(partition=partition, partitions=partitions, time=now + MAX_PROGRESS_LEAD + later),
            )
        )

    def publish(self, parameters: Parameters) -> None:
        self.parameters.append(parameters)
        self.published.append(parameters)
        self.published_at.setdefault(parameters.version, self.clock)

    def compact(self) -> None:
        newest = {parameters.version % KEPT: parameters for parameters in self.parameters}
        self.parameters = [p for p in self.parameters if newest[p.version % KEPT] is p]

    # ── the schedule ─────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Take random steps for a while, then let all work finish."""
        weights = self.random.choice(((40, 20, 9, 1, 1, 0.2), (40, 20, 9, 5, 4, 0.5), (30, 40, 15, 1, 4, 1.5)))
        if self.stormy:
            weights = STORM
        steps: tuple[Callable[[], None], ...] = (
            self._serve,
            self._learn,
            lambda: self.pass_time(self.clock + self.random.choice((2, 5, 10, 40))),
            self._disturb_serving,
            self._disturb_learning,
            self._order,
        )
        for step in self.random.choices(steps, weights, k=self.random.randint(150, 500) * (2 if self.stormy else 1)):
            step()
        self._come_to_rest()

    def _serve(self) -> None:
        server = self.random.choice(self.servers + self.zombies[-1:])
        for _ in range(self.random.choice((1, 4))):
            server.step()

    def _learn(self) -> None:
        reader = self.random.choice(self.learners)
        for _ in range(self.random.choice((1, 3))):
            reader.step()

    def _disturb_serving(self) -> None:
        busy = [partition for partition, server in enumerate(self.servers) if not server.idle]
        partition = self.random.choice(busy or range(len(self.servers)))
        if self.random.random() < 0.5:
            self.servers[partition].owner = False
            self.zombies.append(self.servers[partition])
        self.servers[partition] = self._make_server(self, partition)

    def _disturb_learning(self) -> None:
        """End, pause or resume a learner, possibly with old work; at least one always runs."""
        what = self.random.random()
        if what < 0.3:
            self.compact()
        if what < 0.5:
            self.learners.pop(self.random.randrange(len(self.learners)))
        elif what < 0.8:
            # Most dangerous between looking at the topic and writing to it.
            ready = [reader for reader in self.learners if reader.seen is not None]
            asleep = self.random.choice(ready or self.learners)
            self.learners.remove(asleep)
            self.asleep.append(asleep)
        elif self.asleep:
            self.learners.append(self.asleep.pop(self.random.randrange(len(self.asleep))))
            self.learners[-1].step()
        while not self.learners or (len(self.learners) < 3 and self.random.random() < 0.3):
            self.learners.append(Reader(self, self._make_learner))

    def _order(self) -> None:
        if not self.live:
            return
        newest = max((parameters.version for parameters in self.parameters), default=0)
        self.append(
            self.random.choice(
                (
                    ArmChange(arm=self.random.choice("abcd"), reward=self.random.choice((1.0, 2.0)), active=True),
                    ArmChange(arm=self.random.choice("abcd"), reward=1.0, active=False),
                    CatalogueChange(
                        changes=tuple(
                            ArmEntry(arm=arm, reward=self.random.choice((1.0, 2.0)), active=True) for arm in "ade"
                        )
                    ),
                    Command(action=self.random.choice(("freeze", "unfreeze", "unfreeze"))),
                    Command(action="rollback", version=max(0, newest - self.random.randint(0, 3))),
                    Command(action="rollback", version=newest + 5),
                    Import(parameters=parameters_document(self._past_version()), arms=self.random.random() < 0.5),
                    Import(parameters={"version": 1}, arms=True),
                    Tag(name="good", version=newest),
                )
            )
        )

    def _past_version(self) -> Parameters:
        """Return a version that the learners may have dropped long ago, or one of another catalogue."""
        past = self.random.choice(self.published or [Parameters.first(SETTINGS, ARMS)])
        others = (Arm(arm=f"x{len(self.journal)}", reward=1.0), *past.arms[1:])
        return past if self.random.random() < 0.7 else replace(past, arms=others)

    def _come_to_rest(self) -> None:
        for zombie in self.zombies:
            zombie.owner = False
            zombie.finish()
        while self.coming:
            self.pass_time(min(time for time, _, _ in self.coming))
            for server in self.servers:
                server.finish()
        self.pass_time(END)
        for server in self.servers:
            server.finish()
            server.probe = None
            server.finish(probes=1)
        for reader in [*self.learners, *self.asleep]:
            reader.finish()
        self.compact()
        last = Reader(self, self._make_learner)
        last.finish()
        if last.learner.windows.sessions:
            raise ViolationError("a window that will never be closed holds back the resume offset")


class Server:
    """Owns a partition: takes a list of records, writes facts, table values and decisions together, then the offset."""

    def __init__(self, world: World, partition: int) -> None:
        self.world = world
        self.partition = partition
        self.owner = True
        self.table = dict(world.changelogs[partition])
        self.position = self.taken = world.committed[partition]
        self.repeated = len(world.inputs[partition])  # what is before may have been answered by another server
        self.known = {parameters.version for parameters in world.published}  # it reads the topic to its end
        self.probe: tuple[int, int] | None = None
        self.to_journal: deque[JournalEvent] = deque()
        self.to_changelog: deque[tuple[int, Opened]] = deque()
        self.to_show: deque[tuple[int, tuple[str, ...]]] = deque()

    @property
    def idle(self) -> bool:
        return not (self.to_journal or self.to_changelog or self.to_show or self.taken > self.position)

    def step(self) -> None:
        world, log = self.world, self.world.inputs[self.partition]
        if self.owner and self.probe is None and world.random.random() < 0.3:
            self.probe = (world.clock, len(log))  # the clock first, then the end
        if self.to_journal or self.to_changelog or self.to_show:
            self._write()
        elif self.taken > self.position:
            self.position = self.taken
            if self.owner:
                world.committed[self.partition] = self.position
        elif self.probe is not None and self.done_before(self.probe[1]):
            self.to_journal.append(self._progress(self.probe[0]))
            self.probe = None
        elif self.owner and self.position < len(log):
            self._take(self.position, log[self.position : self.position + world.random.randint(1, 5)])

    def done_before(self, end: int) -> bool:
        return self.position >= end

    def _progress(self, time: int) -> Progress:
        return Progress(partition=self.partition, partitions=len(self.world.inputs), time=time)

    def _write(self) -> None:
        """Make the next record of any topic durable."""
        queue = self.world.random.choice([one for one in (self.to_journal, self.to_changelog, self.to_show) if one])
        first: Any = queue.popleft()
        if queue is self.to_journal:
            self.world.append(first)
        elif queue is self.to_changelog:
            self.world.changelogs[self.partition][first[0]] = first[1]
        else:
            self.world.show(*first)

    def _take(self, start: int, records: list[tuple[Any, ...]]) -> None:
        self.taken = start + len(records)
        for offset, (kind, session, what) in enumerate(records, start):
            if kind == "arrival":
                self._open(session, what, offset)
            else:
                self.to_journal.append(what)
            if session in self.table:
                self.to_show.append((session, self.table[session].slate))

    def _open(self, session: int, arrived_at: int, offset: int) -> None:
        version, is_certain = self.version_at(arrived_at) if self.world.live else (0, True)
        uncertain = self.is_marked(session, offset < self.repeated and not is_certain)
        if session not in self.table:
            self.table[session] = opened(session, arrived_at, version)
            self.to_changelog.append((session, self.table[session]))
        self.to_journal.append(structs.replace(self.table[session], uncertain=uncertain))

    def is_marked(self, session: int, uncertain: bool) -> bool:
        """Return whether the fact of a session is marked as uncertain."""
        return uncertain

    def version_at(self, arrived_at: int) -> tuple[int, bool]:
        """Return the version that serves an arrival, and whether no other one can have served it."""
        world = self.world
        for version, published_at in world.published_at.items():
            if published_at + GRACE <= world.clock or world.random.random() < 0.4:
                self.known.add(version)
        effective = {p.version: p.effective_at for p in world.published}
        version = max((v for v in self.known if effective[v] <= arrived_at), default=0)
        # No record is in the input before it occurred.
        return version, version == 0 or world.published_at[version] + GRACE <= arrived_at

    def finish(self, probes: int = 0) -> None:
        """Go on until there is nothing left to do."""
        if probes:
            self.probe = (self.world.clock, len(self.world.inputs[self.partition]))
        while not self.idle or self.probe or (self.owner and self.position < len(self.world.inputs[self.partition])):
            before = self.probe
            self.step()
            if not self.owner and self.idle and self.probe is not None and self.probe is before:
                break  # a zombie that will never get there


class Reader:
    """A learner process: reads the journal and the parameters, and only then, in a step of its own, writes."""

    def __init__(self, world: World, learner: type[Learner]) -> None:
        self.world = world
        self.learner = learner(SETTINGS, ARMS, world.parameters, with_episodes=False)
        self.to_publish = deque(self.learner.begin().versions)
        self.seen: tuple[Parameters | None] | None = None

    def step(self) -> None:
        world = self.world
        if not self.to_publish:
            start = self.learner._next_offset
            some = world.journal[start : start + world.random.choice((1, 2, 5, 40))]
            outcome = self.learner.handle(some)
            assert "fold-passed-over" not in outcome.troubles.reports, "`Training` does not fit the learner's calls"
            self.to_publish.extend(outcome.versions)
        elif self.seen is None:
            self.seen = (max(world.parameters, key=lambda p: (p.version, p.journal_offset), default=None),)
        else:
            candidate = self.to_publish.popleft()
            if should_publish(candidate, self.seen[0]):
                world.publish(candidate)
            self.seen = None

    def finish(self) -> None:
        while self.to_publish or self.learner._next_offset < len(self.world.journal):
            self.step()


def opened(session: int, arrived_at: int, version: int) -> Opened:
    slate, context = slate_of(session, version), (float(session),)
    return scenes.opened(f"s{session}", arrived_at, slate, context=context, parameters_version=version)


# ── the fold, so cheap that thousands of schedules are affordable ────────────────────────────────────────────────────


class Training:
    """Replaces the fold: its result depends on all of its input, and it records the displays it was trained on."""

    def __init__(self) -> None:
        self.trained: set[tuple[int, str, bool]] = set()
        self.silent: set[tuple[int, str]] = set()  # trained on as not clicked, because no answer came
        self.slates: set[tuple[int, tuple[str, ...]]] = set()

    def __call__(self, parent: Parameters, window: ClosedWindow, predicted: object = None) -> Parameters:
        sessions = [int(np.frombuffer(plan.context)[0]) for plan in window.plans]
        names, displays, silent = list(window.slates.names), list[tuple[int, str, bool]](), list[tuple[int, str]]()
        columns = (window.rows, window.codes, window.clicked, window.answered)
        for row, code, clicked, answered in zip(*(column.tolist() for column in columns), strict=True):
            if answered:
                displays.append((sessions[row], names[code], clicked))
            else:
                silent.append((sessions[row], names[code]))
        self.trained.update(displays)
        self.silent.update(silent)
        self.slates.update(zip(sessions, (plan.slate for plan in window.plans), strict=True))
        mark = float(Random(repr((sessions, displays, silent, window.sessions))).getrandbits(52))
        assert isinstance(parent.model, AdditiveModel)
        return replace(
            parent,
            model=replace(parent.model, theta_context=np.array([mark])),
            folds=parent.folds + 1,
            observations=parent.observations + len(displays) + len(silent),
        )

    def with_new_arms(self, changed: Parameters, plans: Sequence[SessionPlan]) -> Parameters:
        """Replace the thresholds of an order that adds arms: they depend on all sessions of open windows."""
        mark = Random(repr([(plan.context, plan.slate) for plan in plans])).random()
        return replace(changed, thresholds=(mark,) * changed.settings.horizon)


@contextmanager
def trained() -> Iterator[Training]:
    training = Training()
    with patch.multiple(learner_module, fold=training, with_new_arms=training.with_new_arms):
        yield training


class ViolationError(AssertionError):
    """The system broke a promise."""


def check(world: World, training: Training) -> None:
    """Run a world and raise if a promise was broken."""
    try:
        world.run()
    except FailedError as error:
        raise ViolationError(f"two learners disagreed: {error}") from error
    with trained(), patch.multiple(learner_module, OpenWindows=OpenWindows, Watermark=Watermark):
        if world.live:
            journal = world.journal
        else:
            facts = [*world.facts, Progress(partition=0, partitions=1, time=END)]
            journal = [(offset, encode_event(event)) for offset, event in enumerate(facts)]
        undisturbed = Learner(SETTINGS, ARMS, with_episodes=False)
        expected = {p.version: p.sha256 for p in undisturbed.begin().versions + undisturbed.handle(journal).versions}
    published: dict[int, str] = {}
    for parameters in world.published:
        if published.setdefault(parameters.version, parameters.sha256) != parameters.sha256:
            raise ViolationError(f"version {parameters.version} was published with two contents")
    if published != expected:
        raise ViolationError(f"published {published}, but undisturbed {expected}")
    for session, arm, clicked in training.trained:
        if (arm, clicked) not in world.displayed.get(session, ()):
            raise ViolationError(f"session {session} was trained on {arm} (clicked: {clicked}), which it was not shown")
    for session, arm in training.silent:
        if arm not in {shown for shown, _ in world.displayed.get(session, ())}:
            raise ViolationError(f"session {session} was trained on {arm}, which it was not shown")
    for session, slate in training.slates:
        if slate != world.shown.get(session, slate):
            raise ViolationError(f"session {session} was learned from as {slate}, but saw {world.shown[session]}")
    check_journal(world)


def check_journal(world: World) -> None:
    """Find the sessions that are uncertain; all others in the journal must have all of their feedback there."""
    journal = [decode_journal(value) for _, value, _ in world.journal]
    facts: dict[str, set[Opened]] = {}
    for event in journal:
        if isinstance(event, Opened) and event.session_id != FAR_AHEAD:
            facts.setdefault(event.session_id, set()).add(event)
    world.uncertain = {name for name, some in facts.items() if len(some) > 1 or any(one.uncertain for one in some)}
    there = {event for event in journal if isinstance(event, FeedbackFact)}
    for kind, session, what in (record for log in world.inputs for record in log):
        if kind == "feedback" and what not in there and f"s{session}" in facts.keys() - world.uncertain:
            raise ViolationError(f"the journal has session {session} without all of its feedback")


def run(seeds: range, *, live: bool, **parts: Any) -> Counter[str]:
    """Check schedules; return the number of sessions, and of uncertain ones."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, live=live, **parts)
        # Republish often, so that short runs republish too.
        with trained() as training, patch.object(learner_module, "REPUBLISH", 2):
            try:
                check(world, training)
            except ViolationError as error:
                raise ViolationError(f"schedule {seed}: {error}") from error
        sessions = {session for log in world.inputs for _, session, _ in log}
        counts.update(sessions=len(sessions), uncertain=len(world.uncertain))
    return counts


# ── the promises ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_schedule_of_a_recorded_world_ends_with_the_golden_versions() -> None:
    assert run(range(SCHEDULES // 2), live=False)["uncertain"] == 0


def test_every_schedule_of_a_live_world_ends_with_the_versions_of_its_journal_and_learns_what_was_shown() -> None:
    run(range(SCHEDULES // 2), live=True)


def test_sessions_planned_again_under_a_late_version_are_not_learned_from() -> None:
    assert run(range(SCHEDULES // 8), live=True, stormy=True)["uncertain"], "no storm: no session was planned twice"


def test_the_real_fold_keeps_the_promises_too() -> None:
    for seed in range(SCHEDULES, SCHEDULES + max(10, SCHEDULES // 100)):
        world = World(seed, live=True)
        world.run()
        expected = Learner(SETTINGS, ARMS, with_episodes=False).handle(world.journal).versions
        published = {parameters.version: parameters.sha256 for parameters in world.published}
        assert published == {0: world.published[0].sha256, **{p.version: p.sha256 for p in expected}}


# ── and it would be noticed if they were broken ──────────────────────────────────────────────────────────────────────


class ForgetsOpenWindows(Learner):
    """Resumes after the record that made the version, as if no window had been open."""

    def _start(self, loaded: Parameters) -> None:
        super()._start(replace(loaded, resume_offset=loaded.journal_offset + 1))


class LeavesDueWindowsOpen(Learner):
    """Does not close at restart what the loaded progress calls for; only skips it."""

    def _go_live(self, outcome: Any) -> None:
        self._live = True
        for end in self.windows.due(self._due_until):
            self.windows.close(end, session_timeout=0, whole_slates=False)


class ObeysTwice(Learner):
    """Takes everything from resume_offset on, also orders and progress that the version has in it."""

    def _start(self, loaded: Parameters) -> None:
        super()._start(loaded)
        self._live = True


class ForgetsProgress(Learner):
    """Starts with no watermark and no closed windows."""

    def _start(self, loaded: Parameters) -> None:
        super()._start(loaded)
        self.windows = OpenWindows(window=SETTINGS.window)


class Hurries(Watermark):
    """Follows the fastest partition."""

    @property
    def time(self) -> int:
        return self.reached


class DoesNotWaitForPartitions(Watermark):
    """Takes the watermark over the partitions that have reported."""

    @property
    def time(self) -> int:
        return min(filter(None, self.by_partition().values()), default=0)


class ResumesTooLate(Learner):
    """Makes versions whose resume offset is too late."""

    def _at_position(self, parameters: Parameters, offset: int) -> Parameters:
        return replace(super()._at_position(parameters, offset), resume_offset=offset + 1)


class BelievesEveryTime(Learner):
    """Takes sessions of the far future, and the progress of a worker whose clock is ahead."""

    def handle(self, records: Iterable[Any]) -> Outcome:
        return super().handle(record[:2] for record in records)


class FoldsLateRecords(OpenWindows):
    """Puts what is late into the window that is open."""

    def open(self, offset: int, event: Opened) -> bool:
        return super().open(offset, structs.replace(event, arrived_at=max(event.arrived_at, self.closed_until)))


class DropsFeedbackEarly(OpenWindows):
    """Forgets all feedback with every window that it closes."""

    def close(self, end: int, **options: Any) -> ClosedWindow:
        closed = super().close(end, **options)
        for window in self._windows.values():
            window.answers = type(window.answers)()
        return closed


class KeepsFirstSlate(OpenWindows):
    """Trusts the slate that was journaled first."""

    def open(self, offset: int, event: Opened) -> bool:
        window = self._windows.get(event.arrived_at // self._window)
        known = window is not None and (event.session_id, event.arrived_at) in window.sessions
        return known or super().open(offset, event)


class IgnoresTheMark(OpenWindows):
    """Learns from a session whose facts are equal, though they say that it is uncertain."""

    def open(self, offset: int, event: Opened) -> bool:
        return super().open(offset, structs.replace(event, uncertain=False))


class ForgetsPlans(OpenWindows):
    """Gives an order no sessions to find its thresholds by."""

    def plans(self, until: int) -> list[SessionPlan]:
        return []


class ReportsProgressTooSoon(Server):
    """Reports progress up to the end offsets when the records were only taken."""

    def done_before(self, end: int) -> bool:
        return True

    def step(self) -> None:
        if self.probe is not None and self.to_journal:
            self.to_journal.appendleft(self._progress(self.probe[0]))
            self.probe = None
        super().step()


class MarksNothing(Server):
    """Takes its own plan for what the user saw."""

    def is_marked(self, session: int, uncertain: bool) -> bool:
        return False


class TrustsTheTable(Server):
    """Marks a session only when it plans it, and takes a plan in the table for certain."""

    def is_marked(self, session: int, uncertain: bool) -> bool:
        return uncertain and session not in self.table


class CommitsFirst(Server):
    """Commits its offset before its writes are durable."""

    def _take(self, start: int, records: list[tuple[Any, ...]]) -> None:
        super()._take(start, records)
        if self.owner:
            self.position = self.world.committed[self.partition] = self.taken


RECORDED: dict[str, Any] = {"live": False}
LIVE: dict[str, Any] = {"live": True}
STORMY: dict[str, Any] = {"live": True, "stormy": True}


@pytest.mark.parametrize(
    ("mutant", "world"),
    [
        (ForgetsOpenWindows, RECORDED),
        (LeavesDueWindowsOpen, RECORDED),
        (ObeysTwice, LIVE),
        (ForgetsProgress, RECORDED),
        (Hurries, RECORDED),
        (DoesNotWaitForPartitions, RECORDED),
        (ResumesTooLate, RECORDED),
        (BelievesEveryTime, RECORDED),
        (BelievesEveryTime, LIVE),
        (FoldsLateRecords, RECORDED),
        (DropsFeedbackEarly, RECORDED),
        (KeepsFirstSlate, LIVE),
        (IgnoresTheMark, LIVE),
        (ForgetsPlans, LIVE),
        (ReportsProgressTooSoon, RECORDED),
        (CommitsFirst, RECORDED),
        (MarksNothing, STORMY),
        (TrustsTheTable, STORMY),
    ],
)
def test_the_model_notices_a_system_that(mutant: type, world: dict[str, Any]) -> None:
    overridden = [name for name in vars(mutant) if not name.startswith("__")]
    assert all(hasattr(mutant.__base__, name) for name in overridden), "a mutant that changes nothing"
    base = mutant.__base__
    parts = {name: mutant for name, kind in (("learner", Learner), ("server", Server)) if base is kind}
    replaced: Any = nullcontext() if parts else patch.object(learner_module, base.__name__, mutant)
    with replaced, pytest.raises(ViolationError):
        run(range(1000), **world, **parts)
