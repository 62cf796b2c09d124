"""`adcascade serve` as a whole: started, asked, ordered, stopped."""

from __future__ import annotations

import json
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.serve.process import ServeProcess
from worker.cli.main import main


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # A folder with a long name: the path of a socket may have about a hundred bytes.
    folder = tmp_path_factory.mktemp("x" * 120)
    with ServeProcess(folder, "--lateness", "200ms", "--deadline", "60s") as running:
        yield running


def ask(server: ServeProcess, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(server.url + path, data), timeout=300) as response:
        return response.read() if path == "/metrics" else json.load(response)


def test_a_session_is_served_over_http(server):
    decision = ask(server, "/v1/sessions", {"session_id": "s", "context": [0.5, -1]})
    feedback = {"position": 1, "arm": decision["arm"], "clicked": True}
    assert ask(server, "/v1/sessions/s/feedback", feedback) == {"session_id": "s", "ended": "clicked"}
    assert ask(server, "/v1/sessions/s")["ended"] == "clicked"


def test_status_and_metrics_are_on_the_same_port(server):
    assert ask(server, "/status.json")["runner"] == "serve"
    metrics = ask(server, "/metrics").decode()
    assert "adcascade_arrivals_total" in metrics
    assert "adcascade_http_requests_total" in metrics


def test_orders_go_through_the_running_process(server, capsys, tmp_path):
    state = ("--state", str(server.state), "--json", str(tmp_path / "result.json"))
    assert main(["arms", "add", "glove", "--reward", "9", *state]) == 0
    version = json.loads((tmp_path / "result.json").read_text())["version"]
    assert main(["arms", "list", *state]) == 0
    listed = json.loads((tmp_path / "result.json").read_text())
    assert listed["version"] >= version
    assert "glove" in [arm["arm"] for arm in listed["arms"]]
    assert main(["parameters", "freeze", *state]) == 0
    assert main(["parameters", "tag", "frozen", *state]) == 0
    assert main(["parameters", "unfreeze", *state]) == 0
    assert main(["parameters", "rollback", "frozen", *state]) == 0
    assert main(["parameters", "rollback", "nothing", *state]) == 2
    assert ask(server, "/status.json")["parameters"]["version"] > version


def test_a_second_server_does_not_start_on_the_same_folder(server, capsys):
    assert main(["serve", "--state", str(server.state), "--port", "0"]) == 1
    assert "another process uses" in capsys.readouterr().err


def test_a_full_disk_ends_the_server_and_nothing_is_answered_that_is_not_kept(tmp_path: Path):
    server = ServeProcess(tmp_path, "--deadline", "60s")
    answered: dict[str, Any] = {}
    with server:
        assert server.stop() == 0
        server.start(largest=400_000)
        with suppress(OSError, HTTPException):
            while len(answered) < 10_000:
                name = f"s{len(answered)}"
                answered[name] = ask(server, "/v1/sessions", {"session_id": name, "context": [0.5, -1]})
        assert server.process is not None
        assert server.process.wait(300) == 1
        assert "cannot be written" in server.output
        assert "Traceback" not in server.output
        server.start()
        assert answered
        for name, decision in answered.items():
            assert ask(server, f"/v1/sessions/{name}") == decision


def test_a_served_folder_takes_orders_only_while_it_is_served(tmp_path, capsys):
    with ServeProcess(tmp_path) as running:
        assert running.stop() == 0
    assert main(["arms", "list", "--state", str(running.state)]) == 0
    assert main(["arms", "retire", "hat", "--state", str(running.state)]) == 1
    assert "does not run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dim", "2", "--state", __file__], f"cannot use {__file__} as a state folder"),
        (["--dim", "2", "--record", "-"], "plain file"),
        (["--dim", "2", "--record", "log.gz"], "plain file"),
        (["--dim", "2", "--api-keys", "nowhere"], "--api-keys nowhere"),
        (["--dim", "2", "--progress-interval", "1ms"], "--progress-interval"),
        (["--port", "0"], "add [features.context] to the --config file, or give --dim N, for lists of numbers"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_served(tmp_path: Path, capsys, arguments, message):
    assert main(["serve", "--state", str(tmp_path / "state"), *arguments]) == 2
    assert message in capsys.readouterr().err
