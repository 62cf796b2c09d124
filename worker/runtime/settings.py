"""What `worker` and `serve` have in common of their settings, and how they begin: with which versions and warnings."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Self

from worker.errors import InputError
from worker.runtime.clock import Clock, wall_clock
from worker.secret import Secret
from worker.stream.catalogue import catalogue_difference, describe_changes, under
from worker.stream.decoding import Limits
from worker.stream.feature_changes import differing
from worker.stream.features import listed
from worker.stream.history import KeptVersion, no_tag, tag_slot
from worker.stream.parameters import Parameters
from worker.stream.serving import Serving
from worker.stream.settings import (
    KEPT_BY_MODEL,
    NO_CONTEXT,
    Arm,
    LearningSettings,
    check_columns,
    continued,
    ignored_scale,
    other_kind,
)
from worker.stream.starting import Start
from worker.stream.table import SessionRoom
from worker.stream.tagged import TaggedVersion
from worker.stream.topology import Topics
from worker.stream.version_sizes import check_size, too_large
from worker.stream.versions import Versions

log = logging.getLogger(__name__)

#: Changes of a catalogue that a line lists.
LISTED: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """The settings of a process that answers arrivals, and of its learner process; times are in seconds.

    `learning` has everything but the dimension: that is `dim`, or that of the versions that are there. `learner` is the
    command line of the learner process. `unfit` says why the catalogue file cannot be that of version 0.
    """

    learner: tuple[str, ...]
    learning: LearningSettings
    dim: int | None = None
    arms: tuple[Arm, ...] = ()
    unfit: InputError | None = None
    start: Start | None = None
    limits: Limits = Limits()  # noqa: RUF009 — it is frozen
    secret: Secret | None = None
    max_open_sessions: int = 50_000  # fit into 512 MB with the learner, with contexts of up to 128 numbers
    progress_interval: float = 1.0
    clock: Clock = wall_clock

    def serving(self, versions: Versions, topics: Topics) -> Callable[[int], Serving]:
        """Return what makes the sessions of a partition, none so far; all partitions share the bound of sessions."""
        room = SessionRoom(self.max_open_sessions)
        return lambda partition: Serving(
            versions, topics=topics, limits=self.limits, secret=self.secret, room=room, partition=partition
        )

    def with_tagged(
        self,
        published: Sequence[Parameters],
        slots: Callable[[], Mapping[str, KeptVersion]],
        load: Callable[[str], Parameters | None],
    ) -> Self:
        """Return the settings with the version that `--control tag:NAME` names; slots and versions are of the history.

        While the newest version goes on with this tag, so does the control group, also if the tag was moved: else a
        restart could change what is compared. Raise `InputError` if there is no such tag, or its version does not fit.
        """
        learning, newest = self.learning, published[-1] if published else None
        if not learning.tag or (newest is not None and newest.settings.tag == learning.tag):
            return self
        slot, option = tag_slot(learning.tag), f"--control {learning.control}"
        held = {} if newest is None else slots()
        found = load(slot) if slot in held else None
        if found is None or newest is None:
            how = f"`adcascade parameters tag {learning.tag}` gives it to a version"
            raise InputError(f"{option}: {no_tag(learning.tag, held)}; {how}")
        if name := other_kind(found.settings, newest.settings):
            theirs, ours = (getattr(one.settings, name) for one in (found, newest))
            raise InputError(
                f"{option}: version {found.version} is of another model, with {name} {theirs} where the newest version "
                f"has {ours}: give a tag of this model, or another control"
            )
        learning = replace(learning, tagged=TaggedVersion.of(learning.tag, found))
        if reason := too_large(under(learning, newest)):
            raise InputError(f"{option}: every version would carry it, and {reason}; give another control")
        return replace(self, learning=learning)

    def configured(self, history: Sequence[Parameters]) -> tuple[LearningSettings, Parameters]:
        """Return the settings of learning, and the first version: of the history, else version 0 by these settings.

        Raises `InputError` if there is no dimension, or if the settings are for another model than that of the history.
        """
        if history:
            # A version 0 by these settings may not be possible: the features of ads may have changed since.
            published = history[-1].settings
            return continued(replace(self.learning, dim=self.dim or published.dim), published), history[0]
        if self.unfit is not None:
            raise self.unfit
        if self.start is not None:
            first = self.start.first(self.learning, self.dim, self.arms)
            return first.settings, first
        if self.dim is None:
            raise InputError(f"there are no parameters yet, and {NO_CONTEXT}")
        learning = replace(self.learning, dim=self.dim)
        check_columns(learning, len(self.arms))
        return learning, Parameters.first(learning, self.arms)

    def first_version(self, history: Sequence[Parameters]) -> Parameters:
        """Return the first version as `configured` does, and log what may surprise."""
        _, first = self.configured(history)
        if not history:
            check_size(first)
            if self.start is not None:
                log.info(self.start.line(first))
        for line in self.surprises(history[-1] if history else first):
            log.warning(line)
        return first

    def surprises(self, newest: Parameters) -> list[str]:
        """Return a line for everything that may surprise now that this version is the newest."""
        learning, _ = self.configured([newest])
        lines = [
            ignored_scale(self.learning, newest.settings),
            ignored_features(self.learning, newest),
            ignored_arms(self.arms, newest),
            None if self.unfit is None else f"the ads are those of version {newest.version}: {self.unfit}",
            None if self.start is None else self.start.ignored(newest),
        ]
        if changed := different(learning, newest.settings):
            lines.append(
                f"settings differ from those of version {newest.version}; where this process learns, they hold from "
                f"the next version on: {', '.join(changed)}"
            )
        if not newest.arms:
            lines.append(
                "there are no arms: every decision will be empty until `adcascade arms add` (or give --catalog FILE)"
            )
        return [line for line in lines if line is not None]


def different(one: LearningSettings, other: LearningSettings) -> list[str]:
    """Return the names of the settings that differ, without those that a model keeps for life.

    >>> different(LearningSettings(dim=2, beta=1.0), LearningSettings(dim=2, beta=2.0))
    ['beta']
    """
    names = [f.name for f in fields(one) if f.name not in (*KEPT_BY_MODEL, "tagged")]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def ignored_features(settings: LearningSettings, newest: Parameters) -> str | None:
    """Return a line for people if features are declared otherwise than a version has them, which holds; else None."""
    found = differing(settings.features, newest.settings.features)
    if not found:
        return None
    return (
        f"the declared features differ from those of version {newest.version}, which hold: {found} "
        "(`adcascade features apply` changes them)"
    )


def ignored_arms(wanted: Sequence[Arm], newest: Parameters) -> str | None:
    """Return a line for people if a catalogue file differs from the arms of a version, which hold; else None."""
    changes = catalogue_difference(newest.arms, wanted) if wanted else ()
    if not changes:
        return None
    rows = describe_changes(newest.arms, changes)
    counted = Counter(sign for sign, _, _ in rows)
    named = listed((f"{sign} {arm} {reward}" for sign, arm, reward in rows), LISTED)
    return (
        f"the catalogue file differs from the arms of version {newest.version}, which hold: {counted['+']} added, "
        f"{counted['−']} retired and {counted['~']} changed: {named} (`adcascade arms sync FILE` changes them)"
    )
