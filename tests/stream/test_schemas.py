"""The schemas agree with the decoder.

The decoder accepts exactly the records that the schema accepts, apart from two kinds of rules. Dimension, norm, future,
horizon and size of a record are settings, which `conftest` opens wide. `fits_together` has the rules between two fields
that JSON Schema cannot express.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from schemas.make import RECORDS, files
from tests.stream.scenes import ADDITIVE
from worker.errors import ParametersError
from worker.stream.accounts import Accounts, Sums
from worker.stream.calibration import Calibration
from worker.stream.contexts import ARRAYS, ObservedSessions, Standardisation
from worker.stream.decoding import Limits, Rejected
from worker.stream.events import DEAD_LETTER_REASONS, TOPICS, encode_event
from worker.stream.features import Features, FormerFeatures
from worker.stream.lift import Lift
from worker.stream.misfit import Misfit
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.tagged import TaggedVersion
from worker.stream.version_records import StartRecord, encode_parameters

FOLDER = Path(__file__).parents[2] / "schemas"
NAMES = tuple(RECORDS)


@cache
def schema(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(schema(name))


def of(kind: Any) -> Any:
    """Return the schema of one kind of event."""
    whole = schema(kind.schema)
    return whole if kind.tag is None else whole["$defs"][kind.event.__name__]


def fits_together(document: dict[str, Any]) -> bool:
    """Return whether a journal record, good by its schema, also keeps the rules between two fields."""
    if document.get("kind") == "opened":
        return len(document["slate"]) == len(document["modes"])
    if document.get("kind") == "progress":
        return bool(document["partition"] < document["partitions"])
    return True


def norm_is_measurable(document: dict[str, Any]) -> bool:
    """Return whether an arrival, good by its schema, has a norm below the largest that can be configured."""
    context = document.get("context", [])
    return isinstance(context, dict) or sum(abs(number) for number in context) < 1e308


# ── decoder and schema ───────────────────────────────────────────────────────────────────────────────────────────────

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**53, 2**53 + 1, -(2**53), 2**63, 2**64, 10**30, 10**400, -(10**400)),
    *(0.0, -0.0, 1.0, 7.0, -7.0, 0.5, 1.5, 1e16, 1e300, -1e300, 5e-324),
    *("", "x", "x" * 128, "x" * 129, "\U0001f600" * 128, "\U0001f600" * 129),
    *("a\x00", "a\n", "\x7f", "\x80", "\xa0", "\u2028"),
    *("none", "explore", "rollback", "freeze", "opened", "progress", "weather", "1"),
    *([], ["x"], ["none"], [""], [1], [1, 2.5], [None], [[]], ["x"] * 1000, ["x"] * 1001),
    *({}, {"x": 1}, {"kind": "arm"}, {"x": None}, {"x": True}, {"x": [1]}, {"x": "y", "z": -2.5}, {"x": 10**400}),
)

junk = st.sampled_from(JUNK) | st.integers() | st.floats(-1e300, 1e300) | st.text(max_size=5)


@st.composite
def mutated(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """Change a document in up to three places: drop, add, replace, or spoil one element of an array."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        how = draw(st.sampled_from(["replace", "replace", "element", "drop", "add", "rename"]))
        name = draw(st.sampled_from(sorted(document) or ["kind"]))
        value = copy.deepcopy(draw(junk))
        if how == "drop":
            document.pop(name, None)
        elif how == "add":
            document[draw(st.sampled_from(["x", "token", "tokens", "exclude", "version", "rejected"]))] = value
        elif how == "rename" and name in document:
            document[name.upper()] = document.pop(name)
        elif how == "element" and isinstance(document.get(name), list):
            array = document[name]
            array.insert(draw(st.integers(0, len(array))), value)
        else:
            document[name] = value
    return document


def check(kind: Any, document: dict[str, Any]) -> None:
    """Compare the decoder with the schema and the two rules above."""
    expected = validator(kind.schema).is_valid(document)
    if expected:
        expected = fits_together(document) if kind.schema == "journal" else norm_is_measurable(document)
    try:
        kind.decode(json.dumps(document).encode())
    except Rejected as rejected:
        assert not expected, f"the schema accepts what is rejected as {rejected}: {document}"
    else:
        assert expected, f"the decoder accepts what the schema does not: {document}"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_decoder_accepts_exactly_what_the_schema_accepts(kind: Any, data: st.DataObject) -> None:
    check(kind, data.draw(mutated(json.loads(encode_event(data.draw(kind.draw))))))


