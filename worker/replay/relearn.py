"""Repeat learning from arrivals and clicks alone, with the slates that users were shown.

Rules that hold in this file:

- A new journal is made from arrivals and clicks, session by session in the order of arrival, and folded by the learner.
  Arrivals and clicks lack three things: changes of arms, commands, and progress. These come from the recorded journal,
  if there is one. An order takes effect after the windows that were closed when it was given.
- The slate of a session is the recorded one: that of `opened` in the journal, else that of the decision for its first
  position. Without a record, the slate is planned by the versions learned here. A session that the journal lacks and
  that was answered in mode `fallback` was not remembered, because the table was full. It is left out.
- Time runs up to the watermark of the recorded progress (the highest progress, if some partition never reported any);
  without progress, to the end of the last window. No record is late in event time: records that were too late for
  their window are folded now, and such versions differ from the recorded ones.
- Dead letters stay dead: records that the log has as dead letters are left out. So are records beyond the default
  limits, unless the journal has opened them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import msgspec

from worker.logs.format import NO_TIMESTAMP
from worker.logs.ordered import Entry, OrderedLog, read_log
from worker.logs.traces import UNLIMITED, SessionTrace, TraceReader, opened_by, opening
from worker.replay.report import ReplayReport, Status, VersionResult
from worker.replay.versions import LOST, Origin, compare, find_origin, is_lost, read_timetable
from worker.stream.contexts import pack_context
from worker.stream.decoding import Limits, Rejected, decode_arrival
from worker.stream.events import Arrival, Decision, Opened, Progress, encode_event, fact_of
from worker.stream.feature_changes import encoder_of
from worker.stream.features import ContextEncoder
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm
from worker.stream.slates import SlatePlanner
from worker.stream.topology import Topics
from worker.stream.versions import KEPT, Versions

CHUNK: Final = 4096  # facts per call of the learner


def relearn(
    path: str,
    *,
    topics: Topics | None = None,
    skip_bad: bool | None = None,
    tolerance: float = 0.0,
    changes: Mapping[str, Any] | None = None,
    arms: Sequence[Arm] | None = None,
) -> ReplayReport:
    """Learn again from the arrivals and clicks of a log.

    `changes` replace recorded settings, or the defaults if there are none; `arms` replace the first recorded arms.
    """
    report = ReplayReport(mode="relearn")
    with read_log(path, report.findings, topics=topics, skip_bad=skip_bad) as log:
        origin = find_origin(log, changes=changes or {}, arms=arms)
        Relearner(log, origin, report, tolerance=tolerance).run()
        return report.describe(log)


class Relearner:
    """Learn from the traffic of a log, in the order of time."""

    def __init__(self, log: OrderedLog, origin: Origin, report: ReplayReport, *, tolerance: float) -> None:
        self._tolerance = tolerance
        self._report = report
        self._log = log
        self._compared = origin.compared
        self._learner = origin.learner
        self._versions = Versions(self._learner.current)
        self._encoder = lru_cache(KEPT)(self._find_encoder)
        orders, self._end = read_timetable(log, self._learner.settings)
        self._add_versions(self._learner.begin().versions)
        self._orders = deque((at, order) for at, offset, order in orders if offset > origin.made_at)
        self._progressed = -1  # time of the last progress
        self._facts: list[tuple[int, bytes]] = []
        self._offset = 0
        self._unplanned: list[Arrival] = []
        self._has_openings = False  # among the sessions so far
        self._ids: set[str] = set()  # ids of open sessions
        self._expiring: deque[Arrival] = deque()  # the same by arrival

    def run(self) -> None:
        """Learn from the whole log, and advance time to its end."""
        reader = TraceReader(self._log, timeout=self._learner.settings.session_timeout)
        for trace in reader.read(self._log.entries("learning again")):
            self._handle(trace)
        end = self._end
        if end is None:
            settings = self._learner.settings
            end = self._log.last_time + settings.window + settings.grace
        self._advance_to(end)
        if self._orders:  # given at a time after the rest of the log
            self._progress(end)
        while self._orders:
            self._apply_order()
        self._report.learned = self._learner.current

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, trace: SessionTrace) -> None:
        """Handle the arrivals of a session with its recorded slates, and its clicks."""
        self._advance_to(trace.arrived_at)
        if self._end is not None and trace.arrived_at > self._end:
            return  # the windows of this time stay open
        self._has_openings |= bool(trace.openings)
        recorded = list(dict.fromkeys(opened for _, opened in trace.openings))
        arrivals: dict[Any, tuple[Arrival, Entry]] = {}
        for entry in trace.arrivals:
            with suppress(Rejected):
                arrival = self._arrival(entry, UNLIMITED)
                # Serving recognises a session without its user.
                arrivals.setdefault((arrival.context, arrival.exclude), (arrival, entry))
        for arrival, entry in arrivals.values():
            fitting = [opened for opened in recorded if self._fits(opened, arrival, entry)]
            with suppress(Rejected):
                if not fitting:
                    self._arrival(entry, _limits(entry))  # not beyond the default limits
                self._open(arrival, fitting, trace.first_decision)
        for entry, feedback in trace.clicks:
            if feedback.occurred_at <= entry.timestamp + _limits(entry).max_ahead:
                self._fact(encode_event(fact_of(feedback)))

    def _arrival(self, entry: Entry, limits: Limits) -> Arrival:
        settings = self._learner.current.settings
        encoder = self._encoder(self._versions.at(entry.time).parameters.version)
        return decode_arrival(entry.value, settings, limits=limits, timestamp=entry.timestamp, encoder=encoder)

    def _find_encoder(self, version: int) -> ContextEncoder | None:
        """Return the encoder of a version made here; names that only recorded versions have are ignored."""
        made = next(one for one in self._versions.history if one.version == version)
        return encoder_of(made, [*self._versions.history, *self._log.versions.known.values()])

    def _fits(self, opened: Opened, arrival: Arrival, entry: Entry) -> bool:
        """Return whether the journal opened a session by this arrival, under the version that served it."""
        recorded, version = self._log.versions, opened.parameters_version
        if recorded.since and version in recorded.known and opened.context != arrival.context:
            settings, encoder = recorded.known[version].settings, recorded.encoder(version)
            arrival = decode_arrival(entry.value, settings, limits=UNLIMITED, timestamp=0, encoder=encoder)
        return opened.context == arrival.context and opened.exclude == arrival.exclude

    # ── slates ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, arrival: Arrival, fitting: Sequence[Opened], decided: Decision | None) -> None:
        if not self._is_new(arrival) and not fitting:
            return
        if not fitting and self._has_openings and decided is not None and decided.mode == "fallback":
            return
        for opened in fitting:
            if self._log.versions.since and not self._compared:
                # Columns and numbers of versions are those of the learner here.
                made = self._versions.at(arrival.occurred_at).parameters.version
                opened = msgspec.structs.replace(opened, context=arrival.context, parameters_version=made)
            self._fact(encode_event(opened))
        if not fitting and decided is not None:
            self._fact(encode_event(opened_by(arrival, decided)))
        if fitting or decided is not None:
            self._report.slates_recorded += 1
        else:
            self._report.slates_planned += 1
            self._unplanned.append(arrival)
            if len(self._unplanned) >= CHUNK:
                self._plan()

    def _is_new(self, arrival: Arrival) -> bool:
        """Return whether no open session has this id; serving refuses a second one and ignores a repeated one."""
        ids, expiring = self._ids, self._expiring
        kept = self._learner.settings.grace
        while expiring and expiring[0].occurred_at + kept < arrival.occurred_at:
            ids.discard(expiring.popleft().session_id)
        if arrival.session_id in ids:
            return False
        ids.add(arrival.session_id)
        expiring.append(arrival)
        return True

    def _plan(self) -> None:
        """Plan the sessions without a recorded slate, before a later version is learned."""
        arrivals, self._unplanned = self._unplanned, []
        groups: dict[SlatePlanner, list[Arrival]] = {}
        for arrival in arrivals:
            groups.setdefault(self._versions.at(arrival.occurred_at), []).append(arrival)
        for planner, group in groups.items():
            slates = planner.plan(group, [pack_context(arrival.context) for arrival in group])
            for arrival, slate in zip(group, slates, strict=True):
                opened = opening(arrival, slate.arms, slate.modes, planner.parameters.version)
                self._fact(encode_event(opened))

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _advance_to(self, time: int) -> None:
        """Advance time: close the windows that are due, and apply the orders given meanwhile."""
        if self._end is not None:
            time = min(time, self._end)
        while self._orders and self._orders[0][0] < time:
            self._progress(self._orders[0][0])
            self._apply_order()
        settings = self._learner.settings
        due = (time - settings.grace) // settings.window * settings.window + settings.grace
        if due > self._progressed:
            self._progress(max(due, 0))

    def _apply_order(self) -> None:
        self._learn()  # so that the result of the order is separate
        _, order = self._orders.popleft()
        self._fact(encode_event(order))
        self._learn()

    def _progress(self, time: int) -> None:
        self._plan()
        if time > self._progressed:
            self._progressed = time
            self._fact(encode_event(Progress(partition=0, partitions=1, time=time)))
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
            self._report.stop(self._learner.current, LOST)
            self._compared = False
        for episode in outcome.episodes:
            self._report.sessions += episode.sessions
            self._report.clicks += episode.clicks
            self._report.revenue += episode.reward
        self._add_versions(outcome.versions)

    def _add_versions(self, versions: Sequence[Parameters]) -> None:
        for made in versions:
            self._versions.learn(made)
            if self._report.versions and self._report.versions[-1].version == made.version:
                continue  # published again from a newer position
            status = self._compared_with_record(made)
            self._report.versions.append(VersionResult(version=made.version, sha256=made.sha256, status=status))

    def _compared_with_record(self, made: Parameters) -> Status:
        recorded = self._log.versions.known.get(made.version)
        if recorded is None or recorded.sha256 == made.sha256:
            return "folded"
        if not self._compared or self._report.stopped_by is not None:
            return "folded"
        return compare(made, self._log.versions.read(made.version), self._report, self._tolerance)


def _limits(entry: Entry) -> Limits:
    """Return the default limits; without a timestamp, no time is too far ahead."""
    return Limits() if entry.timestamp != NO_TIMESTAMP else replace(Limits(), max_ahead=UNLIMITED.max_ahead)
