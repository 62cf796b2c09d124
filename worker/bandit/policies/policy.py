"""What a policy is: a small value with one verb, `slates(planner, contexts, …)`.

Chance enters as an argument: `uniforms` (n, H, 2) in [0, 1), from a generator in an experiment, from a stable hash of
the session on a stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.bonuses import CURVE, Bonus
from worker.bandit.planning import Masked, Planner
from worker.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slates:
    """Slates for n sessions.

    Parameters
    ----------
    arms : (n, H), NO_ARM after the end of a shorter slate
    explored : (n, H), whether the choice served learning rather than revenue; false where there is no arm
    propensities : (n, H), probability of the choice given the earlier positions
    """

    arms: Ints
    explored: NDArray[np.bool_]
    propensities: Floats
    #: Whether it is known that nothing was left to chance, without a look at the propensities.
    is_certain: bool = False

    @classmethod
    def certain(cls, arms: Ints, explored: NDArray[np.bool_] | bool) -> Slates:
        """Return slates that were not left to chance."""
        return cls(arms=arms, explored=explored & (arms != NO_ARM), propensities=np.ones(arms.shape), is_certain=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """How much to explore; each policy takes what it needs of it."""

    beta: float = 1.5
    bonus: Bonus = CURVE
    epsilon: float = 0.1
    budget: int | None = None
    thresholds: tuple[float, ...] | None = None
    ties: tuple[float, ...] | None = None


class Policy(ABC):
    """A rule that gives each session its slate; the dataclass fields of a policy are what it needs of `Exploration`."""

    name: ClassVar[str]
    #: Whether its slates are left to chance.
    draws: ClassVar[bool] = False
    #: Whether it adds a bonus to Q, with repeats and without.
    has_bonus: ClassVar[tuple[bool, bool]] = (False, False)
    #: Whether only some sessions explore, by budget or thresholds.
    is_selective: ClassVar[bool] = False

    @property
    def needs_chance(self) -> bool:
        """Whether `slates` needs `uniforms`."""
        return self.draws

    @classmethod
    def under(cls, exploration: Exploration) -> Self:
        """Return the policy with these numbers."""
        return cls(**{name: getattr(exploration, name) for name in cls.__annotations__ if hasattr(exploration, name)})

    @abstractmethod
    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        """Plan contexts (n, d)."""


def required(uniforms: Floats | None) -> Floats:
    """Return the uniforms of a policy that needs them; raise `InputError` if there are none."""
    if uniforms is None:
        raise InputError("this policy draws at random: give it uniforms")
    return uniforms
