"""Features of ads: columns for the model, the declaration of the first catalogue, and orders that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from worker.bandit.arrays import Floats
from worker.bandit.click_model import Observations
from worker.errors import InputError
from worker.stream import version_sizes
from worker.stream.ad_features import MOST_INFERRED
from worker.stream.catalogue import carry_out, catalogue_difference, describe_changes
from worker.stream.chance import hashed_column
from worker.stream.events import ArmChange, ArmEntry, CatalogueChange, Order, encode_event
from worker.stream.features import Features
from worker.stream.learner import Learner, Outcome
from worker.stream.parameters import Parameters, ad_columns, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.version_records import encode_parameters

DECLARED = Features.of_table({"ads": {"price": "number", "brand": ["north", "south"], "shop": {"hashed": 3}}})
ARMS = (
    Arm(arm="a", reward=1.0, features={"price": 10, "brand": "north", "shop": "x"}),
    Arm(arm="b", reward=2.0, features={"price": 30, "brand": "west", "shop": "y"}),
)


def first(arms: tuple[Arm, ...] = ARMS, features: Features | None = DECLARED) -> Parameters:
    return Parameters.first(LearningSettings(dim=2, features=features), arms)


def columns_of(version: Parameters) -> Floats:
    return ad_columns(version.settings, version.arms)


def ordered(
    *orders: Order, arms: tuple[Arm, ...] = ARMS, features: Features | None = DECLARED
) -> tuple[Learner, Outcome]:
    learner = Learner(LearningSettings(dim=2, features=features), arms)
    return learner, learner.handle(list(enumerate(map(encode_event, orders))))


def test_numbers_are_standardised_by_the_first_catalogue_and_categories_are_marks() -> None:
    columns = columns_of(first())
    shops = [[float(place == hashed_column("shop", shop, 3)) for place in range(3)] for shop in "xy"]
    assert columns == pytest.approx(np.array([[-1.0, 1.0, 0.0, *shops[0]], [1.0, 0.0, 0.0, *shops[1]]]))
    price = first().settings.features.ads[0]  # type: ignore[union-attr]
    assert (price.centre, price.scale) == pytest.approx((20.0, 10.0))


def test_a_later_ad_is_on_the_scale_of_the_first_catalogue_and_clipped() -> None:
    features: Any = {"price": 1e9, "brand": "south", "shop": "x"}
    learner, outcome = ordered(ArmChange(arm="c", reward=1.0, active=True, features=features))
    assert not outcome.refusals
    assert columns_of(learner.current)[2, :3].tolist() == [8.0, 0.0, 1.0]
    assert np.array_equal(columns_of(learner.current)[:2], columns_of(first()))


def test_a_number_that_was_constant_has_scale_one() -> None:
    arms = tuple(Arm(arm=name, reward=1.0, features={"size": 0.1}) for name in "abc")
    version = first(arms, None)
    assert columns_of(version).tolist() == [[0.0], [0.0], [0.0]]
    assert version.settings.features.ads[0].scale == 1.0  # type: ignore[union-attr]


def test_without_features_there_are_no_columns_and_no_declaration() -> None:
    version = first((Arm(arm="a", reward=1.0),), None)
    assert columns_of(version).shape == (1, 0)
    assert version.settings.features is None


def test_the_first_catalogue_declares_what_nobody_has_declared() -> None:
    version = first(features=None)
    assert version.settings.features is not None
    kinds = {one.name: (one.kind, one.values) for one in version.settings.features.ads}
    assert kinds == {
        "brand": ("category", ("north", "west")),
        "price": ("number", ()),
        "shop": ("category", ("x", "y")),
    }
    assert version.settings.dim == 2
    assert decode_parameters(encode_parameters(version)) == version


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"price": 1.0}, "arm 'c' has no brand, a declared feature of ads"),
        ({"price": "1", "brand": "north", "shop": "x"}, "arm 'c', price: a number is declared, not the text '1'"),
        ({"price": 1.0, "brand": 2.0, "shop": "x"}, "arm 'c', brand: a category is declared, a text, not the number 2"),
        (
            {"price": 1.0, "brand": "north", "shop": "x", "size": 2.0},
            "arm 'c', size: this feature is not declared; features of ads are price, brand, shop",
        ),
        (None, "arm 'c' has no price, a declared feature of ads"),
    ],
    ids=str,
)
def test_an_ad_that_does_not_fit_is_refused_in_one_line_by_the_learner_and_at_the_start(
    features: Any, message: str
) -> None:
    _, outcome = ordered(ArmChange(arm="c", reward=1.0, active=True, features=features))
    assert [refusal.reason for refusal in outcome.refusals] == [message]
    assert not outcome.versions
    with pytest.raises(InputError) as caught:
        first((*ARMS, Arm(arm="c", reward=1.0, features=features or ())))
    assert str(caught.value) == message


def test_ads_with_different_features_and_names_for_features_are_refused_at_the_start() -> None:
    with pytest.raises(InputError, match="arm 'b' has no size, which arm 'a' has: all ads must have the same features"):
        first((Arm(arm="a", reward=1.0, features={"size": 1}), Arm(arm="b", reward=1.0)), None)
    mixed = (Arm(arm="a", reward=1.0, features={"size": 1}), Arm(arm="b", reward=1.0, features={"size": "L"}))
    with pytest.raises(InputError, match="size: some ads have a number, others a text"):
        first(mixed, None)
    titles = tuple(Arm(arm=f"a{n}", reward=1.0, features={"title": f"t{n}"}) for n in range(MOST_INFERRED + 1))
    with pytest.raises(InputError, match=r"title: 101 different texts, more than 100: declare it in \[features.ads\]"):
        first(titles, None)
    _, outcome = ordered(
        ArmChange(arm="b", reward=1.0, active=True, features={"size": 1.0}),
        arms=(Arm(arm="a", reward=1.0),),
        features=None,
    )
    assert "this catalogue has no features of ads" in outcome.refusals[0].reason


@pytest.mark.parametrize("features", [{"": 1}, {"arm": "x"}, {"x": float("nan")}, {"x": None}, {"x": True}])
def test_an_arm_with_a_feature_that_makes_no_sense_is_refused(features: Any) -> None:
    with pytest.raises(InputError, match="arm 'a'"):
        Arm(arm="a", reward=1.0, features=features)


def test_pricing_and_retiring_keep_the_features_of_an_ad() -> None:
    learner, outcome = ordered(
        ArmChange(arm="a", reward=9.0, active=True), ArmChange(arm="b", reward=2.0, active=False)
    )
    assert not outcome.refusals
    assert [arm.features for arm in learner.current.arms] == [arm.features for arm in ARMS]


def test_the_first_ads_of_an_empty_catalogue_complete_the_declaration() -> None:
    new: Any = {"price": 5.0, "brand": "north", "shop": "x"}
    learner, outcome = ordered(ArmChange(arm="c", reward=1.0, active=True, features=new), arms=())
    assert not outcome.refusals
    price = learner.current.settings.features.ads[0]  # type: ignore[union-attr]
    assert (price.centre, price.scale) == (5.0, 1.0)
    again = Learner(LearningSettings(dim=2), (), [first(()), *outcome.versions])
    assert again.current == learner.current


def test_a_catalogue_whose_features_differ_is_a_change_that_the_learner_carries_out() -> None:
    wanted = (ARMS[0], Arm(arm="b", reward=2.0, features={"price": 31, "brand": "west", "shop": "y"}))
    changes = catalogue_difference(ARMS, wanted)
    assert describe_changes(ARMS, changes) == [("~", "b", "price = 31.0")]
    assert catalogue_difference(wanted, wanted) == ()
    learner, _ = ordered(CatalogueChange(changes=changes))
    assert learner.current.arms == wanted


def test_the_bound_on_a_version_counts_features() -> None:
    long = tuple(Arm(arm=f"a{n}", reward=1.0, features={"text": f"{n:01000}"}) for n in range(50))
    declared = Features.of_table({"ads": {"text": {"hashed": 4}}})
    version = first(long, declared)
    bound = version_sizes.largest_size(version.arms, version.model, version.settings)
    assert 50_000 < len(encode_parameters(version)) <= bound - version_sizes.RESERVE + 2_000


PRICED = Features.of_table({"ads": {"reward": "number", "brand": ["north", "south"]}})
PRICED_ARMS = tuple(
    Arm(arm=name, reward=reward, features={"brand": "north"}) for name, reward in (("a", 0.1), ("b", 1.0), ("c", 10.0))
)


def test_the_revenue_of_an_ad_may_be_declared_as_a_feature_and_counts_by_its_logarithm() -> None:
    version = first(PRICED_ARMS, PRICED)
    assert columns_of(version)[:, 0] == pytest.approx(np.sqrt(1.5) * np.array([-1.0, 0.0, 1.0]))
    assert decode_parameters(encode_parameters(version)) == version


def test_after_a_new_price_the_column_follows_and_the_coefficients_of_the_ad_stay() -> None:
    before = Parameters.first(LearningSettings(dim=2, features=PRICED, model="personal"), PRICED_ARMS)
    generator = np.random.default_rng(1)
    seen = Observations(
        contexts=generator.normal(size=(300, 2)),
        sessions=np.arange(300),
        arms=np.arange(300) % 3,
        positions=np.zeros(300, dtype=np.intp),
        clicked=generator.random(300) < 0.3 - 0.1 * (np.arange(300) % 3),
    )
    learned = replace(before, model=before.model.fold(seen, estimator="laplace").model)
    repriced = carry_out(learned, ArmChange(arm="a", reward=10.0, active=True), {})
    assert isinstance(repriced, Parameters)
    assert columns_of(repriced)[0].tolist() == columns_of(repriced)[2].tolist()
    assert repriced.model.head(0)[0] == pytest.approx(learned.model.head(0)[0], abs=1e-12)  # type: ignore[attr-defined]
    new = tuple(
        ArmEntry(arm=name, reward=reward, active=True, features={"brand": "north"})
        for name, reward in (("cheap", 0.1), ("dear", 10.0))
    )
    added = carry_out(learned, CatalogueChange(changes=new), {})
    assert isinstance(added, Parameters)
    # Dear ads were clicked less: a new one starts there.
    assert added.model.biases[4] < added.model.biases[3] - 0.3
