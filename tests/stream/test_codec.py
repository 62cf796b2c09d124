from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stream.scenes import feedback, opened, progress
from worker.stream import decoding
from worker.stream.contexts import pack_context, stack_packed
from worker.stream.decoding import (
    MAX_FACT_LEAD,
    MAX_PROGRESS_LEAD,
    Limits,
    Rejected,
    decode_arrival,
    decode_feedback,
    decode_journal,
)
from worker.stream.events import Arrival, encode_event
from worker.stream.settings import LearningSettings

NOW = 1_700_000_000_000
ARRIVAL = {"session_id": "s-1", "occurred_at": NOW, "context": [0.5, -1.0]}
FEEDBACK = {"session_id": "s-1", "occurred_at": NOW, "position": 2, "arm": "shoes", "clicked": True}


def settings_of(dim: int) -> LearningSettings:
    return LearningSettings(dim=dim, standardise=False, session_timeout=0, lateness=0)


def arrive(value: bytes | None, limits: Limits = Limits(), dim: int = 2) -> Arrival:  # noqa: B008
    return decode_arrival(value, settings_of(dim), limits=limits, timestamp=NOW)


def feedback_reason(value: bytes | None, limits: Limits = Limits()) -> str:  # noqa: B008
    with pytest.raises(Rejected) as caught:
        decode_feedback(value, limits=limits, horizon=5, timestamp=NOW)
    return caught.value.reason


def rejected(value: bytes | None, limits: Limits = Limits(), dim: int = 2) -> Rejected:  # noqa: B008
    with pytest.raises(Rejected) as caught:
        arrive(value, limits, dim)
    return caught.value


def changed(record: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps(record | fields).encode()


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(data=st.data())
def test_an_event_is_read_back_and_written_again_with_the_same_bytes(kind: Any, data: st.DataObject) -> None:
    event = data.draw(kind.draw)
    written = encode_event(event)
    again = kind.decode(written)
    assert again == event
    assert encode_event(again) == written


@given(data=st.data())
def test_fields_are_written_in_their_order_and_absent_ones_are_left_out(kind: Any, data: st.DataObject) -> None:
    event = data.draw(kind.draw)
    present = [
        field.name
        for field in msgspec.structs.fields(event)
        if field.required or getattr(event, field.name) != field.default
    ]
    assert list(json.loads(encode_event(event))) == ([] if kind.tag is None else ["kind"]) + present


@given(
    data=st.data(),
    name=st.text(st.characters(exclude_categories=["Cs"])).map("x_".__add__),
    value=st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)),
)
def test_unknown_fields_are_ignored(kind: Any, data: st.DataObject, name: str, value: Any) -> None:
    event = data.draw(kind.draw)
    document = {name: value} | json.loads(encode_event(event))
    assert kind.decode(json.dumps(document).encode()) == event


# ── each reason ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"{",
        b"nonsense",
        b"\x00",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"session_id":"s-1","occurred_at":1700000000000,"context":[NaN,1]}',
        b'{"session_id":"s-1","occurred_at":1700000000000,"context":[Infinity,1]}',
        b'{"session_id":"s-1","occurred_at":1700000000000,"context":[1,1]} {}',
        b'{"session_id":"\xff","occurred_at":1700000000000,"context":[1,1]}',
        b'{"session_id":"\\ud800","occurred_at":1700000000000,"context":[1,1]}',
        # In a field that the decoder skips.
        b'{"x":"\xff","session_id":"s-1","occurred_at":1700000000000,"context":[1,1]}',
        b'{"x":"\xed\xa0\x80","session_id":"s-1","occurred_at":1700000000000,"context":[1,1]}',
    ],
)
def test_a_record_that_is_not_json_in_utf8_is_undecodable(value: bytes | None) -> None:
    assert rejected(value).reason == "undecodable"


@pytest.mark.parametrize(
    "value",
    [
        *(b"[]", b"null", b"7", b'"s"', b"true"),
        changed(ARRIVAL).replace(b"0.5", b"1e999"),
        changed(ARRIVAL).replace(b"0.5", b"9" * 5_000),
    ],
    ids=lambda value: value[:20],
)
def test_json_that_is_no_object_or_has_a_number_too_large_for_a_float_is_invalid(value: bytes) -> None:
    assert rejected(value).reason == "invalid"


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("closed", [True, False])
def test_a_record_nested_too_deep_is_undecodable(opening: bytes, closing: bytes, closed: bool) -> None:
    for depth in (decoding.MAX_DEPTH, 1_500, 8_000):
        nested = opening * depth + b"1" + closing * (depth if closed else 0)
        record = json.dumps(ARRIVAL).encode()[:-1] + b',"x":' + nested + b"}"
        assert rejected(record).reason == "undecodable"


