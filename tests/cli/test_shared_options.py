"""Options that commands share: secrets are hidden, credentials are encrypted, contradictions are refused."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.programs import needs
from worker.cli.main import load, main
from worker.cli.options.brokers import connection
from worker.cli.options.parser import build_parser, filled
from worker.cli.options.places import resolve
from worker.errors import InputError
from worker.http.settings import HttpSettings
from worker.kafka.settings import WorkerSettings
from worker.simulation.demo.run import DemoSettings
from worker.simulation.experiment.settings import ExperimentSettings
from worker.simulation.traffic.generator import TrafficSettings
from worker.stream.decoding import Limits
from worker.stream.settings import LearningSettings

PASSWORD = "hush-hush-hush"
#: Settings of learning that the demo has, and no option for.
FIXED_IN_DEMO = (
    *("epsilon", "estimator", "features", "forgetting", "guardrail_sessions", "horizon_episodes", "lateness"),
    *("max_loss", "salt", "session_timeout", "spread", "tagged", "unanswered", "warmup", "window"),
)


def resolved(*arguments: str, command: str = "worker", **environment: str) -> Any:
    return resolve(build_parser(load(command), f"adcascade {command}").parse_args(arguments), environment)


# ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_credentials_go_out_over_tls_unless_that_is_allowed() -> None:
    login = {"sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "me", "sasl.password": PASSWORD}
    secured = connection(resolved("--sasl-username", "me", ADCASCADE_SASL_PASSWORD=PASSWORD))
    assert secured.settings == {"security.protocol": "sasl_ssl", **login}
    allowed = ("--sasl-username", "me", "--allow-plaintext-credentials")
    given = connection(resolved(*allowed, ADCASCADE_SASL_PASSWORD=PASSWORD))
    assert given.settings == {"security.protocol": "sasl_plaintext", **login}
    plain = ("--sasl-username", "me", "--kafka", "security.protocol=sasl_plaintext")
    with pytest.raises(InputError, match="in clear") as refusal:
        connection(resolved(*plain, ADCASCADE_SASL_PASSWORD=PASSWORD))
    assert PASSWORD not in str(refusal.value)


def test_a_password_is_no_flag_and_is_shown_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="unrecognized"):
        resolved("--sasl-password", PASSWORD)
    given = resolved("--sasl-username", "me", ADCASCADE_SASL_PASSWORD=PASSWORD)
    assert PASSWORD not in repr(given)
    assert PASSWORD not in repr(connection(given))
    with pytest.raises(SystemExit):
        main(["worker", "--help"])
    assert re.search(r"secrets, from the environment.*:\n  ADCASCADE_SASL_PASSWORD  ", capsys.readouterr().out)


def test_a_secret_comes_from_a_file_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    for given in (
        resolved("--sasl-username", "me", ADCASCADE_SASL_PASSWORD_FILE=str(file)),
        resolved("--sasl-username", "me", "--sasl-password-file", str(file)),
    ):
        assert connection(given).secrets == [PASSWORD]


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["--sasl-username", "me"], {}, "needs a password: set ADCASCADE_SASL_PASSWORD"),
        ([], {"ADCASCADE_SASL_PASSWORD": "x"}, "without a user name"),
        (["--sasl-username", "me"], {"ADCASCADE_SASL_PASSWORD": ""}, "ADCASCADE_SASL_PASSWORD is empty"),
        (["--sasl-password-file", "/none"], {}, "--sasl-password-file /none: No such file"),
        (["--sasl-password-file", "/none"], {"ADCASCADE_SASL_PASSWORD": "x"}, "both given"),
        (["--kafka", "ssl.ca.location=/none.pem"], {}, "setting ssl.ca.location: there is no /none.pem"),
        (["--kafka", "ssl.ca.location=/dev/null"], {}, "ssl.ca.location failed.*no certificate"),
        (["--broker", "kafka"], {}, "not a broker address"),
        (["--broker", ","], {}, "no broker"),
        (["--kafka", "fetch.wait"], {}, "--kafka: must be NAME=VALUE"),
        (["--kafka", "foo=1"], {}, 'No such configuration property: "foo"'),
        (["--kafka", "acks=1"], {}, "acks cannot be changed: every write is acknowledged by all replicas"),
        (["--kafka", "fetch.wait.max.ms=soon"], {}, 'Invalid value for configuration property "fetch.wait.max.ms"'),
        (["--kafka", "sasl.username=me"], {"ADCASCADE_KAFKA": "sasl.password=x"}, "in clear"),
        (
            ["--sasl-username", "me", "--kafka", "sasl.username=you"],
            {"ADCASCADE_SASL_PASSWORD": "x"},
            "--sasl-username and the Kafka setting sasl.username are both given: remove one of them",
        ),
    ],
)
def test_a_contradictory_connection_is_refused_with_the_reason(arguments, environment, complaint) -> None:
    with pytest.raises(InputError, match=complaint):
        connection(resolved(*arguments, **environment))


def test_settings_of_librdkafka_pass_through_from_flags_the_variable_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "adcascade.toml"
    file.write_text(
        '[kafka]\n"fetch.wait.max.ms" = 50\nfetch.min.bytes = 3\nsocket.keepalive.enable = true\n'
        'client.id = "file"\nclient.rack = "file"\nssl.key.password = "psst"\n'
    )
    variable = "client.id=variable,debug=topic,cgrp , client.rack=variable"
    made = connection(resolved("--config", str(file), "--kafka", "client.rack=a=b", ADCASCADE_KAFKA=variable))
    assert made.settings == {
        "fetch.wait.max.ms": "50",
        "fetch.min.bytes": "3",
        "socket.keepalive.enable": "true",
        "client.id": "variable",
        "client.rack": "a=b",
        "debug": "topic,cgrp",
        "ssl.key.password": "psst",
        "security.protocol": "ssl",
    }
    assert made.secrets == ["psst"]


@pytest.mark.parametrize("name", ["sasl.password", "ssl.key.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"])
def test_a_secret_of_librdkafka_is_no_flag(name: str, adcascade: Any) -> None:
    ended = adcascade(f"topics check --kafka {name}={PASSWORD}")
    assert ended.code == 2
    assert f"--kafka: the list of processes would show the value of {name}; put it into ADCASCADE_KAFKA" in ended.err
    assert PASSWORD not in ended.err


def test_the_settings_of_tls_turn_it_on(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    arguments = f"req -x509 -newkey rsa:2048 -nodes -subj /CN=test -keyout {key} -out {cert} -days 1"
    subprocess.run([needs("openssl", package="openssl"), *arguments.split()], capture_output=True, check=True)
    files = {"ssl.ca.location": cert, "ssl.certificate.location": cert, "ssl.key.location": key}
    given = resolved(*(word for name, file in files.items() for word in ("--kafka", f"{name}={file}")))
    assert connection(given).settings == {
        "security.protocol": "ssl",
        **{name: str(file) for name, file in files.items()},
    }


def test_brokers_are_separated_by_commas() -> None:
    assert connection(resolved("--broker", "a:1, b:2")).servers == ("a:1", "b:2")


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "command", "others"),
    [
        (LearningSettings, "worker", ("tagged",)),
        (
            WorkerSettings,
            "worker",
            ("connection", "topics", "learner", "learning", "arms", "unfit", "start", "limits", "secret", "clock"),
        ),
        (Limits, "worker", ("max_session_id", "max_arm_id")),
        (HttpSettings, "serve", ("keys", "allowed_hosts", "request_timeout")),
        (DemoSettings, "demo", FIXED_IN_DEMO),
        (ExperimentSettings, "simulate", ()),
        (TrafficSettings, "traffic", ("leaving", "transit", "disordered")),
    ],
)
def test_every_setting_is_an_option_of_the_same_name(kind: Any, command: str, others: tuple[str, ...]) -> None:
    names = set(inspect.signature(kind).parameters)
    assert names - {option.attribute for option in load(command).options} == set(others)


def test_flags_variables_and_the_file_reach_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('window = "2m"\n[worker]\nlateness = "750ms"\npolicy = "aucbbp"\n')
    given = resolved("--config", str(file), "--policy", "greedy", "--no-repeats", ADCASCADE_BETA="2")
    settings = filled(LearningSettings, given, dim=7)
    assert (settings.window, settings.lateness, settings.policy) == (120_000, 750, "greedy")
    assert (settings.repeats, settings.beta, settings.dim, settings.session_timeout) == (False, 2.0, 7, 60_000)


def test_a_short_token_secret_is_refused_without_being_shown(monkeypatch, adcascade) -> None:
    monkeypatch.setenv("ADCASCADE_TOKEN_SECRET", "too short")
    ended = adcascade("worker --broker 127.0.0.1:1 --dim 2")
    assert ended.code == 2
    assert "at least 16 bytes" in ended.err
    assert "too short" not in ended.err
