"""Answers of a broker, read without aiokafka's tasks: which goes to whom, and what does not fit."""

from __future__ import annotations

from struct import pack
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.fetch import FetchRequest_v11
from aiokafka.protocol.metadata import MetadataRequest_v0
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.fake import in_loop
from worker.kafka import direct
from worker.kafka.direct import PendingAnswer, send_encoded


class Line:
    """A connection with the answers that were taken from it."""

    def __init__(self) -> None:
        self.connection: Any = AIOKafkaConnection("kafka", 9092, client_id="me")
        self.sent: list[bytes] = []
        self.taken: list[Any] = []
        self.lost: list[BaseException] = []
        self.connection._writer = SimpleNamespace(write=self.sent.append, close=lambda: None)
        self.connection._reader = object()
        self.connection._read_task = SimpleNamespace(done=lambda: True)
        self.frames = direct._Frames(self.connection, None)

    def ask(self, message: Any = None) -> None:
        answer = PendingAnswer(self.taken.append, self.lost.append, 0.0)
        send_encoded(self.connection, message or FetchRequest_v11(), b"body", answer)

    def numbers(self) -> list[int]:
        return [number for number, _, _ in self.connection._requests]


def answer(number: int, session: int) -> bytes:
    body = pack(">iihii", number, 0, 0, session, 0)
    return pack(">i", len(body)) + body


@given(sessions=st.lists(st.integers(0, 99), min_size=1, max_size=4), size=st.integers(1, 60))
def test_answers_go_to_whoever_asked_in_order_however_their_bytes_come(sessions: list[int], size: int) -> None:
    @in_loop
    async def story() -> None:
        line = Line()
        for _ in sessions:
            line.ask()
        data = b"".join(answer(number, one) for number, one in zip(line.numbers(), sessions, strict=True))
        for at in range(0, len(data), size):
            line.frames.data_received(data[at : at + size])
        assert [one.session_id for one in line.taken] == sessions
        assert not line.connection._requests and not line.lost
        line.connection.close()

    story()


@in_loop
async def test_an_answer_to_another_request_loses_the_connection() -> None:
    line = Line()
    line.ask()
    line.frames.data_received(answer(line.numbers()[0] + 1, 5))
    assert not line.taken
    assert len(line.lost) == 1
    assert line.connection._writer is None


@in_loop
async def test_an_answer_that_cannot_be_read_loses_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    line = Line()
    line.ask()
    line.frames.data_received(answer(line.numbers()[0], 5)[:-2].replace(pack(">i", 18), pack(">i", 16), 1))
    assert not line.taken
    assert len(line.lost) == 1
    assert "cannot be read" in caplog.text


@in_loop
async def test_what_aiokafka_has_asked_is_left_to_it() -> None:
    line = Line()
    future = SimpleNamespace(done=lambda: False, set_result=line.taken.append)
    line.connection._requests.append((7, MetadataRequest_v0(), future))
    body = pack(">iii", 7, 0, 0)
    line.frames.data_received(pack(">i", len(body)) + body)
    assert [one.brokers for one in line.taken] == [[]]
    line.connection.close()


@in_loop
async def test_a_request_has_the_header_of_aiokafka() -> None:
    line = Line()
    line.ask()
    message = FetchRequest_v11()
    head = message.build_request_header(correlation_id=line.numbers()[0], client_id="me").encode()
    assert line.sent == [pack(">i", len(head) + 4) + head + b"body"]
    line.connection.close()
