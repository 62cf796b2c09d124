"""One session of a log: planned again under the version that served it, answered, and learned from.

Rules that hold in this file:

- Of several arrivals with one id, the last that has a decision or a fact is meant.
- The slate is planned again by the planner that serves. It must be the recorded one: differences are kept, never passed
  over. A session of an imported log was planned by another system, and has no plan.
- A window is closed by the first version whose `window_end` is not before the end of the window. Facts that stand in
  the journal behind the record that made this version came too late for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from worker.errors import InputError
from worker.logs.findings import Findings, Stage, silent
from worker.logs.ordered import FACT, OPENED, Entry, OrderedLog, read_log
from worker.logs.traces import SessionTrace, TraceReader
from worker.logs.versions import RecordedVersion
from worker.replay.verify import decision_difference, opened_difference
from worker.stream.chance import journaled
from worker.stream.contexts import pack_context
from worker.stream.decoding import Rejected, decode_journal
from worker.stream.events import Arrival, FeedbackFact, Mode, Opened
from worker.stream.parameters import Parameters
from worker.stream.session import Reaction, answered, objection
from worker.stream.slates import Slate
from worker.stream.topology import Topics


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What was learned from a session: the version whose fold has it, or why there is none.

    window_end : end of the window of its arrival
    displays : displays that count; the last one may have no answer
    late : records of its feedback that came after the fold
    """

    window_end: int
    version: int | None = None
    reason: str | None = None
    displays: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSession:
    """A session, as it was served and as it is planned again.

    arrival : with the context in the columns of the version
    given : the context as the client sent it, if it is an object
    slate, modes : as recorded; modes of positions that were never decided are planned
    planned : the slate planned again; None for an imported session
    differences : records that do not agree with `planned`
    reactions : the answer that counts at each position, by position
    clicked : the clicked position, 0 without a click
    others : other sessions of this id in the log
    """

    arrival: Arrival
    given: Mapping[str, Any] | None
    parameters: Parameters
    slate: tuple[str, ...]
    modes: tuple[Mode, ...]
    planned: Slate | None
    differences: tuple[str, ...]
    reactions: Mapping[int, Reaction]
    clicked: int
    learning: Learning
    others: int


def find_session(path: str, session_id: str, *, topics: Topics, name: str, stage: Stage = silent) -> ServedSession:
    """Return a session of a log, which messages call `name`; raise `InputError` if it cannot be explained."""
    with read_log(path, Findings(), topics=topics, session=session_id, stage=stage) as log:
        reader, journal = TraceReader(log), Journal(session_id)
        traces = reader.read(journal.noted(log.entries("reading the session")))
        mine = [trace for trace in traces if trace.session_id == session_id]
        served = [trace for trace in mine if trace.decisions or trace.openings]
        if not served:
            found = "has an arrival, but no decision," if mine else "is not"
            raise InputError(f"{name}: session {session_id} {found} in it; ids are compared to the letter")
        if not log.versions.known:
            raise InputError(f"{name} has no versions ({topics.parameters}): `adcascade record` takes all topics")
        return _explained(log, reader, served[-1], journal, others=len(served) - 1, name=name)


class Journal:
    """The facts about a session, with their offsets in the journal."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self.facts: list[tuple[int, Opened | FeedbackFact]] = []

    def noted(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield the entries of a log, and note the facts among them."""
        for entry in entries:
            if entry.kind in (OPENED, FACT):
                with suppress(Rejected):
                    event = decode_journal(entry.value)
                    if isinstance(event, Opened | FeedbackFact) and event.session_id == self._session_id:
                        self.facts.append((entry.offset, event))
            yield entry

    def openings(self, arrived_at: int) -> list[tuple[int, Opened]]:
        """Return the facts that opened the session of this time."""
        return [(at, one) for at, one in self.facts if isinstance(one, Opened) and one.arrived_at == arrived_at]


