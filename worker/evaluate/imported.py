"""Imported sessions: another system chose their slates, and recorded how likely its choices were, or did not.

Rules that hold in this file:

- A session whose first propensity is below 1 was left to chance. Its weights have the recorded propensities, each given
  the earlier positions; if all of them are those of a uniform draw, the session counts as drawn uniformly.
- Every other session was certain. Certain sessions support one target: one that shows what they have shown, in each of
  them and up to their last display. Its revenue is that of the log.
- If a later display of a session left to chance has no propensity, no such session is weighed: whether there is a later
  display depends on the answers, so leaving out these sessions alone would bias the estimates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from worker.bandit.arrays import Floats, Ints
from worker.evaluate.sessions import Sessions

CLOSE: Final = 1e-6  # propensities of a table may be rounded


def with_recorded(sessions: Sessions, recorded: Floats, eligible: Ints) -> tuple[Sessions, str | None]:
    """Return imported sessions with their recorded propensities, (n, H), and why none can be weighed, if that is so.

    `eligible` (n, H) is the number of eligible arms at each position.
    """
    shown = sessions.shown
    differs = (shown & (sessions.target != sessions.slates)).any(axis=1)
    if not differs.any():
        return replace(sessions, chances=np.ones(recorded.shape), target_chances=np.ones(recorded.shape)), None
    chance = recorded[:, 0] < 1
    lacking = int((chance[:, None] & shown & np.isnan(recorded)).sum())
    if lacking:
        return sessions, f"{lacking} imported displays after the first have no propensity: weights need it of every one"
    if not chance.any():
        why = "no propensity is below 1"
        if np.isnan(recorded[:, 0]).all():
            why = "how likely theirs were is not known (import with --propensity-column)"
        return sessions, f"the target shows other ads in {differs.mean():.1%} of the imported sessions, and {why}"
    chances = np.cumprod(np.where(shown, recorded, 1.0), axis=1)
    uniform = (~shown | (np.abs(recorded * eligible - 1) <= CLOSE)).all(axis=1)
    return replace(sessions, chances=np.where(chance[:, None], chances, np.nan), drawn=chance & uniform), None
