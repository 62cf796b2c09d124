"""Security on a broker with access rules: the rights that a worker needs, its secrets, and refusals."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from tests.embedded.traffic import SECOND, START, Sent, arrivals
from tests.kafka.fleet import ROOT, Fleet
from tests.kafka.guarded import Guarded, guarded_broker
from tests.kafka.test_gateway import Gateway
from tests.programs import eventually
from worker.cli.main import main
from worker.client import AdDecision, Client
from worker.errors import FailedError
from worker.secret import Secret
from worker.stream.feedback import make_token

pytestmark = pytest.mark.slow

PASSWORD = "sesame-sesame-open"
KEY_PASSWORD = "not-the-key-to-the-treasure"
CONTEXT = [0.1, -0.2, 0.3]
TOKEN_SECRET = "nobody-knows-this-secret-of-tokens"
USER = next(yaml.safe_load_all((ROOT / "deploy/kubernetes/user.yaml").read_text(encoding="utf-8")))  # of the workers


def rights(*read: str) -> list[dict[str, Any]]:
    """Return the right to write the inputs and to read other topics, as docs/clients.md has it."""
    given = [("arrivals", "Write"), ("clicks", "Write"), *((topic, "Read") for topic in read)]
    return [
        {
            "resource": {"type": "topic", "name": f"ads.{topic}", "patternType": "literal"},
            "operations": ["Describe", use],
        }
        for topic, use in given
    ]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    users = dict.fromkeys(("adcascade", "stranger", "shop", "gateway"), PASSWORD)
    with guarded_broker(tmp_path_factory.mktemp("guarded"), users) as made:
        made.allow("adcascade", USER["spec"]["authorization"]["acls"])
        made.allow("shop", rights("decisions"))
        made.allow("gateway", rights("decisions", "parameters"))
        yield made


@pytest.fixture(scope="module")
def fleet(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Topics under the prefix of deploy/kubernetes. The workers may not create topics: the anonymous user does."""
    with closing(Fleet(guarded.addresses["PLAINTEXT"], "ads", tmp_path_factory.mktemp("fleet"))) as made:
        yield made


def login(guarded: Guarded, user: str, protocol: str = "SASL_SSL", mechanism: str = "SCRAM-SHA-256") -> list[str]:
    flags = ["--broker", guarded.addresses[protocol], "--sasl-username", user, "--kafka", f"sasl.mechanism={mechanism}"]
    authority = f"ssl.ca.location={guarded.ca}" if protocol == "SASL_SSL" else f"security.protocol={protocol.lower()}"
    return [*flags, "--kafka", authority]


def click(session: str, arm: str, token: str | None) -> Sent:
    body = {"session_id": session, "occurred_at": START + 900, "position": 1, "arm": arm, "clicked": True}
    return Sent(START + 900, "clicks", session, orjson.dumps(body | ({} if token is None else {"token": token})))


def test_the_rights_of_the_kubernetes_user_suffice_forged_feedback_trains_nothing_and_no_secret_is_shown(
    guarded: Guarded, fleet: Fleet
) -> None:
    fleet.set_clock(START + SECOND)
    worker = fleet.serving(
        *login(guarded, "adcascade"),
        *("--group", "adcascade", "--log-level", "debug", "--kafka", "debug=conf,security"),
        ADCASCADE_SASL_PASSWORD=PASSWORD,
        ADCASCADE_KAFKA=f"ssl.key.password={KEY_PASSWORD}",
        ADCASCADE_TOKEN_SECRET=TOKEN_SECRET,
    )
    three = arrivals(3, seconds=1)
    fleet.send(three)
    eventually(lambda: len(fleet.answered()) == 3, what="every arrival is answered")
    decisions = sorted(fleet.read(fleet.names.decisions), key=lambda record: record.key)
    honest, forger, silent = (orjson.loads(record.value) for record in decisions)
    other = make_token(
        Secret(b"not the secret of these workers"),
        session_id=forger["session_id"],
        position=1,
        arm=forger["arm"],
        arrived_at=forger["arrived_at"],
    )
    fleet.send([
        click(forger["session_id"], forger["arm"], other),
        click(silent["session_id"], silent["arm"], None),
        click(silent["session_id"], silent["arm"], honest["tokens"][0]),
        click(honest["session_id"], honest["arm"], honest["tokens"][0]),
    ])  # fmt: skip
    eventually(lambda: len(fleet.read(fleet.names.dead_letters)) >= 3, what="three dead letters")
    eventually(lambda: any(b'"kind":"feedback"' in fact for fact in fleet.facts()), what="feedback in the journal")
    dead = fleet.read(fleet.names.dead_letters)
    assert {dict(record.headers)["adcascade.reason"] for record in dead} == {b"token"}
    assert len(dead) == 3
    learned = [orjson.loads(fact) for fact in fleet.facts() if b'"kind":"feedback"' in fact]
    assert [fact["session_id"] for fact in learned] == [honest["session_id"]]
    assert worker.metric('adcascade_dead_letters_total{reason="token"}') == 3
    # The learner process has the same rights: it published version 0.
    assert [version.version for version in fleet.control.history()] == [0]

    pages = [worker.ask(path)[1] for path in ("/", "/status.json", "/metrics", "/readyz", "/livez", "/nothing")]
    pids = (worker.process.pid, worker.learner)
    command_lines = [Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8") for pid in pids]
    assert worker.terminate() == 0, worker.tail()
    fleet.clock.unlink()
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in worker.lines)
    assert len(worker.lines) == len(worker.text.splitlines()), "JSON and nothing else"
    shown = [*pages, *command_lines, worker.text]
    topics = contents(fleet)
    assert all(len(text) > 5 for text in shown)
    for secret in (PASSWORD, KEY_PASSWORD, TOKEN_SECRET):
        assert not [text for text in shown if secret in text]
        assert not [topic for topic, content in topics.items() if secret.encode() in content]


