"""Declared features: the declaration, the encoding of contexts, and arrivals that carry an object."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stream.scenes import ADDITIVE, TOPICS, serving
from worker.errors import InputError
from worker.stream.chance import hashed_column
from worker.stream.contexts import MISSING, pack_context
from worker.stream.decoding import LARGEST_NUMBER, Limits, Rejected, decode_arrival
from worker.stream.events import Arrival
from worker.stream.features import (
    MOST_COLUMNS,
    TAKEN,
    ContextEncoder,
    Feature,
    Features,
    context_encoder,
)
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.session import Session, decode_state, encode_state
from worker.stream.settings import Arm, LearningSettings, continued
from worker.stream.topology import Record
from worker.stream.version_records import encode_parameters

DECLARED = Features.of_table(
    {"context": {"age": "number", "device": ["mobile", "desktop"], "visits": "number", "country": {"hashed": 4}}}
)
ARMS = (Arm(arm="cap", reward=1.0), Arm(arm="coat", reward=5.0))


def settings(**changes: Any) -> LearningSettings:
    return LearningSettings(**{"dim": DECLARED.dim, "features": DECLARED, "horizon": 2, **changes})


def decode(context: Any, *, features: Features | None = DECLARED, standardise: bool = True, dim: int = 8) -> Arrival:
    value = json.dumps({"session_id": "s", "occurred_at": 5, "context": context}).encode()
    encoder = context_encoder(features)
    version = LearningSettings(dim=dim, standardise=standardise)
    return decode_arrival(value, version, limits=Limits(), timestamp=0, encoder=encoder)


# ── the declaration ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "there is none"),
        ([], "must have the tables"),
        ({"user": {"age": "number"}}, r"no table 'user': its tables are context and ads"),
        ({"context": {}}, r"\[features.context\] must have an entry per feature"),
        ({"context": {"age": "text"}}, r'age must be "number", "boolean", a list of values .* not .text.'),
        ({"context": {"age": {"hash": 3}}}, "age must be"),
        ({"context": {"age": 3}}, "age must be"),
        ({"context": {"device": []}}, "'device': a category needs at least one value"),
        ({"context": {"device": ["a", "b", "a"]}}, "'device': the value 'a' is listed twice"),
        ({"context": {"device": ["a", 1]}}, "the values of a category are texts, not 1"),
        ({"context": {"country": {"hashed": 0}}}, "'country': hashed must be a number of columns, at least 1"),
        ({"context": {"country": {"hashed": 1.5}}}, "hashed must be a number of columns"),
        ({"context": {"country": {"hashed": True}}}, "hashed must be a number of columns"),
        ({"context": {"country": {"hashed": MOST_COLUMNS + 1}}}, "have 4,097 columns, more than 4,096: 'country' has"),
        ({"context": {"": "number"}}, "name must have 1 to 64 printable characters"),
        ({"context": {"a\n": "number"}}, "name must have 1 to 64 printable characters"),
        ({"ads": {"arm": "number"}}, "cannot have the name 'arm'"),
        ({"ads": {"reward": {"hashed": 2}}}, "'reward' of ads is their revenue: it can only be a \"number\""),
    ],
    ids=str,
)
def test_a_declaration_that_makes_no_sense_is_refused_with_one_line(table: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Features.of_table(table)
    assert "\n" not in str(caught.value)


def test_a_feature_that_is_declared_twice_is_refused() -> None:
    twice = [{"name": "age", "kind": "number"}] * 2
    with pytest.raises(InputError, match="'age' of contexts is declared twice"):
        msgspec.convert({"context": twice, "ads": []}, Features)
    with pytest.raises(InputError, match="'age' of ads is declared twice"):
        msgspec.convert({"context": [], "ads": twice}, Features)


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "a", "kind": "word"},
        {"name": "a", "kind": "number", "values": ["x"]},
        {"name": "a", "kind": "category", "values": ["x"], "columns": 2},
        {"name": "a", "kind": "number", "centre": 1.0},
        {"name": "a", "kind": "number", "centre": 1.0, "scale": 0.0},
        {"name": "a", "kind": "number", "centre": "1", "scale": 1.0},
        {"name": "a", "kind": "category", "values": ["x"], "centre": 1.0, "scale": 1.0},
        {"name": "a", "kind": "category", "values": "xy"},
        {"name": 3, "kind": "number"},
        {"kind": "number"},
        "a",
    ],
    ids=str,
)
def test_a_damaged_declaration_in_a_record_is_refused(entry: Any) -> None:
    with pytest.raises((InputError, msgspec.ValidationError)):
        msgspec.convert({"context": [entry], "ads": []}, Features)


def test_the_dimension_follows_from_the_declaration_and_another_is_refused() -> None:
    assert DECLARED.dim == 8
    assert DECLARED.context_names[:4] == ("age", "device=mobile", "device=desktop", "visits")
    with pytest.raises(InputError, match="dim is 5, but the declared features of contexts have 8 columns"):
        settings(dim=5)
    assert LearningSettings(dim=5, features=Features(ads=(Feature(name="size", kind="number"),))).dim == 5


names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=6).filter(lambda name: name not in TAKEN)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
listed_values = st.lists(names, min_size=1, max_size=4, unique=True).map(tuple)
features = st.one_of(
    st.builds(Feature, name=names, kind=st.just("number")),
    st.builds(Feature, name=names, kind=st.just("category"), values=listed_values),
    st.builds(Feature, name=names, kind=st.just("hashed"), columns=st.integers(1, 9)),
)
declarations = st.lists(features, min_size=1, max_size=5, unique_by=lambda feature: feature.name).map(tuple)


@given(declarations, declarations)
def test_a_declaration_is_the_same_after_a_round_through_json(context: Any, ads: Any) -> None:
    declared = Features(context=context, ads=tuple(one for one in ads if one.name not in ("arm",)))
    assert msgspec.convert(json.loads(json.dumps(declared.document())), Features) == declared


def test_a_version_carries_the_declaration_and_one_without_has_no_such_field() -> None:
    declared = Parameters.first(settings(), ARMS)
    again = decode_parameters(encode_parameters(declared))
    assert again.settings.features == DECLARED
    assert again.sha256 == declared.sha256
    plain = json.loads(encode_parameters(Parameters.first(LearningSettings(dim=2, **ADDITIVE), ARMS)))
    assert not {"features", "standardisation", "pending", "answer_counts", "ties"} & set(plain)
    assert "features" not in plain["arms"][0]


def test_a_learner_continues_with_the_published_features_whatever_is_declared() -> None:
    published = Parameters.first(settings(), ARMS).settings
    assert continued(LearningSettings(dim=8, beta=1.0), published).features == DECLARED
    for standardise in (True, False):
        made = settings(standardise=standardise)
        assert continued(settings(standardise=not standardise), made) == made, "the scale of a model stays"
    other = Features.of_table({"context": {"age": "number", "score": {"hashed": 7}}})
    assert continued(LearningSettings(dim=8, features=other), published).features == DECLARED
    with pytest.raises(InputError, match="contexts of the published parameters are lists of 8 numbers"):
        continued(settings(), LearningSettings(dim=8))


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_numbers_stay_categories_are_marked_and_what_is_missing_is_missing() -> None:
    encoder = ContextEncoder(DECLARED)
    column = 4 + hashed_column("country", "DE", 4)
    encoded = encoder.encode({"visits": 3, "country": "DE", "age": 31.5, "device": "desktop"})
    assert encoded == (31.5, 0.0, 1.0, 3.0, *(float(place == column) for place in range(4, 8)))
    nothing = encoder.encode({})
    assert nothing == (MISSING, 0.0, 0.0, MISSING, 0.0, 0.0, 0.0, 0.0)
    assert encoder.encode({"device": "watch"}) == nothing, "a value that is not listed counts as none"


def test_the_hash_of_an_open_category_is_stable() -> None:
    columns = [hashed_column("country", value, 1000) for value in ("DE", "FR", "", "Österreich", "x" * 500)]
    assert columns == [407, 86, 636, 917, 461]
    assert [hashed_column("city", "DE", columns) for columns in (1, 2, 16, 1000)] == [0, 1, 13, 429]


@given(st.data())
def test_every_object_of_declared_types_is_encoded_into_as_many_numbers_as_columns(data: st.DataObject) -> None:
    context = data.draw(declarations)
    declared = Features(context=context)
    given_values = {
        feature.name: data.draw({"number": st.floats(-1e9, 1e9), "category": names, "hashed": texts}[feature.kind])
        for feature in context
        if data.draw(st.booleans())
    }
    encoded = ContextEncoder(declared).encode(given_values)
    assert len(encoded) == declared.dim
    first = 0
    for feature in context:
        part = encoded[first : first + feature.width]
        first += feature.width
        value = given_values.get(feature.name)
        if feature.kind == "number":
            assert part[0] == value or (value is None and math.isnan(part[0]))
        elif value is None or (feature.kind == "category" and value not in feature.values):
            assert set(part) == {0.0}
        else:
            assert sorted(part) == [0.0] * (feature.width - 1) + [1.0]


# ── arrivals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("context", "error"),
    [
        ({"age": "31"}, "$.context.age: a number is declared, not a text"),
        ({"age": None}, "$.context.age: a number is declared, not null"),
        ({"device": True}, "$.context.device: a category is declared, a text, not true or false"),
        ({"age": [1]}, "$.context.age: a number is declared, not a list"),
        ({"device": None}, "$.context.device: a category is declared, a text, not null"),
        ({"device": 3}, "$.context.device: a category is declared, a text, not a number"),
        ({"country": {}}, "$.context.country: a category is declared, a text, not an object"),
        ({"colour": "red"}, "$.context.colour is not declared; declared are age, device, visits, country"),
        ({"\n": 1}, "$.context.'\\n' is not declared; declared are age, device, visits, country"),
        ([0.5] * 8, "$.context: an object of the declared features is needed, not a list"),
        ("age", "Expected `object`, got `str` at $.context"),
        (None, "Expected `object`, got `null` at $.context"),
    ],
    ids=str,
)
def test_a_context_that_does_not_fit_the_declaration_is_a_dead_letter_that_names_the_field(
    context: Any, error: str
) -> None:
    with pytest.raises(Rejected) as caught:
        decode(context)
    assert (caught.value.reason, caught.value.error) == ("invalid", error)


def test_an_object_without_a_declaration_is_a_dead_letter() -> None:
    with pytest.raises(Rejected, match="a list of numbers is needed: no features are declared") as caught:
        decode({"age": 31}, features=None)
    assert caught.value.reason == "invalid"


@pytest.mark.parametrize("features", [None, DECLARED])
def test_numbers_to_be_standardised_may_be_large_but_not_without_bound(features: Features | None) -> None:
    def of(number: float) -> Any:
        return {"age": number} if features else [number, *[0.0] * 7]

    assert decode(of(LARGEST_NUMBER), features=features).context[0] == LARGEST_NUMBER
    for wrong in (2 * LARGEST_NUMBER, -2 * LARGEST_NUMBER, 10**300):
        with pytest.raises(Rejected) as caught:
            decode(of(wrong), features=features)
        assert caught.value.reason == "norm"
    with pytest.raises(Rejected) as caught:
        decode(of(5_000.0), features=features, standardise=False)
    assert caught.value.reason == "norm"
    assert decode(of(500.0), features=features, standardise=False).context[0] == 500.0


def test_a_session_is_served_from_an_object_and_the_fact_has_its_numbers() -> None:
    value = json.dumps({"session_id": "s", "occurred_at": 5, "context": {"device": "mobile"}}).encode()
    arrival = Record(TOPICS.arrivals, 0, 0, 5, b"s", value)
    emits = serving(Parameters.first(settings(warmup=0), ARMS)).handle([arrival, arrival])
    assert (emits.tally.opened, emits.tally.repeated, emits.tally.dead_arrivals) == (1, 1, 0)
    assert len(emits.decisions) == 1
    facts = [json.loads(fact) for _, fact in emits.journal]
    assert facts[0] == facts[1]
    assert facts[0]["context"] == [None, 1.0, 0.0, None, 0.0, 0.0, 0.0, 0.0]
    state = decode_state(emits.changelog[0][1] or b"")
    assert isinstance(state, Session)
    assert encode_state(state) == emits.changelog[0][1]
    assert state.context == pack_context(ContextEncoder(DECLARED).encode({"device": "mobile"}))
