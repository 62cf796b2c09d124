"""The lift: its figures against a reference that goes session by session, and its coverage in simulation."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stream import scenes
from worker.stream.contexts import pack_context
from worker.stream.events import ArmChange, Arrival
from worker.stream.learner import Learner
from worker.stream.lift import ALPHA, Lift, Scores, multiplier
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner

THOROUGH = bool(os.environ.get("ADCASCADE_THOROUGH"))


def drawn(
    generator: np.random.Generator, count: int, *, share: float = 0.05, gain: float = 1.0, knows: float = 1.0
) -> tuple[Scores, float]:
    """Return scores of a window of users who differ, and the true relative lift.

    Users click with p·gain under the policy, with p under the control. The model knows this share of their differences.
    """
    p = 1 / (1 + np.exp(2.0 - 1.5 * generator.normal(size=count)))
    control = (generator.random(count) < share).astype(np.float64)
    chances = np.where(control, p, np.minimum(1, gain * p))
    clicked = (generator.random(count) < chances).astype(np.float64)
    seen = knows * p + (1 - knows) * 0.2 if knows else np.zeros(count)
    expected = np.stack([np.minimum(1, gain * seen), seen])
    prices = generator.choice([0.5, 1.0, 2.0], count)
    earned, worth = np.stack([clicked * prices, clicked]), np.stack([expected * 7 / 6, expected])
    scores = Scores(control=control, share=np.full(count, share), earned=earned, expected=worth)
    return scores, float(np.minimum(1, gain * p).mean() / p.mean() - 1)


def reference(parts: list[Scores], outcome: int) -> tuple[float, float, float, float, float]:
    """Return both means, and the variances and the covariance of these, session by session."""
    rows = [
        (m1 + (1 - a) / (1 - pi) * (y - m1), m0 + a / pi * (y - m0))
        for one in parts
        for a, pi, y, m1, m0 in zip(one.control, one.share, one.earned[outcome], *one.expected[outcome], strict=True)
    ]
    policy, control = (math.fsum(scores) / len(rows) for scores in zip(*rows, strict=True))
    s11, s10, s00 = (
        math.fsum((one - policy) ** i * (other - control) ** j for one, other in rows) / len(rows) ** 2
        for i, j in ((2, 0), (1, 1), (0, 2))
    )
    return policy, control, s11, s10, s00


@given(st.integers(0, 10**6), st.floats(0.2, 0.8))
def test_the_figures_are_those_of_a_reference_that_goes_session_by_session(seed: int, share: float) -> None:
    generator = np.random.default_rng(seed)
    parts = [drawn(generator, 1_000, share=share, gain=0.8)[0] for _ in range(3)]
    lift = Lift(control="fixed")
    for number, one in enumerate(parts):
        lift = lift.plus(one, 60_000 * (1 + number))
    assert lift.sessions == 3_000
    assert lift.since == 60_000
    for number, outcome in enumerate(("revenue", "clicks")):
        policy, control, s11, s10, s00 = reference(parts, number)
        found = lift.compare(outcome)
        assert found is not None
        assert (found.policy, found.control) == pytest.approx((policy, control))
        width = multiplier(3_000)
        half = width * math.sqrt(s11 - 2 * s10 + s00)
        assert found.difference == pytest.approx((policy - control, policy - control - half, policy - control + half))
        for r in (found.relative.low, found.relative.high):  # where 0 leaves the interval of ψ₁ − (1 + r) ψ₀
            q = 1 + r
            at_the_end = width * math.sqrt(s11 - 2 * q * s10 + q * q * s00)
            assert abs(policy - q * control) == pytest.approx(at_the_end, rel=1e-6, abs=1e-9)
        assert found.relative.low <= found.relative.estimate <= found.relative.high


def test_nothing_is_said_before_there_are_enough_sessions_and_clicks_in_both_groups() -> None:
    generator = np.random.default_rng(0)
    lift = Lift(control="popular").plus(drawn(generator, 600)[0], 0)
    assert lift.compare("revenue") is None
    assert lift.sentence == "revenue per session against the most popular ads: not known yet"
    rare, _ = drawn(generator, 40_000)
    rare.earned[:] = 0
    assert Lift(control="fixed").plus(rare, 0).compare("clicks") is None


def test_a_control_group_of_the_wrong_size_is_noticed() -> None:
    generator = np.random.default_rng(0)
    right, _ = drawn(generator, 40_000)
    assert Lift(control="fixed").plus(right, 0).mismatch is None
    lost = right.control * (generator.random(40_000) < 0.3)  # facts of the control group are missing
    names = ("control", "share", "earned", "expected")
    kept = Scores(**{name: getattr(right, name)[..., lost == 0] for name in names})
    assert Lift(control="fixed").plus(kept, 0).mismatch == pytest.approx(0.7, abs=0.08)


def test_a_loss_is_certain_when_the_whole_interval_is_below() -> None:
    generator = np.random.default_rng(2)
    lost = Lift(control="tag:before:" + "0" * 64).plus(drawn(generator, 40_000, gain=0.4)[0], 0)
    assert lost.is_loss
    assert lost.name == "the version tagged before"
    assert lost.exceeds(0.05, sessions=0)
    assert not any(lost.exceeds(loss, after) for loss, after in ((0.0, 0), (0.99, 0), (0.05, 10**6)))


def test_one_sentence_says_what_it_earns() -> None:
    generator = np.random.default_rng(3)
    lift = Lift(control="fixed").plus(drawn(generator, 40_000, gain=1.3)[0], 0)
    assert lift.sentence == "revenue per session: your order 0.211, adcascade 0.284, +34 % (between +16 and +60)"
    assert lift.size.endswith("in the control group; clicks per session +32 % (between +16 and +51)")


# ── coverage ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def misses(runs: int, windows: int, **world: Any) -> tuple[int, int, float]:
    """Return in how many runs the lift was outside at any look, in revenue and clicks, and the last width."""
    missed, width = np.zeros(2, dtype=int), []
    truth = drawn(np.random.default_rng(10**6), 2_000_000, **world)[1]
    for seed in range(runs):
        generator, lift = np.random.default_rng(seed), Lift(control="fixed")
        inside = np.ones(2, dtype=bool)
        for window in range(windows):
            lift = lift.plus(drawn(generator, 500, **world)[0], window)
            for number, outcome in enumerate(("revenue", "clicks")):
                found = lift.compare(outcome)
                if found is not None and found.relative is not None:
                    inside[number] &= found.relative.low <= truth <= found.relative.high
        missed += ~inside
        width.append(found.relative.high - found.relative.low)
    return int(missed[0]), int(missed[1]), float(np.median(width))


RUNS = 1000 if THOROUGH else 40
#: What a binomial number with the allowed share exceeds once in a thousand times.
ALLOWED = ALPHA * RUNS + 3.1 * math.sqrt(ALPHA * (1 - ALPHA) * RUNS) if not THOROUGH else ALPHA * RUNS


@pytest.mark.parametrize("world", [{}, {"knows": 0.0}, {"gain": 1.3}, {"share": 0.5}], ids=str)
def test_the_interval_covers_the_truth_at_all_looks_together(world: dict[str, float]) -> None:
    revenue, clicks, _ = misses(RUNS, 60, **world)
    sys.stderr.write(f"{world}: outside at any look in {revenue} (revenue), {clicks} (clicks) of {RUNS} runs\n")
    assert revenue <= ALLOWED
    assert clicks <= ALLOWED


# ── the guardrail ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("gain", "changes", "guarded"),
    [
        (0.7, {"max_loss": 0.05}, True),
        (0.7, {"max_loss": 0.5}, False),
        (0.7, {}, False),
        (0.7, {"max_loss": 0.05, "guardrail_sessions": 50_000}, False),
        (1.3, {"max_loss": 0.05}, False),
    ],
    ids=str,
)
def test_the_next_version_is_guarded_while_the_loss_is_certain(gain: float, changes: dict[str, Any], guarded) -> None:
    settings = scenes.settings(control_share=0.05, random_share=0.5, policy="ucbbp", **changes)
    lift = Lift(control="fixed").plus(drawn(np.random.default_rng(0), 40_000, gain=gain)[0], 0)
    before = replace(Parameters.first(settings, scenes.ARMS), lift=lift, guarded=not guarded)
    learner = Learner(settings, (), [before])
    learner.handle(scenes.written([ArmChange(arm="hat", reward=1.0, active=True)]))
    assert learner.current.guarded is guarded
    planner = SlatePlanner(replace(learner.current, folds=1))
    arrivals = [Arrival(session_id=f"s{n}", occurred_at=0, context=(0.5, n / 50)) for n in range(100)]
    slates = planner.plan(arrivals, [pack_context(one.context) for one in arrivals])
    modes = {mode for slate in slates for mode in slate.modes}
    assert modes == ({"control", "guarded"} if guarded else {"control", "random", "explore"})
