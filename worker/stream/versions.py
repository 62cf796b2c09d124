"""The versions known to a worker, and the one that serves an arrival.

Rules that hold in this file:

- An arrival is served by the newest known version that was in force when it occurred (`effective_at ≤ occurred_at`).
  So planning again after a crash gives the same slate.
- The last 8 versions are kept, as in the compacted topic (key = version mod 8), so that old and new workers answer
  alike. Version 0, the prior over the configured arms, is known and in force from the beginning until a version ≥ 8 is
  seen. After that the oldest known version serves earlier arrivals.
- The same version with another hash is refused: two learners disagree.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.errors import FailedError
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner

KEPT = 8


def version_key(version: int) -> bytes:
    """Return the key of a version's record: KEPT keys, so that the compacted topic keeps the last KEPT versions."""
    return b"%d" % (version % KEPT)


def keep(kept: Mapping[int, Parameters], parameters: Parameters) -> dict[int, Parameters]:
    """Add a version to the last KEPT: each with its first content, from the newest position it was published with."""
    known = kept.get(parameters.version)
    if known is None or (known.sha256 == parameters.sha256 and known.journal_offset < parameters.journal_offset):
        kept = {**kept, parameters.version: parameters}
    newest = max(kept)
    return {version: one for version, one in kept.items() if version > newest - KEPT}


class Versions:
    """Known versions, the newest last.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from worker.stream.settings import Arm, LearningSettings
    >>> zero = Parameters.first(LearningSettings(dim=1), (Arm(arm="a", reward=1.0),))
    >>> known = Versions(zero)
    >>> known.learn(replace(zero, version=1, effective_at=1000))
    True
    >>> known.at(999).parameters.version, known.at(1000).parameters.version
    (0, 1)
    """

    def __init__(self, first: Parameters) -> None:
        self._known = [SlatePlanner(first)]

    @property
    def newest(self) -> Parameters:
        """The highest version seen."""
        return self._known[-1].parameters

    @property
    def newest_arms(self) -> Mapping[str, int]:
        """The arms of the newest version with their indices; arms are never removed, so these are all."""
        return self._known[-1].index

    def reward_of(self, arm: str) -> float:
        """Return the revenue of a click on the arm by the newest version; 0 if it is unknown."""
        newest = self._known[-1]
        index = newest.index.get(arm)
        return 0.0 if index is None else newest.parameters.arms[index].reward

    @property
    def history(self) -> tuple[Parameters, ...]:
        """All versions kept, oldest first."""
        return tuple(planner.parameters for planner in self._known)

    def learn(self, parameters: Parameters) -> bool:
        """Add a version; return whether it is new. Raise `FailedError` if it is known with another content."""
        for planner in self._known:
            if planner.parameters.version == parameters.version:
                known, came = planner.parameters.sha256, parameters.sha256
                if known != came:
                    raise FailedError(
                        f"parameters version {parameters.version} came with sha256 {came[:12]}…, but is known with "
                        f"{known[:12]}…: two learners disagree, check their settings"
                    )
                planner.parameters = parameters  # perhaps from a newer position
                return False
        kept = [*self._known, SlatePlanner(parameters)]
        kept.sort(key=lambda planner: planner.parameters.version)
        newest = kept[-1].parameters.version
        # Version 0 is dropped when the topic would have compacted it away.
        self._known = [planner for planner in kept if planner.parameters.version > newest - KEPT]
        return parameters.version > newest - KEPT

    def at(self, time: int) -> SlatePlanner:
        """Return the planner of the version that serves an arrival of this time."""
        for planner in reversed(self._known):
            if planner.parameters.effective_at <= time:
                return planner
        return self._known[0]
