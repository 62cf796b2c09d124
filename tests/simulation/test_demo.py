"""The demo: its accounts agree with the learner's, and runs can be repeated and resumed to the bit."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from worker.embedded.state import StateFolder
from worker.errors import FailedError, InputError
from worker.metrics import imbalances
from worker.simulation.demo.ledger import totals
from worker.simulation.demo.report import heads, summary, summary_rows
from worker.simulation.demo.run import Beside, Demo, DemoSettings, additive
from worker.simulation.users import KINDS, TIDY, Habits
from worker.simulation.worth import tenths
from worker.stream.events import ArmChange
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.version_records import encode_parameters

SMALL = DemoSettings(users=40, episodes=6)
UNTIDY = Habits(silent=0.1, leaving=0.05, disordered=0.3, duplicated=0.3, poison=0.2, prefetching=0.4)


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
    assert all(row.score.regret >= -1e-9 for row in golden.rows)


@pytest.mark.parametrize("habits", [TIDY, UNTIDY], ids=["tidy", "untidy"])
@pytest.mark.parametrize("repeats", [True, False], ids=["repeats", "no-repeats"])
def test_the_learner_counts_exactly_the_answers_of_the_users(habits, repeats):
    demo = finish(Demo(DemoSettings(users=40, episodes=4, repeats=repeats, seed=3), habits=habits))
    for row in demo.rows:
        assert row.episode.sessions == row.score.sessions
        assert row.episode.displays == sum(row.score.answered)
        assert row.episode.clicks == sum(row.score.clicked)
        assert row.episode.reward == pytest.approx(row.score.earned)
        assert row.episode.late == 0


def test_the_accounts_balance_after_every_second_of_an_untidy_run():
    demo = Demo(DemoSettings(users=60, episodes=3), habits=UNTIDY)
    while not demo.finished:
        demo.step()
        parked = sum(task.parked for task in demo.embedded.tasks)
        assert set(imbalances(demo.embedded.tally, demo.open_sessions, parked).values()) == {0}
    tally = demo.embedded.tally
    assert min(tally.repeated, tally.redundant, tally.dead_arrivals, tally.dead_feedback, tally.ended.total()) > 0


def test_poison_of_every_kind_becomes_dead_letters_and_does_not_change_the_parameters():
    poisoned = finish(Demo(DemoSettings(users=60, episodes=3), habits=Habits(poison=1.0)))
    assert set(poisoned.dead_letters) >= set(KINDS)
    clean = finish(Demo(DemoSettings(users=60, episodes=3), habits=Habits(poison=0.0)))
    assert poisoned.parameters.sha256 == clean.parameters.sha256


# ── repeated and resumed ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("partitions", [1, SMALL.partitions, 12])
def test_the_result_is_decided_by_the_settings_and_does_not_depend_on_the_number_of_partitions(golden, partitions):
    demo = finish(Demo(DemoSettings(users=40, episodes=6, partitions=partitions)))
    assert demo.parameters.sha256 == golden.parameters.sha256
    assert demo.rows == golden.rows


class KilledError(Exception):
    pass


def die_at(state: StateFolder, commits: int) -> None:
    """Kill the process instead of making a transaction durable."""
    commit, left = state.commit, commits

    def maybe() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise KilledError
        commit()

    state.commit = maybe  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_anywhere_ends_like_one_that_was_never_killed(golden, tmp_path: Path, seed):
    chance = random.Random(seed)
    deaths = 0
    finished = False
    while not finished:
        with StateFolder(tmp_path) as state:
            demo = Demo(SMALL, state=state)
            die_at(state, chance.randrange(2, 300))
            try:
                finish(demo)
                finished = True
            except KilledError:
                deaths += 1
    assert deaths >= 3
    assert demo.parameters.sha256 == golden.parameters.sha256
    assert demo.rows == golden.rows


def test_a_finished_run_can_be_made_longer_and_started_again(golden, tmp_path: Path):
    for episodes in (2, 6):
        with StateFolder(tmp_path) as state:
            demo = finish(Demo(DemoSettings(users=40, episodes=episodes), state=state))
            assert len(demo.rows) == episodes
    with StateFolder(tmp_path) as state:
        again = Demo(SMALL, state=state)
        assert again.finished
        assert summary(again) == summary(demo)
    assert demo.parameters.sha256 == golden.parameters.sha256
    assert demo.rows == golden.rows


def test_a_folder_without_a_demo_is_refused(tmp_path: Path):
    zero = Parameters.first(LearningSettings(dim=5), (Arm(arm="a", reward=1.0),))
    with StateFolder(tmp_path) as state:
        state.put_parameters(zero, encode_parameters(zero), kept=8)
        with pytest.raises(InputError, match="does not hold the state of a demo"):
            Demo(SMALL, state=state)


def test_an_arm_added_from_outside_is_served_and_never_clicked(tmp_path: Path):
    with StateFolder(tmp_path) as state:
        demo = Demo(DemoSettings(users=40, episodes=3), state=state)
        demo.embedded.order(ArmChange(arm="new", reward=9.0, active=True))
        finish(demo)
    assert any(arm.arm == "new" for arm in demo.parameters.arms)
    assert all(row.episode.clicks == sum(row.score.clicked) for row in demo.rows)
    assert all(row.episode.displays == sum(row.score.answered) for row in demo.rows)


# ── the run beside ───────────────────────────────────────────────────────────────────────────────────────────────────


def follow(process: Beside, windows: int) -> None:
    deadline = time.monotonic() + 300
    while not process.follow(windows, wait=0.1):
        assert time.monotonic() < deadline


def test_the_run_beside_has_the_figures_of_a_run_in_this_process_and_none_later_than_the_demo():
    same = Demo(additive(DemoSettings(users=20, episodes=4)))
    with Beside(same.settings) as process:
        assert process.follow(0, wait=60)
        while not same.finished:
            same.step()
            follow(process, len(same.rows))
            assert process.rows == same.rows
            assert process.sha256 == (same.parameters.sha256 if same.rows else "")
    assert len(process.rows) == 4


def test_a_failure_of_the_run_beside_is_one_line():
    wrong = msgspec.structs.replace(SMALL, environment="nowhere")
    with Beside(wrong) as process, pytest.raises(FailedError) as raised:
        follow(process, 1)
    assert str(raised.value).startswith("the additive run beside failed: ")
    assert "nowhere" in str(raised.value)
    assert "\n" not in str(raised.value)


# ── summary ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tenths_are_at_least_one_window_and_a_run_without_windows_has_a_summary(golden):
    first, last = tenths(golden.rows)
    assert (first[0].index, last[0].index) == (0, 5)
    assert tenths([]) == ([], [])
    assert totals([]).share == 1.0
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
    first = golden.rows[0].score
    assert numbers["pseudo_regret"]["first_tenth"] == pytest.approx(first.regret / first.sessions)
    assert numbers["imbalances"] == {}


def test_a_policy_without_a_budget_has_no_explored_ratio():
    numbers = summary(finish(Demo(DemoSettings(users=20, episodes=1, policy="greedy"))))
    assert numbers["explored"]["ratio"] is None
    assert ("explored", "0", "sessions; the policy has no budget") in summary_rows(numbers, 1.0)


def test_who_gets_which_ad_is_counted_by_kind(golden):
    for row in golden.rows:
        score = row.score
        assert sum(score.kinds) == score.sessions
        assert all(max(ads) <= sessions for ads, sessions in zip(score.shown, score.kinds, strict=True))
        assert np.sum(score.shown) == np.sum(score.best) == score.wanted == 5 * score.sessions  # distinct ads
        assert 0 <= score.right <= score.wanted


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
    settings = DemoSettings(episodes=60, partitions=1)
    beside = Beside(additive(settings))
    beside.rows = list(finish(Demo(beside.settings)).rows)
    numbers = summary(finish(Demo(settings)), beside)
    assert numbers["revenue_share"]["last_tenth"] >= 0.98
    assert numbers["revenue_share"]["first_tenth"] < 0.9
    assert numbers["pseudo_regret"]["last_tenth"] < numbers["pseudo_regret"]["first_tenth"] / 10
    assert numbers["explored"]["ratio"] == pytest.approx(1.0, abs=0.05)
    assert numbers["best_ads"]["last_tenth"] >= 0.85 > 0.7 > numbers["additive"]["best_ads"]["last_tenth"]
    assert numbers["additive"]["revenue_share"]["last_tenth"] < 0.9
