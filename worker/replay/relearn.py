"""Learning again from arrivals and clicks alone, with the slates pinned that users were shown.

Rules that hold in this file:

- A journal is made from arrivals and clicks in the order of their own times and folded as ever. What it tells that
  arrivals and clicks cannot (changes of arms, commands, how far time had come) is taken from the recorded journal, as
  far as there is one: an order acts after the windows that were closed when it was given.
- The slate of a session is what the log says it was: by the journal's `opened`, else by the decision for its first
  position. Where none is recorded, it is planned by the versions learned here.
- Time goes up to the watermark of the recorded progress (the highest progress, if not every partition has reported);
  without any, to the end of the last window. Event time is never late: records that came too late to be folded then
  are folded now, which is a difference to the recorded versions.
- Dead letters stay dead: what the log names as one is left out, and so is, unless the journal says that it was opened,
  what the usual limits refuse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from worker.errors import InputError
from worker.logs.findings import Findings, Mismatch
from worker.logs.format import NO_TIMESTAMP
from worker.logs.ordered import ARRIVAL, CLICK, DECISION, OPENED, Entry, ReplayLog
from worker.replay.decisions import UNLIMITED
from worker.replay.versions import Status, VersionResult, difference, hash_differs, is_lost
from worker.stream.codec import (
    Limits,
    Rejected,
    decode_arrival,
    decode_decision,
    decode_feedback,
    decode_journal,
    encode_feedback_fact,
    encode_journal,
    encode_opened,
    encode_progress,
)
from worker.stream.contexts import pack_context
from worker.stream.events import ArmChange, Arrival, Command, Decision, Mode, Opened, Progress
from worker.stream.learner import Learner
from worker.stream.parameters import Arm, LearningSettings, Parameters
from worker.stream.versions import KEPT, Versions

CHUNK: Final = 4096  # facts handed to the learner at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What learning starts from.

    `loaded` ends with the version to go on from, after those that a rollback may ask for; none to start from nothing.
    `made_at` is the offset in the recorded journal where that version was made: orders up to there are in it.
    `compared` says whether the recorded versions should come out.
    """

    settings: LearningSettings
    arms: tuple[Arm, ...]
    loaded: Sequence[Parameters] = ()
    made_at: int = -1
    compared: bool = False


@dataclass(slots=True)
class Relearned:
    """What came out."""

    decisions: int = 0
    unverified: int = 0  # decisions whose version is not in the log
    sessions: int = 0
    clicks: int = 0
    revenue: float = 0.0
    pinned: int = 0  # arrivals whose slate was recorded
    planned: int = 0
    lost: int | None = None  # the version after which a rollback could not be followed
    versions: list[VersionResult] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timetable:
    """When orders were given (watermark, journal offset), and how far the recorded journal came, if it tells."""

    orders: Sequence[tuple[int, int, ArmChange | Command]]
    end: int | None


def read_timetable(log: ReplayLog) -> Timetable:
    """Read from the recorded journal what arrivals and clicks do not tell."""
    progress: dict[int, int] = {}
    orders: list[tuple[int, int, ArmChange | Command]] = []
    for offset, value in log.journal_records():
        try:
            event = decode_journal(value)
        except Rejected:
            continue
        if isinstance(event, Progress):
            for partition in range(len(progress), event.partitions):
                progress[partition] = 0
            progress[event.partition] = max(progress[event.partition], event.time)
        elif isinstance(event, ArmChange | Command):
            orders.append((min(progress.values(), default=0), offset, event))
    end = min(progress.values(), default=0) or max(progress.values(), default=0)
    return Timetable(orders, end or None)


def find_origin(log: ReplayLog, *, changes: dict[str, object], arms: Sequence[Arm] | None) -> Origin:
    """Return what to start from: the oldest version of the log, with `changes` to its settings, or these alone.

    Learning starts from nothing if version 0 is in the log, or if arms are given. Otherwise it goes on from the oldest
    version whose later windows the log holds whole.
    """
    oldest = log.versions.oldest
    if oldest is None:
        if "dim" not in changes or arms is None:
            missing = [name for name, lacks in (("--dim", "dim" not in changes), ("--catalog", arms is None)) if lacks]
            raise InputError(
                f"the log has no parameters to learn by: give {' and '.join(missing)} "
                "(and --horizon and other settings that are not the usual ones)"
            )
        return Origin(settings=_settings(None, changes), arms=tuple(arms))
    settings = _settings(oldest.settings, changes)
    same = settings == oldest.settings
    if oldest.version == 0 or arms is not None:
        first = log.versions.read(oldest.version)
        given = first.arms if arms is None else tuple(arms)
        compared = same and oldest.version == 0 and given == first.arms
        return Origin(settings=settings, arms=given, compared=compared)
    base = _first_whole(log)
    loaded = log.versions.read(base)
    if settings.dim != loaded.settings.dim:
        raise InputError(f"--dim {settings.dim}: the log begins with version {base} of {loaded.settings.dim}")
    # The journal that is made here begins at 0, and has one partition.
    reached = {0: min(loaded.progress.values())} if loaded.progress else {}
    history = [replace(loaded, journal_offset=-1, resume_offset=0, progress=reached)]
    while len(history) < KEPT and (before := history[0].version - 1) in log.versions.known:
        history.insert(0, log.versions.read(before))
    return Origin(settings=settings, arms=loaded.arms, loaded=history, made_at=loaded.journal_offset, compared=same)


