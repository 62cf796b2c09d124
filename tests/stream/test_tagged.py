"""A control group that gets the slate of a tagged version: what it is shown, what every version carries, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.stream.scenes import progress, written
from tests.stream.test_feature_changes import (
    ARMS,
    CONTEXT,
    PEOPLE,
    WATCHES,
    applied,
    declared,
    first,
    learned,
    order,
    sessions,
)
from worker.errors import InputError
from worker.stream.catalogue import carry_out, under
from worker.stream.contexts import pack_context
from worker.stream.events import ArmChange, Arrival
from worker.stream.explanation import explain
from worker.stream.feature_changes import encoder_of
from worker.stream.learner import Learner
from worker.stream.lift import Lift
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings, continued
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.tagged import TaggedVersion
from worker.stream.version_records import encode_parameters
from worker.stream.version_sizes import largest_size
from worker.stream.why_not import UNKNOWN, why_not

BEFORE = "tag:before-sale"


def controlled(live: Parameters, tagged: Parameters, **changes: Any) -> Parameters:
    """Return a version whose control group gets a tagged one, as a worker reads it."""
    carried = TaggedVersion.of("before-sale", tagged)
    settings = replace(live.settings, control_share=0.4, control=BEFORE, tagged=carried)
    version = replace(live, settings=settings, **changes)
    assert decode_parameters(encode_parameters(version)) == version
    return version


def planned(
    version: Parameters, people: Sequence[dict[str, Any]] = PEOPLE, share: float = 1.0, **more: Any
) -> list[Slate]:
    """Return the slates of people who are all in the control group, or with a share of 0 all outside of it."""
    encoder = encoder_of(version, [version])
    assert encoder is not None
    contexts = [encoder.encode(one) for one in people]
    arrivals = [Arrival(session_id=f"s{n}", occurred_at=0, context=one, **more) for n, one in enumerate(contexts)]
    return SlatePlanner(version).plan(arrivals, list(map(pack_context, contexts)), control_share=share)


def best(version: Parameters, people: Sequence[dict[str, Any]] = PEOPLE, **more: Any) -> list[tuple[str, ...]]:
    """Return the greedy slates of a version."""
    return [slate.arms for slate in planned(replace(version, guarded=True), people, share=0.0, **more)]


def arms(slates: Sequence[Slate]) -> list[tuple[str, ...]]:
    return [slate.arms for slate in slates]


def changed(version: Parameters, *changes: ArmChange) -> Parameters:
    for change in changes:
        version = carry_out(version, change, {})
    return version


RICHER = ArmChange(arm="ad-0", reward=9.0, active=True)
RETIRED = ArmChange(arm="ad-3", reward=4.0, active=False)
NEW = ArmChange(arm="new", reward=99.0, active=True, features={"brand": "north"})


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("model", ["personal", "additive"])
def test_the_control_group_gets_the_best_slates_of_the_tagged_version_of_the_ads_of_now(
    model: str, repeats: bool
) -> None:
    tagged, prior = (under(replace(one.settings, repeats=repeats), one) for one in (learned(model), first(model=model)))
    live, then = controlled(changed(prior, RICHER, RETIRED, NEW), tagged), changed(tagged, RICHER, RETIRED)
    without = replace(live, settings=replace(live.settings, control_share=0.0))
    slates = planned(live)
    assert arms(slates) == best(then)
    assert arms(slates) != best(without)
    assert {mode for slate in slates for mode in slate.modes} == {"control"}
    assert {arm for slate in slates for arm in slate.arms} <= {"ad-0", "ad-1", "ad-2"}
    assert arms(planned(live, exclude=("ad-0", "new"))) == best(then, exclude=("ad-0",))
    nobody = planned(live, exclude=("ad-0", "ad-1", "ad-2"))
    assert {(slate.arms[0], slate.modes[0]) for slate in nobody} == {("new", "control")}, "the fallback"
    assert planned(live, share=0.0) == planned(without, share=0.0), "all others get what they would get"


VISITS = {"visits": "number", **CONTEXT}
RENAMED = {"years" if name == "age" else name: kind for name, kind in CONTEXT.items()}
AGELESS = {name: kind for name, kind in CONTEXT.items() if name != "age"}


@pytest.mark.parametrize("model", ["personal", "additive"])
def test_where_features_change_the_tagged_version_follows_by_name(model: str) -> None:
    """Those of others it ignores, and it takes a feature that is gone as missing."""
    tagged = learned(model)
    live, wanted = controlled(first(model=model), tagged), best(tagged)
    more = applied(live, declared(WATCHES | {"visits": "number"}))
    assert arms(planned(more, [{**one, "visits": 7} for one in PEOPLE])) == wanted
    crosses = [["years", "device"], ["device", "city"]]
    renamed = applied(more, declared(RENAMED, crosses=crosses), age="years")
    aged = [{"years" if name == "age" else name: value for name, value in one.items()} for one in PEOPLE]
    assert arms(planned(renamed, aged)) == wanted
    ageless = [{name: value for name, value in one.items() if name != "age"} for one in PEOPLE]
    without = applied(live, declared(AGELESS, crosses=[["device", "city"]]))
    assert arms(planned(without, ageless)) == best(tagged, ageless)
    again = applied(live, declared(VISITS, crosses=[]))
    assert again.settings.control_identity == live.settings.control_identity
    # A learner that is started with a tag from before the change.
    late = under(live.settings, applied(first(model=model), declared(RENAMED, crosses=crosses), age="years"))
    assert late.settings.tagged is not None
    late = replace(late, former=None if model == "additive" else late.former)
    assert arms(planned(late, ageless)) == best(tagged, ageless)


def test_all_versions_carry_it_and_a_restarted_learner_goes_on_with_it() -> None:
    tagged = learned()
    settings = replace(controlled(first(), tagged).settings, control_share=0.3)
    learner, encoder = Learner(settings, ARMS), encoder_of(first(), [])
    assert encoder is not None
    changes = order(declared(VISITS))
    journal = written(
        [
            *sessions(150, 0, encoder),
            progress(1350),
            *sessions(150, 1000, encoder, version=0),
            progress(2350),
            changes,
            *sessions(150, 2000, encoder, version=0),
            progress(3350),
        ]
    )
    made = [*learner.begin().versions, *learner.handle(journal).versions]
    assert [one.folds for one in made] == [0, 1, 2, 2, 3]
    assert len({one.settings.control_identity for one in made}) == 1
    newest = made[-1]
    assert newest.settings.features != tagged.settings.features
    assert arms(planned(newest)) == best(tagged)
    assert newest.lift is not None
    assert newest.lift.sessions == 450
    assert newest.lift.sentence == "revenue per session against the version tagged before-sale: not known yet"
    unresolved = replace(settings, tagged=None)
    for number in range(1, len(made)):
        known = [decode_parameters(encode_parameters(one)) for one in made[:number]]
        again = Learner(unresolved, (), known)
        again.handle(journal)
        assert (again.current.sha256, again.current.lift) == (newest.sha256, newest.lift)
    # Another tag, of a version from before the change: the comparison begins anew.
    settings = replace(newest.settings, control="tag:first", tagged=TaggedVersion.of("first", made[1]))
    other = Learner(settings, (), made)
    (version,) = other.handle(written([RICHER, *sessions(9, 3000, encoder), progress(4350)], len(journal))).versions[:1]
    assert arms(planned(version)) == best(changed(made[1], RICHER))
    assert other.current.lift == Lift(control=version.settings.control_identity)


def test_another_version_of_the_same_name_is_another_control() -> None:
    one, other = (controlled(first(), tagged).settings for tagged in (learned(), learned("additive")))
    assert one.control == other.control
    assert one.control_identity != other.control_identity
    assert {Lift(control=each.control_identity).name for each in (one, other)} == {"the version tagged before-sale"}
    assert replace(one, control="greedy").tagged is replace(one, control="tag:other").tagged is None


def test_it_adds_a_tenth_to_a_version_at_most_and_a_version_has_room_for_it() -> None:
    many = tuple(Arm(arm=f"ad-{k}", reward=1.0) for k in range(300))
    version = Parameters.first(LearningSettings(dim=32), many)
    carrying = replace(
        version,
        settings=replace(
            version.settings, control_share=0.1, control=BEFORE, tagged=TaggedVersion.of("before-sale", version)
        ),
    )
    size, without = len(encode_parameters(carrying)), len(encode_parameters(version))
    assert without * 1.05 < size < without * 1.1
    more = largest_size(many, carrying.model, carrying.settings) - largest_size(many, version.model, version.settings)
    assert more >= size - without - 100


def test_where_nobody_has_tags_a_tag_is_refused_in_one_line() -> None:
    unknown = LearningSettings(dim=2, control_share=0.1, control=BEFORE)
    for refuse in (lambda: Parameters.first(unknown, ARMS), lambda: continued(unknown, LearningSettings(dim=2))):
        with pytest.raises(InputError, match="only `adcascade worker` and `serve` have tags; here it can be fixed, "):
            refuse()
    for control in ("tag:", "tag:7", "tag:a b", "best"):
        with pytest.raises(InputError, match="one of fixed, popular, random, greedy or tag:NAME"):
            LearningSettings(dim=1, control=control)


def test_an_explanation_is_about_the_tagged_version() -> None:
    live, encoder = controlled(changed(first(), NEW, RETIRED), learned()), encoder_of(first(), [])
    assert encoder is not None
    people = [Arrival(session_id=f"s{n}", occurred_at=0, context=encoder.encode(one)) for n, one in enumerate(PEOPLE)]
    slates = planned(live)
    for someone, slate in zip(people, slates, strict=True):
        reasons = explain(live, someone, served=slate)
        assert reasons.slate == slate.arms
        assert "version 2, tagged before-sale" in reasons.notes[-1]
        for position in reasons.positions:
            assert (position.mode, position.way) == ("control", "greedy")
            scores = {one.arm: one.score for one in position.arms}
            assert scores[slate.arms[position.position - 1]] == pytest.approx(max(scores.values()))
            assert {one.width for one in position.arms} == {None}
        assert why_not(live, someone, "new", mode="control").obstacle == UNKNOWN
        assert why_not(live, someone, "ad-3", mode="control").obstacle == "it is retired"
        assert why_not(live, someone, slate.arms[1], mode="control").position == 2
    (nobody,) = planned(live, PEOPLE[:1], exclude=("ad-0", "ad-1", "ad-2"))
    lonely = structs.replace(people[0], exclude=("ad-0", "ad-1", "ad-2"))
    assert {position.way for position in explain(live, lonely, served=nobody).positions} == {"fallback"}
    assert why_not(live, lonely, "new", mode="control").position == 1
