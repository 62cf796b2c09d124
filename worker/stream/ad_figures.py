"""The figures of each ad, from the accounts of a version, and why an ad does badly, in words.

An ad does badly if users hardly ever answer it (`episodes.py`), or if a display of it earns less than a quarter of what
a display usually earns: the median over the active ads with enough displays. Either it is hardly clicked then, or its
clicks earn little. It is judged from as many displays as would usually bring in the revenue of ten of its clicks. An
ad that pays much and is rarely clicked does well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import numpy as np

from worker.bandit.arrays import Floats
from worker.stream.accounts import Sums
from worker.stream.episodes import COLLAPSED, LEAST_DISPLAYS, answering
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm

#: Clicks that the usual revenue of the displays of an ad must stand for before it is judged.
LEAST_CLICKS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of an ad over some sessions; a share of nothing is None."""

    displays: float
    clicks: float
    revenue: float
    click_rate: float | None
    revenue_per_thousand: float | None  # sessions
    answer_rate: float | None  # share of the displays with a click or a pass
    explored_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdFigures:
    """An ad, its figures since the start and on the current day, and a note on how it does."""

    arm: Arm
    total: Figures
    today: Figures
    note: str | None
    is_bad: bool

    def document(self) -> dict[str, Any]:
        """Return it for machines."""
        return {
            **{"arm": self.arm.arm, "reward": self.arm.reward, "active": self.arm.active},
            **({"features": dict(self.arm.features)} if self.arm.features else {}),
            **{"total": asdict(self.total), "today": asdict(self.today)},
            **{"note": self.note, "does_badly": self.is_bad},
        }


def ad_figures(parameters: Parameters) -> list[AdFigures]:
    """Return the figures of all ads, those with the highest revenue first.

    >>> from dataclasses import replace
    >>> from worker.stream.accounts import Accounts
    >>> from worker.stream.settings import LearningSettings
    >>> first = Parameters.first(LearningSettings(dim=1), tuple(Arm(arm=name, reward=2) for name in "abcd"))
    >>> sums = np.array([[900, 800, 500, 9], [90, 80, 2, 0], [180, 160, 4, 0], [900, 700, 500, 0], [0, 0, 0, 9]])
    >>> version = replace(first, accounts=Accounts(total=Sums(sessions=1000, ads=sums)))
    >>> [(one.arm.arm, one.total.revenue_per_thousand, one.note) for one in ad_figures(version)]
    [('a', 180.0, None), ('b', 160.0, None), ('c', 4.0, 'hardly clicked'), ('d', 0.0, 'new: 9 displays')]
    """
    accounts, arms = parameters.accounts, parameters.arms
    total, today = accounts.total.of(len(arms)), accounts.today.of(len(arms))
    reasons = _reasons(parameters, total)
    ads = []
    for index, arm in enumerate(arms):
        few = arm.active and total[0, index] < LEAST_DISPLAYS
        ads.append(
            AdFigures(
                arm=arm,
                total=_figures(total[:, index], accounts.total.sessions),
                today=_figures(today[:, index], accounts.today.sessions),
                note=reasons.get(index, f"new: {total[0, index]:,.0f} displays" if few else None),
                is_bad=index in reasons,
            )
        )
    return sorted(ads, key=lambda one: -one.total.revenue)


def document(parameters: Parameters) -> dict[str, Any]:
    """Return all figures for machines; times are in milliseconds, the day is one of UTC."""
    accounts = parameters.accounts
    counted = accounts.total.sessions > 0
    day = str(np.datetime64(accounts.day, "D"))  # for any year, unlike datetime
    return {
        "version": parameters.version,
        "since": accounts.since if counted else None,
        "until": parameters.window_end if counted else None,
        "sessions": accounts.total.sessions,
        "day": day if counted else None,
        "sessions_today": accounts.today.sessions,
        "arms": [one.document() for one in ad_figures(parameters)],
    }


def _figures(sums: Floats, sessions: int) -> Figures:
    displays, clicks, revenue, answered, explored = sums.tolist()
    return Figures(
        displays=displays,
        clicks=clicks,
        revenue=revenue,
        click_rate=clicks / displays if displays else None,
        revenue_per_thousand=1000 * revenue / sessions if sessions else None,
        answer_rate=answered / displays if displays else None,
        explored_share=explored / displays if displays else None,
    )


def _reasons(parameters: Parameters, sums: Floats) -> dict[int, str]:
    """Return why active ads do badly, by index."""
    displays, clicks, revenue, *_ = sums
    active = np.array([arm.active for arm in parameters.arms], dtype=bool)
    judged = np.flatnonzero(active & (displays >= LEAST_DISPLAYS))
    reasons = {}
    with np.errstate(all="ignore"):
        earned, rate = revenue[judged] / displays[judged], clicks[judged] / displays[judged]
        usual, often = (median(shares.tolist()) if len(judged) else 0.0 for shares in (earned, rate))
        known = usual * displays[judged] >= LEAST_CLICKS * parameters.rewards[judged]
    for place in np.flatnonzero(known & (earned < COLLAPSED * usual)).tolist():
        few = rate[place] < COLLAPSED * often
        reasons[int(judged[place])] = "hardly clicked" if few else "low revenue per display"
    answered, indices = answering(parameters, most=len(parameters.arms)), parameters.indices
    mute = () if answered is None else answered.unanswered
    return reasons | {indices[arm]: "hardly ever answered" for arm in mute}
