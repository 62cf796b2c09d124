"""Feedback, by partition: checked, journaled, and joined with its session or parked until the arrival comes.

Rules that hold in this file (docs/design.md §3):

- Feedback that is valid by itself is journaled, whether or not it changed anything or fits the slate in the table.
- Feedback without its arrival is parked as it came, at most `MOST_PARKED` records of a session, and only while there is
  room. It is in the journal then, and is not journaled again when it is joined.
- The arrival and the feedback of a session meet only if both producers place its key in the same partition. Feedback
  whose arrival is in another partition of this worker is reported as `split-sessions`. Where the partitioners differ,
  every worker with several partitions has such sessions.
- With a secret, feedback without the token of its display is a dead letter and nothing else.
- A token proves that feedback answers a real display. It is ``<arrived_at>.<signature>``. The signature is HMAC-SHA256,
  cut to 128 bits, in base64url without padding, over session, position, arm and arrival time. Each part is preceded by
  its length (or has a fixed width), so that no two displays share a message.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from struct import pack
from typing import Final

from worker.errors import InputError
from worker.secret import Secret
from worker.stream.events import MOST, Feedback, fact_of
from worker.stream.reading import ROOM, Batch, RecordReader
from worker.stream.session import Parked, ParkedRecord, Session, Verdict
from worker.stream.table import SessionTable
from worker.stream.topology import Emits, Record, Topics

#: Shortest secret that is accepted, in bytes.
LEAST: Final = 16

# Keeps these signatures apart from any other use of the same secret.
_PURPOSE: Final = b"adcascade token 1\x00"
_SIGNATURE_BYTES: Final = 16


def token_secret(secret: Secret) -> Secret:
    """Return a secret that can sign tokens; raise `InputError` if it is too short."""
    if (length := len(secret.reveal())) < LEAST:
        raise InputError(f"the token secret must have at least {LEAST} bytes, not {length}")
    return secret


def make_token(secret: Secret, *, session_id: str, position: int, arm: str, arrived_at: int) -> str:
    """Return the token of one display.

    >>> make_token(Secret(b"0123456789abcdef"), session_id="s", position=1, arm="a", arrived_at=1700000000000)[:14]
    '1700000000000.'
    """
    session, ad = session_id.encode(), arm.encode()
    message = _PURPOSE + pack(">QQII", arrived_at, position, len(session), len(ad)) + session + ad
    signature = hmac.digest(secret.reveal(), message, "sha256")[:_SIGNATURE_BYTES]
    return f"{arrived_at}.{urlsafe_b64encode(signature)[:-2].decode('ascii')}"


def check_token(secret: Secret, token: str | None, *, session_id: str, position: int, arm: str) -> int | None:
    """Return the arrival time that a token vouches for, or None if it is missing, malformed, or not of this display.

    >>> secret = Secret(b"0123456789abcdef")
    >>> token = make_token(secret, session_id="s", position=1, arm="a", arrived_at=1700000000000)
    >>> check_token(secret, token, session_id="s", position=1, arm="a")
    1700000000000
    >>> check_token(secret, token, session_id="s", position=2, arm="a") is None
    True
    """
    if token is None or not token.isascii():
        return None
    time = token.partition(".")[0]
    if not time.isdigit() or len(time) > len(str(MOST)) or not 0 < position <= MOST:
        return None
    expected = make_token(secret, session_id=session_id, position=position, arm=arm, arrived_at=int(time))
    return int(time) if hmac.compare_digest(token, expected) else None


#: Why feedback is refused that does not have the token of its display.
NO_TOKEN: Final = "$.token is missing or does not belong to this display"


def has_token(secret: Secret | None, feedback: Feedback, session: Session | None) -> bool:
    """Return whether feedback has the token of its display, if tokens are needed; an unknown session may be any."""
    if secret is None:
        return True
    position, arm = feedback.position, feedback.arm
    time = check_token(secret, feedback.token, session_id=feedback.session_id, position=position, arm=arm)
    return time is not None and (session is None or time == session.arrived_at)


def contradiction(verdict: Verdict, last: int) -> str:
    """Return how feedback contradicts a slate, whose last position is `last`."""
    beyond = f"$.position is beyond the slate of {last}"
    return beyond if verdict == "position" else "$.arm is not what was shown at that position"


#: Most feedback records parked for one session; a well-behaved client sends one or two per position.
MOST_PARKED = 64


@dataclass(slots=True, kw_only=True)
class FeedbackJoin:
    """Joins feedback with the sessions of one partition."""

    sessions: SessionTable
    topics: Topics
    reader: RecordReader
    secret: Secret | None

    def take(self, record: Record, feedback: Feedback, batch: Batch) -> None:
        """Journal feedback; join it with its session, or park it."""
        session_id, touched = feedback.session_id, batch.touched
        state = self.sessions.table.get(session_id)
        session = state if type(state) is Session else None
        if not has_token(self.secret, feedback, session):
            self.reader.reject(record, "token", NO_TOKEN, batch.emits)
            return
        was_shown = session is not None and feedback.arm in session.slate
        if not was_shown and feedback.arm not in self.sessions.versions.newest_arms:
            self.reader.reject(record, "unknown-arm", "$.arm is not an arm of any version known here", batch.emits)
            return
        batch.facts.append(fact_of(feedback))
        if session is None:
            self._park(record, feedback, state if type(state) is Parked else None, batch)
        elif self._apply(record, feedback, session, batch.emits):
            touched[session_id] = True
        else:
            touched.setdefault(session_id, False)

    def take_parked(self, session_id: str, session: Session, parked: Parked, emits: Emits) -> None:
        """Join feedback that was parked with its session; it is in the journal already."""
        horizon = max(self.sessions.versions.horizon, len(session.slate))
        clicks, partition, key = self.topics.clicks, self.sessions.partition, session_id.encode()
        for kept in parked.records:
            record = Record(clicks, partition, kept.offset, kept.timestamp, key, kept.value)
            feedback = self.reader.read_parked(record, horizon, emits)
            if feedback is None:
                continue
            if not has_token(self.secret, feedback, session):
                self.reader.reject(record, "token", "$.token belongs to another session of this id", emits)
                continue
            self._apply(record, feedback, session, emits)

    def _apply(self, record: Record, feedback: Feedback, session: Session, emits: Emits) -> bool:
        tally = emits.tally
        was_clicked = session.clicked
        verdict = session.apply(feedback)
        if verdict == "applied":
            tally.applied += 1
            if session.clicked and not was_clicked:
                tally.clicks[session.clicked] += 1
                tally.reward += self.sessions.versions.reward_of(feedback.arm)
            return True
        if verdict == "redundant":
            tally.redundant += 1
        elif verdict == "outside":
            tally.outside += 1
            early, late = session.arrived_at - feedback.occurred_at, feedback.occurred_at - session.deadline
            when = f"{early / 1000:,.0f} s before its arrival" if early > 0 else f"{late / 1000:,.0f} s after its end"
            tally.troubles.add("late-feedback", when)
        else:
            self.reader.reject(record, verdict, contradiction(verdict, len(session.slate)), emits)
        return False

    def _park(self, record: Record, feedback: Feedback, parked: Parked | None, batch: Batch) -> None:
        session_id, emits, sessions = feedback.session_id, batch.emits, self.sessions
        latest = feedback.occurred_at
        if (arrived := sessions.room.partition_of(session_id)) is not None and record.key == session_id.encode():
            emits.tally.troubles.add("split-sessions", self._difference(arrived))
        if parked is None:
            over = sessions.progress - sessions.parked_until(latest) - sessions.versions.newest.settings.lateness
            if over >= 0:
                emits.tally.late += 1  # its session is deleted
                emits.tally.troubles.add("late-feedback", f"{over / 1000:,.0f} s too late")
                return
            if sessions.room.is_full():
                emits.tally.unparked += 1
                return
            parked = sessions.await_arrival(session_id, latest)
        value, waiting = record.value or b"", sum(len(kept.value) for kept in parked.records)
        if any(kept.value == value for kept in parked.records):
            emits.tally.redundant += 1
        elif len(parked.records) >= MOST_PARKED or waiting + len(value) > ROOM // 2:  # which a table value has
            error = f"{len(parked.records)} records wait for the arrival of this session"
            self.reader.reject(record, "parked-overflow", error, emits)
            return
        elif parked.records and sessions.room.is_full():
            emits.tally.unparked += 1
        else:
            sessions.park(parked, ParkedRecord(record.offset, record.timestamp, value), latest)
            batch.touched[session_id] = True

    def _difference(self, arrived: int) -> str:
        """Return where the records of a session lie whose arrival is in another partition, and what to do."""
        arrivals, clicks = self.topics.arrivals, self.topics.clicks
        return (
            f"the arrival of a session is in partition {arrived} of {arrivals}, its feedback in partition "
            f"{self.sessions.partition} of {clicks}. Set partitioner=murmur2_random (murmur2) in both producers"
        )
