"""The state of one session, and the one rule by which feedback changes it.

Rules that hold in this file (docs/design.md §3); serving, the learner, replay and evaluation all use the same join.

- The state is a join of the arrival and the feedback: the arrival part is set once; of the feedback, the lowest clicked
  and the highest passed position count. The join is commutative, associative and idempotent, so a record may arrive
  twice, late or out of order.
- Feedback counts iff arrived_at ≤ occurred_at ≤ deadline, whenever it is delivered, and iff the slate has its arm at
  that position. A click at h implies that everything before h was passed over.
- Feedback that arrives before its arrival is parked unchanged, and joined when the arrival is processed.
- A session is open until it is clicked or its slate is exhausted. Its value stays in the table until no further record
  can concern it.
- Excluded arms are kept in little memory, whatever the ids: a list of 256 ids of 128 characters takes 50 KB as strings.
  A session in the table needs only to recognise its arrival: a digest of the list. The learner needs to find the arms
  of the catalogue that are excluded: 8 bytes per id. Both are stable hashes, so all workers and learners agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from math import isfinite
from typing import Final, Literal, TypeAlias

import msgspec

from worker.stream.events import MOST, Decision, Feedback, FeedbackFact, Mode

#: How a session ended, counted when its value is deleted.
ENDINGS = ("clicked", "exhausted", "expired", "empty")
Ending: TypeAlias = Literal["clicked", "exhausted", "expired", "empty"]

Objection: TypeAlias = Literal["outside", "arm-mismatch", "position"]
Verdict: TypeAlias = Literal["applied", "redundant"] | Objection


# ── the join ─────────────────────────────────────────────────────────────────────────────────────────────────────────

#: A click or a pass: a feedback record, or its fact in the journal.
Reaction: TypeAlias = Feedback | FeedbackFact


def objection(slate: tuple[str, ...], first: int, last: int, reaction: Reaction) -> Objection | None:
    """Return why a reaction does not count for a slate shown from `first` to `last`; None if it does."""
    position = reaction.position
    if not 0 < position <= len(slate):
        return "position"
    if slate[position - 1] != reaction.arm:
        return "arm-mismatch"
    return None if first <= reaction.occurred_at <= last else "outside"


def joined(clicked: int, passed: int, reaction: Reaction) -> tuple[int, int]:
    """Join a reaction that counts to (lowest clicked, highest passed); 0 means none."""
    position = reaction.position
    if not reaction.clicked:
        return clicked, max(passed, position)
    return min(clicked or position, position), max(passed, position - 1)


def answered(
    slate: tuple[str, ...], reactions: Iterable[Reaction], *, whole_slate: bool, first: int = 0, last: int = MOST
) -> tuple[int, bool]:
    """Return how many displays of a slate count, from the first on, and whether the last of them was clicked.

    Nothing after a click counts. With `whole_slate`, a session without a click has passed over its whole slate.

    >>> passed, clicked = (FeedbackFact(session_id="s", occurred_at=9, position=h, arm=arm, clicked=h == 2)
    ...                    for h, arm in ((3, "c"), (2, "b")))
    >>> answered(("a", "b", "c"), [passed], whole_slate=False)
    (3, False)
    >>> answered(("a", "b", "c"), [passed, clicked], whole_slate=False)
    (2, True)
    """
    lowest_clicked = highest_passed = 0
    for reaction in reactions:
        if objection(slate, first, last, reaction) is None:
            lowest_clicked, highest_passed = joined(lowest_clicked, highest_passed, reaction)
    if lowest_clicked:
        return lowest_clicked, True
    return (len(slate) if whole_slate else highest_passed), False


# ── the state ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Session(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A session whose arrival is known.

    `deadline` is the last time of feedback that counts; `context` is packed, `exclude` is in brief; `clicked` 0 means
    no click.
    """

    arrived_at: int
    deadline: int
    context: bytes
    exclude: tuple[str, ...]
    version: int
    slate: tuple[str, ...]
    modes: tuple[Mode, ...]
    propensities: tuple[float, ...] | None
    values: tuple[float, ...]
    clicked: int = 0
    passed: int = 0

    @property
    def is_open(self) -> bool:
        """Whether there is an arm left to show."""
        return not self.clicked and self.passed < len(self.slate)

    @property
    def ending(self) -> Ending:
        """How the session ends if it ends now."""
        if self.clicked:
            return "clicked"
        if not self.slate:
            return "empty"
        return "exhausted" if self.passed >= len(self.slate) else "expired"

    def apply(self, feedback: Reaction) -> Verdict:
        """Join one feedback record; return what became of it."""
        wrong = objection(self.slate, self.arrived_at, self.deadline, feedback)
        if wrong is not None:
            return wrong
        before = self.clicked, self.passed
        self.clicked, self.passed = after = joined(*before, feedback)
        return "redundant" if after == before else "applied"

    def decision(self, session_id: str, tokens: tuple[str, ...] | None) -> Decision:
        """Return the current decision; `tokens` are those of the remaining positions."""
        at, slate = self.passed, self.slate
        return Decision(
            session_id=session_id,
            arrived_at=self.arrived_at,
            position=at + 1,
            arm=slate[at] if slate else None,
            slate=slate[at:],
            mode=self.modes[at] if slate else "none",
            propensity=1.0 if self.propensities is None or not slate else self.propensities[at],
            parameters_version=self.version,
            value=self.values[at] if slate else 0.0,
            tokens=tokens,
        )


class ParkedRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A feedback record as it arrived, with its offset and timestamp."""

    offset: int
    timestamp: int
    value: bytes


class Parked(msgspec.Struct, array_like=True, tag=2):
    """Feedback of a session whose arrival is still missing; `latest` is its latest occurred_at."""

    latest: int
    records: list[ParkedRecord]


State: TypeAlias = Session | Parked

_decoder = msgspec.msgpack.Decoder(Session | Parked)

#: Encode a table value.
encode_state: Final[Callable[[State], bytes]] = msgspec.msgpack.Encoder().encode


def decode_state(value: bytes) -> State:
    """Decode a table value; raise `ValueError` if it is not one."""
    try:
        state: State = _decoder.decode(value)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if isinstance(state, Session):
        _check(state)
    elif not 0 <= state.latest <= MOST:
        raise ValueError("the time is out of range")
    return state


def _check(session: Session) -> None:
    """Raise `ValueError` if a session does not hold together."""
    slate, shares = session.slate, session.propensities
    lengths = {len(slate), len(session.modes), len(session.values), len(slate if shares is None else shares)}
    if len(lengths) != 1:
        raise ValueError("slate, modes, propensities and values differ in length")
    if not isfinite(sum(session.values) + sum(shares or ())):
        raise ValueError("a value or a propensity is not finite")
    if not (0 <= session.clicked <= len(slate) and 0 <= session.passed <= len(slate)):
        raise ValueError("a position is beyond the slate")
    if not 0 <= session.arrived_at <= session.deadline <= 2 * MOST:
        raise ValueError("the times are out of range")
    if len(session.context) % 8 or session.version < 0:
        raise ValueError("the context or the version is out of range")


_ID_BYTES = 8
_LIST_BYTES = 16
_KEPT = 2  # ids: a list that is no longer is kept as it is


def brief_exclusions(exclude: tuple[str, ...]) -> tuple[str, ...]:
    """Return a short list that is equal for equal lists only: the list itself, or its digest as the only entry.

    >>> brief_exclusions(("a", "b"))
    ('a', 'b')
    >>> digest = brief_exclusions(("a", "b", "c"))
    >>> len(digest), brief_exclusions(digest) == digest
    (1, True)
    """
    if len(exclude) <= _KEPT:
        return exclude
    # Ids of arrivals have no control characters: the joined text belongs to one list, and a digest is no id.
    return ("\0" + blake2b("\0".join(exclude).encode(), digest_size=_LIST_BYTES).hexdigest(),)


def pack_exclusions(exclude: tuple[str, ...]) -> bytes:
    """Pack excluded arms, 8 bytes each, in their order."""
    return b"".join(map(_hashed, exclude)) if exclude else b""


def packed_indices(indices: Mapping[str, int]) -> dict[bytes, int]:
    """Return the indices of arms by their packed ids, for `excluded_indices`."""
    return {_hashed(arm): index for arm, index in indices.items()}


def excluded_indices(packed: bytes, indices: Mapping[bytes, int]) -> list[int]:
    """Return the indices of packed arms; arms that have none are left out.

    >>> excluded_indices(pack_exclusions(("b", "unknown")), packed_indices({"a": 0, "b": 1}))
    [1]
    """
    ids = (packed[start : start + _ID_BYTES] for start in range(0, len(packed), _ID_BYTES))
    return [indices[one] for one in ids if one in indices]


@lru_cache(maxsize=16_384)
def _hashed(arm: str) -> bytes:
    return blake2b(arm.encode(), digest_size=_ID_BYTES).digest()
