"""Requests past aiohttp: what is read so, and that nobody can see the difference."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from tests.http.running import HttpClient, Memory, http
from tests.http.test_connections import BODY, REQUEST, connect, is_closed, limited
from worker.http.api import ApiSettings
from worker.http.keys import ApiKeys
from worker.http.plain import MOST_HEAD, Plain, read_plain
from worker.http.service import Answer, ArriveRequest
from worker.secret import Secret

KEY = "0123456789abcdef-web"
#: A header that nobody needs, and that makes a request one for aiohttp.
GENERAL = b"TE: trailers\r\n"


def post(path: bytes, body: bytes, headers: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (path, headers, len(body), body)


def arrival(headers: bytes = b"", body: bytes = b"{}") -> bytes:
    return post(b"/v1/sessions", body, headers)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("request_", "plain"),
    [
        (arrival(), Plain(None, None, b"{}")),
        (post(b"/v1/sessions/a-1.b_c~/feedback", b"{}"), Plain("a-1.b_c~", None, b"{}")),
        (arrival(b"Authorization: Bearer k\r\n"), Plain(None, "Bearer k", b"{}")),
        (arrival(b"X-Any:\r\nconnection: Keep-Alive\r\naccept: */*\r\n"), Plain(None, None, b"{}")),
    ],
)
def test_plain_requests_are_read(request_, plain):
    assert read_plain(request_, 100) == plain
    for cut in range(len(b"POST /v1/sessions"), len(request_)):
        assert read_plain(request_[:cut], 100) == "partial"


@pytest.mark.parametrize(
    "request_",
    [
        b"P",
        b"GET /livez HTTP/1.1\r\n\r\n",
        arrival() + b"x",  # the client sends ahead
        post(b"/v1/sessions", b""),
        post(b"/v1/sessions?x=1", b"{}"),
        post(b"/v1/sessions/", b"{}"),
        post(b"/v1/sessions/a%2Fb/feedback", b"{}"),
        post(b"/v1/sessions/a/b/feedback", b"{}"),
        post(b"/v1/sessions/s", b"{}"),
        arrival().replace(b"HTTP/1.1", b"HTTP/1.0"),
        arrival(b"Transfer-Encoding: chunked\r\n"),
        arrival(b"content-encoding: gzip\r\n"),
        arrival(b"Expect: 100-continue\r\n"),
        arrival(b"Origin: http://elsewhere\r\n"),
        arrival(b"Connection: close\r\n"),
        arrival(b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
        arrival(b"Content-Length: 2\r\n"),  # twice
        arrival(b"Authorization: a\r\nAuthorization: b\r\n"),
        arrival().replace(b"Content-Length: 2", b"Content-Length: +2"),
        arrival().replace(b"Content-Length: 2", b"Content-Length : 2"),
        arrival().replace(b"Content-Length: 2", b"Content-Length: 101"),
        arrival().replace(b"Content-Length: 2\r\n", b""),
        arrival(b"X-Folded: a\r\n b\r\n"),
        arrival(b"X-Bare: a\nContent-Length: 3\r\n"),
        arrival(b"X-Null: \x00\r\n"),
        arrival(b"X-Latin: \xe9\r\n"),
        arrival(b"no colon\r\n"),
        arrival(b"X-Long: " + b"x" * MOST_HEAD + b"\r\n"),
    ],
)
def test_everything_else_is_left_to_aiohttp(request_):
    assert read_plain(request_, 100) == "other"


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def answer_to(connection: socket.socket) -> bytes:
    """Return the next answer; its date is left out."""
    received = b""
    while True:
        head, end, body = received.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length:")[2].split()[0]):
            lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Date: ")]
            return b"\r\n".join([lines[0], *sorted(lines[1:]), b"", body])
        data = connection.recv(65_536)
        assert data, received
        received += data


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/v1/sessions", b'{"session_id":"s","context":[1,2]}'),
        (b"/v1/sessions", b'{"session_id":"s","context":[1,2,3]}'),
        (b"/v1/sessions", b"nothing"),
        (b"/v1/sessions/known/feedback", b'{"position":1,"arm":"a","clicked":true}'),
        (b"/v1/sessions/known/feedback", b'{"position":1,"clicked":"perhaps"}'),
        (b"/v1/sessions/nobody/feedback", b'{"position":1,"arm":"a","clicked":true}'),
    ],
)
def test_both_ways_have_the_same_answers(path, body):
    answers = []
    for headers in (b"", GENERAL):
        with http(Memory()) as client, closing(connect(client)) as connection:
            connection.sendall(post(b"/v1/sessions", b'{"session_id":"known","context":[1,2]}', headers))
            answers.append(answer_to(connection))
            connection.sendall(post(path, body, headers))
            answers.append(answer_to(connection))
    assert answers[:2] == answers[2:]


@pytest.mark.parametrize("headers", [b"", GENERAL])
def test_a_defect_is_answered_500_and_the_connection_goes_on(headers, caplog):
    service = Memory()
    with http(service) as client, closing(connect(client)) as connection:
        service.broken = True
        connection.sendall(arrival(headers, BODY))
        assert answer_to(connection).startswith(b"HTTP/1.1 500 ")
        service.broken = False
        connection.sendall(arrival(headers, BODY))
        assert answer_to(connection).startswith(b"HTTP/1.1 200 ")
    assert "a request failed" in caplog.text


@pytest.mark.parametrize("headers", [b"", GENERAL])
def test_keys_and_their_quota_count_on_both_ways(headers):
    settings = ApiSettings(keys=ApiKeys({"web": Secret(KEY)}), max_sessions_per_key=1)
    with http(Memory(), settings) as client, closing(connect(client)) as connection:
        for given, status in ((b"", 401), (b"no", 401), (KEY.encode(), 200), (KEY.encode(), 429)):
            connection.sendall(arrival(b"Authorization: Bearer %b\r\n%b" % (given, headers), BODY))
            assert answer_to(connection).startswith(b"HTTP/1.1 %d " % status)


def test_requests_are_counted():
    with http(Memory()) as client, closing(connect(client)) as connection:
        connection.sendall(REQUEST)
        answer_to(connection)
        metrics = client.ask("GET", "/metrics")[2]
    assert b'adcascade_http_requests_total{route="arrive",status="200"} 1.0' in metrics


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Held(Memory):
    """Answers arrivals when `release` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def arrive(self, request: ArriveRequest, deadline: float) -> Answer:
        loop = asyncio.get_running_loop()
        self._waiting.append((loop, loop.create_future()))
        self.asked.set()
        await self._waiting[-1][1]
        return await super().arrive(request, deadline)

    def release(self) -> None:
        assert self.asked.wait(10)
        self.asked.clear()
        loop, future = self._waiting.pop()
        loop.call_soon_threadsafe(future.set_result, None)


