"""The README is true: its commands run, its tables are those of the code, its links lead somewhere.

What stands above a block of shell says how it is held to its word:

- ``<!-- command: NAME -->``: read by whoever hands this in; must stand there verbatim.
- ``<!-- run -->``: run in order, needs nothing.
- ``<!-- kafka -->``, ``<!-- service: NAME -->``: run in order with a broker of their own; a service runs until the end.
- ``<!-- kcat -->``: the same, where kcat is installed.
- ``<!-- elsewhere -->``: needs what a test machine has not (Docker, Kubernetes, the network).

Whatever is said above it, every `adcascade …` in a block must be understood by the command's own parser.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.programs import needs
from worker.cli.main import load
from worker.cli.options.parser import build_parser, resolve
from worker.cli.reference import TABLES, refreshed
from worker.stream.tokens import check_token

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BROKER = ROOT / "deploy/kafka/broker"

#: What the tokens in the README are signed with.
SECRET = b"correct horse battery staple"
#: The same commands on a smaller world: variables lose against flags, and win over the file that the README writes.
SMALL = {
    "ADCASCADE_USERS": "60",
    "ADCASCADE_EPISODES": "12",
    "ADCASCADE_SEEDS": "1",
    "ADCASCADE_WINDOW": "2s",
    "ADCASCADE_SESSION_TIMEOUT": "3s",
    "ADCASCADE_LATENESS": "1s",
    "ADCASCADE_LOOK": "0.05s-0.2s",
    "ADCASCADE_PATIENCE": "2s",
    "ADCASCADE_DURATION": "10s",
}
PATIENCE = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code, what stands above it, and where it is."""

    mark: str
    language: str
    text: str
    line: int

    @property
    def kind(self) -> str:
        return self.mark.partition(":")[0]

    @property
    def name(self) -> str:
        return self.mark.partition(":")[2].strip()


