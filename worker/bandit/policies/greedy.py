"""The best slate under the estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from worker.bandit.arrays import Floats, Ints
from worker.bandit.ordering import greedy_slates
from worker.bandit.planning import Masked, Planner
from worker.bandit.policies.policy import Policy, Slates


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy(Policy):
    """Always the best slate under the estimate; never explores, and so may get stuck."""

    name: ClassVar[str] = "greedy"

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        return Slates.certain(greedy_arms(planner, contexts, masked), False)


def greedy_arms(planner: Planner, contexts: Floats, masked: Masked | None) -> Ints:
    """Return the best slates under the estimate, with or without repeats."""
    return planner.greedy(contexts, masked).arms if planner.repeats else greedy_slates(planner, contexts, masked)
