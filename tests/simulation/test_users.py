"""Simulated users: a function of the seed and of the slates shown."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stream.scenes import decision
from worker.bandit.arrays import NO_ARM, Ints, sigmoid
from worker.simulation.environments import make_environment
from worker.simulation.users import BEGINNING, TIDY, Habits, Sent, Users
from worker.simulation.world import first_clicks
from worker.simulation.worth import Valuer
from worker.stream.decoding import Limits, decode_arrival, decode_feedback
from worker.stream.settings import LearningSettings

ARMS = ("ad-1", "ad-2", "ad-3")
HORIZON = 4

PLAIN = LearningSettings(dim=3, standardise=False)


def crowd(
    *, seed: int = 0, rate: float = 40, habits: Habits | None = None, name: str = "user", environment: str = "uniform"
) -> Users:
    world = make_environment(environment, dim=3, arms=len(ARMS), generator=np.random.default_rng(seed))
    return Users(world, horizon=HORIZON, rate=rate, seed=seed, habits=habits, name=name)


def feedback_of(records: list[Sent]) -> list[tuple[int, bool]]:
    limits = Limits()
    events = [decode_feedback(r.value, limits=limits, horizon=HORIZON, timestamp=r.time) for r in records]
    return sorted({(event.position, event.clicked) for event in events})


def walk(users: Users, session_id: str, slate: tuple[str, ...]) -> list[tuple[int, bool]]:
    """Show a slate as the worker does: the next position after every pass, nothing without an answer."""
    answered: list[tuple[int, bool]] = []
    for position in range(1, len(slate) + 1):
        answers = feedback_of(users.answer(decision(session_id, slate[position - 1 :], position), BEGINNING))
        answered.extend(answers)
        if not answers or any(clicked for _, clicked in answers):
            break
    return answered


# ── cohorts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_seed_gives_the_same_users_whatever_was_drawn_before():
    one, other = crowd(), crowd()
    other.arrivals(5)
    other.expire(BEGINNING + 10**9)
    assert one.arrivals(2) == other.arrivals(2) != one.arrivals(1)
    assert one.arrivals(2) != crowd(seed=1).arrivals(2)


def test_users_come_within_their_period_and_records_reach_the_worker_in_the_order_of_time():
    users = crowd(rate=200)
    records = users.arrivals(3)
    assert [r.time for r in records] == sorted(r.time for r in records)
    arrived = users.cohort(3).arrived_at
    assert arrived == sorted(arrived)
    assert all(users.period_of(time) == 3 for time in arrived)


def test_the_user_of_a_session_is_found_and_foreign_sessions_are_ignored():
    users = crowd(name="eve")
    assert users.user_of(users.session_id(7, 3)) == (7, 3)
    assert [users.user_of(text) for text in ("eve", "eve:1", "eve:1-x", "user:1-2", "eve:-1-2", "")] == [None] * 6
    assert users.answer(decision("somebody", ARMS), BEGINNING) == []


def test_arrivals_are_valid_and_have_the_context_of_the_user():
    users = crowd(habits=TIDY)
    cohort = users.cohort(0)
    for index, record in enumerate(sorted(users.arrivals(0), key=lambda r: int(r.key.decode().rpartition("-")[2]))):
        event = decode_arrival(record.value, PLAIN, limits=Limits(), timestamp=record.time)
        assert event.session_id.encode() == record.key
        assert event.occurred_at == cohort.arrived_at[index] <= record.time
        assert event.context == tuple(cohort.contexts[index].tolist())


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def outcomes(users: Users, indices: Ints, slates: Ints) -> tuple[Ints, Ints]:
    """Return `first_clicks` of the users (m,) of period 0 on whole slates (m, H)."""
    cohort, stay = users.cohort(0), np.append(users.world.stay, 1.0)
    clicks = cohort.needs[indices] < cohort.odds[indices[:, None], slates]  # NO_ARM is the last column: −inf
    stays = cohort.stays[indices] & (clicks | (cohort.tempers[indices] < stay[slates])) & (slates != NO_ARM)
    return first_clicks(clicks, np.logical_and.accumulate(stays, axis=1))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), environment=st.sampled_from(["uniform", "leaving"]), data=st.data())
def test_answers_step_by_step_are_those_of_the_whole_slate(seed: int, environment: str, data: st.DataObject):
    habits = Habits(silence=0.2, leaving=0.2, prefetching=0)
    users = crowd(seed=seed, rate=12, habits=habits, environment=environment)
    slate_of = st.lists(st.sampled_from((*ARMS, "unknown")), min_size=0, max_size=HORIZON).map(tuple)
    served = {users.session_id(0, index): data.draw(slate_of) for index in range(len(users.cohort(0)))}
    indices, slates = users.slates(0, served)
    clicked, answered = outcomes(users, indices, slates)
    for index, at, count in zip(indices.tolist(), clicked.tolist(), answered.tolist(), strict=True):
        session_id = users.session_id(0, index)
        walked = walk(users, session_id, served[session_id])
        assert [position for position, _ in walked] == list(range(1, count + 1))
        assert [position - 1 for position, hit in walked if hit] == ([at] if at >= 0 else [])


def test_a_position_is_answered_only_once():
    users = crowd(habits=TIDY)
    session_id = users.session_id(0, 0)
    first = users.answer(decision(session_id, ARMS), BEGINNING)
    assert len(first) == 1
    assert users.answer(decision(session_id, ARMS), BEGINNING) == []


def test_a_prefetching_client_answers_the_whole_slate_at_once():
    users = crowd(habits=Habits(prefetching=1, silence=0, leaving=0, duplicates=0, disordered=0))
    session_id, slate = users.session_id(0, 0), ("unknown",) * HORIZON
    assert feedback_of(users.answer(decision(session_id, slate), BEGINNING)) == [
        (h, False) for h in range(1, HORIZON + 1)
    ]
    assert users.answer(decision(session_id, slate[1:], 2), BEGINNING) == []


def test_the_click_rate_is_that_of_the_truth():
    users = crowd(rate=6_000, habits=TIDY)
    cohort = users.cohort(0)
    everybody = np.arange(len(cohort))
    slates = np.full((len(cohort), HORIZON), NO_ARM)
    slates[:, 0] = 1
    clicked, _ = outcomes(users, everybody, slates)
    chances = sigmoid(users.world.truth.log_odds(cohort.contexts)[:, 1])
    spread = np.sqrt((chances * (1 - chances)).sum())
    assert abs((clicked == 0).sum() - chances.sum()) < 4 * spread


@pytest.mark.parametrize("environment", ["uniform", "leaving"])
def test_revenue_earned_is_close_to_the_expected(environment: str):
    users = crowd(rate=8_000, habits=TIDY, environment=environment)
    cohort, valuer = users.cohort(0), Valuer(users.world, horizon=HORIZON)
    slates = np.tile(np.resize(np.argsort(-users.world.stay, kind="stable"), HORIZON), (len(cohort), 1))
    clicked, answered = outcomes(users, np.arange(len(cohort)), slates)
    buyers = np.flatnonzero(clicked >= 0)
    earned = users.world.rewards[slates[buyers, clicked[buyers]]].sum()
    assert earned == pytest.approx(valuer.worth(cohort.contexts, slates).served, rel=0.1)
    assert (answered >= 1).all() == (environment == "uniform")


def test_of_the_users_who_do_not_click_a_share_answers_by_the_arm():
    users = crowd(rate=6_000, habits=TIDY, environment="leaving")
    everybody = np.arange(len(users.cohort(0)))
    for arm, stay in enumerate(users.world.stay):
        clicked, answered = outcomes(users, everybody, np.full((len(everybody), HORIZON), arm))
        assert (answered[clicked != 0] >= 1).mean() == pytest.approx(stay, abs=0.03)


def test_answers_carry_the_token_of_their_display():
    users = crowd(habits=Habits(prefetching=1, silence=0, leaving=0))
    records = users.answer(decision(users.session_id(0, 0), ("x", "y"), tokens=("one", "two")), BEGINNING)
    events = [decode_feedback(r.value, limits=Limits(), horizon=HORIZON, timestamp=r.time) for r in records]
    assert {(event.position, event.token) for event in events} == {(1, "one"), (2, "two")}


def test_answers_follow_the_decision_and_a_look_at_the_display():
    users = crowd(rate=100, habits=Habits(silence=0, leaving=0))
    for index, arrived_at in enumerate(users.cohort(0).arrived_at):
        for seen_at in (arrived_at, arrived_at + 30_000):
            fresh = crowd(rate=100, habits=users.habits)
            for record in fresh.answer(decision(users.session_id(0, index), ARMS), seen_at):
                event = decode_feedback(record.value, limits=Limits(), horizon=HORIZON, timestamp=record.time)
                assert event.occurred_at >= max(seen_at, arrived_at + users.habits.look[0])
                assert record.time >= event.occurred_at


# ── untidy users ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_some_records_arrive_twice_and_those_of_tidy_users_never():
    copies = Counter(record.value for record in crowd(rate=1_000, habits=Habits(duplicates=0.1, poison=0)).arrivals(0))
    twice = sum(count == 2 for count in copies.values())
    assert set(copies.values()) == {1, 2}
    assert 0.06 < twice / len(copies) < 0.14
    assert set(Counter(record.value for record in crowd(rate=1_000, habits=TIDY).arrivals(0)).values()) == {1}


def test_the_delay_of_records_is_limited():
    habits = Habits(disordered=1, duplicates=0, poison=0)
    users = crowd(rate=1_000, habits=habits)
    delays = [
        r.time - decode_arrival(r.value, PLAIN, limits=Limits(), timestamp=r.time).occurred_at
        for r in users.arrivals(0)
    ]
    assert max(delays) <= habits.disorder
    assert max(delays) > habits.disorder / 2 > habits.transit[1]
