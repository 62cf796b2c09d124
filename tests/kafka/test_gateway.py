"""`adcascade gateway` in front of real workers on the real broker."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.kafka.conftest import OwnBroker
from tests.kafka.fleet import Fleet, Running
from tests.programs import eventually

pytestmark = pytest.mark.slow

CONTEXT = [0.1, -0.2, 0.3, 0.4, 0.5]


class Gateway(Running):
    """One `adcascade gateway`, with a long deadline unless a test gives another."""

    def __init__(self, fleet: Fleet, *arguments: str, **variables: str) -> None:
        log = fleet.folder / f"gateway-{uuid.uuid4().hex[:8]}.log"
        command = ("gateway", *fleet.flags, "--port", "0", "--deadline", "60s", *arguments)
        super().__init__(log, *command, **variables)
        eventually(lambda: self.url and self.ready, what="the gateway is ready")

    def json(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data, headers), timeout=300) as answer:
                return answer.status, json.loads(answer.read())
        except HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def arrive(self, session_id: str, **more: Any) -> dict[str, Any]:
        status, answer = self.json("/v1/sessions", {"session_id": session_id, "context": CONTEXT, **more})
        assert status == 200, answer
        return answer

    def feedback(self, shown: dict[str, Any], *, clicked: bool) -> dict[str, Any]:
        """Report the ad of an answer."""
        body = {"position": shown["position"], "arm": shown["arm"], "clicked": clicked}
        body |= {"token": shown["tokens"][0]} if "tokens" in shown else {}
        status, answer = self.json(f"/v1/sessions/{shown['session_id']}/feedback", body)
        assert status == 200, answer
        return answer


@pytest.fixture(scope="module")
def pair(served: Fleet) -> Iterator[tuple[Gateway, Gateway]]:
    """Two gateways of the same topics."""
    both = Gateway(served), Gateway(served)
    yield both
    for gateway in both:
        gateway.close()


def test_a_session_is_opened_at_one_gateway_goes_on_at_another_and_every_display_counts(
    served: Fleet, pair: tuple[Gateway, Gateway]
) -> None:
    here, there = pair
    first = here.arrive("both")
    assert (first["position"], len(first["tokens"])) == (1, 3)
    eventually(lambda: there.json("/v1/sessions/both") == (200, first), what="the other knows the decision")
    assert there.arrive("both") == first
    second = there.feedback(first, clicked=False)
    assert (second["position"], second["arm"]) == (2, first["slate"][1])
    eventually(lambda: here.json("/v1/sessions/both") == (200, second), what="both know the decision")
    assert here.feedback(second, clicked=True) == {"session_id": "both", "ended": "clicked"}
    wanted = {(1, first["arm"], False), (2, second["arm"], True)}
    eventually(lambda: served.displays("both") == wanted, what="both displays are in the journal")
    assert b"both" not in served.dead_keys()


def test_the_same_arrival_at_many_gateways_at_once_is_one_session(served: Fleet, pair: tuple[Gateway, Gateway]) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: pair[number % 2].arrive("at-once"), range(8)))
    assert all(answer == answers[0] for answer in answers)
    opened = [fact for fact in served.facts() if b'"at-once"' in fact]
    assert len(opened) == 1


def test_without_an_answer_at_the_deadline_fallback_ads_are_marked_and_the_same_request_gets_the_decision_later(
    fleet: Fleet,
) -> None:
    worker = fleet.serving("--dim", "5")
    with closing(Gateway(fleet, "--deadline", "50ms")) as gateway:
        worker.pause()
        answer = gateway.arrive("slow")
        assert (answer["fallback"], answer["mode"], answer["arm"]) == (True, "fallback", "ad-0")
        status, problem = gateway.json("/v1/sessions/slow/feedback", {"position": 1, "arm": "ad-0", "clicked": True})
        assert (status, problem["reason"]) == (409, "arm-mismatch")
        worker.resume()
        answer = eventually(
            lambda: None if (again := gateway.arrive("slow")).get("fallback") else again, what="the decision comes"
        )
        assert answer["position"] == 1
        assert gateway.metric("adcascade_http_fallbacks_total") >= 1
        assert gateway.metric("adcascade_gateway_late_decisions_total") == 1
        assert not fleet.dead_keys()


def test_it_needs_a_key_where_keys_are_given_and_shows_none(served: Fleet, tmp_path: Path) -> None:
    key = "0123456789abcdef-shop"
    (keys := tmp_path / "keys").write_text(f"shop {key}\n", encoding="utf-8")
    options = ("--api-keys", str(keys), "--log-level", "debug", "--max-sessions-per-key", "1")
    with closing(Gateway(served, *options)) as gateway:
        given = [{}, {"Authorization": f"Bearer {key}x"}, *[{"Authorization": f"Bearer {key}"}] * 2]
        answers = [gateway.json("/v1/sessions", {"context": CONTEXT}, **headers)[0] for headers in given]
        assert answers == [401, 401, 200, 429]
        assert [gateway.ask(path)[0] for path in ("/readyz", "/livez", "/metrics")] == [200, 200, 401]
        assert key not in gateway.text


def test_while_the_broker_is_away_fallback_ads_are_answered_and_afterwards_decisions_again(
    own_broker: OwnBroker, tmp_path: Path
) -> None:
    # A restart in good order; the client that gateways use is tested with a killed broker (test_client.py).
    with closing(Fleet(own_broker.address, f"b{uuid.uuid4().hex[:8]}", tmp_path)) as fleet:
        fleet.serving("--dim", "5")
        with closing(Gateway(fleet, "--deadline", "50ms")) as gateway:
            own_broker.stop()
            assert gateway.arrive("away")["fallback"]
            eventually(lambda: gateway.ask("/readyz")[0] == 503, what="it is not ready")
            assert own_broker.address in gateway.ask("/readyz")[1]
            own_broker.start()
            for name in ("away", "afterwards"):
                eventually(lambda name=name: "fallback" not in gateway.arrive(name), what="it decides again")  # type: ignore[misc]
            eventually(lambda: gateway.ready, what="it is ready again")


def test_a_signal_ends_it_in_good_order(pair: tuple[Gateway, Gateway]) -> None:
    for gateway, sent in zip(pair, (signal.SIGINT, signal.SIGTERM), strict=True):
        gateway.arrive(f"before-{sent.name}")
        assert gateway.terminate(sent) == 0, gateway.tail()
        assert "Traceback" not in gateway.text
