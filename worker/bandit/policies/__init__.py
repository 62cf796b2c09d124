"""Which slate each session gets, and which positions explored: one family of policies per file.

Public names are those below. A policy has one verb (`policy.py`); to add one, add a file and a line in `names.py`.
"""

from worker.bandit.policies.drawn import EpsilonGreedy, Random, random_slates
from worker.bandit.policies.greedy import Greedy, greedy_arms
from worker.bandit.policies.names import POLICIES, check_combination, policy_named
from worker.bandit.policies.optimistic import Aucbbp, MyopicUcb, Ucbbp, exploration_scores
from worker.bandit.policies.policy import Exploration, Policy, Slates
from worker.bandit.policies.round_robin import RoundRobin

__all__ = [
    "POLICIES",
    "Aucbbp",
    "EpsilonGreedy",
    "Exploration",
    "Greedy",
    "MyopicUcb",
    "Policy",
    "Random",
    "RoundRobin",
    "Slates",
    "Ucbbp",
    "check_combination",
    "exploration_scores",
    "greedy_arms",
    "policy_named",
    "random_slates",
]
