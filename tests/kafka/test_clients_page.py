"""The examples of docs/clients.md, run as they stand against a gateway: each a whole cascade."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from tests.embedded.traffic import ARMS
from tests.kafka.fleet import ROOT, Fleet, Running
from tests.kafka.test_gateway import Gateway
from tests.programs import eventually, needs

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
(FEATURES,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S)
EXAMPLES = dict(re.findall(r"^<!-- client: (\w+) -->\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))

Command = Callable[[Path], list[str]]
#: By example: its file, and the command that runs it.
PROGRAMS: dict[str, tuple[str, Command]] = {
    "curl": ("cascade.sh", lambda file: [_with_jq("curl"), "-euo", "pipefail", str(file)]),
    "http": ("cascade.py", lambda file: [sys.executable, str(file)]),
    "node": ("cascade.mjs", lambda file: [needs("node", package="nodejs"), str(file)]),
    "go": ("cascade.go", lambda file: [_go(), "run", str(file)]),
    "java": ("Cascade.java", lambda file: [needs("java", package="openjdk-17-jdk"), str(file)]),
    "python": ("cascade.py", lambda file: [sys.executable, str(file)]),
}


def _with_jq(program: str) -> str:
    for name in (program, "jq"):
        needs(name, package=name)
    return "bash"


def _go() -> str:
    """Return the path of Go; the build of this project does not need it, so it may be missing everywhere."""
    found = shutil.which("go")
    return pytest.skip("go is not installed") if found is None else found


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of the declaration on the page."""
    file = tmp_path_factory.mktemp("features") / "adcascade.toml"
    file.write_text(FEATURES, encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def served(address: str, features: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Topics with a worker that signs tokens and has the features of the page."""
    with closing(Fleet(address, f"p{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("served"))) as made:
        made.serving("--config", features, ADCASCADE_TOKEN_SECRET="a secret of twenty-odd bytes")
        yield made


@pytest.fixture(scope="module", params=["60s", "1ms"], ids=["patient", "hasty"])
def gateway(served: Fleet, request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A gateway that waits for every decision, or for none: then examples meet fallback ads and slates."""
    with closing(Gateway(served, "--deadline", request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def alone(features: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`adcascade serve`, without Kafka."""
    folder = tmp_path_factory.mktemp("serve")
    arms = folder / "arms.json"
    arms.write_bytes(orjson.dumps({arm.arm: arm.reward for arm in ARMS}))
    files = ("--catalog", str(arms), "--state", str(folder / "state"))
    command = ("serve", "--config", features, "--port", "0", "--deadline", "60s", *files)
    with closing(Running(folder / "serve.log", *command)) as made:
        eventually(lambda: made.url and made.ready, what="serve is ready")
        yield made


def run(name: str, url: str, folder: Path, fleet: Fleet | None = None) -> None:
    """Run an example on the addresses of the test, and check that what it prints is a whole cascade."""
    file, command = PROGRAMS[name]
    text = EXAMPLES[name].replace("http://127.0.0.1:8080", url)
    text = re.sub(r"timeout=[\d.]+", "timeout=300", text)  # the machines of tests may be slow
    if fleet is not None:
        text = text.replace('Client("127.0.0.1:9092",', f'Client("{fleet.address}", prefix="{fleet.names.prefix}",')
    path = folder / file
    path.write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command(path), cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *shown, end = done.stdout.replace('"', "").splitlines()
    assert end == "ended: clicked"
    assert [line for line in shown if not re.fullmatch(r"show ad-\d at position \d", line)] == []
    assert [line[-1] for line in shown][-2:] == ["2", "3"]


def clicks(fleet: Fleet) -> list[tuple[int, bool]]:
    """Return position and reaction of all feedback in the journal."""
    facts = (orjson.loads(fact) for fact in fleet.facts())
    return sorted((fact["position"], fact["clicked"]) for fact in facts if fact["kind"] == "feedback")


CASCADE = [(1, False), (2, False), (3, True)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_whole_cascade_whether_the_gateway_is_patient_or_not(
    name: str, served: Fleet, gateway: Gateway, tmp_path: Path
) -> None:
    before = clicks(served)
    run(name, gateway.url, tmp_path, served)
    eventually(lambda: clicks(served) == sorted(before + CASCADE), what="every display counts")


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "python"])
def test_the_examples_over_http_are_the_same_in_front_of_serve(name: str, alone: Running, tmp_path: Path) -> None:
    run(name, alone.url, tmp_path)


def test_every_example_is_shorter_than_30_lines() -> None:
    assert set(EXAMPLES) == set(PROGRAMS)
    assert [name for name, text in EXAMPLES.items() if len(text.splitlines()) >= 30] == []
