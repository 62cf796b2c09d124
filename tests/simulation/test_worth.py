"""The worth of sessions, against plain enumeration."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from worker.bandit.arrays import sigmoid
from worker.simulation.environments import make_environment
from worker.simulation.users import TIDY, Users
from worker.simulation.worth import Valuer, Worth

ARMS = ("ad-1", "ad-2", "ad-3", "ad-4")
HORIZON = 3


def crowd(rate: float = 6, environment: str = "opposite") -> Users:
    world = make_environment(environment, dim=2, arms=len(ARMS), generator=np.random.default_rng(3))
    return Users(world, horizon=HORIZON, rate=rate, habits=TIDY)


def scored(users: Users, served: dict[str, tuple[str, ...]], *, repeats: bool = True) -> Worth:
    found, slates = users.slates(0, served)
    return Valuer(users.world, horizon=HORIZON, repeats=repeats).worth(users.cohort(0).contexts[found], slates)


def worth(users: Users, user: int, slate: tuple[int, ...]) -> float:
    chances = sigmoid(users.world.truth.log_odds(users.cohort(0).contexts[[user]]))[0]
    value, left = 0.0, 1.0
    for arm in slate:
        value += left * chances[arm] * users.world.rewards[arm]
        left *= (1 - chances[arm]) * users.world.stay[arm]
    return float(value)


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("environment", ["opposite", "tastes", "leaving"])
def test_oracle_and_served_agree_with_enumeration(repeats, environment):
    users = crowd(environment=environment)
    count = len(users.cohort(0))
    every = list(product(range(4), repeat=HORIZON) if repeats else permutations(range(4), HORIZON))
    generator = np.random.default_rng(1)
    chosen = [every[int(generator.integers(len(every)))] for _ in range(count)]
    served = {users.session_id(0, n): tuple(ARMS[arm] for arm in slate) for n, slate in enumerate(chosen)}
    found = scored(users, served, repeats=repeats)
    assert found.sessions == count
    assert found.oracle == pytest.approx(sum(max(worth(users, n, slate) for slate in every) for n in range(count)))
    assert found.served == pytest.approx(sum(worth(users, n, slate) for n, slate in enumerate(chosen)))
    assert found.regret >= 0
    best = Valuer(users.world, horizon=HORIZON, repeats=repeats).best_slates(users.cohort(0).contexts)
    assert sum(worth(users, n, slate) for n, slate in enumerate(best.tolist())) == pytest.approx(found.oracle)
    assert repeats or all(len(set(slate)) == HORIZON for slate in best.tolist())


def test_only_users_who_were_served_are_scored():
    users = crowd()
    assert scored(users, {}).sessions == 0
    assert scored(users, {users.session_id(0, 2): ARMS[:3], "stranger": ARMS[:1]}).sessions == 1


def test_a_slate_of_unknown_arms_is_worth_nothing():
    users = crowd()
    assert scored(users, {users.session_id(0, 0): ("x", "y")}).served == 0.0
