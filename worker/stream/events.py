"""Every event that goes over a topic, as an immutable value.

The events are `msgspec.Struct` rather than dataclasses: decoded straight from JSON they cost 0.7 µs instead of 1.1 µs
(an arrival with 16 numbers), constructed 0.2 µs instead of 1.1 µs, they are smaller, the garbage collector does not
look at them (``gc=False``: they hold no cycles), and only they can be told apart by `kind` in a single pass. They are
used as frozen, slotted, keyword-only dataclasses are; `msgspec.structs.replace` makes a changed copy.

What is written here about a field (bounds, choices) is what the decoder enforces and what the JSON Schemas in
`schemas/` say; a test keeps the two the same. Limits that are settings (length of ids, dimension, norm, horizon) are
`worker.stream.decoding.Limits`. Times are integer milliseconds since the epoch, arms are ids (strings).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, get_args

from msgspec import Meta, Struct

#: Largest whole number that every JSON reader understands exactly.
MOST: Final = 2**53

#: Names of the topics, without the prefix.
TOPICS: Final = ("arrivals", "clicks", "decisions", "journal", "parameters", "episodes", "dead-letters")

Mode: TypeAlias = Literal["warmup", "random", "fallback", "explore", "exploit", "none"]

#: How an arm was chosen: the first three hold for a whole session, `explore` and `exploit` per position, `none` says
#: that no arm was eligible.
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

Reason: TypeAlias = Literal[
    "undecodable",
    "invalid",
    "too-large",
    "dimension",
    "norm",
    "future",
    "position",
    "unknown-arm",
    "arm-mismatch",
    "token",
    "session-reused",
    "parked-overflow",
]

#: Why a record is a dead letter.
DEAD_LETTER_REASONS: Final[tuple[Reason, ...]] = get_args(Reason)

Action: TypeAlias = Literal["freeze", "unfreeze", "rollback"]

#: What a command can ask of the learner.
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)

Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]
Position: TypeAlias = Annotated[int, Meta(ge=1, le=MOST)]
Identifier: TypeAlias = Annotated[str, Meta(min_length=1)]
Probability: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Amount: TypeAlias = Annotated[float, Meta(ge=0)]


class Arrival(Struct, frozen=True, kw_only=True, gc=False):
    """A user has come (topic `arrivals`).

    `context` is x, (d,); `exclude` names arms that must not be shown to this session.
    """

    session_id: str
    occurred_at: Milliseconds
    context: tuple[float, ...]
    exclude: tuple[str, ...] = ()


class Feedback(Struct, frozen=True, kw_only=True, gc=False):
    """What a user did with the arm at a position (topic `clicks`); not clicked means seen and passed over."""

    session_id: str
    occurred_at: Milliseconds
    # Bounded by the horizon, which is a setting: outside of it the record has a reason of its own.
    position: int
    arm: str
    clicked: bool
    token: str | None = None


class Decision(Struct, frozen=True, kw_only=True, gc=False):
    """What to show now, and what to show after that if it is passed over (topic `decisions`).

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
    """A session was opened with this slate (journal); `modes` has one entry per position of the slate."""

    session_id: Identifier
    arrived_at: Milliseconds
    context: tuple[float, ...]
    slate: tuple[Identifier, ...]
    modes: tuple[Mode, ...]
    exclude: tuple[Identifier, ...]
    parameters_version: Count


class FeedbackFact(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="feedback"):
    """A valid feedback record, as it came (journal)."""

    session_id: Identifier
    occurred_at: Milliseconds
    position: Position
    arm: Identifier
    clicked: bool


class Progress(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="progress"):
    """Everything of this partition up to `time` is in the journal before this record (journal)."""

    partition: Count
    partitions: Position
    time: Milliseconds


class ArmChange(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="arm"):
    """An arm is added, priced, retired or brought back (journal); `reward` is what a click on it earns."""

    arm: Identifier
    reward: Annotated[float, Meta(gt=0)]
    active: bool


class Command(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="command"):
    """An order to the learner (journal); `version` is where a rollback goes, and there only.

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


class Episode(Struct, frozen=True, kw_only=True, gc=False):
    """A window was closed (topic `episodes`): what it held, what it earned, what was learned.

    `version` is the version in force after it: the one it made, or, if it made none (`frozen`, or `rejected` with the
    reason), the one before. `reward` was earned, `expected_reward` is what the serving versions expected of the same
    sessions; `explored` is how many sessions explored (the mean over the positions, so possibly not whole), to be
    compared with `explore_budget`; `late` counts records that came for windows already closed. `regret_bound` and
    `regret_posterior` are per session, null where they could not be computed. The last five tell the state of the
    estimate and are left out where there is none.
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


JournalEvent: TypeAlias = Opened | FeedbackFact | Progress | ArmChange | Command
