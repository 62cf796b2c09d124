"""Intervals of means over sessions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.evaluate.intervals import interval, student_quantile

# From tables of Student's t.
TABLE = [(0.975, 5, 2.5706), (0.975, 10, 2.2281), (0.95, 20, 1.7247), (0.995, 30, 2.7500), (0.975, 1e9, 1.9600)]


@pytest.mark.parametrize(("probability", "freedom", "expected"), TABLE)
def test_quantiles_are_those_of_the_table(probability: float, freedom: float, expected: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(expected, abs=5e-3)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=50), st.floats(0.5, 0.999))
def test_the_estimate_lies_in_its_interval_and_more_confidence_is_wider(values: list[float], confidence: float) -> None:
    influence = np.array(values) - np.mean(values)
    found = interval(1.0, influence, confidence=confidence)
    wider = interval(1.0, influence, confidence=confidence + (1 - confidence) / 2)
    assert wider.low <= found.low <= 1.0 + 1e-9 <= found.high + 2e-9
    assert found.high <= wider.high


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=50), st.floats(0.1, 10))
def test_units_do_not_matter(values: list[float], unit: float) -> None:
    influence = np.array(values) - np.mean(values)
    one, other = interval(1.0, influence, confidence=0.9), interval(unit, unit * influence, confidence=0.9)
    assert other.high == pytest.approx(unit * one.high, rel=1e-6, abs=1e-9)


def test_sessions_that_are_all_alike_leave_no_doubt() -> None:
    found = interval(2.0, np.zeros(10), confidence=0.95, beyond=0.5)
    assert (found.low, found.high, found.error) == (2.0, 2.5, 0.0)


def test_other_uncertainty_adds_to_the_variance() -> None:
    influence = np.array([-1.0, 1.0] * 50)
    alone, more = (interval(0.0, influence, confidence=0.95, extra=extra) for extra in (0.0, 3 * 1 / 99))
    assert more.error == pytest.approx(2 * alone.error)


def test_rare_large_amounts_are_covered_where_a_symmetric_interval_fails() -> None:
    """One session in fifty earns, and what it earns varies: the usual interval misses above far more often."""
    generator = np.random.default_rng(0)
    truth, missed, usual = 0.02 * 2.0, 0, 0
    for _ in range(1000):
        values = np.where(generator.random(800) < 0.02, generator.exponential(2.0, 800), 0.0)
        mean = float(values.mean())
        found = interval(mean, values - mean, confidence=0.95)
        missed += not found.low <= truth <= found.high
        usual += abs(mean - truth) > 1.96 * values.std() / np.sqrt(800)
    assert missed <= 80 < usual
