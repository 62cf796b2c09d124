"""The HTTP server."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection

import pytest
from worker.web.server import _MOST_CONNECTIONS, Page, WebServer, operations

from worker.errors import FailedError
from worker.metrics import Metrics


def ask(server: WebServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection(server.host, server.port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@pytest.fixture
def server():
    reasons: list[str] = []
    routes = operations(Metrics().registry, lambda: reasons[0] if reasons else None)
    with WebServer({**routes, "/broken": lambda _: 1 / 0}) as running:  # type: ignore[dict-item,return-value]
        running.reasons = reasons  # type: ignore[attr-defined]
        yield running


def test_metrics_are_served_as_text(server):
    status, headers, body = ask(server, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    assert b"adcascade_arrivals_total 0.0" in body
    assert int(headers["content-length"]) == len(body)


def test_openmetrics_is_served_on_request(server):
    _, headers, body = ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_long_bodies_are_compressed_for_clients_that_accept_it(server):
    _, plain_headers, plain = ask(server, "/metrics")
    _, headers, compressed = ask(server, "/metrics", **{"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain_headers
    assert headers["content-encoding"] == "gzip"
    assert len(compressed) < len(plain)
    assert gzip.decompress(compressed) == plain


def test_a_process_that_is_not_ready_is_alive(server):
    assert ask(server, "/readyz")[::2] == (200, b"ready\n")
    server.reasons.append("recovering 3 partitions")
    assert ask(server, "/readyz")[::2] == (503, b"not ready: recovering 3 partitions\n")
    assert ask(server, "/livez?verbose=1")[::2] == (200, b"alive\n")  # the query is ignored


def test_an_unknown_path_lists_the_routes(server):
    status, _, body = ask(server, "/secret")
    assert status == 404
    assert b"/livez, /metrics, /readyz" in body


def test_head_answers_without_the_body(server):
    status, headers, body = ask(server, "/livez", method="HEAD")
    assert (status, headers["content-length"], body) == (200, "6", b"")
    assert headers["server"].strip() == "adcascade"  # and not the version of Python


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_other_methods_are_refused(server, method):
    assert ask(server, "/metrics", method=method)[0] == 501


def test_a_failing_route_hides_the_details_and_the_others_work(server):
    assert ask(server, "/broken")[::2] == (500, b"failed: ZeroDivisionError\n")
    assert ask(server, "/livez")[0] == 200


def test_slow_and_many_connections_end_and_others_are_answered(monkeypatch):
    monkeypatch.setattr("worker.web.server._REQUEST_TIMEOUT", 1.0)
    threads = threading.active_count()
    with WebServer({"/": lambda _: Page(body=b"hello")}) as server, ExitStack() as stack:
        dripping = [
            stack.enter_context(closing(socket.create_connection((server.host, server.port), timeout=10)))
            for _ in range(3 * _MOST_CONNECTIONS)
        ]
        ended: set[socket.socket] = set()
        began = time.monotonic()
        while len(ended) < len(dripping):
            assert time.monotonic() - began < 20, "they are not ended"
            for connection in dripping:
                with suppress(OSError):
                    connection.send(b"G")  # one byte of a request now and then
            assert ask(server, "/")[2] == b"hello"
            assert threading.active_count() - threads <= _MOST_CONNECTIONS + 5
            ended |= {connection for connection in dripping if is_closed(connection)}
            time.sleep(0.1)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(65_536):  # an answer may come first: this is not a request
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(10)


def test_a_port_that_is_taken_is_a_clear_error(server):
    with pytest.raises(FailedError, match=f"cannot listen on 127.0.0.1:{server.port}: .*choose another port"):
        WebServer({}, port=server.port)


def test_the_port_is_closed_on_exit():
    with WebServer({"/": lambda _: Page(body=b"")}) as running:
        assert ask(running, "/")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        ask(running, "/")
