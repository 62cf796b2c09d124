"""The sessions of a log: how each was opened, and how it ended.

Rules that hold in this file:

- A session is opened by the journal, and the feedback of the journal counts. If the log has no journal, a session is
  opened by its first decision, with the context of its arrival, and the feedback of the clicks counts. Feedback counts
  by the same join as for the learner.
- Only complete sessions count: their timeout is over before the last record of the log. This depends on the arrival
  time and not on the answers, so it does not bias the estimates.
- Where a share of the sessions is journaled (`worker.stream.chance`), the others count by their decisions, if the log
  has these with the arrivals. Else sessions are left out until all kinds have the same share: those whose number is
  not below the lowest share. So no estimator needs weights for it.
- A session that is uncertain (after a crash, the user may have seen another slate) is left out, as in learning.
- Memory: a few hundred bytes per session. The log itself may be larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import nan
from typing import Final, NamedTuple

from worker.logs.ordered import Entry, OrderedLog
from worker.logs.traces import SessionTrace, TraceReader
from worker.stream.chance import journal_number
from worker.stream.contexts import pack_context
from worker.stream.events import Mode
from worker.stream.session import answered

#: Why a session is left out.
OPEN: Final = "not over at the end of the log"
NO_VERSION: Final = "version not in the log"
NO_SLATE: Final = "slate not in the log"
UNCERTAIN: Final = "uncertain which slate was shown"
CONTRADICTS: Final = "contradicts its version"
FALLBACK: Final = "served by the fallback"
IMPORTED: Final = "imported, of a policy that is not known"
BEYOND: Final = "beyond the share that the journal has of every kind of session"


class Opening(NamedTuple):
    """The version, slate, mode and packed context of a session."""

    version: int
    slate: tuple[str, ...]
    mode: Mode
    context: bytes
    exclude: tuple[str, ...]


class LoggedSession(NamedTuple):
    """A complete session; `propensity` is that of its first decision, nan if the log lacks that."""

    session_id: str
    arrived_at: int
    opening: Opening
    propensity: float
    answered: int
    clicked: bool

    @property
    def displayed(self) -> int:
        """Number of positions displayed: those answered, and the one at which the user left."""
        if self.clicked:
            return self.answered
        return min(self.answered + 1, len(self.opening.slate))


class LoggedSessions:
    """The complete sessions of a log, by the version that served them, in the order of arrival."""

    def __init__(self, log: OrderedLog, entries: Iterable[Entry]) -> None:
        self.by_version: dict[int, list[LoggedSession]] = {}
        self.left_out: Counter[str] = Counter()  # by reason; `share` is the share of all sessions that is left
        self._known = log.versions.known
        reader = TraceReader(log)
        self.share = 1.0
        for trace in reader.read(entries):
            self._add(trace, reader.latest)
        if self.share < 1:
            self._thin_out()

    def _add(self, trace: SessionTrace, latest: int) -> None:
        decision = next((decision for _, decision in reversed(trace.decisions) if decision.position == 1), None)
        propensity = nan if decision is None or decision.propensity is None else decision.propensity
        openings = {
            Opening(
                o.parameters_version, o.slate, o.modes[0] if o.modes else "none", pack_context(o.context), o.exclude
            )
            for _, o in trace.openings
        }
        if not openings and decision is not None and trace.arrivals:
            arrival = trace.arrivals[-1]
            context = pack_context(arrival.context)
            openings = {Opening(decision.parameters_version, decision.slate, decision.mode, context, arrival.exclude)}
        elif decision is None or not trace.arrivals:
            self.share = min([self.share, *(o.share for _, o in trace.openings if o.share is not None)])
        is_marked = any(opened.uncertain for _, opened in trace.openings)
        reason = UNCERTAIN if is_marked else self._reason_to_leave_out(openings)
        if reason is not None:
            self.left_out[reason] += 1
            return
        (opening,) = openings
        settings = self._known[opening.version].settings
        until = trace.arrived_at + settings.session_timeout
        if until > latest:
            self.left_out[OPEN] += 1
            return
        shown, clicked = answered(
            opening.slate,
            trace.facts if trace.openings else trace.clicks,
            whole_slate=settings.unanswered == "passed",
            first=trace.arrived_at,
            last=until,
        )
        self.by_version.setdefault(opening.version, []).append(
            LoggedSession(trace.session_id, trace.arrived_at, opening, propensity, shown, clicked)
        )

    def _thin_out(self) -> None:
        """Leave out sessions until every kind of session has the same share, the lowest."""
        for version, sessions in self.by_version.items():
            salt = self._known[version].settings.salt
            kept = [session for session in sessions if journal_number(salt, session.session_id) < self.share]
            self.left_out[BEYOND] += len(sessions) - len(kept)
            self.by_version[version] = kept
        self.by_version = {version: sessions for version, sessions in self.by_version.items() if sessions}

    def _reason_to_leave_out(self, openings: set[Opening]) -> str | None:
        if len(openings) != 1:
            return UNCERTAIN if openings else NO_SLATE
        (opening,) = openings
        if opening.mode == "fallback":
            return FALLBACK
        if opening.mode == "imported":
            return IMPORTED
        known = self._known.get(opening.version)
        return NO_VERSION if known is None or len(opening.context) != 8 * known.settings.dim else None
