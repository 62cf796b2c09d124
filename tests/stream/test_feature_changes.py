"""Declared features that change: what is carried over, refused, ignored and understood."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.stream.scenes import TOPICS, feedback, opened, progress, reasons, serving, written
from worker.bandit.arrays import Floats, sigmoid
from worker.errors import InputError
from worker.stream.catalogue import Refusal, carry_out
from worker.stream.events import ArmChange, Command, FeaturesChange, JournalEvent
from worker.stream.feature_changes import continued_columns, differences, differing, encoder_of
from worker.stream.features import ContextEncoder, Features
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.tastes import strengths
from worker.stream.topology import Record
from worker.stream.version_records import encode_parameters
from worker.stream.versions import Versions

CONTEXT: dict[str, Any] = {"age": "number", "device": ["mobile", "desktop"], "city": {"hashed": 4}}
ADS: dict[str, Any] = {"brand": ["north", "south"]}
CROSSES = [["age", "device"], ["device", "city"]]
ARMS = tuple(Arm(arm=f"ad-{k}", reward=1.0 + k, features={"brand": ("north", "south")[k % 2]}) for k in range(4))
#: Windows of a second; a session lasts 300 ms, disorder 50 ms.
TIMES = {"window": 1000, "session_timeout": 300, "lateness": 50}


def declared(context: dict[str, Any] = CONTEXT, ads: dict[str, Any] = ADS, crosses: Any = CROSSES) -> Features:
    return Features.of_table({"context": context, "ads": ads, "crosses": crosses} if ads else {"context": context})


def first(**changes: Any) -> Parameters:
    features = declared()
    return Parameters.first(
        LearningSettings(**{"dim": features.dim, "features": features, "horizon": 2, "warmup": 0, **TIMES, **changes}),
        ARMS,
    )


def person(number: int, **more: Any) -> dict[str, Any]:
    generator = np.random.default_rng(number)
    device = ("mobile", "desktop", "watch")[number % 3]
    return {"age": 40 + 9 * generator.normal(), "device": device, "city": f"c{number % 6}", **more}


def sessions(count: int, start: int, encoder: ContextEncoder, version: int = 0, **more: Any) -> list[JournalEvent]:
    """Return sessions of one window: users of mobiles click on the first ad, others sometimes on the second."""
    events: list[JournalEvent] = []
    for number in range(count):
        name, at, who = f"{start}-{number}", start + number * 900 // count, person(number, **more)
        slate = (f"ad-{number % 4}", f"ad-{(number + 1) % 4}")
        context = encoder.encode(who)
        events.append(opened(name, at, slate, context=context, parameters_version=version))
        clicked = (who["device"] == "mobile") == (number % 4 == 0)
        events.append(feedback(1, slate[0], clicked, at + 5, name))
    return events


@cache
def learned(model: str = "personal") -> Parameters:
    """Return a version after two windows of 120 sessions."""
    learner = Learner(first(model=model).settings, ARMS)
    encoder = ContextEncoder(declared())
    journal = [*sessions(120, 0, encoder), progress(1350), *sessions(120, 1000, encoder), progress(2350)]
    learner.handle(written(journal))
    assert learner.current.folds == 2
    return learner.current


def order(features: Features, **renamed: str) -> FeaturesChange:
    return FeaturesChange(features=features.declared.document(), renamed=renamed)


def applied(current: Parameters, features: Features, **renamed: str) -> Parameters:
    changed = carry_out(current, order(features, **renamed), {})
    assert isinstance(changed, Parameters), changed
    # What a worker reads is the same version.
    assert decode_parameters(encode_parameters(changed)) == changed
    return changed


def refused(current: Parameters, features: Features, **renamed: str) -> str:
    outcome = carry_out(current, order(features, **renamed), {})
    assert isinstance(outcome, Refusal)
    return outcome.reason


def log_odds(version: Parameters, people: Sequence[dict[str, Any]]) -> Floats:
    encoder = encoder_of(version, [version])
    assert encoder is not None
    return version.model.log_odds(version.prepared(np.array([encoder.encode(one) for one in people])))


PEOPLE = [person(number) for number in range(500, 530)]


# ── what is carried over ─────────────────────────────────────────────────────────────────────────────────────────────

BY_PLACE = {name: CONTEXT[name] for name in ("city", "device", "age")}
WATCHES = {**CONTEXT, "device": ["desktop", "watch", "mobile"]}


@pytest.mark.parametrize("model", ["personal", "additive"])
@pytest.mark.parametrize(
    ("features", "renamed"),
    [
        pytest.param(declared(WATCHES), {}, id="a value"),
        pytest.param(declared({"visits": "number", **CONTEXT}), {}, id="a number"),
        pytest.param(declared({"plan": ["a", "b"], **CONTEXT}), {}, id="a category"),
        pytest.param(declared({"shop": {"hashed": 3}, **CONTEXT}), {}, id="a hashed category"),
        pytest.param(declared(crosses=[["city", "device"], ["age", "age"], ["device", "age"]]), {}, id="a cross"),
        pytest.param(declared(BY_PLACE, ads={"price": "number", "reward": "number", **ADS}), {}, id="features of ads"),
        pytest.param(declared(ads={"price": "number"}), {}, id="without a feature of ads"),
        pytest.param(
            declared(
                {"years": "number", "gadget": ["mobile", "desktop"], "town": {"hashed": 4}},
                crosses=[["years", "gadget"], ["gadget", "town"]],
            ),
            {"age": "years", "device": "gadget", "city": "town"},
            id="other names",
        ),
    ],
)
def test_predictions_stay_where_features_come_or_get_other_names(model: str, features: Features, renamed: Any) -> None:
    before = learned(model)
    after = applied(before, features, **renamed)
    people = [one for one in PEOPLE if one["device"] != "watch"]
    others = [{renamed.get(name, name): value for name, value in one.items()} for one in people]
    assert np.abs(log_odds(before, people)).max() > 0.5
    np.testing.assert_allclose(log_odds(after, others), log_odds(before, people), rtol=0, atol=1e-9)


def test_the_same_features_in_another_order_change_nothing() -> None:
    assert carry_out(learned(), order(declared(BY_PLACE, crosses=CROSSES[::-1])), {}) is None
    assert carry_out(learned(), order(learned().settings.features or declared()), {}) is None


def test_a_new_name_of_ads_leaves_a_feature_of_contexts_with_the_old_one() -> None:
    ads = {"age": ["new", "old"]}
    before = applied(learned(), declared(ads={**ADS, **ads}))
    after = applied(before, declared(ads={**ADS, "state": ads["age"]}), age="state")
    np.testing.assert_allclose(log_odds(after, PEOPLE), log_odds(before, PEOPLE), atol=1e-9)


def test_what_goes_is_forgotten_and_what_is_resized_begins_anew() -> None:
    before = learned()
    after = applied(before, declared({"age": "number", "city": {"hashed": 8}}, crosses=[]))
    assert after.settings.dim == 9
    # Users of mobiles, a third, click on the first ad, the others on the rest: without devices that is a base rate.
    chances = sigmoid(log_odds(after, [{"age": one["age"]} for one in PEOPLE])).mean(axis=0)
    np.testing.assert_allclose(chances, [1 / 3, 2 / 3, 2 / 3, 2 / 3], atol=0.07)
    assert after.model.effects[1:].tolist() == pytest.approx([0.0] * 8, abs=1e-12)


def test_a_hashed_cross_keeps_its_columns_as_long_as_its_features_do() -> None:
    wide = {"shop": [f"s{number}" for number in range(9)], "city": {"hashed": 16}}
    before = Features.of_table({"context": wide, "crosses": [["shop", "city"]]})
    more = Features.of_table({"context": {**wide, "shop": [*wide["shop"], "new"]}, "crosses": [["city", "shop"]]})
    resized = Features.of_table({"context": {**wide, "city": {"hashed": 17}}, "crosses": [["shop", "city"]]})
    settings = LearningSettings(dim=before.dim, features=before, horizon=2)
    version = Parameters.first(settings, ARMS[:0])
    carried = [applied(version, features).model.dim for features in (more, resized)]
    assert carried == [9 + 1 + 16 + 64, 9 + 17 + 64]
    marks = before.crossing.apply(np.eye(25)[[2]] + np.eye(25)[[12]])[0, 25:]
    again = more.crossing.apply(np.eye(26)[[2]] + np.eye(26)[[13]])[0, 26:]
    assert marks.tolist() == again.tolist()


def test_a_feature_that_changes_its_kind_begins_anew() -> None:
    kinds = {**CONTEXT, "age": ["young", "old"]}
    columns = continued_columns(declared().context, declared(kinds, crosses=[]).context, {})
    assert columns.tolist() == [-1, -1, 1, 2, 3, 4, 5, 6]


def test_nothing_explores_new_columns_before_the_next_fold_and_the_clock_is_set_back() -> None:
    before = replace(learned(), thresholds=(3.0, 2.0), clock=500.0)
    after = applied(before, declared({"plan": ["a", "b"], **CONTEXT}))
    assert min(after.thresholds) > 1e100
    assert after.clock < 500
    assert applied(before, declared(crosses=[])).thresholds == (3.0, 2.0)


# ── scales ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_number_is_the_mean_until_a_hundred_sessions_have_had_it() -> None:
    learner = Learner(first().settings, ARMS)
    encoder = ContextEncoder(declared())
    visits = declared({"visits": "number", **CONTEXT})
    learner.handle(written([*sessions(120, 0, encoder), progress(1350), order(visits)]))
    changed = learner.current
    assert changed.standardisation is not None
    assert changed.standardisation.scale[0] == np.inf
    assert "visits" not in {one.feature for one in strengths(changed)}, "nobody has had it yet"
    new = ContextEncoder(visits)
    for window in (1, 2):
        users = sessions(60, 1000 * window, new, version=changed.version, visits=7.5 + window)
        learner.handle(written([*users, progress(1000 * window + 1350)], learner._next_offset))
        known = learner.current.standardisation
        assert known is not None
        assert len(known.waiting) == (60 if window == 1 else 0)
    assert learner.current.folds == 3
    assert "visits" in {one.feature for one in strengths(learner.current)}
    assert (known.centre[0], known.scale[0]) == (9.0, 0.5)
    assert known.centre[1:].tolist() == changed.standardisation.centre[1:].tolist(), "known numbers keep their scale"


def test_before_the_first_fold_sessions_that_wait_get_the_new_columns() -> None:
    learner = Learner(first().settings, ARMS)
    learner.handle(written([*sessions(30, 0, ContextEncoder(declared())), progress(1350)]))
    changed = applied(learner.current, declared({"visits": "number", **WATCHES}))
    assert changed.pending is not None
    assert np.isnan(changed.pending.contexts[:, 0]).all()
    assert changed.pending.contexts[0, 2:5].tolist() == [0.0, 0.0, 1.0]  # desktop, watch, mobile


def test_a_new_number_of_ads_gets_its_scale_when_ads_have_it() -> None:
    changed = applied(learned(), declared(ads={**ADS, "price": "number"}))
    assert [one.feature for one in strengths(changed) if one.of == "ad"] == ["brand"]
    before = changed.model.log_odds(np.zeros((1, changed.model.dim)))
    priced = carry_out(changed, ArmChange(arm="ad-1", reward=9.0, active=True), {})
    assert isinstance(priced, Parameters), "an ad may lack a feature that was declared later"
    given = ArmChange(arm="ad-1", reward=2.0, active=True, features={"brand": "south", "price": 80.0})
    described = carry_out(changed, given, {})
    assert isinstance(described, Parameters)
    assert described.settings.features is not None
    assert described.settings.features.ads[1].centre == 80.0
    np.testing.assert_allclose(described.model.log_odds(np.zeros((1, changed.model.dim))), before, atol=1e-9)
    lacking = carry_out(changed, ArmChange(arm="new", reward=1.0, active=True, features={"brand": "south"}), {})
    assert isinstance(lacking, Refusal)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_orders_that_make_no_sense_are_refused_with_one_line() -> None:
    plain = Parameters.first(LearningSettings(dim=2), ())
    assert refused(plain, declared(ads={}, crosses=[])) == (
        "contexts of this model are lists of numbers: one with named features needs topics (--prefix) or a state "
        "folder of its own"
    )
    wide = declared({**CONTEXT, "word": {"hashed": 3000}})
    assert "'word' has the most, 3,000: hash it into fewer, or leave it out" in refused(learned(), wide)
    many = replace(learned(), settings=replace(learned().settings, window=10**8))
    assert re.search(r"MiB of a record: 0 such arms fit; of .* 'word' has the most, 3,000", refused(many, wide))
    for names, reason in (
        ({"age": "device"}, "'age' cannot become 'device'"),
        ({"nobody": "years"}, "'nobody' cannot become 'years'"),
    ):
        assert reason in refused(learned(), declared({"years": "number", "device": ["x"]}, crosses=[]), **names)
    unreadable = carry_out(learned(), FeaturesChange(features={"context": [{"name": "x", "kind": "what"}]}), {})
    assert isinstance(unreadable, Refusal)
    assert unreadable.reason.startswith("the features cannot be read: ")
    (refusal,) = Learner(first().settings, ARMS).handle([(0, b'{"kind":"features","features":{"ads":7}}')]).refusals
    assert "Expected `array`" in refusal.reason


def test_a_second_change_waits_until_the_sessions_of_the_first_are_over() -> None:
    learner = Learner(first().settings, ARMS)
    encoder = ContextEncoder(declared())
    again = order(declared({"plan": ["a", "b"], **WATCHES}))
    outcome = learner.handle(written([*sessions(120, 0, encoder), progress(1350), order(declared(WATCHES)), again]))
    assert [one.reason for one in outcome.refusals] == [
        "sessions under the features before version 2 may be open until 1970-01-01T00:00:02 UTC: give the order again "
        "then"
    ]
    assert learner.current.former_until == 1350 + 2 * 50 + 1000 + 350
    crosses = learner.handle(written([order(declared(WATCHES, crosses=[]))], learner._next_offset))
    assert crosses.versions[0].former == learner.current.former, "contexts stay as they are"
    assert learner.handle(written([progress(2800), again], learner._next_offset)).versions[-1].settings.dim == 10
    # A session of the features before the former ones can no longer be read.
    late = opened("late", 2900, context=encoder.encode(person(1)), parameters_version=1)
    troubles = learner.handle(written([late], learner._next_offset)).troubles
    assert [kind for kind, _, _ in troubles] == ["fold-passed-over"]


def test_a_rollback_to_a_version_of_other_features_carries_its_estimate_over() -> None:
    before = learned()
    after = replace(applied(before, declared(WATCHES)), version=3)
    forgotten = replace(after, model=after.model.forget(0.1))
    history = {before.version: before, 3: forgotten}
    back = carry_out(forgotten, Command(action="rollback", version=before.version), history)
    assert isinstance(back, Parameters)
    assert back.settings == after.settings
    people = [one for one in PEOPLE if one["device"] != "watch"]
    np.testing.assert_allclose(log_odds(back, people), log_odds(before, people), atol=1e-9)


# ── arrivals ─────────────────────────────────────────────────────────────────────────────────────────────────────────

RENAMED = {"years": "number", "device": ["mobile"], "city": ["Rome"], "visits": "number"}


def arrival(session: str, at: int, context: dict[str, Any]) -> Record:
    value = {"session_id": session, "occurred_at": at, "context": context}
    return Record(TOPICS.arrivals, 0, 0, at, session.encode(), json.dumps(value).encode())


def changed_at(time: int) -> list[Parameters]:
    """Return a version, and one with other features that serves from a time on."""
    before = first()
    after = applied(before, declared(RENAMED, crosses=[]), age="years")
    return [before, replace(after, version=1, effective_at=time)]


def test_names_of_the_declarations_before_and_after_are_understood_or_ignored() -> None:
    before, after = changed_at(1000)
    known = Versions(before)
    assert known.encoders is not None
    with pytest.raises(InputError, match=r"context.years is not declared"):
        known.encoders(5).encode({"years": 3})
    known.learn(after)
    old, new = known.encoders(999), known.encoders(1000)
    assert old.encode({"years": 3, "visits": 5, "city": 7}) == (3.0, *[0.0] * 6)
    assert old.encode({"years": 3, "age": 4})[0] == 4.0
    assert new.encode({"age": 3, "city": "Rome", "visits": 5}) == (3.0, 0.0, 1.0, 5.0)
    assert new.encode({"age": 3, "visits": 5}) == (3.0, 0.0, 0.0, 5.0)
    for encoder in (old, new):
        with pytest.raises(InputError, match=r"context.nobody is not declared"):
            encoder.encode({"nobody": 3})
        with pytest.raises(InputError, match=r"context.device: a category is declared"):
            encoder.encode({"device": 3})


def test_an_arrival_is_encoded_by_the_version_that_serves_it_also_when_it_comes_again() -> None:
    before, after = changed_at(1000)
    task = serving(before)
    early = arrival("early", 900, {"age": 3, "device": "desktop"})
    task.handle([early])
    task.versions.learn(after)
    emits = task.handle([early, arrival("late", 1000, {"years": 3, "device": "mobile"}), arrival("old", 999, {})])
    assert reasons(emits) == []
    assert (emits.tally.opened, emits.tally.repeated) == (2, 1)
    facts = {fact["session_id"]: fact for fact in map(json.loads, (value for _, value in emits.journal))}
    assert facts["early"]["context"] == [3.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert facts["late"]["context"] == [3.0, 1.0, 0.0, None]
    assert [facts[name]["parameters_version"] for name in ("early", "late", "old")] == [0, 1, 0]


def test_a_session_that_was_planned_before_its_version_came_keeps_its_columns() -> None:
    before, after = changed_at(500)
    task = serving(before)
    early = arrival("s", 900, {"age": 3, "device": "desktop"})
    task.handle([early])
    task.versions.learn(after)  # it should have served this arrival
    emits = task.handle([early, arrival("s", 901, {"age": 3})])
    assert reasons(emits) == ["session-reused"]
    (fact,) = [json.loads(value) for _, value in emits.journal]
    assert (fact["context"], fact["parameters_version"]) == ([3.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], 0)


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_differences_are_named_whatever_changes() -> None:
    after = declared(
        {"years": "number", "device": ["desktop", "watch"], "city": {"hashed": 8}, "visits": ["few"]},
        {"brand": {"hashed": 3}, "price": "number"},
        [["device", "years"], ["device", "visits"]],
    )
    assert [" ".join(one) for one in differences(declared(), after, {"age": "years"})] == [
        "~ years number of contexts, was age",
        "+ device=watch value of a category of contexts",
        "− device=mobile value of a category of contexts",
        "~ city hashed category of 8 columns of contexts, was hashed category of 4 columns",
        "+ visits category of contexts",
        "~ brand hashed category of 3 columns of ads, was category",
        "+ price number of ads",
        "+ device × visits cross",
        "− device × city cross",
    ]
    assert differing(after, declared(), most=2) == "+ years, + device=watch and 10 more"
    assert differing(declared(ads={}, crosses=[]), declared(crosses=[])) == "", "a part that is left out stays"
    assert differing(None, declared()) == ""