def test_decoder_and_schema_agree_on_any_value_of_any_field(kind: Any) -> None:
    event = find(
        kind.draw,
        lambda event: all(len(getattr(event, name, "x")) == 1 for name in ("context", "slate", "changes")),
        settings=settings(phases=[Phase.generate], max_examples=5_000),
        random=Random(0),
    )
    good = json.loads(encode_event(event))
    check(kind, good)
    for name in of(kind)["properties"]:
        check(kind, {key: value for key, value in good.items() if key != name})
        for value in JUNK:
            check(kind, good | {name: value})
            check(kind, good | {name: [value]})


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_event_that_is_written_is_valid(kind: Any, data: st.DataObject) -> None:
    document = json.loads(encode_event(data.draw(kind.draw)))
    validator(kind.schema).validate(document)


def test_the_files_are_those_that_the_types_give_and_nothing_else() -> None:
    """`python schemas/make.py` writes them."""
    for name, text in files().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, name
    schemas = {f"{name}.json" for name in NAMES}
    assert {path.name for path in FOLDER.glob("*.json")} == schemas | {"openapi.json"}


def test_the_limits_of_the_schemas_are_the_defaults() -> None:
    limits, arrival = Limits(), schema("arrival")
    assert arrival["properties"]["session_id"]["maxLength"] == limits.max_session_id
    assert arrival["properties"]["user_id"]["anyOf"][0]["maxLength"] == limits.max_session_id
    assert arrival["properties"]["exclude"]["items"]["maxLength"] == limits.max_arm_id
    assert arrival["properties"]["exclude"]["maxItems"] == limits.max_exclude


# ── parameters ───────────────────────────────────────────────────────────────────────────────────────────────────────


def parameters_record() -> dict[str, Any]:
    parameters = Parameters.first(
        LearningSettings(dim=3, **ADDITIVE), (Arm(arm="a", reward=1.0), Arm(arm="b", reward=2.0))
    )
    record: dict[str, Any] = json.loads(encode_parameters(parameters))
    return record


def test_a_version_is_valid_and_has_exactly_the_fields_of_its_schema() -> None:
    record = parameters_record()
    validator("parameters").validate(record)
    required = schema("parameters")
    assert set(record) == {*required["required"], *required["else"]["required"]}


def full_record() -> dict[str, Any]:
    """Return the record of a version with everything that a version may have, except sessions that are pending."""
    declared = Features.of_table(
        {
            "context": {"age": "number", "device": ["mobile", "desktop"], "country": {"hashed": 4}},
            "ads": {"price": "number", "brand": ["x"]},
        }
    )
    arms = tuple(Arm(arm=name, reward=1.0, features={"price": 2.5, "brand": name}) for name in "xy")
    known = Standardisation(centre=np.zeros(7), scale=np.ones(7))
    former = FormerFeatures(since=1, first=0, context=declared.context[:1], renamed={"years": "age"})
    first = Parameters.first(LearningSettings(dim=7, features=declared), arms)
    parameters = replace(first, standardisation=known, former=former, former_until=5)
    record: dict[str, Any] = json.loads(encode_parameters(parameters))
    return record


