"""README and docs are true: commands run, generated tables match the code, links and named code exist.

The comment above a shell block says how the block is tested:

- ``<!-- command: NAME -->``: one of the two commands that CI reads from the README; checked verbatim.
- ``<!-- run -->``: run in order; needs nothing.
- ``<!-- kafka -->``, ``<!-- service: NAME -->``: run in order with a broker; a service runs until the end.
- ``<!-- kcat -->``: the same, where kcat is installed.
- ``<!-- client: NAME -->``: a cascade, in any language; run by tests/kafka/test_clients_page.py.
- ``<!-- connection -->``: a client of a guarded broker; run by tests/kafka/test_client.py.
- ``<!-- elsewhere -->``: not run: needs Docker, Kubernetes, a network, or more time than a test has.

Whatever its mark, every `adcascade …` in a block must be accepted by the command's own parser.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema  # type: ignore[import-untyped]
import pytest

from docs.make_reference import reference
from tests.kafka.fleet import page
from tests.programs import IN_CI, eventually, free_port, lacking
from worker.cli.main import COMMANDS, load
from worker.cli.options.brokers import connection
from worker.cli.options.parser import build_parser
from worker.cli.options.places import resolve
from worker.http.problems import PROBLEMS
from worker.secret import Secret
from worker.stream.events import DEAD_LETTER_REASONS
from worker.stream.feedback import check_token
from worker.stream.troubles import TROUBLES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXTS = {path: path.read_text(encoding="utf-8") for path in (README, *sorted((ROOT / "docs").glob("*.md")))}
BROKER = ROOT / "deploy/kafka/broker"

#: The secret that signed the tokens in the README.
SECRET = b"correct horse battery staple"
#: The same commands on a smaller world: variables lose against flags and win over the settings file of the README.
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


class Block(NamedTuple):
    """A block of code, with the kind and the name of its mark."""

    file: str
    line: int
    kind: str
    name: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _blocks() -> Iterator[Block]:
    pattern = re.compile(r"^(?:<!-- (\w+)(?:: (\w+))? -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
    for path, text in TEXTS.items():
        for found in pattern.finditer(text):
            kind, name, language, code = (part or "" for part in found.groups())
            yield Block(path.name, text[: found.start(4)].count("\n") + 1, kind, name, language, code)


BLOCKS = list(_blocks())
SHELL = [block for block in BLOCKS if block.language == "sh"]
SCHEMAS = [block for block in BLOCKS if block.kind == "schema"]


def _commands() -> Iterator[Any]:
    """Yield the words of every `adcascade …` of the shell blocks."""
    for block in SHELL:
        text = re.sub(r"<<'?EOF'?\n.*?^EOF$", "", block.text.replace("\\\n", " "), flags=re.M | re.S)
        for line in text.splitlines():
            for part in _parts(line):
                words = [word for word in part if not re.fullmatch(r"[A-Z_]+=.*", word)]
                if words and Path(words[0]).name == "adcascade":
                    yield pytest.param(words[1:], id=f"{block} {' '.join(words[1:3])}")


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
    assert {(block.file, block.name): block.text for block in SHELL if block.kind == "command"} == {
        ("README.md", "demo"): "python3 -m venv .venv && .venv/bin/pip install '.[lab]' && .venv/bin/adcascade demo\n",
        ("README.md", "test"): "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest\n",
    }


def test_every_block_is_marked_with_how_it_is_tested() -> None:
    shell = {"command", "run", "kafka", "service", "kcat", "client", "elsewhere"}
    kinds = {"sh": shell, "json": {"schema"}, "text": {""}, "toml": {""}}
    kinds |= {language: {"client"} for language in ("js", "go", "java")} | {"python": {"client", "connection"}}
    assert [str(block) for block in BLOCKS if block.kind not in kinds[block.language]] == []


@pytest.mark.parametrize("words", list(_commands()))
def test_every_command_is_accepted_by_its_own_parser(words: list[str]) -> None:
    command = load(words[0])
    parsed = build_parser(command, f"adcascade {command.name}").parse_args(words[1:])
    parsed.config = ""  # another block writes the file
    resolve(parsed, environ={})


def test_every_command_is_shown() -> None:
    assert {param.values[0][0] for param in _commands()} == set(COMMANDS)


def test_the_settings_files_are_accepted(tmp_path: Path) -> None:
    files = re.findall(r"\.toml <<'EOF'\n(.*?)^EOF$", TEXTS[README], re.M | re.S)
    files += [block.text for block in BLOCKS if block.language == "toml"]
    for number, text in enumerate(files):
        path = tmp_path / f"{number}.toml"
        path.write_text(text, encoding="utf-8")
        tables = {name for name, value in tomllib.loads(text).items() if isinstance(value, dict)}
        for name in {"worker" if name in ("features", "kafka") else name for name in tables}:
            options = resolve(build_parser(load(name), name).parse_args(["--config", str(path)]), environ={})
            if "kafka" in tables and "ssl.ca.location" not in options.kafka:  # a file that is not here
                connection(options)  # librdkafka knows the settings
    assert len(files) >= 2


def test_the_reference_is_that_of_the_code() -> None:
    written = TEXTS[ROOT / "docs/reference.md"]
    assert written == reference(), "run `python docs/make_reference.py`"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", TEXTS[path]) + re.findall(r'(?:src|href)="([^"]+)"', TEXTS[path])
    for link in links:
        file, _, anchor = link.partition("#")
        if not link.startswith("http"):
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link


def _anchors(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([\w-]+)"></a>', text))


def test_the_readme_is_short_and_links_the_picture_and_every_page() -> None:
    assert len(TEXTS[README].splitlines()) <= 300
    wanted = [".github/regret.svg", *(f"docs/{path.name}" for path in TEXTS if path != README)]
    assert [link for link in wanted if link not in TEXTS[README]] == []


def test_comments_in_the_code_refer_to_sections_that_exist() -> None:
    code = "".join(
        path.read_text(encoding="utf-8") for top in ("worker", "tests") for path in (ROOT / top).rglob("*.py")
    )
    references = set(re.findall(r"docs/(\w+)\.md §(\d+)", code))
    assert len(references) >= 5
    assert [one for one in references if f"\n## {one[1]}. " not in TEXTS[ROOT / f"docs/{one[0]}.md"]] == []


def test_every_kind_of_trouble_is_explained() -> None:
    explained = re.findall(r"^- \*\*`([\w-]+)`\*\*( \(critical\))?: ", TEXTS[ROOT / "docs/operations.md"], re.M)
    kinds = [(name, " (critical)" if kind.level == "bad" else "") for name, kind in TROUBLES.items()]
    assert explained == kinds


def test_every_reason_of_a_dead_letter_is_explained() -> None:
    (table,) = re.findall(r"\| reason \| usual cause \|\n(.*?)\n\n", TEXTS[ROOT / "docs/operations.md"], re.DOTALL)
    assert [reason for reason in DEAD_LETTER_REASONS if f"`{reason}`" not in table] == []


def test_every_problem_over_http_has_its_status_and_an_advice() -> None:
    (table,) = re.findall(
        r"\| status \| reason \| what to do \|\n(.*?)\n\n", TEXTS[ROOT / "docs/clients.md"], re.DOTALL
    )
    rows = [
        (re.findall(r"\d+", status), re.findall(r"`(.*?)`", reasons))
        for status, reasons, _ in (line.split(" | ") for line in table.splitlines()[1:])
    ]
    assert sorted(reason for _, reasons in rows for reason in reasons) == sorted(PROBLEMS)
    wrong = [reasons for statuses, reasons in rows if {str(PROBLEMS[one].status) for one in reasons} != set(statuses)]
    assert wrong == []


def test_every_alert_is_explained() -> None:
    rules = (ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8")
    alerts = dict.fromkeys(re.findall(r"- alert: (\w+)", rules))
    explained = re.findall(r'^- <a id="(\w+)"></a>\*\*(\w+)\*\* \(', TEXTS[ROOT / "docs/operations.md"], re.M)
    assert explained == [(name.lower(), name) for name in alerts]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_the_code_that_a_page_names_exists(path: Path) -> None:
    """Check `package/file.py`, `package/file.py:Class.method` and `test_name`, in `worker/`, `tests/` or the root."""
    for file, name in re.findall(r"`((?:\w+/)+\w+\.py)(?::([\w.]+))?`", TEXTS[path]):
        found = next((top / file for top in (ROOT / "worker", ROOT / "tests", ROOT) if (top / file).exists()), None)
        assert found is not None, file
        source = found.read_text(encoding="utf-8")
        for part in name.split(".") if name else ():
            assert re.search(rf"^\s*(?:async def|def|class) {part}\b", source, re.M), f"{file}:{name}"
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", TEXTS[path]):
        assert f"def {name}(" in tests, name


@pytest.mark.parametrize("block", SCHEMAS, ids=str)
def test_the_examples_of_events_are_valid(block: Block) -> None:
    schema = json.loads((ROOT / "schemas" / f"{block.name}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(json.loads(block.text))


def test_the_tokens_of_the_examples_are_those_of_their_displays() -> None:
    (decision,) = (json.loads(block.text) for block in SCHEMAS if block.name == "decision")
    feedback = [json.loads(block.text) for block in SCHEMAS if block.name == "click"]
    assert len(feedback) == 1
    for event in feedback:
        assert event["token"] == decision["tokens"][event["position"] - 1]
        display = {"session_id": event["session_id"], "position": event["position"], "arm": event["arm"]}
        assert check_token(Secret(SECRET), event["token"], **display) == decision["arrived_at"]


def test_what_is_not_run_names_files_that_exist() -> None:
    text = "".join(block.text for block in SHELL if block.kind == "elsewhere")
    named = re.findall(r"(?:-f|-k) (\S+)", text) + re.findall(r"(?<![\w/])((?:tests|deploy|\.ci)/\S+)", text)
    assert {"deploy/compose.yaml", "deploy/kubernetes", "tests/kafka", ".ci/run"} <= set(named)
    assert [path for path in named if not (ROOT / path).exists()] == []


# ── running it ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Tour:
    """Runs blocks as they stand, but in a folder and on ports of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        named = re.findall(r"127\.0\.0\.1:(\d+)", "".join(block.text for block in SHELL))
        self.ports = {port: free_port() for port in named}
        own = re.compile(r"ADCASCADE_(?!KAFKA_CACHE$)")
        kept = {name: value for name, value in os.environ.items() if not own.match(name)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**kept, **SMALL, "PATH": path}

    def script(self, block: Block) -> str:
        text = block.text.replace("/tmp/adcascade", str(self.folder)).replace(".github/", f"{self.folder}/")
        for port, own in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(own), text)
        # Not the .venv of whoever runs the tests: the interpreter that runs them.
        return "set -euo pipefail\n" + re.sub(r"^export PATH=\S+ && ", "", text, flags=re.M)

    def run(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-c", self.script(block)],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def service(self, block: Block) -> Iterator[None]:
        log = self.folder / f"{block.name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", self.script(block).rstrip().replace("set -euo pipefail\n", "exec ")],
                cwd=ROOT, env=self.environment, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            eventually(lambda: _is_up(self, block.name), what=f"{block.name} is up")
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0, log.read_text(encoding="utf-8")[-4000:]
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_commands_that_need_nothing_run_as_they_stand(tmp_path: Path) -> None:
    tour = Tour(tmp_path)
    output = "".join(tour.run(block) for block in SHELL if block.kind == "run")
    assert (tmp_path / "regret.svg").stat().st_size > 10_000
    assert output.count("no mismatch") >= 2
    assert "as served" in output