@pytest.mark.parametrize(
    "note",
    [
        *("[" * 5_000, '\\"[{' * 2_000, "[" * 5_000 + "\\"),  # brackets within strings
        [[]] * 5_000,  # side by side
        json.loads("[" * (decoding.MAX_DEPTH - 1) + "]" * (decoding.MAX_DEPTH - 1)),  # the deepest that is allowed
    ],
    ids=["text", "escapes", "backslash", "siblings", "deepest"],
)
def test_a_record_that_is_not_nested_too_deep_is_read(note: Any) -> None:
    assert arrive(changed(ARRIVAL, note=note)).session_id == "s-1"


def test_a_record_above_the_limit_is_too_large_and_one_at_it_is_not() -> None:
    record = changed(ARRIVAL)
    assert rejected(record, Limits(max_record_bytes=len(record) - 1)).reason == "too-large"
    assert arrive(record, Limits(max_record_bytes=len(record))).session_id == "s-1"


@pytest.mark.parametrize("context", [[], [1.0], [1.0, 2.0, 3.0]])
def test_a_context_of_another_length_has_the_wrong_dimension(context: list[float]) -> None:
    rejection = rejected(changed(ARRIVAL, context=context))
    assert (rejection.reason, rejection.error) == (
        "dimension",
        f"$.context has {len(context)} numbers, not 2",
    )


def test_the_norm_counts_the_arm_beside_the_context() -> None:
    # ‖z‖² = ‖x‖² + 1 = 4 + 4 + 1 = 9
    assert arrive(changed(ARRIVAL, context=[2, 2]), Limits(max_norm=3.0)).context == (2.0, 2.0)
    assert rejected(changed(ARRIVAL, context=[2, 2]), Limits(max_norm=2.999)).reason == "norm"
    # A norm that overflows is above any limit.
    most = Limits(max_norm=1.7976931348623157e308)
    assert rejected(changed(ARRIVAL, context=[1.7e308, 1.7e308]), most).reason == "norm"


def test_an_event_may_be_ahead_of_its_record_by_the_limit_and_no_more() -> None:
    assert arrive(changed(ARRIVAL, occurred_at=NOW + 60_000)).occurred_at == NOW + 60_000
    assert rejected(changed(ARRIVAL, occurred_at=NOW + 60_001)).reason == "future"
    assert feedback_reason(changed(FEEDBACK, occurred_at=NOW + 60_001)) == "future"


def test_an_event_may_be_behind_its_record_by_limit_and_grace_and_no_more() -> None:
    oldest, limits = NOW - 3_600_000 - 65_000, Limits()
    settings = LearningSettings(dim=2, session_timeout=60_000, lateness=5_000)
    arrivals, answers = {"settings": settings}, {"horizon": 5, "grace": 65_000}
    for read, record, how in ((decode_arrival, ARRIVAL, arrivals), (decode_feedback, FEEDBACK, answers)):
        options: dict[str, Any] = {"limits": limits, **how}
        assert read(changed(record, occurred_at=oldest), timestamp=NOW, **options).occurred_at == oldest
        with pytest.raises(Rejected) as caught:
            read(changed(record, occurred_at=oldest - 1), timestamp=NOW, **options)
        assert caught.value.reason == "past"
        # A record without a time, read at NOW, may be of any age, but not of the future.
        assert read(changed(record, occurred_at=0), timestamp=-NOW, **options).occurred_at == 0
        with pytest.raises(Rejected, match="future"):
            read(changed(record, occurred_at=NOW + 60_001), timestamp=-NOW, **options)


