"""A second click model, written here, runs through simulation, stream, replay, evaluation and explanation unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import DTypeLike

from tests.embedded.traffic import ARMS, arrivals, deliver, finish, settings
from worker.bandit import MODELS
from worker.bandit.arrays import Array, Floats, Ints
from worker.bandit.click_model import ClickModel, Fit, Observations
from worker.embedded.runner import Embedded
from worker.evaluate.evaluation import evaluate_log
from worker.evaluate.planning import Change
from worker.logs.format import LogWriter
from worker.replay.relearn import relearn
from worker.replay.verify import verify
from worker.simulation.experiment.run import run_task
from worker.simulation.experiment.settings import ExperimentSettings
from worker.stream.events import Arrival
from worker.stream.explanation import explain
from worker.stream.parameters import decode_parameters
from worker.stream.version_records import encode_parameters
from worker.web.figures import top_arms


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantRate:
    """Every arm has a click rate of its own, whatever the context: a Beta(½, ½) prior, in log-odds."""

    name: ClassVar[str] = "constant"
    fields: ClassVar[tuple[str, ...]] = ("rate.clicks", "rate.passes", "rate.dim")

    clicks: Floats
    passes: Floats
    dim: int

    @classmethod
    def prior(cls, *, dim: int, arms: int, ridge: float, features: Floats | None = None, **_: Any) -> ConstantRate:
        return cls(clicks=np.full(arms, 0.5), passes=np.full(arms, 0.5), dim=dim)

    @classmethod
    def unpack(cls, arrays: Mapping[str, Floats], *, intercept: bool = True) -> ConstantRate:
        clicks, passes, dim = (arrays[name] for name in cls.fields)
        return cls(clicks=clicks, passes=passes, dim=int(dim))

    def pack(self) -> dict[str, Floats]:
        return dict(zip(self.fields, (self.clicks, self.passes, np.array(float(self.dim))), strict=True))

    @property
    def most_inherited(self) -> int:
        return 0

    @property
    def position_effects(self) -> Floats:
        return np.zeros(1)

    @property
    def arms(self) -> int:
        return len(self.clicks)

    @property
    def biases(self) -> Floats:
        return np.log(self.clicks / self.passes)

    @property
    def bias_deviations(self) -> Floats:
        return np.sqrt(1 / self.clicks + 1 / self.passes)

    def log_odds(self, contexts: Floats) -> Floats:
        return np.tile(self.biases, (len(contexts), 1))

    def log_odds_of(self, contexts: Floats, arms: Ints) -> Floats:
        return np.append(self.biases, -np.inf)[arms]

    def widths(self, contexts: Floats) -> Floats:
        return np.tile(self.bias_deviations, (len(contexts), 1))

    def squared_widths_of(self, contexts: Floats, arms: Ints) -> Floats:
        return (self.bias_deviations**2)[arms]

    def heads(self, shown: Ints, dtype: DTypeLike) -> Heads:
        return Heads(self.biases[shown].astype(dtype), self.bias_deviations[shown].astype(dtype))

    def draws(self, generator: np.random.Generator, count: int) -> Iterator[ConstantRate]:
        for rate in generator.beta(self.clicks, self.passes, (count, self.arms)):
            yield ConstantRate(clicks=np.clip(rate, 1e-9, 1), passes=np.clip(1 - rate, 1e-9, 1), dim=self.dim)

    def fold(
        self, data: Observations, *, estimator: str, forgetting: float | str = 1.0, changes: float = 0.0
    ) -> Fit[ConstantRate]:
        clicks = np.bincount(data.arms, data.clicked, self.arms)
        passes = np.bincount(data.arms, 1 - data.clicked, self.arms)
        folded = ConstantRate(clicks=self.clicks + clicks, passes=self.passes + passes, dim=self.dim)
        return Fit(model=folded, kept=1.0)

    def forget(self, keep: float) -> ConstantRate:
        return ConstantRate(clicks=keep * self.clicks, passes=keep * self.passes, dim=self.dim)

    def with_horizon(self, horizon: int) -> ConstantRate:
        return self

    def with_arms(self, count: int, *, features: Floats | None = None) -> ConstantRate:
        new = np.full(count, 0.5)
        return ConstantRate(clicks=np.append(self.clicks, new), passes=np.append(self.passes, new), dim=self.dim)

    def with_features(self, features: Floats) -> ConstantRate:
        return self

    def with_columns(self, fresh: ClickModel, columns: Ints, ad_columns: Ints) -> ConstantRate:
        return ConstantRate(clicks=self.clicks, passes=self.passes, dim=fresh.dim)

    def choose_arms(self, arms: Sequence[int]) -> ConstantRate:
        return ConstantRate(clicks=self.clicks[list(arms)], passes=self.passes[list(arms)], dim=self.dim)

    def head(self, arm: int) -> tuple[Floats, Floats]:
        covariance = np.zeros((self.dim + 1, self.dim + 1))
        covariance[0, 0] = self.bias_deviations[arm] ** 2
        return np.append(self.biases[arm], np.zeros(self.dim)), covariance

    @property
    def effects(self) -> Floats:
        return np.zeros(self.dim)


class Heads:
    def __init__(self, odds: Array, widths: Array) -> None:
        self._odds, self._widths = odds, widths

    @property
    def coefficients(self) -> Array:
        return self._odds[None]

    def log_odds(self, contexts: Floats) -> Array:
        return np.tile(self._odds, (len(contexts), 1))

    def probabilities(self, contexts: Floats) -> Array:
        return np.tile(1 / (1 + np.exp(-self._odds)), (len(contexts), 1))

    def widths(self, contexts: Floats) -> Array:
        return np.tile(self._widths, (len(contexts), 1))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "constant", ConstantRate)


def recorded(path: Path, **changes: Any) -> Embedded:
    """Run users through the embedded runner and record every topic."""
    with LogWriter(path) as log:
        runner = Embedded(settings(model="constant", random_share=0.3, **changes), ARMS, tap=log)
        deliver(runner, arrivals(300, seconds=60), live=True)
        finish(runner)
    return runner


def test_it_learns_in_the_experiment() -> None:
    asked = ExperimentSettings(model="constant", policy=("ucbbp",), episodes=40, seeds=1, environment="uniform")
    run = run_task(asked, asked.tasks()[0])
    assert run.rejected == 0
    assert sum(run.regret[-10:]) < sum(run.regret[:10]) / 3


@pytest.mark.parametrize("repeats", [True, False])
def test_it_serves_learns_and_is_replayed_to_the_bit(tmp_path: Path, repeats: bool) -> None:
    runner = recorded(tmp_path / "log", repeats=repeats)
    newest = runner.versions.newest
    assert isinstance(newest.model, ConstantRate)
    assert newest.folds > 3
    assert newest.model.clicks.sum() > 60
    assert encode_parameters(decode_parameters(encode_parameters(newest))) == encode_parameters(newest)
    verified = verify(str(tmp_path / "log"))
    assert (verified.mismatches, verified.unverified) == (0, 0)
    assert verified.decisions > 300
    assert relearn(str(tmp_path / "log")).versions[-1].sha256 == newest.sha256


def test_it_is_explained_shown_and_evaluated(tmp_path: Path) -> None:
    newest = recorded(tmp_path / "log").versions.newest
    explanation = explain(newest, Arrival(session_id="", occurred_at=0, context=(0.0,) * 3))
    rates = newest.model.clicks / (newest.model.clicks + newest.model.passes)  # type: ignore[attr-defined]
    assert [arm.probability for arm in explanation.positions[0].arms] == pytest.approx(rates)
    assert {arm["arm"] for arm in top_arms(newest, ())} == {arm.arm for arm in ARMS}
    _, direct, _ = evaluate_log(str(tmp_path / "log"), Change(settings={"policy": "greedy"})).estimates
    assert direct.revenue is not None
    assert 0 < direct.revenue.estimate < 1
