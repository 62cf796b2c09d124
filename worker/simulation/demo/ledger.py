"""The accounts of a demo by window: the learner's own figures, and the value of the slates under the truth.

Who gets which ad is counted by a few kinds of users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.embedded.state import StateFolder
from worker.metrics.history import exploration_share
from worker.simulation.users import Users
from worker.simulation.world import Bools, Environment, true_heads
from worker.simulation.worth import Valuer, Worth
from worker.stream.decoding import Rejected, decode_journal
from worker.stream.events import Episode, Opened
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.topology import Emits

MOST_FEATURES = 5  # by which users are grouped

#: Sessions by kind of user and arm: of each kind, the sessions with each arm in their slate.
ByKind: TypeAlias = tuple[tuple[int, ...], ...]


class Kinds:
    """The kinds of users of a world: by the digit of their image, else by their most pronounced feature.

    Of many features, those count by which the arms differ most.

    >>> from worker.simulation.environments import tastes
    >>> kinds = Kinds(tastes(np.random.default_rng(0), dim=2, arms=3))
    >>> kinds.names, kinds.of(np.array([[0.1, -3.0], [2.0, 1.0]])).tolist()
    (('x1 high', 'x1 low', 'x2 high', 'x2 low'), [3, 0])
    """

    names: tuple[str, ...]

    def __init__(self, world: Environment) -> None:
        self._classes = world.columns
        if self._classes is not None:
            self.names = tuple(f"digit {digit}" for digit in range(len(world.rewards)))
            return
        tastes = true_heads(world.truth)[:, 1:]
        strongest = np.argsort(-tastes.std(axis=0), kind="stable")[:MOST_FEATURES]
        self._features = np.sort(strongest)
        self.names = tuple(f"x{feature + 1} {end}" for feature in self._features for end in ("high", "low"))

    def of(self, contexts: Floats) -> Ints:
        """Return the kind of each context, (n, d) → (n,)."""
        if self._classes is not None:
            return np.asarray(self._classes(contexts).argmax(axis=1))
        values = contexts[:, self._features]
        strongest = np.abs(values).argmax(axis=1)
        return np.asarray(2 * strongest + (values[np.arange(len(values)), strongest] < 0), dtype=np.intp)


class Score(Worth, frozen=True, kw_only=True):
    """The worth of a period's sessions, the revenue `earned` by their clicks, and counts of displays by position.

    `kinds` are the sessions of each kind of user, `shown` and `best` those with each arm in their slate, as served and
    as the oracle has it. `wanted` is the number of arms in the oracle's slates, `right` how many of them were served.
    """

    earned: float
    answered: tuple[int, ...]
    clicked: tuple[int, ...]
    kinds: tuple[int, ...]
    shown: ByKind
    best: ByKind
    wanted: int
    right: int


def score(users: Users, valuer: Valuer, kinds: Kinds, period: int, served: Mapping[str, tuple[str, ...]]) -> Score:
    """Score the users of a period by the slates that were served to them, by session id."""
    indices, slates = users.slates(period, served)
    contexts = users.cohort(period).contexts[indices]
    worth = valuer.worth(contexts, slates)
    kind, arms = kinds.of(contexts), len(valuer.rewards) - 1
    shown, best = _members(slates, arms), _members(valuer.best_slates(contexts), arms)
    clicked, answered = users.outcomes(period, indices, slates)
    buyers = np.flatnonzero(clicked >= 0)
    return Score(
        **msgspec.structs.asdict(worth),
        earned=float(valuer.rewards[slates[buyers, clicked[buyers]]].sum()),
        answered=tuple(int((answered > h).sum()) for h in range(users.horizon)),
        clicked=tuple(np.bincount(clicked[buyers], minlength=users.horizon).tolist()),
        kinds=tuple(np.bincount(kind, minlength=len(kinds.names)).tolist()),
        shown=_by_kind(shown, kind, len(kinds.names)),
        best=_by_kind(best, kind, len(kinds.names)),
        wanted=int(best.sum()),
        right=int((shown & best).sum()),
    )


def _members(slates: Ints, arms: int) -> Bools:
    """Return whether each arm is in each slate: (n, H) → (n, K)."""
    members = np.zeros((len(slates), arms + 1), dtype=np.bool_)
    members[np.arange(len(slates))[:, None], slates] = True
    return members[:, :arms]  # the last column is of unknown arms, and of NO_ARM


def _by_kind(members: Bools, kind: Ints, kinds: int) -> ByKind:
    counts = np.zeros((kinds, members.shape[1]), dtype=np.intp)
    np.add.at(counts, kind, members)
    return tuple(map(tuple, counts.tolist()))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A closed window; `allowed` is the expected number Σ M/N of sessions that its versions let explore."""

    index: int
    episode: Episode
    score: Score
    allowed: float