@pytest.mark.parametrize(
    ("occurred_at", "reason", "unit"),
    [
        (NOW // 1000, "past", "seconds"),
        (NOW * 1000, "future", "microseconds"),
        (NOW * 1_000_000, "invalid", "nanoseconds"),
        (NOW // 1_000_000, "past", ""),
        (NOW + 10**12, "future", ""),
    ],
)
def test_the_text_guesses_the_unit_of_a_time(occurred_at: int, reason: str, unit: str) -> None:
    found = rejected(changed(ARRIVAL, occurred_at=occurred_at))
    assert found.reason == reason
    assert found.error.endswith(f"(looks like {unit})") if unit else "looks like" not in found.error


def test_the_text_guesses_no_unit_from_a_record_without_a_plausible_time() -> None:
    with pytest.raises(Rejected) as caught:
        decode_arrival(changed(ARRIVAL), settings_of(2), timestamp=1, limits=Limits())
    assert "looks like" not in caught.value.error


@pytest.mark.parametrize(
    ("event", "most"),
    [
        (opened(), MAX_FACT_LEAD),
        (feedback(1, "a", True), MAX_FACT_LEAD),
        (progress(0), MAX_PROGRESS_LEAD),
    ],
)
def test_a_journal_record_may_be_ahead_of_its_timestamp_by_a_bound_and_no_more(event: Any, most: int) -> None:
    name = next(name for name in ("arrived_at", "occurred_at", "time") if hasattr(event, name))

    def read(time: int, *timestamp: int) -> Any:
        return decode_journal(encode_event(msgspec.structs.replace(event, **{name: time})), *timestamp)

    assert getattr(read(NOW + most, NOW), name) == NOW + most
    with pytest.raises(Rejected, match="future"):
        read(NOW + most + 1, NOW)
    for unknown in ((), (0,), (-1,)):
        read(NOW + most + 1, *unknown)


@pytest.mark.parametrize("position", [0, -1, 6, 2**70])
def test_a_position_outside_the_horizon_has_its_own_reason(position: int) -> None:
    assert feedback_reason(changed(FEEDBACK, position=position)) == "position"
    for inside in (1, 5):
        event = decode_feedback(changed(FEEDBACK, position=inside), limits=Limits(), horizon=5, timestamp=NOW)
        assert event.position == inside


# ── accepted records ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_whole_numbers_in_a_context_are_read_as_floats() -> None:
    context = arrive(changed(ARRIVAL, context=[1, -2])).context
    assert context == (1.0, -2.0)
    assert all(type(number) is float for number in context)


@pytest.mark.parametrize("text", [b"1700000000000.0", b"1.7e12", b"17e11"])
def test_a_whole_number_may_be_written_with_a_point_or_an_exponent(text: bytes) -> None:
    event = arrive(changed(ARRIVAL).replace(str(NOW).encode(), text))
    assert (event.occurred_at, type(event.occurred_at)) == (NOW, int)


def test_the_last_of_two_equal_fields_counts() -> None:
    record = b'{"session_id":"a","session_id":"b","occurred_at":1700000000000,"context":[0,0]}'
    assert arrive(record).session_id == "b"


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"sesion_id": "s", "occurred_at": 5}, "field `session_id`; is 'sesion_id' meant?"),
        ({"session_id": "s", "occurredAt": 5.0}, "field `occurred_at`; is 'occurredAt' meant?"),
        ({"session_id": "s", "when": 5}, "field `occurred_at`"),
        ({f"x{n}": 1 for n in range(99)} | {"occurredAt": 5, "session_id": "s"}, "field `occurred_at`"),
    ],
)
def test_a_missing_field_is_reported_with_the_nearest_of_the_first_names(fields: dict[str, Any], error: str) -> None:
    value = orjson.dumps({**fields, "position": 1, "arm": "a", "clicked": True})
    with pytest.raises(Rejected) as caught:
        decode_feedback(value, limits=Limits(), horizon=3, timestamp=5)
    assert (caught.value.reason, caught.value.error.endswith(error)) == ("invalid", True)


def test_an_error_names_the_field() -> None:
    assert rejected(changed(ARRIVAL, context=[1, "2"])).error == "Expected `float`, got `str` at $.context[1]"
    with pytest.raises(Rejected) as caught:
        decode_journal(b'{"kind":"weather"}')
    assert str(caught.value) == "invalid: Not one of the values allowed here at $.kind"


# ── contexts ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    contexts=st.integers(0, 5).flatmap(
        lambda dim: st.lists(st.tuples(*[st.floats(width=64)] * dim), max_size=5).map(lambda rows: (dim, rows))
    )
)
def test_stacking_and_packing_keep_every_bit(contexts: tuple[int, list[tuple[float, ...]]]) -> None:
    dim, rows = contexts
    packed = [pack_context(row) for row in rows]
    stacked = stack_packed(packed, dim)
    assert (stacked.shape, stacked.dtype) == ((len(rows), dim), np.float64)
    assert stacked.tobytes() == np.array(rows, dtype=np.float64).reshape(len(rows), dim).tobytes()
