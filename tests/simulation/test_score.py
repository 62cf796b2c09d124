"""What sessions were worth, against plain enumeration."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from worker.simulation.environments import make_environment
from worker.simulation.score import Judge
from worker.simulation.users import TIDY, Users

ARMS = ("a", "b", "c", "d")
HORIZON = 3


def crowd(rate: float = 6) -> Users:
    world = make_environment("opposite", dim=2, arms=len(ARMS), generator=np.random.default_rng(3))
    return Users(world, ARMS, horizon=HORIZON, rate=rate, habits=TIDY)


def worth(users: Users, place: int, slate: tuple[int, ...]) -> float:
    truth, rewards = users.world.truth, users.world.rewards
    value, left = 0.0, 1.0
    for arm in slate:
        chance = 1 / (1 + np.exp(-(users.cohort(0).contexts[place] @ truth.theta_context + truth.theta_arms[arm])))
        value += left * chance * rewards[arm]
        left *= 1 - chance
    return float(value)


@pytest.mark.parametrize("repeats", [True, False])
def test_oracle_and_served_are_what_enumeration_finds(repeats):
    users = crowd()
    count = len(users.cohort(0))
    every = list(product(range(4), repeat=HORIZON) if repeats else permutations(range(4), HORIZON))
    generator = np.random.default_rng(1)
    chosen = [every[int(generator.integers(len(every)))] for _ in range(count)]
    served = {users.session_id(0, n): tuple(ARMS[arm] for arm in slate) for n, slate in enumerate(chosen)}
    score = Judge(users, repeats=repeats).score(0, served)
    assert score.sessions == count
    assert score.oracle == pytest.approx(sum(max(worth(users, n, slate) for slate in every) for n in range(count)))
    assert score.served == pytest.approx(sum(worth(users, n, slate) for n, slate in enumerate(chosen)))
    assert score.regret >= 0


def test_only_those_who_were_served_are_scored():
    users = crowd()
    judge = Judge(users)
    assert judge.score(0, {}).sessions == 0
    one = judge.score(0, {users.session_id(0, 2): ("a", "b", "c"), "stranger": ("a",)})
    assert (one.sessions, sum(one.answered) >= 1) == (1, True)


def test_a_slate_of_what_the_world_does_not_know_is_worth_nothing():
    users = crowd()
    score = Judge(users).score(0, {users.session_id(0, 0): ("x", "y")})
    assert (score.served, score.earned, score.answered, score.clicked) == (0.0, 0.0, (1, 1, 0), (0, 0, 0))


def test_what_is_earned_comes_near_to_what_is_expected():
    users = crowd(rate=4_000)
    served = {users.session_id(0, n): ("a", "b", "c") for n in range(len(users.cohort(0)))}
    score = Judge(users).score(0, served)
    assert score.earned == pytest.approx(score.served, rel=0.1)
    assert score.answered[0] == score.sessions
    passed = [seen - hits for seen, hits in zip(score.answered, score.clicked, strict=True)]
    assert list(score.answered[1:]) == passed[:-1]
