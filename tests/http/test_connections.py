"""Connections that do harm, on purpose or not: answers go on."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest

from tests.http.running import Held, HttpClient, Memory, answer_to, connect, http, is_closed
from worker.http.settings import HttpSettings

BODY = b'{"context":[1,2]}'
REQUEST = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
PAGE = b"GET /v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
#: Fuzzed requests in one run of the test; the issue asks for a million.
FUZZED = int(os.environ.get("ADCASCADE_FUZZED_REQUESTS", "3000"))


def answers(client: HttpClient) -> bool:
    return client.ask("POST", "/v1/sessions", BODY)[0] == 200


@pytest.mark.parametrize(
    "beginning",
    [b"P", b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n", REQUEST[:-1]],
    ids=["a letter", "some headers", "all but one byte"],
)
def test_a_request_that_does_not_come_in_is_cut_off(beginning):
    with http(Memory(), HttpSettings(request_timeout=1.0)) as client, closing(connect(client)) as slow:
        slow.sendall(beginning)
        assert is_closed(slow)
        assert answers(client)


@pytest.mark.parametrize("piece", [b"x", PAGE * 100], ids=["a byte at a time", "reads no answers"])
def test_a_client_that_never_comes_to_an_end_is_cut_off(piece):
    with http(Memory(), HttpSettings(request_timeout=1.0)) as client, closing(connect(client)) as bad:
        bad.settimeout(0.1)
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 300:
                try:
                    bad.sendall(piece)
                    if len(piece) == 1 and not bad.recv(1):
                        raise ConnectionError
                except TimeoutError:
                    assert answers(client)
        assert answers(client)


def test_one_connection_too_many_closes_the_one_that_is_idle_for_longest():
    with http(Memory(), HttpSettings(max_connections=3)) as client, ExitStack() as stack:
        first, second, third = (stack.enter_context(closing(connect(client))) for _ in range(3))
        for connection in (first, second, third, first):  # now the second is idle for longest
            connection.sendall(REQUEST)
            assert b"200 OK" in connection.recv(65_536)
        assert answers(client)
        assert is_closed(second)
        first.sendall(REQUEST)
        assert b"200 OK" in first.recv(65_536)


def test_a_client_that_only_keeps_the_server_waiting_makes_room_for_others():
    with http(Memory(), HttpSettings(max_connections=2, request_timeout=30)) as client, ExitStack() as stack:
        slow, quick = (stack.enter_context(closing(connect(client))) for _ in range(2))
        slow.sendall(b"P")
        quick.sendall(REQUEST)
        assert answer_to(quick)[0] == 200
        assert answers(client)
        assert is_closed(slow)
        quick.sendall(REQUEST)
        assert answer_to(quick)[0] == 200


def test_a_connection_whose_request_is_being_answered_is_not_closed():
    service = Held()
    with http(service, HttpSettings(max_connections=1, request_timeout=0.2)) as client, ExitStack() as stack:
        connection = stack.enter_context(closing(connect(client)))
        connection.sendall(REQUEST)
        assert service.asked.wait(120)
        connection.settimeout(0.6)
        with pytest.raises(TimeoutError):  # not for being slow either
            connection.recv(1)
        assert is_closed(stack.enter_context(closing(connect(client))))
        service.release()
        connection.settimeout(120)
        assert answer_to(connection)[0] == 200


# ── what is not HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "request_",
    [
        b"secret\r\n\r\n",
        b"\x16\x03\x01\x02\x00secret\r\n\r\n",  # TLS
        b"POST /secret HTTP/9\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nAuthorization Bearer secret\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\nX: %b\r\n\r\n" % (b"x" * 9_000),
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: secret\r\n\r\n",
        CHUNKED + b"secret\r\n",
        b"POST /v1/sessions HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nHost: secret\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["word", "TLS", "version", "no colon", "long header", "length", "chunk", "no host", "two hosts"],
)
def test_what_is_not_http_is_answered_with_a_problem_and_neither_shown_nor_logged(request_, caplog):
    caplog.set_level("DEBUG")
    with http(Memory()) as client, closing(connect(client)) as bad:
        bad.sendall(request_)
        status, headers, body = answer_to(bad)
        client.ask("POST", "/v1/sessions", b"secret", Authorization="Bearer secret")
    assert (status, headers["content-type"], headers["server"]) == (400, "application/problem+json", "adcascade")
    assert json.loads(body)["reason"] == "unreadable"
    assert b"secret" not in body
    assert "secret" not in caplog.text


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_ends_answers_what_it_has_received():
    service, got = Held(), []

    def ask(client: HttpClient) -> None:
        with closing(connect(client)) as connection:
            connection.sendall(REQUEST)
            got.append(answer_to(connection)[0])

    with http(service) as client:
        asking = threading.Thread(target=ask, args=(client,))
        asking.start()
        assert service.asked.wait(120)
        threading.Timer(0.2, service.release).start()
    asking.join(120)
    assert got == [200]


def test_an_answer_for_a_client_that_has_gone_does_no_harm():
    service = Held()
    with http(service) as client:
        with closing(connect(client)) as connection:
            connection.sendall(REQUEST)
            assert service.asked.wait(120)
        service.release()
        with closing(connect(client)) as other:
            other.sendall(REQUEST)
            service.release()
            assert answer_to(other)[0] == 200


@pytest.mark.parametrize("request_", [PAGE * 2_000, REQUEST[:-1]], ids=["does not read", "does not send"])
def test_clients_that_keep_the_server_waiting_do_not_hold_up_its_end(request_, monkeypatch):
    monkeypatch.setattr("worker.http.connections.END_PATIENCE", 3_600.0)  # it would not end before
    with ExitStack() as after, http(Memory(), HttpSettings(request_timeout=3_600.0)) as client:
        bad = after.enter_context(closing(connect(client)))
        bad.settimeout(0.2)
        with suppress(TimeoutError):
            bad.sendall(request_)
        while served(client) + 1 < served(client):  # until the server waits for this client
            time.sleep(0.05)


def served(client: HttpClient) -> int:
    """Return how many pages were served before this one."""
    text = client.ask("GET", "/metrics")[2].decode()
    counts = re.findall(r'requests_total{route="other",status="200"} (\d+)', text)
    return int(counts[0]) if counts else 0


# ── many, large and wrong requests ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
def test_ten_thousand_idle_connections_do_not_stop_the_answers():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = 10_000 if hard == resource.RLIM_INFINITY else min(10_000, (hard - 300) // 2)  # both ends are here
    with http(Memory(), HttpSettings(max_connections=10_000)) as client, ExitStack() as stack:
        idle = [stack.enter_context(closing(connect(client))) for _ in range(count - 1)]
        assert all(answers(client) for _ in range(20))
        idle[0].sendall(REQUEST)
        assert b"200 OK" in idle[0].recv(65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
    with http(service, HttpSettings(request_timeout=5.0)) as client:
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
    kind = chance.randrange(4)
    if kind == 0:
        return _with_body(_spoilt(chance, BODY), b"/v1/sessions"), True
    if kind == 1:
        feedback = b'{"position":1,"arm":"a","clicked":false,"token":"x"}'
        return _with_body(_spoilt(chance, feedback), b"/v1/sessions/%s/feedback" % _word(chance)), True
    if kind == 2:
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
