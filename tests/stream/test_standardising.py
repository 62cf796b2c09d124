"""Contexts on any scale: centre, scale and exponents of the first sessions, and the sessions that wait for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.stream.scenes import feedback, opened, progress, written
from worker.errors import InputError, ParametersError
from worker.stream import version_sizes
from worker.stream.ad_features import with_ads
from worker.stream.catalogue import Refusal, carry_out
from worker.stream.contexts import (
    EXPONENTS,
    LARGEST_STANDARD,
    LEAST_SESSIONS,
    LEAST_VALUES,
    MISSING,
    Standardisation,
    chosen_scale,
    inverse,
    pack_context,
    yeo_johnson,
)
from worker.stream.events import ArmChange, Arrival, Command, Import, JournalEvent, Opened, Progress
from worker.stream.explanation import explain
from worker.stream.features import Features
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import SlatePlanner
from worker.stream.version_records import encode_parameters, parameters_document
from worker.stream.versions import difference

ARMS = tuple(Arm(arm=name, reward=1.0 + place) for place, name in enumerate("abc"))
SETTINGS = LearningSettings(dim=3, horizon=2, window=1000, session_timeout=300, lateness=50, policy="aucbbp")

finite = st.floats(allow_nan=False, allow_infinity=False)
contexts = arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 4)), elements=finite | st.just(np.nan))


# ── centre and scale ─────────────────────────────────────────────────────────────────────────────────────────────────


@given(contexts)
def test_any_finite_numbers_give_a_usable_scale_and_standard_numbers_within_bounds(given_contexts: Any) -> None:
    known = Standardisation.estimate(given_contexts)
    assert np.isfinite(known.centre).all()
    assert (np.isfinite(known.scale) & (known.scale > 0)).all()
    standard = known.apply(given_contexts)
    assert np.isfinite(standard).all()
    assert (np.abs(standard) <= LARGEST_STANDARD).all()
    assert (standard[np.isnan(given_contexts)] == 0).all()


@given(arrays(np.float64, (20, 3), elements=st.floats(-1e6, 1e6)), st.floats(1e-6, 1e6), st.floats(-1e6, 1e6))
def test_the_unit_of_a_number_does_not_matter(numbers: Any, factor: float, shift: float) -> None:
    varied = numbers + np.arange(20.0)[:, None] * 1e5  # none of them is constant
    one = Standardisation.estimate(varied).apply(varied)
    other = Standardisation.estimate(varied * factor + shift).apply(varied * factor + shift)
    assert np.allclose(one, other, atol=1e-5)


def test_constant_numbers_and_marks_keep_their_scale() -> None:
    generator = np.random.default_rng(0)
    marks = (generator.random((200, 2)) < 0.1).astype(float)
    data = np.column_stack([generator.normal(1e6, 50, 200), np.full(200, 0.1), np.full(200, np.nan), marks])
    known = Standardisation.estimate(data, np.array([True, True, True, False, False]))
    assert known.centre[3:].tolist() == [0.0, 0.0]
    assert known.scale[1:].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert known.centre[:3] == pytest.approx([data[:, 0].mean(), 0.1, 0.0])
    assert known.scale[0] == pytest.approx(data[:, 0].std())
    assert np.array_equal(known.apply(data)[:, 3:], marks)


def test_a_damaged_scale_is_refused() -> None:
    for centre, scale in (([0.0], [0.0]), ([np.nan], [1.0]), ([0.0], [-1.0]), ([0.0, 0.0], [1.0])):
        with pytest.raises(InputError):
            Standardisation(centre=np.array(centre), scale=np.array(scale))


# ── skewed numbers ───────────────────────────────────────────────────────────────────────────────────────────────────

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


# ── sessions that wait ───────────────────────────────────────────────────────────────────────────────────────────────


def traffic(sizes_of_windows: Sequence[int], *, length: int = 1000, seed: int = 0) -> list[JournalEvent]:
    """Return sessions of several windows, with wild scales and missing numbers, and the progress that closes them."""
    generator = np.random.default_rng(seed)
    events: list[JournalEvent] = []
    number = 0
    for window, count in enumerate(sizes_of_windows):
        for place in range(count):
            at = window * length + place * length // max(1, count)
            context = (generator.random() * 0.01, float(generator.integers(0, 10**6)), float(generator.integers(0, 2)))
            context = (MISSING, *context[1:]) if number % 9 == 0 else context
            name, slate = f"s{number:04}", tuple(generator.choice(list("abc"), 2).tolist())
            events.append(opened(name, at, slate, context=context, modes=("warmup", "warmup")))
            if number % 5:
                click = bool(generator.random() < 0.4)
                position = int(generator.integers(1, 3))
                events.append(feedback(position, slate[position - 1], click, at + 10, name))
            number += 1
        events.append(progress((window + 1) * length + 350))
    return events


def versions_of(events: Iterable[JournalEvent], **changes: Any) -> list[Parameters]:
    learner = Learner(replace(SETTINGS, **changes), ARMS)
    return [*learner.begin().versions, *learner.handle(written(events)).versions]


def test_sessions_wait_in_the_version_until_there_are_enough_and_then_all_of_them_count() -> None:
    several = versions_of(traffic([30, 50, 40]))
    (_, whole) = versions_of(traffic([120], length=3000), window=3000)
    assert [version.folds for version in several] == [0, 0, 0, 1]
    assert [len(version.pending) if version.pending else 0 for version in several] == [0, 30, 80, 0]
    assert all(version.standardisation is None for version in several[:3])
    last = several[-1]
    assert last.observations == whole.observations > 100
    # The sessions of both are the same, in the same order; so is every bit of what was learned.
    assert last.model == whole.model
    assert last.standardisation == whole.standardisation
    assert last.expected_sessions == 40, "as many users as the last window had"


def test_the_model_works_on_standard_numbers_from_the_first_fold_on() -> None:
    version = versions_of(traffic([150]))[-1]
    assert version.folds == 1
    known = version.standardisation
    assert known is not None
    assert known.centre == pytest.approx([0.005, 5e5, 0.5], rel=0.2)
    assert known.scale == pytest.approx([0.01 / 12**0.5, 1e6 / 12**0.5, 0.5], rel=0.2)
    raw = np.array([[MISSING, 1e12, 1.0]])
    assert version.prepared(raw)[0].tolist() == [0.0, 8.0, (1.0 - known.centre[2]) / known.scale[2]]


def test_a_learner_that_restarts_while_sessions_wait_makes_the_same_versions() -> None:
    records = written([*traffic([30, 50, 40, 60]), ArmChange(arm="d", reward=2.0, active=True)])
    undisturbed = Learner(SETTINGS, ARMS)
    made = [*undisturbed.begin().versions, *undisturbed.handle(records).versions]
    assert [version.folds for version in made] == [0, 0, 0, 1, 2, 2]
    for known in range(1, len(made) + 1):
        stored = [decode_parameters(encode_parameters(version)) for version in made[:known]]
        assert stored == made[:known]
        learner = Learner(SETTINGS, ARMS, stored)
        learner.check_start(0)
        again = learner.handle(records[learner.resume_offset :]).versions
        assert [version.sha256 for version in again] == [version.sha256 for version in made[known:]]
        assert learner.current == made[-1]


def test_a_window_that_closes_while_learning_is_frozen_leaves_what_waits_as_it_is() -> None:
    events = traffic([30, 50, 90])
    second = next(place for place, event in enumerate(events) if isinstance(event, Progress)) + 1
    frozen = [*events[:second], Command(action="freeze"), *events[second:]]
    made = versions_of(frozen)
    assert len(made[-1].pending or ()) == 30
    assert made[-1].frozen


def test_without_standardising_the_first_window_is_folded_as_it_is() -> None:
    events = [event for event in traffic([30]) if not isinstance(event, Opened) or event.context[0] == event.context[0]]
    version = versions_of(events, standardise=False)[-1]
    assert (version.folds, version.standardisation, version.pending) == (1, None, None)


def test_marks_of_declared_categories_are_not_standardised() -> None:
    declared = Features.of_table({"context": {"low": "number", "cents": "number", "mark": ["yes"]}})
    version = versions_of(traffic([150]), features=declared)[-1]
    known = version.standardisation
    assert known is not None
    assert (known.centre[2], known.scale[2]) == (0.0, 1.0)
    assert known.scale[1] > 1e5


def test_a_version_that_differs_in_scale_or_in_what_waits_is_another() -> None:
    _, waiting, more, folded = versions_of(traffic([30, 50, 40]))
    assert difference(waiting, replace(waiting, pending=None)) == ("pending", np.inf)
    assert difference(waiting, replace(waiting, pending=more.pending)) == ("pending", np.inf)
    assert folded.standardisation is not None
    moved = replace(folded.standardisation, centre=folded.standardisation.centre * (1 + 1e-6))
    name, by = difference(folded, replace(folded, standardisation=moved))
    assert name == "standardisation"
    assert 0 < by < 1e-5


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rows", [5.0]),
        ("rows", [0.5]),
        ("arms", [3.0]),
        ("arms", [-1.0]),
        ("positions", [0.0]),
        ("clicked", [0.5]),
        ("clicked", []),
        ("contexts", [[1.0]]),
        ("contexts", [1.0, 2.0, 3.0]),
    ],
)
def test_damaged_sessions_that_wait_are_refused(name: str, wrong: Any) -> None:
    record = json.loads(encode_parameters(versions_of(traffic([3]))[-1]))
    record["pending"] = {
        "contexts": [[1.0, 2.0, 3.0]],
        "rows": [0.0],
        "arms": [1.0],
        "positions": [1.0],
        "clicked": [1.0],
    }
    del record["sha256"]
    decode_parameters(json.dumps(record).encode(), complete=False)
    record["pending"][name] = wrong
    with pytest.raises(ParametersError, match="pending"):
        decode_parameters(json.dumps(record).encode(), complete=False)


def test_no_version_has_more_sessions_waiting_than_there_can_be() -> None:
    version = versions_of(traffic([LEAST_SESSIONS - 1]))[-1]
    assert version.pending is not None
    assert version.folds == 0
    with pytest.raises(ParametersError, match="198 sessions are pending, at most 99 can be"):
        replace(version, pending=version.pending.followed_by(version.pending.renamed([-1] * 3)))
    bound = version_sizes.largest_size(version.arms, version.model, version.settings)
    assert len(encode_parameters(version)) <= bound - version_sizes.RESERVE + 2_000


# ── one scale on every path ──────────────────────────────────────────────────────────────────────────────────────────


def test_serving_and_explaining_plan_on_the_same_numbers_as_the_learner() -> None:
    version = replace(versions_of(traffic([150]))[-1], folds=5)
    known = version.standardisation
    assert known is not None
    centred = replace(version, standardisation=None, settings=replace(version.settings, standardise=False))
    for raw in ((0.004, 250_000.0, 1.0), (MISSING, 7.0, 0.0), (5.0, 1e15, 1.0)):
        standard = tuple(known.apply(np.array([raw]))[0].tolist())
        users = [Arrival(session_id="s", occurred_at=0, context=context) for context in (raw, standard)]
        pairs = list(zip((version, centred), users, strict=True))
        slates = [SlatePlanner(one).plan([user], [pack_context(user.context)]) for one, user in pairs]
        assert slates[0] == slates[1]
        one, other = (explain(*pair) for pair in pairs)
        for mine, theirs in zip(one.positions, other.positions, strict=True):
            # Contributions name the values as they came.
            assert (mine.choice, mine.mode) == (theirs.choice, theirs.mode)
            for a, b in zip(mine.arms, theirs.arms, strict=True):
                assert replace(a, contributions=()) == replace(b, contributions=())


def test_a_rollback_takes_the_estimate_with_its_scale_or_with_what_waits() -> None:
    events = traffic([30, 50, 40, 60])
    for target in (1, 2, 3):
        made = versions_of([*events, Command(action="rollback", version=target)])
        assert made[-1].version == 5
        for name in ("model", "standardisation", "pending", "folds", "observations"):
            assert getattr(made[-1], name) == getattr(made[target], name), name


def test_an_import_takes_the_scale_and_is_refused_if_features_or_standardising_differ() -> None:
    waiting, folded = (versions_of(traffic(windows))[-1] for windows in ([30], [150]))
    current = Parameters.first(SETTINGS, ARMS[::-1])
    taken = carry_out(current, Import(parameters=parameters_document(folded), arms=False), {})
    assert isinstance(taken, Parameters)
    assert taken.standardisation == folded.standardisation
    taken = carry_out(current, Import(parameters=parameters_document(waiting), arms=False), {})
    assert isinstance(taken, Parameters)
    assert waiting.pending is not None
    assert taken.pending is not None
    names = [[one.arms[arm].arm for arm in one.pending.arms] for one in (taken, waiting) if one.pending]
    assert names[0] == names[1]

    plain = Parameters.first(replace(SETTINGS, standardise=False), ARMS)
    refusal = carry_out(plain, Import(parameters=parameters_document(folded), arms=False), {})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "these parameters have standardise True, the present ones False"
    declared = Features.of_table({"context": {"a": "number", "b": "number", "c": "number"}})
    named = Parameters.first(replace(SETTINGS, features=declared), ARMS)
    refusal = carry_out(named, Import(parameters=parameters_document(folded), arms=False), {})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "these parameters have other features than the present ones"
