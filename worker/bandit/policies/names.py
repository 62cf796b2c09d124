"""The policies by name, and the settings that a policy cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping

from worker.bandit.bonuses import PaperBonus, bonus_named
from worker.bandit.policies.drawn import EpsilonGreedy, Random
from worker.bandit.policies.greedy import Greedy
from worker.bandit.policies.optimistic import Aucbbp, MyopicUcb, Ucbbp
from worker.bandit.policies.policy import Policy
from worker.errors import InputError

POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy for policy in (Ucbbp, Aucbbp, Greedy, EpsilonGreedy, MyopicUcb, Random)
}


def policy_named(name: str) -> type[Policy]:
    """Return the kind of policy called `name`."""
    if name not in POLICIES:
        raise InputError(f"unknown policy {name!r}; one of {', '.join(POLICIES)}")
    return POLICIES[name]


def check_combination(*, policy: str, bonus: str, repeats: bool) -> None:
    """Raise `InputError` if these settings contradict each other."""
    has_bonus = policy_named(policy).has_bonus
    if isinstance(bonus_named(bonus), PaperBonus) and has_bonus[0] and not has_bonus[0 if repeats else 1]:
        raise InputError(
            f"bonus {bonus} needs --repeats: without repeats {policy} explores by optimistic probabilities"
        )
