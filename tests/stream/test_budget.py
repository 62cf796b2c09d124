"""The budget of learning: who is journaled, how many there are, and what that means for ranks and estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bandit.beliefs import seen
from tests.stream import scenes
from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import sigmoid
from worker.stream.chance import ALL, Shares, journaled
from worker.stream.events import Progress
from worker.stream.folding import score_of_rank
from worker.stream.learner import Learner
from worker.stream.settings import Arm, LearningSettings

# ── shares ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(sessions=st.integers(1, 10**7), explored=st.floats(0, 1), at_most=st.integers(0, 10**6))
def test_the_expected_number_is_the_budget_and_exploring_sessions_come_first(sessions, explored, at_most) -> None:
    exploring = explored * sessions
    shares = Shares.of(sessions=sessions, exploring=exploring, at_most=at_most)
    shares.check()
    if not at_most or sessions <= at_most:
        assert shares == ALL
        return
    assert shares.exploring >= shares.others
    expected = shares.exploring * exploring + shares.others * (sessions - exploring)
    assert expected <= at_most * (1 + 1e-9)
    assert expected == pytest.approx(at_most)


@given(st.text(max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_a_session_that_a_share_keeps_is_kept_by_every_higher_one(session: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert journaled("salt", session, low) == journaled("salt", session, low)
    if journaled("salt", session, low) != 0:
        assert journaled("salt", session, high) != 0


def test_the_share_of_sessions_that_is_kept_is_the_share() -> None:
    kept = sum(journaled("salt", f"user-{n}", 0.1) != 0 for n in range(20_000))
    assert kept == pytest.approx(2_000, abs=4 * (20_000 * 0.09) ** 0.5)


# ── serving ──────────────────────────────────────────────────────────────────────────────────────────────────────────

SAMPLED = replace(scenes.parameters(policy="greedy"), shares=Shares(1.0, 0.3))


def split(count: int = 60) -> tuple[list[str], list[str]]:
    """Return sessions that the others' share of `SAMPLED` keeps, and sessions that it leaves out."""
    names = [f"s{n}" for n in range(count)]
    kept = [name for name in names if journaled(SAMPLED.settings.salt, name, 0.3) != 0]
    return kept, [name for name in names if name not in kept]


def test_a_session_that_is_left_out_is_served_like_any_other_and_leaves_no_fact() -> None:
    (kept, *_), (left, *_) = split()
    emitted = {}
    for name in (kept, left):
        task = scenes.serving(SAMPLED)
        emits = [
            task.handle([one])
            for one in (*[scenes.arrival(name)] * 2, scenes.passed(name), scenes.click(name, position=2))
        ]
        emitted[name] = emits
        restored = scenes.serving(SAMPLED)
        restored.restore(scenes.stored([pair for one in emits[:2] for pair in one.changelog]))
        assert scenes.facts(restored.handle([scenes.passed(name)])) == scenes.facts(emits[2])
    for one, other in zip(emitted[kept], emitted[left], strict=True):
        assert [{**d, "session_id": ""} for d in scenes.decisions(one)] == [
            {**d, "session_id": ""} for d in scenes.decisions(other)
        ]
        assert len(one.changelog) == len(other.changelog)
        assert [fact["kind"] for fact in scenes.facts(one)] != []
        assert scenes.facts(other) == []
    assert [fact.get("share") for fact in scenes.facts(emitted[kept][0])] == [0.3]
    assert (emitted[left][0].tally.opened, emitted[left][0].tally.unjournaled) == (1, 1)
    assert emitted[kept][0].tally.unjournaled == 0


def test_feedback_before_its_arrival_is_journaled_in_any_case() -> None:
    left = split()[1][0]
    task = scenes.serving(SAMPLED)
    assert [fact["kind"] for fact in scenes.facts(task.handle([scenes.passed(left)]))] == ["feedback"]
    emits = task.handle([scenes.arrival(left)])
    assert (scenes.facts(emits), emits.tally.applied) == ([], 1)


def test_sessions_are_counted_by_window_until_it_is_over_and_again_after_a_restart() -> None:
    task = scenes.serving(SAMPLED)
    names = [name for part in split() for name in part]
    emits = task.handle([scenes.arrival(name, at=30_000 + 1_000 * n) for n, name in enumerate(names)])
    assert task.opened == ((0, 30), (60_000, 30))
    restored = scenes.serving(SAMPLED)
    restored.restore(scenes.stored(emits.changelog))
    assert restored.opened == task.opened
    task.acknowledged(60_000 + SAMPLED.settings.grace)
    assert task.opened == ((60_000, 30),)
    task.hand_over()
    assert task.opened == ()
    assert scenes.serving().opened is None, "where all are journaled, progress is as it was"


# ── the learner ──────────────────────────────────────────────────────────────────────────────────────────────────────

