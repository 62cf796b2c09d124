"""No file of deploy/ holds a secret, and every ADCASCADE variable in it exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.files import DEPLOY, KUBERNETES, OPTIONS, compose, documents, leaves, manifests
from worker.cli.options.parser import CONFIG

FILES = sorted(
    path for path in DEPLOY.rglob("*") if path.is_file() and not re.search(r"/(\.|__pycache__)", path.as_posix())
)
SECRET = re.compile(r"password|secret|token|credential|apikey|api_key|private", re.IGNORECASE)
#: The variables of all commands, and that of the broker script.
VARIABLES = {option.variable for options in OPTIONS for option in options if not option.positional}
VARIABLES |= {CONFIG.variable, "ADCASCADE_KAFKA_CACHE"}


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(DEPLOY)) for path in FILES])
def test_every_variable_exists_and_no_file_holds_a_key_or_a_secret_object(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"\bADCASCADE_[A-Z_]+\b", text)) <= VARIABLES
    assert "-----BEGIN" not in text
    assert not re.search(r"^kind: Secret$", text, flags=re.MULTILINE)
    assert not re.search(r"(?<!/)\b[a-z]+://[^/\s:@]+:[^/\s@]+@", text), "a password in an address"


def structured() -> dict[str, Any]:
    return {
        "compose": compose(),
        "kubernetes": list(manifests()),
        "worker.toml": tomllib.loads((KUBERNETES / "worker.toml").read_text(encoding="utf-8")),
        "grafana": [document for path in (DEPLOY / "grafana").rglob("*.yml") for document in documents(path)],
        "prometheus": [document for path in DEPLOY.glob("*prometheus*.yml") for document in documents(path)],
    }


# Fields with a secret-like name that hold a switch, or the name of a secret.
_HARMLESS = {"automountServiceAccountToken", "secretName", "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"}


@pytest.mark.parametrize("where", structured())
def test_secrets_are_never_inline(where: str) -> None:
    for path, value in leaves(structured()[where]):
        if not SECRET.search(path[-1]) or path[-1] in _HARMLESS:
            continue
        assert value is None or str(value).startswith("/run/secrets/"), f"{where}: {'.'.join(path)} = {value!r}"


def test_no_command_takes_a_secret_as_a_flag() -> None:
    seen = set()
    for options in OPTIONS:
        for option in options:
            if option.secret:
                seen.add(option.name)
                assert f"{option.name}-file" in {other.name for other in options}
                assert "secret-value" not in repr(option.parse("secret-value"))
            elif SECRET.search(option.name):
                assert option.name.endswith("-file") or option.flag, f"--{option.name} would take a secret"
    assert seen == {"sasl-password", "token-secret"}


def test_web_servers_listen_on_loopback_by_default() -> None:
    hosts = [option for options in OPTIONS for option in options if option.name in ("host", "web-host")]
    assert {option.default for option in hosts} == {"127.0.0.1"}
