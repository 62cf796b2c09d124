"""The HTTP interface: its routes, its problems, its keys, its description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import worker
from tests.http.running import SLATE, HttpClient, Memory, http
from worker.errors import InputError
from worker.http.application import problem_in
from worker.http.pages import openapi
from worker.http.problems import PROBLEMS, problem_response
from worker.http.service import UnknownSessionError
from worker.http.settings import ApiKeys, HttpSettings, read_keys
from worker.secret import Secret
from worker.stream.events import DEAD_LETTER_REASONS, MODES, MOST
from worker.stream.session import ENDINGS

KEY, OTHER = "0123456789abcdef-web", "0123456789abcdef-app"
DESCRIBED = Path(__file__).parents[2] / "schemas" / "openapi.json"


@pytest.fixture(scope="module")
def service():
    return Memory()


@pytest.fixture(scope="module")
def client(service):
    with http(service) as running:
        yield running


@pytest.fixture(scope="module")
def guarded():
    keys = ApiKeys({"web": Secret(KEY), "app": Secret(OTHER)})
    with http(Memory(), HttpSettings(keys=keys, max_sessions_per_key=3)) as running:
        yield running


def conforms(document: Any, name: str) -> bool:
    """Return whether a document is what the description says."""
    described = openapi()
    schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    Draft202012Validator(schema).validate(document)
    return True


def test_a_cascade_ends_with_a_click(client):
    status, first = client.json("POST", "/v1/sessions", {"session_id": "one", "context": [1, 2]})
    assert (status, first["position"], first["arm"]) == (200, 1, "a")
    assert conforms(first, "Answer")
    status, second = client.json("POST", "/v1/sessions/one/feedback", {"position": 1, "arm": "a", "clicked": False})
    assert (status, second["position"], second["arm"]) == (200, 2, "b")
    assert client.json("GET", "/v1/sessions/one") == (200, second)
    status, end = client.json("POST", "/v1/sessions/one/feedback", {"position": 2, "arm": "b", "clicked": True})
    assert (status, end) == (200, {"session_id": "one", "ended": "clicked"})
    assert conforms(end, "Answer")


def test_the_figures_of_all_ads_are_answered(client, guarded):
    status, figures = client.json("GET", "/v1/arms")
    assert (status, figures["sessions"], [ad["arm"] for ad in figures["arms"]]) == (200, 0, list(SLATE))
    assert conforms(figures, "Arms")
    assert guarded.json("GET", "/v1/arms")[0] == 401


def test_a_session_without_an_id_gets_a_new_one(client):
    ids = {client.json("POST", "/v1/sessions", {"context": [1, 2]})[1]["session_id"] for _ in range(3)}
    assert len(ids) == 3
    assert client.json("GET", f"/v1/sessions/{ids.pop()}")[0] == 200


def test_a_session_id_may_have_any_printable_character(client):
    status, answer = client.json("POST", "/v1/sessions", {"session_id": "a/b?ü", "context": [1, 2]})
    assert (status, answer["session_id"]) == (200, "a/b?ü")
    status, answer = client.json("GET", "/v1/sessions/a%2Fb%3F%C3%BC?query=1")
    assert (status, answer["session_id"]) == (200, "a/b?ü")


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/sessions", b"{", 400, "undecodable"),
        ("/v1/sessions", b"\xff\xfe", 400, "undecodable"),
        ("/v1/sessions", b"", 400, "undecodable"),
        ("/v1/sessions", b'{"context":' + b"[" * 60_000, 400, "undecodable"),
        ("/v1/sessions", b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b',"context":[1,2]}', 400, "undecodable"),
        ("/v1/sessions", [1], 400, "invalid"),
        ("/v1/sessions", {"session_id": "s"}, 400, "invalid"),
        ("/v1/sessions", {"session_id": 5, "context": [1, 2]}, 400, "invalid"),
        ("/v1/sessions", {"session_id": "", "context": [1, 2]}, 400, "invalid"),
        ("/v1/sessions", {"context": "no"}, 400, "invalid"),
        ("/v1/sessions", {"context": [1]}, 400, "dimension"),
        ("/v1/sessions", {"context": [1e9, 0]}, 400, "norm"),
        ("/v1/sessions", {"context": [1, 2], "occurred_at": 1}, 400, "past"),
        ("/v1/sessions", {"context": [1, 2], "occurred_at": 2_000_000_000_000}, 400, "future"),
        ("/v1/sessions", {"context": [1, 2], "exclude": ["a"] * 1000}, 400, "invalid"),
        ("/v1/sessions/%FF/feedback", {}, 400, "invalid"),
        ("/v1/sessions/x/feedback", {}, 400, "invalid"),
        ("/v1/sessions/x/feedback", {"position": 9, "arm": "a", "clicked": True}, 400, "position"),
        ("/v1/sessions/x/feedback", {"position": 1, "arm": "a", "clicked": True}, 404, "unknown-session"),
        ("/v1/nothing", {}, 404, "not-found"),
        ("/v1/sessions/", {}, 404, "not-found"),
        ("/v1/sessions/a/b/feedback", {}, 404, "not-found"),
        ("/metrics", {}, 405, "method"),
    ],
)
def test_a_mistake_of_the_client_is_a_problem_with_a_reason(client, path, body, status, reason):
    got, headers, answer = client.ask("POST", path, body)
    problem = json.loads(answer)
    assert (got, problem["status"], problem["reason"]) == (status, status, reason)
    assert headers["content-type"] == "application/problem+json"
    assert conforms(problem, "Problem")


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        (
            "/v1/sessions",
            {"sesion_id": "s", "context": [1, 2]},
            "'sesion_id' is not a field of this request; did",
        ),
        ("/v1/sessions", {"utm": 1, "sessionId": "s", "context": [1, 2]}, "did you mean session_id?"),
        ("/v1/sessions", {"session_id": "s", "contxt": [1, 2]}, "did you mean context?"),
        ("/v1/sessions/x/feedback", {"position": 1, "arm": "a", "click": True}, "did you mean clicked?"),
        ("/v1/sessions/x/feedback", {"positon": 1, "arm": "a", "clicked": True}, "did you mean position?"),
        ("/v1/sessions/x/feedback", {"utm": 1, "arm": "a", "clicked": True}, "missing required field `position`"),
        ("/v1/sessions", {"utm": 1, "session_id": 5, "context": [1, 2]}, "Expected `str | null`, got `int`"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_one_that_is_missing(client, path, body, detail):
    status, problem = client.json("POST", path, body)
    assert (status, problem["reason"]) == (400, "invalid")
    assert detail in problem["detail"]


def test_other_fields_are_ignored(client):
    body = {"session_id": "more", "context": [1, 2], "contexts": 5, "utm_source": "mail"}
    decision = client.json("POST", "/v1/sessions", body)[1]
    body = {**decision, "clicked": False, "sessionId": "more"}  # a client may send back what it got
    assert client.json("POST", "/v1/sessions/more/feedback", body)[1]["position"] == 2


def test_a_session_that_is_over_is_another_problem_than_one_that_never_was():
    answer = problem_response(problem_in(UnknownSessionError("2 s too late", over=True)))
    problem = json.loads(answer.body)
    assert (answer.status, problem["reason"]) == (410, "session-over")
    assert conforms(problem, "Problem")


def test_an_example_of_a_context_needs_a_key_and_the_page_that_shows_it_does_not(guarded):
    assert guarded.ask("GET", "/v1/")[0] == 200
    assert guarded.ask("GET", "/v1/example.json")[0] == 401
    assert guarded.json("GET", "/v1/example.json", Authorization=f"Bearer {KEY}") == (200, [0, 0])


def test_a_whole_number_may_be_written_as_a_float(client):
    client.json("POST", "/v1/sessions", {"session_id": "float", "context": [1, 2], "occurred_at": 1.7e12})
    body = {"position": 1.0, "arm": "a", "clicked": False, "token": None, "occurred_at": None}
    assert client.json("POST", "/v1/sessions/float/feedback", body)[1]["position"] == 2


def test_every_reason_of_a_dead_letter_is_a_problem():
    assert set(DEAD_LETTER_REASONS) <= set(PROBLEMS)
    assert all(400 <= PROBLEMS[reason].status < 500 for reason in DEAD_LETTER_REASONS)


def test_a_request_that_cannot_be_taken_may_be_sent_again_soon(client):
    body = {"session_id": "unavailable", "context": [1, 2]}
    status, headers, _ = client.ask("POST", "/v1/sessions", body)
    assert (status, headers["retry-after"]) == (503, "1")


def test_fallback_ads_are_marked_and_counted():
    service = Memory()
    service.slow = True
    with http(service) as client:
        answer = client.json("POST", "/v1/sessions", {"context": [1, 2]})[1]
        assert answer["fallback"] is True
        assert conforms(answer, "Answer")
        assert b"adcascade_http_fallbacks_total 1.0" in client.ask("GET", "/metrics")[2]


def test_a_defect_is_reported_without_details_and_does_not_end_the_server(caplog):
    service = Memory()
    service.broken = True
    with http(service) as client:
        status, problem = client.json("POST", "/v1/sessions", {"context": [1, 2]})
        assert (status, problem["reason"]) == (500, "internal")
        assert "defect" not in json.dumps(problem)
        service.broken = False
        assert client.json("POST", "/v1/sessions", {"context": [1, 2]})[0] == 200


def test_health_follows_the_service(client, service):
    assert client.ask("GET", "/readyz")[::2] == (200, b"ready\n")
    service.why_not = "it starts"
    try:
        assert client.ask("GET", "/readyz")[::2] == (503, b"not ready: it starts\n")
        assert client.ask("GET", "/livez?verbose=1")[::2] == (200, b"alive\n")  # the query is ignored
    finally:
        service.why_not = None


def test_requests_are_counted_by_route_and_status(client):
    assert client.json("GET", "/v1/sessions/nobody")[1]["reason"] == "unknown-session"
    text = client.ask("GET", "/metrics")[2].decode()
    assert 'adcascade_http_requests_total{route="session",status="404"}' in text
    assert "adcascade_http_connections 1.0" in text


# ── limits on bodies ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_compressed_body_is_refused(client):
    status, problem = client.json("POST", "/v1/sessions", b"x", Content_Encoding="gzip")
    assert (status, problem["reason"]) == (415, "encoding")


def test_a_client_that_asks_whether_to_send_its_body_is_told_to_continue(client):
    body = {"session_id": "expects", "context": [1, 2]}
    status, answer = client.json("POST", "/v1/sessions", body, Expect="100-continue")
    assert (status, answer["session_id"]) == (200, "expects")


# ── other websites ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_that_another_website_makes_a_browser_send_are_refused(client):
    body = {"session_id": "origin", "context": [1, 2]}
    here = f"{client.host}:{client.port}"
    for origin in ("https://elsewhere.example", "null", "http://["):
        assert client.json("POST", "/v1/sessions", body, Origin=origin)[1]["reason"] == "origin"
        assert client.json("GET", "/metrics", Origin=origin)[0] == 403
    assert client.json("POST", "/v1/sessions", body, Origin=f"http://{here}")[0] == 200


@pytest.mark.parametrize("host", ["rebound.example", "rebound.example:8080", "localhost.example", "[", ""])
def test_without_keys_a_website_cannot_reach_the_server_through_a_name_of_its_own(client, host):
    for method, path in (("POST", "/v1/sessions"), ("GET", "/"), ("GET", "/readyz")):
        status, problem = client.json(method, path, b"{}", Host=host, Origin=f"http://{host}")
        assert (status, problem["reason"]) == (403, "host")
        assert "--allow-host" in problem["detail"]


@pytest.mark.parametrize("host", ["localhost:8080", "LOCALHOST", "ads.localhost", "127.0.0.1", "[::1]:80", "10.0.0.5"])
def test_without_keys_this_machine_and_addresses_are_answered(client, host):
    assert client.ask("GET", "/livez", Host=host)[0] == 200


def test_names_that_are_allowed_are_answered_and_with_keys_all_are(guarded):
    with http(Memory(), HttpSettings(allowed_hosts=("Ads.example",))) as client:
        assert client.ask("GET", "/metrics", Host="ads.example:443")[0] == 200
        assert client.ask("GET", "/metrics", Host="other.example")[0] == 403
    assert guarded.ask("GET", "/metrics", Host="other.example", Authorization=f"Bearer {KEY}")[0] == 200


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xff"])
def test_without_a_valid_key_nothing_is_answered(guarded, header):
    headers = {} if header is None else {"Authorization": header}
    for method, path in (("POST", "/v1/sessions"), ("GET", "/metrics"), ("GET", "/v1/sessions/x")):
        status, got, answer = guarded.ask(method, path, {"context": [1, 2]} if method == "POST" else None, **headers)
        assert (status, json.loads(answer)["reason"]) == (401, "unauthorized")
        assert got["www-authenticate"].startswith("Bearer")


def test_a_key_is_accepted_as_a_bearer_token_or_as_a_password(guarded: HttpClient):
    from base64 import b64encode

    basic = "Basic " + b64encode(f"anybody:{KEY}".encode()).decode()
    for header in (f"Bearer {KEY}", f"bearer  {OTHER}", basic):
        assert guarded.ask("GET", "/metrics", Authorization=header)[0] == 200


def test_health_and_description_need_no_key(guarded):
    for path in ("/livez", "/readyz", "/v1/openapi.json", "/v1/", "/v1/try.js", "/v1/try.css"):
        assert guarded.ask("GET", path)[0] == 200


def test_each_key_may_open_a_number_of_sessions_a_minute(guarded):
    def arrive(key: str) -> tuple[int, dict[str, str], bytes]:
        return guarded.ask("POST", "/v1/sessions", {"context": [1, 2]}, Authorization=f"Bearer {key}")

    assert [arrive(OTHER)[0] for _ in range(3)] == [200] * 3
    status, headers, answer = arrive(OTHER)
    assert (status, json.loads(answer)["reason"]) == (429, "too-many-sessions")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert arrive(KEY)[0] == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "web\n",
        "web short\n",
        f"web {KEY} more\n",
        f"web {KEY}\nweb {OTHER}\n",
        "w kéy-0123456789abcdef",
    ],
)
def test_a_file_of_keys_that_will_not_do_is_refused_without_showing_any(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_keys(str(file))
    assert KEY not in str(caught.value)
    assert "0123456789" not in str(caught.value)


def test_keys_do_not_show_themselves(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# the shop\nweb {KEY}\n\napp   {OTHER}\n", encoding="utf-8")
    keys = read_keys(str(file))
    assert list(keys) == ["web", "app"]
    assert KEY not in repr(keys) + repr(vars(ApiKeys(keys)))


# ── the description ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_description_in_the_schemas_is_the_one_that_is_served_and_has_the_names_of_the_code(client):
    served = client.json("GET", "/v1/openapi.json")[1]
    assert served == openapi()
    assert served["info"]["version"] == worker.__version__
    assert served["components"] == json.loads(DESCRIBED.read_text(encoding="utf-8"))["components"]
    schemas = served["components"]["schemas"]
    assert schemas["Problem"]["properties"]["reason"]["enum"] == sorted(PROBLEMS)
    assert schemas["Decision"]["properties"]["mode"]["enum"] == list(MODES)
    assert schemas["Ended"]["properties"]["ended"]["enum"] == list(ENDINGS)
    assert schemas["Arrive"]["properties"]["occurred_at"]["maximum"] == MOST


def test_every_described_route_is_there_and_takes_only_the_described_method(client):
    for path, item in openapi()["paths"].items():
        methods = {method.upper() for method in item} & {"GET", "POST", "PUT", "DELETE", "PATCH"}
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            status = client.ask(method, path.replace("{session_id}", "described"), b"{}" if method != "GET" else None)[
                0
            ]
            assert (status == 405) == (method not in methods), (method, path)


def test_the_schemas_of_the_description_are_schemas():
    for schema in openapi()["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_the_page_to_try_it_out_loads_nothing_from_elsewhere(client):
    status, headers, page = client.ask("GET", "/v1/")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    script = client.ask("GET", "/v1/try.js")[2]
    for text in (page, script, client.ask("GET", "/v1/try.css")[2]):
        assert b"http://" not in text
        assert b"https://" not in text


def test_limits_are_those_of_the_settings():
    with http(Memory(), HttpSettings(max_record_bytes=30)) as client:
        assert client.ask("POST", "/v1/sessions", {"context": [1, 2]})[0] == 200
        assert client.ask("POST", "/v1/sessions", {"context": [1, 2], "session_id": "long"})[0] == 413
