"""Logged sessions as arrays, and the probability of their slates under a rule.

All rules, served or evaluated, have one form. With probability `uniform` the whole session is drawn uniformly (warm-up,
`random_share`). Otherwise each position shows the planned arm or, with probability `epsilon`, any eligible arm:

    P(a_1 … a_h | x) = u Π_j 1/E_j + (1 − u) Π_j [ (1 − ε) 1{a_j = plan_j} + ε / E_j ]

with E_j the number of arms eligible at position j. Deterministic policies have ε = 0, ε-greedy has its ε, random has
ε = 1. So the probability of every slate is known and need not be estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints

Bools = NDArray[np.bool_]

#: The arrays of `Sessions` with one row per session.
_PER_SESSION: Final = (
    "contexts",
    "slates",
    "displayed",
    "answered",
    "clicked",
    "earned",
    "period",
    "excluded",
    "drawn",
    "imported",
    "recorded",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """The choice of slates for n sessions.

    best : (n, H), the planned slates, NO_ARM after their end
    epsilon : (n,), probability of any eligible arm at a position
    uniform : (n,), probability that the whole session is drawn uniformly
    repeats : whether a session may show an arm twice

    Five in a hundred sessions are drawn uniformly from two arms. The others see arm 1 twice.

    >>> rule = Rule(best=np.array([[1, 1]]), epsilon=np.zeros(1), uniform=np.full(1, 0.05), repeats=True)
    >>> rule.chances(np.array([[1, 0]]), np.array([[2, 2]]))
    array([[0.975 , 0.0125]])
    """

    best: Ints
    epsilon: Floats
    uniform: Floats
    repeats: bool

    @property
    def explores(self) -> Bools:
        """Whether every eligible arm is possible at every position: (n,)."""
        return np.asarray((self.uniform > 0) | (self.epsilon > 0))

    def plan_along(self, slates: Ints) -> Ints:
        """Return the planned arm at each position, given that the positions before it showed `slates`: (n, H) → (n, H).

        Without repeats, an arm drawn by ε-greedy replaces an arm of its plan, as in `worker.bandit.policies`.
        """
        if self.repeats or not (self.epsilon > 0).any():
            return self.best
        plans = self.best.copy()
        for row in np.flatnonzero(self.epsilon > 0).tolist():
            left = [arm for arm in self.best[row].tolist() if arm != NO_ARM]
            for h, arm in enumerate(slates[row].tolist()):
                plans[row, h] = left[0] if left else NO_ARM
                if left:
                    left.remove(arm if arm in left else left[-1])
        return plans

    def steps(self, slates: Ints, eligible: Ints) -> Floats:
        """Return the probability of each arm given those before it, unless the session is drawn as a whole: (n, H)."""
        epsilon = self.epsilon[:, None]
        found = np.where(self.plan_along(slates) == slates, 1 - epsilon, 0.0) + epsilon / eligible
        return np.where(slates == NO_ARM, 1.0, found)  # no choice after the end of a slate

    def chances(self, slates: Ints, eligible: Ints) -> Floats:
        """Return the probability of the first h arms of each slate, for h = 1 … H: (n, H)."""
        drawn = np.cumprod(np.where(slates == NO_ARM, 1.0, 1 / eligible), axis=1)
        planned = np.cumprod(self.steps(slates, eligible), axis=1)
        share = self.uniform[:, None]
        return np.asarray(share * drawn + (1 - share) * planned)

    def part(self, rows: Bools | Ints) -> Rule:
        """Return the rule for some of the sessions."""
        return replace(self, best=self.best[rows], epsilon=self.epsilon[rows], uniform=self.uniform[rows])

    def uniformly(self) -> Rule:
        """Return the rule of sessions that are all drawn uniformly."""
        return replace(self, epsilon=np.zeros(len(self.best)), uniform=np.ones(len(self.best)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sessions:
    """Displays and revenue of n sessions of a log, with the rule that served them and the rule of the target.

    A session ends with a click, with the end of its slate, or when the user leaves. The display at which the user
    leaves was made, but not answered.

    contexts : (n, d)
    slates : (n, H), the recorded slates, NO_ARM after their end
    displayed : (n,), number of positions displayed, including the one at which the user left
    answered : (n,), number of positions answered
    clicked : (n,), whether the last display was clicked
    earned : (n,), revenue of each session at all depths
    prices : (g, K), revenue of each arm in each period of constant prices and arms
    active : (g, K), whether each arm was active in that period
    period : (n,), the row of `prices` and `active` of each session
    excluded : (n, m), the excluded arms of each session, each once, filled up with NO_ARM
    served, target : the rule that served, and the rule of the target
    target_slates : (r, n, H), slates drawn from the target; r = 1 if it is deterministic
    drawn : (n,), whether the whole session was drawn uniformly
    imported : (n,), whether another system served the session; its slate ends with its last display
    recorded : (n, H), propensities that this system recorded, each given the earlier positions; nan where the rule that
        served gives them
    depth : number of positions that count
    """

    contexts: Floats
    slates: Ints
    displayed: Ints
    answered: Ints
    clicked: Bools
    earned: Floats
    prices: Floats
    active: Bools
    period: Ints
    excluded: Ints
    served: Rule
    target: Rule
    target_slates: Ints
    drawn: Bools
    imported: Bools
    recorded: Floats
    depth: int

    def __len__(self) -> int:
        return len(self.slates)

    @property
    def horizon(self) -> int:
        """The largest number of positions H."""
        return int(self.slates.shape[1])

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
    def unclicked(self) -> Bools:
        """Whether an arm was displayed at a position and not clicked: (n, H)."""
        return np.asarray(self.shown & ~self.clicks)

    @property
    def answers(self) -> Bools:
        """Whether a position was answered, by a click or a pass: (n, H)."""
        return np.asarray(self.positions <= self.answered[:, None])

    @property
    def clicks(self) -> Bools:
        """Whether a display was clicked: (n, H)."""
        return np.asarray(self.clicked[:, None] & (self.positions == self.displayed[:, None]))

    @property
    def rewards(self) -> Floats:
        """The revenue of each display: (n, H), zero except at the click."""
        return np.where(self.clicks, self.price(self.slates), 0.0)

    def price(self, slates: Ints) -> Floats:
        """Return the revenue of a click on each arm: (n, H) → (n, H)."""
        return np.asarray(self.prices[self.period[:, None], slates])

    def can_show(self) -> Bools:
        """Return whether each arm is eligible at the first position: (n, K)."""
        mask = self.active[self.period]
        rows, columns = np.nonzero(self.excluded != NO_ARM)
        mask[rows, self.excluded[rows, columns]] = False
        return mask

    @property
    def eligible(self) -> Ints:
        """The number of eligible arms at each position, at least 1: (n, H)."""
        gone = self.active[self.period[:, None], self.excluded] & (self.excluded != NO_ARM)
        left = self.active.sum(axis=1)[self.period] - gone.sum(axis=1)
        shown = np.zeros_like(self.positions) if self.served.repeats else self.positions - 1
        return np.asarray(np.maximum(left[:, None] - shown, 1))

    def part(self, rows: Bools | Ints) -> Sessions:
        """Return some of the sessions."""
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in _PER_SESSION},
            served=self.served.part(rows),
            target=self.target.part(rows),
            target_slates=self.target_slates[:, rows],
        )

    def with_one_target_slate(self) -> Sessions:
        """Return the sessions with a deterministic target: the first slate drawn from it for each."""
        slates, nothing = self.target_slates[0], np.zeros(len(self))
        target = replace(self.target, best=slates, epsilon=nothing, uniform=nothing)
        return replace(self, target=target, target_slates=slates[None])

    def cut(self, depth: int) -> Sessions:
        """Return the sessions as if they had ended after `depth` positions; plans stay as they are."""
        return replace(
            self,
            displayed=np.minimum(self.displayed, depth),
            answered=np.minimum(self.answered, depth),
            clicked=self.clicked & (self.displayed <= depth),
            depth=min(depth, self.depth),
        )
