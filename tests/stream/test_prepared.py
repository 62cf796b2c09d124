"""A version that is read from its record and prepared in a thread is the same version, and serves without computing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.bandit.beliefs import seen
from tests.test_second_model import ConstantRate
from worker.bandit import MODELS
from worker.bandit.answers import AnswerCounts
from worker.stream.contexts import Standardisation, pack_context
from worker.stream.events import Arrival
from worker.stream.features import Features
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.slates import Slate, SlatePlanner, prepared
from worker.stream.version_records import encode_parameters

DIM, ARMS, USERS = 5, 40, 200
FEATURES = Features.of_table({"ads": {"price": "number", "brand": ["x", "y", "z"]}})


def learned(**changes: Any) -> Parameters:
    """Return a version that has learned from some displays."""
    settings = LearningSettings(dim=DIM, horizon=4, answers="learned", **changes)
    arms = tuple(
        Arm(
            arm=f"ad-{k}",
            reward=0.2 + (k * 7 % 11) / 5,
            active=k % 9 != 4,
            features={"price": k % 7, "brand": "xyz"[k % 3]} if settings.features else (),  # type: ignore[arg-type]
        )
        for k in range(ARMS)
    )
    first, generator = Parameters.first(settings, arms), np.random.default_rng(7)
    contexts, shown = generator.normal(size=(USERS, DIM)), generator.integers(0, ARMS, 3 * USERS)
    clicked, positions = generator.random(3 * USERS) < 0.3, np.tile(np.arange(3), USERS)
    data = seen(contexts, np.repeat(np.arange(USERS), 3), shown, clicked, positions)
    counts = np.floor(generator.random((4, ARMS)) * 50)
    return replace(
        first,
        version=3,
        folds=2,
        model=first.model.fold(data, estimator=settings.estimator).model,
        thresholds=(0.3, 0.2, 0.1, 0.05),
        ties=(0.5, 0.25, 1.0, 0.0),
        answers=AnswerCounts(displayed=counts + 20, answered=counts),
        standardisation=Standardisation(centre=np.arange(5.0), scale=np.arange(1.0, 6.0)),
    )


def slates(planner: SlatePlanner) -> list[Slate]:
    contexts = np.random.default_rng(3).normal(size=(60, DIM))
    contexts[::11, 2] = np.nan  # a missing number
    arrivals = [
        Arrival(session_id=f"s-{n}", occurred_at=0, context=(), exclude=("ad-0", "ad-5") if n % 5 == 0 else ())
        for n in range(len(contexts))
    ]
    return planner.plan(arrivals, [pack_context(tuple(context)) for context in contexts.tolist()])


def fail(*_: object) -> None:
    raise AssertionError("computed in the thread that serves")


CASES = [
    *({"model": model, "repeats": repeats} for model in MODELS for repeats in (True, False)),
    *({"model": model, "policy": policy} for model in MODELS for policy in ("ucbbp", "greedy", "myopic-ucb", "random")),
    {"features": FEATURES, "repeats": False},
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: ",".join(f"{name}={value}" for name, value in case.items() if name != "features")
)
def test_it_plans_the_same_slates_to_the_bit_and_factorises_nothing_more(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = learned(**case)
    expected, sha256, record = slates(SlatePlanner(version)), version.sha256, encode_parameters(version)
    with ThreadPoolExecutor(1) as thread:
        planner = thread.submit(lambda: prepared(decode_parameters(record))).result()
    for name in ("inv", "cholesky", "eigh", "eigvalsh"):
        monkeypatch.setattr(np.linalg, name, fail)
    monkeypatch.setattr("worker.stream.parameters.digest_of", fail)
    assert slates(planner) == expected
    assert planner.parameters.sha256 == sha256
    planner.parameters.model.squared_widths_of(np.zeros((1, DIM)), np.zeros((1, 1), dtype=np.intp))  # the status page


def test_a_model_of_any_kind_and_a_version_without_arms_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "constant", ConstantRate)
    version = learned(model="constant")
    assert slates(prepared(version)) == slates(SlatePlanner(version))
    assert slates(prepared(Parameters.first(LearningSettings(dim=DIM), ())))[0].arms == ()
