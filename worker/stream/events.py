"""Every event of every topic, as an immutable value.

The events are `msgspec.Struct` rather than dataclasses. They decode straight from JSON in 0.7 µs instead of 1.1 µs (an
arrival with 16 numbers), are constructed in 0.2 µs instead of 1.1 µs, are smaller, and are invisible to the garbage
collector (``gc=False``: they hold no cycles). `msgspec.structs.replace` makes a changed copy.

The bounds and choices of the fields are enforced by the decoder and stated in the JSON Schemas in `schemas/`; a test
keeps the two the same. Limits that are settings (length of ids, dimension, norm, horizon) are in
`worker.stream.decoding.Limits`. Times are integer milliseconds since the epoch, arms are ids (strings).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from msgspec import Meta, Struct

#: Largest whole number that every JSON decoder reads exactly.
MOST: Final = 2**53

#: Most partitions that arrivals and clicks may have. A learner keeps a time for each, and every version carries them.
MOST_PARTITIONS: Final = 10_000

#: Names of the topics, without the prefix.
TOPICS: Final = (
    "arrivals",
    "clicks",
    "decisions",
    "journal",
    "parameters",
    "parameters-history",
    "episodes",
    "dead-letters",
)

Mode: TypeAlias = Literal["warmup", "random", "fallback", "explore", "exploit", "none"]

#: How an arm was chosen. The first three hold for a whole session, `explore` and `exploit` per position; `none` means
#: that no arm was eligible.
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

Reason: TypeAlias = Literal[
    "undecodable",
    "invalid",
    "too-large",
    "dimension",
    "norm",
    "future",
    "past",
    "position",
    "unknown-arm",
    "arm-mismatch",
    "token",
    "session-reused",
    "parked-overflow",
]

#: Reasons of dead letters.
DEAD_LETTER_REASONS: Final[tuple[Reason, ...]] = get_args(Reason)

Action: TypeAlias = Literal["freeze", "unfreeze", "rollback"]

#: Actions of commands to the learner.
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)

Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]
Position: TypeAlias = Annotated[int, Meta(ge=1, le=MOST)]
Partitions: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_PARTITIONS)]
Identifier: TypeAlias = Annotated[str, Meta(min_length=1)]
Probability: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Amount: TypeAlias = Annotated[float, Meta(ge=0)]
#: A tag begins with a letter, so that it is never taken for a version.
TAG_PATTERN: Final = "^[A-Za-z][A-Za-z0-9._-]{0,63}$"
TagName: TypeAlias = Annotated[str, Meta(pattern=TAG_PATTERN)]


class Arrival(Struct, frozen=True, kw_only=True, gc=False):
    """The arrival of a user (topic `arrivals`).

    `context` is x, (d,); for an object it has the numbers that the declared features give. `exclude` names arms that
    must not be shown to this session.
    """

    session_id: str
    occurred_at: Milliseconds
    context: tuple[float, ...]
    exclude: tuple[str, ...] = ()


class Feedback(Struct, frozen=True, kw_only=True, gc=False):
    """The reaction to the arm at a position (topic `clicks`); not clicked means seen and passed over."""

    session_id: str
    occurred_at: Milliseconds
    # Bounded by the horizon, which is a setting: outside of it the record has a reason of its own.
    position: int
    arm: str
    clicked: bool
    token: str | None = None


class Decision(Struct, frozen=True, kw_only=True, gc=False):
    """The arm to show now, and those to show next if it is passed over (topic `decisions`).

    `slate` holds the arms of this and every later position, so `arm` is its first; both are empty in mode `none`.
    `propensity` is the probability of the choice given the earlier positions, `value` the expected revenue from here
    on. `tokens` (if a secret is configured) holds one per arm of the slate, to be sent back with the feedback.
    """

    session_id: Identifier
    arrived_at: Milliseconds
    position: Position
    arm: Identifier | None
    slate: tuple[Identifier, ...]
    mode: Mode
    propensity: Probability
    parameters_version: Count
    value: float
    tokens: tuple[str, ...] | None = None


class Opened(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="opened"):
    """A session was opened with this slate (journal); `modes` has one entry per position of the slate.

    `context` has the numbers of the arrival before they are standardised; one that is missing is NaN, and null in JSON.
    `share` is the share of such sessions that is journaled, if not all are. `uncertain` means that the user may have
    seen another slate.
    """

    session_id: Identifier
    arrived_at: Milliseconds
    context: tuple[float, ...]
    slate: tuple[Identifier, ...]
    modes: tuple[Mode, ...]
    exclude: tuple[Identifier, ...]
    parameters_version: Count
    share: Probability | None = None
    uncertain: bool = False


class FeedbackFact(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="feedback"):
    """A valid feedback record (journal)."""

    session_id: Identifier
    occurred_at: Milliseconds
    position: Position
    arm: Identifier
    clicked: bool


class Progress(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="progress"):
    """All facts of this partition up to `time` are in the journal before this record (journal).

    `opened` has starts of windows, each with the number of sessions of this partition, where not all are journaled.
    """

    partition: Count
    partitions: Partitions
    time: Milliseconds
    opened: tuple[tuple[Milliseconds, Count], ...] | None = None


class ArmChange(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="arm"):
    """An arm is added, priced, retired or reactivated (journal); `reward` is the revenue of a click.

    Without `features`, a known arm keeps its own.
    """

    arm: Identifier
    reward: Annotated[float, Meta(gt=0)]
    active: bool
    features: dict[str, float | str] | None = None


class ArmEntry(Struct, frozen=True, kw_only=True, gc=False):
    """The wanted state of an arm, as an entry of `CatalogueChange`."""

    arm: Identifier
    reward: Annotated[float, Meta(gt=0)]
    active: bool
    features: dict[str, float | str] | None = None


class CatalogueChange(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="arms"):
    """Several arms are added, priced, retired or reactivated in one version (journal)."""

    changes: tuple[ArmEntry, ...]


class Command(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="command"):
    """A command to the learner (journal); only a rollback has a `version`, its target.

    >>> Command(action="rollback", version=7).version
    7
    >>> Command(action="rollback")
    Traceback (most recent call last):
        ...
    ValueError: rollback needs a version
    """

    action: Action
    version: Count | None = None

    def __post_init__(self) -> None:
        if self.action == "rollback" and self.version is None:
            raise ValueError("rollback needs a version")
        if self.action != "rollback" and self.version is not None:
            raise ValueError(f"{self.action} takes no version")


class Import(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="import"):
    """The estimate of a given version becomes the current one (journal).

    `parameters` is the record of that version, so that the journal alone determines the result. With `arms`, its arms
    that the catalogue lacks are added; otherwise they are left out.
    """

    parameters: dict[str, Any]
    arms: bool


class Tag(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="tag"):
    """A version gets a name, under which the history keeps it (journal); without a version, the name is removed."""

    name: TagName
    version: Count | None


class Episode(Struct, frozen=True, kw_only=True, gc=False):
    """A closed window (topic `episodes`): its sessions, its revenue, and the state of the estimate after it.

    `version` is the version in force after the window: the one it made, or the one before if it made none (`frozen`, or
    `rejected` with the reason). `reward` is the revenue, `expected_reward` the revenue expected by the versions that
    served. `explored` is the number of sessions that explored, as a mean over the positions, to be compared with
    `explore_budget`. `late` counts records for windows already closed. `regret_bound` and `regret_posterior` are per
    session, null where they could not be computed. `folds` and what
    follows are the state of the estimate, if there is one. `unanswered_arms` names the first ten active arms whose
    displays are hardly ever answered, `lowest_answer_rate` is the lowest rate of an active arm. `learned` is the number
    of sessions that were learned from, if not all were; displays, clicks, rewards and `explored` are extrapolated to
    those that were not journaled, and leave out those that are uncertain.
    """

    version: Count
    window_start: Milliseconds
    window_end: Milliseconds
    sessions: Count
    displays: Count
    clicks: Count
    reward: Amount
    expected_reward: float
    explored: Amount
    late: Count
    beta: Amount
    explore_budget: Count
    thresholds: tuple[float, ...]
    regret_bound: float | None
    regret_posterior: float | None
    frozen: bool
    rejected: str | None = None
    folds: Count | None = None
    observations: Count | None = None
    newton_steps: Count | None = None
    parameter_norm: Amount | None = None
    smallest_eigenvalue: float | None = None
    lowest_answer_rate: Rate | None = None
    unanswered_arms: tuple[Identifier, ...] | None = None
    learned: Count | None = None


#: Orders to the learner; each takes effect at its position in the journal.
Order: TypeAlias = ArmChange | CatalogueChange | Command | Import | Tag

JournalEvent: TypeAlias = Opened | FeedbackFact | Progress | Order