@pytest.mark.parametrize("cuts", [(5,), (30,), (len(REQUEST) - 5,), (20, 40), (20, 40, len(REQUEST) - 1)])
def test_a_request_may_come_in_parts(cuts):
    with http(Memory()) as client, closing(connect(client)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for start, end in zip((0, *cuts), (*cuts, len(REQUEST)), strict=True):
                connection.sendall(REQUEST[start:end])
                time.sleep(0.02)  # so that it is a part of its own; the answer does not depend on it
            assert answer_to(connection).startswith(b"HTTP/1.1 200 ")


def test_requests_that_a_client_sends_ahead_are_answered_in_their_order():
    service = Held()
    names = [b"s%d" % number for number in range(5)]
    requests = [post(b"/v1/sessions", b'{"session_id":"%b","context":[1,2]}' % name) for name in names]
    with http(service) as client, closing(connect(client)) as connection:
        connection.sendall(requests[0])
        assert service.asked.wait(10)
        connection.sendall(b"".join(requests[1:]))
        got = b""
        for name in names:
            service.release()
            while name not in got:
                got += connection.recv(65_536)
    assert got.count(b"HTTP/1.1 200 OK") == 5


def test_a_connection_is_not_idle_while_its_request_is_answered():
    service = Held()
    with http(service, limited(idle_timeout=0.2)) as client, closing(connect(client)) as connection:
        connection.sendall(REQUEST)
        connection.settimeout(0.6)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        service.release()
        connection.settimeout(10)
        assert answer_to(connection).startswith(b"HTTP/1.1 200 ")
        assert is_closed(connection)


def test_a_server_that_ends_answers_what_it_has_taken():
    service, got = Held(), []

    def ask(client: HttpClient) -> None:
        with closing(connect(client)) as connection:
            connection.sendall(REQUEST)
            got.append(answer_to(connection))

    with http(service) as client:
        asking = threading.Thread(target=ask, args=(client,))
        asking.start()
        assert service.asked.wait(10)
        threading.Timer(0.2, service.release).start()
    asking.join(10)
    assert got[0].startswith(b"HTTP/1.1 200 ")


def test_an_answer_for_a_client_that_has_gone_does_no_harm():
    service: Any = Held()
    with http(service) as client:
        connection = connect(client)
        connection.sendall(REQUEST)
        assert service.asked.wait(10)
        connection.close()
        time.sleep(0.05)
        service.release()
        with closing(connect(client)) as other:
            other.sendall(REQUEST)
            service.release()
            assert answer_to(other).startswith(b"HTTP/1.1 200 ")
