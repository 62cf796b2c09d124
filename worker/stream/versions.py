"""The versions known to a worker, and the one that serves an arrival.

Rules that hold in this file:

- An arrival is served by the newest known version that was in force when it occurred (`effective_at ≤ occurred_at`).
  So planning again after a crash gives the same slate.
- The last 8 versions are kept, as in the compacted topic (key = version mod 8), so that old and new workers answer
  alike. Version 0, the prior over the configured arms, is known and in force from the beginning until a version ≥ 8 is
  seen. After that the oldest known version serves earlier arrivals.
- The same version with another hash is refused: two learners disagree. If only the last digits of its numbers differ,
  by `ROUNDING` at most, it is the same version made with other kernels (`worker.kernels`), and the content that came
  first holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Final

import numpy as np

from worker.errors import FailedError
from worker.stream.decoding import EncoderAt
from worker.stream.feature_changes import encoder_of
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner
from worker.stream.version_records import arrays_of

KEPT = 8
#: The largest relative difference between numbers of the same version on different kinds of machine.
ROUNDING: Final = 1e-9


class RoundedError(FailedError):
    """A version is published already, with numbers that differ by rounding: the published one holds."""


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


def check_same(came: Parameters, known: Parameters) -> None:
    """Raise `FailedError` if a version has another content than the known one, `RoundedError` if only by rounding."""
    if came.sha256 != known.sha256:
        name, by = difference(came, known)
        kind, cause = (
            (RoundedError, f"only by rounding ({by:.1e}){other_kernels(came.kernels, known.kernels)}")
            if by <= ROUNDING
            else (FailedError, f"in {name}: two learners disagree, check their settings")
        )
        raise kind(
            f"parameters version {came.version} with sha256 {came.sha256[:12]}… differs from the published one with "
            f"{known.sha256[:12]}… {cause}"
        )


def other_kernels(here: str, there: str) -> str:
    """Return why the last bits of two versions may differ, as the end of a sentence; empty if it is not known.

    >>> other_kernels("numpy 2.4.6", "numpy 2.3.0")
    '; made with numpy 2.4.6, the other with numpy 2.3.0'
    """
    return f"; made with {here}, the other with {there}" if here and there and here != there else ""


def difference(one: Parameters, other: Parameters) -> tuple[str, float]:
    """Return the field in which two versions differ most, and the relative difference; inf if it is not numeric."""
    for name in ("settings", "arms", "frozen", "folds", "observations", "expected_sessions", "explore_budget"):
        if getattr(one, name) != getattr(other, name):
            return name, inf
    worst = ("parent_sha256", 0.0)
    ours, packed = arrays_of(one), arrays_of(other)
    pairs: list[tuple[str, Any, Any]] = [
        ("thresholds", one.thresholds, other.thresholds),
        ("ties", one.ties, other.ties),
        *((name.split(".")[0], ours.get(name), packed.get(name)) for name in {**ours, **packed}),
    ]
    for name, mine, theirs in pairs:
        if mine is None or theirs is None or np.shape(mine) != np.shape(theirs):
            return name, inf
        a, b = (np.nan_to_num(np.asarray(numbers, dtype=np.float64), nan=0.0) for numbers in (mine, theirs))
        by = float((np.abs(a - b) / np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))).max(initial=0.0))
        if by > worst[1]:
            worst = (name, by)
    return worst


def should_publish(candidate: Parameters, newest: Parameters | None) -> bool:
    """Return whether to write a version, given the newest one of the topic, which was just read to its end.

    The newest version is written again only from a newer position. Raise as `check_same` if its content differs.
    """
    if newest is None or candidate.version > newest.version:
        return True
    if candidate.version < newest.version:
        return False
    check_same(candidate, newest)
    return candidate.journal_offset > newest.journal_offset


def by_version(history: Iterable[Parameters]) -> dict[int, Parameters]:
    """Return the last KEPT versions by number; raise `FailedError` if one has two contents."""
    known: dict[int, Parameters] = {}
    for parameters in history:
        with suppress(RoundedError):
            check_same(parameters, known.get(parameters.version, parameters))
        known = keep(known, parameters)
    return known


def base_version(known: Mapping[int, Parameters]) -> int:
    """Return the version to start from: the newest, or the one before the first gap among those kept.

    A learner that was paused between looking at the topic and writing to it can put an old version over one of the last
    eight (their keys are the same). That one is then made again, because a rollback may ask for it.
    """
    newest = max(known)
    for number in range(max(1, newest - KEPT + 1), newest):
        if number not in known and number - 1 in known:
            return number - 1
    return newest


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
        self._published_at: dict[int, int] = {}
        self._set_known([SlatePlanner(first)])

    def _set_known(self, known: list[SlatePlanner]) -> None:
        self._known = known
        #: The most bytes that a slate of any known version adds to a record.
        self.slate_bytes = max(planner.slate_bytes for planner in known)
        #: The longest slate of any known version: feedback is about slates that were planned before the newest one.
        self.horizon = max(planner.parameters.settings.horizon for planner in known)
        #: The longest context of any known version.
        self.dim = max(planner.parameters.settings.dim for planner in known)
        #: How contexts are encoded at a time; None if they are plain.
        self.encoders = self._find_encoders()

    def _find_encoders(self) -> EncoderAt | None:
        found = {planner: encoder_of(planner.parameters, self.history) for planner in self._known}
        encoders = {planner: encoder for planner, encoder in found.items() if encoder is not None}
        first = encoders.get(self._known[0])
        is_one = all(encoder is first for encoder in encoders.values())
        return first if is_one else lambda time: encoders[self.at(time)]

    def replace_first(self, parameters: Parameters) -> None:
        """Replace the first version, while it is the only one."""
        self._set_known([SlatePlanner(parameters)])

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

    def learn(self, parameters: Parameters, planner: SlatePlanner | None = None, *, published_at: int = 0) -> bool:
        """Add a version, with its planner if that is made; return whether it is new.

        `published_at` is the timestamp of its record. Raise as `check_same` if it is known with another content.
        """
        for known in self._known:
            if known.parameters.version == parameters.version:
                check_same(parameters, known.parameters)
                known.parameters = parameters  # perhaps from a newer position
                self._note(parameters.version, published_at)
                return False
        kept = [*self._known, planner or SlatePlanner(parameters)]
        kept.sort(key=lambda one: one.parameters.version)
        newest = kept[-1].parameters.version
        # Version 0 is dropped when the topic would have compacted it away.
        self._set_known([one for one in kept if one.parameters.version > newest - KEPT])
        self._note(parameters.version, published_at)
        return parameters.version > newest - KEPT

    def _note(self, version: int, published_at: int) -> None:
        """Keep the time of the first publication; 0 where it is not known."""
        times = {**self._published_at, version: self._published_at.get(version) or published_at}
        oldest = self._known[0].parameters.version
        self._published_at = {version: time for version, time in times.items() if version >= oldest}

    def at(self, time: int) -> SlatePlanner:
        """Return the planner of the version that serves an arrival of this time."""
        for planner in reversed(self._known):
            if planner.parameters.effective_at <= time:
                return planner
        return self._known[0]

    def has_same_columns(self, version: int, time: int) -> bool:
        """Whether the contexts of a version's sessions have the columns of the version that serves this time."""
        former, at = self.newest.former, self.at(time).parameters.version
        return former is None or (version < former.since) == (at < former.since)

    def is_certain(self, time: int, sent_at: int) -> bool:
        """Whether no worker can have served an arrival by another version than `at` returns.

        Every worker has read a version half of the lateness after it was published. In this time, some worker may have
        served by an older one.

        >>> from dataclasses import replace
        >>> from worker.stream.settings import Arm, LearningSettings
        >>> zero = Parameters.first(LearningSettings(dim=1, lateness=5_000), (Arm(arm="a", reward=1.0),))
        >>> known = Versions(zero)
        >>> known.learn(replace(zero, version=1, effective_at=1_000), published_at=4_000)
        True
        >>> [known.is_certain(time, time) for time in (500, 6_000, 7_000)]
        [True, False, True]
        """
        parameters = self.at(time).parameters
        known_from = self._published_at.get(parameters.version, 0) + parameters.settings.lateness // 2
        return parameters.version == 0 or (parameters.effective_at <= time and known_from <= sent_at)
