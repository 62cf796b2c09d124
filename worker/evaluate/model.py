"""Models of the users of the log, cross-fitted: the model of a session was fitted on other sessions.

The sessions are dealt into folds, and the model of a fold is fitted on the displays of the others. The click model is
of the same kind as the one that serves, with the same features of arms, fitted on all answered displays at once: given
context and arm, a click does not depend on the reason why the arm was shown. With it come answer rates as in serving
(`worker.bandit.answers`), from the displays and answers of the log: a display of arm k at position h is answered with
probability s_h(k) = min(1, ρ_k r_h), else the user has left.

With f_k the click probability and π_h the target's choice at position h,

    Q_h(k) = s_h(k) [ f_k e_k + (1 − f_k) C_{h+1} ]        V_h = Σ_k π_h(k) Q_h(k)

C_{h+1} is the value of the target's slate from the next position on: exact for deterministic targets, and the mean over
the slates drawn from a target that draws. V_h = E_π[Q_h] holds for any C, which is all that the doubly robust estimator
needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from worker.bandit.answers import PRIOR_ANSWERS, PRIOR_DISPLAYS, AnswerCounts, AnswerRates
from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.click_model import ClickModel, Displays, Observations
from worker.errors import EstimationError
from worker.evaluate.sessions import Bools, Sessions
from worker.evaluate.support import LEAST_CLICKS, Unsupported

FOLDS = 5
ROWS = 4096  # sessions per slice of sessions × arms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedModel:
    """A fitted model of users: their clicks, and the displays and answers that `rates` come from."""

    clicks: ClickModel
    counts: AnswerCounts
    rates: AnswerRates

    def chances(self, contexts: Floats, arms: Ints) -> Floats:
        """Return click probabilities, 0 for NO_ARM: (n, d), (n, H) → (n, H)."""
        return sigmoid(self.clicks.log_odds_of(contexts, arms))


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
    rows, positions = np.nonzero(sessions.shown)
    counts = AnswerCounts.none(arms=sessions.prices.shape[1], horizon=sessions.horizon).plus(
        positions=positions,
        arms=sessions.slates[rows, positions],
        answered=sessions.seen[rows, positions].astype(np.float64),
    )
    clicks = prior.fold(_observations(sessions), estimator="laplace").model
    return FittedModel(clicks=clicks, counts=counts, rates=counts.rates())


def _observations(sessions: Sessions) -> Observations:
    rows, positions = np.nonzero(sessions.seen)
    return Observations(
        contexts=sessions.contexts,
        sessions=rows,
        arms=sessions.slates[rows, positions],
        clicked=sessions.clicks[rows, positions].astype(np.float64),
    )


# ── the value of slates ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlateValues:
    """The value of slates under a model, (n, H+1) from each position on, and its derivatives.

    `slopes` (n, H) is ∂V_1/∂u_h, u_h the log-odds of the arm at h. `answer_slopes` (n, H) is ∂V_1/∂s_h, s_h the
    probability that the display at h is answered.
    """

    values: Floats
    slopes: Floats
    answer_slopes: Floats


def slate_values(model: FittedModel, sessions: Sessions, slates: Ints) -> SlateValues:
    """Value slates (n, H) for the sessions' contexts, at their prices, up to their depth."""
    count, horizon = slates.shape
    chances, prices = model.chances(sessions.contexts, slates), sessions.price(slates)
    stay, there = model.rates.of_slates(slates), slates != NO_ARM
    there[:, sessions.depth :] = False
    values, answered = np.zeros((count, horizon + 1)), np.zeros((count, horizon))
    for h in range(horizon - 1, -1, -1):
        ahead = values[:, h + 1]
        answered[:, h] = np.where(there[:, h], ahead + chances[:, h] * (prices[:, h] - ahead), 0.0)
        values[:, h] = stay[:, h] * answered[:, h]
    onward = np.cumprod(np.where(there, stay * (1 - chances), 0.0), axis=1)
    reach = np.concatenate([np.ones((count, 1)), onward[:, :-1]], axis=1)
    slopes = np.where(there, reach * stay * chances * (1 - chances) * (prices - values[:, 1:]), 0.0)
    return SlateValues(values=values, slopes=slopes, answer_slopes=reach * answered)


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

    The variance is that of the click model, Σ slopes·log-odds, plus that of the answer rates, as if every display were
    answered independently with its rate. The influence of a session is the sum over its displays of leverage × surprise
    in both. What this leaves out: the bias of rates that are drawn towards the mean, where an arm has few displays.
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
    shown = Displays(contexts=sessions.contexts, sessions=np.nonzero(there)[1], arms=sessions.target_slates[there])
    data = _observations(sessions)
    variance, leverages = model.clicks.leverage(shown, slopes[there], data)
    surprise = data.clicked - model.chances(sessions.contexts, sessions.slates)[sessions.seen]
    pulls = np.bincount(data.sessions, surprise * leverages, len(sessions))
    per_answer = answer_leverage(model.counts, model.rates, by_display)
    rates = _rates(model)
    variance += float((per_answer**2 * model.counts.displayed * rates * (1 - rates)).sum())
    rows, positions = np.nonzero(sessions.shown)
    cells = positions, sessions.slates[rows, positions]
    news = sessions.seen[rows, positions] - rates[cells]
    pulls = pulls + np.bincount(rows, news * per_answer[cells], len(sessions))
    return ModelError(variance=float(variance), pulls=np.asarray(pulls, dtype=np.float64))


