"""The accounts of a demo by window: the learner's own figures, and the value of the slates under the truth.

Who gets which ad is counted by a few kinds of users.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.metrics.history import exploration_share
from worker.simulation.users import Users
from worker.simulation.world import Bools, Environment, true_heads
from worker.simulation.worth import Valuer, Worth, together
from worker.stream.events import Episode
from worker.stream.parameters import Parameters

MOST_FEATURES = 5  # by which users are grouped


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """The account of a closed window.

    allowed : the expected number Σ M/N of sessions that its versions let explore
    kinds : (kinds,), the sessions of each kind of user
    shown, best : (kinds, K), those with each arm in their slate, as served and as the oracle has it
    right : the arms in the oracle's slates that were served
    """

    index: int
    episode: Episode
    worth: Worth
    allowed: float
    kinds: Ints
    shown: Ints
    best: Ints
    right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over some windows; `wanted` is the number of arms in the oracle's slates, `right` how many were served."""

    worth: Worth
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
        return self.earned / self.worth.oracle if self.worth.oracle else 1.0

    @property
    def explored_ratio(self) -> float:
        """The sessions that explored as a share of those allowed to; 1 if none was allowed to."""
        return self.explored / self.allowed if self.allowed else 1.0


def totals(rows: Sequence[Row]) -> Totals:
    """Add up windows."""
    return Totals(
        worth=together(row.worth for row in rows),
        clicks=sum(row.episode.clicks for row in rows),
        earned=math.fsum(row.episode.reward for row in rows),
        explored=math.fsum(row.episode.explored for row in rows),
        allowed=math.fsum(row.allowed for row in rows),
        wanted=sum(int(row.best.sum()) for row in rows),
        right=sum(row.right for row in rows),
    )


class Ledger:
    """Keeps the accounts."""

    def __init__(self, users: Users, valuer: Valuer) -> None:
        self.rows: list[Row] = []
        self.kinds = Kinds(users.world)
        self._users, self._valuer = users, valuer
        #: By period and session, the slate, and the share of the sessions that its version lets explore.
        self._served: dict[int, dict[str, tuple[tuple[str, ...], float]]] = {}

    def served(self, session_id: str, slate: tuple[str, ...], version: Parameters) -> bool:
        """Keep the slate of a session by a version; return whether it is the first one."""
        user = self._users.user_of(session_id)
        if user is None:
            return False
        served = self._served.setdefault(user[0], {})
        first = session_id not in served
        served[session_id] = (slate, exploration_share(version) or 0.0)
        return first

    def close(self, episode: Episode) -> Row:
        """Add the account of a closed window, and return it."""
        index = self._users.period_of(episode.window_start)
        served = self._served.pop(index, {})
        users, slates = self._users.slates(index, {session: slate for session, (slate, _) in served.items()})
        contexts = self._users.cohort(index).contexts[users]
        kind, arms = self.kinds.of(contexts), len(self._users.arms)
        shown, best = _members(slates, arms), _members(self._valuer.best_slates(contexts), arms)
        row = Row(
            index=index,
            episode=episode,
            worth=self._valuer.worth(contexts, slates),
            allowed=math.fsum(share for _, share in served.values()),
            kinds=np.bincount(kind, minlength=len(self.kinds.names)),
            shown=self._by_kind(shown, kind),
            best=self._by_kind(best, kind),
            right=int((shown & best).sum()),
        )
        self.rows.append(row)
        self._users.expire(episode.window_end)
        return row

    def _by_kind(self, members: Bools, kind: Ints) -> Ints:
        """Count the slates with each arm, by the kinds of their users: (n, K), (n,) → (kinds, K)."""
        counts = np.zeros((len(self.kinds.names), members.shape[1]), dtype=np.intp)
        np.add.at(counts, kind, members)
        return counts


def _members(slates: Ints, arms: int) -> Bools:
    """Return whether each arm is in each slate: (n, H) → (n, K)."""
    members = np.zeros((len(slates), arms + 1), dtype=np.bool_)
    members[np.arange(len(slates))[:, None], slates] = True
    return members[:, :arms]  # the last column is of unknown arms, and of NO_ARM
