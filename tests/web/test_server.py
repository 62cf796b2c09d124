"""The web server beside the work."""

from __future__ import annotations

import gzip
from http.client import HTTPConnection

import pytest

from worker.errors import FailedError
from worker.metrics import Metrics
from worker.web.server import Page, WebServer, operations


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


def test_metrics_are_told_as_text(server):
    status, headers, body = ask(server, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    assert b"adcascade_arrivals_total 0.0" in body
    assert int(headers["content-length"]) == len(body)


def test_a_scraper_that_asks_for_openmetrics_gets_it(server):
    _, headers, body = ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_what_is_long_is_packed_for_those_who_understand_it(server):
    _, plain_headers, plain = ask(server, "/metrics")
    _, headers, packed = ask(server, "/metrics", **{"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain_headers
    assert headers["content-encoding"] == "gzip"
    assert len(packed) < len(plain)
    assert gzip.decompress(packed) == plain


def test_it_is_alive_also_while_it_is_not_ready(server):
    assert ask(server, "/readyz")[::2] == (200, b"ready\n")
    server.reasons.append("recovering 3 partitions")
    assert ask(server, "/readyz")[::2] == (503, b"not ready: recovering 3 partitions\n")
    assert ask(server, "/livez")[::2] == (200, b"alive\n")


def test_a_question_after_the_path_is_ignored(server):
    assert ask(server, "/livez?verbose=1")[0] == 200


def test_an_unknown_path_is_told_what_there_is(server):
    status, _, body = ask(server, "/secret")
    assert status == 404
    assert b"/livez, /metrics, /readyz" in body


def test_head_says_the_same_without_the_content(server):
    status, headers, body = ask(server, "/livez", method="HEAD")
    assert (status, headers["content-length"], body) == (200, "6", b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(server, method):
    assert ask(server, "/metrics", method=method)[0] == 501


def test_a_page_that_fails_says_so_without_details_and_the_others_go_on(server):
    assert ask(server, "/broken")[::2] == (500, b"failed: ZeroDivisionError\n")
    assert ask(server, "/livez")[0] == 200


def test_nobody_is_told_what_it_runs_on(server):
    assert ask(server, "/livez")[1]["server"].strip() == "adcascade"


def test_a_port_that_is_taken_is_a_clear_error(server):
    with pytest.raises(FailedError, match=f"cannot listen on 127.0.0.1:{server.port}: .*choose another port"):
        WebServer({}, port=server.port)


def test_it_stops_listening_when_it_is_left():
    with WebServer({"/": lambda _: Page(body=b"")}) as running:
        assert ask(running, "/")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        ask(running, "/")


def test_by_default_only_this_machine_is_answered():
    with WebServer({}) as running:
        assert running.host == "127.0.0.1"
        assert running.url == f"http://127.0.0.1:{running.port}"
