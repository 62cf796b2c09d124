"""No record is too large to be answered for, and no stored session is too damaged to start from."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stream.scenes import (
    TOPICS,
    arrival,
    assert_balanced,
    click,
    facts,
    parameters,
    passed,
    reasons,
    serving,
)
from worker.stream.decoding import Limits
from worker.stream.reading import ROOM
from worker.stream.serving import Serving
from worker.stream.session import Parked, ParkedRecord, Session, decode_state, encode_state
from worker.stream.topology import (
    CUT_BYTES,
    MOST_BYTES,
    RESERVED_BYTES,
    DeadLetter,
    Record,
    dead_letter,
)
from worker.stream.versions import Versions

WIDE = Limits(max_record_bytes=1 << 30, max_exclude=1 << 20, max_session_id=1 << 20)

STORED = serving().handle([arrival()]).changelog[0][1] or b""


def unlimited() -> Serving:
    return Serving(Versions(parameters()), topics=TOPICS, limits=WIDE)


def size(letter: DeadLetter) -> int:
    """Return the bytes of a dead letter in its topic, with a generous allowance for lengths and the batch."""
    parts = [letter.key or b"", letter.value or b"", *(part for _, part in letter.headers)]
    return sum(map(len, parts)) + sum(len(name) + 10 for name, _ in letter.headers) + 100


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    key=st.one_of(st.none(), st.integers(0, 100_000).map(bytes)),
    value=st.one_of(st.none(), st.integers(0, 3 << 20).map(bytes)),
    error=st.one_of(st.text(max_size=50), st.integers(0, 100_000).map("é".__mul__), st.just("\ud800")),
)
def test_a_dead_letter_fits_into_its_topic_whatever_the_record(
    key: bytes | None, value: bytes | None, error: str
) -> None:
    record = Record("t" * 249, 2**31 - 1, 2**63 - 1, 0, key, value)
    letter = dead_letter(record, "parked-overflow", error)
    assert size(letter) <= MOST_BYTES
    headers = dict(letter.headers)
    assert (letter.value == value) is ("value" not in headers.get("adcascade.cut", b"").decode())
    assert (letter.key == key) is ("key" not in headers.get("adcascade.cut", b"").decode())
    if len(key or b"") <= 1024 and len(value or b"") <= MOST_BYTES - RESERVED_BYTES:
        assert (letter.key, letter.value, len(headers)) == (key, value, 5), "whole, without further headers"


def test_a_record_that_does_not_fit_is_cut_and_its_dead_letter_has_length_and_hash() -> None:
    value = b'{"session_id":"s","padding":"' + b"x" * 70_000_000
    (letter,) = serving().handle([Record(TOPICS.arrivals, 0, 5, 0, b"k" * 2_000, value)]).dead_letters
    headers = dict(letter.headers)
    assert headers["adcascade.reason"] == b"too-large"
    assert headers["adcascade.cut"] == b"key,value"
    assert headers["adcascade.length"] == b"%d" % len(value)
    assert headers["adcascade.sha256"] == sha256(value).hexdigest().encode()
    assert headers["adcascade.key-length"] == b"2000"
    assert headers["adcascade.key-sha256"] == sha256(b"k" * 2_000).hexdigest().encode()
    assert letter.value == value[:CUT_BYTES]


# ── outputs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("excluded", [5_000, 20_000, 80_000])
def test_an_arrival_whose_outputs_do_not_fit_leaves_nothing_but_a_dead_letter(excluded: int) -> None:
    task = unlimited()
    records = [arrival("large", exclude=[f"arm-{n:06}" for n in range(excluded)]), arrival("small")]
    emits = task.handle(records)
    written = [*emits.journal, *emits.changelog, *emits.decisions]
    assert all(len(key or b"") + len(value or b"") < ROOM for key, value in written)
    is_large = excluded * 13 > ROOM // 4  # a number of one digit may take four times its length
    assert [fact["session_id"] for fact in facts(emits)] == (["small"] if is_large else ["large", "small"])
    assert reasons(emits) == ["too-large"] * is_large
    assert ("large" in task.table) is not is_large
    assert {key for key, _ in emits.changelog} == {name.encode() for name in task.table}
    assert ("too-large-output" in emits.tally.troubles.reports) is is_large
    assert_balanced(emits.tally, task)


def test_parked_feedback_stays_within_what_the_changelog_takes() -> None:
    task = unlimited()
    emits = task.handle([passed(arm="coat", padding="x" * 160_000, n=n) for n in range(20)])
    assert set(reasons(emits)) == {"parked-overflow"}
    assert 0 < task.parked < 20
    assert all(len(value or b"") < ROOM for _, value in emits.changelog)
    assert_balanced(emits.tally, task)


def test_feedback_larger_than_the_journal_takes_is_a_dead_letter() -> None:
    task = unlimited()
    emits = task.handle([arrival(), click(padding="x" * MOST_BYTES)])
    assert reasons(emits) == ["too-large"]
    assert len(emits.journal) == 1
    assert_balanced(emits.tally, task)


def test_a_session_stored_when_the_topics_took_more_is_served_from_memory() -> None:
    session = decode_state(STORED)
    assert isinstance(session, Session)
    session.context = bytes(MOST_BYTES)
    task = unlimited()
    tally = task.restore([Record(TOPICS.changelog, 0, 0, 0, b"s", encode_state(session))])
    emits = task.handle([passed()])
    tally.add(emits.tally)
    assert (len(emits.journal), len(emits.decisions), emits.changelog) == (1, 1, [])
    assert (tally.applied, [kind for kind, _, _ in tally.troubles]) == (1, ["too-large-output"])
    assert_balanced(tally, task)


# ── damaged state ────────────────────────────────────────────────────────────────────────────────────────────────────

VALID = list(msgspec.msgpack.decode(STORED))

damaged = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    ).map(msgspec.msgpack.encode),
    st.tuples(
        st.integers(0, len(VALID) - 1),
        st.one_of(
            st.integers(-5, 2**63), st.floats(), st.lists(st.floats(), max_size=4), st.binary(max_size=9), st.text()
        ),
    ).map(lambda change: msgspec.msgpack.encode([*VALID[: change[0]], change[1], *VALID[change[0] + 1 :]])),
)


@given(
    st.lists(st.tuples(st.one_of(st.just(b"s"), st.binary(max_size=3)), damaged), max_size=4, unique_by=lambda p: p[0])
)
def test_no_stored_value_raises_an_error_then_or_later(table: list[tuple[bytes, bytes]]) -> None:
    task = serving()
    tally = task.restore(Record(TOPICS.changelog, 3, n, 0, key, value) for n, (key, value) in enumerate(table))
    emits = task.handle([arrival(), click(), passed(position=2, arm="shoe"), arrival("t")])
    tally.add(emits.tally)
    task.acknowledged(2**60)
    tally.add(task.handle([]).tally)
    assert_balanced(tally, task)


def test_a_damaged_value_is_reported_and_deleted_and_its_session_planned_again() -> None:
    task = serving()
    stored = [(b"s", b"\x05"), (b"t", STORED), (b"\xff", STORED), (b"u", STORED[:-3])]
    tally = task.restore(Record(TOPICS.changelog, 3, 40 + n, 0, *pair) for n, pair in enumerate(stored))
    assert (tally.recovered, set(task.table)) == (1, {"t"})
    ((kind, times, example),) = tally.troubles
    assert (kind, times) == ("damaged-state", 3)
    assert example == "ads.sessions-changelog, partition 3, offset 43: ValueError"
    assert task.has_due
    emits = task.handle([click(), arrival()])
    assert emits.changelog[:3] == [(b"s", None), (b"\xff", None), (b"u", None)]
    assert emits.changelog[3][0] == b"s" and emits.changelog[3][1]
    assert facts(emits)[1]["slate"] == facts(serving().handle([arrival()]))[0]["slate"]
    tally.add(emits.tally)
    assert (tally.opened, tally.applied) == (1, 1)
    assert_balanced(tally, task)
    assert not task.has_due


@pytest.mark.parametrize(
    "change",
    [
        {"modes": ("exploit",)},
        {"values": (float("nan"),) * 3},
        {"values": ()},
        {"propensities": (1.0,)},
        {"passed": 4},
        {"clicked": -1},
        {"arrived_at": -5},
        {"deadline": 0},
        {"context": b"123"},
    ],
)
def test_a_session_that_does_not_hold_together_is_damaged(change: dict[str, Any]) -> None:
    session = decode_state(STORED)
    for name, value in change.items():
        setattr(session, name, value)
    with pytest.raises(ValueError, match=r"differ|finite|beyond|range"):
        decode_state(encode_state(session))


def test_parked_feedback_of_an_impossible_time_is_damaged() -> None:
    with pytest.raises(ValueError, match="range"):
        decode_state(encode_state(Parked(2**60, [ParkedRecord(0, 0, b"")])))
