from dataclasses import replace

import numpy as np
import pytest

from worker.bandit import MODELS
from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import sigmoid
from worker.bandit.bonuses import explore_budget
from worker.bandit.policies import POLICIES
from worker.simulation.experiment import run as experiment
from worker.simulation.experiment.run import run_all, run_task
from worker.simulation.experiment.settings import ExperimentSettings, ExperimentTask

SHORT = ExperimentSettings(episodes=12, warmup=2, dim=3, arms=6, horizon=3)


PERSONAL = ExperimentSettings(model="personal")


def task(policy="ucbbp", users=50, seed=1000):
    return ExperimentTask(policy=policy, users=users, seed=seed)


def run_with(base=PERSONAL, *, policy="ucbbp", users=50, seed=1000, **changes):
    return run_task(replace(base, **{"answers": None, **changes}), task(policy, users, seed))


def numbers(run):
    """Everything but the seconds, which differ between equal runs."""
    return replace(run, seconds=0.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("repeats", [True, False])
def test_a_run_is_decided_by_its_seed(policy, repeats):
    first, again, other = (run_with(SHORT, policy=policy, users=7, seed=n, repeats=repeats) for n in (5, 5, 6))
    assert numbers(first) == numbers(again)
    assert first.regret != other.regret


def test_the_result_does_not_depend_on_the_number_of_processes():
    tasks = [task(policy, 10, seed) for policy in ("ucbbp", "epsilon-greedy") for seed in range(2)]
    alone = {(run.policy, run.seed): numbers(run) for run in run_all(SHORT, tasks, jobs=1)}
    together = {(run.policy, run.seed): numbers(run) for run in run_all(SHORT, tasks, jobs=2)}
    assert alone == together


def test_all_policies_meet_the_same_world_users_and_moods():
    runs = [run_with(SHORT, policy=policy, users=9, seed=2, warmup=11) for policy in POLICIES]
    assert {run.regret[:11] for run in runs} == {runs[0].regret[:11]}
    assert {run.reward[:11] for run in runs} == {runs[0].reward[:11]}
    assert len({run.regret[11] for run in runs}) > 1


def test_the_warm_up_explores_everything_and_greedy_nothing_after_it():
    run = run_with(SHORT, policy="greedy", users=20, seed=0)
    assert run.explored == (1.0,) * 2 + (0.0,) * 10


def test_a_fold_without_a_usable_estimate_is_counted_and_keeps_the_old_one(monkeypatch):
    def fail(*_, **__):
        raise experiment.EstimationError("no")

    monkeypatch.setattr(AdditiveModel, "fold", fail)
    run = run_with(SHORT, users=5, seed=0)
    assert run.rejected == SHORT.episodes
    assert run.projection == 0.0


def test_a_run_is_stuck_if_it_has_regret_at_its_end():
    run = run_with(SHORT)
    assert replace(run, regret=(90.0,) * 10 + (0.29,) * 50).stuck is False
    assert replace(run, regret=(0.0,) * 10 + (0.31,) * 50).stuck is True
    assert replace(run, regret=(1.0, 2.5)).cumulative == 3.5


def test_the_share_lost_is_that_of_the_revenue_of_the_best_slates():
    run = run_with(SHORT)
    made = replace(run, regret=(2.0, 1.0) + (0.5,) * 20, oracle=(4.0,) * 22)
    assert made.lost() == 13 / 88
    assert made.lost(1, 2) == 3 / 8
    assert made.lost_at_end == 0.5 / 4


@pytest.mark.parametrize("environment", ["opposite", "leaving"])
@pytest.mark.parametrize("repeats", [True, False])
def test_no_slates_are_worth_more_than_the_oracle_s_and_revenue_is_what_they_are_worth(environment, repeats):
    changes = {"environment": environment, "repeats": repeats, "model": "personal", "episodes": 40}
    run = run_with(SHORT, policy="random", users=200, seed=3, **changes)
    assert min(run.regret) >= -1e-12
    expected = sum(run.oracle) - sum(run.regret)
    assert sum(run.reward) == pytest.approx(expected, rel=0.05)
    assert expected < 0.9 * sum(run.oracle)


# ── the warm-up ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("environment", ["uniform", "rare", "tastes"])
def test_the_warm_up_displays_all_arms_equally_often(environment, monkeypatch):
    shown = []
    learn = experiment._Experiment._learn

    def counted(self, t, answers):
        sessions, positions = experiment._displayed(*answers[1:])
        shown.append(np.bincount(answers.slates[sessions, positions], minlength=10))
        learn(self, t, answers)

    monkeypatch.setattr(experiment._Experiment, "_learn", counted)
    run_with(ExperimentSettings(), policy="greedy", environment=environment, episodes=4, warmup=3)
    for displays in np.cumsum(shown[:3], axis=0):
        assert displays.max() - displays.min() <= 1


# ── users who leave ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_answer_rates_are_learned_where_users_leave_unless_told_otherwise():
    assert ExperimentSettings().answers == "all"
    assert ExperimentSettings(stay=0.9).answers == "learned"
    assert ExperimentSettings(environment="leaving").answers == "learned"
    assert ExperimentSettings(environment="leaving", answers="all").answers == "all"


def test_what_drives_users_away_is_avoided_if_it_is_learned_who_goes_on():
    def lost(answers):
        return run_with(environment="leaving", episodes=80, answers=answers).lost(41)

    assert lost("learned") < 0.06
    assert lost("all") > 2 * lost("learned")


def test_a_display_without_an_answer_was_not_clicked():
    settings = replace(SHORT, environment="silent", reported=0.05, model="personal", episodes=40)
    made = experiment._Experiment(settings, task("random", 200, 0))
    made.run()
    contexts = made.world.contexts(np.random.default_rng(0), 500)
    estimate, truth = sigmoid(made.belief.log_odds(contexts)), sigmoid(made.world.log_odds(contexts))
    assert estimate.mean() == pytest.approx(truth.mean(), rel=0.1)
    assert made.answers.rates().of_arms(np.arange(6), 3) == pytest.approx(0.05, abs=0.02)
    assert 40 * 200 < made.displays < 1.4 * 40 * 200


# ── tastes, features and new arms ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("environment", "changes", "learned", "missed"),
    [("tastes", {"episodes": 60}, 0.05, 0.2), ("digits", {"dim": 64, "horizon": 3, "episodes": 50}, 0.3, 0.4)],
)
def test_the_personal_model_learns_tastes_and_digits_and_the_additive_one_cannot(environment, changes, learned, missed):
    if environment == "digits":
        pytest.importorskip("sklearn")

    personal, additive = (run_with(environment=environment, model=model, **changes) for model in MODELS)
    assert personal.lost(41) < learned
    assert additive.lost(41) > missed