def _explained(
    log: OrderedLog, reader: TraceReader, trace: SessionTrace, journal: Journal, *, others: int, name: str
) -> ServedSession:
    decisions = [decision for _, decision in trace.decisions]
    openings = [opened for _, opened in trace.openings]
    version = (decisions or openings)[-1].parameters_version
    if version not in log.versions.known:
        known = ", ".join(map(str, sorted(log.versions.known)[-8:]))
        raise InputError(f"{name} lacks version {version}, which served session {trace.session_id}; it has {known}")
    planner = log.versions.planner(version)
    parameters = planner.parameters
    arrivals = [one for one in reader.candidates(trace, version) if len(one.context) == parameters.settings.dim]
    modes = {decision.mode for decision in decisions}
    if not arrivals and "imported" not in modes:
        raise InputError(f"{name}: the arrival of session {trace.session_id} is not in it")
    slates = [] if "imported" in modes else planner.plan(arrivals, [pack_context(one.context) for one in arrivals])
    pairs = list(zip(arrivals, slates, strict=False))
    if "fallback" in modes:  # perhaps because there was no room, for any plan
        pairs += [(arrival, planner.fallback(arrival)) for arrival in arrivals]
    found = [(_differences(trace, slate), arrival, slate) for arrival, slate in pairs]
    differences, arrival, planned = min(found, key=lambda one: len(one[0])) if found else ((), None, None)
    if arrival is None:
        arrival = Arrival(session_id=trace.session_id, occurred_at=trace.arrived_at, context=())
    first = next((one for one in decisions if one.position == 1), None)
    opened = next((one for one in openings if one.parameters_version == version), None)
    slate = opened.slate if opened else first.slate if first else planned.arms if planned else ()
    by_position: dict[int, Mode] = {decision.position: decision.mode for decision in decisions}
    another: Mode = "imported"
    rest = planned.modes if planned else (another,) * len(slate)
    last = trace.arrived_at + parameters.settings.session_timeout
    shown, clicked = answered(slate, trace.feedback, whole_slate=False, first=trace.arrived_at, last=last)
    return ServedSession(
        arrival=arrival,
        given=_given(trace),
        parameters=parameters,
        slate=slate,
        modes=opened.modes if opened else tuple(by_position.get(h, mode) for h, mode in enumerate(rest, start=1)),
        planned=planned,
        differences=differences,
        reactions={
            one.position: one
            for one in sorted(trace.feedback, key=lambda one: (one.clicked, -one.occurred_at))
            if objection(slate, trace.arrived_at, last, one) is None
        },
        clicked=shown if clicked else 0,
        learning=_learning(log, trace, journal, parameters, modes, slate),
        others=others,
    )


def _differences(trace: SessionTrace, slate: Slate) -> tuple[str, ...]:
    """Return how the records of a session differ from a slate, one line each."""
    found = [(f"decision for position {one.position}", decision_difference(one, slate)) for _, one in trace.decisions]
    found += [("session in the journal", opened_difference(one, slate)) for _, one in trace.openings]
    return tuple(
        f"{what}: {difference[0]} is {difference[2]!r}, planned again {difference[1]!r}"
        for what, difference in found
        if difference is not None
    )


def _given(trace: SessionTrace) -> Mapping[str, Any] | None:
    for value in trace.values:
        context = msgspec.json.decode(value or b"{}").get("context")
        if isinstance(context, dict):
            return context
    return None


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _learning(
    log: OrderedLog,
    trace: SessionTrace,
    journal: Journal,
    parameters: Parameters,
    modes: set[Mode],
    slate: tuple[str, ...],
) -> Learning:
    settings, arrived_at = parameters.settings, trace.arrived_at
    end = arrived_at - arrived_at % settings.window + settings.window
    openings = journal.openings(arrived_at)
    share = journaled(settings.salt, trace.session_id, parameters.shares.of_slate(_modes(trace, openings)))
    closing = _closing(log, end)
    reason = None
    certain = not any(one.uncertain for _, one in openings)
    if share == 0 and certain:
        reason = "not journaled: beyond the budget of learning (learn_at_most) it is counted only"
    elif not openings and "fallback" in modes:
        reason = "not remembered: there was no room for the session, or it came too late"
    elif not openings:
        reason = "the journal here does not have it"
    elif not certain or len({(one.slate, one.modes) for _, one in openings}) > 1:
        reason = "uncertain: after a takeover it was planned again, so the user may have seen another slate"
    elif closing is None:
        reason = "its window is not closed yet"
    elif min(at for at, _ in openings) > closing.records[0].journal_offset:
        reason = f"late: its window was closed by version {closing.version} before"
    else:
        reason = _unfolded(log, closing, arrived_at)
    if reason is not None or closing is None:
        return Learning(window_end=end, reason=reason)
    made_at, last = closing.records[0].journal_offset, arrived_at + settings.session_timeout
    mine = [
        (at, one)
        for at, one in journal.facts
        if isinstance(one, FeedbackFact) and objection(slate, arrived_at, last, one) is None
    ]
    in_time = [one for at, one in mine if at <= made_at]
    count, clicked = answered(slate, in_time, whole_slate=settings.unanswered == "passed", first=arrived_at, last=last)
    displays = count if clicked else min(count + 1, len(slate))
    late = len({one for at, one in mine if at > made_at} - set(in_time))
    return Learning(window_end=end, version=closing.version, displays=displays, late=late)


def _modes(trace: SessionTrace, openings: list[tuple[int, Opened]]) -> tuple[Mode, ...]:
    return openings[0][1].modes if openings else tuple(decision.mode for _, decision in trace.decisions)


def _closing(log: OrderedLog, end: int) -> RecordedVersion | None:
    """Return the first version that was made when the window that ends at `end` was closed, or after it."""
    versions = log.versions.known
    return next((versions[one] for one in sorted(versions) if (versions[one].window_end or 0) >= end), None)


def _unfolded(log: OrderedLog, closing: RecordedVersion, arrived_at: int) -> str | None:
    """Return why no version has learned from a window that is closed; None if one has."""
    for episode in log.episodes():
        if episode.window_start <= arrived_at < episode.window_end:
            if episode.frozen:
                return "learning was frozen when its window was closed"
            if episode.rejected:
                return f"the version of its window was rejected: {episode.rejected}"
    before = log.versions.known.get(closing.version - 1)
    if before is None or before.folds < closing.folds:
        return None
    return f"version {closing.version} keeps it until enough sessions are there to learn from"
