"""Which ads users answer least, for people: the status page, the episode records, and the trouble `unanswered-ads`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from worker.stream.parameters import Parameters

#: Displays from which a rate is judged. It starts at the rate of all ads, with the weight of 20 displays, so no rate
#: can fall below `COLLAPSED` before about 60 displays, all of them without an answer.
LEAST_DISPLAYS: Final = 50
#: Share of the median rate below which the rate of an ad has collapsed.
COLLAPSED: Final = 0.25
#: Ads that are named.
MOST_NAMED: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredArm:
    """An active ad, the rate at which its displays are answered, and how many displays that is judged by."""

    arm: str
    rate: float
    displays: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """The active ads with the lowest answer rates; `collapsed` counts those that hardly ever get an answer.

    `lowest` has at most `MOST_NAMED` ads, the lowest rate first: so the first `collapsed` of them are those.
    """

    lowest: tuple[AnsweredArm, ...]
    collapsed: int

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The ids of the ads whose rate has collapsed, at most `MOST_NAMED`."""
        return tuple(one.arm for one in self.lowest[: self.collapsed])


def answering(parameters: Parameters) -> Answering | None:
    """Return what is known of the answer rates of active ads; None where they are not learned.

    >>> from worker.bandit.answers import AnswerCounts
    >>> from worker.stream.settings import Arm, LearningSettings
    >>> from dataclasses import replace
    >>> first = Parameters.first(LearningSettings(dim=1, horizon=1), tuple(Arm(arm=name, reward=1) for name in "abc"))
    >>> counts = AnswerCounts(displayed=np.array([[100.0, 100.0, 100.0]]), answered=np.array([[90.0, 0.0, 80.0]]))
    >>> answering(replace(first, answers=counts)).unanswered
    ('b',)
    """
    counts, rates = parameters.answers, parameters.rates
    if counts is None or rates is None:
        return None
    active = np.array([arm.active for arm in parameters.arms], dtype=bool)
    displays = counts.displayed.sum(axis=0)
    judged = np.flatnonzero(active & (displays >= LEAST_DISPLAYS))
    if not len(judged):
        return Answering(lowest=(), collapsed=0)
    bound = COLLAPSED * median(rates.arms[active].tolist())  # numpy's imports a large module first
    order = judged[np.argsort(rates.arms[judged], kind="stable")][:MOST_NAMED].tolist()
    lowest = tuple(
        AnsweredArm(arm=parameters.arms[k].arm, rate=float(rates.arms[k]), displays=int(displays[k])) for k in order
    )
    return Answering(lowest=lowest, collapsed=int((rates.arms[judged] < bound).sum()))
