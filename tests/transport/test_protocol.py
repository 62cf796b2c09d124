"""The fast codec of Kafka's protocol against aiokafka's own."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
from aiokafka.protocol.types import Array, Bytes, Int8, Int16, Int32, Int64, Schema, String
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kafka.protocol import ANSWERS, REQUESTS, fast_decode, fast_encode

_SIZES = {Int8: 8, Int16: 16, Int32: 32, Int64: 64}


def values(kind: Any) -> st.SearchStrategy[Any]:
    if isinstance(kind, Schema):
        return st.tuples(*map(values, kind.fields))
    if isinstance(kind, Array):
        return st.none() | st.lists(values(kind.array_of), max_size=4)
    if isinstance(kind, String):
        return st.none() | st.text(max_size=6)
    if kind is Bytes:
        return st.none() | st.binary(max_size=6)
    most = 1 << (_SIZES[kind] - 1)
    return st.integers(-most, most - 1)


@pytest.mark.parametrize("kind", ANSWERS, ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_answers_are_decoded_as_aiokafka_does(kind: Any, data: Any) -> None:
    encoded = kind.SCHEMA.encode(data.draw(values(kind.SCHEMA)))
    expected = kind(*[field.decode(stream) for stream in (BytesIO(encoded),) for field in kind.SCHEMA.fields])
    header = BytesIO(b"head" + encoded)
    header.seek(4)
    assert fast_decode(kind)(encoded) == fast_decode(kind)(header) == expected
    if encoded:
        with pytest.raises(ValueError, match=r"early|decoded"):
            fast_decode(kind)(encoded[:-1])


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_requests_are_encoded_as_aiokafka_does(kind: Any, data: Any) -> None:
    drawn = data.draw(values(kind.SCHEMA))
    assert fast_encode(kind)(kind(*drawn)) == kind.SCHEMA.encode(drawn)


def test_a_number_that_does_not_fit_is_an_error_with_the_request() -> None:
    kind = REQUESTS[0]
    with pytest.raises(ValueError, match=kind.__name__):
        fast_encode(kind)(kind(*[1 << 40] * (len(kind.SCHEMA.fields) - 1), []))
