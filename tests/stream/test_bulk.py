"""Many records at once come out as one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stream.broken import MUTATIONS, NOW
from worker.stream import bulk
from worker.stream.bulk import AT_ONCE, Heard, read_arrivals, read_feedback, write_decisions, write_facts
from worker.stream.codec import (
    Limits,
    Rejected,
    decode_arrival,
    decode_decision,
    decode_feedback,
    encode_arrival,
    encode_decision,
    encode_feedback,
    encode_feedback_fact,
    encode_opened,
)
from worker.stream.events import Arrival, Feedback, FeedbackFact, Opened
from worker.stream.sessions import Session
from worker.stream.topology import Record

DIM, HORIZON = 2, 5
LIMITS = Limits(max_record_bytes=900, max_session_id=12, max_arm_id=10, max_exclude=2, max_norm=100)

ARRIVALS = (
    Arrival(session_id="s-1", occurred_at=NOW, context=(0.25, -1.5)),
    Arrival(session_id="s-2", occurred_at=NOW + 1, context=(0.0, 1e-9), exclude=("hats", "shoes")),
    Arrival(session_id="zoë", occurred_at=NOW, context=(3.0, 4.0)),
)
FEEDBACK = (
    Feedback(session_id="s-1", occurred_at=NOW, position=1, arm="shoes", clicked=False),
    Feedback(session_id="s-2", occurred_at=NOW + 9, position=5, arm="hats", clicked=True, token="t"),
    Feedback(session_id='"\\', occurred_at=NOW, position=2, arm="ß", clicked=True),
)


def records(values: Sequence[bytes | None], timestamps: Sequence[int] | None = None) -> list[Record]:
    times = timestamps or [NOW] * len(values)
    return [Record("t", 0, place, times[place], None, value) for place, value in enumerate(values)]


def said(outcome: Any) -> Any:
    return str(outcome) if type(outcome) is Rejected else msgspec.structs.asdict(outcome)


def one_by_one(given: Sequence[Record], *, arrivals: bool, limits: Limits = LIMITS) -> list[Any]:
    outcomes: list[Any] = []
    for record in given:
        time = record.timestamp
        try:
            if arrivals:
                outcomes.append(decode_arrival(record.value, limits=limits, dim=DIM, timestamp=time))
            else:
                outcomes.append(decode_feedback(record.value, limits=limits, horizon=HORIZON, timestamp=time))
        except Rejected as rejected:
            outcomes.append(rejected)
    return [said(outcome) for outcome in outcomes]


def in_bulk(given: Sequence[Record], *, arrivals: bool, limits: Limits = LIMITS) -> list[Any]:
    if arrivals:
        return [said(event) for event in read_arrivals(given, limits=limits, dim=DIM)]
    return [said(event) for event in read_feedback(given, limits=limits, horizon=HORIZON)]


def check_reading(given: Sequence[Record]) -> None:
    for arrivals in (True, False):
        assert in_bulk(given, arrivals=arrivals) == one_by_one(given, arrivals=arrivals)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arrivals", [True, False])
def test_broken_records_are_read_as_one_by_one(arrivals: bool) -> None:
    rng = Random(20_261_116)
    good = [encode_arrival(event) for event in ARRIVALS] if arrivals else [encode_feedback(event) for event in FEEDBACK]
    seen: set[type] = set()
    for _ in range(4_000):
        values: list[bytes | None] = []
        for _ in range(rng.choice((1, 2, 3, 8))):
            value = rng.choice(good)
            values.append(rng.choice(MUTATIONS)(rng, value, rng.choice(good)) if rng.random() < 0.3 else value)
        if rng.random() < 0.02:
            values[rng.randrange(len(values))] = None
        given = records(values, [NOW - rng.choice((0, 0, 0, 59_999, 60_000, 60_001)) for _ in values])
        together = in_bulk(given, arrivals=arrivals)
        assert together == one_by_one(given, arrivals=arrivals), values
        seen |= set(map(type, together))
    assert seen == {str, dict}


PIECES = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b" ",
        b"\n",
        b"1",
        b"null",
        b'"x":',
        b'"x":[{}',
        b"\x7f",
        b"\xc3",
    ),
    *(encode_feedback(event) for event in FEEDBACK),
    *(encode_arrival(event) for event in ARRIVALS),
    encode_feedback(FEEDBACK[0])[:-1],
    encode_feedback(FEEDBACK[0])[1:],
    b'{"kind":"other",' + encode_feedback(FEEDBACK[0])[1:],
    b'{"kind":"feedback",' + encode_feedback(FEEDBACK[0])[1:],
)


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=4).map(b"".join), min_size=1, max_size=4))
def test_pieces_of_records_are_read_as_one_by_one(values: list[bytes]) -> None:
    check_reading(records(values))


@given(st.lists(st.sampled_from(FEEDBACK), min_size=2, max_size=4), st.data())
def test_values_that_only_together_are_records_are_refused(events: list[Feedback], data: st.DataObject) -> None:
    # Cut at commas that are not between records: joined again, all is as it was.
    text = b",".join(map(encode_feedback, events))
    commas = [place for place, byte in enumerate(text) if byte == ord(",")]
    cuts = sorted(data.draw(st.sets(st.sampled_from(commas), min_size=1, max_size=len(events))))
    values = [text[start:end] for start, end in zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(text)], strict=True)]
    assert b",".join(values) == text
    check_reading(records(values))


@pytest.mark.parametrize(
    "values",
    [
        [b'{"x":[{}', b'{}]},{"session_id":"a","occurred_at":1,"position":1,"arm":"a","clicked":true}'],
        [encode_feedback(FEEDBACK[0]) + b',{"x":"', b'{",' + encode_feedback(FEEDBACK[0])[1:]],
        [encode_feedback(FEEDBACK[0]) + b"," + encode_feedback(FEEDBACK[0])[:-1], b'"x":1}'],
        [encode_feedback(FEEDBACK[0]) + b"," + encode_feedback(FEEDBACK[0]), b""],
        [encode_feedback(FEEDBACK[0])[:-1], b'"x":1}', encode_feedback(FEEDBACK[0])],
    ],
)
def test_a_record_cannot_borrow_from_the_next(values: list[bytes]) -> None:
    check_reading(records(values))
    assert any(isinstance(outcome, str) for outcome in in_bulk(records(values), arrivals=False))


def test_a_bad_record_among_many_costs_only_itself() -> None:
    values: list[bytes | None] = [encode_feedback(FEEDBACK[0])] * (2 * AT_ONCE + 7)
    values[AT_ONCE + 3] = b"{"
    values[-1] = None
    outcomes = in_bulk(records(values), arrivals=False)
    assert outcomes == one_by_one(records(values), arrivals=False)
    assert sum(isinstance(outcome, str) for outcome in outcomes) == 2


def test_plain_records_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_read_one", None)
    arrivals = [encode_arrival(event) for event in ARRIVALS[:2]] * AT_ONCE
    feedback = [encode_feedback(event) for event in FEEDBACK[:2]] * AT_ONCE
    assert len(read_arrivals(records(arrivals), limits=LIMITS, dim=DIM)) == len(arrivals)
    assert len(read_feedback(records(feedback), limits=LIMITS, horizon=HORIZON)) == len(feedback)
    assert read_arrivals([], limits=LIMITS, dim=DIM) == read_feedback([], limits=LIMITS, horizon=HORIZON) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": ""},
        {"session_id": "x" * 13},
        {"arm": "x" * 11},
        {"arm": ""},
        {"arm": "\x7f"},
        {"position": 0},
        {"position": 6},
        {"position": 2.0},
        {"occurred_at": NOW + 60_001},
        {"kind": "opened"},
        {"token": 5},
        {"more": {"of": "it"}},
    ],
)
def test_what_is_not_plain_among_plain_feedback(fields: dict[str, Any]) -> None:
    plain = json.loads(encode_feedback(FEEDBACK[0]))
    values = [
        json.dumps(plain).encode(),
        json.dumps(plain | fields, ensure_ascii=False).encode(),
        json.dumps(plain).encode(),
    ]
    check_reading(records(values))


@pytest.mark.parametrize(
    "fields",
    [
        {"context": [1.0]},
        {"context": [99.0, 99.0]},
        {"exclude": ["a", "b", "c"]},
        {"exclude": [""]},
        {"exclude": ["x" * 11]},
        {"exclude": ["a\x80"]},
        {"occurred_at": NOW + 60_001},
        {"session_id": "x" * 13},
    ],
)
def test_what_is_not_plain_among_plain_arrivals(fields: dict[str, Any]) -> None:
    plain = json.loads(encode_arrival(ARRIVALS[0]))
    values = [json.dumps(plain).encode(), json.dumps(plain | fields, ensure_ascii=False).encode()]
    check_reading(records(values))


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

#: Ids that look like what lies between two documents.
texts = st.sampled_from([',{"session_id":', ",{", '"', "\\", ',{"kind":', "},{", "\n", "zoë", "\u2028"]) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5
)


@given(data=st.data())
def test_facts_are_written_as_one_by_one(kinds: Any, data: st.DataObject) -> None:
    draws = {kind.event: kind.draw for kind in kinds}
    drawn = data.draw(st.lists(draws[Opened] | draws[FeedbackFact], max_size=8))
    tokens = data.draw(st.sampled_from([(None,), ("t", None)]))
    facts: list[Opened | Heard] = []
    expected = []
    for place, event in enumerate(drawn):
        event = msgspec.structs.replace(event, session_id=data.draw(texts))
        if isinstance(event, Opened):
            facts.append(event)
            expected.append(encode_opened(event))
        else:
            facts.append(Heard(**msgspec.structs.asdict(event), token=tokens[place % len(tokens)]))
            expected.append(encode_feedback_fact(event))
    assert write_facts(facts) == expected


numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    slate = tuple(draw(st.lists(texts, max_size=3)))
    return Session(
        draw(st.integers(0, 2**53)),
        0,
        b"",
        (),
        draw(st.integers(0, 2**53)),
        slate,
        tuple(draw(st.sampled_from(["explore", "exploit", "random"])) for _ in slate),
        draw(st.none() | st.tuples(*[st.floats(0.01, 1.0) for _ in slate])),
        tuple(draw(numbers) for _ in slate),
        0,
        draw(st.integers(0, max(0, len(slate) - 1))),
    )


@given(st.lists(st.tuples(texts, sessions(), st.none() | st.just(("t",))), max_size=5))
def test_decisions_are_written_as_one_by_one(
    shown: list[tuple[str, Session, tuple[str, ...] | None]],
) -> None:
    values = write_decisions([session.decision(session_id, tokens) for session_id, session, tokens in shown])
    for (session_id, session, tokens), value in zip(shown, values, strict=True):
        decision = decode_decision(value)
        assert encode_decision(decision) == value
        assert (decision.session_id, decision.tokens) == (session_id, tokens)
        assert decision.slate == session.slate[session.passed :]
        assert decision.arm == (decision.slate[0] if decision.slate else None)


def test_more_than_are_written_at_once() -> None:
    session = Session(1, 2, b"", (), 3, ("a",), ("exploit",), None, (0.5,))
    documents = [session.decision(f"s-{place}", None) for place in range(2 * AT_ONCE + 1)]
    assert [json.loads(value) for value in write_decisions(documents)] == [
        document | {"slate": ["a"]} for document in documents
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused(value: float) -> None:
    session = Session(1, 2, b"", (), 3, ("a",), ("exploit",), None, (value,))
    with pytest.raises(ValueError, match="cannot be written"):
        session.decision("s", None)
