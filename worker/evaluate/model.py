"""Models of the users of the log, cross-fitted: the model of a session was fitted on other sessions.

The sessions are dealt into folds, and the model of a fold is fitted on the displays of the others. The click model is
of the same kind as the one that serves, with the same features of arms, fitted on all displays at once: given context,
arm and position, a click does not depend on the reason why the arm was shown. A display without an answer was not
clicked. With it come rates as in serving (`worker.bandit.answers`): of the users who do not click on arm k at position
h, the share s_kh = min(1, ρ_k r_h) goes on, the others leave.

With f_kh the click probability and π_h the target's choice at position h,

    Q_h(k) = f_kh e_k + (1 − f_kh) s_kh C_{h+1}        V_h = Σ_k π_h(k) Q_h(k)

C_{h+1} is the value of the target's slate from the next position on: exact for deterministic targets, and the mean over
the slates drawn from a target that draws. V_h = E_π[Q_h] holds for any C, which is all that the doubly robust estimator
needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from worker.bandit.answers import PRIOR_ANSWERS, PRIOR_DISPLAYS, AnswerCounts, AnswerRates, Cascade
from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.click_model import ClickModel, Displays, Observations
from worker.bandit.planning import slate_chances, values_of_slates
from worker.errors import EstimationError
from worker.evaluate.sessions import Bools, Sessions
from worker.evaluate.support import LEAST_CLICKS, Unsupported

FOLDS = 5
ROWS = 4096  # sessions per slice of sessions × arms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedModel:
    """A fitted model of users: their clicks, and the displays without a click that `rates` come from."""

    clicks: ClickModel
    counts: AnswerCounts
    rates: AnswerRates

    def chances(self, contexts: Floats, slates: Ints) -> Floats:
        """Return click probabilities of slates, 0 for NO_ARM: (n, d), (n, H) → (n, H)."""
        return slate_chances(self.clicks, contexts, slates)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossFit:
    """Models by fold, none of them fitted on its own fold, and a model of all sessions, for the error of estimation.

    folds : (n,), the fold of each session
    chances : (n, H), click probabilities of the recorded slates by the models of their folds
    clicks : number of clicks that the models were fitted on
    """

    folds: Ints
    models: tuple[FittedModel, ...]
    whole: FittedModel
    clicks: int
    chances: Floats

    def each(self) -> Iterator[tuple[Ints, FittedModel]]:
        """Yield the sessions of each fold and their model."""
        for fold, model in enumerate(self.models):
            yield np.flatnonzero(self.folds == fold), model

    def part(self, rows: Bools) -> CrossFit:
        """Return the models of some of the sessions."""
        return replace(self, folds=self.folds[rows], chances=self.chances[rows])


def cross_fit(sessions: Sessions, *, prior: ClickModel, generator: np.random.Generator) -> CrossFit:
    """Fit click models that start from `prior`; `generator` deals the sessions into folds."""
    clicks = int(sessions.clicked.sum())
    if clicks < LEAST_CLICKS:
        raise Unsupported(f"the log has {clicks} clicks, and a click model needs {LEAST_CLICKS}")
    folds = generator.permutation(len(sessions)) % FOLDS
    try:
        models = tuple(_fitted(sessions.part(folds != fold), prior) for fold in range(FOLDS))
        whole = _fitted(sessions, prior)
    except EstimationError as error:
        raise Unsupported(f"no click model fits the log: {error}") from None
    fit = CrossFit(folds=folds, models=models, whole=whole, clicks=clicks, chances=np.zeros(sessions.slates.shape))
    for rows, model in fit.each():
        fit.chances[rows] = model.chances(sessions.contexts[rows], sessions.slates[rows])
    return fit


def _fitted(sessions: Sessions, prior: ClickModel) -> FittedModel:
    data = _observations(sessions)
    rows, positions = np.nonzero(sessions.unclicked)
    counts = AnswerCounts.none(arms=sessions.prices.shape[1], horizon=sessions.horizon).plus(
        positions=positions,
        arms=sessions.slates[rows, positions],
        answered=sessions.answers[rows, positions].astype(np.float64),
    )
    clicks = prior.with_horizon(sessions.horizon).fold(data, estimator="laplace").model
    return FittedModel(clicks=clicks, counts=counts, rates=counts.rates())


def _observations(sessions: Sessions) -> Observations:
    rows, positions = np.nonzero(sessions.shown)
    return Observations(
        contexts=sessions.contexts,
        sessions=rows,
        arms=sessions.slates[rows, positions],
        positions=positions,
        clicked=sessions.clicks[rows, positions].astype(np.float64),
    )


# ── the value of slates ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlateValues:
    """The value of slates under a model, (n, H+1) from each position on, and its derivatives.

    `slopes` (n, H) is ∂V_1/∂u_h, u_h the log-odds of the arm at h. `answer_slopes` (n, H) is ∂V_1/∂s_h, s_h the
    probability that a user who does not click at h goes on.
    """

    values: Floats
    slopes: Floats
    answer_slopes: Floats


def slate_values(model: FittedModel, sessions: Sessions, slates: Ints) -> SlateValues:
    """Value slates (n, H) for the sessions' contexts, at their prices, up to their depth."""
    there = slates != NO_ARM
    there[:, sessions.depth :] = False
    chances = np.where(there, model.chances(sessions.contexts, slates), 0.0)
    prices, stay = sessions.price(slates), model.rates.of_slates(slates) * there
    values = np.pad(values_of_slates(chances, prices, stay), ((0, 0), (0, 1)))
    ahead, missed = values[:, 1:], 1 - chances
    reach = np.cumprod(np.pad(stay * missed, ((0, 0), (1, 0)), constant_values=1.0), axis=1)[:, :-1]
    slopes = reach * chances * missed * (prices - stay * ahead)
    return SlateValues(values=values, slopes=slopes, answer_slopes=reach * missed * ahead)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelError:
    """The error of the mean value of the target's slates, because the model is estimated.

    `variance` is the variance of that mean. `pulls` (n,) is the influence on it of each session, by the model that was
    fitted on it.
    """

    variance: float
    pulls: Floats


