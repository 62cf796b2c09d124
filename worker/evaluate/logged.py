"""The sessions of a log: how each was opened, and how it ended.

Rules that hold in this file:

- A session is opened by the journal, and the feedback of the journal counts. If the log has no journal, a session is
  opened by its first decision, with the context of its arrival, and the feedback of the clicks counts. Feedback counts
  by the same join as for the learner.
- Only complete sessions count: their timeout is over before the last record of the log. This depends on the arrival
  time and not on the answers, so it does not bias the estimates. Imported sessions are complete.
- A session that is uncertain (after a crash, the user may have seen another slate) is left out, as in learning.
- Memory: a few hundred bytes per session. The log itself may be larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import nan
from typing import Final, NamedTuple

from worker.logs.ordered import OrderedLog
from worker.logs.traces import SessionTrace, TraceReader
from worker.stream.contexts import pack_context
from worker.stream.events import Mode, Opened

#: Why a session is left out.
OPEN: Final = "not over at the end of the log"
NO_VERSION: Final = "version not in the log"
NO_SLATE: Final = "slate not in the log"
UNCERTAIN: Final = "uncertain which slate was shown"
CONTRADICTS: Final = "contradicts its version"
FALLBACK: Final = "served by the fallback"
CONTROL: Final = "in the control group"


class LoggedSession(NamedTuple):
    """A complete session with its packed context.

    `propensities` are those of the first decision or, if the session is imported, of all displays; nan if the log lacks
    them. `version`, `slate`, `mode` and `exclude` are those of its opening.
    """

    session_id: str
    arrived_at: int
    version: int
    slate: tuple[str, ...]
    mode: Mode
    context: bytes
    exclude: tuple[str, ...]
    propensities: tuple[float, ...]
    answered: int
    clicked: bool

    @property
    def displayed(self) -> int:
        """Number of positions displayed: those answered, and the one at which the user left."""
        return self.answered if self.clicked else min(self.answered + 1, len(self.slate))


class LoggedSessions:
    """The complete sessions of a log, by the version that served them, in the order of arrival."""

    def __init__(self, log: OrderedLog) -> None:
        self.by_version: dict[int, list[LoggedSession]] = {}
        self.left_out: Counter[str] = Counter()  # by reason
        self._known = log.versions.known
        reader = TraceReader(log)
        for trace in reader.read(log.entries("gathering sessions")):
            self._add(trace, reader)

    def _add(self, trace: SessionTrace, reader: TraceReader) -> None:
        openings = reader.openings(trace)
        reason = self._reason_to_leave_out(trace, openings, reader.latest)
        if reason is not None:
            self.left_out[reason] += 1
            return
        opened = openings[0]
        settings = self._known[opened.parameters_version].settings
        shown, clicked = trace.answered(opened.slate, settings)
        self.by_version.setdefault(opened.parameters_version, []).append(
            LoggedSession(
                session_id=trace.session_id,
                arrived_at=trace.arrived_at,
                version=opened.parameters_version,
                slate=opened.slate,
                mode=opened.modes[0] if opened.modes else "none",
                context=pack_context(opened.context),
                exclude=opened.exclude,
                propensities=_propensities(trace, opened),
                answered=shown,
                clicked=clicked,
            )
        )

    def _reason_to_leave_out(self, trace: SessionTrace, openings: Sequence[Opened], latest: int) -> str | None:
        contents = {(o.parameters_version, o.slate, o.modes[:1], pack_context(o.context), o.exclude) for o in openings}
        if not openings:
            return NO_SLATE
        if len(contents) > 1 or any(opened.uncertain for opened in openings):
            return UNCERTAIN
        opened = openings[0]
        if opened.modes[:1] == ("fallback",):
            return FALLBACK
        if opened.modes[:1] == ("control",):
            return CONTROL  # by chance alone: the others are a sample of all
        known = self._known.get(opened.parameters_version)
        if known is None or len(opened.context) != known.settings.dim:
            return NO_VERSION
        is_over = opened.modes[:1] == ("imported",) or trace.arrived_at + known.settings.session_timeout <= latest
        return None if is_over else OPEN


def _propensities(trace: SessionTrace, opened: Opened) -> tuple[float, ...]:
    known = {decision.position: decision.propensity for _, decision in trace.decisions}
    positions = range(1, max(2, len(opened.slate) + 1 if opened.modes[:1] == ("imported",) else 0))
    return tuple(nan if (propensity := known.get(position)) is None else propensity for position in positions)
