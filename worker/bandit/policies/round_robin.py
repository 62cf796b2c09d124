"""The warm-up of an experiment: arms take turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.planning import Masked, Planner
from worker.bandit.policies.policy import Policy, Slates
from worker.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin(Policy):
    """The warm-up of an experiment (Algorithm 1): one active arm after the other, position by position.

    At each position the turns go over the users who are still there. `stays` says who is there: slates so far, (n, h) →
    (n,); everybody by default. Users who are gone see nothing of the rest of their slate, and take no turn. Without
    repeats nobody's turn is left out, so that nobody sees an arm twice.
    """

    name: ClassVar[str] = "round-robin"

    start: int = 0
    stays: Callable[[Ints], NDArray[np.bool_]] | None = None

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        if masked is not None:
            raise InputError("round-robin serves experiments, which exclude no arms")
        count, horizon, known = len(contexts), planner.horizon, len(planner.shown)
        arms = np.full((count, horizon), NO_ARM, dtype=np.intp)
        turn = self.start
        for h in range(horizon if planner.repeats else min(horizon, known)):
            there = np.ones(count, dtype=bool) if self.stays is None or h == 0 else self.stays(arms[:, :h])
            if not known:
                break
            if not planner.repeats:
                arms[:, h] = planner.shown[(self.start + h + np.arange(count)) % known]
                continue
            rest, gone = np.flatnonzero(there), np.flatnonzero(~there)
            arms[rest, h] = planner.shown[(turn + np.arange(len(rest))) % known]
            arms[gone, h] = planner.shown[(self.start + h + gone) % known]
            turn += len(rest)
        return Slates.certain(arms, arms != NO_ARM)
