"""The estimators against the truth: exactly where it can be summed up, by repetition where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import Floats
from worker.bandit.policies import EpsilonGreedy
from worker.bandit.precision import Precision
from worker.evaluate.estimators import METHODS, DoublyRobust, Estimate, InversePropensity
from worker.evaluate.model import FittedModel, Judges, judges, model_error, slate_values
from worker.evaluate.sessions import Rule, Sessions
from worker.evaluate.support import LEAST_CLICKS, LEAST_SESSIONS, Support, Unsupported, support

from .scenes import KINDS, Scene

seeds = st.integers(0, 2**32 - 1)
scenes = st.builds(
    Scene,
    arms=st.integers(2, 3),
    horizon=st.integers(1, 2),
    share=st.floats(0.05, 1),
    epsilon=st.sampled_from([0.0, 0.3, 1.0]),
    repeats=st.booleans(),
    leaving=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
)


# ── probabilities ────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=50)
@given(scenes, st.integers(0, 3))
def test_the_probabilities_of_all_slates_sum_to_one(scene: Scene, excluding: int) -> None:
    scene = replace(scene, arms=4, excluding=excluding)
    rule = Rule(
        best=scene.plans(0),
        epsilon=np.full(KINDS, scene.epsilon),
        uniform=np.full(KINDS, scene.share),
        repeats=scene.repeats,
    )
    total = sum(
        np.where(possible, rule.chances(s, eligible)[:, -1], 0.0) for s, possible, eligible in scene.every_slate()
    )
    np.testing.assert_allclose(total, 1.0, rtol=1e-12)


@settings(deadline=None, max_examples=50)
@given(seeds, st.booleans(), st.floats(0.01, 1))
def test_the_probability_of_a_slate_is_the_propensity_that_serving_gives_it(
    seed: int, repeats: bool, epsilon: float
) -> None:
    scene = Scene(arms=4, horizon=3, repeats=repeats, epsilon=epsilon, seed=seed % 1000)
    uniforms = np.random.default_rng(seed).random((KINDS, 3, 2))
    drawn = EpsilonGreedy(epsilon=epsilon).slates(scene.planner(1), scene.contexts(), uniforms=uniforms)
    nothing = np.zeros(KINDS)
    rule = Rule(best=scene.plans(1), epsilon=nothing + epsilon, uniform=nothing, repeats=repeats)
    eligible = np.full((KINDS, 3), 4) if repeats else np.tile([4, 3, 2], (KINDS, 1))
    np.testing.assert_allclose(rule.steps(drawn.arms, eligible), drawn.propensities, rtol=1e-12)


# ── exact expectations: every slate and every answer, weighted by its probability ────────────────────────────────────


def every_session(scene: Scene) -> tuple[Sessions, Floats]:
    """Return all that can happen to all kinds of users, and how likely each is."""
    world, contexts, plans = scene.world(), scene.contexts(), (scene.plans(0), scene.plans(1))
    nothing = np.zeros(KINDS)
    served = Rule(best=plans[0], epsilon=nothing, uniform=nothing + scene.share, repeats=scene.repeats)
    rows: list[tuple[int, tuple[int, ...], int, bool, bool]] = []
    chances: list[float] = []
    for slates, _, eligible in scene.every_slate():
        shown, f = served.chances(slates, eligible)[:, -1], scene.chances(contexts, slates)
        for kind, end in product(range(KINDS), range(scene.horizon)):
            arrive = shown[kind] * np.prod((1 - f[kind, :end]) * (1 - scene.leaving)) / KINDS
            stay = arrive * (1 - scene.leaving)
            last = end == scene.horizon - 1
            for clicked, left, chance in (
                (True, False, stay * f[kind, end]),
                (False, True, arrive * scene.leaving),
                (False, False, stay * (1 - f[kind, end]) if last else 0.0),
            ):
                rows.append((kind, tuple(slates[kind].tolist()), end + 1, clicked, left))
                chances.append(chance)
    kinds = np.array([row[0] for row in rows])
    slates = np.array([row[1] for row in rows], dtype=np.intp).reshape(len(rows), scene.horizon)
    displayed = np.array([row[2] for row in rows])
    clicked = np.array([row[3] for row in rows])
    count, none = len(rows), np.zeros(len(rows))
    sessions = Sessions(
        contexts=contexts[kinds],
        slates=slates,
        displayed=displayed,
        answered=displayed - np.array([row[4] for row in rows]),
        clicked=clicked,
        earned=np.where(clicked, world.rewards[slates[np.arange(count), displayed - 1]], 0.0),
        prices=world.rewards[None],
        active=np.ones((1, scene.arms), dtype=bool),
        period=np.zeros(count, dtype=np.intp),
        excluded=(),
        served=Rule(best=plans[0][kinds], epsilon=none, uniform=none + scene.share, repeats=scene.repeats),
        target=Rule(best=plans[1][kinds], epsilon=none + scene.epsilon, uniform=none, repeats=scene.repeats),
        target_slates=plans[1][kinds][None],
        drawn=np.zeros(count, dtype=bool),
        depth=scene.horizon,
    )
    return sessions, np.array(chances)


def any_model(scene: Scene, seed: int) -> FittedModel:
    """Return a click model that has nothing to do with the truth."""
    generator = np.random.default_rng(seed)
    return FittedModel(
        clicks=AdditiveModel(
            theta_context=generator.standard_normal(3),
            theta_arms=generator.standard_normal(scene.arms),
            precision=Precision.prior(dim=3, arms=scene.arms, ridge=1.0),
        ),
        leaving=generator.uniform(0, 0.5, scene.horizon),
        reached=np.full(scene.horizon, 100.0),
    )


def weighed(sessions: Sessions) -> Support:
    eligible = sessions.eligible
    weights = sessions.target.chances(sessions.slates, eligible) / sessions.served.chances(sessions.slates, eligible)
    return Support(
        sessions=sessions, weights=weights, counts=np.ones(len(sessions)), effective=(), clicks=(), beyond=0.0
    )


@settings(deadline=None, max_examples=60)
@given(scenes)
def test_inverse_propensity_has_the_truth_as_its_exact_expectation(scene: Scene) -> None:
    sessions, chances = every_session(scene)
    assert chances.sum() == pytest.approx(1)
    found = weighed(sessions)
    value = InversePropensity().value(found, sessions, None)
    assert (chances * (value.value + value.influence)).sum() == pytest.approx(scene.truth(), rel=1e-9)
    np.testing.assert_allclose((chances[:, None] * found.stopped).sum(axis=0), 1.0, rtol=1e-9)


@settings(deadline=None, max_examples=60)
@given(scenes, seeds)
def test_doubly_robust_has_the_truth_as_its_exact_expectation_whatever_the_model(scene: Scene, seed: int) -> None:
    sessions, chances = every_session(scene)
    wrong = any_model(scene, seed)
    judge = Judges(
        folds=np.zeros(len(sessions), dtype=np.intp),
        models=(wrong,),
        whole=wrong,
        displays=0,
        clicks=0,
        expected_clicks=0,
    )
    value = DoublyRobust().value(weighed(sessions), sessions, judge)
    assert (chances * (value.value + value.influence)).sum() == pytest.approx(scene.truth(), rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(scenes)
def test_weights_vary_less_the_less_they_look_at(scene: Scene) -> None:
    """Of the whole slate, of the displays up to the click, and of these with the lottery averaged out."""
    sessions, chances = every_session(scene)
    found = weighed(sessions)
    rewards = found.sessions.rewards
    by_decision = (found.weights * rewards).sum(axis=1)
    whole_slate = (found.weights[:, -1:] * rewards).sum(axis=1)
    mean = (chances * by_decision).sum()
    assert (chances * whole_slate).sum() == pytest.approx(mean)
    assert (chances * by_decision**2).sum() <= (chances * whole_slate**2).sum() * (1 + 1e-9)
    # The drawn sessions alone: a slate was drawn with the probability that it has under the lottery's uniform part.
    uniformly = replace(sessions.served, uniform=np.ones(len(sessions)))
    eligible = sessions.eligible
    drawn = (
        uniformly.chances(sessions.slates, eligible) * scene.share / sessions.served.chances(sessions.slates, eligible)
    )
    alone = (
        sessions.target.chances(sessions.slates, eligible) / uniformly.chances(sessions.slates, eligible) / scene.share
    )
    at_end = sessions.displayed[:, None] - 1
    chosen = np.take_along_axis(drawn, at_end, axis=1)[:, 0]
    squares = (np.take_along_axis(alone, at_end, axis=1)[:, 0] * sessions.earned) ** 2
    assert (chances * by_decision**2).sum() <= (chances * chosen * squares).sum() * (1 + 1e-9)


# ── repetition: many logs of one world ───────────────────────────────────────────────────────────────────────────────

Runs = dict[str, list[Estimate]]


@cache
def repeated(scene: Scene, count: int, times: int, methods: tuple[str, ...] = tuple(METHODS)) -> Runs:
    generator = np.random.default_rng(11)
    runs: Runs = {method: [] for method in methods}
    for _ in range(times):
        sessions = scene.log(count, generator)
        judge = judges(sessions, generator=generator) if {"direct", "dr"} & set(methods) else None
        for method in methods:
            runs[method].append(METHODS[method].estimate(sessions, judge, confidence=0.95))
    return runs


def values(runs: list[Estimate]) -> Floats:
    return np.array([run.revenue.estimate for run in runs if run.revenue is not None])


def covered(runs: list[Estimate], truth: float) -> float:
    ends = [(run.revenue.low, run.revenue.high) for run in runs if run.revenue is not None]
    return float(np.mean([low <= truth <= high for low, high in ends]))


WEIGHING = ("replay", "ips", "snips")
DRAWN = Scene(leaving=0.05, excluding=3)
MIXED = Scene(share=0.4, arms=3, horizon=2, environment="uniform", repeats=False)
CHANCY = Scene(share=0.6, arms=3, horizon=2, epsilon=0.5, environment="uniform")

# A coverage of 95 % is seen as less than 90 % in 200 logs with a probability of 0.001.
TIMES = 200


@pytest.mark.parametrize("method", METHODS)
def test_the_interval_covers_the_truth_at_the_stated_rate(method: str) -> None:
    assert covered(repeated(DRAWN, 1200, TIMES)[method], DRAWN.truth()) >= 0.9


@pytest.mark.parametrize("method", WEIGHING)
@pytest.mark.parametrize("scene", [MIXED, CHANCY], ids=["a share drawn", "a target that draws"])
def test_the_interval_covers_the_truth_however_sessions_were_served(scene: Scene, method: str) -> None:
    assert covered(repeated(scene, 1800, TIMES, WEIGHING)[method], scene.truth()) >= 0.9


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_over_many_logs_is_the_truth(method: str) -> None:
    found = values(repeated(DRAWN, 1200, TIMES)[method])
    assert abs(found.mean() - DRAWN.truth()) < 4 * found.std() / np.sqrt(len(found))


@pytest.mark.parametrize("method", METHODS)
def test_the_error_told_is_the_error_made(method: str) -> None:
    runs = repeated(DRAWN, 1200, TIMES)[method]
    told = np.mean([run.revenue.error for run in runs if run.revenue is not None])
    assert told == pytest.approx(values(runs).std(), rel=0.2)


def test_doubly_robust_varies_less_than_inverse_propensity() -> None:
    runs = repeated(DRAWN, 1200, TIMES)
    assert values(runs["dr"]).var() < 0.95 * values(runs["ips"]).var()


def test_to_average_whole_matching_sessions_would_be_wrong() -> None:
    """Why replay goes position by position: a session that is clicked early has less to match."""
    scene, generator = Scene(), np.random.default_rng(2)
    naive = []
    for _ in range(60):
        sessions = scene.log(1500, generator)
        same = (sessions.slates == sessions.target.best) | ~sessions.reached
        naive.append(sessions.earned[same.all(axis=1)].mean())
    assert np.mean(naive) > scene.truth() + 10 * np.std(naive) / np.sqrt(len(naive))


def test_a_target_that_served_the_log_earned_what_the_log_earned() -> None:
    sessions = Scene(share=0.0).log(500, np.random.default_rng(0))
    sessions = replace(sessions, target=sessions.served, target_slates=sessions.served.best[None])
    for method in ("ips", "snips"):
        found = METHODS[method].estimate(sessions, None, confidence=0.95)
        assert found.revenue is not None
        assert found.revenue.estimate == pytest.approx(sessions.earned.mean())
        assert found.difference is not None
        assert found.difference.error == pytest.approx(0, abs=1e-12)
        assert found.matching == 500


# ── where there is no answer ─────────────────────────────────────────────────────────────────────────────────────────


def answer(scene: Scene, count: int, method: str, seed: int = 0) -> Estimate:
    sessions = scene.log(count, np.random.default_rng(seed))
    judge = judges(sessions, generator=np.random.default_rng(seed)) if method == "dr" else None
    return METHODS[method].estimate(sessions, judge, confidence=0.95)


@pytest.mark.parametrize(
    ("scene", "count", "method", "reason"),
    [
        (Scene(share=0.0), 400, "replay", "no session was drawn uniformly"),
        (Scene(share=0.0), 400, "ips", "the first position has 0.0 effective sessions"),
        (Scene(), 40, "ips", "the first position has"),
        (Scene(environment="rare", horizon=1), 200, "snips", "effective clicks"),
        (Scene(horizon=5), 1500, "ips", "position 4 has"),
        (Scene(horizon=5), 1500, "replay", "revenue from there on may be up to"),
    ],
)
def test_an_estimator_refuses_what_the_log_cannot_support(scene: Scene, count: int, method: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        answer(scene, count, method)


def test_no_sessions_are_no_support() -> None:
    sessions = Scene().log(10, np.random.default_rng(0))
    with pytest.raises(Unsupported, match="is deterministic"):
        support(sessions.part(np.zeros(10, dtype=bool)))


def test_support_is_judged_by_what_might_have_come_not_by_what_came() -> None:
    """Weights that came look well if the heavy ones did not come; to go by them would be to choose such logs."""
    scene = Scene(share=0.02, off=1.5)
    sessions = scene.log(1000, np.random.default_rng(0))
    lucky = sessions.part(~sessions.drawn)  # as if the lottery had drawn nobody
    weights = lucky.target.chances(lucky.slates, lucky.eligible) / lucky.served.chances(lucky.slates, lucky.eligible)
    used = weights[:, 0]
    assert used.sum() ** 2 / (used**2).sum() > 2 * LEAST_SESSIONS
    with pytest.raises(Unsupported, match="effective sessions"):
        support(lucky)


def test_what_lies_beyond_support_raises_the_upper_end_alone() -> None:
    """Most users leave or click at each position, so that the last ones matter little."""
    scene = Scene(environment="uniform", horizon=4, leaving=0.5)
    found = answer(scene, 12_000, "ips")
    assert found.revenue is not None
    assert 1 <= found.positions < 4
    assert 0 < found.beyond <= 0.1 * found.revenue.estimate
    assert found.revenue.high - found.revenue.estimate > found.beyond
    assert found.revenue.low < scene.truth() < found.revenue.high


def test_doubly_robust_leaves_to_the_model_what_lies_beyond_support() -> None:
    scene = Scene(horizon=5)
    runs = repeated(scene, 1500, 40, ("dr",))["dr"]
    assert all(run.positions < 5 and run.beyond == 0 for run in runs)
    assert covered(runs, scene.truth()) >= 0.85


def test_a_model_needs_clicks() -> None:
    sessions = Scene(environment="rare").log(30, np.random.default_rng(0))
    assert sessions.clicked.sum() < LEAST_CLICKS
    with pytest.raises(Unsupported, match="clicks"):
        judges(sessions, generator=np.random.default_rng(0))


def test_the_model_does_not_judge_arms_that_nobody_has_seen() -> None:
    sessions = Scene(arms=12, share=0.0).log(600, np.random.default_rng(0))
    judge = judges(sessions, generator=np.random.default_rng(0))
    unseen = sorted(set(range(12)) - set(sessions.slates.ravel().tolist()))
    slates = np.full((1, 600, 2), unseen[0])
    with pytest.raises(Unsupported, match="no session of the log has seen"):
        METHODS["direct"].estimate(replace(sessions, target_slates=slates), judge, confidence=0.95)


# ── the model ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_models_have_not_seen_the_sessions_that_they_judge() -> None:
    sessions = Scene().log(400, np.random.default_rng(0))
    before = judges(sessions, generator=np.random.default_rng(5))
    fold = before.folds == 2
    other = replace(sessions, contexts=np.where(fold[:, None], 9.0, sessions.contexts))
    after = judges(other, generator=np.random.default_rng(5))
    assert before.models[2].clicks == after.models[2].clicks
    assert before.models[1].clicks != after.models[1].clicks


def test_the_slopes_of_slate_values_are_their_derivatives() -> None:
    scene = Scene(arms=4, horizon=3)
    sessions = scene.log(20, np.random.default_rng(0))
    model = any_model(scene, 1)
    slates = sessions.target_slates[0]
    valued = slate_values(model, sessions, slates)

    def moved(change: Callable[[FittedModel], FittedModel]) -> Floats:
        return slate_values(change(model), sessions, slates).values[:, 0] - valued.values[:, 0]

    step = 1e-6
    for arm in range(4):
        theta = model.clicks.theta_arms + step * (np.arange(4) == arm)
        by = moved(lambda m, theta=theta: replace(m, clicks=replace(m.clicks, theta_arms=theta)))  # type: ignore[misc]
        np.testing.assert_allclose(by / step, (valued.slopes * (slates == arm)).sum(axis=1), atol=1e-5)
    for h in range(3):
        leaving = model.leaving + step * (np.arange(3) == h)
        by = moved(lambda m, leaving=leaving: replace(m, leaving=leaving))  # type: ignore[misc]
        np.testing.assert_allclose(by / step, -valued.losses[:, h], atol=1e-5)


def test_what_the_model_does_not_know_of_later_positions_is_less() -> None:
    sessions = Scene(arms=4, horizon=3).log(300, np.random.default_rng(0))
    judge = judges(sessions, generator=np.random.default_rng(0))
    whole, tail = model_error(judge, sessions), model_error(judge, sessions, after=2)
    assert 0 < tail.variance < whole.variance
    assert model_error(judge, sessions, after=3).variance == 0


def test_what_each_session_did_to_the_model_sums_to_its_variance() -> None:
    """Two ways to say the same: the information of the displays, and the spread of what they contributed."""
    sessions = Scene(arms=4, horizon=3).log(4000, np.random.default_rng(0))
    error = model_error(judges(sessions, generator=np.random.default_rng(0)), sessions)
    assert (error.pulls**2).sum() == pytest.approx(error.variance, rel=0.1)


def test_an_estimate_says_what_it_rests_on() -> None:
    found: Any = answer(Scene(), 1500, "ips")
    assert found.sessions == 1500
    assert 0 < found.matching < 1500
    assert len(found.effective) == 2
    assert found.effective[0] == pytest.approx(500)
    assert found.clicks >= LEAST_CLICKS