def test_new_arms_with_features_start_where_arms_like_them_are():
    def lost(features):
        settings = ExperimentSettings(
            environment="tastes", model="personal", features=3, arms=20, new_arms=10, join=61, episodes=65
        )
        made = experiment._Experiment(settings, task(users=100))
        if not features:
            made._known = None
            made.belief = type(made.belief).prior(dim=5, arms=20, ridge=1.0, horizon=5)
        return made.run().lost(61)

    assert lost(features=True) < 0.8 * lost(features=False)


def test_new_arms_are_neither_shown_nor_missed_before_they_come():
    settings = replace(SHORT, environment="tastes", model="personal", new_arms=4, join=8)
    made = experiment._Experiment(settings, task("random", 50, 0))
    best = run_with(settings, policy="random", seed=0, arms=10, new_arms=0, join=None).oracle
    for t in range(1, 13):
        _, oracle, _, _ = made._episode(t)
        arms = 6 if t < 8 else 10
        assert made._slates.arms.max() < arms
        assert made.belief.arms == made.answers.arms == arms
        assert oracle == pytest.approx(best[t - 1]) if t >= 8 else oracle < best[t - 1]


def test_the_estimator_of_the_paper_runs_on_the_paper_s_model_unless_told_otherwise():
    assert ExperimentSettings(estimator="paper").intercept is False
    assert ExperimentSettings(estimator="paper", intercept=True).intercept is True
    assert ExperimentSettings(estimator="paper", model="personal").intercept is True
    assert ExperimentSettings().intercept is True


# ── new arms, change, declared features ──────────────────────────────────────────────────────────────────────────────


def test_optimism_that_is_spread_shares_out_the_new_arms():
    newcomers = {"environment": "newcomers", "episodes": 12, "join": 11, "new_arms": 5}
    together, shared = (run_with(users=500, spread=spread, **newcomers).new_displays for spread in (0.0, 1.0))
    assert len(together) == len(shared) == 5
    assert max(together) > 10 * min(together)
    assert max(shared) < 3 * min(shared)


def test_exploration_resumes_with_new_arms_and_with_change():
    def budgets(**changes):
        settings = ExperimentSettings(model="personal", episodes=60, **changes)
        made = experiment._Experiment(settings, task("aucbbp", 100))
        clocks = [made._episode(t) and made._clock for t in range(1, 61)]
        return [explore_budget(100, clock, 60) for clock in clocks], made.forgotten

    steady, _ = budgets(environment="tastes")
    joined, _ = budgets(environment="newcomers", new_arms=10, join=31)
    changed, forgotten = budgets(environment="drift", change="tastes", forgetting="auto")
    assert (steady[29], steady[31], joined[29], joined[30]) == (1, 1, 1, 7)
    assert next(t for t, _ in forgotten) in range(31, 36)
    assert max(changed[30:36]) > 10
    assert budgets(environment="drift", change="tastes")[1] == []


def test_what_has_changed_is_learned_again_sooner_with_forgetting():
    drift = {"policy": "aucbbp", "environment": "drift", "episodes": 100}
    assert run_with(forgetting="auto", **drift).lost(71) < 0.5 * run_with(**drift).lost(71)


def test_products_that_matter_are_learned_if_they_are_declared():
    told, untold = (
        run_with(users=300, environment="interactions", episodes=30, crosses=crosses) for crosses in ("all", "none")
    )
    assert told.lost(21) < 0.03
    assert untold.lost(21) > 0.05


def test_skewed_numbers_are_learned_from_as_well_as_others():
    run = run_with(users=300, environment="skewed", episodes=30)
    assert run.lost(21) < 0.03  # without an exponent of its own for each number 0.11
    assert run.projection is None


def test_a_category_has_a_precision_of_its_own_and_noise_a_high_one():
    def strengths(noise):
        settings = ExperimentSettings(
            environment="categories", model="personal", dim=2, levels=10, noise=noise, episodes=20
        )
        made = experiment._Experiment(settings, task(users=300))
        made.run()
        return made.belief.strengths

    assert strengths(noise=None)[2] < 3
    assert strengths(noise=True)[2] > 30
