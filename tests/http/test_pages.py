"""Pages, metrics and health, from a server in a thread as a worker has it."""

from __future__ import annotations

import gzip
from urllib.parse import urlsplit

import pytest

from tests.http.running import HttpClient
from worker.errors import FailedError
from worker.http.pages import Page, operations
from worker.http.server import WebServer
from worker.metrics.observer import Metrics

HELLO = {"/": lambda _: Page(body=b"hello")}


@pytest.fixture(scope="module")
def client():
    routes = operations(Metrics().registry, lambda: None)
    with WebServer({**routes, "/broken": lambda _: 1 / 0}) as running:  # type: ignore[dict-item,return-value]
        yield HttpClient(running.url)


def test_metrics_are_served_as_text(client):
    status, headers, body = client.ask("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    assert b"adcascade_arrivals_total 0.0" in body
    assert int(headers["content-length"]) == len(body)


def test_openmetrics_is_served_on_request(client):
    _, headers, body = client.ask("GET", "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_long_bodies_are_compressed_for_clients_that_accept_it(client):
    _, plain_headers, plain = client.ask("GET", "/metrics")
    _, headers, compressed = client.ask("GET", "/metrics", Accept_Encoding="gzip")
    assert "content-encoding" not in plain_headers
    assert headers["content-encoding"] == "gzip"
    assert len(compressed) < len(plain)
    assert gzip.decompress(compressed) == plain


def test_head_answers_without_the_body(client):
    status, headers, body = client.ask("HEAD", "/livez")
    assert (status, headers["content-length"], body) == (200, "6", b"")
    assert headers["server"] == "adcascade"  # and not the version of Python


def test_a_failing_page_hides_the_details_and_the_others_work(client):
    assert client.json("GET", "/broken")[1] == {
        "type": "urn:adcascade:internal",
        "title": "The server has failed to handle this request.",
        "status": 500,
        "reason": "internal",
    }
    assert client.ask("GET", "/livez")[0] == 200


def test_on_loopback_pages_are_for_this_machine_only(client):
    assert client.json("GET", "/metrics", Host="rebound.example")[1]["reason"] == "host"
    with WebServer(HELLO, host="0.0.0.0") as everywhere:
        other = HttpClient(f"http://127.0.0.1:{urlsplit(everywhere.url).port}")
        assert other.ask("GET", "/", Host="worker.example")[2] == b"hello"


def test_a_port_that_is_taken_is_a_clear_error(client):
    expected = f"cannot listen on 127.0.0.1:{client.port}: .*choose another port"
    with pytest.raises(FailedError, match=expected), WebServer({}, port=client.port):
        pass


def test_the_port_is_closed_on_exit():
    with WebServer(HELLO) as running:
        assert HttpClient(running.url).ask("GET", "/")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        HttpClient(running.url).ask("GET", "/")
