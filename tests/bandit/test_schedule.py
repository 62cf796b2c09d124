"""How much to explore."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.bandit.bonuses import explore_budget, theory_radius
from worker.errors import InputError

from .beliefs import lawful


@given(st.integers(0, 10_000), st.integers(0, 5000), st.integers(2, 10_000))
@lawful
def test_the_budget_falls_from_everyone_to_one(users: int, t: int, episodes: int) -> None:
    budget = explore_budget(users, t, episodes)
    assert explore_budget(users, 0, episodes) == max(1, users)
    assert 1 <= budget <= max(1, users)
    assert explore_budget(users, t + 1, episodes) <= budget
    assert budget == 1 or budget <= users * math.exp(-t / math.log(episodes)) < budget + 1


@pytest.mark.parametrize("episodes", [-1, 0, 1])
def test_a_budget_over_fewer_than_two_episodes_is_refused(episodes: int) -> None:
    with pytest.raises(InputError, match="at least 2"):
        explore_budget(50, 1, episodes)


def radius(**changes: float) -> float:
    values: dict[str, float] = {
        "dim": 5,
        "arms": 10,
        "largest_reward": 1.0,
        "largest_norm": 4.0,
        "ridge": 1.0,
        "displays": 1000,
    }
    return theory_radius(**(values | changes))  # type: ignore[arg-type]


def test_the_radius_is_the_theorem_s() -> None:
    kappa = math.sqrt(3 + 2 * math.log(1 + 16 / 8))
    expected = kappa * 4 * math.sqrt(2 * 15 * math.log(1000) * math.log(15 / 0.05))
    assert radius() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    "change", [{"dim": 6}, {"arms": 11}, {"largest_norm": 5.0}, {"displays": 1001}, {"ridge": 0.5}, {"delta": 0.01}]
)
def test_the_radius_grows_with_the_uncertainty(change: dict[str, float]) -> None:
    assert radius(**change) > radius()


def test_the_radius_is_in_units_of_the_largest_reward() -> None:
    assert radius(largest_reward=3.0) == pytest.approx(3 * radius())


def test_before_the_first_display_the_radius_is_already_above_zero() -> None:
    assert radius(displays=0) == radius(displays=2) > 0
