"""Click models of the log, cross-fitted: the model of a session was fitted on other sessions.

The sessions are dealt into folds, and the model of a fold is fitted on the displays of the others. It is of the same
kind as the model that serves, fitted on all answered displays at once: given context and arm, a click does not depend
on the reason why the arm was shown. With it comes the probability that a user leaves a display unanswered, by position,
the same for all arms.

With f_k the click probability, q_h the probability of leaving, and π_h the target's choice at position h,

    Q_h(k) = (1 − q_h) [ f_k e_k + (1 − f_k) C_{h+1} ]        V_h = Σ_k π_h(k) Q_h(k)

C_{h+1} is the value of the target's plan from the next position on. It is exact for deterministic targets, and if arms
may repeat. For ε-greedy and random without repeats it ignores that an arm is shown only once. It is then less exact,
but V_h = E_π[Q_h] holds, which is all that the doubly robust estimator needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.click_model import ClickModel, Displays, Observations
from worker.bandit.models import MODELS
from worker.errors import EstimationError
from worker.evaluate.sessions import Bools, Sessions
from worker.evaluate.support import LEAST_CLICKS, Unsupported

FOLDS = 5
RIDGE = 0.1  # weak: a prior around even odds would raise the probability of rare clicks
ROWS = 4096  # sessions per slice of sessions × arms
PRIOR_DISPLAYS = 10.0  # weight of the share of users who leave at any position, in the share at one position


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedModel:
    """A fitted model of users.

    leaving : (H,), the probability of leaving at each position
    reached : (H,), the number of displays at each position that `leaving` was estimated from
    """

    clicks: ClickModel
    leaving: Floats
    reached: Floats

    def chances(self, contexts: Floats, arms: Ints) -> Floats:
        """Return click probabilities, 0 for NO_ARM: (n, d), (n, H) → (n, H)."""
        return sigmoid(self.clicks.log_odds_of(contexts, arms))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossFit:
    """Models by fold, none of them fitted on its own fold, and a model of all sessions, for the error of estimation.

    folds : (n,), the fold of each session
    clicks, expected_clicks : number of clicks, and the number expected by the models
    """

    folds: Ints
    models: tuple[FittedModel, ...]
    whole: FittedModel
    clicks: int
    expected_clicks: float = 0.0

    def each(self) -> Iterator[tuple[Ints, FittedModel]]:
        """Yield the sessions of each fold and their model."""
        for fold, model in enumerate(self.models):
            yield np.flatnonzero(self.folds == fold), model

    def part(self, rows: Bools) -> CrossFit:
        """Return the models of some of the sessions."""
        return replace(self, folds=self.folds[rows])


def cross_fit(sessions: Sessions, *, model: str, generator: np.random.Generator) -> CrossFit:
    """Fit click models of the kind named `model`; `generator` deals the sessions into folds."""
    clicks = int(sessions.clicked.sum())
    if clicks < LEAST_CLICKS:
        raise Unsupported(f"the log has {clicks} clicks, and a click model needs {LEAST_CLICKS}")
    folds = generator.permutation(len(sessions)) % FOLDS
    try:
        models = tuple(_fitted(sessions.part(folds != fold), model) for fold in range(FOLDS))
        fit = CrossFit(folds=folds, models=models, whole=_fitted(sessions, model), clicks=clicks)
    except EstimationError as error:
        raise Unsupported(f"no click model fits the log: {error}") from None
    expected = sum(
        float(fitted.chances(sessions.contexts[rows], sessions.slates[rows])[_seen(sessions)[rows]].sum())
        for rows, fitted in fit.each()
    )
    return replace(fit, expected_clicks=expected)


def _seen(sessions: Sessions) -> Bools:
    return np.asarray(sessions.positions <= sessions.answered[:, None])


def _fitted(sessions: Sessions, model: str) -> FittedModel:
    prior = MODELS[model].prior(dim=sessions.contexts.shape[1], arms=sessions.prices.shape[1], ridge=RIDGE)
    left = (sessions.reached & ~_seen(sessions)).sum(axis=0)
    reached = sessions.reached.sum(axis=0)
    overall = left.sum() / max(1, reached.sum())
    return FittedModel(
        clicks=prior.fold(_observations(sessions), estimator="laplace").model,
        leaving=(left + PRIOR_DISPLAYS * overall) / (reached + PRIOR_DISPLAYS),
        reached=reached.astype(np.float64),
    )


def _observations(sessions: Sessions) -> Observations:
    rows, positions = np.nonzero(_seen(sessions))
    return Observations(
        contexts=sessions.contexts,
        sessions=rows,
        arms=sessions.slates[rows, positions],
        clicked=(sessions.clicked[rows] & (positions + 1 == sessions.displayed[rows])).astype(np.float64),
    )


# ── the value of slates ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlateValues:
    """The value of slates under a model, (n, H+1) from each position on, and its derivatives.

    `slopes` (n, H) is ∂V_1/∂u_h, u_h the log-odds of the arm at h; `losses` (n, H) is −∂V_1/∂q_h.
    """

    values: Floats
    slopes: Floats
    losses: Floats


def slate_values(model: FittedModel, sessions: Sessions, slates: Ints) -> SlateValues:
    """Value slates (n, H) for the sessions' contexts, at their prices, up to their depth."""
    count, horizon = slates.shape
    chances, prices = model.chances(sessions.contexts, slates), sessions.price(slates)
    chances[:, sessions.depth :] = 0.0
    stay = 1 - model.leaving
    values = np.zeros((count, horizon + 1))
    for h in range(horizon - 1, -1, -1):
        ahead = values[:, h + 1]
        values[:, h] = np.where(slates[:, h] == NO_ARM, 0.0, stay[h] * (ahead + chances[:, h] * (prices[:, h] - ahead)))
    values[:, sessions.depth :] = 0.0
    onward = np.cumprod(stay * (1 - chances), axis=1)
    reach = np.concatenate([np.ones((count, 1)), onward[:, :-1]], axis=1)
    slopes = reach * stay * chances * (1 - chances) * (prices - values[:, 1:])
    losses = reach * values[:, :-1] / stay
    return SlateValues(values=values, slopes=slopes, losses=losses)


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

    The variance is that of the click model, Σ slopes·log-odds, plus the binomial variance of the shares who leave. The
    influence of a session is the sum over its displays of leverage × surprise.
    """
    model = fit.whole
    slopes, loss = np.zeros(sessions.target_slates.shape), np.zeros(sessions.horizon)
    total = len(sessions) * len(sessions.target_slates)
    for draw, slates in enumerate(sessions.target_slates):
        valued = slate_values(model, sessions, slates)
        slopes[draw] = np.where(sessions.positions > after, valued.slopes, 0.0) / total
        loss[after:] += valued.losses.sum(axis=0)[after:] / total
    there = sessions.target_slates != NO_ARM
    shown = Displays(contexts=sessions.contexts, sessions=np.nonzero(there)[1], arms=sessions.target_slates[there])
    data = _observations(sessions)
    variance, leverages = model.clicks.leverage(shown, slopes[there], data)
    surprise = data.clicked - model.chances(sessions.contexts, sessions.slates)[_seen(sessions)]
    shares = model.leaving * (1 - model.leaving) / np.maximum(model.reached, 1)
    return ModelError(
        variance=float(variance + (loss**2 * shares).sum()),
        pulls=np.asarray(np.bincount(data.sessions, surprise * leverages, len(sessions)), dtype=np.float64),
    )


def baseline(model: FittedModel, sessions: Sessions) -> tuple[Floats, Floats]:
    """Return the values under a model along the recorded slates, with the target from there on.

    The first, (n, H), is Q_h of the recorded arm; the second, (n, H), is V_h given the recorded arms before.
    """
    actions, states = zip(*(_baseline(model, sessions.part(rows)) for rows in _slices(len(sessions))), strict=True)
    return np.concatenate(actions), np.concatenate(states)


def _slices(count: int) -> Iterator[Ints]:
    for start in range(0, max(1, count), ROWS):
        yield np.arange(start, min(start + ROWS, count))


def _baseline(model: FittedModel, sessions: Sessions) -> tuple[Floats, Floats]:
    target, depth, stay = sessions.target, sessions.depth, 1 - model.leaving
    epsilon = target.epsilon[:, None]
    anything = _uniform_means(model, sessions) if (target.epsilon > 0).any() else _Means.none(sessions)
    continuation = _continuation(model, sessions, anything)
    shown, shown_prices = model.chances(sessions.contexts, sessions.slates), sessions.price(sessions.slates)
    action = stay * (shown * shown_prices + (1 - shown) * continuation[:, 1:])
    plan = target.plan_along(sessions.slates)
    planned, planned_prices = model.chances(sessions.contexts, plan), sessions.price(plan)
    chance = (1 - epsilon) * planned + epsilon * anything.chance_along
    earned = (1 - epsilon) * planned * planned_prices + epsilon * anything.earned_along
    state = stay * (earned + (1 - chance) * continuation[:, 1:])
    beyond = sessions.positions > depth
    action[beyond | (sessions.slates == NO_ARM)] = 0.0
    state[beyond | (sessions.slates == NO_ARM)] = 0.0
    return action, state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Means:
    """Means of f_k and f_k e_k over the eligible arms: at first (n, 1), and along the recorded slates (n, H)."""

    chance: Floats
    earned: Floats
    chance_along: Floats
    earned_along: Floats

    @classmethod
    def none(cls, sessions: Sessions) -> _Means:
        first, along = np.zeros((len(sessions), 1)), np.zeros(sessions.slates.shape)
        return cls(chance=first, earned=first, chance_along=along, earned_along=along)


def _uniform_means(model: FittedModel, sessions: Sessions) -> _Means:
    mask, prices = sessions.can_show(), sessions.prices[sessions.period]
    chances = sigmoid(model.clicks.log_odds(sessions.contexts)) * mask
    sum_chance, sum_earned = chances.sum(axis=1)[:, None], (chances * prices).sum(axis=1)[:, None]
    gone_chance = gone_earned = np.zeros(sessions.slates.shape)
    if not sessions.target.repeats:
        shown = model.chances(sessions.contexts, sessions.slates)
        gone_chance = _before(shown)
        gone_earned = _before(shown * sessions.price(sessions.slates))
    eligible = sessions.eligible
    return _Means(
        chance=sum_chance / eligible[:, :1],
        earned=sum_earned / eligible[:, :1],
        chance_along=(sum_chance - gone_chance) / eligible,
        earned_along=(sum_earned - gone_earned) / eligible,
    )


def _before(numbers: Floats) -> Floats:
    """Return the sums over the earlier positions: (n, H) → (n, H)."""
    return np.asarray(np.cumsum(numbers, axis=1) - numbers)


def _continuation(model: FittedModel, sessions: Sessions, anything: _Means) -> Floats:
    """Return C_h, the value of the target's plan from each position on, for any arms before: (n, H+1)."""
    target = sessions.target
    best, stay = target.best, 1 - model.leaving
    chances, prices = model.chances(sessions.contexts, best), sessions.price(best)
    epsilon = target.epsilon
    values = np.zeros((len(sessions), sessions.horizon + 1))
    for h in range(sessions.depth - 1, -1, -1):
        chance = (1 - epsilon) * chances[:, h] + epsilon * anything.chance[:, 0]
        earned = (1 - epsilon) * chances[:, h] * prices[:, h] + epsilon * anything.earned[:, 0]
        values[:, h] = stay[h] * (earned + (1 - chance) * values[:, h + 1])
        values[(sessions.slates[:, h] == NO_ARM), h] = 0.0
    return values
