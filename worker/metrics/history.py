"""Recent history for the status page, of bounded size: the last closed windows, and marks of the counts.

A mark holds all counts at one time; "lately" is the difference between now and the oldest mark. Time is event time, so
a simulated run of a few seconds shows the hours it stands for. Prometheus keeps the long history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from worker.bandit.policies import policy_named
from worker.metrics.histogram import Histogram
from worker.metrics.troubles import ActiveTrouble
from worker.stream.episodes import Answering
from worker.stream.events import Episode
from worker.stream.parameters import Parameters
from worker.stream.topology import Tally
from worker.stream.versions import KEPT

MOST_WINDOWS: Final = 240
MOST_MARKS: Final = 16
BETWEEN_MARKS: Final = 60_000  # milliseconds of event time


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A closed window.

    `allowed` is the number of sessions that the exploration budget covers, None if the policy has no budget. `oracle`
    and `served` are the true values of the best and the served slates, known in simulated traffic only.
    """

    episode: Episode
    allowed: float | None
    oracle: float | None = None
    served: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """All counts since the process started, at one event time.

    `durations`, `delays` and, by stage, `stages` are counts of histograms.
    """

    time: int
    tally: Tally
    durations: tuple[int, ...]
    delays: tuple[int, ...]
    stages: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An immutable copy of everything that `Metrics` holds.

    `contexts` are packed contexts of recent users, of the same length. `answering` has the lowest answer rates.
    `numbers` holds the metrics without labels by name, without the prefix `adcascade_`; `histograms` likewise, and then
    by the values of the labels.
    `scored_windows` counts the windows whose true value is known, which happens in simulated traffic only.
    """

    now: Mark
    marks: Sequence[Mark]
    windows: Sequence[Window]
    contexts: Sequence[bytes]
    parameters: Parameters | None
    answering: Answering | None
    numbers: Mapping[str, float]
    histograms: Mapping[str, Mapping[tuple[str, ...], Histogram]]
    imbalance: Mapping[str, float]
    lag: Mapping[str, float]
    horizon: int
    scored_windows: int
    troubles: Sequence[ActiveTrouble]
    trouble_totals: Mapping[str, int]

    @property
    def since(self) -> Mark | None:
        """The oldest mark, where "lately" begins; None just after the start."""
        return self.marks[0] if self.marks else None


class MetricsHistory:
    """Keep the last windows and marks; not thread-safe, the owner holds a lock."""

    def __init__(self) -> None:
        self.windows: deque[Window] = deque(maxlen=MOST_WINDOWS)
        self.marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        self._shares: deque[tuple[int, float | None]] = deque(maxlen=KEPT)  # effective_at, share allowed to explore

    def version(self, parameters: Parameters) -> None:
        """Keep the exploration share of a version and the time from which it serves."""
        self._shares.append((parameters.effective_at, exploration_share(parameters)))

    def episode(self, episode: Episode) -> None:
        """Keep a closed window; ignore windows that a restarted learner reports again."""
        if self.windows and episode.window_end <= self.windows[-1].episode.window_end:
            return
        share = mean_share(self._shares, episode.window_start, episode.window_end)
        self.windows.append(Window(episode=episode, allowed=None if share is None else share * episode.sessions))

    def truth(self, window_end: int, *, oracle: float, served: float) -> None:
        """Add the true values of the best and the served slates to a window."""
        for index, window in enumerate(self.windows):
            if window.episode.window_end == window_end:
                self.windows[index] = replace(window, oracle=oracle, served=served)
                return

    def wants_mark(self, time: int) -> bool:
        """Return whether the next mark is due."""
        return not self.marks or time >= self.marks[-1].time + BETWEEN_MARKS


def exploration_share(parameters: Parameters) -> float | None:
    """Return the share of sessions that a version allows to explore; None if its policy has no budget."""
    if not policy_named(parameters.settings.policy).is_selective:
        return None
    if parameters.folds < parameters.settings.warmup or not parameters.expected_sessions:
        return 0.0  # warm-up does not count as exploration
    return min(1.0, parameters.explore_budget / parameters.expected_sessions)


def mean_share(shares: Iterable[tuple[int, float | None]], start: int, end: int) -> float | None:
    """Return the mean share over a window in which several versions served, each from its own time on.

    >>> mean_share([(0, 1.0), (10, 0.5), (15, 0.0)], 0, 20)
    0.625
    >>> mean_share([(0, None)], 0, 20) is None
    True
    """
    served = sorted(shares, key=lambda one: one[0])
    if not served or any(share is None for _, share in served):
        return None
    # The oldest known version also covers the time before it.
    times = [min(max(time, start), end) for time in (start, *(begin for begin, _ in served[1:]), end)]
    spans = [until - since for since, until in pairwise(times)]
    return sum(span * (share or 0.0) for span, (_, share) in zip(spans, served, strict=True)) / (end - start)
