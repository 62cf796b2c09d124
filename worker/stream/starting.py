"""Version 0 from a history: what another version has learned, as a power prior.

Rules that hold in this file:

- The information of the history counts by its trust W: A ← Λ + W(A − Λ), Aθ̂ ← W·Aθ̂ (`ClickModel.forget`). Counts of
  answers fade alike.
- The model, the features and the scale of contexts are those of the history; every other setting is the command's.
- Ads are matched by id. What is known of ads that the catalogue lacks is integrated out; ads that the history lacks
  start at the prior, as ads do that join later.
- The history stands for the warm-up if it has displayed at least half of the active ads, `LEAST_DISPLAYS` times each.
  Without counts of answers, an ad of the history counts as displayed.
- No threshold is known before there are sessions: under version 0 all explore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from worker.bandit.bonuses import joined
from worker.errors import InputError
from worker.kernels import fingerprint
from worker.stream.ad_features import check_ads
from worker.stream.catalogue import align, align_answers
from worker.stream.contexts import LEAST_SESSIONS
from worker.stream.feature_changes import differing
from worker.stream.folding import one_thread
from worker.stream.packing import rounded
from worker.stream.parameters import Parameters
from worker.stream.settings import Arm, LearningSettings, check_columns
from worker.stream.version_records import StartRecord
from worker.stream.version_sizes import check_size

#: Displays of an ad from which on the history knows it.
LEAST_DISPLAYS: Final = 20
#: Trust in sessions of another policy, and in those of adcascade.
TRUST_IMPORTED: Final = 0.3
TRUST_OWN: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The history that `--start-from` names; `read` returns its newest version, `digest` the SHA-256 of its bytes."""

    path: str
    trust: float | None
    read: Callable[[], Parameters]
    digest: Callable[[], str]

    def first(self, settings: LearningSettings, dim: int | None, arms: Sequence[Arm]) -> Parameters:
        """Return version 0; raise `InputError` if the history does not fit. `dim` is None if it is not given."""
        try:
            history = self.read()
            first = started(history, settings, arms, trust=self.trust, sha256=self.digest())
            if dim is not None and dim != first.settings.dim:
                raise InputError(f"a history of other features: its contexts have {first.settings.dim}, not {dim}")
        except InputError as error:
            raise InputError(f"--start-from {self.path}: {str(error).removeprefix(f'{self.path}: ')}") from None
        check_columns(first.settings, len(first.arms))
        check_size(first)
        return first

    def line(self, first: Parameters) -> str:
        """Return what version 0 starts from, for people."""
        warmup = "a warm-up, as few of the ads are known" if first.is_warming_up else "no warm-up"
        return f"version 0 starts from {self.path}: {first.observations:,} displays; {warmup}"

    def ignored(self, newest: Parameters) -> str | None:
        """Return a line for people unless the versions that are there started from this history, with this trust."""
        known = newest.started_from
        with suppress(InputError):  # the file may be gone: it is not needed any more
            if known is not None and known.sha256 == self.digest() and self.trust in (None, known.trust):
                return None
        how = "without a history" if known is None else f"from another one, or with another trust, {known.trust:g}"
        return f"--start-from {self.path} is ignored: the versions that are there started {how}"


def started(
    history: Parameters, settings: LearningSettings, arms: Sequence[Arm], *, trust: float | None, sha256: str
) -> Parameters:
    """Return version 0 for these arms, those of the history if there are none, under these settings.

    Raise `InputError` if the history is of another model or of other features, or has learned nothing.
    """
    if not history.folds and history.started_from is None:
        raise InputError(
            f"version {history.version} has learned nothing yet: the first fold needs {LEAST_SESSIONS} sessions; give "
            "a longer history, or start without one"
        )
    settings = _continued(settings, history.settings)
    arms = tuple(arms) or history.arms
    check_ads(() if settings.features is None else settings.features.ads, arms)
    if trust is None:
        trust = TRUST_IMPORTED if history.imported else TRUST_OWN
    with one_thread():
        faded = history.model if trust == 1 else history.model.forget(trust)
        model = align(faded, history.arms, arms, settings=settings)
    answers = align_answers(history, arms, settings)
    fresh = _unknown_share(history, arms)
    return Parameters(
        version=0,
        settings=settings,
        arms=arms,
        model=rounded(model.with_horizon(settings.horizon), intercept=settings.intercept),
        folds=max(settings.warmup, 1) if fresh <= 0.5 else 0,
        clock=joined(history.clock, fresh, settings.horizon_episodes),
        observations=history.observations,
        thresholds=(0.0,) * settings.horizon,
        answers=None if answers is None else answers.faded(trust),
        standardisation=history.standardisation,
        kernels=fingerprint(),
        started_from=StartRecord(sha256=sha256, trust=trust),
    )


def _unknown_share(history: Parameters, arms: Sequence[Arm]) -> float:
    """Return the share of the active arms that the history has not displayed often enough."""
    counts = history.answers
    displays = None if counts is None else counts.displayed.sum(axis=0)
    known = {arm.arm for k, arm in enumerate(history.arms) if displays is None or displays[k] >= LEAST_DISPLAYS}
    active = [arm.arm for arm in arms if arm.active]
    return sum(arm not in known for arm in active) / max(1, len(active))


def _continued(settings: LearningSettings, history: LearningSettings) -> LearningSettings:
    """Return the settings with what contexts and ads mean in the history; raise `InputError` if they declare others."""
    for name in ("model", "intercept"):
        mine, theirs = getattr(settings, name), getattr(history, name)
        if mine != theirs:
            raise InputError(f"a history of another model: its {name} is {theirs}, not {mine}")
    if found := differing(settings.features, history.features):
        later = "declare those of the history; `adcascade features apply` changes them later"
        raise InputError(f"a history of other features than the declared ones: {found}; {later}")
    return replace(settings, dim=history.dim, features=history.features, standardise=history.standardise)