def test_a_version_with_features_is_valid_and_the_schema_has_no_other_field() -> None:
    record = full_record()
    validator("parameters").validate(record)
    empty = ObservedSessions.unpack(
        dict.fromkeys(ARRAYS[1:], np.zeros(0)) | {"contexts": np.zeros((2, 3))}, dim=3, arms=1
    )
    waiting = replace(Parameters.first(LearningSettings(dim=3), (Arm(arm="a", reward=1.0),)), pending=empty)
    pending = json.loads(encode_parameters(waiting))
    additive = replace(
        Parameters.first(
            LearningSettings(dim=3, model="additive", order=("a",), control_share=0.1), (Arm(arm="a", reward=1.0),)
        ),
        changed=("a",),
        ties=(0.5,) * 5,
        kernels="numpy 2.4.6",
        started_from=StartRecord(sha256="a" * 64, trust=0.3),
        imported=True,
        accounts=Accounts(total=Sums(sessions=1)),
        calibration=Calibration(ads=np.ones((5, 1))),
        misfit=Misfit(scores=np.zeros((1, 6)), informations=np.ones((1, 6))),
        lift=Lift(control="fixed:a"),
        guarded=True,
        popular=(0,),
    )
    tied, tagged = json.loads(encode_parameters(additive)), TaggedVersion.of("x", additive)
    compared = replace(additive.settings, control="tag:x", tagged=tagged)
    control = json.loads(encode_parameters(replace(additive, settings=compared)))
    for made in (pending, tied, control):
        validator("parameters").validate(made)
    assert set(record) | set(pending) | set(control) | {"intercept"} == set(schema("parameters")["properties"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"standardise": "yes"},
        {"features": {"context": [{"name": "age"}], "ads": []}},
        {"features": {"context": [{"name": "age", "kind": "text"}], "ads": []}},
        {"features": {"context": [{"name": "age", "kind": "category", "values": []}], "ads": []}},
        {"features": {"context": [{"name": "age", "kind": "hashed", "columns": 0}], "ads": []}},
        {"standardisation": {"centre": [0.0]}},
        {"pending": {"contexts": [[0.0]]}},
        {"arms": [{"arm": "x", "reward": 1.0, "active": True, "features": {"price": None}}]},
    ],
    ids=str,
)
def test_schema_and_decoder_reject_a_version_with_wrong_features(wrong: dict[str, Any]) -> None:
    record = full_record() | wrong
    assert not validator("parameters").is_valid(record)
    del record["sha256"]
    with pytest.raises(ParametersError):
        decode_parameters(json.dumps(record).encode(), complete=False)


def test_arrays_of_parameters_may_be_nested_lists() -> None:
    record = parameters_record()
    record["theta_context"] = [0.0, 0.5, 1.0]
    record["precision"]["context"] = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    validator("parameters").validate(record)


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def resolve(document: Any, pointer: str) -> Any:
    for part in pointer.removeprefix("#/").split("/"):
        document = document[part]
    return document


@cache
def asyncapi() -> Any:
    return yaml.safe_load((FOLDER / "asyncapi.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_a_schema_whose_references_resolve(name: str) -> None:
    Draft202012Validator.check_schema(schema(name))
    for reference in references(schema(name)):
        assert resolve(schema(name), reference)


def test_every_reference_of_the_asyncapi_document_resolves() -> None:
    found = set(references(asyncapi()))
    for reference in found:
        if reference.startswith("#"):
            assert resolve(asyncapi(), reference)
        else:
            assert (FOLDER / reference).is_file()
    assert {f"{name}.json" for name in NAMES} == {reference for reference in found if reference[0] != "#"}


def test_the_asyncapi_document_lists_exactly_the_topics_of_the_code() -> None:
    channels = asyncapi()["channels"]
    assert tuple(channels) == TOPICS
    for topic, channel in channels.items():
        assert channel["address"] == f"{{prefix}}.{topic}"
        assert channel["parameters"]["prefix"]["default"] == "ads"
    touched = {operation["channel"]["$ref"] for operation in asyncapi()["operations"].values()}
    assert touched == {f"#/channels/{topic}" for topic in TOPICS}


def test_the_asyncapi_document_has_the_policies_of_the_contract() -> None:
    kafka = {topic: channel.get("bindings", {}).get("kafka", {}) for topic, channel in asyncapi()["channels"].items()}
    policies = {topic: binding["topicConfiguration"]["cleanup.policy"] for topic, binding in kafka.items() if binding}
    assert policies == {
        "decisions": ["delete"],
        "journal": ["delete"],
        "parameters": ["compact"],
        "parameters-history": ["compact"],
        "episodes": ["delete"],
        "dead-letters": ["delete"],
    }
    single = {topic for topic, binding in kafka.items() if binding.get("partitions") == 1}
    assert single == {"journal", "parameters", "parameters-history"}


def test_the_asyncapi_document_has_the_headers_and_reasons_of_a_dead_letter() -> None:
    headers = asyncapi()["components"]["messages"]["dead-letter"]["headers"]
    names = [f"adcascade.{name}" for name in ("reason", "topic", "partition", "offset", "error")]
    more = [f"adcascade.{name}" for name in ("cut", "length", "sha256", "key-length", "key-sha256")]
    assert headers["required"] == names
    assert list(headers["properties"]) == names + more
    assert tuple(headers["properties"]["adcascade.reason"]["enum"]) == DEAD_LETTER_REASONS
