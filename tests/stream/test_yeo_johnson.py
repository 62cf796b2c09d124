"""Skewed numbers: the transformation against its formula, and the choice of its exponent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.stream.test_standardising import SETTINGS
from worker.errors import InputError
from worker.stream.ad_features import with_ads
from worker.stream.contexts import LARGEST_STANDARD, Standardisation
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm
from worker.stream.version_records import encode_parameters
from worker.stream.yeo_johnson import EXPONENTS, LEAST_VALUES, chosen_scale, inverse, yeo_johnson

Z = np.random.default_rng(0).standard_normal(1000)
exponents = st.sampled_from(EXPONENTS) | st.floats(-2, 4)


def formula(x: float, exponent: float) -> float:
    """Return the transformation of one number, case by case as Yeo and Johnson have it."""
    if x >= 0 and exponent != 0:
        return ((x + 1) ** exponent - 1) / exponent
    if x >= 0:
        return math.log(x + 1)
    if exponent != 2:
        return -((1 - x) ** (2 - exponent) - 1) / (2 - exponent)
    return -math.log(1 - x)


@given(arrays(np.float64, 6, elements=st.floats(-1e6, 1e6)), st.sampled_from([*EXPONENTS, -1.7, 0.3, 1.9]))
def test_every_case_is_that_of_the_formula(numbers: Any, exponent: float) -> None:
    wanted = [formula(x, exponent) for x in numbers.tolist()]
    # The formula itself cancels near 0: its error is one of rounding 1.
    assert yeo_johnson(numbers, exponent) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert yeo_johnson(numbers * 3, exponent, 3.0) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(arrays(np.float64, (5, 3), elements=st.floats(-1e15, 1e15) | st.just(np.nan)), exponents, exponents)
def test_any_numbers_stay_finite_and_each_depends_on_itself_alone(rows: Any, one: float, other: float) -> None:
    known = Standardisation(
        centre=np.array([1.0, -2.0, 0.5]),
        scale=np.array([3.0, 1e-5, 2.0]),
        exponent=np.array([one, 1.0, other]),
        unit=np.array([1e-12, 1.0, 1e3]),
    )
    together = known.apply(rows)
    assert np.isfinite(together).all()
    assert (np.abs(together) <= LARGEST_STANDARD).all()
    assert (together[np.isnan(rows)] == 0).all()
    for row in range(len(rows)):
        assert known.apply(rows[row : row + 1]).tobytes() == together[row].tobytes()
    plain = Standardisation(centre=known.centre, scale=known.scale)
    assert together[:, 1].tobytes() == plain.apply(rows)[:, 1].tobytes(), "an exponent of 1 changes nothing"


@given(st.floats(-1e6, 1e6), st.sampled_from(EXPONENTS))
def test_the_inverse_takes_a_number_back(x: float, exponent: float) -> None:
    number, powers, unit = np.array([x]), np.array([exponent]), np.array([2.0])
    transformed = yeo_johnson(number, powers, unit)
    if abs(transformed[0]) * max(1.0, abs(exponent), abs(2 - exponent)) < 0.99 or 0 <= exponent <= 2:
        assert inverse(transformed, powers, unit) == pytest.approx(number, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("unit", [1e-9, 0.01, 1.0, 1e5])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_skewed_number_becomes_normal_in_any_unit(unit: float, sign: int) -> None:
    skewed = sign * unit * np.exp(2 * Z)[:, None]
    known = Standardisation.estimate(skewed)
    assert known.exponent.tolist() == [0.0 if sign > 0 else 2.0]
    assert np.corrcoef(known.apply(skewed)[:, 0], sign * Z)[0, 1] > 0.999
    centre, deviation = known.typical
    assert centre == pytest.approx([sign * unit], rel=0.3)
    assert deviation == pytest.approx([2 * unit], rel=0.3), "the logarithm has a deviation of 2"


@pytest.mark.parametrize(
    "numbers",
    [Z, 40 + 10 * Z, 1.7e9 + Z, np.sign(Z) * Z**2, np.exp(0.2 * Z), (Z > 1).astype(float), np.full(1000, 3.0)],
    ids=["normal", "shifted", "dates", "long tails on both sides", "hardly skewed", "marks", "constant"],
)
def test_other_numbers_stay_as_they_are(numbers: Any) -> None:
    assert chosen_scale(numbers) == (1.0, 1.0)


def test_zeros_do_not_decide_and_few_values_are_not_judged() -> None:
    spent = np.where(np.arange(1000) % 2 == 0, 0.0, np.exp(2 * Z))
    assert chosen_scale(spent)[0] == 0.0
    known = Standardisation.estimate(spent[:, None])
    paid = spent > 0
    assert np.corrcoef(known.apply(spent[paid, None])[:, 0], Z[paid])[0, 1] > 0.999
    assert chosen_scale(np.append(np.exp(2 * Z[: LEAST_VALUES - 1]), [0.0, np.nan])) == (1.0, 1.0)
    assert chosen_scale(np.exp(2 * Z[:LEAST_VALUES]))[0] == 0.0
    assert chosen_scale(np.exp(0.6 * Z))[0] == 0.0
    assert chosen_scale(np.exp(0.6 * Z[:30])) == (1.0, 1.0), "30 values might be so by chance"


def test_only_numbers_get_an_exponent_and_none_where_it_is_not_asked_for() -> None:
    both = np.exp(2 * np.column_stack([Z, Z]))
    assert Standardisation.estimate(both, np.array([True, False])).exponent.tolist() == [0.0, 1.0]
    for numbers in (None, np.array([True, True])):
        assert Standardisation.estimate(both, numbers, straighten=False).exponent.tolist() == [1.0, 1.0]
    ads = tuple(Arm(arm=f"{n}", reward=1.0, features={"price": price}) for n, price in enumerate(np.exp(2 * Z[:200])))
    declared = with_ads(None, ads)
    assert declared is not None
    assert declared.ads[0].centre == pytest.approx(np.exp(2 * Z[:200]).mean()), "the numbers of ads stay as they are"


def test_a_version_has_exponents_and_units_and_one_without_them_has_none() -> None:
    known = Standardisation.estimate(np.exp(2 * np.column_stack([Z, Z / 2, Z / 9])))
    version = replace(Parameters.first(SETTINGS, (Arm(arm="a", reward=1.0),)), standardisation=known, folds=1)
    again = decode_parameters(encode_parameters(version))
    assert again == version
    assert again.standardisation is not None
    assert again.standardisation.exponent.tolist() == [0.0, 0.0, 1.0]
    plain = replace(version, standardisation=Standardisation(centre=known.centre, scale=known.scale))
    assert plain.sha256 != version.sha256
    with pytest.raises(InputError, match="scale and unit above zero"):
        replace(known, unit=np.zeros(3))
