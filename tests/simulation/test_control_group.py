"""The lift of whole demos against the truth, which only a simulation knows."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from tests.programs import show
from worker.bandit.arrays import Floats, sigmoid
from worker.bandit.planning import values_of_slates
from worker.simulation.demo.run import Demo, DemoSettings
from worker.stream import comparison
from worker.stream.events import Arrival
from worker.stream.joining import ClosedWindow
from worker.stream.lift import OUTCOMES, Lift, Scores
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner

RUNS = 200


def true_worth(demo: Demo, window: ClosedWindow, version: Parameters) -> Floats:
    """Return what the sessions of a window that a version served are worth together, (2 outcomes, 2 groups)."""
    rows = [row for row, plan in enumerate(window.plans) if plan.parameters_version == version.version]
    names, contexts = [window.keys[row][0] for row in rows], [window.plans[row].context for row in rows]
    arrivals = [Arrival(session_id=name, occurred_at=0, context=()) for name in names]
    period, planner, worth = demo.users.period_of(window.start), SlatePlanner(version), np.zeros((2, 2))
    cohort = demo.users.cohort(period)
    for group, share in enumerate((0.0, 1.0)):
        planned = [slate.arms for slate in planner.plan(arrivals, contexts, control_share=share)]
        users, slates = demo.users.slates(period, dict(zip(names, planned, strict=True)))
        chances = sigmoid(demo.world.log_odds_of(cohort.contexts[users], slates))
        chances *= cohort.stays[users]  # nobody clicks after leaving
        for outcome, prices in enumerate((demo.world.rewards, np.ones(len(demo.users.arms)))):
            worth[outcome, group] = values_of_slates(chances, prices[slates])[:, 0].sum()
    return worth


def followed(seed: int) -> tuple[bool, float]:
    """Run a demo; return whether the true lifts were inside at all looks, and the width relative to no predictions."""
    # The salt decides who is in the control group. With the same one, all runs would have the same luck.
    demo = Demo(DemoSettings(seed=seed, control_share=0.05, control="random", salt=f"adcascade {seed}"))
    bare, truth, inside, scores_of = Lift(control="random"), np.zeros((2, 2)), True, comparison.scores_of

    def observed(window: ClosedWindow, served: Mapping[int, Parameters], prices: Floats) -> Scores | None:
        nonlocal bare, truth
        scores = scores_of(window, served, prices)
        assert scores is not None
        bare = bare.plus(replace(scores, expected=np.zeros_like(scores.expected)), window.start)
        truth = truth + sum(true_worth(demo, window, version) for version in served.values())
        return scores

    with patch.object(comparison, "scores_of", observed):
        while not demo.finished:
            demo.step()
            lift = demo.parameters.lift or bare
            assert lift.sessions == bare.sessions
            for outcome, (policy, control) in zip(OUTCOMES, truth.tolist(), strict=True):
                if (found := lift.compare(outcome)) is not None:
                    shown = (
                        (found.difference, (policy - control) / lift.sessions),
                        (found.relative, policy / control - 1),
                    )
                    inside &= all(interval is None or interval.low <= true <= interval.high for interval, true in shown)
    widths = [found.difference.high - found.difference.low for one in (lift, bare) if (found := one.compare("revenue"))]
    return inside, widths[0] / widths[1]


@pytest.mark.thorough
def test_the_true_lift_is_inside_at_all_looks_and_predictions_make_the_interval_narrower() -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = []
        for seed, run in enumerate(pool.map(followed, range(RUNS))):
            runs.append(run)
            inside, width = sum(one for one, _ in runs), statistics.median(ratio for _, ratio in runs)
            show(f"seed {seed}: inside in {inside} of {len(runs)} runs, width {width:.2f} × that without predictions")
    assert inside >= 0.95 * RUNS
    assert width <= 0.8
