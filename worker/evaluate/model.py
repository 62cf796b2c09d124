"""Models of the users of the log, cross-fitted: the model of a session was fitted on other sessions.

The sessions are dealt into folds, and the model of a fold is fitted on the displays of the others. The click model is
of the same kind as the one that serves, with the same features of arms, fitted on all answered displays at once: given
context and arm, a click does not depend on the reason why the arm was shown. With it come answer rates as in serving
(`worker.bandit.answers`), from the displays and answers of the log: a display of arm k at position h is answered with
probability s_h(k) = min(1, ρ_k r_h), else the user has left.

With f_k the click probability and π_h the target's choice at position h,

    Q_h(k) = s_h(k) [ f_k e_k + (1 − f_k) C_{h+1} ]        V_h = Σ_k π_h(k) Q_h(k)

C_{h+1} is the value of the target's plan from the next position on. It is exact for deterministic targets, and if arms
may repeat. For ε-greedy and random without repeats it ignores that an arm is shown only once. It is then less exact,
but V_h = E_π[Q_h] holds, which is all that the doubly robust estimator needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from worker.bandit import MODELS
from worker.bandit.answers import PRIOR_ANSWERS, PRIOR_DISPLAYS, AnswerCounts, AnswerRates
from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.click_model import ClickModel, Displays, Observations
from worker.errors import EstimationError
from worker.evaluate.sessions import Bools, Sessions
from worker.evaluate.support import LEAST_CLICKS, Unsupported

FOLDS = 5
WEAK_RIDGE = 0.1  # without an intercept, a prior around even odds would raise the probability of rare clicks
ROWS = 4096  # sessions per slice of sessions × arms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelForm:
    """The kind of click model: its name, whether it has an intercept, and the features of the arms, (K, columns)."""

    name: str
    intercept: bool = True
    ridge: float = 1.0
    features: Floats | None = None

    def prior(self, *, dim: int, arms: int) -> ClickModel:
        """Return the belief before any data."""
        ridge = self.ridge if self.intercept else min(self.ridge, WEAK_RIDGE)
        return MODELS[self.name].prior(
            dim=dim, arms=arms, ridge=ridge, features=self.features, intercept=self.intercept
        )


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


def cross_fit(sessions: Sessions, *, model: ModelForm, generator: np.random.Generator) -> CrossFit:
    """Fit click models of the form `model`; `generator` deals the sessions into folds."""
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


def _fitted(sessions: Sessions, model: ModelForm) -> FittedModel:
    arms = sessions.prices.shape[1]
    prior = model.prior(dim=sessions.contexts.shape[1], arms=arms)
    rows, positions = np.nonzero(_displayed(sessions))
    counts = AnswerCounts.none(arms=arms, horizon=sessions.horizon).plus(
        positions=positions,
        arms=sessions.slates[rows, positions],
        answered=_seen(sessions)[rows, positions].astype(np.float64),
    )
    return FittedModel(
        clicks=prior.fold(_observations(sessions), estimator="laplace").model, counts=counts, rates=counts.rates()
    )


def _displayed(sessions: Sessions) -> Bools:
    return np.asarray(sessions.reached & (sessions.slates != NO_ARM))


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
    surprise = data.clicked - model.chances(sessions.contexts, sessions.slates)[_seen(sessions)]
    pulls = np.bincount(data.sessions, surprise * leverages, len(sessions))
    per_answer = answer_leverage(model.counts, model.rates, by_display)
    rates = _rates(model)
    variance += float((per_answer**2 * model.counts.displayed * rates * (1 - rates)).sum())
    rows, positions = np.nonzero(_displayed(sessions))
    cells = positions, sessions.slates[rows, positions]
    news = _seen(sessions)[rows, positions] - rates[cells]
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
    actions, states = zip(*(_baseline(model, sessions.part(rows)) for rows in _slices(len(sessions))), strict=True)
    return np.concatenate(actions), np.concatenate(states)


def _slices(count: int) -> Iterator[Ints]:
    for start in range(0, max(1, count), ROWS):
        yield np.arange(start, min(start + ROWS, count))


def _baseline(model: FittedModel, sessions: Sessions) -> tuple[Floats, Floats]:
    target = sessions.target
    epsilon = target.epsilon[:, None]
    anything = _uniform_means(model, sessions) if (target.epsilon > 0).any() else _Means.none(sessions)
    continuation = _continuation(model, sessions, anything)[:, 1:]
    action = _value(model, sessions, sessions.slates, continuation)
    plan = target.plan_along(sessions.slates)
    drawn = anything.earned_along + anything.passed_along * continuation
    state = (1 - epsilon) * _value(model, sessions, plan, continuation) + epsilon * drawn
    nothing = (sessions.positions > sessions.depth) | (sessions.slates == NO_ARM)
    action[nothing] = 0.0
    state[nothing] = 0.0
    return action, state


def _value(model: FittedModel, sessions: Sessions, slates: Ints, continuation: Floats) -> Floats:
    """Return Q_h of the arms of slates: (n, H), (n, H) → (n, H)."""
    chances = model.chances(sessions.contexts, slates)
    earned = chances * sessions.price(slates)
    return np.asarray(model.rates.of_slates(slates) * (earned + (1 - chances) * continuation))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Means:
    """Means over the eligible arms of s_h(k) f_k e_k (earned) and s_h(k) (1 − f_k) (passed), (n, H) each.

    They are over all arms eligible at first, and over those left along the recorded slates.
    """

    earned: Floats
    passed: Floats
    earned_along: Floats
    passed_along: Floats

    @classmethod
    def none(cls, sessions: Sessions) -> _Means:
        nothing = np.zeros(sessions.slates.shape)
        return cls(earned=nothing, passed=nothing, earned_along=nothing, passed_along=nothing)


def _uniform_means(model: FittedModel, sessions: Sessions) -> _Means:
    mask, prices, rates = sessions.can_show(), sessions.prices[sessions.period], _rates(model)
    chances = sigmoid(model.clicks.log_odds(sessions.contexts)) * mask
    earned, passed = (chances * prices) @ rates.T, (mask - chances) @ rates.T
    gone_earned, gone_passed = np.zeros(earned.shape), np.zeros(earned.shape)
    if not sessions.target.repeats:
        shown = model.chances(sessions.contexts, sessions.slates)
        worth = shown * sessions.price(sessions.slates)
        for h in range(1, sessions.horizon):
            before = sessions.slates[:, :h]
            stay = np.where(before == NO_ARM, 0.0, rates[h][before])
            gone_earned[:, h] = (stay * worth[:, :h]).sum(axis=1)
            gone_passed[:, h] = (stay * (1 - shown[:, :h])).sum(axis=1)
    eligible = sessions.eligible
    return _Means(
        earned=earned / eligible[:, :1],
        passed=passed / eligible[:, :1],
        earned_along=(earned - gone_earned) / eligible,
        passed_along=(passed - gone_passed) / eligible,
    )


def _continuation(model: FittedModel, sessions: Sessions, anything: _Means) -> Floats:
    """Return C_h, the value of the target's plan from each position on, for any arms before: (n, H+1)."""
    target = sessions.target
    stay = model.rates.of_slates(target.best)
    chances = model.chances(sessions.contexts, target.best)
    earned, passed = stay * chances * sessions.price(target.best), stay * (1 - chances)
    epsilon = target.epsilon
    values = np.zeros((len(sessions), sessions.horizon + 1))
    for h in range(sessions.depth - 1, -1, -1):
        ahead = values[:, h + 1]
        planned, drawn = earned[:, h] + passed[:, h] * ahead, anything.earned[:, h] + anything.passed[:, h] * ahead
        values[:, h] = (1 - epsilon) * planned + epsilon * drawn
        values[(sessions.slates[:, h] == NO_ARM), h] = 0.0
    return values
