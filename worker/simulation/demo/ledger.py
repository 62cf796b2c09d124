"""The accounts of a simulated run, window by window: what the learner said of it, and what it was really worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from worker.embedded.state import StateFolder
from worker.simulation.score import Judge, Score
from worker.simulation.users import Users
from worker.stream.codec import Rejected, decode_journal
from worker.stream.events import Episode, Opened
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.topology import Emits


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A closed window.

    `allowed` is how many of its sessions the versions that served them meant to explore: Σ M/N over the sessions.
    """

    index: int
    episode: Episode
    score: Score
    allowed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over some windows; the shares are 1 and the losses 0 where there is nothing to compare with."""

    sessions: int
    clicks: int
    oracle: float
    served: float
    earned: float
    explored: float
    allowed: float

    @property
    def regret(self) -> float:
        """The pseudo-regret."""
        return self.oracle - self.served

    @property
    def regret_per_session(self) -> float:
        """The pseudo-regret of a session, on average."""
        return self.regret / self.sessions if self.sessions else 0.0

    @property
    def served_share(self) -> float:
        """What the slates served were worth, as a share of the best ones."""
        return self.served / self.oracle if self.oracle else 1.0

    @property
    def earned_share(self) -> float:
        """What was really earned, as a share of what the best slates are worth; luck and silent users included."""
        return self.earned / self.oracle if self.oracle else 1.0

    @property
    def explored_ratio(self) -> float:
        """How many sessions explored for each that was meant to."""
        return self.explored / self.allowed if self.allowed else 1.0


def totals(rows: Iterable[Row]) -> Totals:
    """Add up windows."""
    rows = list(rows)
    return Totals(
        sessions=sum(row.score.sessions for row in rows),
        clicks=sum(row.episode.clicks for row in rows),
        oracle=math.fsum(row.score.oracle for row in rows),
        served=math.fsum(row.score.served for row in rows),
        earned=math.fsum(row.episode.reward for row in rows),
        explored=math.fsum(row.episode.explored for row in rows),
        allowed=math.fsum(row.allowed for row in rows),
    )


def tenths(rows: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return the first and the last tenth of the windows, each at least one if there is any."""
    count = max(1, len(rows) // 10)
    return rows[:count], rows[-count:]


class Ledger:
    """Keeps the accounts; an `Observer` of the runner.

    With a state folder they are stored in the transaction that is under way, which is the one that closes the window.
    """

    def __init__(self, users: Users, judge: Judge, *, state: StateFolder | None = None) -> None:
        self.rows: list[Row] = []
        self._fresh: list[Row] = []
        self._users, self._judge, self._state = users, judge, state
        self._served: dict[int, dict[str, tuple[tuple[str, ...], int]]] = {}  # period → session → slate, version
        self._shares: dict[int, float] = {}  # version → share of the sessions that it means to explore

    def batch(self, emits: Emits, records: int, seconds: float) -> None:
        """Take no note: the runner keeps the tally."""

    def version(self, parameters: Parameters) -> None:
        """Keep how much a version means to explore; nothing in the warm-up is called exploring."""
        explores = parameters.folds >= parameters.settings.warmup and parameters.expected_sessions > 0
        share = parameters.explore_budget / parameters.expected_sessions if explores else 0.0
        self._shares[parameters.version] = min(1.0, share)

    def served(self, session_id: str, slate: tuple[str, ...], version: int) -> bool:
        """Keep what a session was served; return whether that is news."""
        whose = self._users.whose(session_id)
        if whose is None:
            return False
        served = self._served.setdefault(whose[0], {})
        known = session_id in served
        served[session_id] = (slate, version)
        return not known

    def episode(self, episode: Episode) -> None:
        """Draw up the account of a closed window; the learner may tell it again after a restart."""
        index = self._users.period_of(episode.window_start)
        if self.rows and index <= self.rows[-1].index:
            return
        served = self._served.pop(index, {})
        row = Row(
            index=index,
            episode=episode,
            score=self._judge.score(index, {session: slate for session, (slate, _) in served.items()}),
            allowed=math.fsum(self._shares.get(version, 0.0) for _, version in served.values()),
        )
        self.rows.append(row)
        self._fresh.append(row)
        self._users.forget(episode.window_end)
        if self._state:
            self._state.set_meta(f"demo.row.{index}", msgspec.json.encode(row))

    def fresh(self) -> list[Row]:
        """Return the windows that were closed since this was last asked."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def restore(self, state: StateFolder, until: int) -> None:
        """Read the accounts of windows before `until`, and what the sessions of those still open were served."""
        stored = (state.meta(f"demo.row.{index}") for index in range(self._users.period_of(until)))
        self.rows = [msgspec.json.decode(value, type=Row) for value in stored if value is not None]
        closed = self.rows[-1].index if self.rows else -1
        for value in state.parameters():
            self.version(decode_parameters(value))
        for _, value in state.journal(0):
            try:
                event = decode_journal(value)
            except Rejected:
                continue
            if isinstance(event, Opened) and self._users.period_of(event.arrived_at) > closed:
                self.served(event.session_id, event.slate, event.parameters_version)
