"""One session of a log: planned again under the version that served it, answered, and learned from.

Rules that hold in this file:

- Of several sessions with one id, the last is meant.
- The slate is planned again by the planner that serves. It must be the recorded one: differences are kept, never passed
  over. A session of an imported log was planned by another system, and has no plan.
- A window is closed by the first version whose `window_end` is not before the end of the window. Facts that stand in
  the journal behind the record that made this version came too late for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from worker.errors import InputError
from worker.logs.ordered import OrderedLog
from worker.logs.traces import SessionTrace, TraceReader
from worker.replay.verify import decision_difference, opened_difference
from worker.stream.chance import journaled
from worker.stream.contexts import pack_context
from worker.stream.decoding import decode_episode
from worker.stream.events import Arrival, Decision, Mode, Opened
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
    reader = TraceReader(log)
    mine = [trace for trace in reader.read(log.entries("reading")) if trace.session_id == session_id]
    traces = [trace for trace in mine if trace.decisions or trace.openings]
    if not traces:
        found = "has an arrival there, but no decision" if mine else "is not there (ids are compared to the letter)"
        raise InputError(f"{name}: session {session_id} {found}")
    if not log.versions.known:
        raise InputError(f"{name} has no versions (topic parameters): `adcascade record` takes all topics")
    trace = traces[-1]
    records: Sequence[Decision | Opened] = [one for _, one in (trace.decisions or trace.openings)]
    version = records[-1].parameters_version
    if version not in log.versions.known:
        known = ", ".join(map(str, sorted(log.versions.known)[-8:]))
        raise InputError(f"{name} lacks version {version}, which served session {session_id}; it has {known}")
    modes = {decision.mode for _, decision in trace.decisions}
    arrival, planned, differences = _planned_again(log, reader, trace, version, modes)
    if planned is None and "imported" not in modes:
        raise InputError(f"{name}: the arrival of session {session_id} is not there, nor is it in the journal")
    parameters = log.versions.planner(version).parameters
    slate = min(records, key=lambda one: -len(one.slate)).slate
    last = trace.arrived_at + parameters.settings.session_timeout
    shown, clicked = answered(slate, trace.feedback, whole_slate=False, first=trace.arrived_at, last=last)
    return ServedSession(
        arrival=arrival,
        given=_given(trace),
        parameters=parameters,
        slate=slate,
        planned=planned,
        differences=differences,
        reactions={
            one.position: one
            for one in sorted(trace.feedback, key=lambda one: (one.clicked, -one.occurred_at))
            if objection(slate, trace.arrived_at, last, one) is None
        },
        clicked=shown if clicked else 0,
        learning=_learning(log, trace, parameters, planned.modes if planned else (), slate),
        others=len(traces) - 1,
    )


def _planned_again(
    log: OrderedLog, reader: TraceReader, trace: SessionTrace, version: int, modes: Collection[Mode]
) -> tuple[Arrival, Slate | None, tuple[str, ...]]:
    """Return the arrival, its slate under a version, and the differences; of several the one that fits best."""
    planner, nothing = log.versions.planner(version), Arrival(session_id="", occurred_at=trace.arrived_at, context=())
    dim = planner.parameters.settings.dim
    arrivals = [one for one in reader.candidates(trace, version) if len(one.context) == dim]
    if "imported" in modes or not arrivals:
        return msgspec.structs.replace(nothing, session_id=trace.session_id), None, ()
    contexts = [pack_context(one.context) for one in arrivals]
    # The journal does not say who the user is, and so not the group either.
    groups = (0.0, 1.0) if planner.parameters.settings.control_share and not trace.arrivals else (None,)
    slates = [slate for share in groups for slate in planner.plan(arrivals, contexts, control_share=share)]
    pairs = list(zip(arrivals * len(groups), slates, strict=True))
    if "fallback" in modes:  # perhaps because there was no room, for any plan
        pairs += [(arrival, planner.fallback(arrival)) for arrival in arrivals]
    found = [(arrival, slate, _differences(trace, slate)) for arrival, slate in pairs]
    return min(found, key=lambda one: len(one[2]))


def _differences(trace: SessionTrace, slate: Slate) -> tuple[str, ...]:
    """Return how the records of a session differ from a slate, one line each."""
    found = [(f"decision for position {one.position}", decision_difference(one, slate)) for _, one in trace.decisions]
    found += [("session in the journal", opened_difference(one, slate)) for _, one in trace.openings]
    return tuple(f"{what}: {one[0]} is {one[2]}, planned again {one[1]}" for what, one in found if one is not None)


def _given(trace: SessionTrace) -> Mapping[str, Any] | None:
    contexts = [msgspec.json.decode(value)["context"] for value in trace.values if value]
    return next((context for context in contexts if isinstance(context, dict)), None)


def _learning(
    log: OrderedLog, trace: SessionTrace, parameters: Parameters, modes: Collection[Mode], slate: tuple[str, ...]
) -> Learning:
    """Return what was learned from a session."""
    settings, arrived_at = parameters.settings, trace.arrived_at
    end = arrived_at - arrived_at % settings.window + settings.window
    versions, last = log.versions.known, arrived_at + settings.session_timeout
    closing = next((versions[one] for one in sorted(versions) if (versions[one].window_end or 0) >= end), None)
    reason = _not_journaled(trace, parameters, modes)
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
    if (before := versions.get(closing.version - 1)) is not None and before.folds == closing.folds:
        reason = (
            f"version {closing.version} has not learned from its window: frozen, rejected, or too few sessions so far"
        )
        return Learning(window_end=end, reason=reason)
    facts = zip(trace.fact_offsets, trace.facts, strict=True)
    mine = [(at, one) for at, one in facts if objection(slate, arrived_at, last, one) is None]
    in_time = {one for at, one in mine if at <= made_at}
    count, clicked = answered(slate, in_time, whole_slate=settings.unanswered == "passed")
    return Learning(
        window_end=end,
        version=closing.version,
        displays=count if clicked else min(count + 1, len(slate)),
        late=len({one for _, one in mine} - in_time),
    )


def _not_journaled(trace: SessionTrace, parameters: Parameters, modes: Collection[Mode]) -> str | None:
    """Return why the learner did not take a session; None if it did."""
    openings = [opened for _, opened in trace.openings]
    if any(one.uncertain for one in openings) or len({(one.slate, one.modes) for one in openings}) > 1:
        return "uncertain: planned again after a takeover, so that the user may have seen another slate"
    if openings:
        return None
    if "fallback" in modes:
        return "not remembered: there was no room for the session, or it came too late"
    if journaled(parameters.settings.salt, trace.session_id, parameters.shares.of_slate(modes)) == 0:
        return "not journaled: beyond the budget of learning (learn_at_most); it is counted, and that is all"
    return "its journal is not there"
