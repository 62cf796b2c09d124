"""Connections that do harm, on purpose or not: answers go on."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from contextlib import ExitStack, closing, contextmanager

import pytest

from tests.http.running import HttpClient, Memory, http
from worker.http.api import ApiSettings
from worker.http.connections import ConnectionLimits

BODY = b'{"context":[1,2]}'
REQUEST = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
#: Fuzzed requests in one run of the test; the issue asks for a million.
FUZZED = int(os.environ.get("ADCASCADE_FUZZED_REQUESTS", "3000"))


def limited(**limits: float) -> ApiSettings:
    return ApiSettings(connections=ConnectionLimits(**limits))  # type: ignore[arg-type]


def connect(client: HttpClient) -> socket.socket:
    return socket.create_connection((client.host, client.port), timeout=30)


def answers(client: HttpClient) -> bool:
    return client.ask("POST", "/v1/sessions", BODY)[0] == 200


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server closes a connection within its timeout."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


@contextmanager
def open_files(wanted: int):
    """Let this process have so many files, if the system allows it; yield the number that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    try:
        yield max(soft, allowed)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "beginning",
    [b"P", b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n", REQUEST[:-1]],
    ids=["a letter", "some headers", "all but one byte"],
)
def test_a_request_that_does_not_come_in_is_cut_off(beginning):
    with http(Memory(), limited(request_timeout=0.3, idle_timeout=60)) as client, closing(connect(client)) as slow:
        slow.sendall(beginning)
        assert is_closed(slow)
        assert answers(client)


def test_a_request_that_comes_in_a_byte_at_a_time_is_cut_off_all_the_same():
    with http(Memory(), limited(request_timeout=0.5)) as client, closing(connect(client)) as slow:
        slow.settimeout(0.05)
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 30:
                slow.sendall(b"x")
                try:
                    if not slow.recv(1):
                        raise ConnectionError
                except TimeoutError:
                    continue
        assert answers(client)


def test_an_idle_connection_is_closed_after_a_while():
    with http(Memory(), limited(idle_timeout=0.3)) as client, closing(connect(client)) as idle:
        idle.sendall(REQUEST)
        assert b"200 OK" in idle.recv(65_536)
        assert is_closed(idle)


def test_a_client_that_reads_no_answers_is_cut_off():
    with http(Memory(), limited(request_timeout=0.5)) as client, closing(connect(client)) as greedy:
        greedy.settimeout(0.2)
        page = b"GET /v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 60:
                try:
                    greedy.sendall(page)
                except TimeoutError:
                    assert answers(client)
        assert answers(client)


def test_one_connection_too_many_closes_the_one_that_is_idle_for_longest():
    with http(Memory(), limited(max_connections=3)) as client, ExitStack() as stack:
        first, second, third = (stack.enter_context(closing(connect(client))) for _ in range(3))
        for connection in (first, second, third, first):  # now the second is idle for longest
            connection.sendall(REQUEST)
            assert b"200 OK" in connection.recv(65_536)
        assert answers(client)
        assert is_closed(second)
        first.sendall(REQUEST)
        assert b"200 OK" in first.recv(65_536)


def test_where_none_is_idle_the_client_that_has_kept_the_server_waiting_for_longest_makes_room():
    with http(Memory(), limited(max_connections=2, request_timeout=30)) as client, ExitStack() as stack:
        first, second = (stack.enter_context(closing(connect(client))) for _ in range(2))
        first.sendall(b"P")
        second.sendall(REQUEST)
        assert b"200 OK" in second.recv(65_536)
        second.sendall(b"P")
        # If the last byte comes in after the next connection, the second is idle and makes room in place of the first.
        assert answers(client)
        closed = [is_closed(one) for one in _quickly(first, second)]
        assert closed.count(True) == 1


def _quickly(*connections: socket.socket) -> tuple[socket.socket, ...]:
    for connection in connections:
        connection.settimeout(0.5)
    return connections


def test_nothing_of_a_bad_request_is_logged(caplog):
    caplog.set_level("DEBUG")
    with http(Memory()) as client:
        for request in (
            b"POST /secret HTTP/9\r\n\r\n",
            b"GET /livez HTTP/1.1\r\nAuthorization secret\r\n\r\n",
            CHUNKED + b"secret",
        ):
            with closing(connect(client)) as bad:
                bad.sendall(request)
                assert _status(bad) == 400
        client.ask("POST", "/v1/sessions", b"secret", Authorization="Bearer secret")
    assert "secret" not in caplog.text