def blocks() -> Iterator[Block]:
    pattern = re.compile(r"^(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
    for found in pattern.finditer(TEXT):
        yield Block(
            mark=(found["mark"] or "").strip(),
            language=found["language"],
            text=found["text"],
            line=TEXT[: found.start("text")].count("\n") + 1,
        )


SHELL = [block for block in blocks() if block.language == "sh"]


def commands() -> Iterator[tuple[int, list[str]]]:
    """Every `adcascade …` of the shell blocks, with its line."""
    for block in SHELL:
        text = re.sub(r"<<'?EOF'?\n.*?^EOF$", "", block.text.replace("\\\n", " "), flags=re.M | re.S)
        for number, line in enumerate(text.splitlines()):
            for part in _parts(line):
                words = [word for word in part if not re.fullmatch(r"[A-Z_]+=.*", word)]
                if words and Path(words[0]).name == "adcascade":
                    yield block.line + number, words[1:]


def _parts(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    part: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;()<>"):
            yield part
            part = []
        else:
            part.append(word)
    yield part


# ── without running anything ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_two_commands_are_there_verbatim() -> None:
    told = {block.name: block.text for block in SHELL if block.kind == "command"}
    assert told == {
        "demo": "python3 -m venv .venv && .venv/bin/pip install '.[lab]' && .venv/bin/adcascade demo\n",
        "test": "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest\n",
    }


def test_every_block_says_how_it_is_tested() -> None:
    assert {block.language for block in blocks()} <= {"sh", "json", "text"}
    known = {"command", "run", "kafka", "service", "kcat", "elsewhere"}
    assert [block.line for block in SHELL if block.kind not in known] == []
    assert [block.line for block in blocks() if block.language == "json" and block.kind != "schema"] == []


@pytest.mark.parametrize(("line", "words"), [pytest.param(*one, id=f"line {one[0]}") for one in commands()])
def test_every_command_is_understood_by_its_own_parser(line: int, words: list[str]) -> None:
    command = load(words[0])
    parsed = build_parser(command, f"adcascade {command.name}").parse_args(words[1:])
    parsed.config = ""  # the file is written by another block
    resolve(parsed, environ={})


def test_the_parser_test_sees_the_commands() -> None:
    seen = {words[0] for _, words in commands()}
    assert seen >= {"demo", "worker", "traffic", "topics", "record", "replay", "evaluate", "simulate", "explain"}


def test_the_generated_tables_are_those_of_the_code() -> None:
    assert all(f"<!-- generated: {name} -->" in TEXT for name in TABLES)
    assert refreshed(TEXT) == TEXT, "run `python -m worker.cli.reference README.md`"


def test_every_link_and_picture_exists() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT) + re.findall(r'(?:src|href)="([^"]+)"', TEXT)
    headings = {_anchor(found) for found in re.findall(r"^#+ (.+)$", TEXT, re.M)}
    assert ".github/regret.svg" in links
    for link in links:
        if link.startswith("#"):
            assert link[1:] in headings, link
        elif not link.startswith("http"):
            assert (ROOT / link).exists(), link


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("block", [pytest.param(b, id=f"line {b.line}") for b in blocks() if b.kind == "schema"])
def test_the_examples_of_events_are_valid(block: Block) -> None:
    schema = json.loads((ROOT / "schemas" / f"{block.name}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(json.loads(block.text))


def test_the_tokens_of_the_examples_are_those_of_their_displays() -> None:
    events = [(block.name, json.loads(block.text)) for block in blocks() if block.kind == "schema"]
    decision = next(event for name, event in events if name == "decision")
    feedback = [event for name, event in events if name == "click"]
    assert len(feedback) == 2
    for event in feedback:
        assert event["token"] == decision["tokens"][event["position"] - 1]
        display = {"session_id": event["session_id"], "position": event["position"], "arm": event["arm"]}
        assert check_token(SECRET, event["token"], **display) == decision["arrived_at"]


def test_what_is_started_elsewhere_names_files_that_exist() -> None:
    text = "".join(block.text for block in SHELL if block.kind == "elsewhere")
    named = re.findall(r"(?:-f|-k) (\S+)", text) + re.findall(r"(?<![\w/])((?:tests|deploy|\.ci)/\S+)", text)
    assert {"deploy/compose.yaml", "deploy/kubernetes", "tests/kafka", ".ci/run"} <= set(named)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_options_of_the_broker_script_exist() -> None:
    script = SourceFileLoader("broker_script", str(BROKER))
    spec = importlib.util.spec_from_loader(script.name, script)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    script.exec_module(module)
    lines = [line for block in SHELL for line in block.text.splitlines() if line.startswith("deploy/kafka/broker ")]
    assert len(lines) == 2
    for line in lines:
        module.parser().parse_args(shlex.split(line)[1:])


# ── running it ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Tour:
    """Runs blocks as they stand, but in a folder and on ports of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        named = re.findall(r"127\.0\.0\.1:(\d+)", "".join(block.text for block in SHELL))
        self.ports = {port: _free_port() for port in named}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ADCASCADE_")}
        cache = {"ADCASCADE_KAFKA_CACHE": os.environ.get("ADCASCADE_KAFKA_CACHE", "")}
        self.environment = {**kept, **{name: value for name, value in cache.items() if value}, **SMALL}
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def script(self, block: Block) -> str:
        text = block.text.replace("/tmp/adcascade", str(self.folder)).replace(".github/", f"{self.folder}/")
        for port, own in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(own), text)
        # Not the .venv of whoever runs the tests: the interpreter that runs them.
        return "set -euo pipefail\n" + re.sub(r"^export PATH=\S+ && ", "", text, flags=re.M)

    def run(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-c", self.script(block)],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=PATIENCE * 2,
        )  # fmt: skip
        assert done.returncode == 0, f"README line {block.line}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def service(self, block: Block) -> Iterator[subprocess.Popen[bytes]]:
        log = self.folder / f"{block.name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", self.script(block).rstrip().replace("set -euo pipefail\n", "exec ")],
                cwd=ROOT, env=self.environment, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text(encoding="utf-8")[-4000:]
        finally:
            process.kill()
            process.wait()

    def address(self, port: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[port]}{path}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(url: str) -> str:
    try:
        with urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except (URLError, ConnectionError):
        return ""


def _eventually(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)  # between two looks, not for something to happen
    raise AssertionError(f"not within {PATIENCE:g} s: {what}")


@pytest.mark.slow
def test_the_commands_that_need_nothing_run_as_they_stand(tmp_path: Path) -> None:
    tour = Tour(tmp_path)
    said = [tour.run(block) for block in SHELL if block.kind == "run"]
    assert (tmp_path / "regret.svg").stat().st_size > 10_000
    assert said[-1].count("no mismatch") == 2
    assert "as served" in said[-1]


@pytest.mark.slow
def test_the_way_to_kafka_leads_from_a_broker_to_what_was_learned(tmp_path: Path) -> None:
    fetched = subprocess.run([BROKER, "fetch"], capture_output=True, text=True, check=False)
    if fetched.returncode and os.environ.get("CI", "").lower() not in ("1", "true"):
        pytest.skip(fetched.stderr.strip())
    assert fetched.returncode == 0, fetched.stderr
    tour = Tour(tmp_path)
    kinds = {"kafka", "service"} | ({"kcat"} if shutil.which("kcat") else set())
    way = [block for block in SHELL if block.kind in kinds]
    with ExitStack() as stack:
        stack.callback(_kill_broker, tmp_path / "kafka")
        services = ExitStack()
        stack.push(services)
        said = ""
        for block in way:
            if block.kind == "service":
                if shutil.which(shlex.split(block.text)[0]) or block.name == "worker":
                    services.enter_context(tour.service(block))
                    _eventually(lambda name=block.name: _is_up(tour, name), f"{block.name} is up")  # type: ignore[misc]
                continue
            if "broker stop" in block.text:
                services.close()
            said += tour.run(block)
    assert said.count("created") == 8
    assert "0 without a decision" in said
    assert "winter-coat: added at 0.8" in said
    assert "slate: " in said
    versions = re.search(r"versions 0 to (\d+): (\d+) of (\d+) folded again", said)
    assert versions is not None and int(versions[1]) >= 3
    assert "no mismatch" in said


def _kill_broker(folder: Path) -> None:
    subprocess.run([BROKER, "stop", "--kill", "--data-dir", folder], capture_output=True, check=False)


def _is_up(tour: Tour, name: str) -> bool:
    if name == "prometheus":
        asked = _read(tour.address("9091", "/api/v1/query?query=adcascade_parameters_version"))
        return bool(asked and json.loads(asked)["data"]["result"])
    return (
        "ready" in _read(tour.address("9464", "/readyz"))
        and "adcascade_build_info" in _read(tour.address("9464", "/metrics"))
        and "<title>adcascade" in _read(tour.address("9464", "/"))
    )


def test_prometheus_takes_the_configuration_that_the_readme_writes(tmp_path: Path) -> None:
    promtool = needs("promtool", package="prometheus")
    tour = Tour(tmp_path)
    (block,) = (block for block in SHELL if block.kind == "kafka" and "scrape_configs" in block.text)
    tour.run(block)
    done = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alerts.yml" in done.stdout
