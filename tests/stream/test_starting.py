"""Version 0 from a history: its information counts by the trust, and everything else is the command's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from worker.bandit.click_model import Observations
from worker.errors import InputError
from worker.stream.features import Features
from worker.stream.packing import rounded
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.starting import Start, started
from worker.stream.tastes import WORDS, strengths
from worker.stream.version_records import encode_parameters

SHA = "5" * 64
CONTEXT = {"age": "number", "device": ["mobile", "desktop"]}
DECLARED = Features.of_table({"context": CONTEXT, "ads": {"size": "number"}})
ARMS = tuple(Arm(arm=name, reward=1.0, features={"size": float(size)}) for size, name in enumerate("abcd"))


def settings(**changes: Any) -> LearningSettings:
    return LearningSettings(**{"dim": 3, "horizon": 2, "features": DECLARED, "standardise": False, **changes})


def learned(displays: int = 400, shown: int = 4, **changes: Any) -> Parameters:
    """Return a version that has displayed the first `shown` ads by turns, to users that like the first one."""
    first = Parameters.first(settings(**changes), ARMS)
    generator, sessions = np.random.default_rng(0), np.arange(displays)
    arms = sessions % shown
    contexts, clicked = generator.normal(size=(displays, 3)), generator.random(displays) < np.where(arms == 0, 0.8, 0.2)
    seen = Observations(
        contexts=contexts, sessions=sessions, arms=arms, positions=sessions * 0, clicked=clicked.astype(float)
    )
    answers = first.answers
    if answers is not None:
        answers = answers.plus(positions=sessions * 0, arms=arms, answered=np.ones(displays))
    model = rounded(first.model.fold(seen, estimator="laplace").model, intercept=first.settings.intercept)
    return replace(first, version=7, folds=7, clock=7.0, model=model, answers=answers, observations=displays)


HISTORY = learned()


def start(history: Parameters = HISTORY, arms: tuple[Arm, ...] = ARMS, trust: float | None = 1.0, **changes: Any):
    return started(history, settings(**changes), arms, trust=trust, sha256=SHA)


@pytest.mark.parametrize("trust", [0.01, 0.3, 1.0])
def test_the_information_and_the_counts_of_the_history_count_by_the_trust(trust: float) -> None:
    first, said = start(trust=trust), "precision.information"
    assert np.allclose(first.model.pack()[said], trust * HISTORY.model.pack()[said])
    assert first.answers is not None
    assert HISTORY.answers is not None
    assert np.allclose(first.answers.displayed, trust * HISTORY.answers.displayed)
    assert (first.version, first.model == HISTORY.model) == (0, trust == 1)


def test_version_0_is_rounded_as_every_version_is() -> None:
    first = start(trust=0.3)
    assert rounded(first.model, intercept=True) is first.model


def test_sessions_of_another_system_are_trusted_less_by_default() -> None:
    trusts = [start(history, trust=None).started_from for history in (HISTORY, replace(HISTORY, imported=True))]
    assert [None if one is None else (one.sha256, one.trust) for one in trusts] == [(SHA, 1.0), (SHA, 0.3)]


def test_the_hash_covers_the_history_and_later_versions_name_it() -> None:
    first = start(trust=0.5)
    again = decode_parameters(encode_parameters(replace(first, version=3)))
    assert (again.started_from, again.imported) == (first.started_from, False)
    assert len({one.sha256 for one in (first, replace(first, started_from=None), replace(first, imported=True))}) == 3


def test_ads_are_those_of_the_catalogue_matched_by_id_or_else_those_of_the_history() -> None:
    new = Arm(arm="new", reward=9.0, features={"size": 1.0})
    first = start(arms=(new, replace(ARMS[3], reward=5.0), ARMS[0]))
    assert [(arm.arm, arm.reward) for arm in first.arms] == [("new", 9.0), ("d", 5.0), ("a", 1.0)]
    context, before = np.zeros((1, 3)), HISTORY.model.log_odds(np.zeros((1, 3)))[0]
    assert np.allclose(first.model.log_odds(context)[0, 1:], before[[3, 0]])
    deviations = first.model.widths(np.zeros((1, first.model.dim)))[0]
    assert deviations[0] > 2 * deviations[1:].max()
    assert start(arms=()).arms == ARMS


@pytest.mark.parametrize(
    ("shown", "displays", "answers", "skipped"),
    [
        (4, 400, "learned", True),
        (2, 400, "learned", True),
        (1, 400, "learned", False),
        (4, 40, "learned", False),
        (1, 40, "all", True),
    ],
)
def test_the_history_stands_for_the_warm_up_if_it_displayed_half_of_the_ads(
    shown: int, displays: int, answers: str, skipped: bool
) -> None:
    first = start(learned(displays, shown, answers=answers), warmup=3, answers=answers)
    assert (first.folds >= first.settings.warmup) is skipped


def test_every_other_setting_is_that_of_the_command() -> None:
    first = start(horizon=4, window=5_000, beta=0.5, policy="ucbbp", standardise=True)
    assert (first.settings.horizon, first.settings.window, first.settings.beta) == (4, 5_000, 0.5)
    assert (len(first.thresholds), first.settings.policy) == (4, "ucbbp")
    assert not first.settings.standardise, "the scale of contexts comes with the history"
    bare = started(HISTORY, LearningSettings(dim=1), (), trust=1.0, sha256=SHA)
    assert (bare.settings.dim, bare.settings.features) == (3, HISTORY.settings.features)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "additive"}, "another model: its model is personal, not additive"),
        ({"features": {"context": {"age": "number", "city": ["x", "y"]}}}, r"declared ones: \+ city, − device"),
        (
            {"features": {"context": {"age": "number", "device": ["desktop", "tv"]}}},
            r"declared ones: \+ device=tv, − device=mobile",
        ),
        ({"features": {"context": CONTEXT, "crosses": "all"}}, r"declared ones: \+ age × device"),
        ({"features": {"ads": {"colour": "number"}}}, r"declared ones: \+ colour, − size"),
    ],
)
def test_a_history_that_does_not_fit_is_refused_with_the_difference(changes: dict[str, Any], message: str) -> None:
    if "features" in changes:
        changes = {"features": Features.of_table(changes["features"])}
    with pytest.raises(InputError, match=f"a history of .*{message}(;|$)"):
        start(**changes)


def test_the_same_features_in_another_order_are_those_of_the_history() -> None:
    turned = Features.of_table({"context": dict(reversed(CONTEXT.items()))})
    assert turned.context != HISTORY.settings.features.context
    assert start(features=turned).settings.features == HISTORY.settings.features


def test_other_features_of_ads_and_a_history_of_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="arm 'x' has no size, a declared feature of ads"):
        start(arms=(Arm(arm="x", reward=1.0),))
    with pytest.raises(InputError, match="version 0 has learned nothing yet"):
        start(Parameters.first(settings(), ARMS))


def test_a_start_names_its_file_where_it_is_refused_and_in_its_line() -> None:
    given = Start(path="h.gz", trust=None, read=lambda: HISTORY, digest=lambda: SHA)
    first = given.first(settings(), 3, ARMS)
    assert first == start()
    assert given.line(first) == "version 0 starts from h.gz: 400 displays; no warm-up"
    with pytest.raises(InputError, match=r"^--start-from h\.gz: a history of other features: .* have 3, not 4$"):
        given.first(settings(), 4, ARMS)


def test_the_strongest_features_come_first_in_words() -> None:
    found = strengths(HISTORY)
    assert [(one.of, one.feature) for one in found[-1:]] == [("ad", "size")]
    assert {one.feature for one in found[:-1]} == {"age", "device"}
    assert found[0].strength >= found[1].strength > 0
    assert found[0].word in {word for _, word in WORDS}
    assert not strengths(Parameters.first(settings(), ARMS)), "nothing is known before a fold"


def test_where_there_are_versions_another_history_or_trust_is_ignored_with_a_line() -> None:
    def ignored(newest: Parameters, trust: float | None = None, sha256: str = SHA) -> str | None:
        def digest() -> str:
            if sha256:
                return sha256
            raise InputError("no such file")

        return Start(path="h.gz", trust=trust, read=lambda: HISTORY, digest=digest).ignored(newest)

    first = start(trust=0.5)
    assert ignored(first) is ignored(first, 0.5) is None
    for line in (ignored(first, 0.3), ignored(first, sha256="6" * 64), ignored(first, sha256="")):
        assert str(line).endswith("started from another one, or with another trust, 0.5")
    assert str(ignored(HISTORY)).endswith("started without a history")
