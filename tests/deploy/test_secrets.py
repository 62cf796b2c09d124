"""No file of deploy/ holds a secret, and every variable of ours that one names exists."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.files import DEPLOY, KUBERNETES, all_variables, compose, documents, manifests
from worker.cli.main import COMMANDS, load

FILES = sorted(
    path for path in DEPLOY.rglob("*") if path.is_file() and not re.search(r"/(\.|__pycache__)", path.as_posix())
)
SECRET = re.compile(r"password|secret|token|credential|apikey|api_key|private", re.IGNORECASE)
# The broker script has a cache of its own; tests give it a variable.
ELSEWHERE = {"ADCASCADE_KAFKA_CACHE"}


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(DEPLOY)) for path in FILES])
def test_every_variable_of_ours_that_is_named_exists(path: Path) -> None:
    named = set(re.findall(r"\bADCASCADE_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    assert named <= all_variables() | ELSEWHERE


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(DEPLOY)) for path in FILES])
def test_no_file_holds_a_key_or_a_secret_object(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "-----BEGIN" not in text
    assert not re.search(r"^kind: Secret$", text, flags=re.MULTILINE)
    assert not re.search(r"(?<!/)\b[a-z]+://[^/\s:@]+:[^/\s@]+@", text), "a password in an address"


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(node, list):
        for value in node:
            yield from leaves(value, path)
    else:
        yield path, node


def structured() -> dict[str, Any]:
    return {
        "compose": compose(),
        "kubernetes": list(manifests()),
        "worker.toml": tomllib.loads((KUBERNETES / "worker.toml").read_text(encoding="utf-8")),
        "grafana": [document for path in (DEPLOY / "grafana").rglob("*.yml") for document in documents(path)],
        "prometheus": [document for path in DEPLOY.glob("*prometheus*.yml") for document in documents(path)],
    }


# What may stand where a name speaks of secrets: nothing, a switch, a file, or the name of the secret elsewhere.
_HARMLESS = {"automountServiceAccountToken", "secretName", "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"}


@pytest.mark.parametrize("where", structured())
def test_whatever_is_called_a_secret_is_given_elsewhere(where: str) -> None:
    for path, value in leaves(structured()[where]):
        if not SECRET.search(path[-1]) or path[-1] in _HARMLESS:
            continue
        assert value is None or str(value).startswith("/run/secrets/"), f"{where}: {'.'.join(path)} = {value!r}"


def test_the_check_above_would_notice_a_secret() -> None:
    found = [path[-1] for path, value in leaves({"env": {"ADCASCADE_TOKEN_SECRET": "hunter2"}}) if value]
    assert [name for name in found if SECRET.search(name)] == ["ADCASCADE_TOKEN_SECRET"]


def test_every_secret_of_every_command_is_no_flag_and_may_come_from_a_file() -> None:
    seen = set()
    for name in COMMANDS:
        command = load(name)
        for each in (command, *command.actions):
            by_name = {option.name: option for option in each.options}
            for option in each.options:
                if option.secret:
                    seen.add(option.name)
                    assert f"{option.name}-file" in by_name
                    assert "secret-value" not in repr(option.parse("secret-value"))
                elif SECRET.search(option.name):
                    assert option.name.endswith("-file") or option.flag, f"{name}: --{option.name} would take a secret"
    assert seen == {"sasl-password", "token-secret"}


def test_the_web_is_on_this_machine_only_unless_told_otherwise() -> None:
    hosts = {
        option.default
        for name in COMMANDS
        for each in (load(name), *load(name).actions)
        for option in each.options
        if option.name.endswith("-host")
    }
    assert hosts == {"127.0.0.1"}