@pytest.mark.slow
def test_thousands_of_idle_connections_do_not_stop_the_answers():
    with open_files(10_000 * 2 + 300) as files, http(Memory(), limited(max_connections=10_000)) as client:
        count = min(10_000, (files - 300) // 2)  # both ends are in this process
        with ExitStack() as stack:
            idle = [stack.enter_context(closing(connect(client))) for _ in range(count - 1)]
            assert all(answers(client) for _ in range(20))
            idle[0].sendall(REQUEST)
            assert b"200 OK" in idle[0].recv(65_536)


def test_a_body_of_a_hundred_megabytes_is_refused_and_not_kept():
    before = _peak()
    with http(Memory()) as client:
        for head in (b"Content-Length: 104857600\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
            with closing(connect(client)) as large:
                _send_large(large, head)
                assert _status(large) in (413, None)
                assert answers(client)
    assert _peak() - before < 50e6


def _send_large(connection: socket.socket, head: bytes) -> None:
    connection.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n" + head)
    piece = b" " * 65_536
    chunk = b"10000\r\n" + piece + b"\r\n" if b"chunked" in head else piece
    try:
        for _ in range(1_600):
            connection.sendall(chunk)
    except ConnectionError:
        pass  # cut off


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def test_fuzzed_requests_are_answered_with_nothing_worse_than_4xx():
    service, chance = Memory(), random.Random(int(os.environ.get("ADCASCADE_FUZZ_SEED", "1")))
    with http(service, limited(request_timeout=5.0)) as client:
        connection = connect(client)
        for number in range(FUZZED):
            request, is_framed = fuzzed(chance)
            try:
                connection.sendall(request)
                if not is_framed:
                    connection.shutdown(socket.SHUT_WR)  # the server may wait for more of it
                status = _status(connection)
            except ConnectionError:
                status = None
            assert status is None or 200 <= status < 500, (number, status, request)
            if status is None or not is_framed:
                connection.close()
                connection = connect(client)
            if not number % 500:
                assert answers(client)
        connection.close()
        assert answers(client)
        assert not service.broken


def fuzzed(chance: random.Random) -> tuple[bytes, bool]:
    """Return a request that is wrong somewhere, and whether it is clear where it ends."""
    kind = chance.randrange(5)
    if kind == 0:
        return _with_body(_spoilt(chance, BODY), b"/v1/sessions"), True
    if kind == 1:
        feedback = b'{"position":1,"arm":"a","clicked":false,"token":"x"}'
        return _with_body(_spoilt(chance, feedback), b"/v1/sessions/%s/feedback" % _word(chance)), True
    if kind == 2:
        batch = b'{"requests":[{"session_id":"s","context":[1,2]},{"position":1}]}'
        return _with_body(_spoilt(chance, batch), chance.choice((b"/v1/batch/sessions", b"/v1/batch/feedback"))), True
    if kind == 3:
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        return CHUNKED + _spoilt(chance, chunks), False
    return _spoilt(chance, REQUEST), False


def _with_body(body: bytes, path: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)


def _word(chance: random.Random) -> bytes:
    return b"".join(b"%%%02X" % chance.randrange(256) for _ in range(chance.randrange(1, 20)))


def _spoilt(chance: random.Random, text: bytes) -> bytes:
    spoilt = bytearray(text)
    for _ in range(chance.randrange(1, 6)):
        at, act = chance.randrange(len(spoilt) + 1), chance.randrange(3)
        if act == 0:
            spoilt[at:at] = chance.randbytes(chance.randrange(1, 8))
        elif act == 1:
            del spoilt[at : at + chance.randrange(1, 8)]
        else:
            spoilt[at : at + 1] = chance.choice(
                (b"\x00", b'"', b"{", b"]", b"1e999", b"null", b"\xff", b"-", b"[" * 600)
            )
    return bytes(spoilt)


def _status(connection: socket.socket) -> int | None:
    """Read one answer; return its status, or None if the connection is closed or waits for more of the request."""
    connection.settimeout(0.5)
    head = b""
    while b"\r\n\r\n" not in head:
        try:
            received = connection.recv(65_536)
        except (TimeoutError, ConnectionError):
            return None
        if not received:
            return None
        head += received
    return int(head[9:12])
