"""Logged sessions as arrays: what was shown, what came of it, how likely it was, and what the target would show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints

Bools = NDArray[np.bool_]


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
