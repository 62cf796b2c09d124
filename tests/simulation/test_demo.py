"""The demo: its accounts agree with the learner's, and runs can be repeated to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from worker.bandit.arrays import NO_ARM
from worker.simulation.demo.ledger import totals
from worker.simulation.demo.run import Demo, DemoSettings, additive_run, beside, received_run
from worker.simulation.demo.summary import heads, summary, summary_rows
from worker.simulation.users import KINDS, TIDY, Habits, Users
from worker.simulation.worth import tenths
from worker.stream.events import ArmChange

SMALL = DemoSettings(users=40, episodes=6)
UNTIDY = Habits(silence=0.1, leaving=0.05, disordered=0.3, duplicates=0.3, poison=0.2, prefetching=0.4)


def finish(demo: Demo) -> Demo:
    while not demo.finished:
        demo.step()
    return demo


@pytest.fixture(scope="module")
def golden() -> Demo:
    return finish(Demo(SMALL))


# ── accounts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_window_has_a_version_and_an_account(golden):
    assert [row.index for row in golden.rows] == list(range(6))
    assert [row.episode.version for row in golden.rows] == list(range(1, 7))
    assert golden.parameters.version == 6
    assert all(row.worth.regret >= -1e-9 for row in golden.rows)


@pytest.mark.parametrize("habits", [TIDY, UNTIDY], ids=["tidy", "untidy"])
@pytest.mark.parametrize("repeats", [True, False], ids=["repeats", "no-repeats"])
def test_the_learner_counts_exactly_the_answers_of_the_users(monkeypatch, habits, repeats):
    monkeypatch.setattr(Users, "expire", lambda *_: None)
    demo = finish(Demo(DemoSettings(users=40, episodes=4, repeats=repeats, seed=3), habits=habits))
    for row in demo.rows:
        cohort = demo.users.cohort(row.index)
        clicked = [arm for arm in cohort.clicked if arm != NO_ARM]
        assert row.episode.sessions == row.worth.sessions == len(cohort)
        assert row.episode.displays == sum(cohort.answered)
        assert row.episode.clicks == len(clicked)
        assert row.episode.reward == pytest.approx(demo.world.rewards[clicked].sum())


def test_the_accounts_balance_after_every_second_of_an_untidy_run():
    demo = Demo(DemoSettings(users=60, episodes=3), habits=UNTIDY)
    while not demo.finished:
        demo.step()
        assert set(demo.embedded.tally.imbalances(demo.embedded.tasks).values()) == {0}
    tally = demo.embedded.tally
    assert min(tally.repeated, tally.redundant, tally.dead_arrivals, tally.dead_feedback, tally.ended.total()) > 0


def test_poison_of_every_kind_becomes_dead_letters_and_does_not_change_the_parameters():
    poisoned = finish(Demo(DemoSettings(users=60, episodes=3), habits=Habits(poison=1.0)))
    assert set(poisoned.embedded.tally.dead) >= set(KINDS)
    clean = finish(Demo(DemoSettings(users=60, episodes=3), habits=Habits(poison=0.0)))
    assert poisoned.parameters.sha256 == clean.parameters.sha256


# ── repeated ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_result_is_decided_by_the_settings(golden):
    demo = finish(Demo(SMALL))
    assert demo.parameters.sha256 == golden.parameters.sha256
    assert totals(demo.rows) == totals(golden.rows)


def test_an_arm_added_from_outside_is_served_and_never_clicked():
    demo = Demo(DemoSettings(users=40, episodes=3))
    demo.embedded.order(ArmChange(arm="new", reward=9.0, active=True))
    finish(demo)
    assert any(arm.arm == "new" for arm in demo.parameters.arms)
    displays, clicks, *_ = demo.parameters.accounts.total.of(11)[:, 10]
    assert displays > 0 == clicks


# ── the run beside ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_run_beside_is_that_of_this_process():
    with beside(SMALL) as connection:
        process = received_run(connection)
    same = additive_run(SMALL)
    assert process.settings == same.settings == replace(SMALL, model="additive")
    assert process.sha256 == same.sha256
    assert totals(process.rows) == totals(same.rows)
    assert len(process.rows) == 6


# ── summary ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tenths_are_at_least_one_window_and_a_run_without_windows_has_a_summary(golden):
    first, last = tenths(golden.rows)
    assert (first[0].index, last[0].index) == (0, 5)
    assert tenths([]) == ([], [])
    assert totals([]).worth.share == 1.0
    demo = Demo(SMALL)
    demo.step()
    assert summary(demo)["sessions"] == 0
    assert summary_rows(summary(demo), 0.0)[0] == ("sessions", "0", "in 0 episodes, 0.0 s")


def test_the_summary_is_the_sum_of_the_windows(golden):
    numbers = summary(golden)
    assert numbers["sessions"] == sum(row.episode.sessions for row in golden.rows)
    assert numbers["clicks"] == sum(row.episode.clicks for row in golden.rows)
    assert numbers["reward"] == pytest.approx(sum(row.episode.reward for row in golden.rows))
    assert numbers["oracle_reward"] - numbers["served_reward"] == pytest.approx(numbers["pseudo_regret"]["total"])
    first = golden.rows[0].worth
    assert numbers["pseudo_regret"]["first_tenth"] == pytest.approx(first.regret / first.sessions)
    assert numbers["imbalances"] == {}


def test_a_policy_without_a_budget_has_no_explored_ratio():
    numbers = summary(finish(Demo(DemoSettings(users=20, episodes=1, policy="greedy"))))
    assert numbers["explored"]["ratio"] is None
    assert ("explored", "0", "sessions; the policy has no budget") in summary_rows(numbers, 1.0)


def test_who_gets_which_ad_is_counted_by_kind(golden):
    for row in golden.rows:
        assert row.kinds.sum() == row.worth.sessions
        assert (row.shown <= row.kinds[:, None]).all()
        assert row.shown.sum() == row.best.sum() == 5 * row.worth.sessions  # distinct ads
        assert 0 <= row.right <= row.best.sum()


def test_the_heads_of_a_version_refer_to_contexts_as_they_arrive(golden):
    version = golden.parameters
    assert version.standardisation is not None
    found, deviations = heads(version)
    contexts = golden.users.cohort(6).contexts[:20]
    with_one = np.column_stack([np.ones(len(contexts)), contexts])
    assert with_one @ found.T == pytest.approx(version.model.log_odds(version.prepared(contexts)))
    assert deviations[:, 0] == pytest.approx(version.model.widths(version.prepared(np.zeros((1, 5))))[0])


@pytest.mark.slow
def test_the_demo_approaches_the_oracle_within_its_budget_and_the_additive_model_cannot():
    settings = DemoSettings(episodes=60)
    numbers = summary(finish(Demo(settings)), additive_run(settings))
    assert numbers["revenue_share"]["last_tenth"] >= 0.98
    assert numbers["revenue_share"]["first_tenth"] < 0.9
    assert numbers["pseudo_regret"]["last_tenth"] < numbers["pseudo_regret"]["first_tenth"] / 10
    assert numbers["explored"]["ratio"] == pytest.approx(1.0, abs=0.05)
    assert numbers["best_ads"]["last_tenth"] >= 0.85 > 0.7 > numbers["additive"]["best_ads"]["last_tenth"]
    assert numbers["additive"]["revenue_share"]["last_tenth"] < 0.9