ARMS = tuple(Arm(arm=name, reward=reward) for name, reward in (("a", 1.0), ("b", 2.0)))
LEARNING = LearningSettings(dim=2, window=100, session_timeout=50, lateness=5, standardise=False, learn_at_most=20)


def sessions(count: int, share: float | None, mode: str = "exploit", start: int = 0) -> list[Any]:
    return [
        event
        for n in range(start, start + count)
        for event in (
            scenes.opened(f"s{n}", 10, ("a", "b"), modes=(mode,) * 2, share=share, context=(n / 100, 1.0)),
            scenes.feedback(1, "a", n % 2 == 0, 20, f"s{n}"),
        )
    ]


def test_episodes_and_the_next_shares_count_all_sessions_and_say_how_many_were_learned_from() -> None:
    everybody = Learner(LEARNING, ARMS).handle(scenes.written([*sessions(20, None), scenes.progress(200)]))
    assert (everybody.versions[0].shares, everybody.episodes[0].learned) == (ALL, None)
    facts = [*sessions(10, None, "explore"), *sessions(5, 0.125, start=10)]
    done = Progress(partition=0, partitions=1, time=200, opened=((0, 48),))
    outcome = Learner(LEARNING, ARMS).handle(scenes.written([*facts, done]))
    (episode,), (version,) = outcome.episodes, outcome.versions
    assert (episode.sessions, episode.learned) == (48, 15)
    assert (episode.displays, episode.clicks) == (10 + 5 * 8, 5 + 3 * 8)
    assert (episode.reward, episode.explored) == (5 + 3 * 8, 10)
    assert version.expected_sessions == 48
    assert version.shares == Shares.of(sessions=48, exploring=10.0, at_most=20) == Shares(1.0, 10 / 38)


def test_counts_of_several_records_and_partitions_are_joined() -> None:
    def progress(partition: int, time: int, count: int) -> Progress:
        return Progress(partition=partition, partitions=2, time=time, opened=((0, count), (10**12, 7)))

    facts = [progress(0, 5, 9), *sessions(5, 0.5), progress(1, 50, 3), progress(0, 200, 8), progress(1, 200, 30)]
    learner = Learner(LEARNING, ARMS)
    (version,) = learner.handle(scenes.written(facts)).versions
    assert version.expected_sessions == 39
    assert version.resume_offset == len(facts), "counts of the far future hold nothing back"


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_weighted_threshold_selects_as_many_as_a_ranking_of_all_sessions() -> None:
    """High scores explored and were all journaled, a tenth of the others was; a sixth have one and the same score."""
    generator = np.random.default_rng(0)
    taken = []
    for _ in range(40):
        scores = np.where(generator.random(6_000) < 1 / 6, 1.0, generator.gamma(2.0, size=6_000))
        shares = np.where(scores > np.quantile(scores, 0.95), 1.0, 0.1)
        kept = generator.random(6_000) < shares
        for rank in (50.0, 900.0, 4_000.0):
            threshold, tie = score_of_rank(scores[kept], 1 / shares[kept], rank)
            taken.append(((scores > threshold).sum() + tie * (scores == threshold).sum()) / rank)
    ratios = np.array(taken).reshape(-1, 3)
    assert ratios.mean(axis=0) == pytest.approx(1, abs=0.02)
    assert ratios[:, 0] == pytest.approx(1, abs=0.03)


# ── the estimate ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_estimate_from_a_share_by_context_and_slate_is_unbiased_and_by_outcome_it_would_not_be() -> None:
    generator = np.random.default_rng(1)
    truth, users = np.array([0.8, -0.5]), 3_000
    errors: dict[str, list[np.ndarray[Any, Any]]] = {"context": [], "outcome": []}
    for _ in range(30):
        contexts, arms = generator.normal(size=(users, 2)), generator.integers(0, 2, users)
        clicked = generator.random(users) < sigmoid(contexts @ truth + np.array([-1.0, 0.5])[arms])
        share = {
            "context": np.where(contexts[:, 0] > 1, 1.0, np.where(arms == 1, 0.3, 0.1)),
            "outcome": np.where(clicked, 0.4, 0.2),
        }
        for name, shares in share.items():
            kept = generator.random(users) < shares
            data = seen(contexts[kept], np.arange(kept.sum()), arms[kept], clicked[kept])
            prior = AdditiveModel.prior(dim=2, arms=2, ridge=0.01, intercept=False)
            fitted = prior.fold(data, estimator="laplace").model
            errors[name].append(np.concatenate([fitted.theta_context - truth, fitted.theta_arms - (-1.0, 0.5)]))
    off = {name: np.mean(found, axis=0) / (np.std(found, axis=0) / 30**0.5) for name, found in errors.items()}
    assert np.abs(off["context"]).max() < 4
    assert np.abs(off["outcome"]).max() > 10
