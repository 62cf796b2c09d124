"""Imported sessions: another system chose their slates, and recorded how likely its choices were, or did not.

Rules that hold in this file:

- A session whose first propensity is below 1 was left to chance. Its weights have the recorded propensities, each given
  the earlier positions; if all of them are those of a uniform draw, the session counts as drawn uniformly, unless such
  sessions are of other users than the rest.
- Every other session was certain. Certain sessions support one target: one that shows what they have shown, in each of
  them and up to their last display. Its revenue is that of the log.
- If users left to chance differ from those who were not, in any column of their contexts, no session is weighed either:
  the answer would be one for those users alone. A share of the sessions, drawn by lot, does not differ.
- If a later display of a session left to chance has no propensity, no such session is weighed: whether there is a later
  display depends on the answers, so leaving out these sessions alone would bias the estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Final

import numpy as np

from worker.bandit.arrays import Floats
from worker.evaluate.logged import LoggedSession
from worker.evaluate.sessions import Bools, Sessions

CLOSE: Final = 1e-6  # propensities of a table may be rounded
ALARM: Final = 0.001  # probability that equal users are taken for others


def weigh_imported(
    sessions: Sessions, logged: Sequence[LoggedSession], *, horizon: int
) -> tuple[Sessions, Bools, str | None]:
    """Return the sessions with what is known of imported ones, which of them support the target, and why none does."""
    imported, shown = sessions.imported, sessions.shown
    recorded = np.full(sessions.slates.shape, np.nan)
    for row in np.flatnonzero(imported).tolist():
        recorded[row, : len(logged[row].propensities)] = logged[row].propensities
    differs = (sessions.target.epsilon > 0) | (
        shown & (sessions.positions <= horizon) & (sessions.target.best != sessions.slates)
    ).any(axis=1)
    if not differs[imported].any():
        # After the last display of a session, both may be taken to agree.
        sessions.served.best[imported] = sessions.target.best[imported]
        return sessions, imported, None
    chance = imported & (recorded[:, 0] < 1)
    lacking = int((chance[:, None] & shown & np.isnan(recorded)).sum())
    if lacking or not chance.any():
        reason: str | None = _why_not(recorded[imported], differs[imported], lacking)
    else:
        reason = _other_users(sessions.contexts[imported], chance[imported])
    if reason is not None:
        return sessions, np.zeros(len(sessions), dtype=bool), reason
    uniform = chance & (~shown | (np.abs(recorded * sessions.eligible - 1) <= CLOSE)).all(axis=1)
    uniform &= _other_users(sessions.contexts[chance], uniform[chance]) is None
    sessions.served.uniform[uniform] = 1.0
    recorded[~chance | uniform] = np.nan
    recorded[(chance & ~uniform)[:, None] & ~shown] = 1.0  # no choice after the end of a slate
    return replace(sessions, recorded=recorded, drawn=sessions.drawn | uniform), chance, None


def _other_users(contexts: Floats, chance: Bools) -> str | None:
    """Return that the users left to chance are others than the rest, if they are: (n, d), (n,)."""
    if chance.all() or not chance.any():
        return None
    one, rest = np.nan_to_num(contexts[chance]), np.nan_to_num(contexts[~chance])
    error = np.sqrt(one.var(axis=0) / len(one) + rest.var(axis=0) / len(rest))
    apart = np.abs(one.mean(axis=0) - rest.mean(axis=0)) > error * NormalDist().inv_cdf(1 - ALARM / (2 * error.size))
    if not apart.any():
        return None
    return (
        f"{len(one)} of {len(chance)} imported sessions were left to chance, and they are of other users than the rest "
        f"(column {apart.argmax() + 1} of the contexts): weights would answer for those alone"
    )


def _why_not(recorded: Floats, differs: Bools, lacking: int) -> str:
    """Return why no imported session can be weighed."""
    if lacking:
        return f"{lacking} imported displays after the first have no propensity: weights need it of every display"
    other = f"the target shows other ads in {differs.mean():.1%} of the imported sessions"
    if np.isnan(recorded[:, 0]).all():
        return f"{other}, and how likely theirs were is not known (import with --propensity-column)"
    return f"{other}, and nothing was left to chance there: no propensity is below 1"
