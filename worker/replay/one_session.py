"""One session of a log: planned again under the version that served it, answered, and learned from.

Rules that hold in this file:

- Of several sessions with one id, the last is meant.
- The slate is planned again by the planner that serves. It must be the recorded one: differences are kept, never passed
  over. A session of an imported log was planned by another system, and has no plan.
- A window is closed by the first version whose `window_end` is not before the end of the window. Facts that stand in
  the journal behind the record that made this version came too late for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from worker.errors import InputError
from worker.logs.ordered import OrderedLog
from worker.logs.traces import SessionTrace, TraceReader
from worker.logs.versions import RecordedVersion
from worker.replay.verify import Replanned, difference, planned_again
from worker.stream.decoding import decode_episode
from worker.stream.events import Arrival, Mode
from worker.stream.parameters import Parameters
from worker.stream.session import Reaction, answered, objection
from worker.stream.slates import Slate


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What was learned from a session: the version whose fold has it, or the reason why none has.

    window_end : end of the window of its arrival
    displays : displays that count; the last one may have no answer
    late : answers that came after the fold
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
    slate : as recorded
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
    planned: Slate | None
    differences: tuple[str, ...]
    reactions: Mapping[int, Reaction]
    clicked: int
    learning: Learning
    others: int


def find_session(log: OrderedLog, session_id: str, name: str) -> ServedSession:
    """Return a session of a log, which messages call `name`; raise `InputError` if it cannot be explained."""
    reader, versions = TraceReader(log), log.versions
    mine = [trace for trace in reader.read(log.entries("reading")) if trace.session_id == session_id]
    traces = [trace for trace in mine if trace.decisions or trace.openings]
    if not traces:
        found = "has an arrival there, but no decision" if mine else "is not there (ids are compared to the letter)"
        raise InputError(f"{name}: session {session_id} {found}")
    if not versions.known:
        raise InputError(f"{name} has no versions of this release (topic parameters): `adcascade record` has all")
    trace = traces[-1]
    records = trace.slates
    version = records[-1].parameters_version
    if version not in versions.known:
        known = ", ".join(map(str, sorted(versions.known)[-8:]))
        raise InputError(f"{name} lacks version {version}, which served session {session_id}; it has {known}")
    is_imported = any(decision.mode == "imported" for _, decision in trace.decisions)
    plans = [] if is_imported else planned_again(versions, reader, [trace]).get((trace, version), [])
    if not plans and not is_imported:
        raise InputError(f"{name}: the arrival of session {session_id} is not there, nor is it in the journal")
    # Of several plans, the one that fits best. An imported session was planned by another system, and has none.
    best = min(((plan, _differences(trace, plan)) for plan in plans), key=lambda one: len(one[1]), default=None)
    parameters, settings = versions.planner(version).parameters, versions.known[version].settings
    slate = max(records, key=lambda one: len(one.slate)).slate
    last = trace.arrived_at + settings.session_timeout
    shown, clicked = answered(slate, trace.feedback, whole_slate=False, first=trace.arrived_at, last=last)
    nobody = Arrival(session_id=session_id, occurred_at=trace.arrived_at, context=())
    return ServedSession(
        arrival=nobody if best is None else best[0].arrival,
        given=_given(trace),
        parameters=parameters,
        slate=slate,
        planned=None if best is None else best[0].slate,
        differences=() if best is None else best[1],
        reactions={
            one.position: one
            for one in sorted(trace.feedback, key=lambda one: (one.clicked, -one.occurred_at))
            if objection(slate, trace.arrived_at, last, one) is None
        },
        clicked=shown if clicked else 0,
        learning=_learning(log, trace, parameters, best[0].slate.modes if best else (), slate),
        others=len(traces) - 1,
    )


def _differences(trace: SessionTrace, plan: Replanned) -> tuple[str, ...]:
    """Return how the records of a session differ from a plan, one line each."""
    found = [(f"decision for position {one.position}", difference(one, plan)) for _, one in trace.decisions]
    found += [("session in the journal", difference(one, plan)) for _, one in trace.openings]
    return tuple(f"{what}: {one[0]} is {one[2]}, planned again {one[1]}" for what, one in found if one is not None)


def _given(trace: SessionTrace) -> Mapping[str, Any] | None:
    contexts = [msgspec.json.decode(entry.value)["context"] for entry in trace.arrivals]
    return next((context for context in contexts if isinstance(context, dict)), None)


def _learning(
    log: OrderedLog, trace: SessionTrace, parameters: Parameters, modes: Collection[Mode], slate: tuple[str, ...]
) -> Learning:
    """Return what was learned from a session."""
    settings, arrived_at = parameters.settings, trace.arrived_at
    end = arrived_at - arrived_at % settings.window + settings.window
    versions, last = log.versions.known, arrived_at + settings.session_timeout
    closing = next((versions[one] for one in sorted(versions) if (versions[one].window_end or 0) >= end), None)
    reason = _not_learned(trace, modes)
    if reason is None and closing is None:
        reason = "its window is not closed yet"
    if reason is not None or closing is None:
        return Learning(window_end=end, reason=reason)
    made_at = closing.records[0].journal_offset
    if min(entry.offset for entry, _ in trace.openings) > made_at:
        return Learning(window_end=end, reason=f"late: version {closing.version} had closed its window before")
    for episode in map(decode_episode, log.values("episodes")):
        if episode.window_start <= arrived_at < episode.window_end and (episode.frozen or episode.rejected):
            return Learning(window_end=end, reason=episode.rejected or "learning was frozen when its window was closed")
    learned: RecordedVersion | None = closing
    if (before := versions.get(closing.version - 1)) is not None and before.folds == closing.folds:
        reason, learned = f"version {closing.version} has not learned from its window: frozen or rejected", None
        if _waiting(log, closing.version) > _waiting(log, before.version):
            reason = "it waits for more sessions, by which numbers are standardised"
            learned = next((versions[one] for one in sorted(versions) if versions[one].folds > closing.folds), None)
    if learned is None:
        return Learning(window_end=end, reason=reason)
    mine = [(entry.offset, one) for entry, one in trace.facts if objection(slate, arrived_at, last, one) is None]
    in_time = {one for at, one in mine if at <= made_at}
    count, clicked = answered(slate, in_time, whole_slate=settings.unanswered == "passed")
    return Learning(
        window_end=end,
        version=learned.version,
        displays=count if clicked else min(count + 1, len(slate)),
        late=len({one for _, one in mine} - in_time),
    )


def _waiting(log: OrderedLog, version: int) -> int:
    """Return the number of sessions that wait in a version for the first fold."""
    pending = log.versions.read(version).pending
    return 0 if pending is None else len(pending)


def _not_learned(trace: SessionTrace, modes: Collection[Mode]) -> str | None:
    """Return why the learner did not take a session; None if it did."""
    openings = [opened for _, opened in trace.openings]
    if any(one.uncertain for one in openings) or len({(one.slate, one.modes) for one in openings}) > 1:
        return "uncertain: planned again after a takeover, so that the user may have seen another slate"
    if openings:
        return None
    if "fallback" in modes:
        return "not remembered: there was no room for the session, or it came too late"
    return "its journal is not there"
