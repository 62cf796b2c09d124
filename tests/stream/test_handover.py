"""A version that is handed to another process is the same version there, and plans the same slates, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.test_second_model import ConstantRate
from worker.bandit.answers import AnswerCounts
from worker.bandit.arrays import Array
from worker.bandit.click_model import Observations, Portable
from worker.bandit.models import MODELS
from worker.stream.contexts import pack_context
from worker.stream.events import Arrival
from worker.stream.features import Features
from worker.stream.handover import Assembler, Handover, prepared, take_apart
from worker.stream.observed import ObservedSessions
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import Slate, SlatePlanner
from worker.stream.standardising import Standardisation
from worker.stream.version_encoding import encode_parameters

DIM, ARMS = 5, 40
FEATURES = Features.of_table({"ads": {"price": "number", "brand": ["x", "y", "z"]}})


def arms(*, features: bool) -> tuple[Arm, ...]:
    described = [{"price": k % 7, "brand": "xyz"[k % 3]} if features else () for k in range(ARMS)]
    return tuple(
        Arm(arm=f"ad-{k}", reward=0.2 + (k * 7 % 11) / 5, active=k % 9 != 4, features=described[k])  # type: ignore[arg-type]
        for k in range(ARMS)
    )


def learned(*, features: bool = False, answers: bool = True, standardise: bool = True, **changes: Any) -> Parameters:
    """Return a version that has learned from some displays."""
    chosen = {"features": FEATURES} if features else {}
    settings = LearningSettings(
        dim=DIM, horizon=4, standardise=standardise, answers="learned" if answers else "all", **chosen, **changes
    )
    first = Parameters.first(settings, arms(features=features))
    generator = np.random.default_rng(7)
    sessions = np.repeat(np.arange(200), 3)
    seen = Observations(
        contexts=generator.normal(size=(200, DIM)),
        sessions=sessions,
        arms=generator.integers(0, ARMS, len(sessions)),
        clicked=(generator.random(len(sessions)) < 0.3).astype(np.float64),
    )
    counts = np.floor(generator.random((4, ARMS)) * 50)
    return replace(
        first,
        version=3,
        folds=2,
        model=first.model.fold(seen, estimator=settings.estimator).model,
        thresholds=(0.3, 0.2, 0.1, 0.05),
        ties=(0.5, 0.25, 1.0, 0.0),
        journal_offset=17,
        progress={0: 5, 3: 9},
        answers=AnswerCounts(displayed=counts + 20, answered=counts) if answers else None,
        standardisation=Standardisation(centre=np.arange(5.0), scale=np.arange(1.0, 6.0)) if standardise else None,
    )


def handed(parameters: Parameters, *, prepare: bool = True) -> SlatePlanner:
    """Return a version as another process gets it: copies of all arrays, which cannot be written."""
    parts = take_apart(prepared(parameters) if prepare else SlatePlanner(parameters))
    return Assembler().put_together(replace(parts, arrays={name: _copy(one) for name, one in parts.arrays.items()}))


def _copy(array: Array) -> Array:
    copy = np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
    assert not copy.flags.writeable
    return copy


def slates(planner: SlatePlanner) -> list[Slate]:
    generator = np.random.default_rng(3)
    contexts = generator.normal(size=(60, DIM))
    contexts[::11, 2] = np.nan  # a missing number
    arrivals = [
        Arrival(session_id=f"s-{n}", occurred_at=0, context=(), exclude=("ad-0", "ad-5") if n % 5 == 0 else ())
        for n in range(len(contexts))
    ]
    return planner.plan(arrivals, [pack_context(tuple(context)) for context in contexts.tolist()])


CASES = [
    *({"model": model, "standardise": one, "answers": two} for model in MODELS for one in (0, 1) for two in (0, 1)),
    {"features": True},
    {"features": True, "repeats": False},
    {"model": "additive", "intercept": False, "standardise": False},
    *({"model": model, "repeats": False, "answers": False} for model in MODELS),
    *({"model": model, "policy": policy} for model in MODELS for policy in ("ucbbp", "greedy", "myopic-ucb", "random")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(f"{name}={value}" for name, value in case.items()))
def test_it_is_the_same_version_and_plans_the_same_slates_to_the_bit(case: dict[str, Any]) -> None:
    case = {name: bool(value) if isinstance(value, int) else value for name, value in case.items()}
    here = learned(**case)
    there = handed(here)
    assert there.parameters == here
    assert there.parameters.sha256 == here.sha256
    assert encode_parameters(there.parameters) == encode_parameters(here)
    assert slates(there) == slates(SlatePlanner(here))
    contexts, shown = np.random.default_rng(5).normal(size=(9, DIM)), np.tile(np.arange(ARMS), (9, 1))
    ours, theirs = here.model, there.parameters.model
    for name in ("log_odds_of", "squared_widths_of"):
        assert getattr(theirs, name)(contexts, shown).tobytes() == getattr(ours, name)(contexts, shown).tobytes()
    for name in ("norm", "smallest_eigenvalue"):
        assert getattr(theirs, name) == getattr(ours, name)
    for name in ("biases", "bias_deviations", "effects", "effect_deviations"):
        assert getattr(theirs, name).tobytes() == getattr(ours, name).tobytes()


@pytest.mark.parametrize("model", MODELS)
def test_what_takes_long_is_not_computed_again(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = handed(learned(model=model))

    def fail(*_: object) -> None:
        raise AssertionError("a matrix was factorised")

    expected = slates(SlatePlanner(learned(model=model)))
    for name in ("inv", "cholesky"):
        monkeypatch.setattr(np.linalg, name, fail)
    assert slates(there) == expected
    there.parameters.model.squared_widths_of(np.zeros((1, DIM)), np.zeros((1, 1), dtype=np.intp))  # the status page


@pytest.mark.parametrize("model", MODELS)
def test_a_version_that_was_not_prepared_can_still_be_compared_and_served_by(model: str) -> None:
    here = learned(model=model)
    there = handed(here, prepare=False)
    assert encode_parameters(there.parameters) == encode_parameters(here)
    assert slates(there) == slates(SlatePlanner(here))


def test_a_model_that_exports_nothing_is_unpacked_and_prepared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "constant", ConstantRate)
    here = learned(model="constant")
    assert not isinstance(here.model, Portable)
    there = handed(here)
    assert encode_parameters(there.parameters) == encode_parameters(here)
    assert slates(there) == slates(SlatePlanner(here))


def test_sessions_that_wait_for_the_standardisation_come_along() -> None:
    pending = ObservedSessions(
        contexts=np.ones((2, DIM)),
        rows=np.array([0, 1]),
        arms=np.array([3, 4]),
        positions=np.array([1, 2]),
        clicked=np.array([0.0, 1.0]),
    )
    here = replace(Parameters.first(LearningSettings(dim=DIM), arms(features=False)), pending=pending)
    there = handed(here).parameters
    assert there.sha256 == here.sha256
    assert encode_parameters(there) == encode_parameters(here)


def test_a_version_without_active_arms_is_handed_over() -> None:
    here = Parameters.first(LearningSettings(dim=DIM), ())
    there = handed(here)
    assert encode_parameters(there.parameters) == encode_parameters(here)
    assert there.plan([Arrival(session_id="s", occurred_at=0, context=())], [pack_context((0.0,) * DIM)])[0].arms == ()


def test_arms_that_did_not_change_are_the_same_objects() -> None:
    assembler, here = Assembler(), learned()
    dearer = (replace(here.arms[0], reward=9.0), *here.arms[1:])
    parts: list[Handover] = [
        take_apart(SlatePlanner(one)) for one in (here, replace(here, version=4), replace(here, version=5, arms=dearer))
    ]
    first, second, third = (assembler.put_together(one).parameters for one in parts)
    assert first.arms is second.arms
    assert third.arms == dearer
