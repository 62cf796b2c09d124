"""Crosses of declared features: their columns, their names, what is refused, and versions that have them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stream.test_features import declarations
from tests.stream.test_standardising import ARMS, SETTINGS, traffic, versions_of
from worker.errors import InputError
from worker.stream.chance import hashed_column
from worker.stream.contexts import MISSING
from worker.stream.crosses import MOST_PAIRS
from worker.stream.features import MOST_COLUMNS, Feature, Features
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import LearningSettings, check_columns, continued
from worker.stream.tastes import ad_profile, columns_of_object, context_columns, contributions
from worker.stream.version_records import encode_parameters

USERS = {"low": "number", "cents": "number", "mark": ["yes"]}
CROSSED = Features.of_table({"context": USERS, "crosses": [["low", "cents"], ["cents", "mark"], ["low", "low"]]})
WIDE = Features.of_table({"context": {"city": {"hashed": 20}, "site": ["x", "y", "z", "u"]}, "crosses": "all"})


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def hash_of_pair(left: str, right: str) -> int:
    """Return the column of two values, such as device=mobile, of a cross of categories with many pairs."""
    word = 0
    for shown in (left, right):
        word ^= hashed_column(shown.partition("=")[0].partition("#")[0], shown, 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        word = (word ^ word >> shift) * factor % 2**64
    return word % MOST_PAIRS


def crossed_by_hand(declared: Features, row: list[float]) -> list[float]:
    """Return the columns of the model, feature by feature and value by value."""
    parts: dict[str, list[float]] = {}
    for feature in declared.context:
        parts[feature.name], row = row[: feature.width], row[feature.width :]
    kinds = {feature.name: feature for feature in declared.context}
    columns = [value for part in parts.values() for value in part]
    for left, right in declared.crosses:
        one, other = kinds[left], kinds[right]
        products = [a * b for a in parts[left] for b in parts[right]]
        if "number" not in (one.kind, other.kind) and len(products) > MOST_PAIRS:
            shared = [0.0] * MOST_PAIRS
            for a, name in zip(parts[left], one.column_names, strict=True):
                for b, second in zip(parts[right], other.column_names, strict=True):
                    if a and b:
                        shared[hash_of_pair(name, second)] = a * b
            products = shared
        columns += products
    return columns


@st.composite
def crossed_rows(draw: st.DrawFn) -> tuple[Features, Any]:
    context = draw(declarations)
    wide = (Feature(name="v wide", kind="hashed", columns=9), Feature(name="w wide", kind="hashed", columns=8))
    context += draw(st.sampled_from([(), wide]))
    pairs = [
        (one.name, other.name)
        for one, other in combinations_with_replacement(context, 2)
        if one is not other or one.kind == "number"
    ]
    crosses = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=6)) if pairs else []
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row: list[float] = []
        for feature in context:
            if feature.kind == "number":
                row.append(draw(st.floats(-8, 8)))
            else:
                mark = draw(st.integers(0, feature.width))  # the last is none of them
                row += [float(place == mark) for place in range(feature.width)]
        rows.append(row)
    return Features(context=context, crosses=tuple(crosses)), np.array(rows)


@given(crossed_rows())
def test_crosses_are_those_of_a_slow_obvious_loop_and_every_row_is_crossed_by_itself(case: Any) -> None:
    declared, rows = case
    crossed = declared.crossing.apply(rows)
    assert crossed.shape == (len(rows), declared.model_dim)
    assert crossed.tolist() == [crossed_by_hand(declared, row) for row in rows.tolist()]
    for row in range(len(rows)):
        assert declared.crossing.apply(rows[row : row + 1]).tobytes() == crossed[row].tobytes()
    assert sum(declared.widths) == declared.model_dim == len(declared.model_names)
    assert len(declared.widths) == len(declared.context) + len(declared.crosses)
    assert declared.model_names[: declared.dim] == declared.context_names
    assert msgspec.convert(json.loads(json.dumps(declared.document())), Features) == declared


def test_columns_have_names_and_pairs_that_share_columns_have_stable_ones() -> None:
    assert CROSSED.model_names[3:] == ("low × cents", "cents × mark=yes", "low × low")
    assert CROSSED.widths == [1] * 6
    assert WIDE.widths == [20, 4, MOST_PAIRS]
    assert WIDE.model_names[-1] == "city × site#64"
    marks = np.zeros((2, 24))
    marks[0, [0, 20]] = marks[1, [19, 23]] = 1.0  # the first city on site x, the last one on site u
    assert WIDE.crossing.apply(marks)[:, 24:].argmax(axis=1).tolist() == [17, 36]


@pytest.mark.parametrize(
    ("crosses", "message"),
    [
        ([["low", "age"]], "'age' is no declared feature of contexts; declared are low, cents, mark"),
        ([["mark", "mark"]], "says nothing: it is the category again"),
        ([["low", "mark"], ["mark", "low"]], "the cross of 'mark' and 'low' is declared twice"),
        ([["low", "cents", "mark"]], r'crosses must be "all" or pairs of features, such as \[\["age", "device"\]\]'),
        ([["low", 3]], "crosses must be"),
        ("every", "crosses must be"),
        ({"low": "mark"}, "crosses must be"),
    ],
    ids=str,
)
def test_a_cross_that_makes_no_sense_is_refused_with_one_line(crosses: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Features.of_table({"context": USERS, "crosses": crosses})
    assert "\n" not in str(caught.value)


def test_the_square_of_a_boolean_says_nothing() -> None:
    declared = {"context": {"age": "number", "member": "boolean"}}
    with pytest.raises(InputError, match="the cross of 'member' and 'member' says nothing: it is the boolean again"):
        Features.of_table({**declared, "crosses": [["age", "age"], ["member", "member"]]})
    assert Features.of_table({**declared, "crosses": "all"}).crosses == (("age", "member"),)


# ── too many columns ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_too_many_columns_are_refused_before_they_are_made_and_the_widest_feature_is_named() -> None:
    many: dict[str, Any] = {"age": "number", **{f"f{n}": {"hashed": 500 + n} for n in range(4)}}
    with pytest.raises(InputError, match=rf"have .* columns, more than {MOST_COLUMNS:,}: 'f3' has the most, 503: hash"):
        Features.of_table({"context": many, "crosses": "all"})
    numbers = Features.of_table({"context": dict.fromkeys("abcdefghijklmnopqrstuvwxyz", "number"), "crosses": "all"})
    with pytest.raises(InputError, match="columns fit, and every feature and cross has one: leave some out"):
        check_columns(LearningSettings(dim=26, features=numbers, window=1000), 1000)


def test_columns_that_do_not_fold_in_a_tenth_of_the_window_are_refused() -> None:
    wide = Features.of_table({"context": {"age": "number", "country": {"hashed": 1000}}})
    settings = LearningSettings(dim=wide.dim, features=wide)
    with pytest.raises(InputError, match=r"about 14 s per fold, .* 735 columns fit, and 'country' has the most, 1,000"):
        check_columns(settings, 10)
    with pytest.raises(InputError, match="and 3 ads take about"):
        Learner(replace(settings, window=10_000), ARMS)
    check_columns(replace(settings, window=600_000), 10)
    check_columns(settings, 1)
    fits = Features.of_table({"context": {"age": "number", "country": {"hashed": 734}}})
    check_columns(LearningSettings(dim=fits.dim, features=fits), 10)
    check_columns(LearningSettings(dim=1001), 10)  # the numbers of a plain vector cannot be declared otherwise
    ads = Features(context=fits.context[:1], ads=wide.context[1:])
    with pytest.raises(InputError, match="take about"):
        check_columns(LearningSettings(dim=1, features=ads), 10)


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_learner_folds_crosses_and_its_versions_have_them() -> None:
    version = versions_of(traffic([150, 50]), features=CROSSED)[-1]
    assert version.folds == 2
    assert version.settings.dim == 3
    assert version.model.dim == version.settings.model_dim == CROSSED.model_dim == 6
    raw = np.array([[0.002, 7e5, 1.0], [MISSING, 1e5, 0.0]])
    assert version.standardisation is not None
    standardised = version.standardisation.apply(raw)
    assert version.prepared(raw).tolist() == CROSSED.crossing.apply(standardised).tolist()
    assert version.prepared(raw)[1, 3] == version.prepared(raw)[1, 5] == 0.0, "a missing number is the mean in crosses"
    groups = version.model.pack()["context_groups.widths"]
    assert groups.tolist() == CROSSED.widths
    again = decode_parameters(encode_parameters(version))
    assert again == version
    assert again.settings.features == CROSSED
    without = Parameters.first(replace(SETTINGS, features=replace(CROSSED, crosses=())), ARMS)
    assert "crosses" not in json.loads(encode_parameters(without))["features"]


def test_a_model_keeps_its_crosses_whatever_is_declared() -> None:
    published = replace(SETTINGS, features=CROSSED)
    assert continued(SETTINGS, published).features == CROSSED
    assert continued(published, published) == published
    for crosses in ((), CROSSED.crosses[:1], CROSSED.crosses[::-1]):
        assert continued(replace(published, features=replace(CROSSED, crosses=crosses)), published) == published


def test_reasons_and_tastes_have_the_names_of_crosses() -> None:
    first = Parameters.first(replace(SETTINGS, features=CROSSED), ARMS)
    assert context_columns(first) == CROSSED.model_names
    context = np.array([2.0, 3.0, 1.0])
    parts = contributions(first, 0, context, first.prepared(context[None, :])[0], context_columns(first))
    found = {part.feature: part.value for part in parts}
    assert found == {
        "base rate": 1.0,
        "low": 2.0,
        "cents": 3.0,
        "mark=yes": 1.0,
        "low × cents": 6.0,
        "cents × mark=yes": 3.0,
        "low × low": 4.0,
    }
    context[2] = 0.0
    parts = contributions(first, 0, context, first.prepared(context[None, :])[0], context_columns(first))
    assert set(found) - {part.feature for part in parts} == {"mark=yes", "cents × mark=yes"}
    assert {taste.feature for taste in ad_profile(first, 0).tastes} == set(CROSSED.model_names)
    wide = Parameters.first(LearningSettings(dim=24, features=WIDE), ARMS)
    assert wide.model.pack()["context_groups.widths"].tolist() == WIDE.widths
    assert columns_of_object(wide, {"city": "Rome", "site": "x"})[-1] == "city=Rome × site=x"
    assert columns_of_object(wide, {"city": "Rome"})[-1] == "city × site#64"
