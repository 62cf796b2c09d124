"""A version as a record: exact to the bit, and refused as soon as anything about it is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.bandit.beliefs import belief, seen
from tests.bandit.reference import dense_matrix
from tests.stream.scenes import ADDITIVE
from worker.bandit.additive import AdditiveModel
from worker.bandit.answers import AnswerCounts
from worker.bandit.personal import PersonalModel
from worker.bandit.precision import Precision
from worker.errors import InputError, ParametersError
from worker.kafka.parameters import decoded
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.topology import Record
from worker.stream.version_records import encode_parameters

#: Where and when a version was made, which its hash does not cover (docs/design.md §5).
ORIGIN = ("made_at", "effective_at", "window_end", "journal_offset", "resume_offset", "progress")

often = settings(max_examples=200, deadline=None)
finite = st.floats(allow_nan=False, allow_infinity=False)


def version(**changes: Any) -> Parameters:
    values: dict[str, Any] = {
        "version": 7,
        "settings": LearningSettings(**{**ADDITIVE, "dim": 2, "horizon": 3, "beta": 1.5}),
        "arms": (Arm(arm="a", reward=1.0), Arm(arm="b", reward=0.25, active=False), Arm(arm="ç/☃", reward=3.5)),
        "model": belief(2, 3, np.random.default_rng(0), displayed=20),
        "parent_sha256": "ab" * 32,
        "effective_at": 130_000,
        "made_at": 125_000,
        "window_end": 60_000,
        "journal_offset": 412,
        "resume_offset": 380,
        "progress": {0: 125_000, 3: 125_200},
        "folds": 5,
        "observations": 1234,
        "expected_sessions": 50,
        "explore_budget": 20,
        "thresholds": (0.3, 0.2, 0.1),
    }
    return Parameters(**(values | changes))


def personal() -> Parameters:
    """Return a version of the personal model that has learned something, with answer rates."""
    generator = np.random.default_rng(3)
    first = Parameters.first(LearningSettings(dim=2, horizon=3), version().arms)
    arms = generator.integers(0, 3, 40)
    contexts, positions = generator.standard_normal((20, 2)), np.tile([0, 1], 20)
    data = seen(contexts, np.repeat(np.arange(20), 2), arms, generator.random(40) < 0.3, positions)
    answered = (generator.random(40) < 0.8).astype(float)
    answers = AnswerCounts.none(arms=3, horizon=3).plus(positions=positions, arms=arms, answered=answered)
    return replace(first, version=4, model=first.model.fold(data, estimator="laplace").model, answers=answers, folds=1)


def record_of(parameters: Parameters) -> dict[str, Any]:
    record = orjson.loads(encode_parameters(parameters))
    assert isinstance(record, dict)
    return record


def sealed(record: dict[str, Any]) -> bytes:
    """Return a record with the hash that its content calls for, made apart from the code."""
    covered = {name: value for name, value in record.items() if name not in {"sha256", *ORIGIN}}
    text = orjson.dumps(covered, option=orjson.OPT_SORT_KEYS)
    return orjson.dumps({**record, "sha256": sha256(text).hexdigest()})


# ── there and back ───────────────────────────────────────────────────────────────────────────────────────────────────


#: Numbers at the edges of the range: signed zeros, subnormals, the largest, and those without a finite decimal.
edges = st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1, 1 / 3])


@given(
    st.lists(edges | finite, min_size=2, max_size=2),
    st.lists(edges | finite, min_size=3, max_size=3),
    st.lists(st.sampled_from([0.0, -0.0, 5e-324, -1e-310, 1e-9]), min_size=6, max_size=6),
    st.lists(st.floats(1e-250, 1e250), min_size=3, max_size=3),
    st.floats(1e-5, 1e250),
    st.lists(edges, min_size=3, max_size=3),
)
@often
def test_every_number_comes_back_to_the_bit(context, arms, cross, diagonal, block, edge) -> None:
    precision = Precision(
        context=np.diag([block, 1.0]), cross=np.array(cross).reshape(3, 2), arms=np.maximum(diagonal, 1e-9)
    )
    posterior = AdditiveModel(
        theta_context=np.array(context),
        theta_arms=np.array(arms),
        precision=precision,
        prior_precision=np.array([block, 1.0]),
    )
    one = version(model=posterior, thresholds=tuple(edge))
    back = decode_parameters(encode_parameters(one))
    for before, after in (
        (one.model.theta_context, back.model.theta_context),
        (one.model.theta_arms, back.model.theta_arms),
        (one.model.precision.context, back.model.precision.context),
        (one.model.precision.cross, back.model.precision.cross),
        (one.model.precision.arms, back.model.precision.arms),
        (np.array(one.thresholds), np.array(back.thresholds)),
    ):
        assert before.tobytes() == after.tobytes()
        assert not after.flags.writeable or after.shape == (3,)
    assert back.sha256 == one.sha256


@pytest.mark.parametrize(
    "one",
    [
        version(),
        *(version(window_end=None), version(progress={}), version(thresholds=()), version(frozen=True)),
        Parameters.first(LearningSettings(dim=2), ()),
        personal(),
        replace(personal(), ties=(0.5, 1.0, 0.25), thresholds=(0.3, 0.2, 0.1), clock=1 / 3, kept=0.1),
        replace(Parameters.first(LearningSettings(dim=2, model="additive"), version().arms), version=3),
    ],
    ids=[
        *("full", "no window", "no progress", "no thresholds", "frozen", "no arms"),
        *("personal", "ties", "additive with an intercept"),
    ],
)
def test_a_version_comes_back_as_it_was(one: Parameters) -> None:
    back = decode_parameters(encode_parameters(one))
    assert back == one
    assert back.sha256 == one.sha256
    assert encode_parameters(back) == encode_parameters(one)
    assert decode_parameters(encode_parameters(one), complete=False) == one


def with_numbers(kind: type) -> Parameters:
    """Return a version whose settings and rewards are given as `int` or as `float`."""
    numbers = {"epsilon": 0, "forgetting": 1, "random_share": 0, "beta": 2, "ridge": 1}
    learning = {**ADDITIVE, "dim": 2, "horizon": 3, **{name: kind(number) for name, number in numbers.items()}}
    arms = tuple(Arm(arm=arm, reward=kind(reward)) for arm, reward in (("a", 1), ("b", 2), ("c", 3)))
    return version(settings=LearningSettings(**learning), arms=arms)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (version(progress={0: 1, 10: 2, 2: 3}), version(progress={2: 3, 10: 2, 0: 1})),
        (with_numbers(int), with_numbers(float)),
        (version(thresholds=tuple(np.array([0.3, 0.2, 0.1]))), version()),
    ],
    ids=["progress in another order", "whole numbers", "numbers of numpy"],
)
def test_the_same_version_gives_the_same_bytes_however_it_is_given(one: Parameters, other: Parameters) -> None:
    assert encode_parameters(one) == encode_parameters(other)


# ── the hash ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_hash_can_be_computed_from_the_record_alone() -> None:
    record = record_of(version())
    assert orjson.loads(sealed(record))["sha256"] == record["sha256"] == version().sha256


@pytest.mark.parametrize(
    "changes",
    [{"window_end": None}, {"progress": {1: 1}}, *({name: 1} for name in ORIGIN[:2] + ORIGIN[3:5])],
    ids=str,
)
def test_where_and_when_a_version_was_made_is_not_in_its_hash(changes: dict[str, Any]) -> None:
    assert version(**changes).sha256 == version().sha256
    assert encode_parameters(version(**changes)) != encode_parameters(version())


PATHS = [
    (name,) if not isinstance(value, dict) or name == "progress" or "shape" in value else (name, part)
    for name, value in record_of(version()).items()
    for part in (value if isinstance(value, dict) else [""])
]


@pytest.mark.parametrize("name", sorted(record_of(version())))
def test_a_missing_field_is_refused(name: str) -> None:
    record = record_of(version())
    del record[name]
    with pytest.raises(ParametersError, match=r"missing|no sha256|does not fit"):
        decode_parameters(orjson.dumps(record))
    if name != "sha256":
        with pytest.raises(ParametersError, match=f"{name}|is missing"):
            decode_parameters(sealed(record))


def test_a_version_of_an_older_release_is_refused_with_one_line_that_says_what_to_do() -> None:
    old = record_of(personal())
    for name in ("clock", "kept", "spread", "positions", "context_groups", "ad_groups"):
        del old[name]
    old["tastes"] = [2.0]
    for read in (
        decode_parameters,
        lambda value: decoded([Record("parameters", 0, 7, 0, b"0", value)]),
    ):
        with pytest.raises(InputError, match=r"made by release 0\.2 or an older one.*\(--prefix\)") as raised:
            read(sealed(old))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("more", [b',"note":"hello"}', b',"beta":9.0}'], ids=["unknown", "twice"])
def test_a_field_that_is_added_is_refused(more: bytes) -> None:
    with pytest.raises(ParametersError, match="does not fit"):
        decode_parameters(encode_parameters(version())[:-1] + more)


RECORD = encode_parameters(version())


@given(st.integers(0, len(RECORD) - 1), st.integers(1, 255))
@settings(max_examples=400, deadline=None)
def test_a_change_of_any_byte_is_refused_or_changes_nothing_that_decides(index: int, flip: int) -> None:
    changed = bytearray(RECORD)
    changed[index] ^= flip
    try:
        decoded = decode_parameters(bytes(changed))
    except ParametersError:
        return
    assert decoded.sha256 == version().sha256
    assert decoded.model == version().model


# ── anything at all ──────────────────────────────────────────────────────────────────────────────────────────────────

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | finite | st.text(max_size=5)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
packed = st.fixed_dictionaries(
    {"shape": st.lists(st.integers(-1, 4), max_size=3), "data": st.sampled_from(["", "AAAA", "AAAAAAAA8D8=", "!", "é"])}
)


def decoded_or_refused(value: bytes) -> None:
    for complete in (True, False):
        try:
            decoded = decode_parameters(value, complete=complete)
        except ParametersError as error:
            assert str(error)
        else:
            assert np.isfinite(decoded.model.theta_arms).all()
            assert decoded.model.precision.is_positive_definite
            encode_parameters(decoded)


@example(b"")
@example(b"NaN")
@example(b'{"sha256": 5}')
@given(anything.map(orjson.dumps) | st.binary(max_size=40))
@settings(max_examples=400, deadline=None)
def test_bytes_and_json_of_any_kind_are_refused(value: bytes) -> None:
    for complete in (True, False):
        with pytest.raises(ParametersError):
            decode_parameters(value, complete=complete)


@given(st.sampled_from(sorted(set(PATHS))), anything | packed)
@settings(max_examples=600, deadline=None)
def test_any_value_in_any_field_is_taken_or_refused_and_nothing_else(path: tuple[str, ...], value: Any) -> None:
    record = record_of(version())
    (record if len(path) == 1 else record[path[0]])[path[-1]] = value
    decoded_or_refused(sealed(record))
    del record["sha256"]
    decoded_or_refused(orjson.dumps(record))


@pytest.mark.parametrize("depth", [200, 500, 1000, 2000])
def test_a_record_nested_very_deeply_is_refused(depth: int) -> None:
    for name in ("note", "theta_arms", "arms", "progress"):
        nested = b"[" * depth + b"]" * depth
        value = b'{"sha256":"x","%s":%s,"theta_context":[1.0]}' % (name.encode(), nested)
        for complete in (True, False):
            with pytest.raises(ParametersError):
                decode_parameters(value, complete=complete)


WRONG: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda r: r["arms"].__setitem__(1, {**r["arms"][1], "arm": "a"}), "two arms have the same id"),
    (lambda r: r["arms"][0].update(reward=0), "> 0.0"),
    (lambda r: r["arms"][0].update(reward=True), "got `bool`"),
    (lambda r: r["arms"].pop(), "the model has 3 arms, the catalogue 2"),
    (lambda r: r.update(dim=3), "the model has 2 context features, dim says 3"),
    (lambda r: r.update(dim=2.0), r"\$.dim"),
    (lambda r: r.update(version=True), "got `bool`.*version"),
    (lambda r: r.update(horizon=4), "3 thresholds for a horizon of 4"),
    (lambda r: r.update(thresholds=[0.1, None, 0.1]), "threshold"),
    (lambda r: r.update(theta_context=[1.0, None]), r"got `null` - at `\$.theta_context"),
    (lambda r: r.update(theta_arms={"shape": [3], "data": "AAA"}), "theta_arms is not an array of numbers"),
    (lambda r: r["precision"].update(arms=[1.0, 0.0, 1.0]), "not positive definite"),
    (lambda r: r["precision"].update(context=[[1.0, 0.5], [0.4, 1.0]]), "symmetric"),
    (lambda r: r["precision"].update(cross=[[0.0, 0.0]]), "shape"),
    (lambda r: r.update(policy="best"), "unknown policy 'best'; one of"),
    (lambda r: r.update(progress={"x": 1}), "regex"),
    (lambda r: r.update(model="x"), "unknown model 'x'; one of"),
]


WRONG_PERSONAL: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda r: r["context_groups"].update(strengths=[0.0]), "strengths above zero"),
    (lambda r: r["context_groups"].update(widths=[1.0]), "must have 2 columns"),
    (lambda r: r["context_groups"].update(squares=[-1.0]), "mean square of a feature must be above zero"),
    (lambda r: r.pop("ad_groups"), "ad_groups is missing"),
    (lambda r: r.update(positions=[0.0]), "shape"),
    (lambda r: r.update(clock=-1.0), r"\$.clock"),
    (lambda r: r.update(forgetting="often"), r"\$.forgetting"),
    (lambda r: r.update(own=[[1.0]]), "own must be a row"),
    (lambda r: r.update(own=[[0.0, 0.0, float("1e999")]] * 3), r"got `null` - at `\$.own"),
    (lambda r: r.update(shared=[[0.0]]), "shared: shape"),
    (lambda r: r["precision"].update(features=[[2.0]] * 3), "begins with 1"),
    (lambda r: r["precision"].update(information=[[-1e6] * 6] * 3), "not positive definite"),
    (lambda r: r["precision"].update(prior=[-1e6] * 3), "not positive definite"),
    (lambda r: r["precision"].pop("information"), "information is missing"),
    (lambda r: r.update(intercept=False), "has an intercept"),
    (lambda r: r.update(model="additive"), "theta_context is missing"),
    (lambda r: r["answer_counts"].update(answered=[[9.0] * 3] * 3), "at most answers.displayed"),
    (lambda r: r["answer_counts"].update(displayed=[[0.0]], answered=[[0.0]]), "answers have the shape"),
    (lambda r: r.update(answers="some"), "unknown answers 'some'"),
    (lambda r: r.update(ties=[0.5]), "1 ties for 3 thresholds"),
]


@pytest.mark.parametrize(
    ("make", "spoil", "message"),
    [*((version, *case) for case in WRONG), *((personal, *case) for case in WRONG_PERSONAL)],
    ids=[message for _, message in [*WRONG, *WRONG_PERSONAL]],
)
def test_the_error_of_a_contradictory_record_names_the_contradiction(make, spoil, message) -> None:
    record = record_of(make())
    spoil(record)
    with pytest.raises(ParametersError, match=message):
        decode_parameters(sealed(record))


def test_a_version_has_the_model_that_its_settings_name() -> None:
    with pytest.raises(ParametersError, match="the model is additive, the settings say personal"):
        version(settings=LearningSettings(dim=2, horizon=3))


# ── files written by hand ────────────────────────────────────────────────────────────────────────────────────────────

BY_HAND: dict[str, Any] = {
    "horizon": 2,
    "beta": 1.0,
    "arms": [{"arm": "a", "reward": 1}, {"arm": "b", "reward": 2, "active": False}],
    "theta_context": [0.5],
    "theta_arms": [0, -1],
    "precision": {"context": [[2]], "cross": [[0.5], [0]], "arms": [2, 1]},
}


def test_a_file_with_the_fields_of_planning_is_enough_for_explain() -> None:
    decoded = decode_parameters(json.dumps(BY_HAND).encode(), complete=False)
    kind: dict[str, Any] = {"model": "additive", "intercept": False, "answers": "all", "standardise": False}
    plain = LearningSettings(dim=1, horizon=2, beta=1.0, warmup=0, spread=0.0, **kind)
    assert decoded.settings == plain
    assert decoded.arms == (Arm(arm="a", reward=1.0), Arm(arm="b", reward=2.0, active=False))
    assert dense_matrix(decoded.model.precision).tolist() == [[2.0, 0.5, 0.0], [0.5, 2.0, 0.0], [0.0, 0.0, 1.0]]
    assert (decoded.version, decoded.settings.beta, decoded.thresholds) == (0, 1.0, ())
    with pytest.raises(ParametersError, match="no sha256"):
        decode_parameters(json.dumps(BY_HAND).encode())


@pytest.mark.parametrize("name", ["arms", "theta_context", "theta_arms", "precision"])
def test_the_error_of_an_incomplete_file_names_the_missing_field(name: str) -> None:
    record = deepcopy(BY_HAND)
    del record[name]
    with pytest.raises(ParametersError, match=f"{name}|is missing"):
        decode_parameters(json.dumps(record).encode(), complete=False)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_version_is_the_prior_under_which_all_explore() -> None:
    learning = LearningSettings(dim=2, horizon=3, ridge=2.0, beta=1.25)
    first = Parameters.first(learning, (Arm(arm="a", reward=1.0), Arm(arm="b", reward=2.0)))
    assert first.model == PersonalModel.prior(dim=2, arms=2, ridge=2.0, horizon=3)
    assert first.answers == AnswerCounts.none(arms=2, horizon=3)
    assert (first.version, first.effective_at, first.thresholds, first.settings.beta) == (0, 0, (0.0,) * 3, 1.25)
    assert first.rewards.tolist() == [1.0, 2.0]
    additive = replace(learning, model="additive", answers="all")
    prior = AdditiveModel.prior(dim=2, arms=2, ridge=2.0, intercept=True, horizon=3)
    assert Parameters.first(additive, first.arms) == replace(first, settings=additive, model=prior, answers=None)
    paper = Parameters.first(replace(additive, intercept=False), first.arms)
    assert paper.model == AdditiveModel.prior(dim=2, arms=2, ridge=2.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_version_has_no_number_that_json_lacks(bad: float) -> None:
    with pytest.raises(ParametersError, match="not finite"):
        version(thresholds=(0.1, bad, 0.1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim must be a whole number of at least 1, not 0"),
        ({"horizon": 0}, "horizon must be a whole number of at least 1"),
        ({"horizon": "3"}, "horizon must be a whole number"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0"),
        ({"horizon_episodes": 1}, "horizon_episodes must be a whole number of at least 2"),
        ({"window": 0}, "window must be a whole number of at least 1"),
        ({"lateness": 0.5}, "lateness"),
        ({"policy": "ucb"}, "unknown policy 'ucb'"),
        ({"bonus": ["value"]}, "unknown bonus"),
        ({"estimator": "mle"}, "unknown estimator"),
        ({"unanswered": "maybe"}, "unknown unanswered"),
        ({"epsilon": 1.5}, "epsilon must be between 0 and 1"),
        ({"epsilon": "0.1"}, "epsilon must be a finite number"),
        ({"random_share": -0.1}, "random_share must be between 0 and 1"),
        ({"forgetting": 0.0}, "forgetting must be auto, or above 0"),
        ({"forgetting": "always"}, 'forgetting must be a number or "auto"'),
        ({"spread": 1.01}, "spread must be between 0 and 1"),
        ({"ridge": 0.0}, "ridge must be a finite number above zero"),
        ({"beta": -1.0}, "beta must be a finite number of at least 0"),
        ({"beta": float("nan")}, "beta must be a finite number"),
        ({"beta": "theory"}, "beta must be a finite number"),
        ({"beta": True}, "beta must be a finite number"),
        ({"control": "best"}, "unknown control 'best'; one of fixed, popular, random, greedy"),
        ({"control_share": 1.0}, "control_share must be below 1"),
        ({"control_share": 0.6, "random_share": 0.5}, "add up to more than 1"),
        ({"max_loss": 0.05}, "give control_share"),
        ({"max_loss": 5, "control_share": 0.05}, "max_loss must be between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LearningSettings(**({"dim": 2} | changes))
