"""The scores of a closed window: what its sessions earned, and would have been expected to earn in the other group.

Rules that hold in this file (docs/math.md §14):

- m̂₁ and m̂₀ of a session are what the version that served it expects of two slates: that of the policy, and that of the
  control. One of them it had, the other is planned here as serving would have planned it, by its id, context and
  exclusions. So neither depends on the group, nor on any answer: both were known when it arrived.
- Sessions count as serving handled them (intention to treat): adcascade with its warm-up, random slates and guardrail.
- Left out are sessions that served under another control or none, under a version that is no longer kept (its share
  is not known), and those without an eligible ad. Neither depends on the group. Uncertain ones are in no window.
- What cannot be computed is 0, which costs precision and no truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.planning import slate_chances, values_of_slates
from worker.errors import AdcascadeError
from worker.stream.accounts import Accounts, click_prices
from worker.stream.contexts import stack_packed
from worker.stream.events import Arrival
from worker.stream.joining import Bools, ClosedWindow
from worker.stream.lift import Lift, Scores
from worker.stream.parameters import Parameters
from worker.stream.session import excluded_indices, packed_indices
from worker.stream.settings import LearningSettings
from worker.stream.slates import SlatePlanner

#: Displays with which an ad of the order by popularity begins, at the mean of all ads.
USUAL_DISPLAYS = 20.0


def popular(accounts: Accounts, arms: int) -> tuple[int, ...]:
    """Return the ads by falling revenue per display; those without displays come last."""
    displays, _, revenue, *_ = accounts.total.of(arms)
    usual = revenue.sum() / max(1.0, displays.sum())
    rate = np.where(displays > 0, (revenue + USUAL_DISPLAYS * usual) / (displays + USUAL_DISPLAYS), -1.0)
    return tuple(np.argsort(-rate, kind="stable").tolist())


def compared(
    lift: Lift | None,
    window: ClosedWindow,
    settings: LearningSettings,
    parent: Parameters,
    kept: Mapping[int, Parameters],
) -> Lift | None:
    """Return the lift with a window that is closed under these settings; `kept` are the versions that served it."""
    control = settings.control_identity
    if not control:
        return None
    if lift is None or lift.control != control:
        lift = Lift(control=control)
    served = {number: one for number, one in kept.items() if one.settings.control_identity == control}
    with np.errstate(all="ignore"):
        scores = scores_of(window, served, click_prices(window, parent, kept))
    return lift if scores is None else lift.plus(scores, window.start)


def scores_of(window: ClosedWindow, served: Mapping[int, Parameters], prices: Floats) -> Scores | None:
    """Return the scores of the sessions that these versions served; `prices` are those of the clicks of the window."""
    earned = np.zeros((2, len(window.plans)))
    clicked = window.rows[window.clicked]
    earned[:, clicked] = prices, np.ones(len(clicked))
    parts = []
    numbers = np.array([plan.parameters_version if plan.slate else -1 for plan in window.plans])
    for number in np.unique(numbers[np.isin(numbers, list(served))]).tolist():
        version, rows = served[number], np.flatnonzero(numbers == number)
        control = np.array([window.plans[row].control for row in rows.tolist()])
        try:
            expected = _expected(window, rows, control, version)
        except (AdcascadeError, ArithmeticError, ValueError, IndexError):
            expected = np.zeros((2, 2, len(rows)))
        parts.append((rows, control, np.full(len(rows), version.settings.control_share), expected))
    if not parts:
        return None
    all_rows, control, shares, expected = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    return Scores(
        control=control.astype(np.float64),
        share=shares,
        earned=earned[:, all_rows],
        expected=np.nan_to_num(expected, nan=0.0, posinf=0.0, neginf=0.0),
    )


def _expected(window: ClosedWindow, rows: Ints, control: Bools, version: Parameters) -> Floats:
    """Return revenue and clicks that a version expects under the policy and under the control: (2, 2, n)."""
    raw = stack_packed([window.plans[row].context for row in rows.tolist()], version.settings.dim)
    contexts = version.prepared(raw)
    own = _worth(version, contexts, window.slates.indices(rows, version.indices))
    other = _worth(version, contexts, _other_slates(window, rows, control, version, raw, contexts))
    return np.stack([np.where(control, other, own), np.where(control, own, other)], axis=1)


def _worth(version: Parameters, contexts: Floats, slates: Ints) -> Floats:
    """Return the expected revenue and clicks of slates, (2, n)."""
    chances = slate_chances(version.model, contexts, slates)
    rates = None if version.rates is None else version.rates.of_slates(slates)
    revenue = values_of_slates(chances, version.rewards[slates], rates)[:, 0]
    return np.stack([revenue, values_of_slates(chances, np.ones(slates.shape), rates)[:, 0]])


def _other_slates(
    window: ClosedWindow, rows: Ints, control: Bools, version: Parameters, raw: Floats, contexts: Floats
) -> Ints:
    """Return the slate of each session, as indices, that it would have had in the other group."""
    planner, slates = SlatePlanner(version), np.full((len(rows), version.settings.horizon), NO_ARM, dtype=np.intp)
    inside, outside = (rows[control].tolist(), rows[~control].tolist())
    arrivals = [
        Arrival(session_id=window.keys[row][0], occurred_at=0, context=(), exclude=excluded)
        for row, excluded in zip(inside, _excluded(window, inside, version), strict=True)
    ]
    slates[control] = planner.policy_slates(arrivals, raw[control], contexts[control])
    excluded, names = _excluded(window, outside, version), [window.keys[row][0] for row in outside]
    slates[~control] = planner.slates("control", names, raw[~control], contexts[~control], excluded).arms
    return slates


def _excluded(window: ClosedWindow, rows: Sequence[int], version: Parameters) -> list[tuple[str, ...]]:
    """Return the ids of the ads that some sessions exclude and a version knows."""
    packed = [window.plans[row].exclude for row in rows]
    if not any(packed):
        return [()] * len(packed)
    indices = packed_indices(version.indices)
    return [tuple(version.arms[index].arm for index in excluded_indices(one, indices)) for one in packed]
