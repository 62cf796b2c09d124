"""The image: pinned, without root, with a health check, and with all that the code needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from prometheus_client import CollectorRegistry

from tests.deploy.files import DEPLOY, ROOT, dockerfile, environment_of_the_image, settings_of
from worker.http.pages import operations
from worker.http.server import WebServer

LAST = dockerfile()[-1].stage
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def final(name: str) -> list[str]:
    return [each.text for each in dockerfile() if (each.stage, each.name) == (LAST, name)]


def test_every_stage_uses_one_base_pinned_to_a_patch_release() -> None:
    (base,) = (each.text for each in dockerfile() if each.stage == 0)
    found = re.fullmatch(r"PYTHON=python:(\d+\.\d+\.\d+)-slim-[a-z]+(@sha256:[0-9a-f]{64})?", base)
    assert found is not None, base
    assert SpecifierSet(PROJECT["requires-python"]).contains(found[1])
    assert all(each.text.startswith("${PYTHON}") for each in dockerfile() if each.name == "FROM")


def test_every_installed_package_is_a_wheel_with_a_known_hash() -> None:
    installs = [
        part
        for each in dockerfile()
        if each.name == "RUN"
        for part in each.text.split("&&")
        if re.search(r"\bpip\b.* install ", part)
    ]
    assert installs
    for install in installs:
        assert "--require-hashes --only-binary :all: -r" in install or "--no-deps --no-index /wheels/" in install


def test_the_command_runs_without_root_and_without_a_shell_so_that_signals_reach_it() -> None:
    (user,) = final("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert [json.loads(text) for text in (*final("ENTRYPOINT"), *final("CMD"))] == [["adcascade"], ["worker"]]


def test_the_worker_accepts_the_variables_of_the_image() -> None:
    environment = environment_of_the_image()
    options = settings_of(["worker"], {key: value for key, value in environment.items() if key.startswith("ADC")})
    assert final("EXPOSE") == [str(options.web_port)]
    assert options.web_host == "127.0.0.1"


def test_the_health_check_detects_a_dead_worker() -> None:
    (text,) = final("HEALTHCHECK")
    command = json.loads(text[text.index("[") :])
    assert command[0] == "python"
    with WebServer(operations(CollectorRegistry(), lambda: "not ready, but alive")) as server:
        port = int(server.url.rpartition(":")[2])
        assert _check(command, port) == 0
    assert _check(command, port) != 0


def _check(command: list[str], port: int) -> int:
    environment = {**os.environ, "ADCASCADE_WEB_PORT": str(port)}
    return subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True, check=False).returncode


# ── content ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def sources() -> list[str]:
    copies = [each.text.split() for each in dockerfile() if each.name == "COPY" and "--from" not in each.text]
    return [source for words in copies for source in words[:-1]]


def test_the_build_context_holds_only_copied_files() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "closed by default"
    let_through = {rule[1:] for rule in rules if rule.startswith("!")}
    assert let_through == set(sources())
    assert all((ROOT / source).exists() for source in sources())
    assert not [source for source in sources() if any(fnmatch(source, rule) for rule in rules[1:] if rule[0] != "!")]


def locked(name: str) -> dict[str, str]:
    """Return the versions in a requirements file; fail on a package without a hash."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    entries = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    found: dict[str, str] = {}
    for entry in filter(str.strip, entries):
        pinned = re.fullmatch(r"([a-z0-9.-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)", entry.strip())
        assert pinned is not None, entry[:80]
        found[canonicalize_name(pinned[1])] = pinned[2]
    return found


def test_the_lock_meets_the_requirements_of_the_project_and_is_complete() -> None:
    versions = locked("requirements.txt")
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), text
    assert "hatchling" in locked("requirements-build.txt")
    for name in versions:
        try:
            needed = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue  # not on this platform
        for requirement in needed:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in versions, f"{name} needs {requirement}"
