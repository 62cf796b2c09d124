"""Predicted and observed clicks: what counts, under which version, and when the predictions are off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.stream.scenes import feedback, opened, progress, written
from worker.bandit.arrays import sigmoid
from worker.bandit.click_model import Observations
from worker.metrics.observer import Metrics
from worker.stream import folding
from worker.stream.calibration import MEMORY, Calibration, Predicted
from worker.stream.catalogue import carry_out
from worker.stream.events import Command, Episode, JournalEvent
from worker.stream.learner import Learner
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings

# A window of a second is closed 350 ms after its end.
SETTINGS = LearningSettings(
    dim=2, horizon=3, window=1000, session_timeout=300, lateness=50, warmup=0, standardise=False
)
ARMS = (Arm(arm="a", reward=1.0), Arm(arm="b", reward=2.0), Arm(arm="c", reward=3.0))


def window(number: int, modes: tuple[str, ...] = ("exploit",) * 3, **more: Any) -> list[JournalEvent]:
    """Return 20 sessions that pass over a; half of them click b, the others leave at it; the window is closed."""
    events: list[JournalEvent] = []
    for row in range(20):
        name, at = f"{number}-{row}", 1000 * number + row
        events.append(opened(name, at, modes=modes, context=(row / 10 - 1, 0.5), **more))
        events.append(feedback(2, "b", True, at + 20, name) if row % 2 else feedback(1, "a", False, at + 20, name))
    return [*events, progress(1000 * (number + 1) + 350)]


def learned(*windows: list[JournalEvent]) -> tuple[list[Parameters], list[Episode]]:
    learner = Learner(SETTINGS, ARMS)
    outcome = learner.handle(written([event for window in windows for event in window]))
    return outcome.versions, outcome.episodes


def test_clicks_are_predicted_by_the_version_before_and_the_prior_predicts_nothing() -> None:
    (first, second), (nothing, episode) = learned(window(0), window(1))
    assert nothing.calibration is None
    assert not first.calibration.ads.size
    contexts = np.array([[row / 10 - 1, 0.5] for row in range(20)])
    odds = first.model.log_odds(contexts)[:, :2] + first.model.position_effects[:2]
    expected = sigmoid(odds)
    found = episode.calibration
    assert found is not None
    assert found.sessions.displays == (40, 0, 0), "also those that got no answer"
    assert found.positions.predicted == pytest.approx(expected.sum(axis=0))
    assert (found.positions.clicks, found.tenths.displays) == ((0, 10), (4,) * 10)
    assert list(found.tenths.predicted) == sorted(found.tenths.predicted)
    assert found.variance == pytest.approx((expected * (1 - expected)).sum())
    losses = -np.log(np.where(np.arange(20) % 2, expected[:, 1], 1 - expected[:, 1])) - np.log(1 - expected[:, 0])
    assert found.log_loss == pytest.approx(losses.sum())
    assert second.calibration.ads[3].tolist() == [0, 10, 0]
    total = second.calibration.total
    assert total["predicted"] == pytest.approx(expected.sum())
    assert total["variance"] == pytest.approx((expected * (1 - expected)).sum())
    assert total["log_loss"] == pytest.approx(losses.sum())
    assert {one.arm for one in found.worst} == {"a", "b"}


def test_random_slates_are_shown_apart() -> None:
    drawn = window(1, modes=("random",) * 3)
    _, (_, episode) = learned(window(0), drawn)
    assert episode.calibration is not None
    assert episode.calibration.sessions.displays == (0, 40, 0)


@pytest.mark.parametrize("why", ["frozen", "rejected"])
def test_a_window_without_a_version_has_its_figures_in_the_episode_alone(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(SETTINGS, ARMS)
    learner.handle(written([*window(0), *window(1)]))
    known = learner.current
    events = [*([Command(action="freeze")] if why == "frozen" else []), *window(2)]
    if why == "rejected":
        monkeypatch.setattr(folding, "rounded", lambda *_, **__: 1 / 0)
    (episode,) = learner.handle(written(events, start=1000)).episodes
    assert episode.calibration is not None
    assert episode.calibration.sessions.displays == (40, 0, 0)
    assert (learner.current.calibration, learner.current.misfit) == (known.calibration, known.misfit)


def test_a_rollback_begins_the_sums_anew() -> None:
    (first, second), _ = learned(window(0), window(1))
    after = carry_out(second, Command(action="rollback", version=first.version), {first.version: first})
    assert isinstance(after, Parameters)
    assert not after.calibration.ads.size


# ── sums that fade ───────────────────────────────────────────────────────────────────────────────────────────────────


def predicted(displays: int, p: float, clicks: int) -> Predicted:
    """Return displays of one ad with the same probability."""
    zeros = np.zeros(displays, dtype=np.intp)
    clicked = (np.arange(displays) < clicks).astype(np.float64)
    data = Observations(contexts=np.zeros((1, 1)), sessions=zeros, arms=zeros, positions=zeros, clicked=clicked)
    return Predicted(data=data, chances=np.full(displays, p), kinds=zeros)


def after(windows: int, *, clicks: int, kept: float = 1.0) -> Calibration:
    sums = Calibration()
    for _ in range(windows):
        sums = sums.plus(predicted(1000, 0.1, clicks), arms=1, kept=kept)
    return sums


def test_sums_hold_about_the_last_clicks_and_what_is_not_forgotten() -> None:
    assert after(400, clicks=100).total["clicks"] == pytest.approx(MEMORY, rel=0.01)
    assert after(400, clicks=100, kept=0.5).total["clicks"] == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize(
    ("windows", "clicks", "bad"), [(20, 100, False), (20, 140, True), (6, 140, False), (30, 60, True)]
)
def test_predictions_are_off_if_enough_clicks_say_so(windows: int, clicks: int, bad: bool) -> None:
    sums = after(windows, clicks=clicks)
    assert sums.is_bad is bad
    first = Parameters.first(LearningSettings(dim=1), (Arm(arm="a", reward=1.0),))
    metrics = Metrics()
    metrics.version(replace(first, calibration=sums))
    assert [one.name for one in metrics.troubles.active()] == (["calibration"] if bad else [])
    shown = metrics.registry.get_sample_value("adcascade_calibration_ratio", {"bound": "estimate"})
    assert shown == pytest.approx(clicks / 100)
    metrics.version(first)
    assert not metrics.troubles.active()


def test_predictions_that_tell_nothing_have_the_loss_of_one_rate() -> None:
    assert after(1, clicks=100).loss == pytest.approx(1.0)
    assert after(1, clicks=0).loss is None
