from dataclasses import replace

import pytest

from worker.bandit.additive import AdditiveModel
from worker.bandit.policies import POLICIES
from worker.simulation import experiment
from worker.simulation.experiment import ExperimentSettings, ExperimentTask, run_all, run_task

SHORT = ExperimentSettings(episodes=12, warmup=2, dim=3, arms=6, horizon=3)


def numbers(run):
    """Everything but the seconds, which differ between equal runs."""
    return replace(run, seconds=0.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("repeats", [True, False])
def test_a_run_is_decided_by_its_seed(policy, repeats):
    settings = replace(SHORT, repeats=repeats)
    task = ExperimentTask(policy=policy, users=7, seed=5)
    assert numbers(run_task(settings, task)) == numbers(run_task(settings, task))
    assert run_task(settings, task).regret != run_task(settings, replace(task, seed=6)).regret


def test_the_result_does_not_depend_on_the_number_of_processes():
    tasks = [
        ExperimentTask(policy=policy, users=10, seed=seed)
        for policy in ("ucbbp", "epsilon-greedy")
        for seed in range(2)
    ]
    alone = {(run.policy, run.seed): numbers(run) for run in run_all(SHORT, tasks, jobs=1)}
    together = {(run.policy, run.seed): numbers(run) for run in run_all(SHORT, tasks, jobs=2)}
    assert alone == together


def test_all_policies_meet_the_same_world_users_and_moods():
    warm = replace(SHORT, warmup=11)
    runs = [run_task(warm, ExperimentTask(policy=policy, users=9, seed=2)) for policy in POLICIES]
    assert {run.regret[:11] for run in runs} == {runs[0].regret[:11]}
    assert {run.reward[:11] for run in runs} == {runs[0].reward[:11]}
    assert len({run.regret[11] for run in runs}) > 1


def test_regret_is_never_negative_and_only_clicks_earn():
    run = run_task(SHORT, ExperimentTask(policy="aucbbp", users=20, seed=0))
    assert min(run.regret) >= -1e-12
    assert len(run.regret) == len(run.reward) == len(run.explored) == SHORT.episodes
    assert 0 < sum(run.reward) <= run.clicks  # revenues are at most 1
    assert run.clicks < run.displays <= 20 * SHORT.horizon * SHORT.episodes


def test_the_warm_up_explores_everything_and_greedy_nothing_after_it():
    run = run_task(SHORT, ExperimentTask(policy="greedy", users=20, seed=0))
    assert run.explored == (1.0,) * 2 + (0.0,) * 10


def test_aucbbp_explores_less_and_less():
    run = run_task(replace(SHORT, episodes=40), ExperimentTask(policy="aucbbp", users=50, seed=0))
    assert run.explored[2] > run.explored[10] > run.explored[39] > 0


def test_the_estimate_is_close_where_it_is_used():
    run = run_task(
        ExperimentSettings(environment="uniform", episodes=100), ExperimentTask(policy="ucbbp", users=50, seed=1)
    )
    assert run.log_odds_error < 0.25
    assert run.theta_error >= run.log_odds_error / 10
    assert run.projection == pytest.approx(1, abs=0.4)


def test_a_fold_without_a_usable_estimate_is_counted_and_keeps_the_old_one(monkeypatch):
    def fail(*_, **__):
        raise experiment.EstimationError("no")

    monkeypatch.setattr(AdditiveModel, "fold", fail)
    run = run_task(SHORT, ExperimentTask(policy="ucbbp", users=5, seed=0))
    assert run.rejected == SHORT.episodes
    assert run.projection == 0.0


def test_a_run_is_stuck_if_it_has_regret_at_its_end():
    run = run_task(SHORT, ExperimentTask(policy="ucbbp", users=50, seed=0))
    assert replace(run, regret=(90.0,) * 10 + (0.29,) * 50).stuck is False
    assert replace(run, regret=(0.0,) * 10 + (0.31,) * 50).stuck is True
    assert replace(run, regret=(1.0, 2.5)).cumulative == 3.5
