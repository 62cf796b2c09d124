"""`adcascade bench http --gateway`, without a broker: its figures, and the sessions that its client plays."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.http.running import Memory, http
from worker.bench.http import gateway, sessions
from worker.bench.http.sessions import Played
from worker.cli.main import main


def played(wait: float, **more: int) -> Played:
    counts = {"sessions": 2, "failed": 0, "fallbacks": 0, **more}
    return Played(arrivals=[wait, wait], feedback=[wait / 2], **counts)


def test_the_gateway_is_compared_with_kafka_round_by_round() -> None:
    own = [np.array([wait]) for wait in (2.0, 10.0, 3.0)]
    found = {one.name: one for one in gateway.figures(own, [played(3.0), played(11.5), played(9.0, failed=1)])}
    assert len(found) == gateway.FIGURES
    assert found["Kafka's own, at 200 sessions/s"].value == pytest.approx(3.0)
    assert found["gateway − Kafka's own"].value == pytest.approx(1.5)
    assert found["gateway, feedback, at 200 sessions/s"].value == pytest.approx(4.5)
    assert found["failed or fallback answers"].value == 1


def test_the_client_plays_whole_sessions(monkeypatch) -> None:
    monkeypatch.setattr(sessions, "WARM", 0.0)
    monkeypatch.setattr(sessions, "LOOK", 0.01)
    monkeypatch.setattr(sessions, "DIM", 2)
    service = Memory()
    with http(service) as client:
        seen = asyncio.run(sessions.play(f"http://{client.host}:{client.port}", 0.2, 200))
    assert seen.sessions == len(seen.arrivals) == len(service.sessions) > 20
    assert (seen.failed, seen.fallbacks) == (0, 0)
    assert not any(session.is_open for session in service.sessions.values())


def test_a_broker_is_only_for_the_gateway(capsys) -> None:
    assert main(["bench", "http", "--broker", "127.0.0.1:9092"]) == 2
    assert "--gateway" in capsys.readouterr().err
