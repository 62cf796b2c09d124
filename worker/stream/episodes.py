"""The record of a closed window: its sessions and answers, and the version that it led to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from worker.stream.assessment import answers, assess
from worker.stream.events import Episode
from worker.stream.parameters import Parameters
from worker.stream.windows import ClosedWindow


def episode_of(
    window: ClosedWindow,
    parent: Parameters,
    current: Parameters,
    kept: Mapping[int, Parameters],
    *,
    steps: int | None,
    rejected: str | None,
    late: int,
) -> Episode:
    """Return the episode of a window that was closed under `parent`, with `current` in force since.

    `kept` are the versions that may have served it; `steps` are those of Newton's method, None without a fold;
    `rejected` is why there is no usable estimate; `late` are the records that came late since the last episode.
    """
    numbers = assess(window, parent, current, kept)
    displays, clicks = answers(window)
    return Episode(
        version=current.version,
        window_start=window.start,
        window_end=window.end,
        sessions=window.sessions,
        displays=displays,
        clicks=clicks,
        late=late,
        beta=current.beta,
        explore_budget=current.explore_budget,
        thresholds=current.thresholds,
        frozen=current.frozen,
        rejected=rejected,
        folds=current.folds,
        observations=current.observations,
        newton_steps=steps,
        learned=len(window.plans) if len(window.plans) < window.sessions else None,
        **asdict(numbers),
    )
