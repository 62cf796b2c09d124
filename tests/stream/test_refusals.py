"""What is refused before anything begins, with the words that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from worker.bandit.bonuses import BONUSES
from worker.bandit.personal import PersonalModel
from worker.bandit.policies import check_combination
from worker.errors import InputError
from worker.stream.ad_features import check_ad, check_listed
from worker.stream.features import Features
from worker.stream.lift import Lift, LiftRecord
from worker.stream.settings import Arm, LearningSettings, check_order, check_same_model, ignored_scale

ADS = Features.of_table({"ads": {"size": "number", "colour": ["red", "green"]}}).ads
PUBLISHED = LearningSettings(dim=2, model="additive", standardise=False)
NAMED = Features.of_table({"context": {"age": "number", "hour": "number"}})


def arm(**changes: Any) -> Arm:
    return Arm(**{"arm": "hat", "reward": 1.0, **changes})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arm(arm=""), "an arm's id must be a text that is not empty, not ''"),
        (lambda: arm(reward=0), "arm 'hat': the reward must be a number above zero"),
        (lambda: arm(active="yes"), "arm 'hat': active must be true or false, not 'yes'"),
        (lambda: check_order(["hta"], [arm()]), "there is no ad 'hta'; did you mean 'hat'?"),
        (lambda: check_order(["hat", "hat"], [arm()]), "the ad 'hat' is named twice"),
        (lambda: check_order(["zzz"], [arm()]), "there is no ad 'zzz'; the catalogue has hat"),
        (lambda: check_ad(ADS, {"size": 1.0}, "row 2"), "row 2 has no colour, a declared feature of ads"),
        (lambda: check_ad(ADS, {"size": "L", "colour": "red"}, "row 2"), "a number is declared, not the text 'L'"),
        (
            lambda: check_ad(ADS, {"size": 1.0, "colour": 3.0}, "row 2"),
            "a category is declared, a text, not the number 3",
        ),
        (
            lambda: check_ad(ADS, {"shape": 1.0}, "row 2"),
            "row 2, shape: this feature is not declared; features of ads are",
        ),
        (lambda: check_listed(ADS, {"colour": "rde"}, "row 2"), "'rde' is not a listed value; did you mean red?"),
        (lambda: check_listed(ADS, {"colour": "blue"}, "row 2"), "values are red, green."),
        (
            lambda: check_same_model(LearningSettings(dim=2), PUBLISHED),
            "--model is personal, but the published parameters have additive: go on with theirs (--dim 2 --model ",
        ),
        (  # with names, nobody counts columns
            lambda: check_same_model(LearningSettings(dim=2, features=NAMED), replace(PUBLISHED, features=NAMED)),
            "go on with theirs (--model additive)",
        ),
        (lambda: check_same_model(LearningSettings(dim=3, model="additive"), PUBLISHED), "--dim is 3, but"),
        (
            lambda: check_same_model(LearningSettings(dim=2, model="additive", intercept=False), PUBLISHED),
            "the intercept is off, but the published parameters have on",
        ),
        (lambda: check_same_model(LearningSettings(dim=2, features=NAMED), PUBLISHED), "are lists of 2 numbers"),
        (lambda: check_combination(policy="ucbbp", bonus="paper", repeats=False), "bonus paper needs --repeats"),
        (lambda: BONUSES["paper"].optimistic(None, None), "no probabilities to plan on without repeats"),
        (lambda: PersonalModel.prior(dim=1, arms=1, ridge=1.0, intercept=False), "personal has an intercept"),
        (
            lambda: Lift.read(LiftRecord(control="fixed", since=0, groups=((1.0, 1.0, 1.0), (1.0,)), sums=())),
            "the comparison with the control group is damaged",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        call()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_another_scale_is_ignored_with_a_line() -> None:
    assert ignored_scale(PUBLISHED, PUBLISHED) is None
    assert "standardise is on here and off in the published parameters" in str(
        ignored_scale(LearningSettings(dim=2), PUBLISHED)
    )