def model_error(fit: CrossFit, sessions: Sessions, *, after: int = 0) -> ModelError:
    """Return the error from the model at positions > `after`, by the delta method.

    The variance is that of the click model, Σ slopes·log-odds, plus that of the rates, as if every user who does not
    click went on independently. The influence of a session is the sum over its displays of leverage × surprise in both.
    What this leaves out: the bias of rates that are drawn towards the mean, where an arm has few displays.
    """
    model = fit.whole
    slopes, total = np.zeros(sessions.target_slates.shape), len(sessions) * len(sessions.target_slates)
    by_display = np.zeros(model.counts.displayed.shape)
    for draw, slates in enumerate(sessions.target_slates):
        valued, late = slate_values(model, sessions, slates), sessions.positions > after
        slopes[draw] = np.where(late, valued.slopes, 0.0) / total
        rows, positions = np.nonzero(late & (slates != NO_ARM))
        np.add.at(by_display, (positions, slates[rows, positions]), valued.answer_slopes[rows, positions] / total)
    there = sessions.target_slates != NO_ARM
    _, rows, positions = np.nonzero(there)
    arms = sessions.target_slates[there]
    shown = Displays(contexts=sessions.contexts, sessions=rows, arms=arms, positions=positions)
    data = _observations(sessions)
    variance, leverages = model.clicks.leverage(shown, slopes[there], data)
    surprise = data.clicked - model.chances(sessions.contexts, sessions.slates)[sessions.shown]
    pulls = np.bincount(data.sessions, surprise * leverages, len(sessions))
    per_answer = answer_leverage(model.counts, by_display)
    rates = _rates(model)
    variance += float((per_answer**2 * model.counts.displayed * rates * (1 - rates)).sum())
    rows, positions = np.nonzero(sessions.unclicked)
    cells = positions, sessions.slates[rows, positions]
    news = sessions.answers[rows, positions] - rates[cells]
    pulls = pulls + np.bincount(rows, news * per_answer[cells], len(sessions))
    return ModelError(variance=float(variance), pulls=np.asarray(pulls, dtype=np.float64))