class Totals(Worth, frozen=True, kw_only=True):
    """Sums over some windows."""

    clicks: int
    earned: float
    explored: float
    allowed: float
    wanted: int
    right: int

    @property
    def right_share(self) -> float:
        """The share of the arms in the oracle's slates that were served."""
        return self.right / max(1, self.wanted)

    @property
    def earned_share(self) -> float:
        """The revenue earned as a share of the oracle's; includes luck and silent users. 1 if the oracle's is 0."""
        return self.earned / self.oracle if self.oracle else 1.0

    @property
    def explored_ratio(self) -> float:
        """The sessions that explored as a share of those allowed to; 1 if none was allowed to."""
        return self.explored / self.allowed if self.allowed else 1.0


def totals(rows: Sequence[Row]) -> Totals:
    """Add up windows."""
    return Totals(
        sessions=sum(row.score.sessions for row in rows),
        clicks=sum(row.episode.clicks for row in rows),
        oracle=math.fsum(row.score.oracle for row in rows),
        served=math.fsum(row.score.served for row in rows),
        earned=math.fsum(row.episode.reward for row in rows),
        explored=math.fsum(row.episode.explored for row in rows),
        allowed=math.fsum(row.allowed for row in rows),
        wanted=sum(row.score.wanted for row in rows),
        right=sum(row.score.right for row in rows),
    )


class Ledger:
    """Keeps the accounts; an `Observer` of the runner.

    With a state folder, an account is stored in the transaction that closes its window.
    """

    def __init__(self, users: Users, valuer: Valuer, *, state: StateFolder | None = None) -> None:
        self.rows: list[Row] = []
        self._users, self._valuer, self._state = users, valuer, state
        self.kinds = Kinds(users.world)
        self._served: dict[int, dict[str, tuple[tuple[str, ...], int]]] = {}  # period → session → slate, version
        self._shares: dict[int, float] = {}  # version → share of the sessions that may explore

    def batches(self, emits: Sequence[Emits], records: int, seconds: float) -> None:
        """Do nothing: the runner keeps the tally."""

    def late(self, records: int) -> None:
        """Do nothing: the episodes count late records."""

    def version(self, parameters: Parameters) -> None:
        """Keep the share of sessions that a version lets explore."""
        self._shares[parameters.version] = exploration_share(parameters) or 0.0

    def served(self, session_id: str, slate: tuple[str, ...], version: int) -> bool:
        """Keep the slate of a session; return whether it is the first one."""
        user = self._users.user_of(session_id)
        if user is None:
            return False
        served = self._served.setdefault(user[0], {})
        first = session_id not in served
        served[session_id] = (slate, version)
        return first

    def episode(self, episode: Episode) -> None:
        """Add the account of a closed window, unless there is one: after a restart the learner may repeat it."""
        index = self._users.period_of(episode.window_start)
        if self.rows and index <= self.rows[-1].index:
            return
        served = self._served.pop(index, {})
        slates = {session: slate for session, (slate, _) in served.items()}
        row = Row(
            index=index,
            episode=episode,
            score=score(self._users, self._valuer, self.kinds, index, slates),
            allowed=math.fsum(self._shares.get(version, 0.0) for _, version in served.values()),
        )
        self.rows.append(row)
        self._users.expire(episode.window_end)
        if self._state:
            self._state.set_meta(f"demo.row.{index}", msgspec.json.encode(row))

    def restore(self, state: StateFolder, until: int) -> None:
        """Read the accounts of windows before `until`, and the slates of sessions in windows still open."""
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
