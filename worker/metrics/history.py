"""What was observed lately, for people who look at one worker: bounded, however long it runs.

Prometheus keeps history for those who have it. This is for the status page, which must work without: the last closed
windows, and once per minute of the stream's time a mark of what had been counted by then, so that "lately" can be told
as a difference. Time is the stream's own, so a simulated run that takes seconds looks like the hours it stands for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from worker.stream.events import Episode
from worker.stream.parameters import Parameters
from worker.stream.topology import Tally
from worker.stream.versions import KEPT

MOST_WINDOWS: Final = 240
MOST_MARKS: Final = 16
BETWEEN_MARKS: Final = 60_000  # milliseconds of the stream's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A closed window.

    `allowed` is how many of its sessions the versions in force meant to explore, None where the policy has no budget;
    `bound` and `posterior` are regrets per session; `oracle` and `served` are known in simulated traffic only.
    """

    end: int
    sessions: int
    displays: int
    clicks: int
    reward: float
    expected_reward: float
    explored: float
    allowed: float | None
    bound: float | None
    posterior: float | None
    rejected: bool
    oracle: float | None = None
    served: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What had been counted at a time: all of it since the process started."""

    time: int
    tally: Tally
    durations: tuple[int, ...]
    delays: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that `Metrics` knows, all of one moment; nothing in it changes any more."""

    now: Mark
    marks: Sequence[Mark]
    windows: Sequence[Window]
    parameters: Parameters | None
    gauges: Mapping[str, float]
    totals: Mapping[str, float]
    imbalance: Mapping[str, float]
    lag: Mapping[str, float]
    simulated: bool

    @property
    def since(self) -> Mark | None:
        """The oldest mark: what "lately" begins with; None while the process is young."""
        return self.marks[0] if self.marks else None


class History:
    """Keeps the last windows and marks; not safe to share between threads, its owner has the lock."""

    def __init__(self) -> None:
        self._windows: deque[Window] = deque(maxlen=MOST_WINDOWS)
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        self._shares: deque[tuple[int, float | None]] = deque(maxlen=KEPT)  # effective_at, share meant to explore

    @property
    def windows(self) -> tuple[Window, ...]:
        """The last closed windows, oldest first."""
        return tuple(self._windows)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The last marks, oldest first."""
        return tuple(self._marks)

    def version(self, parameters: Parameters) -> None:
        """Keep from when on a version serves and how much it means to explore."""
        self._shares.append((parameters.effective_at, meant_to_explore(parameters)))

    def episode(self, episode: Episode) -> None:
        """Keep a closed window; a learner that began anew may tell it again."""
        if self._windows and episode.window_end <= self._windows[-1].end:
            return
        share = allowed_share(self._shares, episode.window_start, episode.window_end)
        self._windows.append(
            Window(
                end=episode.window_end,
                sessions=episode.sessions,
                displays=episode.displays,
                clicks=episode.clicks,
                reward=episode.reward,
                expected_reward=episode.expected_reward,
                explored=episode.explored,
                allowed=None if share is None else share * episode.sessions,
                bound=episode.regret_bound,
                posterior=episode.regret_posterior,
                rejected=episode.rejected is not None,
            )
        )

    def truth(self, window_end: int, *, oracle: float, served: float) -> None:
        """Add what a window was really worth."""
        for place in range(len(self._windows) - 1, -1, -1):
            if self._windows[place].end == window_end:
                self._windows[place] = replace(self._windows[place], oracle=oracle, served=served)
                return

    def wants_mark(self, time: int) -> bool:
        """Whether it is time for another mark."""
        return not self._marks or time >= self._marks[-1].time + BETWEEN_MARKS

    def mark(self, mark: Mark) -> None:
        """Keep a mark."""
        self._marks.append(mark)


def meant_to_explore(parameters: Parameters) -> float | None:
    """Return the share of the sessions that a version means to explore; None if its policy has no budget."""
    if parameters.settings.policy != "aucbbp":
        return None
    if parameters.folds < parameters.settings.warmup or not parameters.expected_sessions:
        return 0.0  # nothing in the warm-up is called exploring
    return min(1.0, parameters.explore_budget / parameters.expected_sessions)


def allowed_share(shares: Iterable[tuple[int, float | None]], start: int, end: int) -> float | None:
    """Return the mean share over a window that several versions served, each from its time on.

    >>> allowed_share([(0, 1.0), (10, 0.5), (15, 0.0)], 0, 20)
    0.625
    >>> allowed_share([(0, None)], 0, 20) is None
    True
    """
    served = sorted(shares, key=lambda one: one[0])
    if not served or any(share is None for _, share in served):
        return None
    total = 0.0
    for place, (begins, share) in enumerate(served):
        until = served[place + 1][0] if place + 1 < len(served) else end
        # The oldest version known also served what came before it.
        overlap = min(until, end) - max(begins if place else start, start)
        total += max(0, overlap) * (share or 0.0)
    return total / (end - start)