@pytest.mark.slow
def test_the_commands_on_kafka_lead_from_a_broker_to_a_replayed_log(tmp_path: Path) -> None:
    fetched = subprocess.run([BROKER, "fetch"], capture_output=True, text=True, check=False)
    if fetched.returncode:
        lacking(fetched.stderr.strip())
    tour = Tour(tmp_path)
    kinds = {"kafka", "service"} | ({"kcat"} if shutil.which("kcat") else set())
    # The README ends with stopping the broker, which the other pages use too.
    way = sorted((block for block in SHELL if block.kind in kinds), key=lambda block: "broker stop" in block.text)
    output = ""
    with ExitStack() as stack:
        kill = [BROKER, "stop", "--kill", "--data-dir", tmp_path / "kafka"]
        stack.callback(subprocess.run, kill, capture_output=True, check=False)
        services = stack.enter_context(ExitStack())
        for block in way:
            if block.kind == "service":
                if IN_CI or block.name == "worker" or shutil.which(block.name):
                    services.enter_context(tour.service(block))
                continue
            if "broker stop" in block.text:
                services.close()
            output += tour.run(block)
    assert output.count("created") == 9
    assert "0 without a decision" in output
    assert "winter-coat: added at 0.8" in output
    assert "slate: " in output
    versions = re.search(r"versions 0 to (\d+): (\d+) of (\d+) folded again", output)
    assert versions is not None and int(versions[1]) >= 3
    assert "no mismatch" in output


def _is_up(tour: Tour, name: str) -> bool:
    if name == "prometheus":
        query = "/api/v1/query?query=adcascade_parameters_version"
        status, answer = page(f"http://127.0.0.1:{tour.ports['9091']}{query}")
        return status == 200 and bool(json.loads(answer)["data"]["result"])
    pages = {"/readyz": "ready", "/metrics": "adcascade_build_info", "/": "<title>adcascade"}
    answers = {path: page(f"http://127.0.0.1:{tour.ports['9464']}{path}") for path in pages}
    return all(status == 200 and pages[path] in text for path, (status, text) in answers.items())