def _rates(model: FittedModel) -> Floats:
    """Return s_kh of every arm at every position, (H, K)."""
    return model.rates.of_arms(np.arange(len(model.rates.arms)), len(model.rates.positions))


def answer_leverage(counts: AnswerCounts, by_display: Floats) -> Floats:
    """Return the change of a value per answer more at each position and of each arm, (H, K).

    `by_display` (H, K) is its change per unit of s_kh = min(1, ρ_k r_h). The chain rule goes backwards through the
    rounds of `AnswerCounts.rates`: r_h depends on all ρ_k of its round, these on all r_h of the round before and on the
    rate of all arms.
    """
    rounds, displayed = counts.rounds(), counts.displayed
    last = rounds[-1]
    gradient = np.where(np.multiply.outer(last.positions, last.arms) < 1, by_display, 0.0)
    by_arm, by_position = last.positions @ gradient, gradient @ last.arms
    per_arm, per_position = np.zeros(counts.arms), np.zeros(counts.horizon)
    before = [np.ones(counts.horizon), *(rates.positions for rates in rounds[:-1])]
    for rates, positions in zip(reversed(rounds), reversed(before), strict=True):
        pull = by_position / (displayed @ rates.arms + PRIOR_ANSWERS)
        per_position += pull
        pull_of_arms = (by_arm - (pull * rates.positions) @ displayed) / (positions @ displayed + PRIOR_DISPLAYS)
        per_arm += pull_of_arms
        by_arm, by_position = np.zeros(counts.arms), -displayed @ (pull_of_arms * rates.arms)
    overall = PRIOR_DISPLAYS * per_arm.sum() / (float(displayed.sum()) + 1)
    return np.asarray(per_position[:, None] + per_arm[None, :] + overall)


def baseline(model: FittedModel, sessions: Sessions) -> tuple[Floats, Floats]:
    """Return the values under a model along the recorded slates, with the target from there on.

    The first, (n, H), is Q_h of the recorded arm; the second, (n, H), is V_h given the recorded arms before.
    """
    onward = np.zeros(sessions.slates.shape)
    for slates in sessions.target_slates:
        onward += slate_values(model, sessions, slates).values[:, 1:] / len(sessions.target_slates)
    action = _value(model, sessions, sessions.slates, onward)
    epsilon = sessions.target.epsilon[:, None]
    state = (1 - epsilon) * _value(model, sessions, sessions.target.plan_along(sessions.slates), onward)
    for start in range(0, len(sessions), ROWS) if (epsilon > 0).any() else ():
        rows = np.arange(start, min(start + ROWS, len(sessions)))
        state[rows] += epsilon[rows] * _mean_value(model, sessions.part(rows), onward[rows])
    nothing = (sessions.positions > sessions.depth) | (sessions.slates == NO_ARM)
    return np.where(nothing, 0.0, action), np.where(nothing, 0.0, state)


def _value(model: FittedModel, sessions: Sessions, slates: Ints, onward: Floats) -> Floats:
    """Return Q_h of the arms of slates: (n, H), (n, H) → (n, H)."""
    chances = model.chances(sessions.contexts, slates)
    return np.asarray(chances * sessions.price(slates) + (1 - chances) * model.rates.of_slates(slates) * onward)


def _mean_value(model: FittedModel, sessions: Sessions, onward: Floats) -> Floats:
    """Return the mean of Q_h over the arms that are eligible after the recorded ones: (n, H) → (n, H)."""
    mask, prices, horizon = sessions.can_show(), sessions.prices[sessions.period], sessions.horizon
    every = np.arange(prices.shape[1])
    cascade = Cascade.of(model.clicks.position_effects, model.rates, shown=every, horizon=horizon)
    first, total = sigmoid(model.clicks.log_odds(sessions.contexts)), np.zeros(onward.shape)
    for h in range(horizon):
        chances = cascade.chances(first, h)
        worth = chances * prices + (1 - chances) * cascade.ahead(onward[:, h], h)
        total[:, h] = (worth * mask).sum(axis=1)
        if not sessions.target.repeats:
            rows = np.flatnonzero(sessions.slates[:, h] != NO_ARM)
            mask[rows, sessions.slates[rows, h]] = False
    return np.asarray(total / sessions.eligible)