def contents(fleet: Fleet) -> dict[str, bytes]:
    """Return all bytes of every topic that a worker writes."""
    names = fleet.names
    written = (names.decisions, names.journal, names.parameters, names.parameters_history, names.dead_letters)
    written = (*written, names.changelog)
    content = {
        topic: b"".join((record.key or b"") + (record.value or b"") for record in fleet.read(topic))
        for topic in written
    }
    assert all(content.values()), "every one of them was written to"
    return content


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_wrong_password_is_reported_in_one_line_without_the_password(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mechanism: str
) -> None:
    monkeypatch.setenv("ADCASCADE_SASL_PASSWORD", "open-barley-open")
    flags = login(guarded, "adcascade", mechanism=mechanism)
    for command in (["worker", "--dim", "3"], ["topics", "check"], ["parameters", "show"]):
        assert main([*command, *flags]) == 1
        out, err = capsys.readouterr()
        assert "invalid credentials" in err
        assert err.count("\n") == 1
        assert "open-barley-open" not in out + err


def test_a_user_without_rights_is_reported_in_one_line(
    guarded: Guarded, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADCASCADE_SASL_PASSWORD", PASSWORD)
    assert main(["worker", "--dim", "3", *login(guarded, "stranger")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "ads.arrivals" in err
    assert PASSWORD not in err


def test_a_recording_needs_no_rights_for_any_group(
    guarded: Guarded, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ADCASCADE_SASL_PASSWORD", PASSWORD)
    fleet.send_raw([(fleet.names.episodes, b"1", b"{}")])
    # librdkafka looks for the coordinator of a group that nobody joins; the broker refuses that after a moment.
    until = datetime.now(UTC) + timedelta(seconds=2)
    log, span = tmp_path / "log.jsonl", ["--topics", "episodes", "--until", f"{until:%Y-%m-%dT%H:%M:%SZ}"]
    assert main(["record", str(log), *span, *login(guarded, "adcascade")]) == 0
    assert log.read_bytes().count(b"\n") == 1


def test_a_password_goes_out_in_clear_only_where_that_is_allowed(
    guarded: Guarded, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADCASCADE_SASL_PASSWORD", PASSWORD)
    flags = ["topics", "check", *login(guarded, "adcascade", "SASL_PLAINTEXT")]
    assert main(flags) == 2
    refusal = capsys.readouterr().err
    assert "in clear" in refusal
    assert PASSWORD not in refusal
    assert main([*flags, "--allow-plaintext-credentials"]) == 0


def test_a_client_with_a_certificate_is_accepted_and_one_without_is_not(
    guarded: Guarded, fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["topics", "check", "--broker", guarded.addresses["SSL"], "--kafka", f"ssl.ca.location={guarded.ca}"]
    own = [f"ssl.certificate.location={guarded.certificate}", f"ssl.key.location={guarded.key}"]
    assert main([*flags, "--kafka", own[0], "--kafka", own[1]]) == 0
    capsys.readouterr()
    assert main(flags) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["topics", "check", "--broker", guarded.addresses["SSL"]]) == 1
    assert capsys.readouterr().err.endswith("does it need TLS?\n")


def test_a_broker_with_a_certificate_of_another_authority_or_name_gets_no_password(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADCASCADE_SASL_PASSWORD", PASSWORD)
    flags = login(guarded, "adcascade")
    authority = [flag.replace(str(guarded.ca), str(guarded.certificate)) for flag in flags]
    name = [flag.replace("127.0.0.1", "localhost") for flag in flags]
    for given in (authority, name):
        assert main(["worker", "--dim", "3", *given]) == 1
        err = capsys.readouterr().err
        assert "certificate verify failed" in err
        assert err.count("\n") == 1


# ── clients and gateways ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def serving(guarded: Guarded, fleet: Fleet) -> Guarded:
    """The broker, with a worker that answers clients of today."""
    fleet.serving()
    return guarded


def test_the_documented_connection_has_enough_rights_and_shows_no_password_in_an_error(
    serving: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^<!-- connection -->\n```python\n(.*?)^```$", page, re.M | re.S)
    example = example.replace("kafka:9093", serving.addresses["SASL_SSL"]).replace("timeout=0.2", "timeout=300")
    example = example.replace("/etc/ssl/kafka-ca.pem", str(serving.ca))

    async def use(ads: Client) -> AdDecision:
        async with ads:
            shown = await ads.arrive(CONTEXT)
            await ads.clicked(shown)
            return shown

    def connect(password: str) -> AdDecision:
        monkeypatch.setenv("KAFKA_PASSWORD", password)
        names: dict[str, Any] = {}
        exec(example, names)
        return asyncio.run(use(names["ads"]))

    assert connect(PASSWORD).origin == "worker"
    with pytest.raises(FailedError, match="uthentication failed") as refused:
        connect("open-barley-open")
    assert "open-barley-open" not in str(refused.value)


def test_a_gateway_needs_no_more_rights_than_these_and_shows_no_password(serving: Guarded, fleet: Fleet) -> None:
    options = (*login(serving, "gateway"), "--log-level", "debug")
    with closing(Gateway(fleet, *options, ADCASCADE_SASL_PASSWORD=PASSWORD)) as gateway:
        assert "fallback" not in gateway.arrive("shown", context=CONTEXT)
        shown = [gateway.text, *(gateway.ask(path)[1] for path in ("/metrics", "/readyz"))]
        assert not [text for text in shown if PASSWORD in text]
