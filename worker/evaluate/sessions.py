"""The sessions of a log: how each was opened and how it ended, and all of them as arrays.

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
from dataclasses import dataclass, fields
from math import nan
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.logs.ordered import OrderedLog
from worker.logs.traces import SessionTrace, TraceReader
from worker.stream.contexts import pack_context
from worker.stream.events import Mode, Opened

Bools = NDArray[np.bool_]

#: Why a session is left out.
OPEN: Final = "not over at the end of the log"
NO_VERSION: Final = "version not in the log"
NO_SLATE: Final = "slate not in the log"
UNCERTAIN: Final = "uncertain which slate was shown"
FALLBACK: Final = "served by the fallback"
CONTROL: Final = "in the control group"  # by chance alone: the others are a sample of all


class LoggedSession(NamedTuple):
    """A complete session with its packed context.

    `propensities` are those of all displays of an imported session, nan where they are not known; else empty.
    """

    session_id: str
    arrived_at: int
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
    """The complete sessions of a log, by the version that served them, and the number of the others by reason."""

    def __init__(self, log: OrderedLog) -> None:
        self.by_version: dict[int, list[LoggedSession]] = {}
        self.left_out: Counter[str] = Counter()
        self._known = log.versions.known
        reader = TraceReader(log)
        for trace in reader.read(log.entries("gathering sessions")):
            self._add(trace, reader)

    @property
    def imported(self) -> bool:
        """Whether another system served the sessions."""
        return any(session.mode == "imported" for session in self.by_version.get(0, ()))

    def _add(self, trace: SessionTrace, reader: TraceReader) -> None:
        openings = reader.openings(trace)
        reason = self._reason_to_leave_out(trace, openings, reader.latest)
        if reason is not None:
            self.left_out[reason] += 1
            return
        opened = openings[0]
        mode = _mode(opened)
        settings = self._known[opened.parameters_version].settings
        answered, clicked = trace.answered(opened.slate, settings)
        known = {decision.position: decision.propensity for _, decision in trace.decisions}
        propensities = [known.get(position) for position in range(1, len(opened.slate) + 1) if mode == "imported"]
        self.by_version.setdefault(opened.parameters_version, []).append(
            LoggedSession(
                session_id=trace.session_id,
                arrived_at=trace.arrived_at,
                slate=opened.slate,
                mode=mode,
                context=pack_context(opened.context),
                exclude=opened.exclude,
                propensities=tuple(nan if propensity is None else propensity for propensity in propensities),
                answered=answered,
                clicked=clicked,
            )
        )

    def _reason_to_leave_out(self, trace: SessionTrace, openings: list[Opened], latest: int) -> str | None:
        contents = {(o.parameters_version, o.slate, _mode(o), pack_context(o.context), o.exclude) for o in openings}
        if not openings:
            return NO_SLATE
        if len(contents) > 1 or any(opened.uncertain for opened in openings):
            return UNCERTAIN
        opened = openings[0]
        mode = _mode(opened)
        if mode in ("fallback", "control"):
            return FALLBACK if mode == "fallback" else CONTROL
        known = self._known.get(opened.parameters_version)
        if known is None or len(opened.context) != known.settings.dim:
            return NO_VERSION
        return None if mode == "imported" or trace.arrived_at + known.settings.session_timeout <= latest else OPEN


def _mode(opened: Opened) -> Mode:
    return opened.modes[0] if opened.modes else "none"


# ── as arrays ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sessions:
    """Displays and revenue of n sessions of a log, and the slates of the target.

    A session ends with a click, with the end of its slate, or when the user leaves. The display at which the user
    leaves was made, but not answered.

    contexts : (n, d), in the columns of the newest version, on one scale
    slates : (n, H), the recorded slates, NO_ARM after their end
    target : (n, H), the slates of the target
    prices : (n, H), revenue of a click on each arm of `slates`
    target_prices : (n, H), the same of `target`
    chances : (n, H), probability of the first h arms of `slates` when they were served; nan in sessions that support
        no other slate
    target_chances : (n, H), the same of `target`; nan if it is not known
    displayed : (n,), number of positions displayed, including the one at which the user left
    answered : (n,), number of positions answered
    clicked : (n,), whether the last display was clicked
    drawn : (n,), whether the whole session was drawn uniformly
    warmup : (n,), whether the session came in the warm-up
    """

    contexts: Floats
    slates: Ints
    target: Ints
    prices: Floats
    target_prices: Floats
    chances: Floats
    target_chances: Floats
    displayed: Ints
    answered: Ints
    clicked: Bools
    drawn: Bools
    warmup: Bools

    def __len__(self) -> int:
        return len(self.slates)

    @property
    def horizon(self) -> int:
        """The largest number of positions H."""
        return int(self.slates.shape[1])

    @property
    def supported(self) -> Bools:
        """Whether the slate of each session was left to chance, or is the target's in any case: (n,)."""
        return ~np.isnan(self.chances[:, 0])

    @property
    def positions(self) -> Ints:
        """1 … H, as a row."""
        return np.arange(1, self.horizon + 1)[None, :]

    @property
    def reached(self) -> Bools:
        """Whether a position was displayed: (n, H)."""
        return np.asarray(self.positions <= self.displayed[:, None])

    @property
    def passed(self) -> Bools:
        """Whether the next position was also displayed: (n, H)."""
        return np.asarray(self.positions < self.displayed[:, None])

    @property
    def shown(self) -> Bools:
        """Whether an arm was displayed at a position: (n, H)."""
        return np.asarray(self.reached & (self.slates != NO_ARM))

    @property
    def clicks(self) -> Bools:
        """Whether a display was clicked: (n, H)."""
        return np.asarray(self.clicked[:, None] & (self.positions == self.displayed[:, None]))

    @property
    def rewards(self) -> Floats:
        """The revenue of each display: (n, H), zero except at the click."""
        return np.where(self.clicks, self.prices, 0.0)

    @property
    def earned(self) -> Floats:
        """The revenue of each session: (n,)."""
        return np.asarray(self.rewards.sum(axis=1))

    def part(self, rows: Bools | Ints) -> Sessions:
        """Return some of the sessions."""
        return Sessions(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Sessions]) -> Sessions:
        """Return the sessions of several parts with the same number of positions."""
        return cls(
            **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        )