def _settings(base: LearningSettings | None, changes: dict[str, object]) -> LearningSettings:
    return LearningSettings(**changes) if base is None else replace(base, **changes)  # type: ignore[arg-type]


def _first_whole(log: ReplayLog) -> int:
    first = log.first_time or 0
    for number in sorted(log.versions.known):
        if (log.versions.known[number].window_end or 0) >= first:
            return number
    return max(log.versions.known)


class Relearner:
    """Takes the traffic of a log in the order of time and learns from it."""

    def __init__(
        self, log: ReplayLog, origin: Origin, timetable: Timetable, findings: Findings, *, tolerance: float = 0.0
    ) -> None:
        self._tolerance = tolerance
        self.result = Relearned()
        self._log = log
        self._compared = origin.compared
        self._findings = findings
        known = log.versions.known
        made_under = {number: version.settings for number, version in known.items()} if origin.compared else {}
        self._learner = Learner(origin.settings, origin.arms, origin.loaded, made_under=made_under)
        self._versions = Versions(self._learner.current)
        self._note(self._learner.begin().versions)
        self._orders = deque((at, order) for at, offset, order in timetable.orders if offset > origin.made_at)
        self._end = timetable.end
        self._told = -1  # progress so far
        self._facts: list[tuple[int, bytes]] = []
        self._offset = 0
        self._unplanned: list[Arrival] = []
        self._moment: list[Entry] = []  # the records of one time
        self._taken: set[str] = set()  # ids of recent sessions
        self._leaving: deque[Arrival] = deque()

    def take(self, entry: Entry) -> None:
        """Take the next record."""
        if self._moment and self._moment[0].time != entry.time:
            self._take_moment()
        self._moment.append(entry)

    def finish(self) -> Relearned:
        """Let time run to its end; return what came out."""
        self._take_moment()
        end = self._end
        if end is None:
            settings = self._learner.settings
            end = self._log.last_time + settings.window + settings.session_timeout + settings.lateness
        self._go_to(end)
        while self._orders:  # given at a time that the rest of the log did not reach
            self._obey()
        return self.result

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_moment(self) -> None:
        """Take all records of one time: arrivals, and what the log says their slates were."""
        moment, self._moment = self._moment, []
        if not moment:
            return
        self._go_to(moment[0].time)
        over = self._end is not None and moment[0].time > self._end  # its windows stay open
        arrivals: dict[Arrival, Entry] = {}
        slates: dict[str, list[Opened]] = {}
        decided: dict[str, Decision] = {}
        for entry in moment:
            if entry.kind == DECISION:
                self._hear_decision(entry, decided)
            elif over:
                continue
            elif entry.kind == ARRIVAL:
                arrival = self._arrival(entry, UNLIMITED)
                if arrival is not None:
                    arrivals.setdefault(arrival, entry)
            elif entry.kind == OPENED:
                opened = _opened(entry)
                if opened is not None and opened not in slates.setdefault(opened.session_id, []):
                    slates[opened.session_id].append(opened)
            elif entry.kind == CLICK:
                self._hear_click(entry)
        for arrival, entry in arrivals.items():
            known = slates.get(arrival.session_id, [])
            fitting = [o for o in known if o.context == arrival.context and o.exclude == arrival.exclude]
            if fitting or self._arrival(entry, _limits(entry)) is not None:
                self._open(arrival, fitting, decided.get(arrival.session_id))

    def _arrival(self, entry: Entry, limits: Limits) -> Arrival | None:
        try:
            return decode_arrival(entry.value, limits=limits, dim=self._learner.settings.dim, timestamp=entry.timestamp)
        except Rejected:
            return None

    def _hear_decision(self, entry: Entry, decided: dict[str, Decision]) -> None:
        self.result.decisions += 1
        try:
            decision = decode_decision(entry.value)
        except Rejected:
            return
        if decision.parameters_version not in self._log.versions.known:
            self.result.unverified += 1
        if decision.position == 1:
            decided.setdefault(decision.session_id, decision)

    def _hear_click(self, entry: Entry) -> None:
        horizon = self._learner.settings.horizon
        try:
            feedback = decode_feedback(entry.value, limits=_limits(entry), horizon=horizon, timestamp=entry.timestamp)
        except Rejected:
            return
        self._fact(encode_feedback_fact(feedback))

    # ── slates ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, arrival: Arrival, fitting: Sequence[Opened], decided: Decision | None) -> None:
        if not self._is_new(arrival) and not fitting:
            return
        for opened in fitting:
            self._pin(arrival, opened.slate, opened.modes, opened.parameters_version)
        if not fitting and decided is not None:
            modes = (decided.mode,) * len(decided.slate)
            self._pin(arrival, decided.slate, modes, decided.parameters_version)
        if fitting or decided is not None:
            self.result.pinned += 1
        else:
            self.result.planned += 1
            self._unplanned.append(arrival)
            if len(self._unplanned) >= CHUNK:
                self._plan()

    def _is_new(self, arrival: Arrival) -> bool:
        """Say whether no open session has this id: serving refuses a second one, and the same one changes nothing."""
        taken, leaving = self._taken, self._leaving
        settings = self._learner.settings
        kept = settings.session_timeout + settings.lateness
        while leaving and leaving[0].occurred_at + kept < arrival.occurred_at:
            taken.discard(leaving.popleft().session_id)
        if arrival.session_id in taken:
            return False
        taken.add(arrival.session_id)
        leaving.append(arrival)
        return True

    def _pin(self, arrival: Arrival, slate: tuple[str, ...], modes: tuple[Mode, ...], version: int) -> None:
        self._fact(
            encode_opened(
                Opened(
                    session_id=arrival.session_id,
                    arrived_at=arrival.occurred_at,
                    context=arrival.context,
                    slate=slate,
                    modes=modes,
                    exclude=arrival.exclude,
                    parameters_version=version,
                )
            )
        )

    def _plan(self) -> None:
        """Plan the sessions without a recorded slate, before any later version is known."""
        arrivals, self._unplanned = self._unplanned, []
        groups: dict[int, list[Arrival]] = {}
        for arrival in arrivals:
            groups.setdefault(self._versions.at(arrival.occurred_at).parameters.version, []).append(arrival)
        for version, group in groups.items():
            planner = self._versions.at(group[0].occurred_at)
            slates = planner.plan(group, [pack_context(arrival.context) for arrival in group])
            for arrival, slate in zip(group, slates, strict=True):
                self._pin(arrival, slate.arms, slate.modes, version)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _go_to(self, time: int) -> None:
        """Let time pass up to `time`: close the windows that fall due, and obey the orders given meanwhile."""
        if self._end is not None:
            time = min(time, self._end)
        while self._orders and self._orders[0][0] < time:
            self._progress(self._orders[0][0])
            self._obey()
        settings = self._learner.settings
        wait = settings.session_timeout + settings.lateness
        due = (time - wait) // settings.window * settings.window + wait
        if due > self._told:
            self._progress(max(due, 0))

    def _obey(self) -> None:
        self._learn()  # so that what comes of the order is known apart
        _, order = self._orders.popleft()
        self._fact(encode_journal(order))
        self._learn()

    def _progress(self, time: int) -> None:
        self._plan()
        if time > self._told:
            self._told = time
            self._fact(encode_progress(Progress(partition=0, partitions=1, time=time)))
        self._learn()

    def _fact(self, value: bytes) -> None:
        self._facts.append((self._offset, value))
        self._offset += 1
        if len(self._facts) >= CHUNK:
            self._learn()

    def _learn(self) -> None:
        facts, self._facts = self._facts, []
        outcome = self._learner.handle(facts)
        if is_lost(self._learner, outcome):
            self.result.lost = self._learner.current.version
            self._compared = False
        for episode in outcome.episodes:
            self.result.sessions += episode.sessions
            self.result.clicks += episode.clicks
            self.result.revenue += episode.reward
        self._note(outcome.versions)

    def _note(self, versions: Sequence[Parameters]) -> None:
        for made in versions:
            self._versions.learn(made)
            if self.result.versions and self.result.versions[-1].version == made.version:
                continue  # published again from a newer position
            status: Status = "folded" if self._is_as_recorded(made) else "differs"
            self.result.versions.append(VersionResult(version=made.version, sha256=made.sha256, status=status))

    def _is_as_recorded(self, made: Parameters) -> bool:
        recorded = self._log.versions.known.get(made.version)
        if not self._compared or recorded is None or recorded.sha256 == made.sha256:
            return True
        name, by = difference(made, self._log.versions.read(made.version))
        if by <= self._tolerance:
            return True
        detail = hash_differs(name, by)
        self._findings.add(
            Mismatch(kind="version", name=detail, expected=made.sha256, found=recorded.sha256, version=made.version)
        )
        return False


def _limits(entry: Entry) -> Limits:
    """Return the usual limits; without a timestamp nothing can be said to lie after it."""
    return Limits() if entry.timestamp != NO_TIMESTAMP else replace(Limits(), max_ahead_ms=UNLIMITED.max_ahead_ms)


def _opened(entry: Entry) -> Opened | None:
    try:
        event = decode_journal(entry.value)
    except Rejected:
        return None
    return event if isinstance(event, Opened) else None