def _rates(model: FittedModel) -> Floats:
    """Return s_h(k) of every arm at every position, (H, K)."""
    return model.rates.of_arms(np.arange(len(model.rates.arms)))


def answer_leverage(counts: AnswerCounts, rates: AnswerRates, by_display: Floats) -> Floats:
    """Return the change of a value per answer more at each position and of each arm, (H, K).

    `by_display` (H, K) is its change per unit of s_h(k) = min(1, ρ_k r_h). The chain rule goes through the estimates of
    `AnswerCounts.rates`, from the last to the first: r_h depends on all ρ_k, and ρ_k on the rate of all arms.
    """
    below_one = np.multiply.outer(rates.positions, rates.arms) < 1
    gradient = np.where(below_one, by_display, 0.0)
    by_position = gradient @ rates.arms
    expected = counts.displayed @ rates.arms + PRIOR_ANSWERS
    pull = by_position / expected  # per answer at the position
    by_arm = rates.positions @ gradient - (pull * rates.positions) @ counts.displayed
    per_arm = by_arm / (counts.displayed.sum(axis=0) + PRIOR_DISPLAYS)
    overall = PRIOR_DISPLAYS * per_arm.sum() / (float(counts.displayed.sum()) + 1)
    return np.asarray(pull[:, None] + per_arm[None, :] + overall)


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
    earned = chances * sessions.price(slates)
    return np.asarray(model.rates.of_slates(slates) * (earned + (1 - chances) * onward))


def _mean_value(model: FittedModel, sessions: Sessions, onward: Floats) -> Floats:
    """Return the mean of Q_h over the arms that are eligible after the recorded ones: (n, H) → (n, H)."""
    mask, prices, rates = sessions.can_show(), sessions.prices[sessions.period], _rates(model)
    chances = sigmoid(model.clicks.log_odds(sessions.contexts)) * mask
    total = (chances * prices) @ rates.T + (mask - chances) @ rates.T * onward
    if not sessions.target.repeats:
        shown, worth = model.chances(sessions.contexts, sessions.slates), sessions.price(sessions.slates)
        for h in range(1, sessions.horizon):
            before = sessions.slates[:, :h]
            stay = np.where(before == NO_ARM, 0.0, rates[h][before])
            earned = shown[:, :h] * worth[:, :h]
            total[:, h] -= (stay * (earned + (1 - shown[:, :h]) * onward[:, h : h + 1])).sum(axis=1)
    return np.asarray(total / sessions.eligible)
